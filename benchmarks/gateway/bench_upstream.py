"""What does the gateway add to an upstream server's answers, and how many can it pass on?

Method: a mock server answers with fixed delays; clients ask it directly and through `outrider
serve`, in turn (A B A B), at the same moments: a Poisson process with the same seed on both sides,
so that request and request are paired. Mock, gateway and clients are a process each; the gateway
has one core for itself, mock and clients share another. The mock stamps each piece with the moments
when it got the request and when it sent the piece, and all read the same clock: what is compared is
the time between client and mock, so the mock's own delays and their noise cancel out. Throughput:
clients that each ask for one whole answer after the other, of a mock without delays.

A relay that only copies bytes is measured in the same turns on the gateway's core: what it adds is
what the machine takes for one process more on the way, and no gateway can add less. With
`--litellm DIR`, the virtual environment that LiteLLM's proxy lives in, it is measured there
too; it is stopped while others have their turn.

Reading it: `added` is the gateway's time minus the paired direct one. `first token` and `last
token` are both ways of a request, there and back; `chunk` is the way back alone, whose percentiles
are subtracted instead (chunks have no pairs). `busy` is the processor time that the server takes
for a request. The goals are in the last table.

    python -m benchmarks.gateway.bench_upstream --litellm runs/litellm-env
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.harness import (
    Summary,
    console,
    measure_in_turn,
    milliseconds,
    percentile,
    quiet_transformers,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.record import RESULTS, ROOT, package_version
from benchmarks.shared.upstream_servers import (
    Server,
    bucket_quantile,
    cores,
    gateway_server,
    litellm_server,
    loop_lag,
    mock_server,
    relay_server,
)

DIRECT: Final = "direct"
RELAY: Final = "relay"
OUTRIDER: Final = "outrider"
LITELLM: Final = "litellm"
PACED: Final = "paced"
"""The tier whose answers take their time; `fast` is without delays."""
FAST: Final = "fast"

_US: Final = 1e-6
_WINDOW_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Streamed requests of one window, in the order of sending; None for one that failed."""

    first_s: list[float | None]
    last_s: list[float | None]
    back_s: list[float]
    failures: list[str]
    busy_s: float

    @property
    def num_requests(self) -> int:
        """Failed ones included."""
        return len(self.first_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wholes:
    """Whole answers of one window."""

    seconds: float
    latencies_s: list[float]
    num_failed: int
    busy_s: float

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies_s) / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """All servers. `ways`: the server of each way, by the way's name and the tier's."""

    ways: dict[str, dict[str, Server]]
    load_core: int | None


# ---- measuring --------------------------------------------------------------------------------


@contextlib.contextmanager
def test_bed(arguments: argparse.Namespace) -> Iterator[Bed]:
    """Mocks, gateway and, where there is one, the rival."""
    server_core, load_core = cores()
    tokens = ["--tokens", str(arguments.tokens)]
    pace = ["--first-token-ms", str(arguments.first_token_ms), "--gap-ms", str(arguments.gap_ms)]
    with contextlib.ExitStack() as stack:
        mocks = {
            PACED: stack.enter_context(mock_server(["--stamped", *tokens, *pace], core=load_core)),
            FAST: stack.enter_context(mock_server(tokens, core=load_core)),
        }
        urls = {name: mock.url for name, mock in mocks.items()}
        relays = {
            name: stack.enter_context(relay_server(mock, core=server_core))
            for name, mock in mocks.items()
        }
        gateway = stack.enter_context(gateway_server(list(urls.items()), core=server_core))
        ways = {DIRECT: mocks, RELAY: relays, OUTRIDER: dict.fromkeys(urls, gateway)}
        if arguments.litellm is not None:
            rival = litellm_server(arguments.litellm, urls, core=server_core)
            with console.status("starting LiteLLM"):
                ways[LITELLM] = dict.fromkeys(urls, stack.enter_context(rival))
        yield Bed(ways=ways, load_core=load_core)


def _load(bed: Bed, way: str, tier: str, options: Sequence[str]) -> dict[str, Any]:
    """Return what a process of clients saw."""
    server = bed.ways[way][tier]
    command = [sys.executable, "-m", "benchmarks.shared.upstream_load", "--port", str(server.port)]
    command += ["--server-pid", str(server.pid), "--model", tier, *options]
    if bed.load_core is not None:
        command += ["--core", str(bed.load_core)]
    # LiteLLM goes on working when its answers have been given.
    others = [bed.ways[LITELLM][tier]] if LITELLM in bed.ways and way != LITELLM else []
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.enter_context(other.paused())
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, check=False, timeout=_WINDOW_TIMEOUT_S
        )
    if done.returncode:
        raise SystemExit(f"the clients failed:\n{done.stderr.decode()[-2000:]}")
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def run_streams(bed: Bed, way: str, options: Sequence[str]) -> Streams:
    """One window of streamed requests."""
    seen = _load(bed, way, PACED, options)
    return streams_of(seen["exchanges"], busy_s=seen["busy_s"])


