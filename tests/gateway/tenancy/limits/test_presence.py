"""Gateways that count limits each by itself, on one database, find each other."""

import asyncio
import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select

from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import gateways
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics
from outrider.gateway.tenancy.limits.presence import GatewayPresence
from tests.gateway.waiting import until


@pytest.fixture
def database(tmp_path: Path) -> Database:
    database = Database(f"sqlite:///{tmp_path}/one.db")
    database.migrate()
    return database


def presence(database: Database, registry: CollectorRegistry | None = None) -> GatewayPresence:
    return GatewayPresence(database, LimitMetrics(registry), interval_s=0.005)


def test_two_gateways_without_redis_know_of_each_other(database: Database) -> None:
    one, other = presence(database), presence(database)
    assert [one.look(), other.look(), one.look(), other.look()] == [0, 0, 1, 1]
    database.close()


def test_a_killed_gateway_counts_no_more_and_its_row_goes(database: Database) -> None:
    killed, one = presence(database), presence(database)
    killed.look()
    one.look()
    killed.look()
    assert [one.look() for _ in range(4)] == [1, 1, 1, 0]
    after_a_restart = presence(database)
    assert after_a_restart.look() == 0  # a row that does not change is no gateway
    for _ in range(720):
        after_a_restart._seen = {i: (b, n + 1) for i, (b, n) in after_a_restart._seen.items()}
    after_a_restart.look()
    with database.read() as connection:
        left = set(connection.execute(select(gateways.c.id)).scalars())
    assert left == {after_a_restart._id}
    database.close()


def test_it_is_warned_of_and_shown_and_a_stop_leaves_nothing(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()

    async def main() -> None:
        one, other = presence(database, registry), presence(database)
        await one.start()
        await other.start()
        await until(lambda: one.num_others == 1)
        name = "outrider_limit_uncoordinated_gateways"
        assert registry.get_sample_value(name) == 1
        await other.close()
        await until(lambda: one.num_others == 0)
        await one.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "set redis_url for all of them others=1" in caplog.text
    assert "no other gateway" in caplog.text
    with database.read() as connection:
        assert connection.execute(select(gateways.c.id)).all() == []
    database.close()
