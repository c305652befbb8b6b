"""How soon does an answer begin whose prompt is in a folder on the disk, after a restart?

Question: a prompt that returns need not be computed where its keys and values are kept. What does
it wait then, against computing it, and against finding it in memory?

Method: the bundled pair's large model grown to --large parameters, in bfloat16, without drafts. In
each round a new text, three times: cold, again in the same engine (warm), and in an engine with
empty caches that has the folder only (restored), which reads, opens, checks and copies it. The time
is that from submitting to the first token. The answers' tokens must be the same.

Reading it: `restored / cold` is the share of the wait that is left. The files come from the
system's page cache, as they do soon after they were written; a disk adds bytes / bandwidth.

    python -m benchmarks.speculation.bench_kv_folder
"""

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
_WARM_UP_TOKENS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(3, "texts of each length")
    large: str = option("400M", "parameters that the large model is grown to")
    lengths: tuple[int, ...] = option(_LENGTHS, "tokens of a prompt")
    threads: int = option(1)
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
            _round(model, [rng.randrange(5, 400) for _ in range(length)])
            for _ in range(options.repeats)
        ]
        cold, warm, restored = ([each.seconds[place] for each in rounds] for place in range(3))
        is_equal &= all(each.is_equal for each in rounds)
        lengths[f"{length} tokens"] = {
            "cold_s": Summary.of(cold),
            "warm_s": Summary.of(warm),
            "restored_s": Summary.of(restored),
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
    """One text. `seconds`: cold, warm, restored."""

    seconds: tuple[float, float, float]
    read_bytes: int
    is_equal: bool


def _round(model: CausalModel, prompt: list[int]) -> _Round:
    with tempfile.TemporaryDirectory() as place:
        store = _store(Path(place))
        engine = _engine(model, store, len(prompt))
        cold_s, right = _ask(engine, prompt)
        while engine.has_work:
            engine.step()
        store.flush()
        warm_s, warm = _ask(engine, prompt)
        store.close()
        store = _store(Path(place))
        engine = _engine(model, store, len(prompt))
        restored_s, restored = _ask(engine, prompt)
        stats = engine.stats().store
        store.close()
    assert stats.num_restored_tokens >= len(prompt) - 2 * engine.info().tiers["large"].block_size
    return _Round(
        seconds=(cold_s, warm_s, restored_s),
        read_bytes=stats.num_read_bytes,
        is_equal=right == warm == restored,
    )


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
