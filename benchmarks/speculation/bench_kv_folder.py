"""How soon does an answer begin whose prompt is in a folder on the disk, after a restart?

Question: a prompt that returns need not be computed where its keys and values are kept. What does
it wait then, against computing it, and against finding it in memory?

Method: the bundled pair's large model grown to --large parameters, in bfloat16, without drafts. In
each round a new text, four times: cold, again in the same engine (warm), and twice in an engine
with empty caches that has the folder only, which reads, opens, checks and copies it: from the
system's page cache, as soon after it was written (restored), and once that was told to forget the
files (disk). What the disk gives is measured in the same round: the files are forgotten, read by
one thread, and forgotten again. The time is that from submitting to the first token. The answers'
tokens must be the same.

Reading it: `restored / cold` is the share of the wait that is left. `disk - read` is what the wait
has beyond 1.5 times the reading alone; it should be below 0.1 s.

    python -m benchmarks.speculation.bench_kv_folder
"""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, figure, option
from benchmarks.shared.grown import grown
from benchmarks.shared.record import Summary, paired_ratio
from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.sealing import Seal
from outrider.engine.core import Engine
from outrider.engine.events import Finished, TokensEmitted
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from outrider.gateway.settings.tree import bundled_pair
from outrider.kernels.cpu.product_library import product_support
from outrider.verifier.params import SamplingParams

_LENGTHS: Final = (1000, 3000)
_MOST_SHARE: Final = 1 / 3
_MOST_READINGS: Final = 1.5
_MOST_BEYOND_S: Final = 0.1
_CHUNK_BYTES: Final = 2**20
_WARM_UP_TOKENS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(3, "texts of each length")
    large: str = option("400M", "parameters that the large model is grown to")
    lengths: tuple[int, ...] = option(_LENGTHS, "tokens of a prompt")
    threads: int = option(1)
    folder: str = option(tempfile.gettempdir(), "where files are written: on the disk to measure")
    seed: int = option(0)


