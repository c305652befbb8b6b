"""The step loop: both models, one queue, events out."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import torch

from engine.config import EngineConfig
from engine.errors import InvalidRequestError, TierUnavailableError, as_utf8
from engine.events import (
    AnswerHeld,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
)
from engine.grammar.grammar import GrammarCompiler, InvalidGrammarError
from engine.passes.device_rows import DeviceRows
from engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from engine.protocols import (
    Drafter,
    DraftLogits,
    DraftPass,
    Proposal,
    QueuePolicy,
    Trees,
    Verdict,
    Verifier,
)
from engine.queue.admission import ObjectiveGate, check_cascade, check_prompt, check_room, tier_info
from engine.queue.grammar_queue import GrammarQueue
from engine.queue.scheduler import PassPlan, Scheduler
from engine.queue.slo_queue import SloQueue
from engine.request import EngineRequest, Tier
from engine.sequences.logit_rules import build_rules
from engine.sequences.own_failure import OwnFailure
from engine.sequences.sequence import Sequence, SequenceStatus
from engine.step.deferred_host_work import DeferredHostWork
from engine.step.large_pass import LargePass, LaunchedPass
from engine.step.snapshot import StepCounts, snapshot
from engine.step.tier_switch import TierSwitcher
from engine.trees.speculation_counts import SpeculationCounts
from engine.trees.verify_items import VerifyItem, answer_slices, cut_at_end, emission, prefill_done

_PASS_TIME_WEIGHT = 0.1
# How long an engine that has nothing else to do sleeps for a grammar; commands wait behind it.
_GRAMMAR_PAUSE_S = 0.003


class Engine:
    """Continuous batching of two models over paged KV caches; not thread-safe.

    `step` runs several passes of the small model and at most one of the large: each small pass
    advances the small tier's answers by a token and the drafts by a level, then the large model
    judges all drafts and takes in prompt chunks.
    """

    def __init__(
        self,
        *,
        runners: Mapping[Tier, ModelRunner],
        verifier: Verifier,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        policy: QueuePolicy | None = None,
        grammars: Mapping[Tier, GrammarCompiler] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not runners:
            raise ValueError("an engine needs at least one model")
        self._runners = dict(runners)
        self._verifier = verifier
        self._drafter = drafter
        self._config = config or EngineConfig()
        self._clock = clock
        self.scheduler = Scheduler(
            runners=self._runners,
            config=self._config,
            policy=policy or SloQueue(),
            drafter=drafter,
        )
        has_device = any(runner.device.type != "cpu" for runner in self._runners.values())
        self._host_work = DeferredHostWork(overlaps=self._config.overlap and has_device)
        self._large = LargePass(
            runners=self._runners,
            verifier=verifier,
            drafter=drafter,
            config=self._config,
            forward=self._timed_forward,
            host_work=self._host_work,
        )
        self._gate = ObjectiveGate(self.scheduler, config=self._config)
        self._tier_switcher = TierSwitcher(
            runners=self._runners, scheduler=self.scheduler, drafter=drafter
        )
        self._grammars = GrammarQueue(grammars or {}, clock=clock)
        self._sequences: dict[str, Sequence] = {}
        self._events: list[EngineEvent] = []
        self._speculation = SpeculationCounts()
        self._steps = StepCounts()
        self._pass_s: dict[Tier, float] = {"small": 1e-3, "large": 1e-3}  # running means

    # ---- requests -------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises an EngineError that says why it cannot be served."""
        runner = self._runners.get(request.tier)
        if runner is None:
            raise TierUnavailableError(
                f"tier {request.tier!r} is not loaded; loaded: {', '.join(self._runners)}"
            )
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        check_prompt(request, runner)
        if request.cascade is not None:
            check_cascade(request, self._runners.get("small"), self._drafter)
        if request.grammar is not None:
            self._grammars.check(request)
        check_room(
            request,
            (*self.scheduler.waiting, *self._grammars.sequences()),
            max_waiting=self._config.max_waiting,
        )
        sequence = Sequence(
            request=request,
            tier=request.tier,
            view=runner.new_view(request.cache_salt),
            noise=self._tier_switcher.noise(request, request.tier),
            submitted_s=self._clock(),
            token_ids=list(request.prompt_token_ids),
            rules=build_rules(request.sampling, num_prompt_tokens=len(request.prompt_token_ids)),
        )
        if request.objective.refuses:
            self._gate.check(sequence, sequence.submitted_s)
        try:
            if request.grammar is not None:
                self._grammars.add(sequence)
            else:
                self.scheduler.add(sequence)
        except BaseException:
            self._gate.forget(sequence)
            raise
        self._sequences[request.request_id] = sequence

    def warm_up_grammars(self) -> None:
        """Start what compiles grammars now, in the background, not at the first grammar."""
        self._grammars.warm_up()

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    def settle(self, request_id: str) -> None:
        """An answer that may escalate stays with its tier; one that is held ends now.

        Unknown ids are ignored.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.is_settled = True
            if sequence.held_reason is not None:
                self._finish(sequence, sequence.held_reason)

    def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Hand a request to another tier: it starts its answer anew, the old one as a draft.

        The tokens emitted so far are retracted (`TierSwitched`); with `keeps_answer` the other tier
        goes on behind them, and an answer that has ended is settled. A small answer's KV goes on as
        the large tier's draft view. Unknown and finished requests are ignored. Raises an
        EngineError where the tier cannot take the request, which then stays where it is.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.tier == tier:
            return
        if keeps_answer and sequence.held_reason is not None:
            self.settle(request_id)
            return
        self._tier_switcher.check(sequence, tier, keeps_answer=keeps_answer)
        with OwnFailure(sequence):
            switched = self._tier_switcher.switch(
                sequence,
                tier,
                keeps_answer=keeps_answer,
                # Where it waits for a grammar it has not begun: nothing is held.
                is_queued=request_id not in self._grammars,
            )
            self._events.append(switched)
        if sequence.failure is not None:
            self._fail(sequence)

    # ---- the step -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. Answers that are held are no work."""
        return bool(len(self._sequences) > len(self.scheduler.held) or self._events)

    @property
    def overlaps(self) -> bool:
        """Whether host work is done beside the device's, and `step` calls `while_busy`."""
        return self._host_work.overlaps

    @torch.inference_mode()
    def step(
        self,
        on_events: Callable[[list[EngineEvent]], None] | None = None,
        while_busy: Callable[[], None] | None = None,
    ) -> list[EngineEvent]:
        """Run one step and return what happened since the last one, in order.

        With `on_events`, what small passes emit beside a large one is handed over at once and is
        not returned again: a small answer does not wait for the large pass. The callback must not
        call back into the engine, whose large pass is planned by then.

        `while_busy` is called once: beside the step's first pass where the engine `overlaps`, else
        at once. It must not call back into the engine either.
        """
        if while_busy is not None:
            self._host_work.defer(while_busy)
        self._admit_compiled()
        started_s = time.perf_counter()
        if len(self._sequences) > self._num_idle:
            self.scheduler.preempt_for_waiting(self._clock())
            large = self._plan_large()
            trees = self._small_passes(large, None if large.is_empty else on_events)
            self._large_pass(large, trees)
            self._steps.num_steps += 1
            if not large.prefills:
                self.scheduler.times.note_step(time.perf_counter() - started_s)
            for sequence in [s for s in self._sequences.values() if s.failure is not None]:
                self._fail(sequence)  # it was not judged in this step
        if len(self._sequences) == self._num_idle:  # there may be no next pass to wait beside
            self._host_work.run()
        self._steps.total_s += time.perf_counter() - started_s
        events, self._events = self._events, []
        return events

    @property
    def _num_idle(self) -> int:
        """Sequences that no pass can be for: they wait for a grammar, or for a decision."""
        return len(self._grammars) + len(self.scheduler.held)

    def _admit_compiled(self) -> None:
        """Queue the sequences whose grammar is there; end those that can have none."""
        if not len(self._grammars):
            return
        if len(self._sequences) == self._num_idle and not self._events:
            self._grammars.pause(_GRAMMAR_PAUSE_S)
        for sequence, error in self._grammars.take_ready():
            if error is None:
                self.scheduler.add(sequence)
                continue
            sequence.status = SequenceStatus.FINISHED
            self._forget(sequence, code="invalid_grammar", message=str(error))

    def _plan_large(self) -> PassPlan:
        if "large" not in self._runners:
            return PassPlan()
        return self.scheduler.plan("large", self._clock())

    def _small_passes(
        self, large: PassPlan, on_events: Callable[[list[EngineEvent]], None] | None
    ) -> Trees:
        """Advance small answers and drafts together; returns the trees."""
        is_rushed = len(large.prefills) > 1
        drafting = [
            sequence
            for sequence in large.decodes
            # Many prompts at once come first: guesses would make each of them wait longer.
            if sequence.wants_tree and (not is_rushed or sequence.cascade is not None)
        ]
        proposal: Proposal | None = None
        if self._drafter is not None and drafting:
            proposal = self._drafter.propose(drafting)
        trees = Trees(host={})
        num_wanted = 1 if large.is_empty else self._num_small_passes()
        logits: DraftLogits | None = None
        number = 0
        while proposal is not None or number < num_wanted:
            # Answers are planned before drafts: where blocks are short they take them.
            plan = self._plan_small(number)
            wanted: DraftPass | None = None
            if proposal is not None:
                try:
                    wanted = next(proposal) if logits is None else proposal.send(logits)
                except StopIteration as stop:
                    proposal, trees = None, stop.value
                    if number >= num_wanted:
                        break
            if plan.is_empty and wanted is None:
                break
            logits = self._small_pass(plan, wanted or DraftPass(slices=[], owners=[]))
            if on_events is not None and self._events:
                events, self._events = self._events, []
                on_events(events)
            number += 1
        return trees

    def _small_pass(self, plan: PassPlan, wanted: DraftPass) -> DraftLogits:
        """One pass for answers and drafts: device rows, then answers, then the draft slices."""
        answers, items = answer_slices(plan.decodes, plan.prefills)
        num_front = 0 if wanted.device_rows is None else wanted.device_rows.total_rows
        for item in items:
            item.first_row += num_front
        output = self._timed_forward("small", answers + wanted.slices, wanted.device_rows)
        for sequence, num_rows in zip(wanted.owners, wanted.num_rows_each(), strict=True):
            for counts in self.scheduler.counts(sequence, "small"):
                counts.num_draft_rows += num_rows
        num_answer_rows = sum(piece.num_logit_rows for piece in answers)
        self._judge_small(plan, items, output)
        return DraftLogits(
            of_slices=output.logits[num_front + num_answer_rows :],
            of_device_rows=output.logits[:num_front],
        )

    def _num_small_passes(self) -> int:
        """How many passes small answers get beside a large one, by the passes' recent times."""
        config = self._config
        affordable = int(config.small_pass_share * self._pass_s["large"] / self._pass_s["small"])
        return min(max(affordable, config.min_small_passes), config.max_small_passes)

    def _plan_small(self, number: int) -> PassPlan:
        running = self.scheduler.running.get("small")  # None: there is no such tier
        if running is None or not (running or self.scheduler.waiting):
            return PassPlan()
        return self.scheduler.plan("small", self._clock(), with_prefill=number == 0)

    def _large_pass(self, plan: PassPlan, trees: Trees) -> None:
        launched = self._large.launch(plan, trees)
        if launched is not None:
            self._settle(launched)

    def _settle(self, launched: LaunchedPass) -> None:
        """Take what a large pass has come to into the sequences."""
        settled = self._large.settle(launched)
        self._note_prefills(launched.plan)
        now_s = self._clock()
        for item, verdict in settled:
            self._accept(item, verdict, launched.output, now_s)

    def _timed_forward(
        self,
        tier: Tier,
        slices: list[ForwardSlice],
        device_rows: DeviceRows | None = None,
    ) -> PassOutput:
        runner = self._runners[tier]
        output = runner.forward(slices, device_rows)
        self._host_work.run()
        for done in runner.take_finished():  # on a GPU earlier ones than this
            self._steps.forward_s += done.seconds
            self._pass_s[tier] += _PASS_TIME_WEIGHT * (done.seconds - self._pass_s[tier])
            if done.num_logit_rows < done.num_rows:
                self.scheduler.note_pass(tier, num_rows=done.num_rows, elapsed_s=done.seconds)
        return output

    # ---- after a pass ---------------------------------------------------------------------

    def _note_prefills(self, plan: PassPlan) -> None:
        for sequence, num_tokens in plan.prefills:
            computed = sequence.view.num_computed_tokens + num_tokens
            sequence.view.advance(computed, sequence.token_ids)
            for counts in self.scheduler.counts(sequence, sequence.tier):
                counts.num_computed_tokens += num_tokens

    def _judge_small(
        self, plan: PassPlan, items: SequenceOf[VerifyItem], output: PassOutput
    ) -> None:
        """Choose the next tokens of small answers."""
        self._note_prefills(plan)
        if not items:
            return
        first = items[0].first_row
        logits = output.logits[first : first + len(items)]  # one row each
        verdicts = self._verifier.verify(
            [item.sequence for item in items], [item.tree for item in items], logits
        )
        self._tier_switcher.note_candidates(items, verdicts, output.logits)
        now_s = self._clock()
        for item, verdict in zip(items, verdicts, strict=True):
            self._accept(item, verdict, output, now_s)

    def _accept(self, item: VerifyItem, verdict: Verdict, output: PassOutput, now_s: float) -> None:
        """Append what was emitted, report it, and finish the sequence where it ends."""
        sequence = item.sequence
        if sequence.failure is not None:
            self._fail(sequence)
            return
        if not sequence.prefill_was_reported:
            sequence.prefill_was_reported = True
            self._events.append(prefill_done(sequence, output.hidden[item.first_row]))
        emitted, reason = cut_at_end(
            verdict.token_ids, sequence.stop_token_ids, sequence.num_remaining_tokens
        )
        event = emission(item, verdict, emitted, output.logits)
        computed = len(sequence.token_ids) + event.num_accepted_tokens
        sequence.token_ids.extend(emitted)
        if reason is None:  # after an open verdict the last token is the next root
            computed = min(computed, len(sequence.token_ids) - 1)
        sequence.view.advance(computed, sequence.token_ids)
        sequence.view.trim()
        sequence.count(event)
        self._speculation.num_unratified_tokens += event.num_unratified_tokens
        self._speculation.count(item.tree, verdict.accepted_nodes[: len(emitted)])
        for counts in self.scheduler.counts(sequence, sequence.tier):
            counts.note_emission(event)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            self._gate.note_first_token(sequence, now_s)
        if reason is not None:
            self.scheduler.times.note_answer(sequence, now_s)
        self._events.append(event)
        if reason is not None and sequence.is_watched:
            sequence.held_reason = reason
            self.scheduler.hold(sequence)
            self._events.append(AnswerHeld(request_id=sequence.request_id, finish_reason=reason))
        elif reason is not None:
            self._finish(sequence, reason)

    def _fail(self, sequence: Sequence) -> None:
        """End a sequence whose own part of the step could not be done."""
        sequence.finish_reason = "abort"
        self._take_out(sequence)
        if isinstance(sequence.failure, InvalidGrammarError):
            self._forget(sequence, code="invalid_grammar", message=str(sequence.failure))
            return
        self._forget(
            sequence,
            code="request_failed",
            message=(
                "The grammar or the sampling parameters of this request could not be followed "
                f"({type(sequence.failure).__name__}). The same request would fail again: change "
                "the grammar or the parameters."
            ),
        )

    def _forget(self, sequence: Sequence, *, code: str, message: str) -> None:
        """Drop a sequence that the scheduler does not have any more, and say why."""
        self._gate.forget(sequence)
        del self._sequences[sequence.request_id]
        self._events.append(
            Failed(
                request_id=sequence.request_id,
                code=code,
                message=as_utf8(message),
                stats=sequence.stats(),
            )
        )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._gate.forget(sequence)
        self._take_out(sequence)
        del self._sequences[sequence.request_id]
        self._events.append(
            Finished(
                request_id=sequence.request_id,
                tier=sequence.tier,
                finish_reason=reason,
                stats=sequence.stats(),
            )
        )

    def _take_out(self, sequence: Sequence) -> None:
        """Take a sequence from the queue that has it, and give back what it holds."""
        if self._grammars.discard(sequence.request_id):
            sequence.status = SequenceStatus.FINISHED
        else:
            self.scheduler.remove(sequence)

    # ---- what is going on -----------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
        return snapshot(
            self._runners, self.scheduler, self._grammars, self._speculation, self._steps
        )

    def info(self) -> EngineInfo:
        """What is loaded."""
        tiers = {tier: tier_info(tier, runner) for tier, runner in self._runners.items()}
        return EngineInfo(tiers=tiers, speculation=self._drafter is not None)
