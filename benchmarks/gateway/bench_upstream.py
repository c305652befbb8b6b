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

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Goal,
    Results,
    Table,
    count,
    milliseconds,
    option,
)
from benchmarks.shared.harness import console
from benchmarks.shared.record import Summary, package_version, percentile
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
from benchmarks.shared.windows import US, Window, seen_by_clients, whole_figures, windows_in_turn

DIRECT: Final = "direct"
RELAY: Final = "relay"
OUTRIDER: Final = "outrider"
LITELLM: Final = "litellm"
PACED: Final = "paced"
"""The tier whose answers take their time; `fast` is without delays."""
FAST: Final = "fast"


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    litellm: Path | None = option(None, "virtual environment of LiteLLM's proxy")
    rate: float = option(50.0, "streamed requests a second")
    rival_rate: float = option(5.0, "beside it, one that LiteLLM can hold")
    tokens: int = option(64, "pieces of an answer")
    first_token_ms: float = option(20.0)
    gap_ms: float = option(10.0)
    clients: int = option(32, "for the throughput")
    seconds: float = option(10.0, "a window")
    repeats: int = option(5, "measured rounds")
    seed: int = option(0)


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
class Bed:
    """All servers. `ways`: the server of each way, by the way's name and the tier's."""

    ways: dict[str, dict[str, Server]]
    load_core: int | None


# ---- measuring --------------------------------------------------------------------------------


@contextlib.contextmanager
def test_bed(options: Options) -> Iterator[Bed]:
    """Mocks, gateway and, where there is one, the rival."""
    server_core, load_core = cores()
    tokens = ["--tokens", str(options.tokens)]
    pace = ["--first-token-ms", str(options.first_token_ms), "--gap-ms", str(options.gap_ms)]
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
        if options.litellm is not None:
            rival = litellm_server(options.litellm, urls, core=server_core)
            with console.status("starting LiteLLM"):
                ways[LITELLM] = dict.fromkeys(urls, stack.enter_context(rival))
        yield Bed(ways=ways, load_core=load_core)


def _load(bed: Bed, way: str, tier: str, options: Sequence[str]) -> dict[str, Any]:
    """Return what a process of clients saw."""
    # LiteLLM goes on working when its answers have been given.
    others = [bed.ways[LITELLM][tier]] if LITELLM in bed.ways and way != LITELLM else []
    words = ("--model", tier, *options)
    return seen_by_clients(bed.ways[way][tier], words, core=bed.load_core, paused=others)


def run_streams(bed: Bed, way: str, options: Sequence[str]) -> Streams:
    """One window of streamed requests."""
    seen = _load(bed, way, PACED, options)
    return streams_of(seen["exchanges"], busy_s=seen["busy_s"])


