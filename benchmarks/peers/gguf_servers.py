"""The servers of bench_gguf, each a process of its own, and what asks them for an answer."""

import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.turns import Turn
from benchmarks.shared.upstream_servers import HOST, Server, gateway_server, xllamacpp_server

PLAIN: Final = "Outrider plain"
DRAFTING: Final = "Outrider"
LLAMA: Final = "llama.cpp"
_OURS: Final[Mapping[str, tuple[str, ...]]] = {
    PLAIN: ("--no-speculation",),
    DRAFTING: (),
    "Outrider exact, plain": ("--no-speculation", "--quantize", "exact"),
    "Outrider int8, plain": ("--no-speculation", "--quantize", "int8"),
    "Outrider int4, plain": ("--no-speculation", "--quantize", "int4"),
}
_AVX2: Final = {
    "OUTRIDER_CPU": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
_TIMEOUT_S: Final = 300.0
_TELL: Final = "import xllamacpp as x; print(x.__version__); print(x.get_system_info())"


Answer = Callable[[Sequence[int], int], Turn]
"""Answers token ids with at most so many tokens."""


def ask_outrider(server: Server, token_ids: Sequence[int], max_tokens: int) -> Turn:
    """Answer greedily, by the API that OpenAI's clients use."""
    body = {
        "model": "large",
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return _turn(
        server,
        "/v1/completions",
        body,
        tokens_of=lambda event: [id for one in event["choices"] for id in one["token_ids"]],
        mean_of=lambda event: (event.get("outrider") or {}).get("mean_emitted_tokens"),
    )


def ask_llama(server: Server, token_ids: Sequence[int], max_tokens: int) -> Turn:
    """Answer greedily, by llama.cpp's own API, whose streams name tokens."""
    body = {
        "prompt": list(token_ids),
        "n_predict": max_tokens,
        "samplers": ["top_k"],
        "top_k": 1,
        "stream": True,
        "return_tokens": True,
    }
    return _turn(server, "/completion", body, tokens_of=lambda event: event["tokens"])


def _turn(
    server: Server,
    path: str,
    body: Mapping[str, Any],
    *,
    tokens_of: Callable[[Mapping[str, Any]], list[int]],
    mean_of: Callable[[Mapping[str, Any]], float | None] = lambda _: None,
) -> Turn:
    """Ask, and time the events that bring tokens; they are parsed when the clock has stopped."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        sent_s = time.perf_counter()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{server.name}: {response.read()[:500].decode(errors='replace')}")
        lines = [(time.perf_counter(), line) for line in response if line.startswith(b"data: {")]
    events = [(arrived_s, json.loads(line.removeprefix(b"data: "))) for arrived_s, line in lines]
    arrivals = [(at_s, tokens) for at_s, event in events if (tokens := tokens_of(event))]
    means = [mean for _, event in events if (mean := mean_of(event))]
    if not arrivals:
        return Turn(token_ids=[], wall_s=time.perf_counter() - sent_s)
    token_ids = [token for _, tokens in arrivals for token in tokens]
    return Turn(
        token_ids=token_ids,
        wall_s=arrivals[-1][0] - sent_s,
        decode_s=arrivals[-1][0] - arrivals[0][0],
        num_decoded_tokens=len(token_ids) - len(arrivals[0][1]),
        num_passes=round(len(token_ids) / means[-1]) if means else 0,
    )


@contextlib.contextmanager
def started(
    file: Path, *, num_threads: int, is_avx2: bool, llama_python: Path | None
) -> Iterator[dict[str, Answer]]:
    """All servers, started; by name, what asks each. `is_avx2`: ours are held to AVX2."""
    variables = _AVX2 if is_avx2 else {}
    shared = ("--large", str(file), "--small", "none", "--num-threads", str(num_threads))
    answers: dict[str, Answer] = {}
    with contextlib.ExitStack() as stack:
        for name, flags in _OURS.items():
            given = (*shared, *flags, "--set", "database_url=none")
            server = gateway_server([], options=given, variables=variables)
            answers[name] = partial(ask_outrider, stack.enter_context(server))
        if llama_python is not None:
            server = xllamacpp_server(file, python=llama_python, num_threads=num_threads)
            answers[LLAMA] = partial(ask_llama, stack.enter_context(server))
        yield answers


def llama_build(python: Path) -> dict[str, str] | None:
    """Return the properties of llama.cpp's build; None where the interpreter has no llama.cpp."""
    try:
        told = subprocess.run(
            [python, "-c", _TELL], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version, instructions = told.stdout.strip().splitlines()[-2:]
    return {"xllamacpp": version, "instructions": instructions.strip(" |")}
