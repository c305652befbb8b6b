"""The account of one API request: its reservation, the work done for it, its charge."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from outrider.engine.errors import EngineError
from outrider.engine.request import NO_OBJECTIVE, LatencyObjective
from outrider.gateway.contract.answers.outcomes import ArmRef, OutcomeSink, RequestOutcome
from outrider.gateway.contract.answers.responder import AnswerFacts
from outrider.gateway.contract.errors.tree import DeadlineExceededError, GatewayError
from outrider.gateway.telemetry.tracer import NULL_SPAN, Span
from outrider.gateway.tenancy.keys.authenticator import EndRequest
from outrider.gateway.tenancy.keys.keys import VERIFIED, Principal
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.metering.charging import priced
from outrider.gateway.tenancy.metering.engine_spans import record_local
from outrider.gateway.tenancy.metering.faults import is_requests_fault
from outrider.gateway.tenancy.metering.local_work import LocalWork
from outrider.gateway.tenancy.metering.request_end import RequestEnd, report_outcome
from outrider.gateway.tenancy.metering.reserved_usage import (
    ReservedUsage,
    UsageEstimate,
    reserve_request,
)
from outrider.gateway.tenancy.metering.rows import (
    CachedUsage,
    Entry,
    LocalAnswer,
    cached_entry,
    local_entries,
    upstream_entry,
)
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance
from outrider.gateway.upstream.attempts import UpstreamAttempt

MeteredEnding = Literal["answered", "cancelled", "failed"]
"""The way a response ended: complete, cancelled by the client, or failed by our error."""


@dataclass(slots=True, kw_only=True)
class _FollowedAnswer:
    """One local answer. `describe` describes it once it is over."""

    work: LocalWork
    describe: Callable[[], LocalAnswer]
    described: LocalAnswer | None = None

    @property
    def answer(self) -> LocalAnswer:
        """Return the description of the finished answer."""
        if self.described is None:
            self.described = self.describe()
        return self.described


@dataclass(slots=True, kw_only=True, eq=False)
class RequestMeter:
    """Reserves before the work, counts while it runs, books, gives back and reports at the end.

    Every request is ended once, in the background or waited for; later calls do nothing.
    """

    tenancy: Tenancy
    principal: Principal
    endpoint: str
    client_request_id: str
    """The header x-request-id."""
    arrival_s: float
    """On the gateway's clock."""
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    """Seconds since 1970, for the ledger."""
    sinks: Sequence[OutcomeSink] = ()
    """Told of the request's outcome, once it is both over and booked."""

    request_id: str = field(init=False)
    """The ledger's own id of the request."""
    end_user: str = ""
    """The end user whom it is counted for, in the form that is kept; empty: none is known."""
    span: Span = NULL_SPAN
    arm: str = ""
    """The arms of experiments that the request is in, as text."""
    arms: tuple[ArmRef, ...] = ()
    """The arms that its outcome counts for."""
    is_streamed: bool = False
    _slo_class: str = ""
    _objective: LatencyObjective = NO_OBJECTIVE
    _usage: ReservedUsage | None = None
    _local_answers: list[_FollowedAnswer] = field(default_factory=list)
    _attempts: list[UpstreamAttempt] = field(default_factory=list)
    _cached: CachedUsage | None = None
    _ending: MeteredEnding | None = None
    _charged: asyncio.Event | None = None
    """Set once the charge is known; None where nothing has to be waited for."""
    _is_continued: bool = False
    _is_requests_fault: bool = False
    _is_unforeseen: bool = False
    """True if an error that nothing expects ended it: a client might know how to cause it."""
    _end: RequestEnd | None = None
    _booked: tuple[LedgerRow, ...] | None = None
    """The rows of all attempts that ended before the answer did, once they are in the ledger."""

    def __post_init__(self) -> None:
        self.request_id = next(self.tenancy.row_ids)
        if self.principal.end_user:
            self.end_user = self.tenancy.end_user_form(self.principal.end_user)

    # ---- before -------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Count the request, before its body is read. Raises RateLimitError or BudgetError."""
        if self.principal.is_limited:
            self._usage = await reserve_request(self.tenancy, self.principal, self.endpoint)
        if self.principal.end_user:
            try:
                await self.count_for("")
            except GatewayError:
                await self.end_unless_ended()
                raise

    async def count_for(self, end_user: str) -> None:
        """Count the request for its end user, too; empty: it names none.

        A verified token's subject counts in the place of what its requests name. Where end users
        have limits, requests that name none count as one end user's. Raises RateLimitError or
        BudgetError.
        """
        if end_user and not self.principal.end_user:
            self.end_user = self.tenancy.end_user_form(end_user)
        if self._usage is not None and self.principal.has_end_user_limits:
            is_verified = bool(self.principal.end_user)
            await self._usage.count_for(VERIFIED + self.end_user if is_verified else self.end_user)

    async def admit(self, estimate: UsageEstimate) -> TokenAllowance | None:
        """Reserve the answer's usage, in addition to the request itself (`enter`).

        Returns the allowance, which can grow; None where the answer cannot take more than is
        reserved, and where no limit applies. Where other tiers were to answer before, only the
        difference is reserved. Raises RateLimitError or BudgetError.
        """
        return None if self._usage is None else await self._usage.admit(estimate)

    async def serve_cached(self, usage: CachedUsage) -> None:
        """Note that the answer comes from the cache, and reserve it where it is charged.

        Raises RateLimitError or BudgetError.
        """
        if usage.is_charged:
            await self.admit(
                UsageEstimate(
                    tiers=(usage.tier,),
                    num_prompt_tokens=usage.num_prompt,
                    num_choices=1,
                    max_tokens=usage.num_completion,
                    is_bounded=True,
                )
            )
        self._cached = usage

    @property
    def headers(self) -> dict[str, str]:
        """Return the x-ratelimit headers; empty where no limit applies."""
        return {} if self._usage is None else self._usage.headers

    def while_key_lasts(self, end: EndRequest) -> AbstractContextManager[None]:
        """Have `end` called with the error if the request's key is revoked, expires or is removed.

        Entering raises AuthenticationError where that has happened already.
        """
        running = self.tenancy.keys.authenticator.running
        return running.of_key(self.principal.key_id, end)

    # ---- meanwhile ----------------------------------------------------------------------------

    def serve_under(self, slo_class: str, objective: LatencyObjective) -> None:
        """Set the latency objective of the request; the last call holds."""
        self._slo_class, self._objective = slo_class, objective

    def follow_local(self, work: LocalWork, describe: Callable[[], LocalAnswer]) -> None:
        """Follow a local answer; `describe` describes it once all of its work is over."""
        self._local_answers.append(_FollowedAnswer(work=work, describe=describe))

    def continued(self) -> None:
        """Record that another responder continues the answer: its beginning was delivered too."""
        self._is_continued = True

    def on_attempt(self, attempt: UpstreamAttempt) -> None:
        """Book an ended upstream request; losers of a race and copies end after the answer."""
        if attempt.kind == "continuation":
            self._is_continued = True
        if self._booked is not None:
            entry = self._of_attempt(attempt, was_handed_over=False)
            self.tenancy.ledger.add(priced(entry, self.tenancy.prices))
        else:
            self._attempts.append(attempt)

    # ---- after --------------------------------------------------------------------------------

    def note_error(self, error: Exception) -> None:
        """Note the error of the request: one that is at fault itself stays counted."""
        self._is_requests_fault = is_requests_fault(error)
        self._is_unforeseen = not isinstance(error, GatewayError | EngineError)

    def end_in_background(self, ending: MeteredEnding) -> None:
        """End the response. Remaining work is done in the background."""
        if self._ending is None:
            self._begin_end(ending)

    async def end_and_wait(self, ending: MeteredEnding) -> None:
        """End the response, and return once the rest of the reservation is given back.

        The next request of the tenant then finds it. The only thing not waited for is an engine
        that has still to end its work on an answer that was not delivered.
        """
        if self._ending is not None:
            return
        is_known = ending == "answered" or self._is_work_complete
        self._begin_end(ending)
        if self._charged is not None and is_known:
            await self._charged.wait()

    async def end_unless_ended(self) -> None:
        """End a request that no answer of its own has ended, and give back what it reserved."""
        await self.end_and_wait("failed")

    def _begin_end(self, ending: MeteredEnding) -> None:
        """Do what can be done at once, and the rest in a task."""
        self._ending = ending
        is_complete = self._is_work_complete
        if is_complete and self._usage is None:
            self._book(self._rows())
        elif is_complete and self._usage is not None and self._usage.never_waits:
            self.tenancy.settlements.do(self._charge_and_book(ending))
        else:
            self._charged = asyncio.Event()
            self.tenancy.settlements.add(self._charge_and_book(ending))

    @property
    def _is_work_complete(self) -> bool:
        return all(followed.work.is_complete for followed in self._local_answers)

    async def _charge_and_book(self, ending: MeteredEnding) -> None:
        """Charge, give back, and book once the engine has reported the end of its work.

        The charge of a complete answer does not depend on those reports.
        """
        try:
            if ending != "answered":
                await self._last_words()
        finally:
            try:
                rows = await self._charged_rows()
            finally:
                if self._charged is not None:
                    self._charged.set()
        if not self._is_work_complete:
            await self._last_words()
            rows = self._rows() if self._usage is None else self._usage.capped(self._rows())
        self._book(rows)

    async def _charged_rows(self) -> list[LedgerRow]:
        rows = self._rows()
        if self._usage is None:
            return rows
        is_counted = self._ending != "failed" or self._is_requests_fault
        return await self._usage.charge(rows, is_counted=is_counted)

    async def _last_words(self) -> None:
        for followed in self._local_answers:
            if not followed.work.is_complete:
                await followed.work.wait()

    def _book(self, rows: list[LedgerRow]) -> None:
        self._booked = tuple(rows)
        for row in rows:
            self.tenancy.ledger.add(row)
        self._report()
        for followed in self._local_answers:
            record_local(self.span, followed.work, followed.answer)
            self._learn(followed.answer)

    # ---- the outcome --------------------------------------------------------------------------

    def note_outcome(
        self,
        facts: AnswerFacts | None,
        outcome: str,
        status: int | None,
        error: BaseException | None = None,
    ) -> None:
        """Note how the response ended, for the outcome; see `RequestEnd.of`."""
        end = RequestEnd.of(facts, outcome, status, error, self.clock() - self.arrival_s)
        self._end = end
        if end.is_faulty:
            self.sinks = ()
        self._report()

    def _report(self) -> None:
        """Tell the sinks once, when the request is over and booked."""
        end = self._end
        # Without facts no work was begun that could cost anything.
        if end is None or not self.sinks or (self._booked is None and end.facts is not None):
            return
        sinks, self.sinks = self.sinks, ()
        report_outcome(sinks, self._outcome(end, self._booked or ()))

    def _outcome(self, end: RequestEnd, rows: Sequence[LedgerRow]) -> RequestOutcome:
        return RequestOutcome(
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            key_id=self.principal.key_id,
            team_id=self.principal.team_id or "",
            endpoint=self.endpoint,
            ended_at=self.wall_clock(),
            is_streamed=self.is_streamed,
            cost_nanos=sum(row.cost_nanos for row in rows),
            charge_nanos=sum(row.charge_nanos for row in rows),
            slo_class=self._slo_class,
            slo_ttft_s=self._objective.ttft_s,
            slo_inter_token_s=self._objective.inter_token_s,
            arms=self.arms,
            **end.fields(),
        )

    # ---- the ledger's rows --------------------------------------------------------------------

    def _rows(self) -> list[LedgerRow]:
        return [priced(entry, self.tenancy.prices) for entry in self._entries()]

    def _entries(self) -> Iterator[Entry]:
        was_handed_over = False
        for followed in self._local_answers:
            answer = followed.answer
            was_handed_over = was_handed_over or answer.was_given_up
            if answer.outcome == "failed" and self._was_delivered_in_part:
                answer = msgspec.structs.replace(answer, is_delivered_in_part=True)
            elif answer.outcome == "cancelled" and self._ending != "cancelled":
                answer = msgspec.structs.replace(answer, outcome="lost")
            yield from local_entries(answer, followed.work.by_tier(), self._template)
        for attempt in self._attempts:
            yield self._of_attempt(attempt, was_handed_over=was_handed_over)
            was_handed_over = was_handed_over or attempt.outcome == "escalated"
        if self._cached is not None:
            duration_s = self.clock() - self.arrival_s
            yield cached_entry(self._cached, self._template, duration_s=duration_s)

    def _learn(self, answer: LocalAnswer) -> None:
        """Learn the length of an answer that had no maximum."""
        if answer.is_bounded or answer.outcome not in ("answered", "limited", "cancelled"):
            return
        for num_tokens in answer.tokens_by_choice:
            self.tenancy.lengths.learn(
                answer.tier,
                self.endpoint,
                num_tokens,
                was_cut=answer.outcome != "answered",
            )

    @property
    def _was_delivered_in_part(self) -> bool:
        """Return whether a broken answer's beginning is part of an answer that was completed."""
        return self._is_continued and self._ending != "failed"

    def _of_attempt(self, attempt: UpstreamAttempt, *, was_handed_over: bool) -> Entry:
        is_delivered = attempt.kind not in ("mirror", "probe") and self._booked is None
        match attempt.outcome:
            case "answered" | "limited":
                pass
            case "cancelled":
                # By the request's own word, and the server is to be paid.
                is_late = attempt.failure == DeadlineExceededError.CODE
                is_left = self._ending == "cancelled" or self._is_unforeseen
                is_delivered = is_delivered and (is_late or is_left)
            case "refused":
                # In the middle of its answer: the request was at fault, and had a part of it.
                is_delivered = is_delivered and attempt.first_token_s is not None
            case "failed":
                has_begun = attempt.first_token_s is not None and attempt.usage is not None
                is_delivered = is_delivered and has_begun and self._was_delivered_in_part
            case _:
                is_delivered = False
        if attempt.outcome == "answered" and self._ending == "failed":
            is_delivered = is_delivered and self._is_unforeseen
        return upstream_entry(
            attempt,
            self._template,
            is_delivered=is_delivered,
            was_handed_over=was_handed_over,
            arrival_s=self.arrival_s,
        )

    def _template(self, **fields: Any) -> LedgerRow:
        return LedgerRow(
            row_id=next(self.tenancy.row_ids),
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            ended_at=self.wall_clock(),
            key_id=self.principal.key_id,
            team_id=self.principal.team_id,
            endpoint=self.endpoint,
            arm=self.arm,
            end_user=self.end_user,
            is_streamed=self.is_streamed,
            **fields,
        )
