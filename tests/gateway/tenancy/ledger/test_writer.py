"""Every row that was added reaches the database once, whatever is away meanwhile."""

import asyncio
import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.settings.ledger import LedgerSettings
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import ledger, price_versions
from outrider.gateway.tenancy.ledger.book import Ledger, NullLedger
from outrider.gateway.tenancy.ledger.journal import Journal, journal_folder
from outrider.gateway.tenancy.ledger.ledger_metrics import LedgerMetrics
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.writer import Ticket
from tests.databases import with_tables
from tests.gateway.tenancy.ledger.ledgers import (
    NOON,
    FrailDatabase,
    ids,
    make_ledger,
    opened,
    row,
    stored_ids,
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_rows_are_stored_as_they_were_added(database: FrailDatabase, journal: Path) -> None:
    async def run(database: Database) -> None:
        book = make_ledger(database, journal, prices=prices)
        await book.start()
        for number in range(450):
            book.add(row(number))
        book.add(full)
        await book.flush()
        assert len(stored_ids(database)) == 451
        await book.close()

    prices = PriceBook.from_settings(
        load_settings(flags={"routing.prices.large.prompt": 1}, environ={})
    )
    full = row(
        999, team_id="team", client_request_id="mine", queue_s=0.25, ttft_s=0.5, duration_s=1.5,
        is_streamed=True, cost_nanos=2**62, price_version=prices.version, arm="b",
    )  # fmt: skip
    asyncio.run(run(database))
    with database.read() as connection:
        found = (
            connection.execute(select(ledger).where(ledger.c.row_id == full.row_id))
            .mappings()
            .one()
        )
        (known,) = connection.execute(select(price_versions)).all()
    values = dict(found)
    assert values.pop("day") == int(full.ended_at // 86_400)
    assert values == {name: getattr(full, name) for name in full.__struct_fields__}
    assert known.version == prices.version
    assert PriceBook.from_document(known.document.encode()).version == prices.version
    assert list(journal.iterdir()) == []


def test_the_same_row_again_changes_nothing(database: FrailDatabase, journal: Path) -> None:
    async def run(database: Database) -> None:
        book = make_ledger(database, journal)
        await book.start()
        book.add(row(1))
        await book.flush()
        book.add(row(1, tier="large"))
        book.add(row(2))
        await book.close()

    asyncio.run(run(database))
    assert stored_ids(database) == ids(1, 2)
    with database.read() as connection:
        assert set(connection.execute(select(ledger.c.tier)).scalars()) == {"small"}
    assert list(journal.iterdir()) == []  # nor was it taken for a row that nobody can store


def test_while_the_database_is_away_the_journal_keeps_all(
    database: FrailDatabase, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(database: FrailDatabase) -> None:
        database.is_away = True
        registry = CollectorRegistry()
        book = make_ledger(database, journal, metrics=LedgerMetrics(registry))
        await book.start()  # does not fail
        for number in range(10):
            book.add(row(number, cost_nanos=10**9))
        with pytest.raises(StorageError):
            await book.flush()
        assert registry.get_sample_value("outrider_ledger_pending_rows") == 10
        assert failures(registry, "database") >= 2
        database.is_away = False
        await book.flush()
        assert stored_ids(database) == ids(*range(10))
        assert registry.get_sample_value("outrider_ledger_pending_rows") == 0
        assert registry.get_sample_value("outrider_cost_usd_total", {"tier": "small"}) == 10
        labels = {"kind": "answer", "outcome": "answered"}
        assert registry.get_sample_value("outrider_ledger_rows_total", labels) == 10
        await book.close()

    asyncio.run(run(database))
    assert "the database is cut off" in caplog.text


def test_rows_left_by_a_close_without_database_are_stored_at_the_next_start(
    database: FrailDatabase, journal: Path
) -> None:
    async def first(database: FrailDatabase) -> None:
        book = make_ledger(database, journal)
        await book.start()
        database.is_away = True
        for number in range(300):
            book.add(row(number))
        await book.close()

    async def second(database: FrailDatabase) -> None:
        database.is_away = False
        assert stored_ids(database) == []
        book = make_ledger(database, journal)
        await book.start()
        assert stored_ids(database) == ids(*range(300))
        await book.close()

    asyncio.run(first(database))
    asyncio.run(second(database))
    assert list(journal.iterdir()) == []


def test_while_the_journal_is_full_rows_go_to_the_database_all_the_same(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(database: FrailDatabase) -> None:
        registry = CollectorRegistry()
        book = make_ledger(database, journal, metrics=LedgerMetrics(registry))
        await book.start()
        with monkeypatch.context() as patch:
            patch.setattr("outrider.gateway.tenancy.ledger.journal._write_all", refuse)
            book.add(row(1))
            await book.flush()
            assert stored_ids(database) == ids(1)
            assert failures(registry, "journal") >= 1
            database.is_away = True
            book.add(row(2))
            with pytest.raises(StorageError):
                await book.flush()
        book.add(row(3))
        database.is_away = False
        await book.flush()
        await book.close()
        assert stored_ids(database) == ids(1, 2, 3)

    def refuse(_: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))
    assert "No space left" in caplog.text
    assert "can be written again" in caplog.text


def test_memory_is_bounded_when_nothing_can_be_written(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(database: FrailDatabase) -> None:
        registry = CollectorRegistry()
        book = make_ledger(database, journal, metrics=LedgerMetrics(registry))
        await book.start()
        database.is_away = True
        with monkeypatch.context() as patch:
            patch.setattr("outrider.gateway.tenancy.ledger.writer._MAX_ROWS_IN_MEMORY", 50)
            patch.setattr("outrider.gateway.tenancy.ledger.journal._write_all", refuse)
            for start in range(0, 100, 20):
                for number in range(start, start + 20):
                    book.add(row(number))
                with pytest.raises(StorageError):
                    await book.flush()
            for number in range(1000, 1100):
                book.add(row(number))
            with pytest.raises(StorageError):
                await book.flush()
        lost = registry.get_sample_value("outrider_ledger_dropped_rows_total")
        database.is_away = False
        await book.close()
        assert stored_ids(database) == ids(*range(50))
        assert lost == 150

    def refuse(_: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))
    assert "rows are lost" in caplog.text


@pytest.mark.parametrize(
    "poison",
    [{"num_prompt_tokens": 2**63}, {"duration_s": float("nan")}, {"ended_at": float("inf")}],
    ids=["huge", "not_a_number", "endless"],
)
def test_a_row_that_cannot_be_stored_does_not_block_others(
    database: FrailDatabase, journal: Path, poison: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def run(database: Database) -> None:
        book = make_ledger(database, journal)
        await book.start()
        book.add(row(1))
        book.add(row(2, **poison))
        book.add(row(3, model="nul \0", arm="'; DROP TABLE ledger; --"))
        book.add(row(4, model="half \ud800"))
        await book.flush()
        await book.close()

    asyncio.run(run(database))
    names = stored_ids(database)
    with database.read() as connection:
        models = set(connection.execute(select(ledger.c.model)).scalars())
    assert {*ids(1, 3, 4)} <= {*names}
    assert {"nul ?", "half ?"} <= models
    kept = [path.name for path in journal.iterdir()]
    # PostgreSQL has a word for what is not a number; a row is stored or kept, never lost.
    assert kept == ([] if len(names) == 4 else ["rejected.damaged"])
    assert (len(names) == 4) == (
        poison == {"duration_s": poison.get("duration_s")} and database.dialect == "postgresql"
    )


def test_a_flush_waits_for_what_was_added_just_before_it(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(database: Database) -> None:
        book = make_ledger(database, journal)
        await book.start()
        drain = book._drain
        flushes: list[asyncio.Future[None]] = []

        def drain_and_race() -> None:
            """Another thread adds and flushes when the journal's has just looked."""
            drain()
            if not flushes:
                ticket = Ticket()
                flushes.append(asyncio.wrap_future(ticket, loop=loop))
                book.add(row(1))
                book._asked.append(ticket)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(book, "_drain", drain_and_race)
        await book.flush()
        await flushes[0]
        assert stored_ids(database) == ids(1)
        await book.close()

    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))


def test_old_rows_are_deleted(database: FrailDatabase, journal: Path) -> None:
    async def run(database: Database, settings: LedgerSettings) -> None:
        book = make_ledger(database, journal, settings, wall_clock=lambda: NOON)
        for number, age_days in enumerate((0, 6.9, 7.1, 400)):
            book.add(row(number, ended_at=NOON - age_days * 86_400))
        await book.start()
        await book.close()

    forever = LedgerSettings(flush_ms=5, batch_ms=20)
    asyncio.run(run(database, forever))
    assert stored_ids(database) == ids(0, 1, 2, 3)
    asyncio.run(run(database, LedgerSettings(flush_ms=5, batch_ms=20, retention_days=7)))
    assert stored_ids(database) == ids(0, 1)


def test_rows_may_come_from_many_threads(tmp_path: Path, journal: Path) -> None:
    async def run(database: Database) -> None:
        book = make_ledger(database, journal)
        await book.start()

        def add_many(first: int) -> None:
            for number in range(first, first + 500):
                book.add(row(number))

        threads = [threading.Thread(target=add_many, args=(k * 1000,)) for k in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*(book.flush() for _ in range(5)))
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await book.close()

    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))
        assert len(stored_ids(database)) == 2000


def test_an_unreadable_segment_does_not_block_others(
    tmp_path: Path, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(database: Database) -> None:
        book = make_ledger(database, journal)
        await book.start()
        book.add(row(1))
        await book.flush()
        assert stored_ids(database) == ids(1)
        await book.close()

    journal.mkdir()
    (journal / "7-x.00000001.rows").mkdir()  # reading it fails, for root too
    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))
    assert "cannot be read" in caplog.text


