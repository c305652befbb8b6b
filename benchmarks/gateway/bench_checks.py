"""What does a check add that answers at once: to a first token, and to each chunk of a stream?

Method: a mock server streams its answers through four gateways that run at the same time: one
without checks, one that asks a service before each request, one that asks it about each window of
the stream, and one whose stream a Python function checks in the event loop's threads. Clients ask
them in turn (A B C D A …), at the same moments. The service is a process of its own that passes
everything at once. The mock stamps its pieces, so that its own delays cancel out, as in
bench_upstream.

Reading it: `added` is what a gateway takes longer than the one without checks, request by request;
`chunk` is the way back of each chunk, whose percentiles are subtracted. A check that answers at
once is to add at most 1.5 ms to a first token or to a chunk (p50), and the last token is to come no
later than that either: the stream keeps its pace.

    python -m benchmarks.gateway.bench_checks
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.gateway.bench_upstream import PACED, Bed, Streams, run_streams, stream_figures
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
from benchmarks.shared.upstream_servers import (
    cores,
    gateway_server,
    mock_server,
    verdict_server,
)
from benchmarks.shared.windows import windows_in_turn

LIMIT_S: Final = 1.5e-3
PLAIN: Final = "no check"
_QUIET: Final = ("--large", "none", "--small", "none", "--set", "database_url=none")
_FUNCTION: Final = "checks.it.function=benchmarks.shared.verdict_server:passing"


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    rate: float = option(5.0, "streamed requests a second")
    tokens: int = option(64, "pieces of an answer")
    gap_ms: float = option(10.0)
    seconds: float = option(10.0, "a window")
    repeats: int = option(5, "measured rounds")


def _checks(url: str) -> Mapping[str, tuple[str, ...]]:
    """Return the settings of each gateway."""
    service = f"checks.it.url={url}"
    return {
        PLAIN: (),
        "service, before": (service, "checks.it.where=before"),
        "service, stream": (service, "checks.it.where=stream"),
        "function, stream": (_FUNCTION, "checks.it.where=stream"),
    }


@contextlib.contextmanager
def _bed(options: Options) -> Iterator[Bed]:
    server_core, load_core = cores()
    pace = ("--tokens", str(options.tokens), "--gap-ms", str(options.gap_ms))
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(
            mock_server(("--stamped", "--first-token-ms", "20", *pace), core=load_core)
        )
        service = stack.enter_context(verdict_server(core=load_core))
        ways = {}
        for name, words in _checks(service.url).items():
            flags = [part for word in words for part in ("--set", word)]
            gateway = gateway_server(
                [(PACED, mock.url)], options=(*_QUIET, *flags), core=server_core
            )
            ways[name] = {PACED: stack.enter_context(gateway)}
        yield Bed(ways=ways, load_core=load_core)


def measure(options: Options) -> Results:
    """Return what each gateway adds to the one without checks."""
    words = ("--rate", str(options.rate), "--max-tokens", str(options.tokens), "--warm-up", "5")
    with _bed(options) as bed:
        seeds = {way: itertools.count() for way in bed.ways}

        def window(way: str, seconds: float) -> Streams:
            more = ("--seconds", str(seconds), "--seed", str(next(seeds[way])))
            return run_streams(bed, way, [*words, *more])

        windows = windows_in_turn(
            bed.ways,
            window,
            seconds=options.seconds,
            repeats=options.repeats,
            warm_up_s=1.0,
            description="checks",
        )
    plain = windows.pop(PLAIN)
    return {"added": {way: stream_figures(plain, rounds) for way, rounds in windows.items()}}


def goals(results: Results) -> list[Goal]:
    """Bound what each adds."""
    found = []
    for way, figures in results["added"].items():
        for name, seconds in (
            ("first token", figures["added_first_token_s"].median),
            ("last token", figures["added_last_token_s"].median),
            ("chunk", figures["added_chunk_median_s"]),
        ):
            words = f"{way}: added to the {name}, p50 ms"
            found.append(Goal(words=words, measured=seconds * 1e3, bound=LIMIT_S * 1e3))
    return found


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a gateway."""
    yield Table(
        title=f"streams, {options.rate:g}/s, a chunk in {options.gap_ms:g} ms",
        columns=(
            ("first token", milliseconds("added_first_token_s", ".2f")),
            ("last token", milliseconds("added_last_token_s", ".2f")),
            ("p99", milliseconds("added_last_token_s", ".2f", part="p99")),
            ("chunk", milliseconds("added_chunk_median_s", ".2f")),
            ("p99", milliseconds("added_chunk_p99_s", ".2f")),
            ("failed", count("num_failed")),
        ),
        entries=results["added"],
        first="added, ms",
    )


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant="mock"
)

if __name__ == "__main__":
    BENCHMARK.start()