def streams_of(exchanges: Sequence[Mapping[str, Any]], *, busy_s: float) -> Streams:
    """The figures of a window, in seconds."""

    def seconds(name: str) -> list[float | None]:
        return [None if e["failure"] else e[name] * US for e in exchanges]

    return Streams(
        first_s=seconds("first"),
        last_s=seconds("last"),
        back_s=[way * US for e in exchanges for way in e.get("back", ())],
        failures=[e["failure"] for e in exchanges if e["failure"]],
        busy_s=busy_s,
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


def measure(options: Options) -> Results:
    """Streams and whole answers of every way, beside LiteLLM's at a rate that it can hold."""
    litellm = options.litellm
    if litellm is not None and not (litellm / "bin" / "litellm").is_file():
        raise SystemExit(f"--litellm {litellm}: there is no bin/litellm.")
    with test_bed(options) as bed:
        lag_before = loop_lag(bed.ways[OUTRIDER][PACED])
        results: Results = {
            "streams": _measure_streams(bed, options, options.rate),
            "wholes": _measure_wholes(bed, options),
            "rival": {},
        }
        if LITELLM in bed.ways:
            results["rival"] = {
                f"{options.rate:g}/s": results["streams"],
                f"{options.rival_rate:g}/s": _measure_streams(bed, options, options.rival_rate),
            }
        lag_after = loop_lag(bed.ways[OUTRIDER][PACED])
    results["loop_lag_p99_s"] = bucket_quantile(lag_before, lag_after, 0.99)
    results["packages"] = {name: package_version(name) for name in ("aiohttp", "uvloop", "uvicorn")}
    return results


def _measure_streams(bed: Bed, options: Options, rate: float) -> Results:
    """Every way's figures at that rate."""
    words = ("--rate", str(rate), "--max-tokens", str(options.tokens))
    seeds = {way: itertools.count(options.seed) for way in bed.ways}

    def window(way: str, seconds: float) -> Streams:
        more = ("--seconds", str(seconds), "--seed", str(next(seeds[way])))
        return run_streams(bed, way, [*words, *more])

    windows = windows_in_turn(
        bed.ways,
        window,
        seconds=options.seconds,
        repeats=options.repeats,
        warm_up_s=2.0,
        description=f"streams, {rate:g}/s",
    )
    through = {way: rounds for way, rounds in windows.items() if way != DIRECT}
    return {way: stream_figures(windows[DIRECT], rounds) for way, rounds in through.items()}


def _measure_wholes(bed: Bed, options: Options) -> Results:
    """Every way's throughput."""
    words = ("--clients", str(options.clients), "--max-tokens", str(options.tokens))

    def window(way: str, seconds: float) -> Window:
        return Window.of(_load(bed, way, FAST, [*words, "--seconds", str(seconds)]))

    windows = windows_in_turn(
        bed.ways,
        window,
        seconds=options.seconds,
        repeats=options.repeats,
        warm_up_s=2.0,
        description="whole answers",
    )
    return {way: whole_figures(rounds) for way, rounds in windows.items()}


def goals(results: Results) -> list[Goal]:
    """Bound the time that the gateway adds, absolutely and against LiteLLM's."""
    streams, wholes = results["streams"][OUTRIDER], results["wholes"][OUTRIDER]
    first, last = streams["added_first_token_s"], streams["added_last_token_s"]
    at_most = (
        ("added to the first token, p50 ms", first.median, 1.0),
        ("added to the first token, p99 ms", first.p99, 4.0),
        ("added to the last token, p50 ms", last.median, 1.0),
        ("added to the last token, p99 ms", last.p99, 4.0),
        ("added per chunk, p99 ms", streams["added_chunk_p99_s"], 1.0),
    )
    found = [Goal(words=words, measured=s * 1e3, bound=bound) for words, s, bound in at_most]
    rate = wholes["answers_per_s"].median
    found.append(Goal(words="whole answers per second", measured=rate, bound=600, at_least=True))
    if LITELLM in results["wholes"]:
        ratio = rate / results["wholes"][LITELLM]["answers_per_s"].median
        found.append(
            Goal(words="throughput over LiteLLM's", measured=ratio, bound=5.0, at_least=True)
        )
    for name, rival in results["rival"].items():
        ours, theirs = (rival[way]["added_first_token_s"].p99 for way in (OUTRIDER, LITELLM))
        words = f"added p99 over LiteLLM's, {name}"
        found.append(Goal(words=words, measured=ours / theirs, bound=0.2))
    return found


_STREAM_COLUMNS: Final = (
    ("first token", milliseconds("added_first_token_s")),
    ("p99", milliseconds("added_first_token_s", part="p99")),
    ("last token", milliseconds("added_last_token_s")),
    ("p99", milliseconds("added_last_token_s", part="p99")),
    ("chunk", milliseconds("added_chunk_median_s")),
    ("p99", milliseconds("added_chunk_p99_s")),
    ("busy", milliseconds("busy_s")),
    ("failed", count("num_failed")),
)
_WHOLE_COLUMNS: Final = (
    ("answers/s", count("answers_per_s")),
    ("p50 ms", milliseconds("latency_s")),
    ("p99", milliseconds("latency_s", part="p99")),
    ("busy ms", milliseconds("busy_s")),
    ("failed", count("num_failed")),
)


def tables(options: Options, results: Results) -> Iterator[Table]:
    """Show the time that each way adds to streams, and its rate of whole answers."""
    for name, entries in ({f"{options.rate:g}/s": results["streams"]} | results["rival"]).items():
        title = f"streams, {name}"
        yield Table(title=title, columns=_STREAM_COLUMNS, entries=entries, first="added, ms")
    yield Table(
        title=f"whole answers, {options.clients} clients",
        columns=_WHOLE_COLUMNS,
        entries=results["wholes"],
        caption=f"event-loop lag of the gateway: p99 below {results['loop_lag_p99_s'] * 1e3:g} ms",
    )


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant="mock"
)

if __name__ == "__main__":
    BENCHMARK.start()
