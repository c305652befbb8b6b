"""The step loop: both models, one queue, events out."""

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from outrider.engine.cache.block_news import BlockFeed
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.extents import Extent
from outrider.engine.cache.peers import BlocksWanted, Peers
from outrider.engine.config import EngineConfig
from outrider.engine.errors import InvalidRequestError, TierUnavailableError
from outrider.engine.events import EngineEvent, EngineInfo, EngineStats, TokensEmitted
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import Drafter, StretchCounts
from outrider.engine.queue.adapter_queue import AdapterQueue, OnPrepared
from outrider.engine.queue.admission import ObjectiveGate, check_cascade, check_prompt, tier_info
from outrider.engine.queue.block_exchange import BlockExchange
from outrider.engine.queue.fair_queue import FairQueue
from outrider.engine.queue.grammar_queue import GrammarQueue
from outrider.engine.queue.policy import QueuePolicy
from outrider.engine.queue.preparation import Preparation
from outrider.engine.queue.restore_queue import restores_from
from outrider.engine.queue.room import check_room
from outrider.engine.queue.scheduler import PassPlan, Scheduler
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.engine.sequences.judged_text import judge_of
from outrider.engine.sequences.pinned_prompts import PinnedPrompts
from outrider.engine.sequences.sequence import Sequence, SequenceStatus
from outrider.engine.step.deferred_host_work import DeferredHostWork
from outrider.engine.step.drafting import Drafting
from outrider.engine.step.endings import Endings
from outrider.engine.step.judged_reading import JudgedReading
from outrider.engine.step.large_pass import LargePass
from outrider.engine.step.snapshot import StepCounts, snapshot
from outrider.engine.step.tier_switch import TierSwitcher
from outrider.engine.step.timed_passes import TimedPasses
from outrider.engine.trees.speculation_counts import SpeculationCounts
from outrider.engine.trees.verify_items import (
    VerifiedPass,
    VerifyItem,
    cut_at_end,
    emission,
    note_not_finite,
    prefill_done,
)
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.logit_rules import build_rules
from outrider.verifier.own_failure import OwnFailure
from outrider.verifier.params import Tier
from outrider.verifier.verdict import Verdict


