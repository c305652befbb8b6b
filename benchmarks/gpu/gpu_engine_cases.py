"""A served pair of models on a device: passes, contexts and engines, for gpu_first.

Passes and the drafter's levels are recorded as serving records them
(`gateway/wiring/drafter.py`), so what is timed is what serves.
"""

import random
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.gpu.gpu_attention_cases import random_tree
from benchmarks.gpu.gpu_models import QWEN3_06B, QWEN3_8B, TINY_LARGE, TINY_SMALL
from benchmarks.gpu.gpu_paired_models import Bigrams, paired_model, turn_head
from benchmarks.gpu.gpu_timing import synchronize
from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.device.draft_levels import capture_levels
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.cache.kv_view import KVView
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.events import TokensEmitted
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.passes.step_times import RunningStepTimes, follow_step_times
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.kernels.layers.linear import Linear
from outrider.verifier.params import SamplingParams

BLOCK_SIZE = 16
_CHUNK = 1024
_DRAFTER_ROWS = 16  # recorded passes of the small model; its levels are recorded apart

Mode = Literal["plain", "drafted", "budgeted"]
"""No speculation, trees as large as they may be, or as large as serving finds worth it."""


def make_runner(model: DecoderModel, *, num_tokens: int, max_rows: int) -> ModelRunner:
    """A runner with room for so many tokens, its passes recorded as graphs where there is a GPU."""
    runner = ModelRunner(
        model=model, num_blocks=-(-num_tokens // BLOCK_SIZE) + 32, block_size=BLOCK_SIZE
    )
    runner.capture_graphs(max_rows=max_rows)
    return runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A sequence whose keys and values are in the cache, and room behind them."""

    runner: ModelRunner
    view: KVView
    length: int

    @classmethod
    def filled(cls, runner: ModelRunner, length: int, rng: random.Random) -> "Context":
        """Random tokens, computed."""
        view = runner.new_view("benchmark")
        runner.copy_blocks(view.reserve(length + 128))
        tokens = [rng.randrange(runner.vocab_size) for _ in range(length)]
        for start in range(0, length, _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            runner.forward(
                [ForwardSlice(view=view, token_ids=chunk, start_slot=start, num_logit_rows=1)]
            )
        return cls(runner=runner, view=view, length=length)

    def tree(self, num_nodes: int, rng: random.Random) -> ForwardSlice:
        """A random tree of tokens behind the context; one node is plain decoding."""
        tokens = [rng.randrange(self.runner.vocab_size) for _ in range(num_nodes)]
        if num_nodes == 1:
            return ForwardSlice(
                view=self.view, token_ids=tokens, start_slot=self.length, num_logit_rows=1
            )
        masks = random_tree(num_nodes, rng)
        return ForwardSlice(
            view=self.view,
            token_ids=tokens,
            start_slot=self.length,
            num_logit_rows=num_nodes,
            positions=[self.length + mask.bit_count() - 1 for mask in masks],
            tree_start=self.length,
            ancestor_masks=masks,
        )


# ---- a pair -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSizes:
    """The sizes that are measured. A dry run is the same program on sizes that mean nothing."""

    large: ModelConfig = QWEN3_8B
    small: ModelConfig = QWEN3_06B
    dtype: torch.dtype = torch.bfloat16
    cache_tokens: int = 8192
    rank: int = 256  # of the bigram tables
    draft_depth: int = 8
    draft_width: int = 4
    verified: tuple[int, ...] = (1, 16, 32, 64)  # rows of the large model's passes
    drafted: tuple[int, ...] = (1, 4, 8)  # and of the small model's
    context: int = 1024
    prompt: int = 512
    answer_tokens: int = 160
    turns: int = 3  # answers of a figure; the first one warms up and teaches the budget
    profiled_steps: int = 20

    @property
    def draft_config(self) -> DraftConfig:
        """Trees that fill the largest recorded pass, of the small model's guesses alone."""
        return DraftConfig(
            max_draft_nodes=max(self.verified) - 1,
            max_draft_depth=self.draft_depth,
            max_frontier=self.draft_width,
            sources=("model",),
        )


DRY_SIZES = PairSizes(
    large=TINY_LARGE,
    small=TINY_SMALL,
    dtype=torch.float32,
    cache_tokens=256,
    rank=16,
    draft_depth=2,
    draft_width=2,
    verified=(1, 4),
    drafted=(1,),
    context=20,
    prompt=12,
    answer_tokens=4,
    turns=1,
    profiled_steps=1,
)


@dataclass(kw_only=True)
class ServedPair:
    """A target and its drafter, in the caches and recordings that serving would make.

    `num_levels`: how many of the drafter's levels were recorded.
    """

    sizes: PairSizes
    large: ModelRunner
    small: ModelRunner
    small_model: DecoderModel
    num_levels: int = field(init=False)
    _times: dict[str, RunningStepTimes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Record the levels."""
        self.num_levels = capture_levels(self.sizes.draft_config, self.small, self.large)

    @classmethod
    def load(cls, sizes: PairSizes, device: torch.device, *, cosine: float) -> "ServedPair":
        """Make both models' weights where they are used."""
        large, small = (
            paired_model(
                config, Bigrams(cosine=own, rank=sizes.rank), dtype=sizes.dtype, device=device
            )
            for config, own in ((sizes.large, 1.0), (sizes.small, cosine))
        )
        return cls(
            sizes=sizes,
            large=make_runner(large, num_tokens=sizes.cache_tokens, max_rows=max(sizes.verified)),
            small=make_runner(small, num_tokens=sizes.cache_tokens, max_rows=_DRAFTER_ROWS),
            small_model=small,
        )

    @property
    def device(self) -> torch.device:
        """The device of both models."""
        return self.large.device

    def turn(self, cosine: float) -> None:
        """Have the drafter agree more or less; recordings stay. Its head must not be packed."""
        product = self.small_model.head
        head = product.plain_weight if isinstance(product, Linear) else None
        if head is None:
            raise ValueError("the drafter's head is packed, as on CPUs: load another pair instead")
        turn_head(head, self.sizes.small, Bigrams(cosine=cosine, rank=self.sizes.rank))
        synchronize(self.device)
        self._times.clear()

    def _pass_times(self) -> dict[str, RunningStepTimes]:
        """Passes of both models, measured as at the start of serving, and learnt from since."""
        if not self._times:
            self._times["large"] = follow_step_times(self.large)
            self._times["small"] = follow_step_times(self.small)
        return self._times

    def engine(self, mode: Mode) -> Engine:
        """An engine for one sequence at a time."""
        budget = None
        if mode == "budgeted":
            times = self._pass_times()
            budget = TreeBudget(target_pass_s=times["large"], draft_pass_s=times["small"])
        drafter = TreeDrafter(
            runner=self.small,
            device_target=self.large,
            config=self.sizes.draft_config,
            budget=budget,
        )
        return Engine(
            runners={"large": self.large, "small": self.small},
            drafter=drafter,
            config=EngineConfig(max_sequences=1),
        )

    def request(self, mode: Mode, *, seed: int, tokens: int, temperature: float) -> EngineRequest:
        """Ask for an answer of the large model to random tokens."""
        rng = random.Random(seed)
        vocab_size = self.sizes.large.vocab_size
        return EngineRequest(
            request_id=f"{mode} {seed}",
            prompt_token_ids=tuple(rng.randrange(vocab_size) for _ in range(self.sizes.prompt)),
            tier="large",
            sampling=SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed),
            speculation=SpeculationParams(enabled=mode != "plain"),
        )


# ---- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Decoding of one answer behind its prompt's step."""

    tokens_per_s: float
    step_s: float  # wall time, in the mean
    tokens_per_step: float

    @classmethod
    def of(cls, emitted: list[int], seconds: float) -> "Speed":
        """`emitted`: tokens of each step that emitted any."""
        steps = max(len(emitted), 1)
        return cls(
            tokens_per_s=sum(emitted) / seconds,
            step_s=seconds / steps,
            tokens_per_step=sum(emitted) / steps,
        )


def answer(engine: Engine, request: EngineRequest, device: torch.device) -> Speed:
    """Decode a whole answer, step by step, and time it from its first token on."""
    engine.submit(request)
    started_s: float | None = None
    emitted = []
    while engine.has_work:
        own = num_emitted(engine.step())
        if started_s is None:
            started_s = time.perf_counter() if own else None
        elif own:
            emitted.append(own)
    synchronize(device)
    assert started_s is not None  # an answer has a token
    return Speed.of(emitted, time.perf_counter() - started_s)


def num_emitted(events: list[Any]) -> int:
    """Count the tokens of a step's events."""
    return sum(len(one.token_ids) for one in events if isinstance(one, TokensEmitted))
