"""What processor time does an answer of the response cache cost, beside one that is computed?

Method: a gateway over a mock engine whose answers are there at once, so a miss costs only the
gateway's own work too. One client asks one request after the other over one connection: questions
that were asked before (hits), and new ones (misses), whole and streamed, in turn (A B A B). The
figure is the processor time of the gateway's process, user and system, divided by the requests: it
includes HTTP, the parsing of the request, the key and the writing of the answer.

Reading it: a hit is to cost at most 1 ms. With --redis each look-up goes to that server.

    python -m benchmarks.gateway.bench_cache
    python -m benchmarks.gateway.bench_cache --redis redis://127.0.0.1:6379/0
"""

import argparse
import http.client
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.shared.harness import Summary, console, show_table, start, verdict, write_results
from benchmarks.shared.record import RESULTS
from benchmarks.shared.upstream_load import cpu_s
from benchmarks.shared.upstream_servers import Server, tenant_server

LIMIT_S: Final = 1e-3
_PATH: Final = "/v1/chat/completions"
_PROMPT: Final = "Describe the harbour of a small town in the morning. " * 8
_CASES: Final = ("hit", "miss", "streamed hit", "streamed miss")


def main() -> None:
    """Measure, show and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300, help="in each round and case")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--redis", metavar="URL", help="keep the answers there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    store = "memory" if arguments.redis is None else "redis"
    options = [f"cache.store={store}", "database_url=none"]
    options += [] if arguments.redis is None else [f"redis_url={arguments.redis}"]
    flags = [word for option in options for word in ("--set", option)]
    fresh = (f"{_PROMPT} Number {number}." for number in itertools.count())
    with tenant_server("cache", flags, core=None) as server:
        found = _measured(server, fresh, arguments.requests, arguments.rounds)
    show_table(
        f"processor time of a request, {store}",
        ("case", "median", "highest"),
        [(case, f"{s.median * 1e3:.3f} ms", f"{s.maximum * 1e3:.3f} ms") for case, s in found],
    )
    is_met = all(s.median <= LIMIT_S for case, s in found if case.endswith("hit"))
    console.print(f"a hit costs at most {LIMIT_S * 1e3:g} ms: {verdict(is_met)}")
    arguments.redis = store == "redis"  # not its address
    write_results("bench_cache", store, {"cpu_s": dict(found)}, arguments)


def _measured(
    server: Server, fresh: Iterator[str], num_requests: int, rounds: int
) -> list[tuple[str, Summary]]:
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
    return [(case, Summary.of(samples)) for case, samples in seconds.items()]


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


if __name__ == "__main__":
    start(main)
