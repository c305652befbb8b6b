"""Those who count are told once, when a request is both over and booked."""

from collections.abc import Callable

import pytest

from engine.errors import QueueFullError
from gateway.answers.outcomes import ArmRef, RequestOutcome
from gateway.answers.responder import AnswerFacts
from gateway.errors.tree import BadRequestError, DeadlineExceededError, EngineLostError
from gateway.ledger.row import LedgerRow
from gateway.metering.meter import Account
from gateway.metering.outcome_record import OutcomeRecord
from gateway.slo.classes import ResolvedObjective
from gateway.tenants.principal import ANONYMOUS

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
def record(told: Told) -> OutcomeRecord:
    """Of a request that came 2 s ago."""
    made = OutcomeRecord(
        (Broken(), told), arrival_s=10.0, clock=lambda: 12.0, wall_clock=lambda: 99.0
    )
    made.arms = (ARM,)
    account = Account(
        principal=ANONYMOUS, request_id="r", client_request_id="c", endpoint="chat", arrival_s=10.0
    )
    made.identify(account)
    made.serve_under(ResolvedObjective(class_name="short-chat", ttft_s=0.5, inter_token_s=0.15))
    return made


def book(record: OutcomeRecord) -> None:
    record.booked([ROW, ROW])


def end(record: OutcomeRecord) -> None:
    record.ended(FACTS, "answered", 200)


@pytest.mark.parametrize("steps", [(book, end), (end, book), (end, book, end, book)])
def test_it_is_told_once_however_it_comes(
    record: OutcomeRecord, told: Told, steps: tuple[Callable[[OutcomeRecord], None], ...]
) -> None:
    for number, step in enumerate(steps):
        assert len(told) == (number > 1)
        step(record)
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
    record: OutcomeRecord, told: Told
) -> None:
    record.serve_under(ResolvedObjective(class_name="short-chat", ttft_s=0.49))
    book(record)
    end(record)
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
    record: OutcomeRecord, told: Told, outcome: str, error: Exception | None, ending: str
) -> None:
    book(record)
    record.ended(FACTS, outcome, None, error)
    assert told[0].ending == ending
    assert not told[0].is_attained
    assert (told[0].status is None) is (error is None)


def test_what_is_wrong_with_a_request_is_nobodys_outcome(record: OutcomeRecord, told: Told) -> None:
    record.ended(None, "failed", None, BadRequestError("no"))
    book(record)
    assert told == []


def test_what_never_began_needs_no_books(record: OutcomeRecord, told: Told) -> None:
    record.ended(None, "failed", None, QueueFullError(num_waiting=3, retry_after_s=1.0))
    assert told[0].cost_nanos == 0
