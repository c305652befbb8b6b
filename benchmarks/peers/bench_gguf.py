"""How fast does a public model answer real prompts, beside other programs on the same GGUF file?

Method: each server is a process of its own with the same number of threads: Outrider with the file
as it comes, plain and with repeated text as drafter (its default), with a head as well where
`--drafter` names one, and plain with each of `--quantize`; and those of these programs that are
named: llama.cpp's server from the wheel
`xllamacpp` (`--llama-python`); the same built for this processor (`--llama`, an environment as
benchmarks/peers/llama_peer.py says), plain and with its own drafting from the prompt
(`--llama-drafting`); OpenVINO GenAI (`--openvino-python`), plain and with its prompt lookup;
transformers with eager attention (`--transformers-python`, which needs gguf and accelerate). A
program that is not named is left out, and the results say so.

Each prompt is a round: every server answers it before the next one is asked (A B C A B C), and
another one begins each time. No prompt is asked twice, since Outrider remembers answers: each
temperature has prompts of its own. All get the same token ids. `--prompts` are one or several
files; a prompt's domain is its category or its file, and domains take turns; `--per-domain` bounds
them at each temperature, `--repeats` the rounds. Then each server gets `--num-long` prompts of
`--long-prompt` tokens, none of which begins as another does. Last, with `--text` and `--llama`, the
perplexity of the text's beginning as llama.cpp's own program counts it.

Reading it: `tok/s` is of decoding, from the first token to the last, as a client sees it. Ratios
are taken within a round: their median, with the least and the greatest in brackets; rounds in which
an answer has under 16 tokens are left out of them. `first token` is of the long prompts. `equal`
counts the first tokens of greedy answers that are llama.cpp's; `gap` is how much likelier each of
both holds its own token at the first difference, in nats. `a pass` is tokens a pass, `accepted` the
share of verified guesses; `by depth` the shares at depths 1, 2, 3 and so on. The file has what each
program says of its build. The published wheels of llama.cpp are built for AVX2.
`--instruction-set avx2` holds Outrider, oneDNN and torch to AVX2 on a processor that has more; a
native llama.cpp uses what it was built with.

    python -m benchmarks.peers.bench_gguf --prompts prompts/mt_bench_question.jsonl \\
        --llama-python runs/xllamacpp-env/bin/python --llama runs/llama-env
"""

import hashlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.models.quality import beginning_of
from benchmarks.peers.gguf.figures import case_of, domains_of, fastest_peer, first_of
from benchmarks.peers.gguf.prompts import (
    MODEL,
    dealt,
    long_prompts,
    model_file,
    prompt_of,
    prompts_by_domain,
)
from benchmarks.peers.gguf.requests import Answer
from benchmarks.peers.gguf.servers import (
    DRAFTING,
    HEAD,
    PLAIN,
    PLAIN_PEERS,
    Programs,
    Started,
    Starter,
)
from benchmarks.peers.gguf.tables import tables_of
from benchmarks.peers.gguf.text import PIECE, gaps, perplexities
from benchmarks.peers.llama_peer import Llama
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, option
from benchmarks.shared.prompts import Prompt, load_tokenizer, stop_token_ids
from benchmarks.shared.turns import Case, Turns
from outrider.gateway.wiring.checkpoints import checkpoint
from outrider.gateway.wiring.hardware import usable_physical_cores
from outrider.kernels.cpu.product_library import InstructionSet, product_support