def streams_of(exchanges: Sequence[Mapping[str, Any]], *, busy_s: float) -> Streams:
    """The figures of a window, in seconds."""

    def seconds(name: str) -> list[float | None]:
        return [None if e["failure"] else e[name] * _US for e in exchanges]

    return Streams(
        first_s=seconds("first"),
        last_s=seconds("last"),
        back_s=[way * _US for e in exchanges for way in e.get("back", ())],
        failures=[e["failure"] for e in exchanges if e["failure"]],
        busy_s=busy_s,
    )


def run_wholes(bed: Bed, way: str, options: Sequence[str]) -> Wholes:
    """One window of whole answers."""
    seen = _load(bed, way, FAST, options)
    return Wholes(
        seconds=seen["seconds"],
        latencies_s=[latency * _US for latency in seen["latencies"]],
        num_failed=seen["num_failed"],
        busy_s=seen["busy_s"],
    )


# ---- figures ----------------------------------------------------------------------------------


def added(direct: Sequence[float | None], through: Sequence[float | None]) -> list[float]:
    """Seconds that each request took longer than its pair; pairs with a failure are left out."""
    return [
        there - here
        for here, there in zip(direct, through, strict=True)
        if here is not None and there is not None
    ]


def stream_figures(direct: Sequence[Streams], through: Sequence[Streams]) -> dict[str, Any]:
    """Return the latency that one way adds to streams; for chunks, differences of percentiles."""
    pairs = list(zip(direct, through, strict=True))
    first = [s for here, there in pairs for s in added(here.first_s, there.first_s)]
    last = [s for here, there in pairs for s in added(here.last_s, there.last_s)]
    direct_back = list(itertools.chain.from_iterable(window.back_s for window in direct))
    back = list(itertools.chain.from_iterable(window.back_s for window in through))
    num_requests = sum(window.num_requests for window in through)
    return {
        "num_requests": num_requests,
        "num_failed": sum(len(window.failures) for window in through),
        "failures": sorted({failure for window in through for failure in window.failures}),
        "added_first_token_s": Summary.of(first),
        "added_last_token_s": Summary.of(last),
        "direct_chunk_s": Summary.of(direct_back),
        "chunk_s": Summary.of(back),
        "added_chunk_median_s": percentile(back, 50) - percentile(direct_back, 50),
        "added_chunk_p99_s": percentile(back, 99) - percentile(direct_back, 99),
        "busy_s": sum(window.busy_s for window in through) / num_requests,
    }


def whole_figures(windows: Sequence[Wholes]) -> dict[str, Any]:
    """Throughput of one way."""
    num_answers = sum(len(window.latencies_s) for window in windows)
    return {
        "num_answers": num_answers,
        "num_failed": sum(window.num_failed for window in windows),
        "answers_per_s": Summary.of([window.rate for window in windows]),
        "latency_s": Summary.of([s for window in windows for s in window.latencies_s]),
        "busy_s": sum(window.busy_s for window in windows) / num_answers,
    }


