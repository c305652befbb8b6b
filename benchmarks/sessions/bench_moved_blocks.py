"""Is an answer behind blocks that were away ever another one, and what does a folder survive?

Question: does a conversation that returns get the same tokens and log-probabilities wherever its
keys and values have been meanwhile? What is left of a folder whose engines are killed while they
write and read? How long does an engine take to start with a large folder?

Method: the bundled pair in bfloat16, whose compiled arithmetic keeps every row's bits. Each of
--conversations prompts of some hundred tokens is answered, sampled with a seed of its own, first by
an engine that drafts nothing and has nothing cached: the right answer. Then with speculation and
without in five ways: cold; warm, in the same engine again; disk, in one whose memory is too small,
so that the blocks have left it; restart, in a new engine that has the folder only; peer, in a new
engine that pulls them over a socket. Engines are told that their models are slow, or they would
compute such short texts. Then --kills processes that use one small folder are killed, two at a
time, at random moments. Last a folder of --extents files is opened.

Reading it: all counts of differences, garbage and damage must be 0; `moved tokens` shows that the
way was taken. The seconds of the start are processor time, of names and sizes from the memory.

    python -m benchmarks.sessions.bench_moved_blocks
"""

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.sessions import killed_writer
from benchmarks.sessions.moved_conversations import compare_ways
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, count, figure, option
from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_space import SPACE_PREFIX, About
from outrider.engine.cache.sealing import Seal

_PARTS: Final = ("conversations", "kills", "start")
_MOVED: Final = ("warm", "disk", "restart", "peer")
_LEAST_MOVED: Final = 0.8
_MOST_START_S: Final = 1.0
_KEY: Final = bytes(32)
_ABOUT: Final = About(model="a-model", fingerprint="f" * 32)


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    conversations: int = option(500)
    questions: int = option(12, "that a prompt is made of, of some 26 tokens each")
    max_new: int = option(24, "tokens of an answer, at most")
    minutes: float | None = option(None, "after which no more conversations are asked")
    kills: int = option(1000)
    extents: int = option(100_000, "files of the folder that is opened")
    parts: tuple[str, ...] = option(_PARTS, choices=_PARTS)
    seed: int = option(0)


# ---- parts ------------------------------------------------------------------------------------


def conversations(options: Options) -> dict[str, Any]:
    """Return by way how many answers there were, and how many were not the right ones."""
    return compare_ways(
        options.conversations,
        num_questions=options.questions,
        max_tokens=options.max_new,
        seed=options.seed,
        most_s=math.inf if options.minutes is None else options.minutes * 60,
    )


def kills(options: Options) -> dict[str, int]:
    """Return what processes left that were killed."""
    with tempfile.TemporaryDirectory() as place:
        found = killed_writer.kill(
            Path(place) / "kv", num_kills=options.kills, seed=options.seed, timeout_s=3600
        )
    return {"num_kills": options.kills, **found}


def start(options: Options) -> dict[str, float]:
    """Return the processor time that opening a folder of so many files takes."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        _fill(place, options.extents)
        begun_s = time.process_time()
        folder = ExtentFolder(place, seal=Seal(_KEY), budget_bytes=2**40, ttl_s=1e6)
        space = folder.space(_ABOUT)
        opened_s = time.process_time()
        folder.collect()
        ended_s = time.process_time()
    return {
        "extents": len(space),
        "open_s": opened_s - begun_s,
        "collect_s": ended_s - opened_s,
    }


def _fill(place: Path, num_extents: int) -> None:
    """Make files with the names of extents of 16 blocks; what they hold is read later."""
    space = place / (SPACE_PREFIX + _ABOUT.fingerprint)
    space.mkdir(mode=0o700)
    seal = Seal(_KEY)
    for number in range(num_extents):
        codes = "".join(seal.code(b"%d %d" % (number, each)) for each in range(16))
        (space / f"b-{number % 64 * 16}-{codes}.kv").touch(mode=0o600)


# ---- the script -------------------------------------------------------------------------------


def measure(options: Options) -> Results:
    """Return what the parts have found."""
    torch.set_num_threads(1)
    parts = {"conversations": conversations, "kills": kills, "start": start}
    return {name: part(options) for name, part in parts.items() if name in options.parts}


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A table a part."""
    if "conversations" in results:
        yield Table(
            title="conversations",
            columns=(
                ("answers", count("answers")),
                ("different", count("different")),
                ("moved tokens", count("moved_tokens")),
            ),
            entries=results["conversations"]["ways"],
        )
    if "kills" in results:
        yield Table(
            title="processes that were killed",
            columns=(
                ("kills", count("num_kills")),
                ("garbage", count("num_garbage")),
                ("damaged", count("num_damaged")),
                ("other files left", count("num_others_left")),
                ("bytes later", count("num_bytes_later")),
                ("budget", count("budget_bytes")),
            ),
            entries={"": results["kills"]},
        )
    if "start" in results:
        yield Table(
            title="start with a folder",
            columns=(
                ("files", count("extents")),
                ("open, s", figure("open_s", ".3f")),
                ("clean up, s", figure("collect_s", ".3f")),
            ),
            entries={"": results["start"]},
        )


def goals(results: Results) -> list[Goal]:
    """Return what moved blocks are to keep."""
    found: list[Goal] = []
    if "conversations" in results:
        ways = results["conversations"]["ways"]
        different = sum(each["different"] for each in ways.values())
        least = min(
            each["moved_tokens"] for name, each in ways.items() if name.split(",")[0] in _MOVED
        )
        share = least / results["conversations"]["prompt_tokens"]
        found.append(Goal(words="answers that differ", measured=float(different), bound=0.0))
        found.append(
            Goal(
                words="moved / all prompt tokens", measured=share, bound=_LEAST_MOVED, at_least=True
            )
        )
    if "kills" in results:
        each = results["kills"]
        wrong = each["num_garbage"] + each["num_damaged"] + each["num_others_left"]
        over = max(each["num_bytes_later"] - each["budget_bytes"], 0)
        found.append(Goal(words="kills: garbage, damage, rests", measured=wrong, bound=0.0))
        found.append(Goal(words="kills: bytes over the budget", measured=over, bound=0.0))
    if "start" in results:
        measured = results["start"]["open_s"]
        found.append(Goal(words="start, s", measured=measured, bound=_MOST_START_S))
    return found


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, variant="demo-bfloat16", goals=goals
)

if __name__ == "__main__":
    BENCHMARK.start()
