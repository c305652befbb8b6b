"""A folder of extents: what is damaged is not used, what is too much goes, the rest stays."""

import os
import stat
from pathlib import Path

import pytest

from benchmarks.sessions import killed_writer
from outrider.engine.cache.block_pool import BlockHash, chain_hash
from outrider.engine.cache.extent_folder import ExtentFolder, check_extents, other_files
from outrider.engine.cache.extent_space import About, ExtentSpace, StoredExtent
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.extents import Extent, ExtentError, ExtentHeader
from outrider.engine.cache.sealing import Seal, read_key
from outrider.engine.errors import EngineError
from tests.stores import KEY, opened_store, stored_files

ABOUT = About(model="a-model", fingerprint="f" * 32, row_s=0.01)
PAYLOAD = os.urandom(40_000)


class Clock:
    """Seconds since 1970, as a test says."""

    def __init__(self) -> None:
        self.now_s = 2e9

    def __call__(self) -> float:
        return self.now_s


def chain(text: int, count: int = 8) -> list[BlockHash]:
    hashes = [chain_hash(b"root", [text])]
    while len(hashes) < count:
        hashes.append(chain_hash(hashes[-1], [text]))
    return hashes


def extent_of(hashes: list[BlockHash], first: int, last: int) -> Extent:
    header = ExtentHeader(
        fingerprint=ABOUT.fingerprint,
        kind="blocks",
        first=first,
        parent=hashes[first - 1] if first else b"root",
        hashes=tuple(hashes[first:last]),
        shapes=((len(PAYLOAD),),),
    )
    return Extent(header=header, payload=PAYLOAD)


