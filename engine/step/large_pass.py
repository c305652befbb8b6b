"""The large model's pass of a step, in halves: launch does not wait, collect does, for verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.engine.config import EngineConfig
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.protocols import Drafter, FeatureRows, Trees
from outrider.engine.queue.scheduler import PassPlan, Scheduler
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.step.deferred_host_work import DeferredHostWork
from outrider.engine.step.picked_rows import picked_rows
from outrider.engine.step.timed_passes import TimedPasses
from outrider.engine.trees.forest import Forest, ForestReadback, path_moves, slot_table
from outrider.engine.trees.verify_items import (
    VerifiedPass,
    VerifyItem,
    accepted_moves,
    answer_slices,
    attach_tree,
    fit_tree,
    note_scores,
    pass_logprobs,
)
from outrider.kernels.upload import upload
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.own_failure import OwnFailure
from outrider.verifier.params import Tier
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPass:
    """A large pass on its way."""

    plan: PassPlan
    slices: list[ForwardSlice]
    """All of the host's, those of the items first and in their order."""
    items: list[VerifyItem]
    """The trees that the host knows; behind the forest's rows."""
    output: PassOutput
    forest: Forest | None
    readback: ForestReadback | None


class LargePass:
    """Puts trees and prompts into large passes and gets verdicts out of them."""

    def __init__(
        self,
        *,
        runners: Mapping[Tier, ModelRunner],
        verifier: CoupledVerifier,
        drafter: Drafter | None,
        config: EngineConfig,
        scheduler: Scheduler,
        passes: TimedPasses,
        host_work: DeferredHostWork,
    ) -> None:
        self._runners = runners
        self._verifier = verifier
        self._drafter = drafter
        self._config = config
        self._scheduler = scheduler
        self._passes = passes
        self._host_work = host_work

    def run(self, plan: PassPlan, trees: Trees) -> VerifiedPass | None:
        """Run the pass and wait for its verdicts; None where there is nothing to compute."""
        launched = self.launch(plan, trees)
        if launched is None:
            return None
        done = self.collect(launched)
        self._scheduler.note_prefills(plan)
        return done

    # ---- the first half --------------------------------------------------------------------

    def launch(self, plan: PassPlan, trees: Trees) -> LaunchedPass | None:
        """Start the pass, the judgement of its forest and the copy of that; None: nothing to do.

        Does not wait for the device. Prompts and decodes of the plan that have no tree of a forest
        are host slices; their verdicts are worked out in `collect`.
        """
        # Without the small model's logits at its root a cascade can emit nothing.
        plan.decodes = [
            sequence
            for sequence in plan.decodes
            if sequence.cascade is None
            or ((tree := trees.host.get(sequence.request_id)) is not None and tree.has_root_logits)
        ]
        if plan.is_empty:
            return None
        forest = trees.forest
        slices, items = self._host_rows(plan, trees)
        self._passes.prepare_masks(items)
        runner = self._runners["large"]
        picked = picked_rows(forest, items, runner.device) if runner.picks else None
        if forest is None:
            output = self._passes.forward("large", slices, picked=picked)
            return LaunchedPass(
                plan=plan, slices=slices, items=items, output=output, forest=None, readback=None
            )
        output = self._passes.forward("large", slices, forest.device_rows(), picked)
        return LaunchedPass(
            plan=plan,
            slices=slices,
            items=items,
            output=output,
            forest=forest,
            readback=self._judge_forest(forest, output),
        )

    def _host_rows(
        self, plan: PassPlan, trees: Trees
    ) -> tuple[list[ForwardSlice], list[VerifyItem]]:
        """The slices of all sequences without a tree on the device, and what to verify of them."""
        row = num_rows = num_beside = 0
        decodes = plan.decodes
        if trees.forest is not None:
            row = num_rows = trees.forest.total_rows
            num_beside = trees.forest.num_trees
            grown = {sequence.request_id for sequence in trees.forest.sequences}
            decodes = [sequence for sequence in decodes if sequence.request_id not in grown]
        slices, items = answer_slices(decodes, plan.prefills, trees.host)
        num_rows += sum(len(piece.token_ids) for piece in slices)
        num_beside += len(slices) - 1
        fronts: list[ForwardSlice] = []
        for number, (piece, item) in enumerate(zip(slices, items, strict=False)):
            if number >= len(decodes):
                tree = self._propose_from_text(item.sequence, num_rows, num_beside=num_beside)
                item.tree = tree or item.tree
            item.tree = fit_tree(self._runners["large"], item.sequence, item.tree)
            if item.tree.num_draft_nodes:  # a root alone is the row that is there
                fronts += attach_tree(piece, item.tree)
                num_rows += item.tree.num_draft_nodes
            item.first_row = row
            row += item.tree.num_nodes
        return slices + fronts, items

    def _propose_from_text(
        self, sequence: Sequence, num_rows: int, *, num_beside: int
    ) -> TokenTree | None:
        """Return guesses from text where a prefill ends; they are judged in the same pass."""
        max_nodes = self._config.max_tokens_per_step - num_rows
        if self._drafter is None or not sequence.wants_tree or max_nodes <= 0:
            return None
        with OwnFailure(sequence):
            return self._drafter.propose_from_text(
                sequence, max_nodes=max_nodes, num_rows=num_rows, num_beside=num_beside
            )
        return None

    def _judge_forest(self, forest: Forest, output: PassOutput) -> ForestReadback:
        """Judge on the device, move the accepted paths' keys and values, copy all that back."""
        runner = self._runners["large"]
        verdicts = self._verifier.judge_forest(
            forest, output.logits[: forest.total_rows], forest.sampling
        )
        accepted = verdicts.accepted_path  # [num_trees, max_depth]
        starts = forest.row_starts[:, None]
        slots = slot_table(
            [sequence.view for sequence in forest.sequences],
            [len(sequence.token_ids) - 1 for sequence in forest.sequences],
            forest.max_nodes,
        )
        offsets = (accepted - starts).where(accepted >= 0, -1)
        runner.compact(*path_moves(offsets, upload(slots, runner.device)))
        if forest.drafts is not None:
            forest.drafts.keep(forest, verdicts)
        return ForestReadback(forest, verdicts)

    # ---- the second half -------------------------------------------------------------------

    def collect(self, launched: LaunchedPass) -> VerifiedPass:
        """Wait for the verdicts and keep what was accepted in both caches."""
        done = VerifiedPass(items=[], output=launched.output)
        if launched.items:
            done.items = launched.items
            done.verdicts = self._host_verdicts(launched.items, launched.output)
        forest = launched.forest
        if forest is not None and launched.readback is not None:
            known = launched.readback.wait()
            if forest.drafts is not None:
                self._host_work.defer(forest.drafts.commit(known))
            done.items = [
                VerifyItem(sequence=sequence, tree=tree, first_row=row)
                for sequence, tree, row in zip(
                    forest.sequences, known.trees, known.first_rows, strict=True
                )
            ] + done.items
            done.verdicts = [*known.verdicts, *done.verdicts]
        done.logprobs = pass_logprobs(done)
        note_scores(
            launched.plan.prefills,
            launched.slices,
            launched.output.logits,
            first_row=0 if forest is None else forest.total_rows,
        )
        self._runners["large"].check()  # before anything is emitted
        reader = None if self._drafter is None else self._drafter.features
        if reader is not None and reader.reads_any:
            assert done.output.taps is not None, "the large model's runner yields no taps"
            reader.read(done.output.taps, feature_rows(launched, done))
        return done

    def _host_verdicts(self, items: list[VerifyItem], output: PassOutput) -> list[Verdict]:
        """Apply the acceptance rule to the trees that the host knows."""
        first, last = items[0].first_row, items[-1]
        verdicts = self._verifier.verify(
            [item.sequence for item in items],
            [item.tree for item in items],
            output.logits[first : last.first_row + last.tree.num_nodes],
        )
        self._runners["large"].move_slots(*accepted_moves(items, verdicts))
        if self._drafter is not None:
            sources, destinations = self._drafter.commit(
                [item.sequence for item in items], verdicts
            )
            if sources:
                self._runners["small"].move_slots(sources, destinations)
        return verdicts