def test_a_folder_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def run(database: Database) -> None:
        with pytest.raises(SettingsError, match=r"ledger\.journal"):
            await make_ledger(database, tmp_path / "file" / "journal").start()

    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))


def test_closed_and_unopened_ledgers_say_so(tmp_path: Path, journal: Path) -> None:
    async def run(database: Database) -> None:
        book = make_ledger(database, journal)
        await book.close()
        with pytest.raises(StorageError):
            await book.flush()
        await book.start()
        book.add(row(1))
        await asyncio.gather(book.close(), book.close())
        with pytest.raises(StorageError):
            await book.flush()
        book.add(row(2))  # too late, and no harm done

    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))
        assert stored_ids(database) == ids(1)


def test_several_closers_end_a_ledger_once(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ended = 0
    close = Journal.close

    def slow_close(self: Journal) -> None:
        nonlocal num_ended
        num_ended += 1
        time.sleep(0.05)  # the others come meanwhile
        close(self)

    monkeypatch.setattr(Journal, "close", slow_close)

    async def run(database: Database) -> None:
        book = make_ledger(database, journal)
        await book.start()
        book.add(row(1))
        await asyncio.gather(*(book.close() for _ in range(4)))

    with opened(with_tables(tmp_path / "x.db")) as database:
        asyncio.run(run(database))
        assert stored_ids(database) == ids(1)
    assert num_ended == 1


def test_the_journal_lies_beside_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = load_settings(environ={})
    urls = (f"sqlite:///{tmp_path / 'one.db'}", f"sqlite:///{tmp_path / 'two.db'}")
    urls += tuple(f"postgresql://u:secret@host/{name}" for name in ("one", "two"))
    databases = [Database(url) for url in urls]
    folders = [journal_folder(settings, database) for database in databases]
    assert len(set(folders)) == 4
    assert folders[0].parent == tmp_path
    assert folders[2].parent == tmp_path / "state" / "outrider"
    own = load_settings(flags={"ledger.journal": tmp_path / "mine"}, environ={})
    assert journal_folder(own, databases[0]) == tmp_path / "mine"
    for database in databases:
        database.close()


def test_no_ledger_does_nothing() -> None:
    async def run(book: Ledger) -> None:
        await book.start()
        book.add(row(1))
        await book.flush()
        await book.close()

    asyncio.run(run(NullLedger()))


def failures(registry: CollectorRegistry, place: str) -> float:
    value = registry.get_sample_value("outrider_ledger_write_failures_total", {"place": place})
    assert value is not None
    return value
