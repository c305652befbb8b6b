"""Keys in databases: the same on SQLite and PostgreSQL."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from pydantic import SecretStr
from sqlalchemy import select, text, update

from outrider.gateway.contract.errors.tree import ConflictError, NotFoundError
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.key_store import KeyStore, load_secret
from outrider.gateway.tenancy.keys.keys import KeyHasher, Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder

HASHER = KeyHasher(b"a secret of these tests")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    database.migrate()
    with closing(database):
        yield database


@pytest.fixture
def now() -> list[float]:
    """The time, to be changed."""
    return [1_000_000.5]


@pytest.fixture
def store(database: Database, now: list[float]) -> KeyStore:
    return KeyStore(database, HASHER, randomness=random.Random(7), wall_clock=lambda: now[0])


FULL = KeyOrder(
    name="app",
    scopes=Scopes(models=frozenset({"auto", "x/y"}), tiers=frozenset({"small"}), is_admin=True),
    limits=LimitSpec(
        tokens_per_minute=10,
        usd_per_day=0.1,
        concurrent_requests=0,
        models={"large": LimitSpec(requests_per_day=3)},
    ),
    weight=2.5,
    labels={"'; DROP TABLE keys; --": "%s {} \\ ü 漢"},
    expires_at=2_000_000.0,
)


def test_created_keys_are_read_back(store: KeyStore) -> None:
    shown = store.create(FULL)
    assert store.get(shown.record.key_id) == shown.record
    assert store.load().keys == (shown.record,)
    assert shown.record.labels == FULL.labels
    assert shown.record.limits == FULL.limits
    assert shown.record.created_at == 1_000_000.5


def test_no_secret_is_kept(store: KeyStore, database: Database) -> None:
    shown = store.create(FULL)
    with database.read() as connection:
        row = connection.execute(select(tables.keys)).mappings().one()
    secret = shown.text[11:]
    assert all(secret not in str(value) for value in row.values())
    assert row["hash"] == HASHER.digest(shown.text).hex()
    assert secret not in repr(shown)
    assert row["hash"] not in repr(shown.record)


def test_every_change_changes_the_version(store: KeyStore) -> None:
    versions = [store.version()]

    def changed(change: Callable[[], object]) -> None:
        change()
        versions.append(store.version())

    changed(lambda: store.create(KeyOrder(name="a")))
    key_id = store.find("a").key_id
    changed(lambda: store.create_team(TeamOrder(name="t")))
    changed(lambda: store.update(key_id, {"name": "b"}))
    changed(lambda: store.update_team("t", {"name": "u"}))
    changed(lambda: store.rotate(key_id))
    changed(lambda: store.revoke(key_id))
    assert versions == sorted(set(versions))
    assert store.load().version == versions[-1]


def test_a_change_leaves_the_rest_alone(store: KeyStore) -> None:
    before = store.create(FULL).record
    after = store.update(before.key_id, {"name": "new", "expires_at": None}, scopes={"tiers": None})
    assert (after.name, after.expires_at, after.scopes.tiers) == ("new", None, None)
    assert after.scopes.models == before.scopes.models
    assert after.scopes.is_admin
    assert (after.limits, after.labels, after.key_hash) == (
        before.limits,
        before.labels,
        before.key_hash,
    )


def test_rotation_keeps_the_id_and_the_old_secret_for_a_while(
    store: KeyStore, now: list[float]
) -> None:
    first = store.create(KeyOrder(name="a"))
    second = store.rotate(first.record.key_id, grace_s=60)
    assert second.record.key_id == first.record.key_id
    assert second.text != first.text
    assert second.record.key_hash == HASHER.digest(second.text)
    assert second.record.old_hash == HASHER.digest(first.text)
    assert second.record.old_hash_until == now[0] + 60
    third = store.rotate(first.record.key_id)
    assert third.record.old_hash is third.record.old_hash_until is None


def test_a_secret_of_another_time_gets_no_grace(database: Database, store: KeyStore) -> None:
    """What was hashed under another secret cannot be compared any more."""
    shown = store.create(KeyOrder(name="a"))
    other = KeyStore(database, KeyHasher(b"other"), randomness=random.Random(8))
    assert other.rotate(shown.record.key_id, grace_s=60).record.old_hash is None


def test_revoked_keys_stay_as_rows(store: KeyStore, now: list[float]) -> None:
    shown = store.create(FULL)
    assert shown.record.status(now[0]) == "active"
    assert shown.record.status(FULL.expires_at or 0) == "expired"
    revoked = store.revoke(shown.record.key_id)
    assert revoked.revoked_at == now[0]
    now[0] += 5
    assert store.revoke(shown.record.key_id).revoked_at == revoked.revoked_at
    assert revoked.status(0) == "revoked"
    assert store.load().has_any
    with pytest.raises(ConflictError, match="revoked"):
        store.rotate(shown.record.key_id)


def test_keys_are_found_by_id_prefix_text_and_name(store: KeyStore) -> None:
    key = store.create(KeyOrder(name="a"))
    key_id = key.record.key_id
    for words in (key_id, f"or-{key_id}", key.text, "a"):
        assert store.find(words).key_id == key_id
    store.create(KeyOrder(name=key_id))  # as the name of another
    assert store.find(key_id).key_id == key_id
    store.create(KeyOrder(name="a"))
    with pytest.raises(ConflictError, match=key_id):
        store.find("a")
    store.revoke(key_id)
    assert store.find("a").key_id != key_id
    assert store.find(key_id).key_id == key_id
    for words in ("", "nobody", "' OR 1=1 --"):
        with pytest.raises(NotFoundError):
            store.find(words)


def test_changing_an_unknown_key_is_refused(store: KeyStore) -> None:
    for change in (
        lambda: store.get("zzzzzzzz"),
        lambda: store.update("zzzzzzzz", {"name": "a"}),
        lambda: store.rotate("zzzzzzzz"),
        lambda: store.revoke("zzzzzzzz"),
        lambda: store.find_team("t"),
        lambda: store.update_team("t", {"name": "u"}),
        lambda: store.create(KeyOrder(name="a", team_id="team-zzzzzzzz")),
    ):
        with pytest.raises(NotFoundError):
            change()
    assert store.version() == 0
    assert not store.load().has_any


def test_teams(store: KeyStore) -> None:
    team = store.create_team(TeamOrder(name="t", limits=FULL.limits, weight=3.0, labels={"a": "b"}))
    assert store.find_team("t") == store.find_team(team.team_id) == team
    key = store.create(KeyOrder(name="a", team_id=team.team_id))
    assert key.record.team_id == team.team_id
    other = store.create_team(TeamOrder(name="other"))
    with pytest.raises(ConflictError, match="'t'"):
        store.create_team(TeamOrder(name="t"))
    with pytest.raises(ConflictError, match="'t'"):
        store.update_team("other", {"name": "t"})
    assert store.update_team("other", {"weight": 2.0}).weight == 2.0
    assert [team.name for team in store.teams()] == ["other", "t"]
    assert store.load().teams.keys() == {team.team_id, other.team_id}


def test_pages_have_every_key_once(store: KeyStore) -> None:
    ids = sorted(store.create(KeyOrder(name="a")).record.key_id for _ in range(5))
    seen: list[str] = []
    more = True
    while more:
        page, more = store.page(after=seen[-1] if seen else None, limit=2)
        seen += [key.key_id for key in page]
    assert seen == ids


def test_the_same_id_twice_is_drawn_again(database: Database) -> None:
    class Stuck(random.Random):
        """Draws the first id twice."""

        def __init__(self) -> None:
            super().__init__(1)
            self._ids = iter("aaaaaaaaaaaaaaaabbbbbbbb")

        def choice(self, seq: object) -> str:  # type: ignore[override]
            return next(self._ids)

    store = KeyStore(database, HASHER, randomness=Stuck())
    assert [store.create(KeyOrder(name="a")).record.key_id for _ in range(2)] == [
        "aaaaaaaa",
        "bbbbbbbb",
    ]


def test_a_damaged_row_is_left_out_and_told(
    store: KeyStore, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = (store.create(KeyOrder(name=name)).record for name in ("good", "bad"))
    with database.write() as connection:
        is_it = tables.keys.c.id == bad.key_id
        connection.execute(update(tables.keys).where(is_it).values(limits='{"tokens": "many"}'))
    with caplog.at_level(logging.ERROR):
        table = store.load()
    assert table.keys == (good,)
    assert table.has_any
    assert bad.key_id in caplog.text
    with pytest.raises(ConflictError, match="values that this version of Outrider does not know"):
        store.revoke(bad.key_id)


def test_changes_at_the_same_time_are_all_kept(store: KeyStore) -> None:
    key_id = store.create(KeyOrder(name="a", labels={})).record.key_id
    fields = ("name", "weight", "expires_at", "labels")
    values = ("new", 7.0, 5.0, {"a": "b"})

    threads = [
        threading.Thread(target=store.update, args=(key_id, {name: value}))
        for name, value in zip(fields, values, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = store.get(key_id)
    assert tuple(getattr(record, name) for name in fields) == values


def test_the_secret_is_drawn_once(database: Database) -> None:
    first = load_secret(database, None, random.Random(1))
    assert len(first) == 32
    assert load_secret(database, None, random.Random(2)) == first
    assert load_secret(database, SecretStr("configured"), random.Random(3)) == b"configured"
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM secrets")).scalar() == 1


def test_gateways_that_draw_at_once_agree(database: Database) -> None:
    drawn: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda n=n: drawn.append(load_secret(database, None, random.Random(n)))
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == 4
    assert len(set(drawn)) == 1
