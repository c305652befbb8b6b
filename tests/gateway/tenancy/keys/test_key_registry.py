"""The keys in memory follow the database, and outlive it."""

import asyncio
import logging
import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from outrider.gateway.storage.database import DatabaseError
from outrider.gateway.tenancy.keys.amounts import NO_LIMITS, LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder
from tests.gateway.tenancy.keys.world import HASHER, World
from tests.gateway.waiting import until


def test_a_principal_is_what_the_key_says(tmp_path: Path) -> None:
    world = World(tmp_path)
    limits, team_limits = LimitSpec(tokens_per_minute=1), LimitSpec(tokens_per_minute=2)
    scopes = Scopes(models=frozenset({"auto"}))
    team = world.store.create_team(TeamOrder(name="t", limits=team_limits, weight=3.0))
    order = KeyOrder(name="a", limits=limits, scopes=scopes, weight=2.0, labels={"x": "y"})
    alone = world.store.create(order).record
    member = world.store.create(KeyOrder(name="b", team_id=team.team_id, weight=2.0)).record

    async def work() -> None:
        one, two = (world.keys.find(key.key_id) for key in (alone, member))
        assert one is not None
        assert two is not None
        assert (one.principal.limits, one.principal.team_limits) == (limits, NO_LIMITS)
        assert (one.principal.tenant, one.principal.team_id) == (alone.key_id, None)
        assert (one.principal.scopes, one.principal.labels) == (scopes, {"x": "y"})
        assert one.principal.weight == 2.0
        assert two.principal.team_limits == team_limits
        assert two.principal.tenant == two.principal.team_id == team.team_id
        assert two.principal.weight == 3.0  # the queue is shared by teams
        assert one.principal.cache_salt == HASHER.cache_salt(alone.key_id)
        assert two.principal.cache_salt == HASHER.cache_salt(team.team_id)

    world.run(work)


def test_tenants_share_a_cache_where_they_may(tmp_path: Path) -> None:
    world = World(tmp_path, isolate_tenants=False)
    key = world.store.create(KeyOrder(name="a")).record

    async def work() -> None:
        entry = world.keys.find(key.key_id)
        assert entry is not None
        assert entry.principal.cache_salt == ""

    world.run(work)


def test_changes_of_another_process_are_seen_soon(tmp_path: Path) -> None:
    world = World(tmp_path, refresh_s=0.005)

    async def work() -> None:
        assert not world.keys.has_keys
        key = await asyncio.to_thread(world.store.create, KeyOrder(name="a"))
        await until(lambda: world.keys.find(key.record.key_id) is not None)
        assert world.keys.has_keys
        await asyncio.to_thread(world.store.revoke, key.record.key_id)
        await until(
            lambda: bool((entry := world.keys.find(key.record.key_id)) and entry.is_revoked)
        )

    world.run(work)


def test_only_what_has_changed_is_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    store, keys = world.store, world.keys
    team = store.create_team(TeamOrder(name="t"))
    alone, other = (store.create(KeyOrder(name=name)).record.key_id for name in "ab")
    member = store.create(KeyOrder(name="c", team_id=team.team_id)).record.key_id

    async def work() -> None:
        before = {key_id: keys.find(key_id) for key_id in (other, member)}
        store.update(alone, {"name": "changed"})
        fresh = store.create(KeyOrder(name="d", team_id=team.team_id)).record.key_id
        await keys.refresh()
        assert [keys.find(other), keys.find(member)] == [before[other], before[member]]
        assert keys.find(other) is before[other]
        entry, made = keys.find(alone), keys.find(fresh)
        assert entry is not None
        assert made is not None
        assert entry.principal.name == "changed"
        assert made.principal.team_id == team.team_id

        limits = LimitSpec(requests_per_day=1)
        store.update_team("t", {"limits": limits})
        await keys.refresh()
        principals = [e.principal for key in (member, fresh) if (e := keys.find(key)) is not None]
        assert [each.team_limits for each in principals] == [limits, limits]
        assert keys.find(other) is before[other]
        store.erase(other)  # which the log tells of a tenant, and not of its keys
        store.revoke(alone)
        await keys.refresh()
        revoked = [entry.is_revoked for key in (alone, other) if (entry := keys.find(key))]
        assert revoked == [True, True]
        with world.database.write() as connection:
            connection.execute(text("delete from keys where id = :id"), {"id": member})
        store.update(fresh, {"name": "e"})
        await keys.refresh()
        assert keys.find(member) is None, "the log lacks its removal"

    world.run(work)


