"""For how long does planning a long prompt hold the gateway's event loop?

Method: the gateway's application runs in this process, with the bundled router and tokenizers over
an engine without models, and answers chats for `auto` whose prompts have 1,000 to 100,000
characters. Meanwhile a heartbeat runs in each turn of the loop. The gap is the longest time between
two beats while one request is answered; `busy` is the most processor time that the loop's thread
took between two beats, which other programs on the machine do not lengthen. Prompts of all lengths
take turns, and no text comes twice.

Reading it: no stream goes on during a gap. A gap that is longer than `busy` is time in which
another thread had the interpreter, or another program the processor. The goal is 1 ms.

    python -m benchmarks.gateway.bench_loop_holds
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.gateway.count_request_path import started
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Results, Table, milliseconds, option, within
from benchmarks.shared.mock_engine import MockEngine
from benchmarks.shared.record import Summary
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.telemetry.logs import configure_logging
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.build import build_parts
from outrider.gateway.wiring.serving import settle_process

GOAL_S: Final = 0.001
_LENGTHS: Final = (1_000, 4_000, 10_000, 30_000, 100_000)
_WORDS: Final = (
    "tree", "river", "7", "why", "count", "light", "stone", "sum", "of", "the", "and", "winter",
    "map", "12", "is", "word", "letter", "gate", "rider", "before", "number", "house", "a", "in",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    lengths: tuple[int, ...] = option(_LENGTHS, "characters")
    repeats: int = option(30, "measured rounds")
    seed: int = option(0)


class Beat(AbstractContextManager["Beat"]):
    """A callback in each turn of the loop, which notes the longest time since the last one."""

    def __init__(self) -> None:
        self.gap_s = self.busy_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._has_ended = False
        self._last_s, self._last_busy_s = time.perf_counter(), time.thread_time()

    def __enter__(self) -> "Beat":
        self._last_s, self._last_busy_s = time.perf_counter(), time.thread_time()
        self._loop.call_soon(self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True

    def _beat(self) -> None:
        now_s, busy_s = time.perf_counter(), time.thread_time()
        self.gap_s = max(self.gap_s, now_s - self._last_s)
        self.busy_s = max(self.busy_s, busy_s - self._last_busy_s)
        self._last_s, self._last_busy_s = now_s, busy_s
        if not self._has_ended:
            self._loop.call_soon(self._beat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request: the longest gap and the busiest turn, the whole processor time, the seconds."""

    gap_s: float
    busy_s: float
    total_busy_s: float
    seconds: float


def text_of(num_chars: int, rng: random.Random) -> str:
    """Return words of that many characters in all."""
    words: list[str] = []
    length = 0
    while length < num_chars:
        words.append(rng.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:num_chars]


async def ask(app: Any, num_chars: int, rng: random.Random) -> Asked:
    """Send one chat and read its answer to the end, with the heart beating."""
    message = {"role": "user", "content": text_of(num_chars, rng)}
    body = json.dumps({"model": "auto", "messages": [message], "max_tokens": 1}).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    is_over = asyncio.Event()
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await is_over.wait()
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
    }
    began_s, busy_s = time.perf_counter(), time.thread_time()
    with Beat() as beat:
        await app(scope, receive, send)
        await asyncio.sleep(0)
    is_over.set()
    if statuses != [200]:
        raise RuntimeError(f"the request was answered with status {statuses}")
    return Asked(
        gap_s=beat.gap_s,
        busy_s=beat.busy_s,
        total_busy_s=time.thread_time() - busy_s,
        seconds=time.perf_counter() - began_s,
    )


async def ask_in_turn(options: Options) -> dict[int, list[Asked]]:
    """Ask for all lengths in turn; the first two rounds are not kept."""
    found: dict[int, list[Asked]] = {length: [] for length in options.lengths}
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        flags = {"database_url": f"sqlite:///{Path(folder) / 'bench.db'}"}
        settings = load_settings(flags=flags, environ={})
        engine: Any = MockEngine(max_context=200_000)  # for a client of an engine
        await engine.start()
        app = build_app(await asyncio.to_thread(build_parts, settings, engine))
        async with started(app):
            for number in range(2 + options.repeats):
                if number == 2:
                    settle_process()
                for length, asked in found.items():
                    one = await ask(app, length, rng)
                    if number >= 2:
                        asked.append(one)
    return found


def measure(options: Options) -> Results:
    """Return the figures by length."""
    configure_logging("WARNING", "text")
    return {
        str(length): {
            "gap_s": Summary.of([one.gap_s for one in asked]),
            "busy_s": Summary.of([one.busy_s for one in asked]),
            "total_busy_s": Summary.of([one.total_busy_s for one in asked]),
            "answer_s": Summary.of([one.seconds for one in asked]),
        }
        for length, asked in uvloop.run(ask_in_turn(options)).items()
    }


_COLUMNS: Final = (
    ("gap ms", milliseconds("gap_s")),
    ("p99", milliseconds("gap_s", part="p99")),
    ("busy ms", milliseconds("busy_s")),
    ("p99", milliseconds("busy_s", part="p99")),
    ("all busy ms", milliseconds("total_busy_s")),
    ("answer ms", milliseconds("answer_s")),
    ("goal", within("busy_s", GOAL_S)),
)


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a length."""
    yield Table(
        title="the longest hold of the event loop",
        columns=_COLUMNS,
        entries=results,
        caption=f"switch interval {1e3 * sys.getswitchinterval():g} ms",
        first="characters",
    )


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant="mock")

if __name__ == "__main__":
    BENCHMARK.start()
