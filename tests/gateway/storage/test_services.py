"""Tests of a server that is not installed are skipped, unless all are required."""

import pytest

from tests import services


def test_missing_servers_are_skipped_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_SERVICES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Redis is not installed"):
        services._missing("Redis")


def test_or_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SERVICES", "required")
    with pytest.raises(pytest.fail.Exception, match="PostgreSQL is not installed"):
        services._missing("PostgreSQL")


def test_a_database_is_empty_for_each_test(postgres_server: services.PostgresServer) -> None:
    import psycopg

    with postgres_server.lent_database() as url:
        forgotten = psycopg.connect(url)
        forgotten.execute("CREATE TABLE t (a int)")
        forgotten.commit()
        forgotten.execute("LOCK TABLE t")
        with postgres_server.lent_database() as other:
            assert other != url
    with postgres_server.lent_database() as first, postgres_server.lent_database() as second:
        assert url in (first, second)
        for each in (first, second):
            with psycopg.connect(each) as connection:
                assert connection.execute("SELECT to_regclass('t')").fetchone() == (None,)
    forgotten.close()


def test_redis_answers(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("a", "b")


def test_redis_is_empty_for_each_test(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
