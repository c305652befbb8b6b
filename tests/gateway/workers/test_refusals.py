"""Settings and limits that several processes of a gateway cannot have."""

from pathlib import Path

import pytest

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.keys.amounts import LimitSpec, Want
from outrider.gateway.tenancy.keys.key_parts import key_store
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tenancy.limits.unlimited import UncountedLimits
from outrider.gateway.wiring.crew import prepare_database
from outrider.gateway.wiring.gateway_worker import share_of


def settings_of(**flags: object) -> Settings:
    return load_settings(
        environ={}, flags={key.replace("__", "."): value for key, value in flags.items()}
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine__process": False}, "share one engine, which must have a process of its own"),
        ({"database_url": "none"}, "through a database: leave out database_url = none"),
        ({"server__workers": 0}, "greater than or equal to 1"),
        ({"server__workers": 65}, "less than or equal to 64"),
    ],
)
def test_settings_that_contradict_several_workers(flags: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match="--workers") as caught:
        settings_of(**{"server__workers": 2, **flags})
    assert words in str(caught.value)


def test_the_same_settings_are_fine_for_one_worker() -> None:
    assert settings_of(engine__process=False, database_url="none").server.workers == 1


def test_limits_without_redis_are_refused_at_the_start(tmp_path: Path) -> None:
    flags = {"server__workers": 2, "database_url": f"sqlite:///{tmp_path}/outrider.db"}
    settings = settings_of(**flags)
    prepare_database(settings)  # a new database has no limits
    database = open_database(settings)
    assert database is not None
    store = key_store(settings, database)
    store.create(KeyOrder(name="free"))
    prepare_database(settings)
    store.create(KeyOrder(name="app", limits=LimitSpec(usd_per_day=5)))
    database.close()
    with pytest.raises(SettingsError, match=r"app have limits.*only in Redis\. Set redis_url"):
        prepare_database(settings)
    prepare_database(settings_of(**flags, redis_url="redis://127.0.0.1:1/0"))


async def test_limits_that_come_later_are_never_passed_over() -> None:
    limiter = UncountedLimits()
    await limiter.reserve(ANONYMOUS, Want(by_tier={}))
    limited = Principal(key_id="k", name="k", tenant="k", limits=LimitSpec(requests_per_day=5))
    with pytest.raises(StorageError, match="set redis_url"):
        await limiter.reserve(limited, Want(by_tier={}))


def test_workers_share_what_bounds_the_gateway() -> None:
    settings = settings_of(server__workers=4, http__max_connections=1001)
    share = share_of(settings)
    assert share.http.max_connections == 251
    assert share.http.max_bytes_in_flight == settings.http.max_bytes_in_flight // 4
    assert share.http.max_bytes_in_flight_per_key >= settings.limits.max_body_bytes
    assert share.http.idempotency_max_bytes == settings.http.idempotency_max_bytes // 4
    assert share.mirror.max_in_flight == 1