def feature_rows(launched: LaunchedPass, done: VerifiedPass) -> list[FeatureRows]:
    """Return where each sequence's accepted rows stand in a large pass, in the text's order."""
    plan, forest = launched.plan, launched.forest
    verdicts = {
        item.sequence.request_id: verdict
        for item, verdict in zip(done.items, done.verdicts, strict=True)
    }
    pieces: list[FeatureRows] = []
    row = 0
    if forest is not None:
        grown = done.items[: forest.num_trees]
        pieces = [
            _tree_rows(item.sequence, item.first_row, verdicts[item.sequence.request_id])
            for item in grown
        ]
        row = forest.total_rows
    running = [*plan.decodes, *(sequence for sequence, _ in plan.prefills)]
    owners = {id(sequence.view): sequence for sequence in running}
    for piece in launched.slices:
        sequence = owners[id(piece.view)]
        if piece.ancestor_masks:
            pieces.append(_tree_rows(sequence, row, verdicts[sequence.request_id]))
        else:
            rows = range(row, row + len(piece.token_ids))
            pieces.append(FeatureRows(sequence=sequence, first=piece.start_slot, rows=rows))
        row += len(piece.token_ids)
    return sorted(pieces, key=lambda piece: piece.first)


def _tree_rows(sequence: Sequence, first_row: int, verdict: Verdict) -> FeatureRows:
    """The rows of a tree's root and accepted nodes; its first row of the pass is `first_row`."""
    return FeatureRows(
        sequence=sequence,
        first=len(sequence.token_ids) - 1,
        rows=[first_row + node for node in (0, *verdict.accepted_nodes)],
    )