def goals(results: Mapping[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Each goal: its words, the figure, the bound, and whether it is met."""
    streams, wholes = results["streams"][OUTRIDER], results["wholes"][OUTRIDER]
    found = [
        ("added to the first token, p50 ms", streams["added_first_token_s"].median * 1e3, 1.0),
        ("added to the first token, p99 ms", streams["added_first_token_s"].p99 * 1e3, 4.0),
        ("added to the last token, p50 ms", streams["added_last_token_s"].median * 1e3, 1.0),
        ("added to the last token, p99 ms", streams["added_last_token_s"].p99 * 1e3, 4.0),
        ("added per chunk, p99 ms", streams["added_chunk_p99_s"] * 1e3, 1.0),
    ]
    rows = [(words, figure, bound, figure <= bound) for words, figure, bound in found]
    rate = wholes["answers_per_s"].median
    rows.append(("whole answers per second", rate, 600.0, rate >= 600.0))
    if LITELLM in results["wholes"]:
        ratio = rate / results["wholes"][LITELLM]["answers_per_s"].median
        rows.append(("throughput over LiteLLM's", ratio, 5.0, ratio >= 5.0))
    for name, rival in results["rival"].items():
        ours, theirs = (rival[way]["added_first_token_s"].p99 for way in (OUTRIDER, LITELLM))
        rows.append((f"added p99 over LiteLLM's, {name}", ours / theirs, 0.2, ours <= theirs / 5))
    return rows


# ---- the command ------------------------------------------------------------------------------


def _measure_streams(bed: Bed, arguments: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Every way's figures at that rate."""
    options = ["--rate", str(rate), "--max-tokens", str(arguments.tokens)]
    seeds = {way: itertools.count(arguments.seed) for way in bed.ways}

    def window(way: str) -> Streams:
        seed = next(seeds[way])
        more = ["--seconds", str(arguments.seconds), "--seed", str(seed)]
        return run_streams(bed, way, [*options, *more])

    def warm_up(way: str) -> Streams:
        return run_streams(bed, way, [*options, "--seconds", "2"])

    windows = measure_in_turn(
        {way: partial(window, way) for way in bed.ways},
        repeats=arguments.repeats,
        warm_up={way: partial(warm_up, way) for way in bed.ways},
        description=f"streams, {rate:g}/s",
    )
    through = {way: rounds for way, rounds in windows.items() if way != DIRECT}
    return {way: stream_figures(windows[DIRECT], rounds) for way, rounds in through.items()}


def _measure_wholes(bed: Bed, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every way's throughput."""
    options = ["--clients", str(arguments.clients), "--max-tokens", str(arguments.tokens)]

    def window(way: str, seconds: float) -> Wholes:
        return run_wholes(bed, way, [*options, "--seconds", str(seconds)])

    windows = measure_in_turn(
        {way: partial(window, way, arguments.seconds) for way in bed.ways},
        repeats=arguments.repeats,
        warm_up={way: partial(window, way, 2.0) for way in bed.ways},
        description="whole answers",
    )
    return {way: whole_figures(rounds) for way, rounds in windows.items()}


def _show_streams(title: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    columns = ["added, ms", "first token", "p99", "last token", "p99", "chunk", "p99", "busy"]
    rows = [
        [
            way,
            *(milliseconds(entry["added_first_token_s"].median),),
            milliseconds(entry["added_first_token_s"].p99),
            milliseconds(entry["added_last_token_s"].median),
            milliseconds(entry["added_last_token_s"].p99),
            milliseconds(entry["added_chunk_median_s"]),
            milliseconds(entry["added_chunk_p99_s"]),
            milliseconds(entry["busy_s"]),
        ]
        for way, entry in entries.items()
    ]
    failed = [
        f"{way}: {entry['num_failed']} of {entry['num_requests']} failed"
        for way, entry in entries.items()
        if entry["num_failed"]
    ]
    show_table(title, columns, rows, caption="\n".join(failed))


def _show(results: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    _show_streams(f"streams, {arguments.rate:g} a second", results["streams"])
    for name, entries in results["rival"].items():
        if name != _rate_name(arguments.rate):
            _show_streams(f"streams, {name}", entries)
    show_table(
        f"whole answers, {arguments.clients} clients",
        ["", "answers/s", "p50 ms", "p99", "busy ms", "failed"],
        [
            [
                way,
                f"{entry['answers_per_s'].median:.0f}",
                milliseconds(entry["latency_s"].median),
                milliseconds(entry["latency_s"].p99),
                milliseconds(entry["busy_s"]),
                str(entry["num_failed"]),
            ]
            for way, entry in results["wholes"].items()
        ],
    )
    show_table(
        "goals",
        ["", "measured", "goal", "met"],
        [
            [words, f"{figure:.2f}", f"{bound:g}", verdict(is_met)]
            for words, figure, bound, is_met in goals(results)
        ],
        caption=f"event-loop lag of the gateway: p99 below {results['loop_lag_p99_s'] * 1e3:g} ms",
    )


def _rate_name(rate: float) -> str:
    return f"{rate:g}/s"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--litellm", type=Path, help="virtual environment of LiteLLM's proxy")
    parser.add_argument("--rate", type=float, default=50.0, help="streamed requests a second")
    parser.add_argument(
        "--rival-rate", type=float, default=5.0, help="beside it, one that LiteLLM can hold"
    )
    parser.add_argument("--tokens", type=int, default=64, help="pieces of an answer")
    parser.add_argument("--first-token-ms", type=float, default=20.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=32, help="for the throughput")
    parser.add_argument("--seconds", type=float, default=10.0, help="a window")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", default="mock", help="second part of the results' name")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    arguments = parser.parse_args(argv)
    if arguments.litellm is not None and not (arguments.litellm / "bin" / "litellm").is_file():
        raise SystemExit(f"--litellm {arguments.litellm}: there is no bin/litellm.")
    quiet_transformers()
    with test_bed(arguments) as bed:
        lag_before = loop_lag(bed.ways[OUTRIDER][PACED])
        results: dict[str, Any] = {"streams": _measure_streams(bed, arguments, arguments.rate)}
        results["wholes"] = _measure_wholes(bed, arguments)
        results["rival"] = {}
        if LITELLM in bed.ways:
            slow = _measure_streams(bed, arguments, arguments.rival_rate)
            results["rival"] = {
                _rate_name(arguments.rate): results["streams"],
                _rate_name(arguments.rival_rate): slow,
            }
        lag_after = loop_lag(bed.ways[OUTRIDER][PACED])
    results["loop_lag_p99_s"] = bucket_quantile(lag_before, lag_after, 0.99)
    results["goals"] = [
        {"goal": words, "measured": figure, "bound": bound, "met": is_met}
        for words, figure, bound, is_met in goals(results)
    ]
    results["packages"] = {name: package_version(name) for name in ("aiohttp", "uvloop", "uvicorn")}
    _show(results, arguments)
    write_results("bench_upstream", arguments.variant, results, arguments)


if __name__ == "__main__":
    start(main)
