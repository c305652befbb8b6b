"""Collects the outcome of one API request for the sinks (gateway/answers/outcomes.py)."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.answers.outcomes import ArmRef, Ending, OutcomeSink, RequestOutcome
from gateway.answers.responder import AnswerFacts
from gateway.errors.http import problem_of
from gateway.ledger.row import LedgerRow
from gateway.metering.meter import Account
from gateway.slo.classes import ResolvedObjective

logger = logging.getLogger(__name__)

_NO_ROOM: Final = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """The end of the response. `duration_s` counts from the request's arrival."""

    facts: AnswerFacts | None
    ending: Ending
    status: int | None
    error_code: str | None
    duration_s: float


class OutcomeRecord:
    """Collects the outcome of a request from several places; tells the sinks once, when complete.

    A faulty request (status 4xx except 429) counts for no tier.
    """

    def __init__(
        self,
        sinks: Sequence[OutcomeSink],
        *,
        arrival_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Store the arguments. `clock` is the gateway's, `wall_clock` counts since 1970."""
        self.arms: tuple[ArmRef, ...] = ()
        self.model = ""
        self.is_streamed = False
        self._objective: ResolvedObjective | None = None
        self._sinks = sinks
        self._arrival_s = arrival_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._end: _End | None = None
        self._rows: tuple[LedgerRow, ...] | None = None
        self._account: Account | None = None

    def identify(self, account: Account) -> None:
        """Set the account that the request belongs to."""
        self._account = account

    def serve_under(self, objective: ResolvedObjective) -> None:
        """Set the latency objective of the request; the last call holds."""
        self._objective = objective

    def booked(self, rows: Iterable[LedgerRow]) -> None:
        """Record that all attempts are in the ledger. Only the first call counts."""
        if self._rows is None:
            self._rows = tuple(rows)
            self._tell()

    def ended(
        self,
        facts: AnswerFacts | None,
        outcome: str,
        status: int | None,
        error: BaseException | None = None,
    ) -> None:
        """Record the end: `outcome` is "answered", "cancelled" or "failed"."""
        code, ending = None, _ending(outcome, error)
        if isinstance(error, Exception):
            problem = problem_of(error)
            code = problem.code or type(error).__name__
            status = problem.status if status is None else status
            if problem.status == _NO_ROOM:
                ending = "refused"
            elif 400 <= problem.status < 500:
                self._sinks = ()
        self._end = _End(
            facts=facts,
            ending=ending,
            status=status,
            error_code=code,
            duration_s=self._clock() - self._arrival_s,
        )
        if facts is None:  # no work was begun that could cost anything
            self._rows = self._rows or ()
        self._tell()

    def _tell(self) -> None:
        if self._end is None or self._rows is None:
            return
        sinks, self._sinks = self._sinks, ()
        if not sinks:
            return
        outcome = self._outcome(self._end, self._rows)
        for sink in sinks:
            try:
                sink.observe(outcome)
            except Exception as error:
                logger.exception("outcome not counted error=%s", type(error).__name__)

    def _outcome(self, end: _End, rows: Sequence[LedgerRow]) -> RequestOutcome:
        objective = self._objective
        told = {} if end.facts is None else _told(end.facts, end.duration_s)
        return RequestOutcome(
            **_identity(self._account),
            **told,
            model=self.model,
            ending=end.ending,
            status=end.status,
            error_code=end.error_code,
            ended_at=self._wall_clock(),
            is_streamed=self.is_streamed,
            duration_s=end.duration_s,
            cost_nanos=sum(row.cost_nanos for row in rows),
            charge_nanos=sum(row.charge_nanos for row in rows),
            slo_class="" if objective is None else objective.class_name,
            slo_ttft_s=None if objective is None else objective.ttft_s,
            slo_inter_token_s=None if objective is None else objective.inter_token_s,
            arms=self.arms,
        )


def _identity(account: Account | None) -> dict[str, Any]:
    """Return the outcome's fields about the account."""
    if account is None:
        return {"request_id": "", "client_request_id": ""}
    return {
        "request_id": account.request_id,
        "client_request_id": account.client_request_id,
        "key_id": account.principal.key_id,
        "team_id": account.principal.team_id or "",
        "endpoint": account.endpoint,
    }


def _ending(outcome: str, error: BaseException | None) -> Ending:
    """Return the kind of ending: a client that leaves is no error, a passed deadline is."""
    if outcome == "answered":
        return "answered"
    return "cancelled" if outcome == "cancelled" and not isinstance(error, Exception) else "failed"


def _told(facts: AnswerFacts, duration_s: float) -> dict[str, Any]:
    """Return the outcome's fields about the answer."""
    inter_token_s = facts.inter_token_s
    if inter_token_s is None and facts.ttft_s is not None and facts.num_tokens > 1:
        inter_token_s = max(duration_s - facts.ttft_s, 0.0) / (facts.num_tokens - 1)
    return {
        "answer_id": facts.job_id,
        "tier": facts.tier,
        "is_escalated": facts.is_escalated,
        "is_degraded": facts.is_degraded,
        "ttft_s": facts.ttft_s,
        "inter_token_s": inter_token_s,
        "num_prompt_tokens": facts.num_prompt_tokens,
        "num_completion_tokens": facts.num_tokens,
        "num_drafted_tokens": facts.num_drafted_tokens,
        "num_accepted_tokens": facts.num_accepted_tokens,
    }
