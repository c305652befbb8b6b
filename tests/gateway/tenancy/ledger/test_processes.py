"""Real processes, killed and side by side: what is lost, and that nothing is there twice."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.gateway.storage.database import Database
from tests.gateway.tenancy.ledger.ledgers import make_ledger, opened, row, stored_ids
from tests.gateway.tenancy.ledger.process import FLUSH_S

SCHEDULING_S = 0.5
"""How late a thread may be on a busy machine, beyond the interval itself."""


def begin(url: str, journal: Path, word: str, num_rows: int, ending: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gateway.tenancy.ledger.process"]
    command += [url, str(journal), word, str(num_rows), ending]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def replay(database: Database, journal: Path) -> None:
    async def run() -> None:
        book = make_ledger(database, journal)
        await book.start()
        await book.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_kill_loses_one_flush_interval_at_most(tmp_path: Path) -> None:
    url, journal = f"sqlite:///{tmp_path / 'x.db'}", tmp_path / "journal"
    with opened(url) as database:
        with begin(url, journal, "killed", 10**6, "wait") as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(500)]
            killed_at_s = time.monotonic()
            process.kill()
            lines += process.stdout.readlines()
        replay(database, journal)
        names = stored_ids(database)
    added = {line.split()[0]: float(line.split()[1]) for line in lines if line.endswith("\n")}
    lost = [name for name in added if name not in set(names)]
    assert len(names) == len(set(names))
    # A row may be stored whose line was not written: the kill came between the two.
    assert set(names) - set(added) <= {f"killed-{len(added):06d}"}
    assert list(added)[: len(names)] == names[: len(added)], "rows are lost at the end only"
    assert all(added[name] >= killed_at_s - FLUSH_S - SCHEDULING_S for name in lost)
    assert len(names) > 100
    assert list(journal.iterdir()) == []


def test_journaled_rows_outlive_a_kill_while_the_database_is_locked(tmp_path: Path) -> None:
    url, journal = f"sqlite:///{tmp_path / 'x.db'}", tmp_path / "journal"
    with opened(url) as database:
        with begin(url, journal, "locked", 50, "wait") as process:
            assert process.stdout is not None
            process.stdout.readline()  # it has started
            with database.write():  # nobody else can write now
                for _ in range(49):
                    process.stdout.readline()
                deadline_s = time.monotonic() + 60
                while not has(journal, b"locked-000049") and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                process.kill()
                process.wait()
        replay(database, journal)
        assert len(stored_ids(database)) == 50


def has(journal: Path, row_id: bytes) -> bool:
    return any(row_id in path.read_bytes() for path in journal.glob("*.rows"))


@pytest.mark.slow
def test_two_processes_share_a_database_and_a_clean_stop_loses_nothing(tmp_path: Path) -> None:
    url, journal = f"sqlite:///{tmp_path / 'x.db'}", tmp_path / "journal"

    async def run(database: Database, process: subprocess.Popen[str]) -> None:
        book = make_ledger(database, journal)
        await book.start()
        for number in range(200):
            # One here for each one there.
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            book.add(row(number, row_id=f"here-{number:06d}"))
        await book.close()

    with opened(url) as database:
        with begin(url, journal, "there", 200, "close") as process:
            asyncio.run(run(database, process))
        assert process.returncode == 0
        expected = [f"{word}-{number:06d}" for word in ("here", "there") for number in range(200)]
        assert stored_ids(database) == expected
    assert list(journal.iterdir()) == []
