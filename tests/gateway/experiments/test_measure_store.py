"""Totals of several gateways, restarts included, on both databases and in memory."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func, select, update

from outrider.gateway.contract.answers.outcomes import ArmRef, RequestOutcome
from outrider.gateway.experiments.feedback_totals import FeedbackRow
from outrider.gateway.experiments.measure_document import decode_totals, encode_totals
from outrider.gateway.experiments.measure_store import (
    FOLDED_WRITER,
    MAX_NAMES,
    MeasureStore,
    TooManyNamesError,
)
from outrider.gateway.experiments.measures import ArmMeasures, MeasureWriter
from outrider.gateway.storage.database import Database, DatabaseError
from outrider.gateway.storage.tables import experiment_measures, feedback
from tests.gateway.experiments.measuring import NOON, assert_same, counted, outcome


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def migrated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """A database with its tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('measures') / 'test.db'}"
    else:
        url = request.getfixturevalue("postgres_server").new_database()
    database = Database(url)
    database.migrate()
    yield database
    database.close()


@pytest.fixture
def database(migrated: Database) -> Database:
    """The same, without measures and feedback."""
    with migrated.write() as connection:
        connection.execute(experiment_measures.delete())
        connection.execute(feedback.delete())
    return migrated


@pytest.fixture
def store(database: Database) -> MeasureStore:
    """The database's store."""
    return MeasureStore(database)


def _batch(*outcomes: RequestOutcome) -> dict[tuple[str, int, str], object]:
    measures = ArmMeasures()
    for each in outcomes:
        measures.observe(each)
    return measures.take()


def _said(number: int, **changes: Any) -> FeedbackRow:
    facts: dict[str, Any] = {
        "request_id": f"row-{number}",
        "name": "score",
        "experiment": "budget",
        "version": 1,
        "arm": "on",
        "unit_bucket": number % 64,
        "kind": "score",
        "value": float(number),
        "given_at": NOON,
    }
    return FeedbackRow(**facts | changes)


def test_totals_are_read_again_to_the_last_bit() -> None:
    (arm,) = counted(
        *(outcome(i, ttft_s=0.1 / (i + 1), duration_s=0.0) for i in range(70))
    ).values()
    again = decode_totals("budget", 1, "on", encode_totals(arm))
    assert_same(again, arm)
    assert again.metrics["ttft_s"].sums.tolist() == arm.metrics["ttft_s"].sums.tolist()


@pytest.mark.parametrize(
    "text", ["", "{}", '{"format":2,"metrics":{},"sketches":{},"first_at":1,"last_at":1}',
             '{"format":1,"metrics":{"ttft_s":[[64,1,1,1]]},"sketches":{},"first_at":1,"last_at":1}']
)  # fmt: skip
def test_a_strangers_document_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(DatabaseError) as caught:
        decode_totals("budget", 1, "on", text)
    assert "delete the experiment" in caught.value.detail


def test_two_writers_are_added_up(store: MeasureStore) -> None:
    for sequence in (1, 2, 3):
        store.add("one", sequence, _batch(outcome(sequence)), NOON)
        store.add("two", sequence, _batch(outcome(sequence + 10, ttft_s=0.4)), NOON)
    (expected,) = counted(
        *(outcome(n) for n in (1, 2, 3)), *(outcome(n, ttft_s=0.4) for n in (11, 12, 13))
    ).values()
    assert_same(store.totals("budget", 1)["on"], expected)
    assert store.totals("budget", 2) == {}


def test_writers_at_the_same_time_lose_nothing(store: MeasureStore) -> None:
    def write(writer: int) -> None:
        for sequence in range(1, 6):
            store.add(f"w{writer}", sequence, _batch(outcome(writer)), NOON)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert store.totals("budget", 1)["on"].num_requests == 20


def test_a_batch_that_comes_twice_counts_once(store: MeasureStore) -> None:
    batch = _batch(outcome(0))
    store.add("one", 1, batch, NOON)
    store.add("one", 1, batch, NOON)
    assert store.totals("budget", 1)["on"].num_requests == 1


def test_a_killed_gateway_leaves_what_it_stored_and_the_next_one_adds(store: MeasureStore) -> None:
    """Without a close: what was not stored is lost, what was stored counts once."""

    async def live(writer_id: str, numbers: range, *, is_killed: bool) -> None:
        measures = ArmMeasures()
        writer = MeasureWriter(measures, store, writer_id=writer_id, wall_clock=lambda: NOON)
        await writer.start()
        for number in numbers:
            measures.observe(outcome(number))
        await writer.flush()
        if is_killed:
            measures.observe(outcome(999))
            return  # the loop's end takes the task down
        measures.observe(outcome(numbers.stop))
        await writer.close()

    asyncio.run(live("first", range(0, 3), is_killed=True))
    asyncio.run(live("second", range(3, 5), is_killed=False))
    (expected,) = counted(*(outcome(n) for n in range(6))).values()
    assert_same(store.totals("budget", 1)["on"], expected)


