"""Does a batch survive its gateway's death, and what do others notice of a batch?

Method: the gateway has one upstream tier, a mock server. First a batch of short answers: the
gateway is killed (SIGKILL) at a quarter, half and three quarters of it and started again on the
same database. Then the output file and the ledger are compared with the requests: each must be
answered once and charged once. Second, interactive requests come at a fixed rate, in turn with and
without a batch under way, at the same moments; the mock takes its time for each token, as a model
does. Gateway and clients have a core each.

Reading it: `lost` and `charged twice` must be 0. `added p99` is what the batch adds to the
interactive requests' 99th percentile, as a share of it. `--model large` asks the bundled large
model in place of the mock, in the second part.

    python -m benchmarks.gateway.bench_batches
"""

import contextlib
import itertools
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from sqlalchemy import create_engine, select

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Goal,
    Results,
    Table,
    count,
    figure,
    milliseconds,
    option,
)
from benchmarks.shared.upstream_servers import (
    Server,
    cores,
    gateway_server,
    mock_server,
)
from benchmarks.shared.windows import Window, seen_by_clients, whole_figures, windows_in_turn
from outrider.gateway.storage.tables import ledger

WITH: Final = "with a batch"
WITHOUT: Final = "without"
MODELS: Final = ("cloud", "large")
_NUM_KILLS: Final = 3
_MAX_SHARE: Final = 0.02
_TIMEOUT_S: Final = 1800.0
_OVER: Final = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    requests: int = option(10_000, "of the batch that is killed")
    rate: float = option(4.0, "interactive requests a second")
    tokens: int = option(16, "of an answer")
    gap_ms: float = option(8.0, "between two tokens")
    seconds: float = option(25.0, "a window")
    repeats: int = option(4, "measured rounds")
    seed: int = option(0)
    model: str = option("cloud", "cloud: the mock; large: the bundled pair's", choices=MODELS)


@contextlib.contextmanager
def running(
    mock: Server, database: Path, core: int | None, *, loads_model: bool = False
) -> Iterator[Server]:
    """A gateway over the mock, with batches in this database; with the bundled large model."""
    options = ["--large", "demo" if loads_model else "none", "--small", "none"]
    for setting in (
        f"database_url=sqlite:///{database}",
        "batches.enabled=true",
        "tiers.cloud.price.prompt=1.0",
        "tiers.cloud.price.completion=2.0",
    ):
        options += ["--set", setting]
    with gateway_server([("cloud", mock.url)], options=options, core=core) as server:
        yield server


def begin(server: Server, num_requests: int, tokens: int, model: str = "cloud") -> str:
    """Begin a batch of a model; return its id."""
    lines = (
        {
            "custom_id": f"q{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"Question {number}"}],
                "max_tokens": tokens,
            },
        }
        for number in range(num_requests)
    )
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        form = {"file": ("batch.jsonl", content)}
        file = http.post("/files", data={"purpose": "batch"}, files=form).raise_for_status()
        asked = {
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        return str(http.post("/batches", json=asked).raise_for_status().json()["id"])


def wait_until(
    server: Server, batch_id: str, is_so: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return the batch once that is so of it. Raises SystemExit where it never is."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        batch: dict[str, Any] = json.loads(server.get(f"/v1/batches/{batch_id}"))
        if is_so(batch):
            return batch
        time.sleep(0.05)
    raise SystemExit(f"the batch came to nothing: {batch}")


# ---- killed -----------------------------------------------------------------------------------


def measure_kills(options: Options, core: int | None, other: int | None) -> Results:
    """Kill the gateway three times in a batch, and look at what is left."""
    mock_options = ("--tokens", str(options.tokens))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock_server(mock_options, core=other) as mock,
    ):
        database, batch_id, begun_s = Path(folder) / "bench.db", "", time.monotonic()
        for kill in range(_NUM_KILLS):
            with running(mock, database, core) as server:
                batch_id = batch_id or begin(server, options.requests, options.tokens)
                enough = options.requests * (kill + 1) // (_NUM_KILLS + 1)
                wait_until(server, batch_id, partial(_has_done, enough))
                os.kill(server.pid, signal.SIGKILL)
        with running(mock, database, core) as server:
            batch = wait_until(server, batch_id, lambda batch: batch["status"] in _OVER)
            content = server.get(f"/v1/files/{batch['output_file_id']}/content")
        seconds = time.monotonic() - begun_s
        return {**_compared(content, database, options.requests), "seconds": seconds}


def _num_done(batch: dict[str, Any]) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"] + counts["failed"])


def _has_done(enough: int, batch: dict[str, Any]) -> bool:
    return _num_done(batch) >= enough


def _compared(content: str, database: Path, num_requests: int) -> Results:
    """Compare answers and charges with what was asked."""
    results = [json.loads(line) for line in content.splitlines()]
    answers = Counter(result["custom_id"] for result in results)
    engine = create_engine(f"sqlite:///{database}")
    charged = select(ledger.c.client_request_id).where(ledger.c.charge_nanos > 0)
    with engine.connect() as connection:
        charges = Counter(connection.execute(charged).scalars())
    engine.dispose()
    return {
        "num_requests": num_requests,
        "num_kills": _NUM_KILLS,
        "num_lost": num_requests - len(answers),
        "num_answered_twice": sum(number > 1 for number in answers.values()),
        "num_not_charged": num_requests - len(charges),
        "num_charged_twice": sum(number > 1 for number in charges.values()),
        "is_same_set": {result["id"] for result in results} == set(charges),
    }


# ---- beside others ----------------------------------------------------------------------------


def measure_interactive(options: Options, core: int | None, other: int | None) -> Results:
    """Answers at a fixed rate, at the same moments with and without a batch."""
    mock_options = ("--tokens", str(options.tokens), "--gap-ms", str(options.gap_ms))
    seeds = {name: itertools.count(options.seed) for name in (WITHOUT, WITH)}
    num_done: list[int] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock_server(mock_options, core=other) as mock,
        running(
            mock,
            Path(folder) / "bench.db",
            None if options.model == "large" else core,
            loads_model=options.model == "large",
        ) as server,
    ):

        def window(name: str, seconds: float) -> Window:
            words = ["--model", options.model, "--whole", "--rate", str(options.rate)]
            words += ["--max-tokens", str(options.tokens), "--seconds", str(seconds)]
            words += ["--seed", str(next(seeds[name])), "--sentences", "3", "--warm-up", "5"]
            with (
                _batch_beside(server, options, num_done)
                if name == WITH
                else contextlib.nullcontext()
            ):
                return Window.of(seen_by_clients(server, words, core=other))

        rounds = windows_in_turn(
            (WITHOUT, WITH),
            window,
            seconds=options.seconds,
            repeats=options.repeats,
            warm_up_s=2.0,
            description="interactive requests",
        )
    found = {name: whole_figures(windows) for name, windows in rounds.items()}
    usual, beside = found[WITHOUT]["latency_s"], found[WITH]["latency_s"]
    found[WITH]["added_p99_share"] = beside.p99 / usual.p99 - 1
    found[WITH]["added_median_share"] = beside.median / usual.median - 1
    found[WITH]["batch_requests_per_s"] = sum(num_done[1:]) / (options.repeats * options.seconds)
    return found


