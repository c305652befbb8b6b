"""Journals lose nothing that was written whole, and never touch what a living process writes."""

import errno
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.gateway.tenancy.ledger.journal import Journal, read_segment, write_aside
from outrider.gateway.tenancy.ledger.row import MAX_LENGTHS, LedgerRow, fitted
from tests.gateway.tenancy.ledger.ledgers import row


def nonces(word: str) -> Iterator[str]:
    return (f"{word}{number}" for number in count())


def make(folder: Path, word: str = "a") -> Journal:
    return Journal(folder, nonces(word).__next__)


def read(paths: list[Path]) -> list[LedgerRow]:
    return [row for path in paths for row in read_segment(path)]


ROWS = st.lists(
    st.builds(
        row,
        st.integers(0, 10**6),
        model=st.text(max_size=300),
        team_id=st.none() | st.text(max_size=5),
        num_prompt_tokens=st.integers(0, 2**63 - 1),
        queue_s=st.none() | st.floats(0, 1e9),
        is_streamed=st.booleans(),
    ),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(ROWS, max_size=4), seals=st.lists(st.booleans(), min_size=4, max_size=4))
def test_journal_rows_are_read_back(
    tmp_path: Path, batches: list[list[LedgerRow]], seals: list[bool]
) -> None:
    journal = make(tmp_path)
    for batch, is_sealed in zip(batches, seals, strict=False):
        journal.append(batch)
        if is_sealed:
            journal.sealed()
    paths = journal.sealed()
    assert read(paths) == [row for batch in batches for row in batch]
    for path in paths:
        path.unlink()
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_torn_tail_hides_only_the_torn_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = make(tmp_path)
    journal.append([row(1)])
    whole = journal.size_bytes
    journal.append([row(2)])
    size = journal.size_bytes
    (path,) = journal.sealed()
    data = path.read_bytes()
    assert len(data) == size
    for length in range(len(data)):
        path.write_bytes(data[:length])
        expected = [row(1)] if length >= whole else []
        assert list(read_segment(path)) == expected, length
        assert path.exists()
    assert "lost_bytes" in caplog.text
    path.write_bytes(data[:whole] + bytes(500))  # a file that has grown, but never got its data
    assert list(read_segment(path)) == [row(1)]
    journal.close()


def test_damage_in_the_middle_is_kept_for_a_person(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = make(tmp_path)
    journal.append([row(1)])
    at = journal.size_bytes + 20
    journal.append([row(number) for number in range(2, 1000)])
    (path,) = journal.sealed()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert list(read_segment(path)) == [row(1)]
    assert not path.exists()
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.read_bytes() == data
    assert str(kept) in caplog.text
    journal.close()


def test_another_version_is_kept_for_its_program(tmp_path: Path) -> None:
    path = tmp_path / "9-z.00000001.rows"
    path.write_bytes(b"outrider ledger 2\n" + b"x" * 100)
    assert list(read_segment(path)) == []
    assert not path.exists()
    assert (tmp_path / "9-z.00000001.rows.damaged").exists()


def test_one_row_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    strange = row(2, num_prompt_tokens="many")  # as a program of another version might write it
    journal = make(tmp_path)
    journal.append([row(1), strange, row(3)])
    (path,) = journal.sealed()
    assert list(read_segment(path)) == [row(1), row(3)]
    assert len(list(tmp_path.glob("*.damaged"))) == 1
    journal.close()


def test_living_processes_are_left_alone_and_dead_ones_taken_over(tmp_path: Path) -> None:
    living, dead = make(tmp_path, "living"), make(tmp_path, "dead")
    living.append([row(1)])
    dead.append([row(2)])
    dead.close()  # as a kill: the lock goes, the segment stays
    heir = make(tmp_path, "heir")
    heir.open()
    (orphan,) = heir.orphans()
    assert read(list(orphan.segments)) == [row(2)]
    assert list(make(tmp_path, "third").orphans()) == []  # it is being taken care of
    orphan.release()  # not emptied: for later
    (orphan,) = heir.orphans()
    for path in orphan.segments:
        path.unlink()
    orphan.release()
    assert list(heir.orphans()) == []
    living.append([row(3)])
    assert read(living.sealed()) == [row(1), row(3)]
    living.close()
    heir.close()


def test_a_segment_without_its_lock_file_is_taken_over_too(tmp_path: Path) -> None:
    dead, heir = make(tmp_path, "dead"), make(tmp_path, "heir")
    dead.append([row(2)])
    dead.close()
    next(tmp_path.glob("*.lock")).unlink()
    heir.open()
    (orphan,) = heir.orphans()
    assert read(list(orphan.segments)) == [row(2)]
    orphan.release()
    heir.close()


def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = make(tmp_path)
    journal.append([row(1)])
    write = os.write
    with monkeypatch.context() as patch:

        def write_half(file: int, data: memoryview) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, data[: len(data) // 2])

        patch.setattr(os, "write", write_half)
        with pytest.raises(OSError, match="No space"):
            journal.append([row(2)])
    journal.append([row(3)])
    assert read(journal.sealed()) == [row(1), row(3)]
    journal.close()


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    journal = make(tmp_path / "journal")
    journal.append([row(1)])
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in journal.folder.iterdir()} == {0o600}
    journal.close()


def test_words_that_cannot_be_kept_are_fitted(tmp_path: Path) -> None:
    journal = make(tmp_path)
    journal.append([row(1, model="\ud800half"), row(2, model="x" * 100_000), row(3)])
    first, second, third = read(journal.sealed())
    assert first.model == "?half"
    assert second.model == "x" * 256
    assert third == row(3)
    journal.close()
    assert fitted(row(4, model="nul\0 and\nline")).model == "nul? and?line"
    assert fitted(third) is third
    words = {name for name, kind in LedgerRow.__annotations__.items() if "int" not in str(kind)}
    numbers = {"ended_at", "queue_s", "ttft_s", "duration_s", "is_streamed", "is_degraded"}
    assert set(MAX_LENGTHS) == words - numbers


def test_rejected_rows_can_be_read_again(tmp_path: Path) -> None:
    for number in (1, 2):
        write_aside(tmp_path, row(number), "a reason")
    (path,) = tmp_path.iterdir()
    assert list(read_segment(path)) == [row(1), row(2)]
