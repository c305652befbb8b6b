"""Trees of guesses that grow on the device: between the draft passes of a step nobody waits."""

import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from draft.budget import StepBudget, TreeBudget
from draft.calibration import EdgeCalibration
from draft.config import DraftConfig
from draft.device_growth import DeviceCalibration, DeviceGrowth, init_trees_on_device
from draft.draft_state import Draft
from draft.forecast import Grower, TreeForecast, num_levels, share_nodes
from draft.grown_trees import GrownTrees
from draft.model_guesses import Slices
from draft.node_selection import least_chance, select_nodes, weighted_probs
from draft.tree_drafter import TreeDrafter
from engine.cache.kv_view import KVView
from engine.passes.device_rows import DeviceRows
from engine.passes.runner import ModelRunner
from engine.protocols import DraftLogits, DraftPass, Proposal, Trees
from engine.sequences.sequence import Sequence
from engine.trees.forest import (
    Forest,
    ForestVerdicts,
    HostForest,
    path_moves,
    reserve_trees,
    slot_table,
)
from kernels.upload import upload


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Kept:
    """A forest whose verdicts are on their way; views: the draft views that keep its paths."""

    growth: DeviceGrowth
    views: list[KVView | None]


class DeviceDrafter(TreeDrafter):
    """A `TreeDrafter` most of whose trees the host sees only when they are judged.

    How many passes a step has, and how many nodes, is decided before it, by what earlier trees came
    to (`draft.forecast`). Sequences with rules, a grammar or a cascade need the host between the
    levels: their trees grow there, in the same passes. `target`: the large model's runner.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        target: ModelRunner,
        config: DraftConfig | None = None,
        budget: TreeBudget | None = None,
        calibration: EdgeCalibration | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        calibration = calibration or EdgeCalibration()
        super().__init__(
            runner=runner, config=config, budget=budget, calibration=calibration, clock=clock
        )
        self._target = target
        self._device_calibration = DeviceCalibration(calibration, runner.device)
        self._forecast = TreeForecast()  # of all sequences: where a new one begins
        self._growth: DeviceGrowth | None = None  # of the step under way
        self._kept: _Kept | None = None

    # ---- the proposal ----------------------------------------------------------------------

    def propose(self, sequences: SequenceOf[Sequence]) -> Proposal:
        """Draft one tree for each sequence; see `engine.protocols.Drafter`."""
        drafts = [self._init_tree(sequence) for sequence in sequences]
        step = self._step_budget(drafts)
        for draft in drafts:
            self._guess_from_text(draft)
        growers = self._choose_growers(drafts, step)
        self._growth = None
        spent_s = yield from self._grow_everywhere(growers, drafts, step)
        growth, self._growth = self._growth, None
        if growth is None:
            return Trees(host=select_nodes(drafts, least_chance(drafts, step, spent_s=spent_s)))
        grown = {id(draft) for draft in growth.drafts}
        drafts = [draft for draft in drafts if id(draft) not in grown]
        num_nodes, floor = share_nodes(
            growth.growers, weighted_probs(drafts), step, spent_s=spent_s
        )
        caps = [min(grower.max_nodes, num_nodes) for grower in growth.growers]
        caps = reserve_trees(self._target, [draft.sequence for draft in growth.drafts], caps)
        forest = growth.forest(caps, min(num_nodes, sum(caps)))
        self._growth = growth
        return Trees(host=select_nodes(drafts, floor), forest=forest)

    def _grow_everywhere(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> Generator[DraftPass, DraftLogits, float]:
        """As `_grow`, with plain sequences' trees on the device, in `_growth`."""
        spent_s = 0.0
        slices = self._model.catch_up_slices(growers)
        # A chunk of a text that does not reach its root yet is the host's affair.
        roots = [pair for pair in slices if _is_plain(pair[0].sequence) and pair[1].num_logit_rows]
        begun = {id(draft) for draft, _ in roots}
        growers = [draft for draft in growers if id(draft) not in begun]
        slices = [pair for pair in slices if id(pair[0]) not in begun]
        rows: DeviceRows | None = None
        while slices or roots or rows is not None:
            pieces = [piece for _, piece in [*slices, *roots]]
            if step is not None:
                num_rows = sum(len(piece.token_ids) for piece in pieces)
                num_rows += 0 if rows is None else rows.total_rows
                spent_s += step.draft_pass_s(num_rows, step.context)
            owners = [draft.sequence for draft, _ in [*slices, *roots]]
            if rows is not None and self._growth is not None:
                owners += [draft.sequence for draft in self._growth.drafts]
            logits = yield DraftPass(slices=pieces, owners=owners, device_rows=rows)
            num_host_rows = sum(piece.num_logit_rows for _, piece in slices)
            self._model.receive(slices, logits.of_slices[:num_host_rows])
            if roots:
                self._begin(roots, logits.of_slices[num_host_rows:], step, spent_s)
                roots = []
            elif rows is not None and self._growth is not None:
                assert logits.of_device_rows is not None
                self._growth.receive(logits.of_device_rows)
            slices = self._model.next_slices(self._next_level(growers, drafts, step, spent_s))
            rows = None if self._growth is None else self._growth.next_rows()
        return spent_s

    def _begin(
        self, roots: Slices, logits: Tensor, step: StepBudget | None, spent_s: float
    ) -> None:
        """Begin the trees whose roots were computed; logits: [len(roots), vocab_size]."""
        drafts: list[Draft] = []
        keep: list[int] = []
        for row, (draft, _) in enumerate(roots):
            # A view may have been reclaimed while the pass was planned.
            if draft.state.view is not None and draft.state.caught_up():
                draft.state.was_asked = True
                drafts.append(draft)
                keep.append(row)
            else:
                draft.tree.stop()
        if not drafts:
            return
        config = self._config
        growers = [self._grower(draft) for draft in drafts]
        self._growth = init_trees_on_device(
            drafts,
            growers,
            runner=self._runner,
            vocab_size=min(self._runner.vocab_size, self._target.vocab_size),
            config=config,
            table=self._device_calibration.table(),
            num_levels=num_levels(
                growers,
                step,
                width=config.max_frontier,
                spent_s=spent_s,
                min_gain=config.min_path_prob,
            ),
        )
        self._growth.expand_roots(logits if len(keep) == len(roots) else logits[keep])

    def _grower(self, draft: Draft) -> Grower:
        if draft.state.forecast is None:
            draft.state.forecast = self._forecast.copy()
        return Grower(
            forecast=draft.state.forecast,
            urgency=draft.urgency,
            max_depth=draft.tree.max_depth,
            max_nodes=draft.tree.max_nodes,
        )

    # ---- the verdicts ----------------------------------------------------------------------

    def keep(self, forest: Forest, verdicts: ForestVerdicts) -> None:
        """Move the accepted paths together in the draft views; nothing waits."""
        growth, self._growth = self._growth, None
        assert growth is not None, "a forest is judged once"
        views = [
            view if draft.state.view is view else None
            for draft, view in zip(growth.drafts, growth.views, strict=True)
        ]
        self._kept = _Kept(growth=growth, views=views)
        if not growth.level:  # the roots only
            return
        accepted = verdicts.accepted_path  # [num_trees, max_depth]
        offsets = forest.draft_offsets[accepted.clamp(min=0)].where(accepted >= 0, -1)
        roots = [draft.tree.root_slot for draft in growth.drafts]
        slots = slot_table(views, roots, 1 + growth.level * self._config.max_frontier)
        self._runner.compact(*path_moves(offsets, upload(slots, self._runner.device)))

    def commit_forest(self, forest: Forest, known: HostForest) -> Callable[[], None]:
        """Note what the draft views hold; returns the lesson that the verdicts are."""
        kept, self._kept = self._kept, None
        assert kept is not None, "a forest is committed once, and kept before"
        for tree, (draft, view) in enumerate(zip(kept.growth.drafts, kept.views, strict=True)):
            state = draft.state
            state.tree = None
            if view is not None and state.view is view:
                accepted = known.verdicts[tree].accepted_nodes
                offsets = [known.draft_offsets[tree][node] for node in accepted]
                state.keep_computed(draft.tree.root_slot, offsets)
        return partial(self._learn_forest, kept.growth, known)

    def _learn_forest(self, growth: DeviceGrowth, known: HostForest) -> None:
        """What the verdicts say about guesses, and what trees of this kind come to."""
        grown = GrownTrees(known.drafter_payload, len(growth.drafts))
        for tree, draft in enumerate(growth.drafts):
            verdict = known.verdicts[tree]
            path = [0, *(known.candidates[tree][node] for node in verdict.accepted_nodes)]
            self._learn_grown(draft, grown, tree, path, verdict.token_ids)
            probs, depths = grown.guesses(tree)
            for forecast in (growth.growers[tree].forecast, self._forecast):
                forecast.observe(probs, depths, num_levels=1 + growth.level)

    def _learn_grown(
        self, draft: Draft, grown: GrownTrees, tree: int, path: list[int], emitted: list[int]
    ) -> None:
        """Every guess whose parent was accepted turned out right or wrong, verified or not."""
        self._learn_first(draft.state, grown.first_guess(tree), emitted)
        is_greedy = draft.sequence.request.sampling.is_greedy
        for guess in grown.judged(tree, path, emitted):
            self._calibration.observe(
                guess.confidence,
                guess.was_right,
                sources=guess.evidence,
                depth=guess.depth,
                is_greedy=is_greedy,
            )


def _is_plain(sequence: Sequence) -> bool:
    """Whether its tokens are chosen without the host: no rules, and so no grammar, no cascade."""
    return not sequence.rules and sequence.grammar is None and sequence.cascade is None
