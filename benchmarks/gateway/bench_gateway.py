"""What does HTTP cost over using the engine directly?

Method: `outrider serve` runs on loopback with the same models, precision and threads as an engine
in this process. Both answer the same conversations: over HTTP with server-sent events (chat
template, tokenising, the engine in its own process, detokenising), and directly by stepping the
engine. At each number of concurrent clients both run in turn, round by round; each client sends its
next request when it has its answer. No prefix cache. The client is a bare socket and shares the
cores with the gateway and the engine, as a user's on the same machine would: on two cores that is
part of what is measured. Usage is recorded, as by default, in a database deleted afterwards.

Reading it: `ttft` is from sending to the first event, and directly from submitting to the first
token; `overhead` their difference. `per token` is the wall time of the whole run divided by its
tokens, and `+us` what HTTP adds to it.

    python -m benchmarks.gateway.bench_gateway --dtype bfloat16
"""

import argparse
import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.shared.driving import (
    Bench,
    blocks_for,
    build_bench,
    draft_config,
    drive,
    load_runner,
    make_requests,
    tree_budget,
)
from benchmarks.shared.grown import grown_large, grown_small
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    choose_threads,
    console,
    measure_in_turn,
    milliseconds,
    paired_ratio,
    prepare,
    show_table,
    start,
    variant_name,
    without_engine_environment,
    write_results,
)
from benchmarks.shared.http_stream import ChatConnection, StreamedAnswer
from benchmarks.shared.prompts import Prompt, load_prompts, load_tokenizer, stop_token_ids
from benchmarks.shared.record import ROOT
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.params import Tier

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many clients of a tier."""

    tier: Tier
    num_clients: int

    @property
    def name(self) -> str:
        """For tables and results."""
        return f"{self.tier}, {self.num_clients} clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run of a case, either way."""

    wall_s: float
    num_tokens: int
    ttft_s: list[float]

    @property
    def token_s(self) -> float:
        """Wall time per token."""
        return self.wall_s / self.num_tokens