_WARM_UP: Final = ("Name a colour.", "Name three rivers of Europe, and where each of them ends.")
_NONE: Final = "none"
# A token of English has fewer bytes.
_MOST_TOKEN_BYTES: Final = 8
_LARGEST_DIFFERENCE: Final = 0.005


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(24, "prompts at each temperature, each a round, at most")
    per_domain: int | None = option(None, "prompts of a domain at each temperature, at most")
    temperatures: tuple[float, ...] = option((0.0, 0.7), "the first one's answers are compared")
    gguf: Path | None = option(None, f"file; default: {MODEL}, which is fetched once")
    prompts: tuple[Path, ...] = option((), "JSON lines as in ../shared/data; default: the demo's")
    max_new: int = option(96, "longest answer, in tokens")
    long_prompt: int = option(1000, "tokens of a long prompt")
    num_long: int = option(5, "long prompts")
    text: Path | None = option(None, "file whose perplexity is measured, with --llama")
    pieces: int = option(12, f"pieces of that text, of {PIECE} tokens")
    threads: int | None = option(None, "of each server; default: all physical cores")
    quantize: tuple[str, ...] = option(("exact", "int8", "int4"), "of Outrider; or none")
    drafter: Path | None = option(None, "folder of a head of that model, which drafts as well")
    llama_python: Path | None = option(None, "interpreter that has xllamacpp")
    llama: Path | None = option(None, "environment that has llama.cpp, built for this processor")
    llama_drafting: tuple[str, ...] = option(("ngram-simple",), "of that llama.cpp; or none")
    openvino_python: Path | None = option(None, "interpreter that has openvino-genai")
    transformers_python: Path | None = option(None, "interpreter that has transformers and gguf")
    instruction_set: Literal["best", "avx2"] = option("best", "that Outrider may use")

    @property
    def programs(self) -> Programs:
        """What runs beside Outrider."""
        return Programs(
            schemes=[name for name in self.quantize if name != _NONE],
            drafter=self.drafter,
            llama_python=self.llama_python,
            llama=self.llama,
            llama_drafting=[name for name in self.llama_drafting if name != _NONE],
            openvino_python=self.openvino_python,
            transformers_python=self.transformers_python,
        )


# ---- measuring --------------------------------------------------------------------------------


def measure(options: Options) -> Results:
    """Return rates by server and domain, times to the first token, ratios, and what is equal."""
    file, text = model_file(options.gguf), _text(options)
    folder = Path(checkpoint(str(file)))
    tokenizer = load_tokenizer(folder)
    hands = dealt(
        prompts_by_domain(tokenizer, options.prompts),
        len(options.temperatures),
        per_domain=options.per_domain,
        most=options.repeats,
    )
    starter = Starter(
        file=file,
        num_threads=options.threads or usable_physical_cores(),
        is_avx2=options.instruction_set == "avx2",
        stop=stop_token_ids(folder, tokenizer),
    )
    long = long_prompts(hands[0], options.long_prompt, options.num_long + 1)
    with starter.started(options.programs) as started:
        for answer in started.answers.values():
            for words in _WARM_UP:
                answer(prompt_of(tokenizer, words, "warm-up").token_ids, 24, 0.0)
            answer(long[-1], 24, 0.0)
        turns = [
            _take(started, [prompt.token_ids for prompt in hand], options.max_new, temperature)
            for temperature, hand in zip(options.temperatures, hands, strict=True)
            if hand
        ]
        first = _take(started, long[:-1], 1, 0.0)
        cases = {
            name: case_of(name, turns[0], hands[0], started.peers)
            | first_of(name, first, options.long_prompt, started.peers)
            for name in started.answers
        }
        differences = _differences(started, turns[0], hands[0])
        found = text and _perplexities(options, starter, started, text)
    return {
        "file": {
            "name": file.name,
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        },
        "threads": starter.num_threads,
        "instructions": _instructions(options),
        "builds": started.builds,
        "peers": started.peers,
        "num_prompts": [len(hand) for hand in hands],
        "median_prompt_tokens": statistics.median(len(one.token_ids) for one in hands[0]),
        "cases": cases,
        "domains": {
            str(temperature): domains_of(part, hand, started.peers)
            for temperature, part, hand in zip(options.temperatures, turns, hands, strict=False)
        },
        "differences": differences,
        "perplexity": found,
    }


