"""The sinks get the outcome once, when a request is both over and booked."""

from collections.abc import Callable

import pytest

from outrider.engine.errors import QueueFullError
from outrider.engine.request import LatencyObjective
from outrider.gateway.contract.answers.outcomes import ArmRef, RequestOutcome
from outrider.gateway.contract.answers.responder import AnswerFacts
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    DeadlineExceededError,
    EngineLostError,
)
from outrider.gateway.tenancy.keys.keys import ANONYMOUS
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.metering.meter import RequestMeter
from outrider.gateway.tenancy.metering.tenancy import Tenancy

FACTS = AnswerFacts(
    tier="small", reason="x", job_id="chatcmpl-1", outcome="stop", num_tokens=11, ttft_s=0.5
)
ROW = LedgerRow(
    row_id="1", request_id="r", ended_at=0.0, kind="answer", outcome="answered", tier="small",
    cost_nanos=30, charge_nanos=20,
)  # fmt: skip
ARM = ArmRef(experiment="e", version=1, arm="b", unit_bucket=7)


class Told(list[RequestOutcome]):
    """Keeps what it is told."""

    def observe(self, outcome: RequestOutcome) -> None:
        self.append(outcome)


class Broken:
    """Cannot count."""

    def observe(self, outcome: RequestOutcome) -> None:
        raise ZeroDivisionError


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def meter(told: Told) -> RequestMeter:
    """Return the meter of a request that came 2 s ago."""
    made = RequestMeter(
        tenancy=Tenancy(row_ids=iter(["r"])),
        principal=ANONYMOUS,
        endpoint="chat",
        client_request_id="c",
        arrival_s=10.0,
        clock=lambda: 12.0,
        wall_clock=lambda: 99.0,
        sinks=(Broken(), told),
        arms=(ARM,),
    )
    made.serve_under("short-chat", LatencyObjective(ttft_s=0.5, inter_token_s=0.15))
    return made


def book(meter: RequestMeter) -> None:
    meter._book([ROW, ROW])


def end(meter: RequestMeter) -> None:
    meter.note_outcome(FACTS, "answered", 200)


@pytest.mark.parametrize("steps", [(book, end), (end, book), (end, book, end, book)])
def test_it_is_told_once_however_it_comes(
    meter: RequestMeter, told: Told, steps: tuple[Callable[[RequestMeter], None], ...]
) -> None:
    for number, step in enumerate(steps):
        assert len(told) == (number > 1)
        step(meter)
    (outcome,) = told
    assert (outcome.request_id, outcome.client_request_id, outcome.answer_id) == (
        "r",
        "c",
        "chatcmpl-1",
    )
    assert (outcome.cost_nanos, outcome.charge_nanos) == (60, 40)
    assert (outcome.ending, outcome.status, outcome.tier) == ("answered", 200, "small")
    assert outcome.arms == (ARM,)
    assert (outcome.ttft_s, outcome.duration_s, outcome.ended_at) == (0.5, 2.0, 99.0)
    # 1.5 s behind the first of 11 tokens.
    assert outcome.inter_token_s == pytest.approx(0.15)
    assert outcome.is_attained


def test_an_answer_that_missed_an_objective_is_not_attained(
    meter: RequestMeter, told: Told
) -> None:
    meter.serve_under("short-chat", LatencyObjective(ttft_s=0.49))
    book(meter)
    end(meter)
    assert not told[0].is_attained


@pytest.mark.parametrize(
    ("outcome", "error", "ending"),
    [
        ("cancelled", None, "cancelled"),
        ("cancelled", DeadlineExceededError("late"), "failed"),
        ("failed", EngineLostError("died"), "failed"),
        ("failed", QueueFullError(num_waiting=3, retry_after_s=1.0), "refused"),
    ],
)
def test_how_it_ended(
    meter: RequestMeter, told: Told, outcome: str, error: Exception | None, ending: str
) -> None:
    book(meter)
    meter.note_outcome(FACTS, outcome, None, error)
    assert told[0].ending == ending
    assert not told[0].is_attained
    assert (told[0].status is None) is (error is None)


def test_faulty_requests_have_no_outcome(meter: RequestMeter, told: Told) -> None:
    meter.note_outcome(None, "failed", None, BadRequestError("no"))
    book(meter)
    assert told == []


def test_a_request_without_work_is_reported_without_rows(meter: RequestMeter, told: Told) -> None:
    meter.note_outcome(None, "failed", None, QueueFullError(num_waiting=3, retry_after_s=1.0))
    assert told[0].cost_nanos == 0
