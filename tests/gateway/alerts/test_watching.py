"""What is watched, and that a change is told of once, by one of the gateways."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.gateway.alerts.conditions import Alert, Condition
from outrider.gateway.alerts.delivery import Webhook
from outrider.gateway.alerts.sources import breakers, budgets, drift, replicas
from outrider.gateway.alerts.watching import AlertWatch, SourceWatch
from outrider.gateway.engines.fleet.roster import ReplicaState
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.key_registry import KeyRegistry
from outrider.gateway.tenancy.keys.key_store import KeyStore
from outrider.gateway.tenancy.keys.keys import KeyHasher
from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder
from outrider.router.guard import GuardNumbers
from tests.databases import with_tables
from tests.gateway.checks.services import Service
from tests.gateway.tenancy.ledger.ledgers import NOON, row
from tests.gateway.tenancy.ledger.rows import store as store_rows
from tests.gateway.upstream.replica_sets import break_down, replica_set
from tests.gateway.waiting import HandClock, until

OPEN = Condition(subject="breaker/a/b", event="breaker.opened", is_trouble=True)
CLOSED = Condition(subject="breaker/a/b", event="breaker.closed")
HASHER = KeyHasher(b"secret")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    database.migrate()
    with closing(database):
        yield database


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(with_tables(tmp_path / "keys.db"))) as database:
        yield database


class Listening(Webhook):
    """Keeps what it is to deliver."""

    def __init__(self) -> None:
        super().__init__(Service("https://hooks.example").alert_settings())
        self.events: list[str] = []

    def offer(self, alert: Alert) -> None:
        self.events.append(alert.event)


class Watched:
    """A gateway that watches conditions which the test sets."""

    def __init__(self, database: Database, clock: HandClock) -> None:
        self.conditions: Sequence[Condition] = ()
        self.webhook = Listening()
        self.watch = SourceWatch(self.read, database, self.webhook, window_s=60.0, wall_clock=clock)

    async def read(self) -> Sequence[Condition]:
        return self.conditions

    def look(self, *conditions: Condition) -> list[str]:
        """Look at these; return all events so far."""
        self.conditions = conditions
        asyncio.run(self.watch.look())
        return self.webhook.events


@pytest.mark.slow_cases
def test_changes_are_told_of_and_states_are_not(database: Database) -> None:
    clock = HandClock()
    one = Watched(database, clock)
    assert one.look(CLOSED) == []  # as it should be
    assert one.look(OPEN) == ["breaker.opened"]
    assert one.look(OPEN) == ["breaker.opened"]
    clock.now_s += 61
    assert one.look(CLOSED) == ["breaker.opened", "breaker.closed"]


@pytest.mark.slow_cases
def test_one_of_several_gateways_tells(database: Database) -> None:
    clock = HandClock()
    first, second = Watched(database, clock), Watched(database, clock)
    assert first.look(OPEN) == ["breaker.opened"]
    assert second.look(OPEN) == []
    clock.now_s += 61
    assert second.look(CLOSED) == ["breaker.closed"]
    assert first.look(CLOSED) == ["breaker.opened"]
    clock.now_s += 61
    assert (first.look(OPEN), second.look(OPEN)) == (
        ["breaker.opened"] * 2,
        ["breaker.closed"],
    )


def test_what_flaps_is_told_of_once_a_window(file: Database) -> None:
    clock = HandClock()
    one = Watched(file, clock)
    one.look(OPEN)
    for _ in range(10):
        clock.now_s += 2
        assert one.look(CLOSED) == one.look(OPEN) == ["breaker.opened"]
    assert one.look(CLOSED) == ["breaker.opened"]
    clock.now_s += 61
    assert one.look(CLOSED) == ["breaker.opened", "breaker.closed"]  # how it ended


def test_what_was_told_before_a_restart_is_told_again_when_it_comes_again(file: Database) -> None:
    clock = HandClock()
    Watched(file, clock).look(OPEN)
    clock.now_s += 3600
    assert Watched(file, clock).look(OPEN) == ["breaker.opened"]
    once = Condition(subject="budget/x", event="budget.reached", is_trouble=True, is_once=True)
    assert Watched(file, clock).look(once) == ["budget.reached"]
    clock.now_s += 3600
    assert Watched(file, clock).look(once) == []


def test_a_database_that_is_away_silences_nothing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'keys.db'}")
    (tmp_path / "keys.db").mkdir()
    clock = HandClock()
    one = Watched(database, clock)
    assert one.look(OPEN) == one.look(OPEN) == ["breaker.opened"]
    assert one.look(CLOSED) == ["breaker.opened", "breaker.closed"]


def test_a_source_that_fails_does_not_stop_the_others(file: Database) -> None:
    num_looks = 0

    async def broken() -> Sequence[Condition]:
        nonlocal num_looks
        num_looks += 1
        raise ZeroDivisionError

    async def hanging() -> Sequence[Condition]:
        await asyncio.sleep(3600)
        raise AssertionError

    async def sound() -> Sequence[Condition]:
        return [OPEN]

    async def run() -> list[str]:
        webhook = Listening()
        sources = (broken, hanging, sound)
        watches = [SourceWatch(each, file, webhook, window_s=60.0) for each in sources]
        task = asyncio.create_task(AlertWatch(watches, webhook).run())
        await until(lambda: bool(webhook.events) and num_looks > 0)
        task.cancel()
        await asyncio.wait({task})
        return webhook.events

    assert asyncio.run(run()) == ["breaker.opened"]


def test_breakers_are_watched() -> None:
    servers = replica_set(2, HandClock())
    break_down(servers.replicas[1])
    found = asyncio.run(breakers({"cloud": servers})())
    assert [(each.subject, each.event, each.is_trouble) for each in found] == [
        ("breaker/cloud/10.0.0.1:8000", "breaker.closed", False),
        ("breaker/cloud/10.0.0.2:8000", "breaker.opened", True),
    ]


def test_engines_are_watched_once_they_were_up() -> None:
    up = {"a": True, "b": False}

    def states() -> list[ReplicaState]:
        facts: dict[str, Any] = {"group": "g", "num_in_flight": 0, "num_requests": 0}
        return [
            ReplicaState(name=name, is_up=is_up, is_draining=False, reason="", **facts)
            for name, is_up in up.items()
        ]

    look = replicas(states)
    assert [each.event for each in asyncio.run(look())] == ["replica.back"]  # b still starts
    up.update(a=False, b=True)
    found = {each.subject: each.event for each in asyncio.run(look())}
    assert found == {"replica/a": "replica.lost", "replica/b": "replica.back"}
    up.clear()  # both were taken away
    assert asyncio.run(look()) == []


@pytest.mark.parametrize("own", ["tcp://127.0.0.1:9000", "tcp://[::1]:9000", "ipc:///run/engine"])
def test_what_one_machine_alone_reaches_is_another_subject_on_each(
    monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    names = (own, "tcp://10.0.0.1:9000", "tcp://engine-0:9000")
    facts: dict[str, Any] = {"group": "g", "num_in_flight": 0, "num_requests": 0}
    states = [
        ReplicaState(name=name, is_up=True, is_draining=False, reason="", **facts) for name in names
    ]
    servers = replica_set(0, HandClock())
    servers.replace(("http://127.0.0.1:8000/v1",))
    found = []
    for machine in ("first", "second"):
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        looks = (replicas(lambda: states), breakers({"cloud": servers}))
        found.append([each.subject for look in looks for each in asyncio.run(look())])
    shared = ["replica/tcp://10.0.0.1:9000", "replica/tcp://engine-0:9000"]
    assert found == [
        [f"replica/{machine}/{own}", *shared, f"breaker/cloud/{machine}/127.0.0.1:8000"]
        for machine in ("first", "second")
    ]


def test_drift_of_the_router_is_watched() -> None:
    class Guard:
        is_drifting = False

        def numbers(self) -> GuardNumbers:
            return GuardNumbers(num_outcomes=500, is_drifting=self.is_drifting)

    guard = Guard()
    look = drift(guard)
    assert asyncio.run(look())[0].event == "router.recovered"
    guard.is_drifting = True
    (found,) = asyncio.run(look())
    assert (found.event, found.is_trouble) == ("router.drifted", True)


@pytest.mark.slow_cases
def test_budgets_are_told_of_by_their_largest_share(database: Database) -> None:
    store = KeyStore(database, HASHER, randomness=random.Random(7))
    team = store.create_team(TeamOrder(name="red", limits=LimitSpec(usd_per_month=1.0)))
    limits = LimitSpec(tokens_per_day=1_000, models={"large": LimitSpec(usd_per_day=0.001)})
    key = store.create(KeyOrder(name="app", team_id=team.team_id, limits=limits)).record.key_id
    registry = KeyRegistry(store, HASHER, refresh_s=3600.0)
    wall = HandClock(NOON)
    look = budgets(database, registry, (0.8, 0.5, 1.0), wall)

    async def read() -> Sequence[Condition]:
        await registry.refresh()
        return await look()

    def charge(number: int, tier: str, tokens: int, nanos: int) -> None:
        facts = {"key_id": key, "team_id": team.team_id, "tier": tier}
        counts = {"num_charged_tokens": tokens, "charge_nanos": nanos}
        store_rows(database, [row(number, **facts, **counts, ended_at=NOON)])

    def found() -> dict[str, tuple[float, float]]:
        return {
            "/".join(each.subject.split("/")[1:]): (each.data["used"], each.data["allowed"])
            for each in asyncio.run(read())
        }

    charge(1, "small", 499, 0)
    assert found() == {}
    charge(2, "small", 1, 0)
    first = next(iter(found()))
    assert first.startswith(f"key/{key}/all/tokens_per_day/")
    assert first.endswith("/0.5/1000")
    day = first.removesuffix("/0.5/1000")
    charge(3, "large", 400, 1_000_000)
    charge(4, "small", 1, 500_000_000)
    reached = found()
    assert reached[f"{day}/0.8/1000"] == (901, 1_000)
    assert f"{day}/0.5/1000" not in reached
    large = day.replace("/all/tokens_per_day", "/large/usd_per_day")
    assert reached[f"{large}/1/0.001"] == (0.001, 0.001)
    monthly = f"team/{team.team_id}/all/usd_per_month/{day[-10:-3]}/0.5/1"
    assert reached[monthly] == (0.501, 1.0)
    wall.now_s += 86_400  # a new day
    assert [*found()] == [monthly]
    store.update_team(team.team_id, {"limits": LimitSpec(usd_per_month=1.002)})
    assert [*found()] == [f"{monthly}.002"]  # a limit that was raised is told of anew
    weeks = LimitSpec(usd_per_week=0.5, usd_per_7_days=0.5, usd_per_month=1.0)
    store.update_team(team.team_id, {"limits": weeks})
    named = sorted(name.split("/")[3] for name in found())
    assert named == ["usd_per_7_days", "usd_per_month", "usd_per_week"]


def test_a_source_that_takes_long_is_looked_at_less_often(file: Database) -> None:
    pauses: list[float] = []

    async def slow() -> Sequence[Condition]:
        await asyncio.sleep(0.0 if pauses else 0.1)
        return []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    watch = SourceWatch(slow, file, Listening(), window_s=60.0, sleep=pause)
    with suppress(asyncio.CancelledError):
        asyncio.run(watch.run())
    assert pauses[0] >= 5.0 > pauses[1] >= 1.0