@contextlib.contextmanager
def serving(arguments: argparse.Namespace, folders: dict[str, str]) -> Iterator[int]:
    """`outrider serve` on a free port, with a new database, until the context ends."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "outrider.gateway.cli",
        "serve",
        "--host",
        _HOST,
        "--port",
        str(port),
    ]
    command += ["--large", folders["large"], "--small", folders["small"]]
    command += ["--dtype", arguments.dtype, "--device", arguments.device]
    command += ["--num-threads", str(arguments.threads), "--log-level", "WARNING"]
    command += ["--set", "engine.prefix_caching=false", "--set", "engine.kv_cache_gib=0.5"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        command += ["--set", f"database_url=sqlite:///{folder}/bench.db"]
        with without_engine_environment():
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            if not _is_ready_in_time(process, port):
                log.seek(0)
                console.print(log.read().decode(errors="replace")[-2000:], markup=False)
                raise SystemExit("outrider serve did not get ready; the end of its log is above")
            yield port
        finally:
            process.terminate()
            try:
                process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready_in_time(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the gateway serves, ends or takes too long."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"http://{_HOST}:{port}/ready", timeout=5),
        ):
            return True
        time.sleep(0.2)
    return False


def run_http(port: int, case: Case, prompts: Sequence[Prompt], *, max_tokens: int) -> Round:
    """All prompts over HTTP, `num_clients` at a time."""

    async def client(waiting: Iterator[Prompt], answers: list[StreamedAnswer]) -> None:
        async with ChatConnection(_HOST, port) as connection:
            for prompt in waiting:
                request = {
                    "model": case.tier,
                    "messages": list(prompt.messages),
                    "temperature": 0,
                    "max_tokens": max_tokens,
                }
                answers.append(await connection.chat(request))

    async def all_clients() -> tuple[float, list[StreamedAnswer]]:
        waiting = iter(prompts)
        answers: list[StreamedAnswer] = []
        started_s = time.perf_counter()
        await asyncio.gather(*(client(waiting, answers) for _ in range(case.num_clients)))
        return time.perf_counter() - started_s, answers

    wall_s, answers = asyncio.run(all_clients())
    return Round(
        wall_s=wall_s,
        num_tokens=sum(answer.num_tokens for answer in answers),
        ttft_s=[answer.ttft_s for answer in answers],
    )


def run_direct(
    bench: Bench, stop: tuple[int, ...], case: Case, prompts: Sequence[Prompt], *, max_tokens: int
) -> Round:
    """All prompts through the engine in this process."""
    requests = make_requests(prompts, tier=case.tier, max_tokens=max_tokens, stop=stop)
    done = drive(bench, requests, concurrency=case.num_clients)
    return Round(
        wall_s=done.wall_s,
        num_tokens=done.num_tokens,
        ttft_s=[answer.arrivals[0][0] - answer.submitted_s for answer in done.streams],
    )


def report(http: Sequence[Round], direct: Sequence[Round]) -> dict[str, Any]:
    """Figures of one case."""
    http_ttft = Summary.of(list(itertools.chain.from_iterable(done.ttft_s for done in http)))
    direct_ttft = Summary.of(list(itertools.chain.from_iterable(done.ttft_s for done in direct)))
    http_token = Summary.of([done.token_s for done in http])
    direct_token = Summary.of([done.token_s for done in direct])
    return {
        "num_tokens": http[-1].num_tokens,
        "num_tokens_direct": direct[-1].num_tokens,
        "http_ttft_s": http_ttft,
        "direct_ttft_s": direct_ttft,
        "ttft_overhead_s": http_ttft.median - direct_ttft.median,
        "http_token_s": http_token,
        "direct_token_s": direct_token,
        "token_overhead_s": http_token.median - direct_token.median,
        "http_tokens_per_s": 1.0 / http_token.median,
        "http_over_direct_rate": paired_ratio(
            [done.token_s for done in direct], [done.token_s for done in http]
        ),
    }


def build(arguments: argparse.Namespace) -> tuple[Bench, list[Prompt], tuple[int, ...]]:
    """The engine of this process, the prompts, and what ends an answer."""
    large_folder = grown_large(arguments)
    most = max(arguments.clients)
    tokenizer = load_tokenizer(large_folder)
    prompts = load_prompts(
        "tasks",
        tokenizer,
        num_prompts=max(arguments.num_prompts, 2 * most),
        seed=arguments.seed,
    )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    load = partial(
        load_runner,
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=blocks_for(num_sequences=most, num_tokens=longest + arguments.max_new),
    )
    with console.status("loading, and profiling step times"):
        runners: dict[Tier, ModelRunner] = {
            "large": load(large_folder),
            "small": load(grown_small(arguments)),
        }
        bench = build_bench(
            runners, draft_config=draft_config(arguments), budget=tree_budget(runners)
        )
    return bench, prompts, stop_token_ids(large_folder, tokenizer)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-prompts", type=int, default=12, help="requests of a single client")
    parser.add_argument("--max-new", type=int, default=64)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    choose_threads(arguments, grown_large(arguments))
    bench, prompts, stop = build(arguments)
    cases = [Case(tier="large", num_clients=1)]
    cases += [Case(tier="small", num_clients=number) for number in arguments.clients]
    results = {}
    folders = {"large": str(grown_large(arguments)), "small": str(grown_small(arguments))}
    with serving(arguments, folders) as port:
        for case in cases:
            number = max(arguments.num_prompts, 2 * case.num_clients)
            http = partial(run_http, port, case, max_tokens=arguments.max_new)
            direct = partial(run_direct, bench, stop, case, max_tokens=arguments.max_new)
            rounds = measure_in_turn(
                {
                    "http": partial(http, prompts[:number]),
                    "direct": partial(direct, prompts[:number]),
                },
                repeats=arguments.repeats,
                warm_up={
                    "http": partial(http, prompts[: case.num_clients + 1]),
                    "direct": partial(direct, prompts[: case.num_clients + 1]),
                },
                description=case.name,
            )
            results[case.name] = report(rounds["http"], rounds["direct"])
    show_table(
        "HTTP against the engine itself",
        ["", "ttft ms", "p99", "direct", "overhead", "per token ms", "direct", "+us", "tok/s"],
        [
            [
                name,
                milliseconds(entry["http_ttft_s"].median),
                milliseconds(entry["http_ttft_s"].p99),
                milliseconds(entry["direct_ttft_s"].median),
                milliseconds(entry["ttft_overhead_s"]),
                milliseconds(entry["http_token_s"].median),
                milliseconds(entry["direct_token_s"].median),
                f"{entry['token_overhead_s'] * 1e6:.0f}",
                f"{entry['http_tokens_per_s']:.0f}",
            ]
            for name, entry in results.items()
        ],
        caption="\n".join(
            f"{name}: {entry['num_tokens']} tokens over HTTP, {entry['num_tokens_direct']} directly"
            for name, entry in results.items()
            if entry["num_tokens"] != entry["num_tokens_direct"]
        ),
    )
    write_results("bench_gateway", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
