"""Experiments that are kept: in each kind of database, and in memory."""

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import insert, update

from outrider.gateway.contract.errors.tree import ConflictError, NotFoundError
from outrider.gateway.experiments.registry import ExperimentRegistry
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.experiments.syncing import apply_settings
from outrider.gateway.settings.experiments import ExperimentSettings
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database, DatabaseError
from tests.databases import with_tables
from tests.gateway.experiments.making import SECRET, spec, user


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(with_tables(tmp_path / "experiments.db"))
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> ExperimentStore:
    return ExperimentStore(database, wall_clock=Clock())


def test_all_of_a_life_comes_back(database_url: str) -> None:
    database = Database(database_url)
    database.migrate()
    store = ExperimentStore(database, wall_clock=Clock())
    wanted = spec(eligible={"headers": {"x-beta": "é"}}, slo={"class": "batch"}, alpha=0.01)
    assert store.create("drafts", wanted, share=0.25).spec == wanted
    running = store.start("drafts")
    weighted = store.set_weights("drafts", 1, {"control": 0.7, "deep": 0.3})
    stopped = store.stop_arm("drafts", 1, "deep", "too slow")
    again = ExperimentStore(database)
    assert again.get("drafts") == stopped
    assert again.load().experiments == {"drafts": stopped}
    assert running.slots == weighted.slots == ((0, 2500),)
    assert weighted.current.weights == {"control": 0.7, "deep": 0.3}
    assert stopped.state == "stopped"  # the control alone is no experiment
    kinds = [event.kind for event in again.events("drafts")]
    assert kinds == ["arm_stopped", "weights_changed", "started", "created"]
    assert again.events("drafts")[0].detail == "deep: too slow"
    database.close()


def test_an_edit_while_it_runs_is_a_new_version_and_the_old_one_stays(
    store: ExperimentStore,
) -> None:
    store.create("drafts", spec())
    store.start("drafts")
    edited = store.edit("drafts", spec(metric="ttft"))
    assert (edited.version, edited.state) == (2, "running")
    old, new = store.versions("drafts")
    assert (old.number, old.spec.metric) == (1, "attainment")
    assert old.started_at is not None
    assert old.stopped_at is not None
    assert (new.number, new.spec.metric, new.stopped_at) == (2, "ttft", None)


def test_what_changes_nothing_is_no_event_and_each_change_has_a_number(
    store: ExperimentStore,
) -> None:
    store.create("drafts", spec())
    store.start("drafts")
    before = store.version()
    assert store.start("drafts") == store.edit("drafts", spec()) == store.get("drafts")
    assert [event.kind for event in store.events("drafts")] == ["started", "created"]
    store.ramp("drafts", 0.5)
    assert store.version() > before
    assert store.load().version == store.version()


def test_changes_are_made_together_or_not_at_all(store: ExperimentStore) -> None:
    store.create("first", spec(), share=0.6)
    store.start("first")
    before = store.create("second", spec(), share=0.1)
    with pytest.raises(ConflictError):
        store.update("second", spec=spec(metric="ttft"), share=0.5, state="running")
    assert store.get("second") == before
    after = store.update("second", spec=spec(metric="ttft"), share=0.4, state="running")
    assert (after.version, after.share, after.state) == (1, 0.4, "running")


def test_names_are_taken_once_and_running_ones_stay(store: ExperimentStore) -> None:
    store.create("drafts", spec())
    with pytest.raises(ConflictError, match="The experiment 'drafts' already exists"):
        store.create("drafts", spec())
    store.start("drafts")
    with pytest.raises(ConflictError, match=r"is running\. Stop it first"):
        store.delete("drafts")
    store.stop("drafts")
    store.delete("drafts")
    for look in (store.get, store.versions, store.start, store.delete):
        with pytest.raises(NotFoundError, match="No experiment has this name"):
            look("drafts")
    assert store.events("drafts") == []