def folder_of(
    path: Path,
    *,
    budget_bytes: int = 10**7,
    ttl_s: float = 1e6,
    clock: Clock | None = None,
    seal: Seal | None = None,
) -> ExtentFolder:
    return ExtentFolder(
        path,
        seal=seal or Seal(KEY),
        budget_bytes=budget_bytes,
        ttl_s=ttl_s,
        clock=clock or Clock(),
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def found(space: ExtentSpace, hashes: list[BlockHash], start: int = 0) -> StoredExtent:
    match = space.match(hashes, start)
    assert match is not None
    return match[0]


def test_what_is_written_is_found_by_its_text_and_read_again(place: Path) -> None:
    folder = folder_of(place)
    space, hashes = folder.space(ABOUT), chain(1)
    assert folder.write(space, extent_of(hashes, 0, 4))
    assert folder.write(space, extent_of(hashes, 4, 8))
    for each in (space, folder_of(place).space(ABOUT)):  # and by another engine
        assert [
            end for start in (0, 2, 4) if (m := each.match(hashes, start)) for end in m[1:]
        ] == [*(4, 4, 8)]
        assert each.read(found(each, hashes)) == extent_of(hashes, 0, 4)
    other = [*hashes[:2], *chain(2)]
    assert space.match(other, 0) == (found(space, hashes), 2)  # as far as the texts are one
    assert space.match(other, 2) is None
    assert space.match(chain(3), 0) is None


def test_of_extents_that_begin_alike_the_longest_is_found(place: Path) -> None:
    folder = folder_of(place)
    space, hashes = folder.space(ABOUT), chain(1)
    for last in (2, 6, 4):
        folder.write(space, extent_of(hashes, 0, last))
    for each in (space, folder_of(place).space(ABOUT)):
        assert each.match(hashes, 3) == (found(each, hashes), 6)


def test_files_are_private_and_say_nothing_without_the_key(place: Path) -> None:
    folder = folder_of(place)
    space, hashes = folder.space(ABOUT), chain(1)
    folder.write(space, extent_of(hashes, 0, 2))
    (path,) = stored_files(place)
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    assert PAYLOAD[:64] not in content
    assert all(each not in content and each.hex() not in path.name for each in hashes)
    stranger = ExtentFolder(place, seal=Seal(bytes(32)), budget_bytes=10**7, ttl_s=1e6)
    assert stranger.space(ABOUT).match(hashes, 0) is None


def test_a_changed_cut_or_swapped_file_is_not_used_and_goes(place: Path) -> None:
    folder = folder_of(place)
    space, hashes = folder.space(ABOUT), chain(1)
    for damage in ("flip", "cut", "empty", "swap", "grow"):
        folder.write(space, extent_of(hashes, 0, 4))
        folder.write(space, extent_of(chain(2), 0, 4))
        stored = found(space, hashes)
        path = space.folder / stored.file_name
        content = path.read_bytes()
        match damage:
            case "flip":
                path.write_bytes(content[:900] + bytes([content[900] ^ 4]) + content[901:])
            case "cut":
                path.write_bytes(content[:-5])
            case "empty":
                path.write_bytes(b"")
            case "grow":
                path.write_bytes(content + b"x")
            case "swap":
                path.write_bytes((space.folder / found(space, chain(2)).file_name).read_bytes())
        assert [error is None for _, error in check_extents(place, Seal(KEY))].count(False) == 1
        with pytest.raises(ExtentError):
            space.read(stored)
        assert space.match(hashes, 0) is None
        assert not path.exists()
        assert found(space, chain(2))


def test_a_file_that_another_engine_removed_is_missed_once(place: Path) -> None:
    folder = folder_of(place)
    space, hashes = folder.space(ABOUT), chain(1)
    folder.write(space, extent_of(hashes, 0, 4))
    stored = found(space, hashes)
    stored_files(place)[0].unlink()
    with pytest.raises(FileNotFoundError):
        space.read(stored)
    assert space.match(hashes, 0) is None


def test_what_computing_takes_is_known_from_earlier_engines(place: Path) -> None:
    with opened_store(place) as store:
        store.note_row_s(store.folder.space(ABOUT), 0.25)
        store.flush()
    assert folder_of(place).space(ABOUT).about.row_s == 0.25


def test_what_is_removed_is_not_found_whenever_the_folder_was_looked_at(place: Path) -> None:
    folder = folder_of(place)
    space, hashes = folder.space(ABOUT), chain(1)
    folder.write(space, extent_of(hashes, 0, 4))
    stored = found(space, hashes)
    folder.collect()
    space.remove(stored)  # as it was known before
    assert space.match(hashes, 0) is None
    assert not len(space)


def test_two_engines_that_write_one_text_leave_one_file(place: Path) -> None:
    one, other = folder_of(place), folder_of(place)
    spaces, hashes = (one.space(ABOUT), other.space(ABOUT)), chain(1)
    for folder, space in zip((one, other), spaces, strict=True):
        assert folder.write(space, extent_of(hashes, 0, 4))
    assert len(stored_files(place)) == 1
    for space in spaces:
        assert space.read(found(space, hashes)) == extent_of(hashes, 0, 4)


def test_the_budget_holds_and_the_least_valuable_go_first(place: Path) -> None:
    clock = Clock()
    folder = folder_of(place, budget_bytes=6 * 41_000 + 16_384, clock=clock)
    space = folder.space(ABOUT)
    for text in range(5):
        folder.write(space, extent_of(chain(text), 0, 4))
        clock.now_s += 3600.0
    space.touch(found(space, chain(0)))  # the oldest is used again
    folder.write(space, extent_of(chain(4), 4, 8))
    for text in range(10, 13):
        clock.now_s += 60.0
        assert folder.write(space, extent_of(chain(text), 0, 4))
        assert sum(path.stat().st_size for path in stored_files(place)) <= 6 * 41_000 + 16_384
    kept = {text for text in (*range(5), *range(10, 13)) if space.match(chain(text), 0)}
    assert {0, 12, 11} <= kept
    assert not kept & {1, 2}


def test_what_was_used_long_ago_goes_before_what_is_new(place: Path) -> None:
    clock = Clock()
    folder = folder_of(place, budget_bytes=3 * 41_000, clock=clock)
    space = folder.space(ABOUT)
    folder.write(space, extent_of(chain(1), 0, 4))
    space.touch(found(space, chain(1)))
    clock.now_s += 600.0
    folder.write(space, extent_of(chain(2), 0, 4))
    folder.collect(num_bytes=60_000)
    assert space.match(chain(1), 0) is None
    assert space.match(chain(2), 0)


def test_of_one_text_the_end_goes_before_the_beginning(place: Path) -> None:
    folder = folder_of(place, budget_bytes=3 * 41_000)
    space, hashes = folder.space(ABOUT), chain(1)
    for first in (0, 4):
        folder.write(space, extent_of(hashes, first, first + 4))
    folder.collect(num_bytes=60_000)
    assert space.match(hashes, 0)
    assert space.match(hashes, 4) is None


def test_a_budget_below_one_extent_keeps_nothing(place: Path) -> None:
    folder = folder_of(place, budget_bytes=1000)
    assert not folder.write(folder.space(ABOUT), extent_of(chain(1), 0, 4))
    assert not stored_files(place)


def test_what_was_not_used_for_long_expires(place: Path) -> None:
    clock = Clock()
    folder = folder_of(place, ttl_s=100.0, clock=clock)
    space = folder.space(ABOUT)
    for text in (1, 2):
        folder.write(space, extent_of(chain(text), 0, 4))
        space.touch(found(space, chain(text)))
    clock.now_s += 90.0
    space.touch(found(space, chain(2)))
    clock.now_s += 20.0
    assert folder.collect() == 1
    assert space.match(chain(1), 0) is None
    assert space.match(chain(2), 0)


def test_files_from_a_clock_that_ran_ahead_expire_from_now_on(place: Path) -> None:
    clock = Clock()
    folder = folder_of(place, ttl_s=1000.0, clock=clock)
    space = folder.space(ABOUT)
    other = About(model="another", fingerprint="e" * 32)
    folder.write(folder_of(place, clock=clock).space(other), extent_of(chain(2), 0, 4))
    folder.write(space, extent_of(chain(1), 0, 4))
    part = space.folder / ".4711-0-0.part"
    part.write_bytes(b"half")
    os.utime(part, (clock.now_s, clock.now_s))
    clock.now_s -= 1e8
    assert folder.collect() == 0
    assert space.read(found(space, chain(1))) == extent_of(chain(1), 0, 4)
    assert not part.exists()
    clock.now_s += 900.0
    assert folder.collect() == 0
    clock.now_s += 200.0
    assert folder.collect() == 2
    assert not stored_files(place)


def test_a_clock_that_jumps_ahead_loses_what_was_old_by_it_and_no_more(place: Path) -> None:
    clock = Clock()
    folder = folder_of(place, ttl_s=1000.0, clock=clock)
    space = folder.space(ABOUT)
    folder.write(space, extent_of(chain(1), 0, 4))
    clock.now_s += 1e8
    folder.write(space, extent_of(chain(2), 0, 4))
    assert folder.collect() == 1
    assert space.match(chain(1), 0) is None
    assert found(space, chain(2))


def test_half_written_files_count_in_the_budget(place: Path) -> None:
    clock = Clock()
    folder = folder_of(place, budget_bytes=200_000, clock=clock)
    space = folder.space(ABOUT)
    folder.write(space, extent_of(chain(1), 0, 4))
    part = space.folder / ".4711-0-0.part"
    part.write_bytes(bytes(150_000))
    os.utime(part, (clock.now_s, clock.now_s))
    folder.collect()
    assert folder.num_bytes == part.stat().st_size + stored_files(place)[0].stat().st_size
    folder.collect(num_bytes=20_000)
    assert not stored_files(place)


def test_a_budget_below_one_text_keeps_its_beginning(place: Path) -> None:
    folder = folder_of(place, budget_bytes=3 * 41_000 + 16_384)
    space, hashes = folder.space(ABOUT), chain(1, 40)
    for first in range(0, 40, 4):
        folder.write(space, extent_of(hashes, first, first + 4))
        assert sum(path.stat().st_size for path in stored_files(place)) <= 3 * 41_000 + 16_384
    assert found(space, hashes)
    assert space.match(hashes, 36) is not None or space.match(hashes, 4) is not None


def test_other_versions_and_other_peoples_files_are_left_alone(place: Path) -> None:
    folder = folder_of(place)
    space = folder.space(ABOUT)
    other = folder.space(About(model="another", fingerprint="e" * 32))
    folder.write(other, extent_of(chain(1), 0, 4))
    assert space.match(chain(1), 0) is None  # another model's
    newer = place / "v2-whatever"
    newer.mkdir()
    for path in (place / "notes.txt", newer / "b-0-aaaaaaaa.kv", space.folder / "odd.kv"):
        path.write_bytes(b"mine")
    assert other_files(place) == [place / "notes.txt", newer]
    folder_of(place, ttl_s=0.001).collect()
    assert (newer / "b-0-aaaaaaaa.kv").exists()
    assert (place / "notes.txt").exists()
    assert (space.folder / "odd.kv").exists()


def test_what_a_killed_writer_left_is_removed_later(place: Path) -> None:
    clock = Clock()
    folder = folder_of(place, clock=clock)
    part = folder.space(ABOUT).folder / ".4711-0-0.part"
    part.write_bytes(b"half")
    os.utime(part, (clock.now_s, clock.now_s))
    folder.collect()
    assert part.exists()  # perhaps it is being written
    clock.now_s += 120.0
    folder.collect()
    assert not part.exists()


def test_a_disk_that_becomes_read_only_is_read_still(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_store(place) as store:
        space, hashes = store.folder.space(ABOUT), chain(1)
        store.write(space, extent_of(hashes, 0, 4))
        store.flush()

        def refuse(*args: object, **kwargs: object) -> int:
            raise OSError(30, "Read-only file system")

        with monkeypatch.context() as patched:
            for name in ("open", "replace", "utime", "unlink"):
                patched.setattr(os, name, refuse)
            stored = found(space, hashes)
            stored.used_s = 0.0
            store.touch(space, [stored])
            store.write(space, extent_of(hashes, 4, 8))
            store.collect()
            store.flush()
            assert store.read(space, stored).result() == extent_of(hashes, 0, 4)
        assert (store.counts.num_failed, store.is_paused) == (1, True)


@pytest.fixture
def unwritable(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the system refuses to write; tests may run as a user who may do everything."""
    place.mkdir(mode=0o700)

    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    return place


def test_a_folder_without_rights_is_an_error_that_names_it(unwritable: Path) -> None:
    with pytest.raises(EngineError, match=f"{unwritable} cannot be written: Permission denied"):
        folder_of(unwritable).space(ABOUT)


def test_a_folder_that_others_may_read_is_refused(place: Path) -> None:
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    with pytest.raises(EngineError, match="chmod 700"):
        folder_of(place)


def test_a_folder_below_a_file_is_an_error(place: Path) -> None:
    place.write_bytes(b"")
    with pytest.raises(EngineError, match="cannot be written"):
        folder_of(place / "below")


def test_a_full_disk_pauses_writing_and_fails_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_store(place) as store:
        space, hashes = store.folder.space(ABOUT), chain(1)
        store.flush()

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", full)
            store.write(space, extent_of(hashes, 0, 4))
            store.flush()
        assert store.is_paused
        store.write(space, extent_of(hashes, 4, 8))
        store.flush()
        assert (store.counts.num_failed, store.counts.num_dropped) == (1, 1)
        assert not [*place.glob("*/*.kv"), *place.glob("*/.*.part")]
        assert not stored_files(place)


def test_what_the_memory_has_no_room_for_is_dropped(place: Path) -> None:
    with opened_store(place, most_queued_bytes=0) as store:
        space = store.folder.space(ABOUT)
        store.write(space, extent_of(chain(1), 0, 4))
        assert store.counts.num_dropped == 1


def test_a_damaged_extent_is_counted_and_read_as_none(place: Path) -> None:
    with opened_store(place) as store:
        space, hashes = store.folder.space(ABOUT), chain(1)
        store.write(space, extent_of(hashes, 0, 4))
        store.flush()
        stored = found(space, hashes)
        assert store.read(space, stored).result() == extent_of(hashes, 0, 4)
        (space.folder / stored.file_name).write_bytes(b"garbage")
        assert store.read(space, stored).result() is None
        assert store.read(space, stored).result() is None  # it is gone now
        assert store.counts.num_damaged == 1


def test_a_store_can_be_read_by_two_engines_at_once(place: Path) -> None:
    with opened_store(place) as one:
        space = one.folder.space(ABOUT)
        one.write(space, extent_of(chain(1), 0, 4))
        one.flush()
        with opened_store(place) as other:
            shared = other.folder.space(ABOUT)
            assert other.read(shared, found(shared, chain(1))).result() is not None
            assert isinstance(other, ExtentStore)


def test_a_key_is_made_once_and_must_be_private(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "kv.key"
    key = read_key(path)
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path) == key
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    with pytest.raises(EngineError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(EngineError, match="no key of 32 bytes"):
        read_key(path)
    with pytest.raises(EngineError, match="cannot be read or made"):
        read_key(path / "below")


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_kills", [8, 50, pytest.param(1000, marks=pytest.mark.long)])
def test_processes_that_are_killed_leave_nothing_that_could_be_used_or_is_too_much(
    place: Path, num_kills: int
) -> None:
    """Two at a time in one folder write and read, killed anywhere."""
    found = killed_writer.kill(place, num_kills=num_kills, seed=5, timeout_s=600)
    assert (found["num_garbage"], found["num_damaged"], found["num_others_left"]) == (0, 0, 0)
    assert found["num_files"]
    # What one does not know of the other's is found at the next look around.
    assert found["num_bytes"] <= 1.2 * found["budget_bytes"]
    assert found["num_bytes_counted_later"] == found["num_bytes_later"] <= found["budget_bytes"]
