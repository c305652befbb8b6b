"""What processor time does an answer of the response cache cost, beside one that is computed?

Method: a gateway over a mock engine whose answers are there at once, so a miss costs only the
gateway's own work too. One client asks one request after the other over one connection: questions
that were asked before (hits), and new ones (misses), whole and streamed, in turn (A B A B). The
figure is the processor time of the gateway's process, user and system, divided by the requests: it
includes HTTP, the parsing of the request, the key and the writing of the answer.

Reading it: a hit, not a miss, is to cost at most 1 ms. With --redis each look-up goes to that
server.

    python -m benchmarks.gateway.bench_cache
    python -m benchmarks.gateway.bench_cache --redis redis://127.0.0.1:6379/0
"""

import http.client
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Results, Table, milliseconds, option, within
from benchmarks.shared.record import Summary
from benchmarks.shared.upstream_load import cpu_s
from benchmarks.shared.upstream_servers import Server, tenant_server

LIMIT_S: Final = 1e-3
_PATH: Final = "/v1/chat/completions"
_PROMPT: Final = "Describe the harbour of a small town in the morning. " * 8
_CASES: Final = ("hit", "miss", "streamed hit", "streamed miss")


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    requests: int = option(300, "in each round and case")
    repeats: int = option(7, "measured rounds")
    redis: str | None = option(None, "URL of the server that keeps the answers")


def measure(options: Options) -> Results:
    """Return the processor time of a request by case."""
    words = [f"cache.store={_store(options)}", "database_url=none"]
    words += [] if options.redis is None else [f"redis_url={options.redis}"]
    flags = [part for word in words for part in ("--set", word)]
    fresh = (f"{_PROMPT} Number {number}." for number in itertools.count())
    with tenant_server("cache", flags, core=None) as server:
        return {"cpu_s": _measured(server, fresh, options.requests, options.repeats)}


def _store(options: Options) -> str:
    return "memory" if options.redis is None else "redis"


def _measured(
    server: Server, fresh: Iterator[str], num_requests: int, rounds: int
) -> dict[str, Summary]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    seconds: dict[str, list[float]] = {case: [] for case in _CASES}
    known = next(fresh)
    for number in range(rounds + 1):  # the first round warms up
        for case in _CASES:
            is_hit, is_streamed = case.endswith("hit"), case.startswith("streamed")
            before_s = cpu_s(server.pid)
            for _ in range(num_requests):
                status = _ask(connection, known if is_hit else next(fresh), is_streamed)
                if number and status != ("hit" if is_hit else "miss"):
                    raise SystemExit(f"{case}: the gateway answered with {status!r}")
            if number:
                seconds[case].append((cpu_s(server.pid) - before_s) / num_requests)
    return {case: Summary.of(samples) for case, samples in seconds.items()}


def _ask(connection: http.client.HTTPConnection, prompt: str, is_streamed: bool) -> str | None:
    body = {
        "model": "large",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 200,
        "stream": is_streamed,
        "outrider": {"cache": "on"},
    }
    headers = {"content-type": "application/json"}
    connection.request("POST", _PATH, json.dumps(body), headers)
    response = connection.getresponse()
    told = response.read()
    if response.status != 200:
        raise SystemExit(f"status {response.status}: {told.decode()[:500]}")
    return response.headers["x-outrider-cache"]


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a case."""
    yield Table(
        title=f"processor time of a request, {_store(options)}, ms",
        columns=(
            ("median", milliseconds("cpu_s", ".3f")),
            ("highest", milliseconds("cpu_s", ".3f", part="maximum")),
            ("at most 1", within("cpu_s", LIMIT_S)),
        ),
        entries={case: {"cpu_s": found} for case, found in results["cpu_s"].items()},
        first="case",
    )


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant=_store)

if __name__ == "__main__":
    BENCHMARK.start()