def measure(options: Options) -> Results:
    """Return the times to the first token by length, their ratios, and the bytes read."""
    torch.set_num_threads(options.threads)
    folder = grown(bundled_pair() / "large", options.large)
    model = load_model(str(folder), dtype="bfloat16")
    rng = random.Random(options.seed)
    lengths: dict[str, Any] = {}
    is_equal = True
    for length in options.lengths:
        rounds = [
            _round(model, [rng.randrange(5, 400) for _ in range(length)], options.folder)
            for _ in range(options.repeats)
        ]
        cold, warm, restored, disk, read = (
            [each.seconds[place] for each in rounds] for place in range(5)
        )
        is_equal &= all(each.is_equal for each in rounds)
        lengths[f"{length} tokens"] = {
            "cold_s": Summary.of(cold),
            "warm_s": Summary.of(warm),
            "restored_s": Summary.of(restored),
            "disk_s": Summary.of(disk),
            "read_s": Summary.of(read),
            "beyond_reading_s": Summary.of(
                [
                    wait_s - _MOST_READINGS * each_s
                    for wait_s, each_s in zip(disk, read, strict=True)
                ]
            ),
            "restored_over_cold": paired_ratio(restored, cold),
            "warm_over_cold": paired_ratio(warm, cold),
            "read_bytes": rounds[0].read_bytes,
        }
    return {
        "lengths": lengths,
        "answers_are_equal": is_equal,
        "products": product_support().detail.split(" in ")[0],
        "numerics": model.numerics,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """One text. `seconds`: cold, warm, restored, from the disk; and of reading the files alone."""

    seconds: tuple[float, float, float, float, float]
    read_bytes: int
    is_equal: bool


def _round(model: CausalModel, prompt: list[int], folder: str) -> _Round:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = _store(Path(place))
        engine = _engine(model, store, len(prompt))
        cold_s, right = _ask(engine, prompt)
        while engine.has_work:
            engine.step()
        store.flush()
        warm_s, warm = _ask(engine, prompt)
        store.close()
        restored_s, restored, read_bytes = _restored(model, prompt, Path(place))
        _forget(Path(place))
        read_s = _read(Path(place))
        _forget(Path(place))
        disk_s, again, _ = _restored(model, prompt, Path(place))
    return _Round(
        seconds=(cold_s, warm_s, restored_s, disk_s, read_s),
        read_bytes=read_bytes,
        is_equal=right == warm == restored == again,
    )


def _restored(model: CausalModel, prompt: list[int], place: Path) -> tuple[float, list[int], int]:
    """Return the seconds to the first token, the tokens, and the bytes read, of a new engine."""
    store = _store(place)
    engine = _engine(model, store, len(prompt))
    seconds, tokens = _ask(engine, prompt)
    stats = engine.stats().store
    store.close()
    assert stats.num_restored_tokens >= len(prompt) - 2 * engine.info().tiers["large"].block_size
    return seconds, tokens, stats.num_read_bytes


def _files(place: Path) -> list[Path]:
    return [path for path in sorted(place.rglob("*")) if path.is_file()]


def _forget(place: Path) -> None:
    """Let the system's page cache forget the files. (One in memory, as tmpfs has them, stays.)"""
    for path in _files(place):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _read(place: Path) -> float:
    """Return the seconds of reading all files, one after the other."""
    begun_s = time.perf_counter()
    for path in _files(place):
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass
    return time.perf_counter() - begun_s


def _store(place: Path) -> ExtentStore:
    return ExtentStore(
        ExtentFolder(place, seal=Seal(bytes(32)), budget_bytes=2**33, ttl_s=1e6),
        most_queued_bytes=2**30,
    )


def _engine(model: CausalModel, store: ExtentStore, num_tokens: int) -> Engine:
    """An engine with empty caches that has run a pass."""
    runner = ModelRunner(model=model, num_blocks=num_tokens // 16 + 32)
    engine = Engine(runners={"large": runner}, store=store)
    _ask(engine, list(range(5, 5 + _WARM_UP_TOKENS)))
    return engine


def _ask(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and the tokens."""
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        tier="large",
        sampling=SamplingParams(max_tokens=16),
    )
    begun_s, first_s, tokens = time.perf_counter(), 0.0, list[int]()
    engine.submit(request)
    is_open = True
    while is_open:
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                first_s = first_s or time.perf_counter() - begun_s
                tokens += event.token_ids
            is_open = is_open and not isinstance(event, Finished)
    return first_s, tokens


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a length."""
    yield Table(
        title=f"first token, large model of {options.large}, {options.threads} threads",
        columns=(
            ("cold, s", figure("cold_s", ".3f")),
            ("warm, s", figure("warm_s", ".3f")),
            ("restored, s", figure("restored_s", ".3f")),
            ("disk, s", figure("disk_s", ".3f")),
            ("reading, s", figure("read_s", ".3f")),
            ("disk - read, s", figure("beyond_reading_s", ".3f")),
            ("restored / cold", figure("restored_over_cold", ".3f")),
            ("MB read", figure("read_bytes", ".1f", scale=1e-6)),
        ),
        entries=results["lengths"],
    )


def goals(results: Results) -> list[Goal]:
    """Return what restoring is to keep."""
    return [
        *(
            Goal(
                words=f"restored / cold, {name}",
                measured=each["restored_over_cold"].median,
                bound=_MOST_SHARE,
            )
            for name, each in results["lengths"].items()
        ),
        *(
            Goal(
                words=f"wait from the disk beyond 1.5 readings, s, {name}",
                measured=each["beyond_reading_s"].median,
                bound=_MOST_BEYOND_S,
            )
            for name, each in results["lengths"].items()
        ),
        Goal(
            words="answers that are equal",
            measured=float(results["answers_are_equal"]),
            bound=1.0,
            at_least=True,
        ),
    ]


def _variant(options: Options) -> str:
    return f"{options.large}-bfloat16-{options.threads}-threads"


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, variant=_variant, goals=goals
)

if __name__ == "__main__":
    BENCHMARK.start()