def test_a_key_that_cannot_be_read_any_more_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    key_id = world.store.create(KeyOrder(name="a")).record.key_id

    async def work() -> None:
        world.store.update(key_id, {"name": "b"})
        with world.database.write() as connection:
            connection.execute(text("update keys set hash = 'no hash'"))
        await world.keys.refresh()
        assert world.keys.find(key_id) is None

    world.run(work)


def test_nothing_is_read_again_that_has_not_changed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.create(KeyOrder(name="a"))

    async def work() -> None:
        before = world.keys._entries
        await world.keys.refresh()
        assert world.keys._entries is before

    world.run(work)


def test_without_its_database_the_last_state_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, refresh_s=0.005)
    key = world.store.create(KeyOrder(name="a"))

    def failures() -> float:
        return world.count("outrider_key_refresh_failures_total")

    def version() -> int:
        raise DatabaseError("it is away")

    async def work() -> None:
        there = world.store.version
        world.store.version = version  # type: ignore[method-assign]
        await until(lambda: failures() >= 3)
        assert world.keys.find(key.record.key_id) is not None
        assert caplog.text.count("it is away") == 1
        with pytest.raises(DatabaseError):
            await world.keys.refresh()
        world.store.version = there  # type: ignore[method-assign]
        other = await asyncio.to_thread(world.store.create, KeyOrder(name="b"))
        await until(lambda: world.keys.find(other.record.key_id) is not None)
        await until(lambda: "refreshing works again source=keys" in caplog.text)

    with caplog.at_level(logging.INFO):
        world.run(work)


def test_a_database_that_says_nothing_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys that were revoked stay valid meanwhile: that must not go unnoticed."""
    world = World(tmp_path, refresh_s=0.005, slow_s=0.02)
    answered = threading.Event()
    there = world.store.version

    def version() -> int:
        answered.wait(10)
        return there()

    async def work() -> None:
        world.store.version = version  # type: ignore[method-assign]
        try:
            await until(lambda: world.count("outrider_key_refresh_failures_total") >= 2)
        finally:
            answered.set()
        assert caplog.text.count("the database does not answer waited_s=0.02") == 1
        await until(lambda: "refreshing works again source=keys" in caplog.text)

    with caplog.at_level(logging.INFO):
        world.run(work)


def test_no_start_without_a_database(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.database.write() as connection:
        connection.execute(text("DROP TABLE key_version"))
    world.database.close()
    (tmp_path / "keys.db").write_bytes(b"SQLite format 3\0 and then nonsense" * 100)

    async def work() -> None:
        raise AssertionError

    with pytest.raises(DatabaseError):
        world.run(work)


def test_keys_that_were_all_removed_leave_the_door_closed(tmp_path: Path) -> None:
    """A table emptied by hand is no reason to let everybody in."""
    world = World(tmp_path)
    world.store.create(KeyOrder(name="a"))

    async def work() -> None:
        with world.database.write() as connection:
            connection.execute(text("DELETE FROM keys"))
            connection.execute(text("UPDATE key_version SET version = version + 1"))
        await world.keys.refresh()
        assert len(world.keys) == 0
        assert world.keys.has_keys
        assert not world.authenticator.is_open

    world.run(work)


def test_a_key_whose_team_cannot_be_read_is_not_let_in_without_its_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    team = world.store.create_team(TeamOrder(name="t", limits=LimitSpec(tokens_per_day=1)))
    key = world.store.create(KeyOrder(name="a", team_id=team.team_id)).record
    with world.database.write() as connection:
        connection.execute(text("UPDATE teams SET limits = '['"))

    async def work() -> None:
        assert world.keys.find(key.key_id) is None
        assert world.keys.has_keys

    world.run(work)
    assert f"key has a team that cannot be read id={key.key_id}" in caplog.text


def test_keys_of_another_secret_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.store.create(KeyOrder(name="a"))
    with world.database.write() as connection:
        connection.execute(text("UPDATE keys SET hashed_with = 'another'"))

    async def work() -> None:
        assert "another keys.secret" in caplog.text

    world.run(work)
