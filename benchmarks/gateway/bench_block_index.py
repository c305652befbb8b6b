"""How long does a placement by the block index take, and how much memory does the index?

Method: an index is filled with blocks of many replicas: of each its own, and some of the beginning
of one long text that all share. Then requests are placed among all replicas, with prompts of
several lengths: unknown, known to one replica, and the shared text in front of them. Hashing the
prompt and taking in news are timed apart.

Reading it: microseconds of processor time, the median of rounds' medians, the least and the most of
these, and the 99th percentile of all: what other programs take of the machine is not in them, but
what they take of its caches and of its other hyperthreads is. Bytes are what the process grew by.

    python -m benchmarks.gateway.bench_block_index
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Results, Table, count, figure, option
from benchmarks.shared.harness import progress_bar
from outrider.engine.cache.block_pool import prefix_hashes, prefix_root
from outrider.engine.events import TierInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.block_table import Keys
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.replica_placement import Loads, ReplicaLoad
from outrider.verifier.params import SamplingParams

_BLOCK = 16
_SHARED_BLOCKS = 6000
_PLACED = ("p50_us", "p50_us_least", "p50_us_most", "p99_us")
_TIER = TierInfo(
    tier="large",
    model_id="m",
    path="m",
    max_context=2**20,
    vocab_size=2,
    num_parameters=1,
    dtype="bfloat16",
    device="cpu",
    block_size=_BLOCK,
)


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    replicas: int = option(1000)
    pairs: int = option(10_000_000)
    runs: int = option(100, "placements of each kind in a row")
    repeats: int = option(9, "rounds of all kinds, in turn")


def measure(options: Options) -> Results:
    """Return times in microseconds and sizes in bytes."""
    num_replicas, num_pairs = options.replicas, options.pairs
    rng = np.random.default_rng(0)
    num_own = num_pairs // num_replicas
    shared = _random_keys(rng, _SHARED_BLOCKS)
    before_bytes = _resident_bytes()
    index = BlockIndex(max_blocks=num_pairs, max_lanes=num_replicas)
    owned: Keys = shared
    with progress_bar("filling", num_replicas) as advance:
        for number in range(num_replicas):
            lane = index.add_lane(most_blocks=2 * num_own)
            depth = min(num_own // 4, _SHARED_BLOCKS, 60 * (number % 100))
            owned = _random_keys(rng, num_own - depth)
            index.note(lane, BlocksReset(0, np.concatenate([shared[:depth], owned]).tobytes()))
            advance("")
    index.flush()
    found: dict[str, Any] = {
        "pairs": index.num_pairs,
        "lost": index.num_lost,
        "bytes_per_pair": (_resident_bytes() - before_bytes) / index.num_pairs,
    }
    placement = CacheAware(index, tiers={"large": _TIER})
    candidates = Loads.of(
        ReplicaLoad(replica_id=str(lane), index_lane=lane) for lane in range(num_replicas)
    )
    most = min(6000, len(owned))
    prompts = {
        "unknown, 1,024 tokens": _random_keys(rng, 64),
        "unknown, 96,000 tokens": _random_keys(rng, 6000),
        "of one replica, 8,192 tokens": owned[: min(512, most)],
        "of one replica, to 96,000 tokens": owned[:most],
        "of all, 8,192 tokens": shared[:512],
        "of all, 96,000 tokens": shared,
    }
    rounds: dict[str, list[list[float]]] = {name: [] for name in prompts}
    for _ in range(options.repeats):
        for name, keys in prompts.items():
            rounds[name].append(_timed_places(placement, keys, candidates, options.runs))
    found["place"] = {
        name: {
            "p50_us": float(np.median([np.median(each) for each in own])) * 1e6,
            "p50_us_least": float(min(np.median(each) for each in own)) * 1e6,
            "p50_us_most": float(max(np.median(each) for each in own)) * 1e6,
            "p99_us": float(np.percentile(np.concatenate(own), 99)) * 1e6,
        }
        for name, own in rounds.items()
    }
    found["update_us"] = _time_updates(index, rng, num_replicas)
    found["hash_us_per_block"] = _time_hashes()
    return found


def _random_keys(rng: np.random.Generator, count: int) -> Keys:
    return rng.integers(1, 2**63, size=count, dtype=np.uint64)


def _timed_places(
    placement: CacheAware, keys: Keys, candidates: Loads, num_runs: int
) -> list[float]:
    tokens = (0,) * (len(keys) * _BLOCK + 1)
    seconds = []
    for number in range(num_runs):
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=tokens,
            tier="large",
            sampling=SamplingParams(max_tokens=1),
        )
        seconds.append(_seconds(partial(placement.place, request, keys, candidates)))
        placement.note_end(request.request_id)
    return seconds


def _time_updates(index: BlockIndex, rng: np.random.Generator, num_replicas: int) -> float:
    """Return microseconds for each hash that is kept, as messages of a hundred of them."""
    news = [
        (lane, BlocksChanged(1, _random_keys(rng, 100).tobytes(), b""))
        for lane in range(min(num_replicas, 200))
    ]

    def take_in() -> None:
        for lane, message in news:
            index.note(lane, message)
        index.flush()

    return _seconds(take_in) * 1e6 / (100 * len(news))


def _time_hashes() -> float:
    root, tokens = prefix_root("n", "d", ""), tuple(range(16_000))
    return _seconds(lambda: list(prefix_hashes(root, tokens, _BLOCK))) * 1e6 / 1000


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    work()
    return time.thread_time() - begun_s


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


def tables(options: Options, results: Results) -> Iterator[Table]:
    """Placements by prompt, and the index itself."""
    title = f"placement among {options.replicas} replicas"
    columns = [(name, count(name)) for name in _PLACED]
    yield Table(title=title, columns=columns, entries=results["place"])
    names = ("pairs", "bytes_per_pair", "update_us", "hash_us_per_block")
    entries = {name: {"is": results[name]} for name in names}
    yield Table(title="the index", columns=(("", figure("is", ".4g")),), entries=entries)


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant="cpu")

if __name__ == "__main__":
    BENCHMARK.start()
