"""Are a GGUF file's answers and probabilities those of llama.cpp?

The first difference of two greedy answers comes with its gap: how much likelier a server holds its
own token than the other's, in nats, after the beginning that both share. A small one is a tie that
rounding decides; a large one in both servers' eyes is a defect.

Perplexity is llama.cpp's way (`llama-perplexity`): the text in pieces of 512 tokens, of which the
later halves count, on llama.cpp's own token ids.
"""

import math
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.gguf.requests import ask
from benchmarks.peers.llama_peer import Llama
from benchmarks.shared.compare import Divergence
from benchmarks.shared.upstream_servers import Server

PIECE: Final = 512
_FINAL: Final = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
# The other's token is among so many likeliest ones, or the gap is not told.
_LIKELIEST: Final = 100
_TIMEOUT_S: Final = 600.0


# ---- greedy answers ---------------------------------------------------------------------------


def gaps(
    divergences: Sequence[Divergence],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    ours: Server,
    llama: Server,
) -> list[dict[str, Any]]:
    """Each divergence of our answers from llama.cpp's (`answers`), with both servers' gaps."""
    found = []
    for one in divergences:
        theirs, own = one.reference_token, one.other_token
        shared = [*prompts[one.index], *answers[one.index][: one.position]]
        entry: dict[str, Any] = {
            "prompt": one.index,
            "position": one.position,
            "our_gap": None,
            "its_gap": None,
        }
        if theirs is not None and own is not None:
            entry["our_gap"] = log_probability(ours, shared, own) - log_probability(
                ours, shared, theirs
            )
            entry["its_gap"] = llama_gap(llama, shared, theirs, own)
        found.append(entry)
    return found


def log_probability(server: Server, token_ids: Sequence[int], token: int) -> float:
    """Return what our server gives a token after these, in nats."""
    return prompt_log_probabilities(server, [*token_ids, token])[-1]


def prompt_log_probabilities(server: Server, token_ids: Sequence[int]) -> list[float]:
    """Return what our server gives each token of a prompt but the first, in nats."""
    body = {
        "model": "large",
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }
    rows = ask(server, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    pairs = zip(rows[1:], token_ids[1:], strict=True)
    return [float(row[str(token)]["logprob"]) for row, token in pairs]


def llama_gap(server: Server, token_ids: Sequence[int], token: int, other: int) -> float | None:
    """How much likelier llama.cpp holds `token` than `other`; None where `other` is far off."""
    body = {
        "prompt": list(token_ids),
        "n_predict": 1,
        "samplers": ["top_k"],
        "top_k": 1,
        "n_probs": _LIKELIEST,
    }
    (first,) = ask(server, "/completion", body)["completion_probabilities"]
    known = {one["id"]: float(one["logprob"]) for one in first["top_logprobs"]}
    return known[token] - known[other] if token in known and other in known else None


# ---- perplexity -------------------------------------------------------------------------------


def perplexities(
    text: str,
    *,
    num_pieces: int,
    num_threads: int,
    file: Path,
    llama: Llama,
    tokenizer: Server,
    servers: Mapping[str, Server],
) -> dict[str, Any]:
    """llama.cpp's perplexity of the text's beginning, our servers', and those over llama.cpp's.

    `tokenizer`: a server of llama.cpp, for its token ids. Raises SystemExit for too short a text.
    """
    token_ids = llama_tokens(tokenizer, text)
    if len(token_ids) < PIECE * max(2, num_pieces):
        raise SystemExit(f"--text has {len(token_ids)} tokens, fewer than {PIECE * num_pieces}.")
    beginning = llama_tokens(tokenizer, "")
    pieces = [token_ids[at : at + PIECE] for at in range(0, PIECE * num_pieces, PIECE)]
    pieces = [[*beginning, *piece[len(beginning) :]] for piece in pieces]
    theirs, error = llama_perplexity(text, num_pieces, num_threads, file, llama)
    ours = {name: perplexity(server, pieces) for name, server in servers.items()}
    return {
        "num_tokens": num_pieces * _num_scored(),
        "llama.cpp": theirs,
        "llama.cpp_standard_error": error,
        "outrider": ours,
        "over_llama": {name: value / theirs for name, value in ours.items()},
    }


def perplexity(server: Server, pieces: Sequence[Sequence[int]]) -> float:
    """Return our server's perplexity of the later halves of the pieces."""
    nats = [
        -value
        for piece in pieces
        for value in prompt_log_probabilities(server, piece)[-_num_scored() :]
    ]
    return math.exp(math.fsum(nats) / len(nats))


def _num_scored() -> int:
    return PIECE - PIECE // 2 - 1


def llama_tokens(server: Server, text: str) -> list[int]:
    """Return a text's token ids, behind what llama.cpp puts before each text."""
    body = {"content": text, "add_special": True, "parse_special": False}
    tokens: list[int] = ask(server, "/tokenize", body)["tokens"]
    return tokens


def llama_perplexity(
    text: str, num_pieces: int, num_threads: int, file: Path, llama: Llama
) -> tuple[float, float]:
    """Run llama.cpp's own program; its estimate and standard error."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "text.txt")
        written.write_text(text, encoding="utf-8")
        command: list[str | Path] = [llama.perplexity, "-m", file, "-f", written, "--no-escape"]
        command += ["-c", str(PIECE), "-b", str(PIECE), "--chunks", str(num_pieces)]
        command += ["-t", str(num_threads)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    return read_perplexity(done.stdout + done.stderr)


def read_perplexity(output: str) -> tuple[float, float]:
    """Read the last line of llama-perplexity. Raises RuntimeError with the end of what it said."""
    found = _FINAL.search(output)
    if found is None:
        raise RuntimeError(f"llama-perplexity failed: {output[-1000:]}")
    return float(found[1]), float(found[2])
