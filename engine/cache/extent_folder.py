"""A folder of extents on a disk: private, sealed, bounded, and shared by the engines of a machine.

    FOLDER/v1-FINGERPRINT/about.json      the model, and what computing a token of it takes
    FOLDER/v1-FINGERPRINT/b-32-CODES.kv   blocks of a text from number 32 on, a code for each
    FOLDER/v1-FINGERPRINT/w-32-CODES.kv   the same with the keys of windowed layers
    FOLDER/v1-FINGERPRINT/s-63-CODE.kv    the state of recurrent layers behind block 63

A file is written under another name first, so one that is there is whole. Its time of change is
that of its last use. Files and folders with other names are left alone. Whoever has another model
or version has another folder, and sees this one's files only as bytes that count.
"""

import contextlib
import itertools
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.engine.cache.block_pool import BlockHash
from outrider.engine.cache.extents import (
    EXTENT_VERSION,
    Extent,
    ExtentError,
    ExtentKind,
    pack_extent,
    unpack_extent,
)
from outrider.engine.cache.sealing import CODE_SIZE, Seal
from outrider.engine.errors import EngineError

_SPACE_PREFIX: Final = f"v{EXTENT_VERSION}-"
_ABOUT: Final = "about.json"
_SUFFIX, _PART_SUFFIX = ".kv", ".part"
_LETTER_OF: Final[Mapping[ExtentKind, str]] = {"blocks": "b", "windowed": "w", "state": "s"}
_LETTERS: Final = frozenset(_LETTER_OF.values())
_FILLED: Final = 0.9  # of the budget is kept when there is no room
_PART_LIFE_S: Final = 60.0  # no write takes longer
_HALF_LIFE_S: Final = 3600.0  # so old, a text returns half as likely as a new one
_DEPTH_WEIGHT: Final = 1e-5  # of two equals the one nearer to its text's beginning is worth more
_UNKNOWN_ROW_S: Final = 1e-3
_OVERHEAD_BYTES: Final = 16 * 2**10  # of a file beside its payload, at most
_BREATH: Final = 500  # files between two pauses, in which the engine's steps get on


