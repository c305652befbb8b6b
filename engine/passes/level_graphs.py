"""Whole levels of trees that grow on the device, each one recorded CUDA graph.

A level chooses the nodes that the model computes next, takes their rows in, runs the pass, ranks
the tokens and adds the best as children. Launched one by one that is some ten launches around the
recorded pass, with the host's work between them; here it is one, and the levels of a step follow
each other with nothing between them. The trees, their block tables and what their tokens are drawn
with come to static tensors once a step (`LevelGraphs.begin`). The rest lies on the device already.

A recording has a number of trees (`TREE_COUNTS`); a step that has fewer is filled up with trees
that have no rows. Every tensor outside the graphs' own memory that a recording reads or writes
belongs to `LevelGraphs` or, for one recording only, to its `CapturedLevel`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.cache.kv_view import KVView
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.cuda_capture import (
    BYTES_PER_GRAPH,
    CaptureFn,
    Run,
    no_garbage_collection,
)
from outrider.engine.passes.pass_graphs import MAX_BLOCK_IDS, MOST_LOGIT_ROWS
from outrider.engine.passes.step_buffers import PassLayout, StepBuffers, tree_rows
from outrider.engine.passes.tile_plans import TilePlanner, prepare_plan
from outrider.kernels.attention.attention_tiles import TilePlan
from outrider.kernels.attention.stage_rows import PassInputs, stage_rows
from outrider.kernels.sampling.sample import SamplingTable, top_tokens
from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.kernels.trees.choose_frontier import choose_frontier
from outrider.kernels.trees.expand_tree import EdgeTable, expand_tree
from outrider.kernels.trees.initial_trees import InitialTree, init_trees, padding_tree, write_trees
from outrider.kernels.trees.parent_rows import keep_rows, parent_rows
from outrider.kernels.trees.tree_state import (
    MAX_CAPACITY,
    NUM_FIELDS,
    TreeState,
    number,
)

logger = logging.getLogger(__name__)

TREE_COUNTS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LevelConfig:
    """Settings that all levels of a model share."""

    width: int
    """Rows of a tree in a level."""
    branching: int
    """Children named behind each row."""
    max_levels: int
    """Behind the roots' level."""
    capacity: int
    """The most candidates of a tree."""
    min_path_prob: float
    """As of `choose_frontier`."""
    most_believed: float
    """As of `choose_frontier`."""
    vocab_size: int
    """The number of the logits' columns that are ranked."""
    token_ids: Tensor | None
    """The target's token of each column, for a model that has some of its tokens."""
    recalled_bit: int
    """As of `init_trees`."""
    table: EdgeTable
    """The calibration of guesses; its shifts change with what is learnt."""

    def fits(self, other: "LevelConfig") -> bool:
        """True if levels recorded with this one are what a drafter with the other one wants."""
        own, wanted = self.table, other.table
        return (
            self.token_ids is other.token_ids
            and own.model_bit == wanted.model_bit
            and own.shifts.shape == wanted.shifts.shape
            and all(
                getattr(self, name) == getattr(other, name)
                for name in (
                    *("width", "branching", "max_levels", "capacity", "min_path_prob"),
                    *("most_believed", "vocab_size", "recalled_bit"),
                )
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLevel:
    """A recorded level of so many trees, and how to run it again.

    Its plan, inputs and table are kept because what was recorded goes on reading and writing them.
    """

    state: TreeState
    layout: PassLayout
    inputs: PassInputs
    plan: TilePlan
    sampling: SamplingTable
    max_keys: int
    replay: Run


@dataclass(slots=True, kw_only=True)
class RecordedTrees:
    """A step's trees in the static tensors, whose levels are replayed."""

    captured: CapturedLevel
    state: TreeState
    """The part of the static state that the step's trees use."""
    hidden: Tensor | None
    """What a head's rows gave, by draft offset, of the step's trees alone."""
    num_rows: int
    """Rows of a level, padding included."""
    mean_context: float
    """Tokens that a row sees at most."""

    def replay(self) -> None:
        """Grow all trees by a level."""
        self.captured.replay()


@dataclass(slots=True, kw_only=True)
class LevelGraphs:
    """The recorded levels of one runner; see this module's docstring.

    One step's trees are in the static tensors at a time. `begin` writes over the last one's, which
    the device has read by then, as everything is ordered by its stream.
    """

    config: LevelConfig
    model: CausalModel
    kv_cache: KVCache
    buffers: StepBuffers
    planner: TilePlanner
    max_block_ids: int
    _captured: dict[tuple[int, bool], CapturedLevel] = field(init=False, default_factory=dict)
    _words: Tensor = field(init=False)
    _shifts: Tensor | None = field(init=False, default=None)
    _table: EdgeTable = field(init=False)
    _state: TreeState = field(init=False)
    _hidden: Tensor | None = field(init=False, default=None)
    _paths: Tensor | None = field(init=False, default=None)
    tree_counts: tuple[int, ...] = field(init=False)
    """The numbers of trees that are recorded."""

    def __post_init__(self) -> None:
        """Allocate what all recordings share."""
        config, device = self.config, self.model.device
        counts = (count for count in TREE_COUNTS if count * config.width <= MOST_LOGIT_ROWS)
        self.tree_counts = tuple(counts)
        most = self.tree_counts[-1]
        self._state = init_trees(
            [padding_tree()] * most,
            capacity=config.capacity,
            width=config.width,
            recalled_bit=config.recalled_bit,
            device=device,
        )
        words = self._layout(most).num_words(self.max_block_ids)
        self._words = torch.zeros(words, dtype=torch.int64, device=device)
        self._paths = self.planner.paths(most * config.width)
        table = config.table
        self._table = EdgeTable(
            shifts=table.shifts.clone(),
            bin_edges=table.bin_edges,
            depth_edges=table.depth_edges,
            least=table.least,
            most=table.most,
            model_bit=table.model_bit,
        )
        if feature_size := self.model.feature_size:
            self._hidden = torch.zeros(
                (most, 1 + config.max_levels * config.width, feature_size),
                dtype=self.model.dtype,
                device=device,
            )

    @property
    def num_captured(self) -> int:
        """Count how many levels were recorded."""
        return len(self._captured)

    def _layout(self, num_trees: int) -> PassLayout:
        return self.buffers.layout(num_rows=num_trees * self.config.width, num_sequences=num_trees)

    # ---- recording ------------------------------------------------------------------------

    def capture(self, capture: CaptureFn) -> None:
        """Record every number of trees, with and without truncated rows, the largest first.

        A level for which the memory does not suffice is left out, and is launched piece by piece.
        """
        with no_garbage_collection():
            for num_trees in reversed(self.tree_counts):
                for truncates in (True, False):
                    try:
                        own = self._capture_one(capture, num_trees, truncates=truncates)
                    except torch.OutOfMemoryError:
                        logger.warning(
                            "draft level left out trees=%d reason=out_of_memory", num_trees
                        )
                    else:
                        self._captured[num_trees, truncates] = own
        logger.info("draft levels captured=%d", len(self._captured))

    def _capture_one(self, capture: CaptureFn, num_trees: int, *, truncates: bool) -> CapturedLevel:
        config, device = self.config, self.model.device
        num_rows = num_trees * config.width
        layout = self._layout(num_trees)
        inputs = layout.inputs(self._words)
        shape = self.planner.shape(config.width)
        max_keys = self.planner.max_keys(shape, num_rows)
        plan = self.planner.plan(
            inputs,
            shape=shape,
            max_keys=max_keys,
            zeros=layout.tensor(self._words, "zeros") if layout.has_full else None,
            paths=None if self._paths is None else self._paths[:num_rows],
            window_blocks=self.kv_cache.window_blocks,
        )
        state = self._state.first(num_trees)
        # So that warming up writes to no sequence's cache.
        self._write_inputs(layout, [])
        write_trees(state, [padding_tree()] * num_trees, config.recalled_bit)
        sampling = SamplingTable(
            parameters=torch.zeros((4, num_trees), dtype=torch.int32, device=device),
            noise_keys=torch.zeros(
                (num_trees, MAX_TREE_NODES, 2), dtype=torch.int32, device=device
            ),
            has_sampled=True,  # greedy rows stay greedy
            has_truncation=truncates,
        )

        def run() -> None:
            self._run(state, inputs, plan, sampling)

        return CapturedLevel(
            state=state,
            layout=layout,
            inputs=inputs,
            plan=plan,
            sampling=sampling,
            max_keys=max_keys,
            replay=capture(run),
        )

    def _run(
        self, state: TreeState, inputs: PassInputs, plan: TilePlan, sampling: SamplingTable
    ) -> None:
        """Do what is recorded: choose, compute, rank and add."""
        config = self.config
        rows = choose_frontier(
            state,
            min_path_prob=config.min_path_prob,
            most_believed=config.most_believed,
            is_stepwise=self._hidden is not None,
        )
        hidden = None if self._hidden is None else self._hidden[: state.num_sequences]
        features = None if hidden is None else parent_rows(state, hidden)
        stage_rows(
            tree_rows(rows),
            inputs,
            block_size=self.buffers.block_size,
            window=self.buffers.window,
        )
        prepare_plan(plan, inputs, self.kv_cache.window_blocks)
        output = self.model.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            plan,
            self.kv_cache,
            None,
            features=features,
        )
        if hidden is not None:
            keep_rows(state, output.hidden, hidden)
        best = top_tokens(
            output.logits[:, : config.vocab_size],
            sampling.rows(rows.sequence_index, rows.depth),
            config.branching,
            with_probs=True,
            ids=config.token_ids,
        )
        assert best.probs is not None
        expand_tree(
            state, best.token_ids, best.probs, self._table, min_path_prob=config.min_path_prob
        )

    def _write_inputs(self, layout: PassLayout, views: Sequence[KVView]) -> None:
        """Bring the block tables to the static inputs; rows follow from the trees."""
        staged = self.buffers.stage_views(views)
        packed = self.buffers.pack(staged, layout)
        self._words[: len(packed)].copy_(packed, non_blocking=True)

    # ---- replaying ------------------------------------------------------------------------

    def begin(
        self,
        trees: Sequence[InitialTree],
        views: Sequence[KVView],
        *,
        sampling: SamplingTable,
        table: EdgeTable,
        num_levels: int,
        capacity: int,
    ) -> RecordedTrees | None:
        """Take a step's trees into the static tensors; None where no recorded level fits them.

        Nothing waits. `views`: where each tree's nodes are computed, all slots reserved.
        `sampling`: by tree. `capacity`: candidates that a tree may come to.
        """
        most_keys = max(len(view.block_table) for view in views) * self.buffers.block_size
        num_block_ids = sum(len(view.block_table) for view in views)
        config, captured = self.config, self._find(len(trees), most_keys, sampling.has_truncation)
        if (
            captured is None
            or num_levels > config.max_levels
            or capacity > config.capacity
            or sampling.num_depths > MAX_TREE_NODES
            or num_block_ids > self.max_block_ids
            or any(view.adapter is not None for view in views)
        ):
            return None
        state, num_trees = captured.state, len(trees)
        padding = [padding_tree()] * (state.num_sequences - num_trees)
        write_trees(state, [*trees, *padding], config.recalled_bit)
        own = captured.sampling
        own.parameters[:, :num_trees] = sampling.parameters
        own.noise_keys[:num_trees, : sampling.num_depths] = sampling.noise_keys
        if table.shifts is not self._shifts:
            self._table.shifts.copy_(table.shifts)
            self._shifts = table.shifts
        self._write_inputs(captured.layout, views)
        return RecordedTrees(
            captured=captured,
            state=state.first(num_trees),
            hidden=None if self._hidden is None else self._hidden[:num_trees],
            num_rows=state.num_sequences * state.width,
            mean_context=num_block_ids * self.buffers.block_size / num_trees,
        )

    def _find(self, num_trees: int, num_keys: int, truncates: bool) -> CapturedLevel | None:
        """Return the smallest recorded level for so many trees, none with more keys."""
        for count in self.tree_counts:
            captured = self._captured.get((count, truncates))
            if captured is not None and num_trees <= count and num_keys <= captured.max_keys:
                return captured
        return None


def estimate_level_bytes(dtype: torch.dtype, *, feature_size: int = 0) -> int:
    """Return the device memory that recorded levels take at most beside the recorded passes.

    The graphs, block tables, trees at the largest capacity, and what a head's rows gave.
    """
    most = TREE_COUNTS[-1]
    trees = most * MAX_CAPACITY * (number(NUM_FIELDS) * 4 + MASK_WORDS * 8)
    hidden = most * MAX_TREE_NODES * feature_size * dtype.itemsize
    return 2 * len(TREE_COUNTS) * BYTES_PER_GRAPH + MAX_BLOCK_IDS * 4 + trees + hidden
