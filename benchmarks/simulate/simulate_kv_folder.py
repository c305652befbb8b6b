"""Does a folder for keys and values that drops what is worth least find more than one by LRU?

Question: a folder has room for a part of all blocks only. Which of them should go?

Method: Mooncake's trace (--trace), or texts with its statistics, in its own time and with nothing
but the folder: every block of a prompt is one file. A prompt finds the files of its beginning, up
to the first one that is missing, and writes the others. Where the folder is full, a tenth of it
goes: by the folder's own `value_of`, or what was used least recently, of one text the end first.

Reading it: the share of all prompts' blocks that was found. `all`: in a folder for everything.

    python -m benchmarks.simulate.simulate_kv_folder --trace mooncake_conversation_trace.jsonl
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, figure, option
from benchmarks.shared.harness import progress_bar
from benchmarks.simulate.fleet_trace import BLOCK, Row, read_mooncake, synthetic
from outrider.engine.cache.extent_folder import value_of
from outrider.engine.cache.extent_space import About, StoredExtent
from outrider.engine.cache.sealing import CODE_SIZE

_BLOCK_SIZE: Final = 16
_BLOCKS: Final = BLOCK // _BLOCK_SIZE
_KEPT: Final = 0.9
_LEAST_GAIN: Final = 0.99
_TOUCH_AGAIN_S: Final = 60.0
_ABOUT: Final = About(model="any", fingerprint="any", block_size=_BLOCK_SIZE)
_SHARES: Final = (0.03, 0.06, 0.12, 0.25)

Worth = Callable[[StoredExtent, float], Any]
"""Of a file at a moment: the least goes first."""


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    trace: Path | None = option(None, "Mooncake's trace (JSON lines); unset: texts like it")
    requests: int = option(12_000, "of the trace, the first ones")
    shares: tuple[float, ...] = option(_SHARES, "of all blocks that the folder has room for")


class _Folder:
    """Files by the ids of their blocks, at most `room` of them."""

    def __init__(self, room: int, worth: Worth) -> None:
        self._room = room
        self._worth = worth
        self._files: dict[int, StoredExtent] = {}

    def ask(self, ids: Sequence[int], now_s: float) -> int:
        """Return how many blocks of a prompt are found; write the others."""
        found = next((n for n, each in enumerate(ids) if each not in self._files), len(ids))
        for each in ids[:found]:
            file = self._files[each]
            if now_s - file.used_s > _TOUCH_AGAIN_S:
                file.used_s, file.num_uses = now_s, file.num_uses + 1
        for place in range(found, len(ids)):
            if len(self._files) >= self._room:
                self._collect(now_s)
            self._files[ids[place]] = StoredExtent(
                file_name=f"b-{place * _BLOCKS}-{'a' * CODE_SIZE * _BLOCKS}.kv",
                num_bytes=1,
                used_s=now_s,
            )
        return found

    def _collect(self, now_s: float) -> None:
        order = sorted(self._files, key=lambda each: self._worth(self._files[each], now_s))
        for each in order[: len(order) - int(self._room * _KEPT)]:
            del self._files[each]


def _by_value(file: StoredExtent, now_s: float) -> float:
    return value_of(file, _ABOUT, now_s)


def _by_last_use(file: StoredExtent, now_s: float) -> tuple[float, int]:
    del now_s
    return file.used_s, -file.first


_POLICIES: Final[dict[str, Worth]] = {"value": _by_value, "lru": _by_last_use}


def measure(options: Options) -> Results:
    """Return the share of blocks that is found, by the folder's size and policy."""
    count = options.requests
    trace = synthetic(count) if options.trace is None else read_mooncake(options.trace, most=count)
    num_blocks = len({each for row in trace for each in row[3]})
    rooms = {f"{share:.0%}": int(num_blocks * share) for share in options.shares}
    with progress_bar("folders", len(rooms) * len(_POLICIES)) as advance:
        found = {}
        for words, room in rooms.items():
            by_policy = {}
            for name, worth in _POLICIES.items():
                by_policy[name] = _found_share(trace, _Folder(room, worth))
                advance(f"{words}, {name}")
            found[words] = by_policy | {"value_over_lru": by_policy["value"] / by_policy["lru"]}
    everything = _found_share(trace, _Folder(num_blocks + 1, _by_value))
    return {"blocks": num_blocks, "rooms": found, "all": everything}


def _found_share(trace: Sequence[Row], folder: _Folder) -> float:
    found = sum(folder.ask(row[3], row[0]) for row in trace)
    return found / sum(len(row[3]) for row in trace)


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a size."""
    del options
    share = partial(figure, spec=".4f")
    yield Table(
        title="blocks of prompts that a folder finds",
        first="room for",
        columns=(
            ("by value", share("value")),
            ("by LRU", share("lru")),
            ("value / LRU", figure("value_over_lru", ".3f")),
        ),
        entries=results["rooms"],
        caption=f"{results['blocks']:,} blocks; all in a folder: {results['all']:.4f}",
    )


def goals(results: Results) -> list[Goal]:
    """Return what value is to gain over LRU: nowhere less, but for a hundredth."""
    return [
        Goal(
            words=f"value / LRU with room for {words}",
            measured=each["value_over_lru"],
            bound=_LEAST_GAIN,
            at_least=True,
        )
        for words, each in results["rooms"].items()
    ]


BENCHMARK: Final = Benchmark(
    options=Options,
    measure=measure,
    tables=tables,
    goals=goals,
    variant=lambda options: "synthetic" if options.trace is None else "mooncake",
)

if __name__ == "__main__":
    BENCHMARK.start()
