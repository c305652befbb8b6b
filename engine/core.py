"""The step loop: both models, one queue, events out."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from engine.block_pool import OutOfBlocksError
from engine.config import EngineConfig
from engine.errors import (
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    TierUnavailableError,
)
from engine.events import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    Finished,
    FinishReason,
    PrefillDone,
    TierInfo,
    TierStats,
    TierSwitched,
    TokensEmitted,
)
from engine.judged import Judged, answer_slices, cut_at_end, plant, token_logprobs
from engine.logit_rules import build_rules
from engine.noise import SequenceNoise
from engine.protocols import ArrivalOrder, Drafter, Proposal, QueuePolicy, Verdict, Verifier
from engine.request import EngineRequest, Tier
from engine.runner import ForwardSlice, ModelRunner, PassOutput
from engine.scheduler import PassPlan, Scheduler
from engine.sequence import Sequence
from engine.token_tree import TokenTree

# A refused request is told to come back after about this long.
_RETRY_AFTER_S = 1.0
_PASS_TIME_WEIGHT = 0.1


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
        self._sequences: dict[str, Sequence] = {}
        self._events: list[EngineEvent] = []
        self._num_steps = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._accepted_per_depth: list[int] = []
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
        self._check_prompt(request, runner)
        if len(self.scheduler.waiting) >= self._config.max_waiting:
            raise QueueFullError(
                num_waiting=len(self.scheduler.waiting), retry_after_s=_RETRY_AFTER_S
            )
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
        self._check_prompt(sequence.request, self._runners[tier])
        old_view = sequence.view
        sequence.view = self._runners[tier].new_view(sequence.request.cache_salt)
        self.scheduler.remove(sequence)
        sequence.start_over(tier, self._noise(sequence.request, tier))
        may_draft = tier == "large" and sequence.request.speculation.enabled
        if self._drafter is not None and may_draft:
            old_view.rewind(len(sequence.token_ids) - 1)
            self._drafter.adopt(sequence, old_view)
        else:
            old_view.release()
        self.scheduler.add(sequence)
        self._events.append(TierSwitched(request_id=request_id, tier=tier))

    def _check_prompt(self, request: EngineRequest, runner: ModelRunner) -> None:
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= runner.vocab_size:
            raise InvalidRequestError(
                f"prompt token ids must lie in [0, {runner.vocab_size}); "
                f"found {min(prompt)} to {max(prompt)}"
            )
        assert runner.max_context is not None
        if len(prompt) + request.sampling.max_tokens > runner.max_context:
            raise PromptTooLongError(
                num_tokens=len(prompt),
                max_tokens=request.sampling.max_tokens,
                max_context=runner.max_context,
            )

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
        started_s = time.perf_counter()
        if self._sequences:
            large = self._plan_large()
            trees = self._small_passes(large, None if large.is_empty else on_events)
            self._large_pass(large, trees)
            self._num_steps += 1
        self._step_total_s += time.perf_counter() - started_s
        events, self._events = self._events, []
        return events

    def _plan_large(self) -> PassPlan:
        if "large" not in self._runners:
            return PassPlan()
        return self.scheduler.plan("large", self._clock())

    def _small_passes(
        self, large: PassPlan, on_events: Callable[[list[EngineEvent]], None] | None
    ) -> dict[str, TokenTree]:
        """Advance small answers and drafts together; returns the trees by request id."""
        drafting = [s for s in large.decodes if s.request.speculation.enabled]
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
            verdict.token_ids, sampling.stop_token_ids, sequence.num_remaining_tokens
        )
        num_accepted = min(verdict.num_accepted_tokens, len(emitted))
        computed = len(sequence.token_ids) + num_accepted
        sequence.token_ids.extend(emitted)
        sequence.view.advance(computed, sequence.token_ids)
        sequence.view.trim()
        sequence.num_steps += 1
        sequence.num_drafted_tokens += item.tree.num_draft_nodes
        sequence.num_accepted_tokens += num_accepted
        self._count(sequence, item.tree, num_accepted, len(emitted))
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        rows = [item.first_row + node for node in verdict.nodes[: len(emitted)]]
        self._events.append(
            TokensEmitted(
                request_id=sequence.request_id,
                token_ids=tuple(emitted),
                num_drafted_tokens=item.tree.num_draft_nodes,
                num_accepted_tokens=num_accepted,
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

    def _count(self, sequence: Sequence, tree: TokenTree, accepted: int, emitted: int) -> None:
        self.scheduler.counters[sequence.tier].num_output_tokens += emitted
        if tree.num_draft_nodes:
            self._num_drafts += 1
            self._num_draft_tokens += tree.num_draft_nodes
            self._num_accepted_tokens += accepted
            missing = accepted - len(self._accepted_per_depth)
            self._accepted_per_depth.extend([0] * missing)
            for depth in range(accepted):
                self._accepted_per_depth[depth] += 1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
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
        return EngineStats(
            tiers={tier: self._tier_stats(tier) for tier in self._runners},
            num_steps=self._num_steps,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            accepted_per_depth=tuple(self._accepted_per_depth),
            step_host_s=self._step_total_s - self._forward_total_s,
            step_forward_s=self._forward_total_s,
        )

    def _tier_stats(self, tier: Tier) -> TierStats:
        counters = self.scheduler.counters[tier]
        pool = self._runners[tier].pool
        return TierStats(
            num_running=len(self.scheduler.running[tier]),
            num_waiting=sum(sequence.tier == tier for sequence in self.scheduler.waiting),
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
        tiers: dict[Tier, TierInfo] = {}
        for tier, runner in self._runners.items():
            model = runner.model
            assert runner.max_context is not None
            tiers[tier] = TierInfo(
                tier=tier,
                model_id=model.config.model_id.rstrip("/").rsplit("/", 1)[-1],
                path=model.config.model_id,
                max_context=runner.max_context,
                vocab_size=runner.vocab_size,
                num_parameters=model.num_parameters,
                dtype=str(model.dtype).removeprefix("torch."),
                device=str(model.device),
            )
        return EngineInfo(tiers=tiers, speculation=self._drafter is not None)
