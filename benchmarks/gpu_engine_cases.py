"""Passes, levels and answers of real model shapes on a device, for bench_gpu_engine."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.gpu_attention_cases import random_tree
from benchmarks.gpu_timing import synchronize
from draft.calibration import EdgeCalibration
from draft.config import DraftConfig
from draft.device_trees import DeviceCalibration
from draft.tree_drafter import TreeDrafter
from engine.cache.kv_view import KVView
from engine.config import EngineConfig
from engine.core import Engine
from engine.events import Finished, TokensEmitted
from engine.model.decoder import DecoderModel
from engine.passes.device_rows import DeviceRows
from engine.passes.runner import ForwardSlice, ModelRunner
from engine.request import EngineRequest, SamplingParams, SpeculationParams
from engine.trees.forest import Forest, ForestVerdicts
from kernels.sampling.sample import SamplingRows, SamplingTable, top_tokens
from kernels.trees.build_tree import InitialTree, choose_frontier, expand_tree, init_trees
from verifier.coupled import CoupledVerifier

BLOCK_SIZE = 16
_CHUNK = 1024
_RECALLED_BIT = 1 << 5
_CAPACITY = 256
_MOST_BELIEVED = 0.7


def make_runner(model: DecoderModel, *, num_tokens: int, max_rows: int = 256) -> ModelRunner:
    """A runner with room for so many tokens, its passes recorded as graphs where there is a GPU."""
    runner = ModelRunner(
        model=model, num_blocks=-(-num_tokens // BLOCK_SIZE) + 32, block_size=BLOCK_SIZE
    )
    runner.capture_graphs(max_rows=max_rows)
    return runner


# ---- passes -------------------------------------------------------------------------------------


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
        runner.copy_blocks(view.reserve(length + 256))
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


def rate(work: Callable[[], object], *, device: torch.device, count: int) -> float:
    """Seconds of one of `count` runs that are launched without waiting in between."""
    synchronize(device)
    started_s = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - started_s) / count


def draft_levels(
    context: Context, *, width: int, branching: int, num_levels: int
) -> Callable[[], None]:
    """So many levels of a tree: choose, compute, rank and add, all launched and none waited for."""
    runner, device = context.runner, context.runner.device
    root = SimpleNamespace(
        token_id=1,
        parent=-1,
        depth=0,
        sources=0,
        evidence=0,
        is_expanded=False,
        is_recalled=False,
        model_confidence=1.0,
        text_confidence=1.0,
        confidence=1.0,
        edge_prob=1.0,
        path_prob=1.0,
        covered=0.0,
    )
    tree = InitialTree(
        candidates=[root], root_slot=context.length - 1, max_nodes=64, max_depth=num_levels + 1
    )
    fresh, state = (
        init_trees(
            [tree], capacity=_CAPACITY, width=width, recalled_bit=_RECALLED_BIT, device=device
        )
        for _ in range(2)
    )
    changed = ("candidates", "numbers", "ancestor_words", "frontier")
    pairs = [(getattr(state, name), getattr(fresh, name)) for name in changed]
    table = DeviceCalibration(EdgeCalibration(), device).table()
    sampling = SamplingTable(
        parameters=torch.zeros((4, 1), dtype=torch.int32, device=device),  # greedy
        noise_keys=torch.zeros((1, num_levels + 2, 2), dtype=torch.int32, device=device),
        has_sampled=False,
        has_truncation=False,
    )
    first = 3.0 * torch.randn(1, runner.vocab_size, device=device)

    def expand(logits: Tensor, rows: SamplingRows) -> None:
        best = top_tokens(logits, rows, branching, with_probs=True)
        assert best.probs is not None
        expand_tree(state, best.token_ids, best.probs, table, min_path_prob=0.0)

    @torch.inference_mode()
    def levels() -> None:
        for old, new in pairs:
            old.copy_(new)
        index = state.sequence_index[:1]
        expand(first, sampling.rows(index, torch.zeros_like(index)))
        for _ in range(num_levels):
            rows = choose_frontier(state, min_path_prob=0.0, most_believed=_MOST_BELIEVED)
            output = runner.forward(
                [],
                DeviceRows(
                    views=[context.view],
                    token_ids=rows.token_ids,
                    positions=rows.positions,
                    logical_slots=rows.logical_slots,
                    sequence_index=rows.sequence_index,
                    ancestor_words=rows.ancestor_words,
                    row_starts=rows.row_starts,
                    num_rows=rows.num_rows,
                    tree_starts=rows.tree_starts,
                    kv_lens=rows.kv_lens,
                ),
            )
            expand(output.logits, sampling.rows(rows.sequence_index, rows.depth))

    return levels


# ---- answers ------------------------------------------------------------------------------------


class SyntheticVerifier(CoupledVerifier):
    """Judges as the coupled rule does, and then has a made-up path accepted instead.

    Random models agree on nothing. The work of a step is all done, the keys and values of the path
    are moved, and `mean_tokens` are emitted a step in the mean, where trees are deep enough: what
    speed follows from a given acceptance can be measured, and nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean_tokens = 1.0
        self._owed = 0.0

    def judge_forest(
        self, forest: Forest, logits: Tensor, table: SamplingTable | None = None
    ) -> ForestVerdicts:
        """For a forest of one tree; as the parent, but for the outcome."""
        verdicts = super().judge_forest(forest, logits, table)
        self._owed += self.mean_tokens - 1.0
        depth = int(self._owed)
        self._owed -= depth
        return made_up(verdicts, forest, logits, depth=depth)