@dataclass(slots=True, kw_only=True)
class StoredExtent:
    """A file of a space."""

    file_name: str
    num_bytes: int
    used_s: float
    """Seconds since 1970 of its last use."""
    num_uses: int = 0
    """Since this process knows it."""
    letter: str = field(init=False)
    """b: blocks, w: with windowed keys, s: a state."""
    first: int = field(init=False)
    """The index of its first block."""
    codes: str = field(init=False)
    """Those of its blocks' hashes."""

    def __post_init__(self) -> None:
        """Read the name. Raises ValueError for one that is none of ours."""
        stem, self.letter = self.file_name.removesuffix(_SUFFIX), self.file_name[:1]
        _, first, self.codes = stem.split("-")
        self.first = int(first)
        if self.letter not in _LETTERS or not self.codes or len(self.codes) % CODE_SIZE:
            raise ValueError(self.file_name)

    @property
    def end(self) -> int:
        """The index behind its last block."""
        return self.first + len(self.codes) // CODE_SIZE

    @property
    def keys(self) -> list[str]:
        """Return its keys in an index: one for each block."""
        places = range(0, len(self.codes), CODE_SIZE)
        return [self.letter + self.codes[place : place + CODE_SIZE] for place in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the extents of a space are of."""

    model: str
    fingerprint: str
    block_size: int = 16
    row_s: float = _UNKNOWN_ROW_S
    """Seconds that computing a token takes."""


class ExtentSpace:
    """The extents of one fingerprint. Several threads may use it."""

    def __init__(self, folder: Path, seal: Seal, about: About, clock: Callable[[], float]) -> None:
        """Raise OSError where the folder cannot be made or written."""
        self.folder = folder
        self.about = about
        self._seal = seal
        self._clock = clock
        self._files: dict[str, StoredExtent] = {}
        self._index: dict[str, StoredExtent] = {}  # by the letter and code of each block
        self._numbers = itertools.count()
        folder.mkdir(mode=0o700, exist_ok=True)
        self.write_about()

    def write_about(self) -> None:
        """Write what the space is of, for `outrider cache` and other engines."""
        about = self.about
        fields = {"model": about.model, "block_size": about.block_size, "row_s": about.row_s}
        self._replace(_ABOUT, json.dumps(fields).encode())

    def scan(self, *, pauses: bool = False) -> list[StoredExtent]:
        """Look at the files that are there, others' too; return them.

        `pauses`: beside an engine's steps.
        """
        known, index = self._files, dict[str, StoredExtent]()
        found = {each.file_name: each for each in stored_extents(self.folder, pauses=pauses)}
        for each in found.values():
            if (old := known.get(each.file_name)) is not None:
                each.num_uses = old.num_uses
            index.update(dict.fromkeys(each.keys, each))
        self._files, self._index = found, index
        return list(found.values())

    def match(self, hashes: Sequence[BlockHash], start: int) -> tuple[StoredExtent, int] | None:
        """Return an extent that has block `start` of a text, and the index behind which they part.

        One with windowed keys, if there is one.
        """
        code = self._seal.code(hashes[start])
        stored = self._index.get(f"w{code}") or self._index.get(f"b{code}")
        if stored is None or not stored.first <= start < stored.end:
            return None
        end = start
        while end < min(stored.end, len(hashes)):
            place = (end - stored.first) * CODE_SIZE
            if stored.codes[place : place + CODE_SIZE] != self._seal.code(hashes[end]):
                break
            end += 1
        return (stored, end) if end > start else None

    def state(self, block_hash: BlockHash) -> StoredExtent | None:
        """Return the state of recurrent layers behind a block."""
        return self._index.get(f"s{self._seal.code(block_hash)}")

    def __len__(self) -> int:
        """Count the extents that are known."""
        return len(self._files)

    def write(self, extent: Extent) -> int:
        """Write an extent; returns its file's size. Raises OSError."""
        header = extent.header
        codes = "".join(map(self._seal.code, header.hashes))
        file_name = f"{_LETTER_OF[header.kind]}-{header.first}-{codes}{_SUFFIX}"
        sealed = self._seal.seal(pack_extent(extent), _context(self.folder, file_name))
        self._replace(file_name, sealed)
        stored = StoredExtent(file_name=file_name, num_bytes=len(sealed), used_s=self._clock())
        self._files[file_name] = stored
        self._index.update(dict.fromkeys(stored.keys, stored))
        return len(sealed)

    def read(self, stored: StoredExtent) -> Extent:
        """Return an extent. Raises OSError, and ExtentError for one that is not what was written.

        Such a file is removed: what it should hold will be written again.
        """
        try:
            return _read(self.folder, stored, self._seal)
        except FileNotFoundError:
            self._forget(stored)
            raise
        except ExtentError:
            self.remove(stored)
            raise

    def touch(self, stored: StoredExtent) -> None:
        """Note that a text of which the extent is was used."""
        stored.used_s, stored.num_uses = self._clock(), stored.num_uses + 1
        with contextlib.suppress(OSError):
            os.utime(self.folder / stored.file_name, (stored.used_s, stored.used_s))

    def remove(self, stored: StoredExtent) -> None:
        """Remove a file, if it is there still."""
        with contextlib.suppress(OSError):
            (self.folder / stored.file_name).unlink()
        self._forget(stored)

    def _forget(self, stored: StoredExtent) -> None:
        self._files.pop(stored.file_name, None)
        for key in stored.keys:
            if self._index.get(key) is stored:
                del self._index[key]

    def _replace(self, file_name: str, content: bytes) -> None:
        """Write a file that others see whole or not at all."""
        part = self.folder / f".{os.getpid()}-{id(self):x}-{next(self._numbers)}{_PART_SUFFIX}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            now_s = self._clock()
            os.utime(part, (now_s, now_s))
            os.replace(part, self.folder / file_name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


class ExtentFolder:
    """All spaces of a folder, under one budget."""

    def __init__(
        self,
        folder: Path,
        *,
        seal: Seal,
        budget_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raise EngineError for a folder that cannot be written, or that others can read."""
        self.folder = folder
        self.num_bytes = 0
        """Bytes of all extents, as far as they are known."""
        self._seal = seal
        self._budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._spaces: dict[str, ExtentSpace] = {}
        self._new_bytes = 0  # since all files were looked at
        with self._checked():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if stat.S_IMODE(folder.stat().st_mode) & 0o077:
                raise EngineError(
                    f"engine.kv_folder: others can look into {folder}, and keys and values say "
                    f"what prompts were: chmod 700 {folder}"
                )

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"engine.kv_folder: {self.folder} cannot be written: {error.strerror}."
            ) from error

    def space(self, about: About) -> ExtentSpace:
        """Return the space of a fingerprint, which is made where it is not there."""
        folder = self.folder / (_SPACE_PREFIX + about.fingerprint)
        with self._checked():
            space = ExtentSpace(folder, self._seal, about, self._clock)
        self._spaces[folder.name] = space
        self.num_bytes += sum(each.num_bytes for each in space.scan())
        return space

    def write(self, space: ExtentSpace, extent: Extent) -> bool:
        """Write an extent where the budget has room for it, or gets some. Raises OSError."""
        most_bytes = extent.num_bytes + _OVERHEAD_BYTES
        self._look_around(most_bytes)
        if self.num_bytes + most_bytes > self._budget_bytes:
            return False
        size = space.write(extent)
        self.num_bytes += size
        self._new_bytes += size
        return True

    def _look_around(self, num_bytes: int) -> None:
        """Collect where the budget is full, and now and then: others write here, too."""
        is_full = self.num_bytes + num_bytes > self._budget_bytes
        if is_full or self._new_bytes > self._budget_bytes // 20:
            self.collect(num_bytes)

    def collect(self, num_bytes: int = 0) -> int:
        """Remove what has expired, then the least valuable, until there is room; count it."""
        now_s, num_removed = self._clock(), 0
        files: list[tuple[float, ExtentSpace | Path, StoredExtent]] = []
        for folder in space_folders(self.folder):
            space = self._spaces.get(folder.name)
            about = read_about(folder) if space is None else space.about
            remove_parts(folder, now_s)
            found = stored_extents(folder, pauses=True)
            for each in found if space is None else space.scan(pauses=True):
                if now_s - each.used_s > self._ttl_s:
                    _remove(space or folder, each)
                    num_removed += 1
                else:
                    files.append((value_of(each, about, now_s), space or folder, each))
        total = sum(each.num_bytes for _, _, each in files)
        if total + num_bytes > self._budget_bytes:
            room = int(self._budget_bytes * _FILLED) - num_bytes
            for _, place, each in sorted(files, key=lambda file: file[0]):
                if total <= room:
                    break
                _remove(place, each)
                total -= each.num_bytes
                num_removed += 1
        self.num_bytes, self._new_bytes = total, 0
        return num_removed


def value_of(stored: StoredExtent, about: About, now_s: float) -> float:
    """Return the seconds of computing that a byte saves, times the chance that it is wanted.

    A text returns the less likely the longer it was not used, and the likelier the more often it
    was. A state makes all blocks before it usable.
    """
    num_blocks = stored.end - (0 if stored.letter == "s" else stored.first)
    saved_s = num_blocks * about.block_size * about.row_s
    age_s = max(now_s - stored.used_s, 0.0)
    chance = (1 + stored.num_uses) / (1 + age_s / _HALF_LIFE_S)
    depth = 1 / (1 + _DEPTH_WEIGHT * stored.first)
    return saved_s / max(stored.num_bytes, 1) * chance * depth


def space_folders(folder: Path) -> list[Path]:
    """Return the folders of this version's spaces."""
    return sorted(
        each for each in folder.iterdir() if each.name.startswith(_SPACE_PREFIX) and each.is_dir()
    )


def other_files(folder: Path) -> list[Path]:
    """Return what lies in the folder and is no space of this version: it is left alone."""
    ours = set(space_folders(folder))
    return sorted(each for each in folder.iterdir() if each not in ours)


def read_about(folder: Path) -> About:
    """Return what a space is of; what its file does not say is unknown."""
    fingerprint = folder.name.removeprefix(_SPACE_PREFIX)
    try:
        fields: dict[str, Any] = json.loads((folder / _ABOUT).read_bytes())
        return About(
            model=str(fields["model"]),
            fingerprint=fingerprint,
            block_size=int(fields["block_size"]),
            row_s=float(fields["row_s"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return About(model="unknown", fingerprint=fingerprint)


def stored_extents(folder: Path, *, pauses: bool = False) -> Iterator[StoredExtent]:
    """Yield the extents of a space, from its files' names, sizes and times."""
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries, start=1):
            if pauses and number % _BREATH == 0:
                time.sleep(0.0005)
            if not entry.name.endswith(_SUFFIX):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
                yield StoredExtent(
                    file_name=entry.name, num_bytes=found.st_size, used_s=found.st_mtime
                )
            except (ValueError, OSError):  # none of ours, or gone meanwhile
                continue


def check_extents(folder: Path, seal: Seal) -> Iterator[tuple[Path, ExtentError | OSError | None]]:
    """Read all files of all spaces; yield each with what is wrong with it. Nothing is removed."""
    for space in space_folders(folder):
        for stored in sorted(stored_extents(space), key=lambda each: each.file_name):
            try:
                _read(space, stored, seal)
            except (ExtentError, OSError) as error:
                yield space / stored.file_name, error
            else:
                yield space / stored.file_name, None


def _read(folder: Path, stored: StoredExtent, seal: Seal) -> Extent:
    with (folder / stored.file_name).open("rb") as file:
        sealed = file.read(stored.num_bytes + 1)
    return unpack_extent(seal.open(sealed, _context(folder, stored.file_name)))


def _context(folder: Path, file_name: str) -> str:
    """Return what a file is sealed for: it is opened in its place only."""
    return f"{folder.name}/{file_name}"


def remove_parts(folder: Path, now_s: float) -> None:
    """Remove what writers left behind that were killed."""
    for part in folder.glob(f".*{_PART_SUFFIX}"):
        with contextlib.suppress(OSError):
            if now_s - part.stat().st_mtime > _PART_LIFE_S:
                part.unlink()


def _remove(place: ExtentSpace | Path, stored: StoredExtent) -> None:
    if isinstance(place, ExtentSpace):
        place.remove(stored)
        return
    with contextlib.suppress(OSError):
        (place / stored.file_name).unlink()