class Engine:
    """Continuous batching of two models over paged KV caches; not thread-safe.

    `step` runs several passes of the small model and at most one of the large: each small pass
    advances the small tier's answers by a token and the drafts by a level. Then the large model
    judges all drafts and computes prompt chunks.
    """

    def __init__(  # noqa: PLR0913 - the parts of an engine
        self,
        *,
        runners: Mapping[Tier, ModelRunner],
        verifier: CoupledVerifier | None = None,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        policy: QueuePolicy | None = None,
        grammars: Mapping[Tier, GrammarCompiler] | None = None,
        store: ExtentStore | None = None,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store`: of blocks that leave the caches, None where they are lost.

        `peers`: lines to other engines; None where no blocks are taken from them.
        """
        verifier = verifier or CoupledVerifier()
        if not runners:
            raise ValueError("an engine needs at least one model; runners is empty")
        self._runners = dict(runners)
        self._drafter = drafter
        self._config = config or EngineConfig()
        self._clock = clock
        self.scheduler = Scheduler(
            caches=self._runners,
            config=self._config,
            policy=policy or FairQueue(),
            drafts=drafter,
        )
        has_device = any(runner.device.type != "cpu" for runner in self._runners.values())
        self._host_work = DeferredHostWork(overlaps=self._config.overlap and has_device)
        self._gate = ObjectiveGate(self.scheduler, config=self._config)
        self._tier_switcher = TierSwitcher(
            runners=self._runners, scheduler=self.scheduler, drafter=drafter
        )
        self.adapters = AdapterQueue(self._runners, self._config)
        self._preparation = Preparation(
            GrammarQueue(grammars or {}, clock=clock),
            self.adapters,
            BlockExchange(self._runners, peers, self.scheduler.times.row_s, clock=clock),
            restores_from(store, self._runners, drafter, self.scheduler.times.row_s),
            is_alone=lambda: not self._has_runnable,
        )
        self.blocks = BlockFeed(
            [runner.block_news(tier) for tier, runner in self._runners.items()],
            self._preparation.stored_news,
        )
        self.pins = PinnedPrompts(self._runners, self._preparation.pin_store, clock=clock)
        self.scheduler.before_start = self._preparation.restore
        self._sequences: dict[str, Sequence] = {}
        self._events: list[EngineEvent] = []
        self._speculation = SpeculationCounts()
        self._steps = StepCounts()
        self._endings = Endings(
            sequences=self._sequences,
            events=self._events,
            scheduler=self.scheduler,
            preparation=self._preparation,
            gate=self._gate,
            pins=self.pins,
            counts=self._steps,
        )
        self._passes = TimedPasses(
            runners=self._runners,
            scheduler=self.scheduler,
            host_work=self._host_work,
            counts=self._steps,
            config=self._config,
            head=None if drafter is None or drafter.features is None else drafter.features.runner,
        )
        self._drafting = Drafting(
            scheduler=self.scheduler,
            passes=self._passes,
            verifier=verifier,
            drafter=drafter,
            tier_switcher=self._tier_switcher,
            accept=self._accept_all,
            clock=clock,
        )
        self._judged_reading = JudgedReading(
            drafter=drafter,
            passes=self._passes,
            scheduler=self.scheduler,
            config=self._config,
        )
        self._large = LargePass(
            runners=self._runners,
            verifier=verifier,
            drafter=drafter,
            config=self._config,
            scheduler=self.scheduler,
            passes=self._passes,
            host_work=self._host_work,
        )

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
        if request.needs_both_models:
            check_cascade(request, self._runners.get("small"), self._drafter)
        self._preparation.check(request)
        self.pins.check(request)
        resumed, prompt = request.resumed_token_ids, request.prompt_token_ids
        if resumed is None:
            waiting = (*self.scheduler.waiting, *self._preparation.sequences())
            check_room(request, waiting, max_waiting=self._config.max_waiting)
        sequence = Sequence(
            request=request,
            tier=request.tier,
            view=runner.new_view(request.cache_salt),
            noise=self._tier_switcher.noise(request, request.tier),
            submitted_s=self._clock(),
            token_ids=[*prompt, *(resumed or ())],
            num_resumed_tokens=len(resumed or ()),
            proposal_token_ids=list(request.retracted_token_ids),
            prefill_was_reported=bool(resumed),
            rules=build_rules(request.sampling, num_prompt_tokens=len(prompt)),
            judge=judge_of(request, vocab_size=runner.vocab_size),
        )
        try:
            has_adapters = self.adapters.add(sequence)
            if request.objective.refuses and resumed is None:
                self._gate.check(sequence, sequence.submitted_s)
            is_prepared = has_adapters and self._preparation.add(sequence)
            if is_prepared:
                self.scheduler.add(sequence)
        except BaseException:
            self._preparation.forget(sequence)
            self._gate.forget(sequence)
            raise
        self._sequences[request.request_id] = sequence
        if is_prepared:
            self._endings.end_if_done(sequence)

    def prepare_adapter(self, ref: AdapterRef, on_prepared: OnPrepared) -> None:
        """Read and check an adapter, which is resident then; `on_prepared` is called in a step."""
        self.adapters.prepare(ref, on_prepared)

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._endings.finish(sequence, "abort")

    def keep_on_tier(self, request_id: str) -> None:
        """An answer that may escalate stays with its tier; one that is held ends now.

        Unknown ids are ignored.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.stays_on_tier = True
            if sequence.held_reason is not None:
                self._endings.finish(sequence, sequence.held_reason)

    def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Switch a request to another tier: it starts its answer anew, the old one as a draft.

        The tokens emitted so far are retracted (`TierSwitched`); with `keeps_answer` the other tier
        goes on behind them, and an answer held at its end ends. A small answer's KV goes on as the
        large tier's draft view. Unknown and finished requests are ignored. Raises an
        EngineError where the tier cannot take the request, which then stays where it is.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.tier == tier:
            return
        if keeps_answer and sequence.held_reason is not None:
            self.keep_on_tier(request_id)
            return
        self._tier_switcher.check(sequence, tier, keeps_answer=keeps_answer)
        with OwnFailure(sequence):
            switched = self._tier_switcher.switch(
                sequence,
                tier,
                keeps_answer=keeps_answer,
                # Where it waits for a grammar or an adapter it has not begun: nothing is held.
                is_queued=request_id not in self._preparation,
            )
            self._events.append(switched)
        if sequence.failure is not None:
            self._endings.fail(sequence)

    # ---- the step -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if `step` would do anything. Answers that are held are no work."""
        is_open = len(self._sequences) > len(self.scheduler.held)
        return is_open or bool(self._events) or self._preparation.has_other_work

    @property
    def overlaps(self) -> bool:
        """True if host work is done beside the device's, and `step` calls `while_busy`."""
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
        for runner in self._runners.values():
            runner.check()
        if while_busy is not None:
            self._host_work.defer(while_busy)
        self.pins.expire()
        self._admit_prepared()
        self._preparation.store_blocks(is_idle=not self._sequences and not self._events)
        with self._steps.timed():
            if self._has_runnable:
                plan = self.scheduler.plan_step(self._clock())
                self._judged_reading.run(plan)
                trees = self._drafting.run(plan, on_events and partial(self._send, on_events))
                done = self._large.run(plan, trees)
                self._accept_all(done)
                self._end_step(plan, done)
            if not self._has_runnable:  # there may be no next pass to wait beside
                self._host_work.run()
        return self._take_events()

    def _send(self, on_events: Callable[[list[EngineEvent]], None]) -> None:
        """Pass on the events so far."""
        if self._events:
            on_events(self._take_events())

    def _take_events(self) -> list[EngineEvent]:
        events = self._events.copy()
        self._events.clear()  # the endings add to the same list
        return events

    def _end_step(self, plan: PassPlan, done: VerifiedPass | None) -> None:
        """Count the step, and end the sequences whose own part of it could not be done."""
        self._steps.num_steps += 1
        if not plan.prefills:
            times, elapsed_s = self.scheduler.times, self._steps.elapsed_s
            times.note_step(elapsed_s)
            if done is not None:
                num_tokens = sum(len(verdict.token_ids) for verdict in done.verdicts)
                num_answers = len(done.verdicts)
                times.pace.note(num_answers=num_answers, num_tokens=num_tokens, elapsed_s=elapsed_s)
        for sequence in [s for s in self._sequences.values() if s.failure is not None]:
            self._endings.fail(sequence)  # no verdict was reached for it in this step

    @property
    def _has_runnable(self) -> bool:
        """True if a pass may be computed for any sequence."""
        return len(self._sequences) > self._num_idle

    @property
    def _num_idle(self) -> int:
        """Sequences that no pass can be for: they wait for a grammar, an adapter, a decision."""
        return len(self._preparation) + len(self.scheduler.held)

    def _admit_prepared(self) -> None:
        """Queue the sequences whose grammar and adapter are there; end those that can have none."""
        if not self._preparation.is_busy:
            return
        if not self._has_runnable and not self._events:
            self._preparation.pause()
        for sequence, error in self._preparation.take_ready():
            if error is None:
                self.scheduler.add(sequence)
                self._endings.end_if_done(sequence)
                continue
            sequence.status = SequenceStatus.FINISHED
            self._endings.forget(sequence, code=error.code, message=str(error))

    # ---- after a pass ---------------------------------------------------------------------

    def _accept_all(self, done: VerifiedPass | None) -> None:
        """Take what a pass has decided into its sequences."""
        if done is not None:
            now_s = self._clock()
            note_not_finite(done)
            for number, (item, verdict) in enumerate(zip(done.items, done.verdicts, strict=True)):
                self._accept(item, verdict, done, number, now_s)

    def _accept(
        self, item: VerifyItem, verdict: Verdict, done: VerifiedPass, number: int, now_s: float
    ) -> None:
        """Append what was emitted, report it, and finish the sequence where it ends."""
        sequence = item.sequence
        if sequence.failure is not None:
            self._endings.fail(sequence)
            return
        if not sequence.prefill_was_reported:
            sequence.prefill_was_reported = True
            hidden = done.output.hidden[item.first_row]
            self._events.append(prefill_done(sequence, hidden, self._runners))
        emitted, reason = cut_at_end(
            verdict.token_ids, sequence.stop_token_ids, sequence.num_remaining_tokens
        )
        if emitted:
            self._steps.num_broken_in_a_row = 0
        event = emission(item, verdict, emitted, done.logprobs[number])
        computed = len(sequence.token_ids) + event.num_accepted_tokens
        sequence.token_ids.extend(emitted)
        if reason is None:  # after an open verdict the last token is the next root
            computed = min(computed, len(sequence.token_ids) - 1)
        sequence.view.advance(computed, sequence.token_ids)
        sequence.view.trim()
        if emitted or reason is None:  # else no token was asked for
            self._count(item, verdict, event)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            self._gate.note_first_token(sequence, now_s)
        if reason is not None:
            self.scheduler.times.note_answer(sequence, now_s)
            self._endings.end(sequence, reason)

    def _count(self, item: VerifyItem, verdict: Verdict, event: TokensEmitted) -> None:
        """Report what was emitted, and count it."""
        sequence = item.sequence
        self._events.append(event)
        sequence.count(event)
        self._speculation.num_unratified_tokens += event.num_unratified_tokens
        self._speculation.count(item.tree, verdict.accepted_nodes[: len(event.token_ids)])
        for counts in self.scheduler.counts(sequence, sequence.tier):
            counts.note_emission(event)

    def export_blocks(self, wanted: BlocksWanted) -> list[Extent] | None:
        """Return cached blocks for another engine; None where the last of them is not there.

        Raises PeerError for blocks of another model, arithmetic or cache.
        """
        return self._preparation.exchange.export(wanted)

    # ---- what is going on -----------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
        return snapshot(
            self._runners,
            self.scheduler,
            self._preparation,
            self._speculation,
            self._steps,
            StretchCounts() if self._drafter is None else self._drafter.stretch,
            self.pins,
        )

    def info(self) -> EngineInfo:
        """Describe the loaded tiers."""
        tiers = {tier: tier_info(tier, runner) for tier, runner in self._runners.items()}
        names = () if self._drafter is None else self._drafter.names
        return EngineInfo(
            tiers=tiers,
            speculation=self._drafter is not None,
            drafters=names,
            role=self._config.role,
        )
