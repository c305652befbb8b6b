"""POST /v1/feedback: whose request it is, and what is kept."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.contract.answers.outcomes import ArmRef, RequestOutcome
from outrider.gateway.contract.errors.tree import BadRequestError, NotFoundError
from outrider.gateway.experiments.feedback import FeedbackApi, FeedbackDesk
from outrider.gateway.experiments.measure_store import MAX_NAMES, MeasureStore
from outrider.gateway.experiments.measures import ArmMeasures
from outrider.gateway.experiments.recent import LEDGER_AGE_S, RecentRequests
from outrider.gateway.experiments.totals import FeedbackTotals
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import ledger
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.ledger.row import LedgerRow
from tests.gateway.experiments.measuring import NOON, outcome, posted

_ALICE = Principal(key_id="key00001", name="alice", tenant="key00001")
_MALLORY = Principal(key_id="key00002", name="mallory", tenant="key00002")


class Desk:
    """The endpoint over requests that were just answered."""

    def __init__(self, database: Database | None = None, **limits: int) -> None:
        self.recent = RecentRequests(**limits)
        self.store = MeasureStore(Database(None))
        self._num_batches = 0
        self.registry = CollectorRegistry()
        desk = FeedbackDesk(
            self.recent,
            self.store,
            database,
            self.registry,
            wall_clock=lambda: NOON,
            grace_s=0.01,
        )
        self._api = FeedbackApi(desk)

    def answered(self, *outcomes: RequestOutcome) -> None:
        measures = ArmMeasures()
        for each in outcomes:
            self.recent.observe(each)
            measures.observe(each)
        self._num_batches += 1
        self.store.add("w", self._num_batches, measures.take(), NOON)

    async def give(self, body: Any, principal: Principal = _ALICE) -> dict[str, Any]:
        response = await self._api.give(posted(body), principal)
        document: dict[str, Any] = json.loads(bytes(response.body))
        return document

    def feedback(self, arm: str = "on") -> tuple[FeedbackTotals, ...]:
        return self.store.totals("budget", 1)[arm].feedback


async def test_each_id_that_a_client_knows_finds_the_request() -> None:
    desk = Desk()
    desk.answered(
        outcome(1),
        outcome(2, endpoint="messages", answer_id="chatcmpl-two"),
        outcome(3, endpoint="responses", answer_id="chatcmpl-three"),
    )
    ids = ["chatcmpl-1", "req-1", "row-1", "msg_two", "req-2", "resp_three", "req-3"]
    for number, known_as in enumerate(ids):
        told = await desk.give({"request_id": known_as, "score": number, "name": f"n{number}"})
        assert told == {"object": "feedback", "request_id": known_as, "name": f"n{number}"}
    assert [item.values.sum for item in desk.feedback()] == [float(n) for n in range(7)]


async def test_the_last_word_counts_and_kinds_have_names_of_their_own() -> None:
    desk = Desk()
    desk.answered(outcome(1))
    await desk.give({"request_id": "chatcmpl-1", "success": False})
    await desk.give({"request_id": "req-1", "success": True})
    await desk.give({"request_id": "req-1", "label": "copied"})
    await desk.give({"request_id": "req-1", "score": -1.5})
    label, score, success = desk.feedback()
    assert (label.name, dict(label.labels)) == ("label", {"copied": 1})
    assert (score.kind, score.values.sum) == ("score", -1.5)
    assert (success.kind, success.values.n, success.values.sum) == ("success", 1, 1.0)
    given = desk.registry.get_sample_value("outrider_feedback_total", {"kind": "success"})
    assert given == 2.0


async def test_feedback_goes_to_every_arm_of_its_request() -> None:
    desk = Desk()
    arms = tuple(
        ArmRef(experiment=name, version=1, arm="on", unit_bucket=9) for name in ("budget", "x")
    )
    desk.answered(outcome(1, arms=arms), outcome(2, arms=()))
    await desk.give({"request_id": "req-1", "success": True})
    await desk.give({"request_id": "req-2", "success": True})
    for name in ("budget", "x"):
        (said,) = desk.store.totals(name, 1)["on"].feedback
        assert said.values.counts[9] == 1


@pytest.mark.parametrize("known_as", ["chatcmpl-404", "req-1\n", "é", "\x00", "' or 1=1 --"])
async def test_the_unknown_is_not_found(known_as: str) -> None:
    desk = Desk()
    desk.answered(outcome(1))
    with pytest.raises(NotFoundError) as caught:
        await desk.give({"request_id": known_as, "score": 1})
    assert (caught.value.code, caught.value.param) == ("request_not_found", "request_id")
    assert desk.feedback() == ()


async def test_a_foreign_request_looks_like_an_unknown_one() -> None:
    desk = Desk()
    desk.answered(outcome(1))
    messages = set()
    for known_as in ("chatcmpl-1", "req-1", "row-1", "req-none"):
        with pytest.raises(NotFoundError) as caught:
            await desk.give({"request_id": known_as, "score": 1}, _MALLORY)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert desk.feedback() == ()


async def test_two_tenants_with_the_same_request_id_have_each_their_own() -> None:
    desk = Desk()
    desk.answered(
        outcome(1, client_request_id="same"),
        outcome(2, client_request_id="same", key_id="key00002"),
    )
    await desk.give({"request_id": "same", "score": 1})
    await desk.give({"request_id": "same", "score": 5}, _MALLORY)
    (scores,) = desk.feedback()
    assert (scores.values.sums[1], scores.values.sums[2]) == (1.0, 5.0)


async def test_a_team_shares_its_requests() -> None:
    desk = Desk()
    desk.answered(outcome(1, team_id="team0001"))
    mate = Principal(key_id="key00009", name="m", tenant="team0001", team_id="team0001")
    await desk.give({"request_id": "req-1", "success": True}, mate)
    with pytest.raises(NotFoundError):  # the same key, which has left the team
        await desk.give({"request_id": "req-1", "success": True})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b'{"request_id": "x", "score": NaN}', None),
        ({"request_id": "req-1"}, "score"),
        ({"request_id": "req-1", "score": True}, "score"),
        ({"request_id": "req-1", "score": 1e12}, "score"),
        ({"request_id": "req-1", "success": 1}, "success"),
        ({"request_id": "req-1", "score": 1, "success": True}, "success"),
        ({"request_id": "req-1", "label": ""}, "label"),
        ({"request_id": "req-1", "label": "x" * 65}, "label"),
        ({"request_id": "req-1", "label": "two\nlines"}, "label"),
        ({"request_id": "", "score": 1}, "request_id"),
        ({"score": 1}, "request_id"),
        ({"request_id": "req-1", "score": 1, "name": "a b"}, "name"),
    ],
)
async def test_a_malformed_body_is_refused_with_the_field(body: Any, param: str | None) -> None:
    desk = Desk()
    desk.answered(outcome(1))
    with pytest.raises(BadRequestError) as caught:
        await desk.give(body)
    if param is not None:
        assert caught.value.param == param
    assert desk.feedback() == ()


async def test_too_many_names_are_refused() -> None:
    desk = Desk()
    desk.answered(outcome(1))
    for number in range(MAX_NAMES):
        await desk.give({"request_id": "req-1", "score": 1, "name": f"n{number}"})
    with pytest.raises(BadRequestError, match="16 names, the maximum"):
        await desk.give({"request_id": "req-1", "score": 1, "name": "more"})


async def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    desk = Desk(max_requests=3)
    desk.answered(*(outcome(number) for number in range(6)))
    desk.answered(outcome(6, client_request_id="req-4"))
    assert [desk.recent.find(_ALICE, f"row-{n}") is not None for n in range(7)] == [False] * 4 + [
        True
    ] * 3
    assert desk.recent.find(_ALICE, "chatcmpl-2") is None
    known = desk.recent.find(_ALICE, "req-4")
    assert known is not None
    assert known.request_id == "row-6"
    desk.answered(outcome(7))  # forgets row-4, whose x-request-id is another's by now
    assert desk.recent.find(_ALICE, "req-4") is known


async def test_a_client_that_is_faster_than_the_books_is_waited_for() -> None:
    recent, store = RecentRequests(), MeasureStore(Database(None))
    desk = FeedbackDesk(recent, store, None, CollectorRegistry(), grace_s=5.0)
    api = FeedbackApi(desk)
    given = asyncio.create_task(api.give(posted({"request_id": "req-1", "score": 1}), _ALICE))
    await asyncio.sleep(0)
    recent.observe(outcome(0))
    await asyncio.sleep(0)
    recent.observe(outcome(1))
    assert (await asyncio.wait_for(given, 2.0)).status_code == 200


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A ledger with rows of another life of this gateway."""
    path: Path = tmp_path_factory.mktemp("feedback") / "test.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    arms = {"req-old": "budget:1/on,x:12/b-2", "req-forced": "forced:budget:1/on", "req-plain": ""}
    rows = [_ledger_row(known_as, arm=arm) for known_as, arm in arms.items()]
    rows.append(_ledger_row("req-ancient", arm="", ended_at=NOON - LEDGER_AGE_S - 1))
    with database.write() as connection:
        connection.execute(ledger.insert(), rows)
    yield database
    database.close()


def _ledger_row(known_as: str, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "row_id": f"attempt-{known_as}",
        "request_id": f"row-{known_as}",
        "client_request_id": known_as,
        "ended_at": NOON - 60,
        "kind": "answer",
        "outcome": "answered",
        "tier": "small",
        "key_id": _ALICE.key_id,
    }
    row = msgspec.structs.asdict(LedgerRow(**facts | changes))
    return row | {"day": int(row["ended_at"] // 86_400)}


async def test_the_ledger_remembers_what_memory_does_not(migrated: Database) -> None:
    desk = Desk(migrated)
    desk.answered(outcome(1))
    await desk.give({"request_id": "req-old", "success": True})
    await desk.give({"request_id": "row-req-old", "success": True})  # the same request
    (said,) = desk.feedback()
    assert (said.values.n, said.values.sum) == (1, 1.0)
    await desk.give({"request_id": "req-plain", "success": True})
    await desk.give({"request_id": "req-forced", "success": True})
    assert desk.feedback()[0].values.n == 1
    for known_as, principal in (("req-old", _MALLORY), ("req-ancient", _ALICE)):
        with pytest.raises(NotFoundError):
            await desk.give({"request_id": known_as, "success": True}, principal)
