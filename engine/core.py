"""The step loop: both models, one queue, events out."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from engine.admission import check_cascade, check_prompt, tier_info
from engine.block_pool import OutOfBlocksError
from engine.config import EngineConfig
from engine.errors import InvalidRequestError, QueueFullError, TierUnavailableError
from engine.events import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
    PrefillDone,
    TierStats,
    TierSwitched,
    TokensEmitted,
)
from engine.grammar import GrammarCompiler
from engine.grammar_queue import GrammarQueue
from engine.judged import Judged, answer_slices, cut_at_end, plant, token_logprobs
from engine.logit_rules import build_rules
from engine.noise import SequenceNoise
from engine.protocols import ArrivalOrder, Drafter, Proposal, QueuePolicy, Verdict, Verifier
from engine.request import EngineRequest, Tier
from engine.runner import ForwardSlice, ModelRunner, PassOutput
from engine.scheduler import PassPlan, Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.speculation_counts import SpeculationCounts, num_predicted
from engine.token_tree import TokenTree

# A refused request is told to come back after about this long.
_RETRY_AFTER_S = 1.0
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
            policy=policy or ArrivalOrder(),
            drafter=drafter,
        )
        self._grammars = GrammarQueue(grammars or {}, clock=clock)
        self._sequences: dict[str, Sequence] = {}
        self._events: list[EngineEvent] = []
        self._num_steps = 0
        self._speculation = SpeculationCounts()
        self._step_total_s = 0.0
        self._forward_total_s = 0.0
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
        num_waiting = len(self.scheduler.waiting) + len(self._grammars)
        if num_waiting >= self._config.max_waiting:
            raise QueueFullError(num_waiting=num_waiting, retry_after_s=_RETRY_AFTER_S)
        sequence = Sequence(
            request=request,
            tier=request.tier,
            view=runner.new_view(request.cache_salt),
            noise=self._noise(request, request.tier),
            submitted_s=self._clock(),
            token_ids=list(request.prompt_token_ids),
            rules=build_rules(request.sampling, num_prompt_tokens=len(request.prompt_token_ids)),
        )
        self._sequences[request.request_id] = sequence
        if request.grammar is not None:
            self._grammars.add(sequence)
        else:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, "abort")

    def switch_tier(self, request_id: str, tier: Tier) -> None:
        """Hand a request to another tier: it starts its answer anew, the old one as a draft.

        The tokens emitted so far are retracted (`TierSwitched`). A small answer's KV goes on as
        the large tier's draft view. Unknown and finished requests are ignored.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.tier == tier:
            return
        if tier not in self._runners:
            raise TierUnavailableError(f"tier {tier!r} is not loaded")
        check_prompt(sequence.request, self._runners[tier])
        old_view = sequence.view
        sequence.view = self._runners[tier].new_view(sequence.request.cache_salt)
        if request_id in self._grammars:  # it has not begun: nothing is held, nothing to draft
            sequence.start_over(tier, self._noise(sequence.request, tier))
            self._events.append(TierSwitched(request_id=request_id, tier=tier))
            return
        self.scheduler.remove(sequence)
        sequence.start_over(tier, self._noise(sequence.request, tier))
        if self._drafter is not None and tier == "large" and _wants_tree(sequence):
            old_view.rewind(len(sequence.token_ids) - 1)
            self._drafter.adopt(sequence, old_view)
        else:
            old_view.release()
        self.scheduler.add(sequence)
        self._events.append(TierSwitched(request_id=request_id, tier=tier))

    def _noise(self, request: EngineRequest, tier: Tier) -> SequenceNoise:
        vocab_size = max(runner.vocab_size for runner in self._runners.values())
        return SequenceNoise(request.sampling, tier, vocab_size=vocab_size)

    # ---- the step -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._sequences or self._events)

    @torch.inference_mode()
    def step(
        self, on_events: Callable[[list[EngineEvent]], None] | None = None
    ) -> list[EngineEvent]:
        """Run one step and return what happened since the last one, in order.

        With `on_events`, what small passes emit beside a large one is handed over at once and is
        not returned again: a small answer does not wait for the large pass. The callback must not
        call back into the engine, whose large pass is planned by then.
        """
        self._admit_compiled()
        started_s = time.perf_counter()
        if len(self._sequences) > len(self._grammars):
            large = self._plan_large()
            trees = self._small_passes(large, None if large.is_empty else on_events)
            self._large_pass(large, trees)
            self._num_steps += 1
        self._step_total_s += time.perf_counter() - started_s
        events, self._events = self._events, []
        return events

    def _admit_compiled(self) -> None:
        """Queue the sequences whose grammar is there; end those that can have none."""
        if not len(self._grammars):
            return
        if len(self._sequences) == len(self._grammars) and not self._events:
            self._grammars.pause(_GRAMMAR_PAUSE_S)
        for sequence, error in self._grammars.take_ready():
            if error is None:
                self.scheduler.add(sequence)
                continue
            sequence.status = SequenceStatus.FINISHED
            del self._sequences[sequence.request_id]
            self._events.append(
                Failed(request_id=sequence.request_id, code="invalid_grammar", message=str(error))
            )

    def _plan_large(self) -> PassPlan:
        if "large" not in self._runners:
            return PassPlan()
        return self.scheduler.plan("large", self._clock())

    def _small_passes(
        self, large: PassPlan, on_events: Callable[[list[EngineEvent]], None] | None
    ) -> dict[str, TokenTree]:
        """Advance small answers and drafts together; returns the trees by request id."""
        is_rushed = len(large.prefills) > 1
        drafting = [
            sequence
            for sequence in large.decodes
            # Many prompts at once come first: guesses would make each of them wait longer.
            if _wants_tree(sequence) and (not is_rushed or sequence.cascade is not None)
        ]
        proposal: Proposal | None = None
        if self._drafter is not None and drafting:
            proposal = self._drafter.propose(drafting)
        trees: list[TokenTree] = []
        num_wanted = 1 if large.is_empty else self._num_small_passes()
        logits: Tensor | None = None
        number = 0
        while proposal is not None or number < num_wanted:
            # Answers are planned before drafts: where blocks are short they take them.
            plan = self._plan_small(number)
            wanted: list[ForwardSlice] = []
            if proposal is not None:
                try:
                    wanted = next(proposal) if logits is None else proposal.send(logits)
                except StopIteration as stop:
                    proposal, trees = None, stop.value
                    if number >= num_wanted:
                        break
            if plan.is_empty and not wanted:
                break
            answers, judged = answer_slices(plan)
            output = self._timed_forward("small", answers + wanted, plan)
            num_answer_rows = sum(piece.num_logit_rows for piece in answers)
            logits = output.logits[num_answer_rows:]
            self._judge("small", plan, judged, output)
            if on_events is not None and self._events:
                events, self._events = self._events, []
                on_events(events)
            number += 1
        return {s.request_id: tree for s, tree in zip(drafting, trees, strict=bool(trees))}

    def _num_small_passes(self) -> int:
        """How many passes small answers get beside a large one, by the passes' recent times."""
        config = self._config
        affordable = int(config.small_pass_share * self._pass_s["large"] / self._pass_s["small"])
        return min(max(affordable, config.min_small_passes), config.max_small_passes)

    def _plan_small(self, number: int) -> PassPlan:
        if not self.scheduler.running.get("small") and not self.scheduler.waiting:
            return PassPlan()
        if "small" not in self._runners:
            return PassPlan()
        return self.scheduler.plan("small", self._clock(), with_prefill=number == 0)

    def _large_pass(self, plan: PassPlan, trees: dict[str, TokenTree]) -> None:
        # Without the small model's logits at its root a cascade can emit nothing.
        plan.decodes = [
            s for s in plan.decodes if s.cascade is None or _knows_root(trees.get(s.request_id))
        ]
        if plan.is_empty:
            return
        slices, judged = answer_slices(plan)
        row = 0
        for piece, item in zip(slices, judged, strict=False):
            tree = trees.get(item.sequence.request_id)
            if tree is not None:
                item.tree = self._fit(item.sequence, tree)
                plant(piece, item.tree)
            item.first_row = row
            row += item.tree.num_nodes
        output = self._timed_forward("large", slices, plan)
        self._judge("large", plan, judged, output)

    def _fit(self, sequence: Sequence, tree: TokenTree) -> TokenTree:
        """As much of the tree as the free blocks can hold: drafts never pre-empt anybody."""
        view = sequence.view
        root_slot = view.num_computed_tokens
        block_size = view.pool.block_size
        num_free = (len(view.block_table) + view.pool.num_available) * block_size - root_slot
        tree = tree.truncated(min(tree.num_nodes, num_free))
        vocab_size = self._runners["large"].vocab_size
        if max(tree.token_ids) >= vocab_size:  # the drafter's vocabulary is padded further
            tree = tree.truncated(
                next(node for node, token in enumerate(tree.token_ids) if token >= vocab_size)
            )
        try:
            copies = view.reserve(root_slot + tree.num_nodes)
        except OutOfBlocksError:  # a copy of a shared block took the last one
            return tree.truncated(1)
        self._runners["large"].copy_blocks(copies)
        return tree

    def _timed_forward(
        self, tier: Tier, slices: SequenceOf[ForwardSlice], plan: PassPlan
    ) -> PassOutput:
        runner = self._runners[tier]
        output = runner.forward(slices)
        elapsed_s = runner.times.last_s
        self._forward_total_s += elapsed_s
        self._pass_s[tier] += _PASS_TIME_WEIGHT * (elapsed_s - self._pass_s[tier])
        if plan.prefills:
            num_rows = sum(len(piece.token_ids) for piece in slices)
            self.scheduler.note_pass(tier, num_rows=num_rows, elapsed_s=elapsed_s)
        return output

    # ---- after a pass ---------------------------------------------------------------------

    def _judge(
        self, tier: Tier, plan: PassPlan, judged: SequenceOf[Judged], output: PassOutput
    ) -> None:
        """Apply the acceptance rule to every tree of the pass, keep what was accepted."""
        for sequence, num_tokens in plan.prefills:
            computed = sequence.view.num_computed_tokens + num_tokens
            sequence.view.advance(computed, sequence.token_ids)
        if not judged:
            return
        last = judged[-1]
        logits = output.logits[: last.first_row + last.tree.num_nodes]
        verdicts = self._verifier.verify(
            [item.sequence for item in judged], [item.tree for item in judged], logits
        )
        self._compact(tier, judged, verdicts)
        now_s = self._clock()
        for item, verdict in zip(judged, verdicts, strict=True):
            self._accept(item, verdict, output, now_s)

    def _compact(
        self, tier: Tier, judged: SequenceOf[Judged], verdicts: SequenceOf[Verdict]
    ) -> None:
        """Move the accepted paths' keys and values into place, in the drafts' cache too."""
        moves: dict[Tier, tuple[list[int], list[int]]] = {"small": ([], []), "large": ([], [])}
        for item, verdict in zip(judged, verdicts, strict=True):
            view = item.sequence.view
            root_slot = len(item.sequence.token_ids) - 1
            for offset, node in enumerate(verdict.accepted_nodes, start=1):
                if node != offset:
                    moves[tier][0].append(view.slot(root_slot + node))
                    moves[tier][1].append(view.slot(root_slot + offset))
            if tier == "large" and self._drafter is not None:
                sources, destinations = self._drafter.commit(item.sequence, verdict)
                moves["small"][0].extend(sources)
                moves["small"][1].extend(destinations)
        for moved_tier, (sources, destinations) in moves.items():
            if sources:
                self._runners[moved_tier].move_slots(sources, destinations)

    def _accept(self, item: Judged, verdict: Verdict, output: PassOutput, now_s: float) -> None:
        """Append what was emitted, report it, and finish the sequence where it ends."""
        sequence = item.sequence
        sampling = sequence.request.sampling
        if not sequence.prefill_was_reported:
            self._report_prefill(sequence, output.hidden[item.first_row])
        emitted, reason = cut_at_end(
            verdict.token_ids, sequence.stop_token_ids, sequence.num_remaining_tokens
        )
        accepted_nodes = verdict.accepted_nodes[: len(emitted)]
        num_accepted = len(accepted_nodes)
        num_unratified = sum(verdict.unratified[: len(emitted)])
        computed = len(sequence.token_ids) + num_accepted
        sequence.token_ids.extend(emitted)
        if reason is None:  # after an open verdict the last token is the next root
            computed = min(computed, len(sequence.token_ids) - 1)
        sequence.view.advance(computed, sequence.token_ids)
        sequence.view.trim()
        sequence.num_steps += 1
        sequence.num_drafted_tokens += item.tree.num_draft_nodes
        sequence.num_accepted_tokens += num_accepted
        sequence.num_unratified_tokens += num_unratified
        self._speculation.num_unratified_tokens += num_unratified
        self._speculation.count(item.tree, accepted_nodes)
        self.scheduler.counters[sequence.tier].num_output_tokens += len(emitted)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        rows = [item.first_row + node for node in verdict.nodes[: len(emitted)]]
        self._events.append(
            TokensEmitted(
                request_id=sequence.request_id,
                token_ids=tuple(emitted),
                num_drafted_tokens=item.tree.num_draft_nodes,
                num_accepted_tokens=num_accepted,
                num_predicted_tokens=(
                    num_predicted(item.tree, accepted_nodes)
                    if sequence.request.prediction_token_ids
                    else 0
                ),
                num_unratified_tokens=num_unratified,
                logprobs=token_logprobs(output.logits, rows, emitted, sampling.num_logprobs),
            )
        )
        if reason is not None:
            self._finish(sequence, reason)

    def _report_prefill(self, sequence: Sequence, hidden: Tensor) -> None:
        sequence.prefill_was_reported = True
        wanted = sequence.request.return_hidden_state
        self._events.append(
            PrefillDone(
                request_id=sequence.request_id,
                tier=sequence.tier,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=sequence.num_cached_tokens or 0,
                queue_s=sequence.queue_s or 0.0,
                hidden_state=tuple(hidden.float().tolist()) if wanted else None,
            )
        )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if self._grammars.discard(sequence.request_id):
            sequence.status = SequenceStatus.FINISHED
        else:
            self.scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        self._events.append(
            Finished(
                request_id=sequence.request_id,
                tier=sequence.tier,
                finish_reason=reason,
                stats=sequence.stats(),
            )
        )

    # ---- what is going on -----------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""
        counts = self._speculation
        return EngineStats(
            tiers={tier: self._tier_stats(tier) for tier in self._runners},
            num_steps=self._num_steps,
            num_drafts=counts.num_drafts,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            accepted_per_depth=tuple(counts.accepted_per_depth),
            num_unratified_tokens=counts.num_unratified_tokens,
            drafted_by_source=counts.drafted_by_source(),
            accepted_by_source=counts.accepted_by_source(),
            step_host_s=self._step_total_s - self._forward_total_s,
            step_forward_s=self._forward_total_s,
        )

    def _tier_stats(self, tier: Tier) -> TierStats:
        counters = self.scheduler.counters[tier]
        pool = self._runners[tier].pool
        return TierStats(
            num_running=len(self.scheduler.running[tier]),
            num_waiting=self._grammars.count(tier)
            + sum(sequence.tier == tier for sequence in self.scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_output_tokens=counters.num_output_tokens,
        )

    def info(self) -> EngineInfo:
        """What is loaded."""
        tiers = {tier: tier_info(tier, runner) for tier, runner in self._runners.items()}
        return EngineInfo(tiers=tiers, speculation=self._drafter is not None)


def _wants_tree(sequence: Sequence) -> bool:
    """Whether the drafter is asked; for a cascade also where nothing may be drafted."""
    return sequence.request.speculation.enabled or sequence.cascade is not None


def _knows_root(tree: TokenTree | None) -> bool:
    """Whether the small model's logits are there for the tree's root."""
    return tree is not None and bool(tree.draft_logits) and tree.draft_logits[0] is not None
