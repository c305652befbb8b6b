"""Trees of guesses that grow on the device: no draft pass of a step waits for the host."""

from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from outrider.draft.budget.budget import NOTHING_READ, StepBudget
from outrider.draft.config import DraftConfig
from outrider.draft.device.device_trees import DeviceCalibration, DeviceTrees, init_trees_on_device
from outrider.draft.device.draft_levels import level_config
from outrider.draft.draft_state import Draft
from outrider.draft.forecast import Grower, TreeForecast, num_levels, share_nodes
from outrider.draft.guesses.model_guesses import ModelGuesses, Slices
from outrider.draft.host_growth import HostGrowth, rows_read
from outrider.draft.lessons import Lessons
from outrider.draft.node_selection import least_chance, select_nodes, weighted_probs
from outrider.draft.trees.grown_trees import GrownTrees
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.level_graphs import RecordedTrees
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import DraftLogits, DraftModel, DraftPass, Proposal, Trees
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trees.forest import Forest, HostForest, path_moves, reserve_trees, slot_table
from outrider.kernels.tree_bounds import MAX_TREE_NODES
from outrider.kernels.upload import upload
from outrider.verifier.verdict import ForestVerdicts


class DeviceGrowth:
    """The growth of trees that the host mostly sees only when they are judged.

    Earlier trees decide before a step how many passes and nodes it has (`outrider.draft.forecast`).
    Sequences with rules, a grammar or a cascade need the host between the levels: `host` grows
    their trees in the same passes. `source` drafts; `target` is the large model's runner.
    """

    def __init__(
        self,
        *,
        target: ModelRunner,
        model: ModelGuesses,
        host: HostGrowth,
        config: DraftConfig,
        lessons: Lessons,
        source: DraftModel = "small",
    ) -> None:
        self._source: DraftModel = source
        runner = self._runner = model.runner
        self._target = target
        self._model = model
        self._host = host
        self._config = config
        self._lessons = lessons
        self._calibration = DeviceCalibration(lessons.calibration, runner.device)
        self._forecast = TreeForecast()  # of all sequences: where a new one begins
        self._level_config = level_config(
            config,
            runner,
            target_vocab_size=target.vocab_size,
            token_ids=model.token_ids,
            source=source,
        )

    def grow(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> Proposal:
        """Grow plain sequences' trees on the device, the others on the host; see `Growth`."""
        trees = yield from self._run_passes(growers, drafts, step)
        return self._choose_nodes(trees, drafts, step)

    def _choose_nodes(
        self,
        trees: DeviceTrees | None,
        drafts: SequenceOf[Draft],
        step: StepBudget | None,
    ) -> Trees:
        """Choose the likeliest nodes of all trees, here and on the device."""
        if trees is None:
            return Trees(host=select_nodes(drafts, least_chance(drafts, step)))
        grown = {id(draft) for draft in trees.drafts}
        drafts = [draft for draft in drafts if id(draft) not in grown]
        num_nodes, floor = share_nodes(trees.growers, weighted_probs(drafts), step)
        caps = [min(grower.max_nodes, num_nodes) for grower in trees.growers]
        caps = reserve_trees(self._target, [draft.sequence for draft in trees.drafts], caps)
        forest = trees.forest(
            caps,
            min(num_nodes, sum(caps)),
            self._grown(trees),
        )
        return Trees(host=select_nodes(drafts, floor), forest=forest)

    def _grown(self, trees: DeviceTrees) -> "GrownDrafts":
        kind = GrownHeadDrafts if self._source == "head" else GrownDrafts
        return kind(trees, runner=self._runner, lessons=self._lessons, forecast=self._forecast)

    def _run_passes(
        self, growers: SequenceOf[Draft], drafts: SequenceOf[Draft], step: StepBudget | None
    ) -> Generator[DraftPass, DraftLogits, DeviceTrees | None]:
        """Run draft passes; return the trees on the device."""
        trees: DeviceTrees | None = None
        slices = self._model.catch_up_slices(growers, step)
        # A chunk of a text that does not reach its root yet is the host's affair.
        roots = [pair for pair in slices if _is_plain(pair[0].sequence) and pair[1].num_logit_rows]
        begun = {id(draft) for draft, _ in roots}
        growers = [draft for draft in growers if id(draft) not in begun]
        taken = {id(piece) for _, piece in roots}  # a block's text may be a slice of its own
        slices = [pair for pair in slices if id(pair[1]) not in taken]
        num_read: Mapping[str, int] = rows_read([*slices, *roots])
        grows = False  # the trees have a level in the next pass
        while slices or roots or grows:
            wanted = self._model.draft_pass([*slices, *roots])
            if grows and trees is not None:
                wanted = _with_level(wanted, trees)
            if step is not None:
                step.spend(sum(wanted.num_rows_each()), num_read)
                num_read = NOTHING_READ
            logits = yield wanted
            num_host_rows = sum(piece.num_logit_rows for _, piece in slices)
            hidden = logits.hidden
            if slices:
                own = None if hidden is None else hidden[:num_host_rows]
                self._model.receive(slices, logits.of_slices[:num_host_rows], own)
            if roots:
                own = None if hidden is None else hidden[num_host_rows:]
                trees = self._begin(roots, logits.of_slices[num_host_rows:], own, step)
                roots = []
            elif grows and trees is not None and logits.of_device_rows is not None:
                trees.receive(logits.of_device_rows, logits.hidden_of_device_rows)
            slices = self._model.next_slices(self._host.next_level(growers, drafts, step))
            grows = trees is not None and trees.next_level()
        return trees

    def _begin(
        self,
        roots: Slices,
        logits: Tensor,
        hidden: Tensor | None,
        step: StepBudget | None,
    ) -> DeviceTrees | None:
        """Begin the trees whose roots were computed, if any; `logits`: [num_rows, vocab_size].

        `hidden`: what a head's rows gave, [num_rows, hidden_size]. A root has one row, or, of a
        block drafter, those of its block.
        """
        drafts: list[Draft] = []
        keep: list[int] = []
        for row, (draft, _) in enumerate(roots):
            # A view may have been reclaimed while the pass was planned.
            if self._model.has_root(draft):
                draft.state.was_asked = True
                drafts.append(draft)
                keep.append(row)
            else:
                draft.tree.stop()
        if not drafts:
            return None
        config = self._config
        growers = [self._grower(draft) for draft in drafts]
        trees = init_trees_on_device(
            drafts,
            growers,
            model=self._model,
            runner=self._runner,
            vocab_size=self._vocab_size,
            config=config,
            table=self._calibration.table(self._source),
            num_levels=self._num_levels(growers, step),
            levels=self._runner.levels_for(self._level_config),
        )
        if (block := self._model.block) is not None:
            of_blocks = logits.view(len(roots), block.num_rows, -1)[:, block.first_row :]
            if len(keep) < len(roots):
                of_blocks = of_blocks[keep]
            trees.expand_block(of_blocks.flatten(0, 1))
            return trees
        if len(keep) < len(roots):
            logits, hidden = logits[keep], None if hidden is None else hidden[keep]
        trees.expand_roots(logits, hidden)
        return trees

    def _num_levels(self, growers: list[Grower], step: StepBudget | None) -> int:
        """Count the levels behind the roots' that are worth their time."""
        config, block = self._config, self._model.block
        if block is not None:  # they take next to none
            return min(block.num_depths, MAX_TREE_NODES // config.max_frontier) - 1
        return num_levels(
            growers,
            step,
            width=config.max_frontier,
            min_gain=config.min_path_prob,
        )

    @property
    def _vocab_size(self) -> int:
        """Ids that both models know: a head reads all of the target's."""
        if self._model.token_ids is not None:
            return self._target.vocab_size
        return min(self._runner.vocab_size, self._target.vocab_size)

    def _grower(self, draft: Draft) -> Grower:
        if draft.state.forecast is None:
            draft.state.forecast = self._forecast.copy()
        return Grower(
            forecast=draft.state.forecast,
            urgency=draft.urgency,
            max_depth=draft.tree.max_depth,
            max_nodes=draft.tree.max_nodes,
        )


class GrownDrafts:
    """The draft views behind a forest: what its verdicts leave in them, and what they teach."""

    def __init__(
        self,
        trees: DeviceTrees,
        *,
        runner: ModelRunner,
        lessons: Lessons,
        forecast: TreeForecast,
    ) -> None:
        self.trees = trees
        self._runner = runner
        self._lessons = lessons
        self._forecast = forecast
        self._views: list[KVView | None] = []  # that keep accepted paths

    def keep(self, forest: Forest, verdicts: ForestVerdicts) -> None:
        """Move the accepted paths together; see `outrider.engine.trees.forest.ForestDrafts`."""
        trees = self.trees
        views = self._views = [
            view if draft.state.view is view else None
            for draft, view in zip(trees.drafts, trees.views, strict=True)
        ]
        if not trees.level:  # the roots only
            return
        accepted = verdicts.accepted_path  # [num_trees, max_depth]
        offsets = forest.draft_offsets[accepted.clamp(min=0)].where(accepted >= 0, -1)
        roots = [draft.tree.root_slot for draft in trees.drafts]
        slots = slot_table(views, roots, 1 + trees.level * trees.config.max_frontier)
        self._runner.compact(*path_moves(offsets, upload(slots, self._runner.device)))

    def commit(self, known: HostForest) -> Callable[[], None]:
        """Note what the views hold; see `outrider.engine.trees.forest.ForestDrafts`."""
        for tree, (draft, view) in enumerate(zip(self.trees.drafts, self._views, strict=True)):
            state = draft.state
            state.tree = None
            if view is not None and state.view is view:
                accepted = known.verdicts[tree].accepted_nodes
                offsets = [known.draft_offsets[tree][node] for node in accepted]
                state.keep_computed(draft.tree.root_slot, offsets)
        return partial(self._learn, known)

    def _learn(self, known: HostForest) -> None:
        """Learn about guesses and about how many nodes trees of this kind come to."""
        trees = self.trees
        grown = GrownTrees(
            known.drafter_payload, len(trees.drafts), model_bit=trees.table.model_bit
        )
        for tree, draft in enumerate(trees.drafts):
            verdict = known.verdicts[tree]
            path = [0, *(known.candidates[tree][node] for node in verdict.accepted_nodes)]
            self._lessons.learn_first(draft.state, grown.first_guess(tree), verdict.token_ids)
            is_greedy = draft.sequence.request.sampling.is_greedy
            for guess in grown.judged(tree, path, verdict.token_ids):
                self._lessons.learn_guess(guess, is_greedy=is_greedy)
            probs, depths = grown.guesses(tree)
            for forecast in (trees.growers[tree].forecast, self._forecast):
                forecast.observe(probs, depths, num_levels=1 + trees.level)


class GrownHeadDrafts(GrownDrafts):
    """The head's texts behind a forest: nothing of a tree stays in its cache."""

    def keep(self, forest: Forest, verdicts: ForestVerdicts) -> None:
        """Keep nothing: accepted nodes are computed again with the large model's hidden states."""

    def commit(self, known: HostForest) -> Callable[[], None]:
        """Give the trees' slots back; see `outrider.engine.trees.forest.ForestDrafts`."""
        for draft in self.trees.drafts:
            draft.state.tree = None
            self.trees.model.drop_tree(draft)
        return partial(self._learn, known)


@dataclass(frozen=True, slots=True)
class _RecordedLevel:
    """The next recorded level of trees; see `outrider.engine.protocols.DraftLevel`."""

    trees: DeviceTrees
    recorded: RecordedTrees

    @property
    def num_rows_each(self) -> int:
        """Rows of each tree, padding included."""
        return self.trees.config.max_frontier

    def beside(self, wanted: DraftPass) -> DraftPass:
        """Return the pass with the level's rows in front."""
        return _with_device_rows(replace(wanted, level=None), self.trees)


def _with_level(wanted: DraftPass, trees: DeviceTrees) -> DraftPass:
    """Put the trees' next level into a pass."""
    owners = [*wanted.owners, *(draft.sequence for draft in trees.drafts)]
    wanted = replace(wanted, owners=owners)
    if trees.recorded is None:
        return _with_device_rows(wanted, trees)
    return replace(wanted, level=_RecordedLevel(trees, trees.recorded))


def _with_device_rows(wanted: DraftPass, trees: DeviceTrees) -> DraftPass:
    """Put the rows of the trees' next level, and what they carry, in front of a pass."""
    rows = trees.rows()
    features = [part for part in (trees.features(), wanted.features) if part is not None]
    return replace(
        wanted,
        device_rows=rows,
        features=torch.cat(features) if len(features) > 1 else next(iter(features), None),
    )


def _is_plain(sequence: Sequence) -> bool:
    """True if its tokens are chosen without the host: no rules, and so no grammar, no cascade."""
    return not sequence.rules and sequence.grammar is None and sequence.cascade is None