def _instructions(options: Options) -> str:
    best = product_support().instruction_set
    return (min(best, InstructionSet.AVX2) if options.instruction_set == "avx2" else best).name


def _take(
    started: Started, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float
) -> Turns:
    def case_for(answer: Answer) -> Case:
        return lambda question: answer(prompts[question], max_tokens, temperature)

    return Turns.take(
        {name: case_for(answer) for name, answer in started.answers.items()},
        num_questions=len(prompts),
        num_rounds=1,
        num_warm_up=0,
        description=f"up to {max_tokens} tokens, temperature {temperature}",
    )


def _differences(
    started: Started, turns: Turns, prompts: Sequence[Prompt]
) -> dict[str, list[dict[str, Any]]]:
    """Return where plain answers first differ from each llama.cpp's, and by how much."""
    return {
        name: gaps(
            turns.compare(PLAIN, name, prompts).divergences,
            [prompt.token_ids for prompt in prompts],
            turns.answers(name),
            ours=started.gateways[PLAIN],
            llama=server,
        )
        for name, server in started.llamas.items()
    }


def _text(options: Options) -> str | None:
    """Return enough of the text. Raises SystemExit where it or llama.cpp's program is absent."""
    if options.text is None:
        return None
    if options.llama is None:
        raise SystemExit("--text needs --llama, whose llama-perplexity it is compared with.")
    places = (options.text, Path(os.environ.get("OUTRIDER_DATA", "")) / options.text)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise SystemExit(f"--text {options.text}: no such file.")
    return beginning_of(found, options.pieces * PIECE * _MOST_TOKEN_BYTES)


def _perplexities(
    options: Options, starter: Starter, started: Started, text: str
) -> dict[str, Any] | None:
    if options.llama is None:
        return None
    return perplexities(
        text,
        num_pieces=options.pieces,
        num_threads=starter.num_threads,
        file=starter.file,
        llama=Llama.found_in(options.llama),
        tokenizer=next(reversed(started.llamas.values())),
        servers={
            name: one for name, one in started.gateways.items() if name not in (DRAFTING, HEAD)
        },
    )


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a server, then the long prompts, a row a domain, the differences, the perplexity."""
    return tables_of(results, max_new=options.max_new, long_prompt=options.long_prompt)


def goals(results: Results) -> list[Goal]:
    """Return the goals of the file as it comes; those over peers only where one ran."""
    plain, drafting = results["cases"][PLAIN], results["cases"][DRAFTING]
    wanted: list[tuple[str, float | None, float, bool]] = []
    best = fastest_peer(plain, [name for name in results["peers"] if name in PLAIN_PEERS])
    if best is not None:
        first = plain["first_token_over"].values()
        wanted = [
            (f"plain decoding over {best}'s", plain["over"][best].median, 1.0, True),
            ("first token over the soonest's", max(one.median for one in first), 1.0, False),
        ]
    best = fastest_peer(drafting, results["peers"])
    if best is not None:
        wanted.append((f"drafting over {best}", drafting["over"][best].median, 1.0, True))
    over_plain = drafting["over"][PLAIN]
    if over_plain is not None:
        wanted.append(("drafting over plain", over_plain.median, 0.99, True))
    if results["perplexity"] is not None:
        apart = abs(results["perplexity"]["over_llama"][PLAIN] - 1.0)
        wanted.append(("perplexity apart from llama.cpp's", apart, _LARGEST_DIFFERENCE, False))
    return [
        Goal(words=words, measured=measured, bound=bound, at_least=at_least)
        for words, measured, bound, at_least in wanted
        if measured is not None
    ]


def _variant(options: Options) -> str:
    names = [path.name.split(".")[0] for path in options.prompts]
    prompts = "domains" if len(names) > 1 else (names or ["demo"])[0]
    model = MODEL if options.gguf is None else options.gguf.stem
    return "-".join([model, prompts, _instructions(options).lower()])


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant=_variant
)

if __name__ == "__main__":
    BENCHMARK.start()