@contextlib.contextmanager
def _batch_beside(server: Server, options: Options, num_done: list[int]) -> Iterator[None]:
    """Work on a batch meanwhile, and note how much of it was done."""
    batch_id = begin(server, 5000, options.tokens, options.model)
    wait_until(server, batch_id, lambda batch: _num_done(batch) > 0)
    yield
    httpx.post(f"{server.url}/batches/{batch_id}/cancel").raise_for_status()
    num_done.append(_num_done(wait_until(server, batch_id, lambda batch: batch["status"] in _OVER)))


# ---- the script -------------------------------------------------------------------------------


def measure(options: Options) -> Results:
    """Both parts."""
    core, other = cores()
    return {
        "killed": measure_kills(options, core, other),
        "interactive": measure_interactive(options, core, other),
    }


def tables(options: Options, results: Results) -> Iterator[Table]:
    """One of each part."""
    killed = (
        ("kills", count("num_kills")),
        ("lost", count("num_lost")),
        ("answered twice", count("num_answered_twice")),
        ("not charged", count("num_not_charged")),
        ("charged twice", count("num_charged_twice")),
        ("seconds", figure("seconds", ".0f")),
    )
    yield Table(
        title="a batch that is killed",
        columns=killed,
        entries={f"{options.requests:,} requests": results["killed"]},
    )
    beside = (
        ("p50 ms", milliseconds("latency_s")),
        ("p99", milliseconds("latency_s", part="p99")),
        ("added p50 %", figure("added_median_share", scale=100)),
        ("added p99 %", figure("added_p99_share", scale=100)),
        ("batch requests/s", figure("batch_requests_per_s")),
    )
    yield Table(
        title=f"{options.rate:g} interactive requests a second",
        columns=beside,
        entries=results["interactive"],
    )


def goals(results: Results) -> Sequence[Goal]:
    """Nothing lost or charged twice; others notice little."""
    killed = results["killed"]
    wrong = sum(value for name, value in killed.items() if name in _WRONG)
    share = results["interactive"][WITH]["added_p99_share"]
    return [
        Goal(
            words="requests lost, or answered or charged otherwise than once",
            measured=wrong,
            bound=0,
        ),
        Goal(words="added at p99, %", measured=100 * share, bound=100 * _MAX_SHARE),
    ]


_WRONG: Final = frozenset(
    {"num_lost", "num_answered_twice", "num_not_charged", "num_charged_twice"}
)

BENCHMARK: Final = Benchmark(
    options=Options,
    measure=measure,
    tables=tables,
    goals=goals,
    variant=lambda options: "mock" if options.model == "cloud" else "demo",
)

if __name__ == "__main__":
    BENCHMARK.start()