def test_a_namesake_does_not_inherit_data_that_come_in_late(
    database: Database, store: ExperimentStore
) -> None:
    assert store.create("drafts", spec()).version == 1
    store.delete("drafts")
    if isinstance(store, ExperimentStore):
        late = {"experiment": "drafts", "version": 3, "arm": "deep", "writer": "w", "sequence": 1}
        row = late | {"updated_at": 1.0, "document": "{}"}
        with database.write() as connection:
            connection.execute(insert(tables.experiment_measures).values(row))
    newer = 4 if isinstance(store, ExperimentStore) else 2
    assert store.create("drafts", spec()).version == newer


def test_starts_at_once_do_not_share_a_slot(database_url: str) -> None:
    database = Database(database_url)
    database.migrate()
    store = ExperimentStore(database)
    names = [f"e{i}" for i in range(4)]
    for name in names:
        store.create(name, spec(), share=0.25)
    with ThreadPoolExecutor(4) as pool:
        records = list(pool.map(store.start, names))
    taken = [slot for one in records for start, end in one.slots for slot in range(start, end)]
    assert sorted(taken) == list(range(10_000))
    database.close()


def test_a_damaged_row_is_left_out_and_said(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    store = ExperimentStore(database)
    store.create("good", spec())
    store.create("bad", spec())
    versions = tables.experiment_versions
    with database.write() as connection:
        is_bad = versions.c.experiment == "bad"
        connection.execute(update(versions).where(is_bad).values(document='{"arms": {}}'))
    with caplog.at_level(logging.ERROR):
        assert list(store.load().experiments) == ["good"]
    assert "row of an experiment is damaged name=bad" in caplog.text


async def test_a_book_knows_of_others_changes_and_serves_on_without_a_database(
    database: Database,
) -> None:
    store = ExperimentStore(database)

    registry = ExperimentRegistry(store, SECRET, refresh_s=0.01)
    await registry.start()
    assert registry.assign(user(1)) is None
    store.create("drafts", spec())
    store.start("drafts")
    deadline_s = asyncio.get_running_loop().time() + 5.0
    found = None
    while found is None and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(0.01)
        found = registry.assign(user(1))
    assert found is not None
    assert list(registry.experiments) == ["drafts"]
    with database.write() as connection:
        tables.experiment_changes.drop(connection)
    with pytest.raises(DatabaseError):
        await registry.refresh()
    assert registry.assign(user(1)) is not None
    await registry.close()


def settings(**fields: object) -> ExperimentSettings:
    document = json.loads(spec().model_dump_json(exclude_defaults=True))
    return ExperimentSettings.model_validate(document | {"state": "running"} | fields)


def test_settings_are_applied_when_they_change_and_not_again(store: ExperimentStore) -> None:
    assert apply_settings(store, {"drafts": settings(share=0.5)}) == ["drafts"]
    record = store.get("drafts")
    assert (record.state, record.share, record.source) == ("running", 0.5, "file")
    store.stop("drafts")
    assert apply_settings(store, {"drafts": settings(share=0.5)}) == []
    assert not store.get("drafts").is_running  # what was stopped by hand stays so
    apply_settings(store, {"drafts": settings(metric="ttft")})
    record = store.get("drafts")
    assert (record.state, record.version, record.share) == ("running", 2, 1.0)
    assert apply_settings(store, {}) == ["drafts"]
    record = store.get("drafts")
    assert (record.state, record.source, record.fingerprint) == ("stopped", "admin", None)
    assert apply_settings(store, {}) == []


def test_settings_leave_others_alone_and_make_room_before_they_take_it(
    store: ExperimentStore,
) -> None:
    store.create("by-hand", spec(), share=0.1)
    store.start("by-hand")
    apply_settings(store, {"b": settings(share=0.9)})
    apply_settings(store, {"a": settings(share=0.9), "b": settings(state="stopped")})
    assert store.get("by-hand").is_running
    assert store.get("a").is_running
    with pytest.raises(ConflictError, match=r"experiments\.c: A share of 0\.5"):
        apply_settings(store, {"a": settings(share=0.9), "c": settings(share=0.5)})