def made_up(
    verdicts: ForestVerdicts, forest: Forest, logits: Tensor, *, depth: int
) -> ForestVerdicts:
    """Accept the path to the first node of this depth, or of the deepest that there is."""
    num_rows, max_depth = forest.total_rows, verdicts.accepted_path.shape[1]
    index = torch.arange(num_rows, device=logits.device)
    is_candidate = (forest.tree_index == 0) & (forest.depth <= depth)
    order = (forest.depth * num_rows + (num_rows - 1 - index)).where(is_candidate, -1)
    last = order.argmax()  # the orders differ
    words = forest.ancestor_words[last]  # [num_words]
    place = index - forest.row_starts[0]
    bits = words[(place // 64).clamp(0, words.shape[0] - 1)] >> (place % 64)
    on_path = ((bits & 1) != 0) & (forest.tree_index == 0) & (forest.depth > 0)
    # One place more takes the rows that are not on the path.
    target = (forest.depth - 1).where(on_path, max_depth)
    path = torch.full((max_depth + 1,), -1, dtype=torch.int64, device=logits.device)
    path.scatter_(0, target, index)
    tokens = torch.full((max_depth + 2,), -1, dtype=torch.int64, device=logits.device)
    tokens.scatter_(0, target.where(on_path, max_depth + 1), forest.token_ids)
    next_token = logits.index_select(0, last.view(1)).argmax(-1)
    tokens.scatter_(0, forest.depth.index_select(0, last.view(1)), next_token)
    return replace(
        verdicts,
        accepted_path=path[None, :max_depth],
        emitted_tokens=tokens[None, : max_depth + 1],
    )


class _NothingLearnt(EdgeCalibration):
    """Keeps its first opinion: made-up verdicts teach nothing."""

    def observe(self, *_: object, **__: object) -> None:
        """Forget it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Steady decoding of one sequence. step_s: wall time of a step, in the mean."""

    tokens_per_s: float
    step_s: float
    tokens_per_step: float
    num_steps: int


@dataclass(slots=True, kw_only=True)
class Answering:
    """One sequence at a time on both models."""

    engine: Engine
    verifier: SyntheticVerifier
    _number: int = 0

    @classmethod
    def of(
        cls, large: ModelRunner, small: ModelRunner, *, num_nodes: int, num_levels: int, width: int
    ) -> "Answering":
        """Trees of that many guesses and levels, whatever the models think of them."""
        config = DraftConfig(
            max_draft_nodes=num_nodes,
            max_draft_depth=num_levels,
            max_frontier=width,
            min_path_prob=0.0,
            sources=("model",),
        )
        drafter = TreeDrafter(
            runner=small, device_target=large, config=config, calibration=_NothingLearnt()
        )
        verifier = SyntheticVerifier()
        engine = Engine(
            runners={"large": large, "small": small},
            verifier=verifier,
            drafter=drafter,
            config=EngineConfig(max_sequences=1),
        )
        return cls(engine=engine, verifier=verifier)

    def speed(
        self, prompt: tuple[int, ...], *, mean_tokens: float | None, num_steps: int, warm_up: int
    ) -> Speed:
        """Decode `num_steps` steps behind the first `warm_up` tokens.

        mean_tokens: what a step is to emit, None for plain decoding.
        """
        self._number += 1
        self.verifier.mean_tokens = mean_tokens or 1.0
        largest = int((mean_tokens or 1.0) + 1.0)
        request = EngineRequest(
            request_id=str(self._number),
            prompt_token_ids=prompt,
            tier="large",
            sampling=SamplingParams(max_tokens=(num_steps + warm_up + 4) * largest),
            speculation=SpeculationParams(enabled=mean_tokens is not None),
        )
        self.engine.submit(request)
        try:
            seen = 0
            while seen < warm_up:
                seen += self._step()
            started_s = time.perf_counter()
            emitted = [self._step() for _ in range(num_steps)]
            seconds = time.perf_counter() - started_s
        finally:
            self.engine.abort(request.request_id)
            for _ in range(3):  # a step that is under way ends in the next one
                self.engine.step()
        return Speed(
            tokens_per_s=sum(emitted) / seconds,
            step_s=seconds / num_steps,
            tokens_per_step=sum(emitted) / num_steps,
            num_steps=num_steps,
        )

    def _step(self) -> int:
        """Tokens that a step emitted."""
        events = self.engine.step()
        if any(isinstance(event, Finished) for event in events):
            raise RuntimeError("the answer ended while it was measured")
        return sum(len(one.token_ids) for one in events if isinstance(one, TokensEmitted))