def test_rows_of_gone_writers_are_folded_and_a_late_one_goes_on(
    store: MeasureStore, database: Database
) -> None:
    other = (ArmRef(experiment="budget", version=1, arm="off"),)
    for number in range(5):
        store.add(f"w{number}", 1, _batch(outcome(number), outcome(number, arms=other)), NOON)
    store.add("alive", 1, _batch(outcome(7)), NOON + 100)
    assert store.fold(NOON + 50) == 10
    assert store.fold(NOON + 50) == 0
    store.add("w0", 2, _batch(outcome(8)), NOON + 200)  # it only slept
    with database.read() as connection:
        writers = connection.execute(
            select(experiment_measures.c.writer).where(experiment_measures.c.arm == "on")
        ).scalars()
        assert sorted(writers) == ["alive", FOLDED_WRITER, "w0"]
    (expected,) = counted(*(outcome(n) for n in (0, 1, 2, 3, 4, 7, 8))).values()
    totals = store.totals("budget", 1)
    assert_same(totals["on"], expected)
    assert totals["off"].num_requests == 5
    assert store.fold(NOON + 500) == 2  # onto the row of those before
    assert_same(store.totals("budget", 1)["on"], expected)


def test_versions_are_kept_apart_and_deleted_together(
    store: MeasureStore, database: Database
) -> None:
    newer = (ArmRef(experiment="budget", version=2, arm="on"),)
    kept = (ArmRef(experiment="budgets", version=1, arm="on"),)
    batch = _batch(
        outcome(0), outcome(1, arms=newer), outcome(2, arms=newer), outcome(3, arms=kept)
    )
    store.add("one", 1, batch, NOON)
    store.put_feedback([_said(0)])
    assert store.totals("budget", 1)["on"].num_requests == 1
    assert store.totals("budget", 2)["on"].num_requests == 2
    store.delete("budget")
    assert store.totals("budget", 1) == store.totals("budget", 2) == {}
    assert store.totals("budgets", 1)["on"].num_requests == 1
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(feedback)).scalar_one() == 0


def test_a_damaged_row_says_which(store: MeasureStore, database: Database) -> None:
    store.add("one", 1, _batch(outcome(0)), NOON)
    with database.write() as connection:
        connection.execute(update(experiment_measures).values(document="?"))
    with pytest.raises(DatabaseError) as caught:
        store.totals("budget", 1)
    assert "budget:1/on" in caught.value.detail


@pytest.fixture(params=["database", "memory"])
def any_store(request: pytest.FixtureRequest, database: Database) -> MeasureStore:
    """A store in a file or in memory, with two requests counted."""
    found = MeasureStore(Database(None) if request.param == "memory" else database)
    other = (ArmRef(experiment="budget", version=1, arm="off"),)
    found.add("one", 1, _batch(outcome(0), outcome(1, arms=other)), NOON)
    return found


def test_the_last_word_counts(any_store: MeasureStore) -> None:
    any_store.put_feedback([_said(3)])
    any_store.put_feedback([_said(4)])
    any_store.put_feedback([_said(4, value=0.5)])
    (scores,) = any_store.totals("budget", 1)["on"].feedback
    assert (scores.name, scores.kind, scores.values.n) == ("score", "score", 2)
    assert scores.values.sum == 3.5
    assert scores.values.sum_squares == 9.25
    assert scores.values.counts[3] == scores.values.counts[4] == 1


def test_successes_labels_and_arms_are_kept_apart(any_store: MeasureStore) -> None:
    for number in range(4):
        any_store.put_feedback([_said(number, name="ok", kind="success", value=float(number > 0))])
        label = "good" if number else "bad"
        any_store.put_feedback([_said(number, name="word", kind="label", value=1.0, label=label)])
    any_store.put_feedback([_said(9, arm="off", name="ok", kind="success", value=0.0)])
    totals = any_store.totals("budget", 1)
    ok, word = totals["on"].feedback
    assert (ok.values.n, ok.values.sum) == (4, 3.0)
    assert (word.values.n, dict(word.labels)) == (4, {"good": 3, "bad": 1})
    assert totals["off"].feedback[0].values.mean == 0.0


def test_a_request_has_so_many_names_and_may_still_change_its_mind(any_store: MeasureStore) -> None:
    for number in range(MAX_NAMES):
        any_store.put_feedback([_said(0, name=f"n{number:02d}")])
    with pytest.raises(TooManyNamesError):
        any_store.put_feedback([_said(0, name="more")])
    any_store.put_feedback([_said(0, name="n03", value=8.0)])
    found = {item.name: item.values.sum for item in any_store.totals("budget", 1)["on"].feedback}
    assert len(found) == MAX_NAMES
    assert found["n03"] == 8.0


def test_memory_is_bounded() -> None:
    store = MeasureStore(Database(None), max_feedback=10)
    store.add("one", 1, _batch(outcome(0)), NOON)
    for number in range(30):
        store.put_feedback([_said(number)])
    (scores,) = store.totals("budget", 1)["on"].feedback
    assert (scores.values.n, scores.values.sum) == (10, float(sum(range(20, 30))))
