"""The passes of a step in front of the large one: small answers, and the drafts."""

from collections.abc import Callable

import torch

from outrider.engine.protocols import (
    Drafter,
    DraftLevel,
    DraftLogits,
    DraftPass,
    LargeWork,
    Proposal,
    Trees,
)
from outrider.engine.queue.scheduler import PassPlan, Scheduler
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.step.tier_switch import TierSwitcher
from outrider.engine.step.timed_passes import TimedPasses
from outrider.engine.trees.verify_items import (
    VerifiedPass,
    answer_slices,
    note_scores,
)
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.next_tokens import NextRow
from outrider.verifier.params import Tier
from outrider.verifier.verdict import Verdict

Accept = Callable[[VerifiedPass], None]
_NO_LOGITS = DraftLogits(of_slices=torch.zeros((0, 0)))


class Drafting:
    """Runs the small passes of a step and drives the drafter's proposal through them.

    Each pass advances the small tier's answers by a token and the drafts by a level; a head's
    passes are its own. `accept` takes what a pass has decided for small answers.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        passes: TimedPasses,
        verifier: CoupledVerifier,
        drafter: Drafter | None,
        tier_switcher: TierSwitcher,
        accept: Accept,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._passes = passes
        self._verifier = verifier
        self._drafter = drafter
        self._tier_switcher = tier_switcher
        self._accept = accept
        self._clock = clock

    def run(self, large: PassPlan, after_pass: Callable[[], None] | None = None) -> Trees:
        """Advance small answers and drafts together; return the trees for the large pass.

        `after_pass`: called behind every small pass that a large one follows.
        """
        self._take_in_features()
        drafts = _ProposalRun(self._propose(large))
        num_wanted = 1 if large.is_empty else self._passes.num_small_beside_large()
        number = 0
        while drafts.is_open or number < num_wanted:
            # Answers are planned before drafts: where blocks are short, answers take them.
            is_due = number < num_wanted or not drafts.is_of_head
            plan = self._plan_answers(number) if is_due else PassPlan()
            wanted = drafts.next_pass()
            if wanted is not None and wanted.levels is not None:
                drafts.logits = _NO_LOGITS
                if plan.is_empty:  # no answer has a part in these passes
                    self._passes.grow_levels(wanted.levels)
                    self._count_rows(wanted, "small")
                wanted = drafts.next_pass()
            if wanted is not None and wanted.model == "head":
                drafts.logits = self._head_pass(wanted)
                if plan.is_empty:
                    continue
                wanted = None
            elif wanted is None and (plan.is_empty or number >= num_wanted):
                break
            logits = self._pass(plan, wanted or DraftPass(slices=[], owners=[]))
            if wanted is not None:
                drafts.logits = logits
            if after_pass is not None and not large.is_empty:
                after_pass()
            number += 1
        return drafts.trees

    def _propose(self, large: PassPlan) -> Proposal | None:
        if self._drafter is None:
            return None
        is_rushed = len(large.prefills) > 1
        sequences: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in large.decodes:
            # Many prompts at once come first: guesses would make each of them wait longer.
            may_grow = sequence.wants_tree and (not is_rushed or sequence.cascade is not None)
            (sequences if may_grow else others).append(sequence)
        prompts = [planned for planned in large.prefills if planned[0].wants_tree]
        if not (sequences or prompts):
            return None
        large_work = LargeWork(
            streams=others,
            num_prompts=len(large.prefills),
            num_prompt_rows=sum(num_tokens for _, num_tokens in large.prefills),
            prompts=prompts,
        )
        return self._drafter.propose(sequences, large_work=large_work)

    def _take_in_features(self) -> None:
        """Run the head's passes over what waits of the last large pass."""
        if self._drafter is not None and (reader := self._drafter.features) is not None:
            for wanted in reader.take_in():
                self._head_pass(wanted)

    def _head_pass(self, wanted: DraftPass) -> DraftLogits:
        """Run a head's pass, which has no answers beside the drafts."""
        if wanted.level is not None:
            if not wanted.slices:
                return self._level(wanted.level, wanted)
            wanted = wanted.level.beside(wanted)
        output = self._passes.forward_head(wanted.slices, wanted.device_rows, wanted.features)
        self._count_rows(wanted, "large")
        num_front = 0 if wanted.device_rows is None else wanted.device_rows.total_rows
        return DraftLogits(
            of_slices=output.logits[num_front:],
            of_device_rows=output.logits[:num_front],
            hidden=output.hidden[num_front:],
            hidden_of_device_rows=output.hidden[:num_front],
        )

    def _level(self, level: DraftLevel, wanted: DraftPass) -> DraftLogits:
        """Run a recorded level, which leaves nothing to take in."""
        self._passes.grow_level(level.recorded, wanted.model)
        self._count_rows(wanted, "large" if wanted.model == "head" else "small")
        return _NO_LOGITS

    def _count_rows(self, wanted: DraftPass, tier: Tier) -> None:
        """Count draft rows as work of a tier; a head is a part of the large one."""
        for sequence, num_rows in zip(wanted.owners, wanted.num_rows_each(), strict=True):
            for counts in self._scheduler.counts(sequence, tier):
                counts.num_draft_rows += num_rows

    def _plan_answers(self, number: int) -> PassPlan:
        running = self._scheduler.running.get("small")  # None: there is no such tier
        if running is None or not (running or self._scheduler.waiting):
            return PassPlan()
        return self._scheduler.plan("small", self._clock(), with_prefill=number == 0)

    def _pass(self, plan: PassPlan, wanted: DraftPass) -> DraftLogits:
        """Run one pass for answers and drafts: device rows, then answers, then draft slices."""
        answers, items = answer_slices(plan.decodes, plan.prefills)
        if wanted.level is not None:
            if not (answers or wanted.slices):
                return self._level(wanted.level, wanted)
            wanted = wanted.level.beside(wanted)
        num_front = 0 if wanted.device_rows is None else wanted.device_rows.total_rows
        for item in items:
            item.first_row += num_front
        self._passes.prepare_masks(items)
        output = self._passes.forward("small", answers + wanted.slices, wanted.device_rows)
        self._count_rows(wanted, "small")
        note_scores(plan.prefills, answers, output.logits, first_row=num_front)
        self._scheduler.note_prefills(plan)
        if items:
            self._verify(VerifiedPass(items=items, output=output))
        num_answer_rows = sum(piece.num_logit_rows for piece in answers)
        return DraftLogits(
            of_slices=output.logits[num_front + num_answer_rows :],
            of_device_rows=output.logits[:num_front],
        )

    def _verify(self, done: VerifiedPass) -> None:
        """Choose the next tokens of small answers."""
        first = done.items[0].first_row
        rows = [
            NextRow(
                sequence=item.sequence,
                rival_noise=self._tier_switcher.rival_noise(item.sequence),
            )
            for item in done.items
        ]
        chosen = self._verifier.next_tokens(rows, done.output.logits[first : first + len(rows)])
        for item, row, token in zip(done.items, rows, chosen, strict=True):
            if row.rival_noise is not None:
                item.sequence.rivals.append(token.rivals)
        done.verdicts = [Verdict.of([], [token.token_id]) for token in chosen]
        done.logprobs = [token.logprobs for token in chosen]
        self._accept(done)


class _ProposalRun:
    """A proposal under way: `next_pass` sends it the `logits` of the last pass.

    trees: the result, empty until the proposal is over. is_of_head: whether its last pass was a
    head's.
    """

    def __init__(self, proposal: Proposal | None) -> None:
        self._proposal = proposal
        self.logits: DraftLogits | None = None
        self.is_of_head = False
        self.trees = Trees(host={})

    @property
    def is_open(self) -> bool:
        """True if the proposal may want another pass."""
        return self._proposal is not None

    def next_pass(self) -> DraftPass | None:
        """Return the rows that the proposal wants next; None where it is over."""
        proposal, logits = self._proposal, self.logits
        if proposal is None:
            return None
        try:
            wanted = next(proposal) if logits is None else proposal.send(logits)
        except StopIteration as stop:
            self._proposal, self.trees = None, stop.value
            return None
        self.is_of_head = wanted.model == "head"
        return wanted
