"""The end of one API request, as outcome sinks are told of it (contract/answers/outcomes.py)."""

import logging
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from outrider.gateway.contract.answers.outcomes import OutcomeSink, RequestEnding, RequestOutcome
from outrider.gateway.contract.answers.responder import AnswerFacts
from outrider.gateway.contract.errors.http import problem_of

logger = logging.getLogger(__name__)

_NO_ROOM: Final = 429


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the response."""

    facts: AnswerFacts | None
    ending: RequestEnding
    status: int | None
    error_code: str | None
    duration_s: float
    """From the request's arrival."""
    is_faulty: bool
    """The request itself is at fault (status 4xx except 429), so it counts for no tier."""

    @classmethod
    def of(
        cls,
        facts: AnswerFacts | None,
        outcome: str,
        status: int | None,
        error: BaseException | None,
        duration_s: float,
    ) -> "RequestEnd":
        """Return the end that has this `outcome`: "answered", "cancelled" or "failed"."""
        code, ending, is_faulty = None, _ending(outcome, error), False
        if isinstance(error, Exception):
            problem = problem_of(error)
            code = problem.code or type(error).__name__
            status = problem.status if status is None else status
            if problem.status == _NO_ROOM:
                ending = "refused"
            is_faulty = 400 <= problem.status < 500 and problem.status != _NO_ROOM
        return cls(
            facts=facts,
            ending=ending,
            status=status,
            error_code=code,
            duration_s=duration_s,
            is_faulty=is_faulty,
        )

    def fields(self) -> dict[str, Any]:
        """Return the outcome's fields about the end and the answer."""
        return {
            **({} if self.facts is None else _reported_facts(self.facts, self.duration_s)),
            "ending": self.ending,
            "status": self.status,
            "error_code": self.error_code,
            "duration_s": self.duration_s,
        }


def report_outcome(sinks: Iterable[OutcomeSink], outcome: RequestOutcome) -> None:
    """Tell every sink; one that fails does not keep it from the others."""
    for sink in sinks:
        try:
            sink.observe(outcome)
        except Exception as error:
            logger.exception("outcome not counted error=%s", type(error).__name__)


def _ending(outcome: str, error: BaseException | None) -> RequestEnding:
    """Return the kind of ending: a client that leaves is no error, a passed deadline is."""
    if outcome == "answered":
        return "answered"
    return "cancelled" if outcome == "cancelled" and not isinstance(error, Exception) else "failed"


def _reported_facts(facts: AnswerFacts, duration_s: float) -> dict[str, Any]:
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
