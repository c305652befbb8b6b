"""The audit log: who changed what, in a chain that shows what was altered. On both databases."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest
from sqlalchemy import Connection, delete, insert, select, update

from outrider.gateway.audit.actor import acting, system_user
from outrider.gateway.audit.chain import AuditRow, Change, record, row_hash, text_hash
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.audit.verifying import ERASE, TARGETS, verify_chain
from outrider.gateway.contract.errors.tree import NotFoundError
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import audit_head, audit_log
from outrider.gateway.telemetry.log_context import begin_log_context
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.key_store import KeyStore
from outrider.gateway.tenancy.keys.keys import KeyHasher
from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder
from tests.gateway.experiments.making import spec

Damage = Callable[[Connection], object]


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    database.migrate()
    with closing(database):
        yield database


@pytest.fixture
def store(database: Database) -> KeyStore:
    return KeyStore(
        database, KeyHasher(b"secret"), randomness=random.Random(7), wall_clock=lambda: 1_000.25
    )


def rows_of(database: Database) -> list[AuditRow]:
    return [*AuditLog(database).rows()]


def append(database: Database, number: int, target: str = "key/k") -> None:
    with database.write() as connection:
        change = Change(action="key.update", target=target, after={"name": f"name {number}"})
        record(connection, change, float(number))


@pytest.mark.slow_cases
def test_each_change_of_keys_and_teams_is_recorded(database: Database, store: KeyStore) -> None:
    begin_log_context("req-1")
    with acting("key/boss"):
        team = store.create_team(TeamOrder(name="research"))
        shown = store.create(KeyOrder(name="app", team_id=team.team_id))
    key_id = shown.record.key_id
    with acting(system_user()):
        store.update(key_id, {"limits": LimitSpec(usd_per_day=2), "name": "app"})
        store.update(key_id, {"name": "app"})  # changes nothing
        rotated = store.rotate(key_id, grace_s=60)
        store.update_team("research", {"name": "lab"})
    store.revoke(key_id)
    store.revoke(key_id)  # is revoked already
    rows = rows_of(database)
    assert [(row.action, row.target) for row in rows] == [
        ("team.create", f"team/{team.team_id}"),
        ("key.create", f"key/{key_id}"),
        ("key.update", f"key/{key_id}"),
        ("key.rotate", f"key/{key_id}"),
        ("team.update", f"team/{team.team_id}"),
        ("key.revoke", f"key/{key_id}"),
    ]
    user = system_user()
    assert [row.actor for row in rows] == ["key/boss"] * 2 + [user] * 3 + ["gateway"]
    assert {(row.request_id, row.at) for row in rows} == {("req-1", 1_000.25)}
    created, updated, renamed = rows[1].after, rows[2], rows[4]
    assert created is not None
    assert (created["name"], created["team_id"]) == ("app", team.team_id)
    assert (updated.before, updated.after) == ({"limits": {}}, {"limits": {"usd_per_day": 2.0}})
    assert (renamed.before, renamed.after) == ({"name": "research"}, {"name": "lab"})
    text = json.dumps([row.details for row in rows])
    for secret in (shown.text, rotated.text, shown.record.key_hash.hex()):
        assert secret[11:] not in text
    assert verify_chain(database).faults == ()


def test_a_change_that_fails_is_not_recorded(database: Database, store: KeyStore) -> None:
    with pytest.raises(NotFoundError):
        store.create(KeyOrder(name="app", team_id="team-none"))
    with pytest.raises(NotFoundError):
        store.update("00000000", {"name": "x"})
    assert rows_of(database) == []


def test_changes_of_experiments_are_recorded(database: Database) -> None:
    store = ExperimentStore(database)
    store.create("speed", spec())
    store.start("speed")
    store.set_weights("speed", 1, {"control": 3.0, "deep": 1.0})  # by the gateway itself, often
    store.stop("speed")
    store.delete("speed")
    rows = rows_of(database)
    assert [row.action.removeprefix("experiment.") for row in rows] == [
        "created",
        "started",
        "stopped",
        "deleted",
    ]
    assert (rows[1].before, rows[1].after) == ({"state": "draft"}, {"state": "running"})
    assert rows[3].before is not None
    assert rows[3].before["arms"]["deep"]


@pytest.mark.slow_cases
def test_writers_in_threads_make_one_chain(database: Database) -> None:
    def write(first: int) -> None:
        for number in range(10):
            append(database, first + number)

    threads = [threading.Thread(target=write, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row.sequence for row in rows_of(database)] == [*range(1, 41)]
    found = verify_chain(database)
    assert (found.num_rows, found.head_sequence, found.faults) == (40, 40, ())


def removed(connection: Connection) -> None:
    connection.execute(delete(audit_log).where(audit_log.c.sequence.in_((3, 4))))


def edited(connection: Connection) -> None:
    connection.execute(update(audit_log).where(audit_log.c.sequence == 3).values(actor="key/x"))


def with_other_details(connection: Connection) -> None:
    row = update(audit_log).where(audit_log.c.sequence == 3)
    connection.execute(row.values(details=json.dumps({"before": None, "after": {"name": "x"}})))


def without_details(connection: Connection) -> None:
    connection.execute(update(audit_log).where(audit_log.c.sequence == 3).values(details=None))


def forged(connection: Connection, sequence: int, previous: int) -> None:
    """Write a row whose own hashes are right."""
    query = select(audit_log.c.hash).where(audit_log.c.sequence == previous)
    previous_hash = connection.execute(query).scalar() or "0" * 64
    details = json.dumps({"before": None, "after": {}})
    fields = {
        "sequence": sequence,
        "at": 1.0,
        "actor": "key/x",
        "action": "key.revoke",
        "target": "key/k",
        "request_id": "",
        "details_hash": text_hash(details),
        "previous_hash": previous_hash,
    }
    row = {**fields, "details": details, "hash": row_hash(*fields.values())}
    connection.execute(delete(audit_log).where(audit_log.c.sequence == sequence))
    connection.execute(insert(audit_log).values(row))


def cut_off(connection: Connection) -> None:
    connection.execute(delete(audit_log).where(audit_log.c.sequence > 4))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (removed, "rows 3 to 4 were removed"),
        (edited, "row 3 was edited"),
        (with_other_details, "row 3: its details were edited"),
        (without_details, "row 3: its details are gone"),
        (lambda connection: forged(connection, 3, 2), "row 4 does not follow row 3"),
        (lambda connection: forged(connection, 0, 0), "row 0 was inserted"),
        (lambda connection: forged(connection, 6, 5), "the log should end with row 5"),
        (cut_off, "rows 5 to 5 were removed at the end"),
    ],
)
def test_what_was_altered_is_found(database: Database, damage: Damage, fault: str) -> None:
    for number in range(5):
        append(database, number)
    with database.write() as connection:
        damage(connection)
    assert any(fault in each for each in verify_chain(database).faults), fault


def test_a_cut_off_end_is_found_by_a_hash_that_was_kept(database: Database) -> None:
    for number in range(5):
        append(database, number)
    kept = verify_chain(database).head_hash
    append(database, 5)
    assert verify_chain(database, kept).faults == ()
    with database.write() as connection:  # whoever may write here repairs the head, too
        cut_off(connection)
        last = select(audit_log.c.hash).where(audit_log.c.sequence == 4).scalar_subquery()
        connection.execute(update(audit_head).values(sequence=4, hash=last))
    assert verify_chain(database).faults == ()
    assert "no row has the hash" in verify_chain(database, kept).faults[0]


def test_erased_details_leave_the_chain_whole(database: Database) -> None:
    append(database, 1, "key/gone")
    append(database, 2, "key/stays")
    with database.write() as connection:
        is_it = audit_log.c.target == "key/gone"
        connection.execute(update(audit_log).where(is_it).values(details=None))
        erased = Change(action=ERASE, target="tenant/gone", after={TARGETS: ["key/gone"]})
        record(connection, erased, 3.0)
    assert verify_chain(database).faults == ()


def test_any_text_can_be_recorded(database: Database) -> None:
    with database.write() as connection, acting("user/\udcff\0\x1b[2Jü@host"):
        after = {"name": "\0 \ud800 漢"}
        record(connection, Change(action="a", target="prompts/\0", after=after), 0.1 + 0.2)
    (row,) = rows_of(database)
    assert row.after == {"name": "\0 \ud800 漢"}
    actor = "user/\\udcff\\x00\\x1b[2J\\xfc@host"
    assert (row.actor, row.target) == (actor, "prompts/\\x00")
    assert verify_chain(database).faults == ()


def test_a_damaged_log_of_any_length_is_told_in_few_words(database: Database) -> None:
    with database.write() as connection:
        for sequence in range(2, 402, 2):
            forged(connection, sequence, 0)
    with suppress(ValueError):
        assert len(verify_chain(database).faults) == 100
