"""One model's extents in a folder on a disk: named, sealed, and looked up by hashes."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.engine.cache.block_pool import BlockHash
from outrider.engine.cache.extents import (
    EXTENT_VERSION,
    MOST_BLOCKS,
    Extent,
    ExtentError,
    ExtentKind,
    pack_extent,
    unpack_extent,
)
from outrider.engine.cache.sealing import CODE_SIZE, Seal

SPACE_PREFIX: Final = f"v{EXTENT_VERSION}-"
PART_SUFFIX: Final = ".part"
_ABOUT: Final = "about.json"
_SUFFIX: Final = ".kv"
_LETTER_OF: Final[Mapping[ExtentKind, str]] = {"blocks": "b", "windowed": "w", "state": "s"}
_LETTERS: Final = frozenset(_LETTER_OF.values())
_UNKNOWN_ROW_S: Final = 1e-3
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
    def key(self) -> str:
        """Return its key in an index: that of its first block."""
        return self.letter + self.codes[:CODE_SIZE]

    def code(self, index: int) -> str:
        """Return the code of the block of that index in the text."""
        place = (index - self.first) * CODE_SIZE
        return self.codes[place : place + CODE_SIZE]


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
        self._gone: set[str] = set()  # of the files, since they were looked at
        self._index: dict[str, StoredExtent] = {}  # of those that begin alike, the longest
        self._letters = set[str]()  # of all files
        self.num_changes = 0
        """Of its files, as far as they are known: goes up with each."""
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
        self._gone = set()
        known, index = self._files, dict[str, StoredExtent]()
        found = {each.file_name: each for each in stored_extents(self.folder, pauses=pauses)}
        for each in found.values():
            if (old := known.get(each.file_name)) is not None:
                each.num_uses = old.num_uses
            _add(index, each)
        self._files, self._index = found, index
        self._letters = {each.letter for each in found.values()}
        self.num_changes += found.keys() != known.keys()
        for name in self._gone & found.keys():  # while this looked
            self._forget(found[name])
        return list(found.values())

    def match(self, hashes: Sequence[BlockHash], start: int) -> tuple[StoredExtent, int] | None:
        """Return an extent that has block `start` of a text, and the index behind which they part.

        One with windowed keys, if there is one.
        """
        for letter in (each for each in "wb" if each in self._letters):
            for first in range(start, max(start - MOST_BLOCKS, -1), -1):
                stored = self._index.get(letter + self._seal.code(hashes[first]))
                if stored is not None and stored.first == first:
                    end = self._end_of(stored, hashes, start)
                    if end > start:
                        return stored, end
        return None

    def _end_of(self, stored: StoredExtent, hashes: Sequence[BlockHash], start: int) -> int:
        """Return the index behind which a text parts from an extent, looked at from `start` on."""
        end = start
        while end < min(stored.end, len(hashes)) and (
            stored.code(end) == self._seal.code(hashes[end])
        ):
            end += 1
        return end

    def state(self, block_hash: BlockHash) -> StoredExtent | None:
        """Return the state of recurrent layers behind a block."""
        return self._index.get(f"s{self._seal.code(block_hash)}")

    def __len__(self) -> int:
        """Count the extents that are known."""
        return len(self._files)

    def file_names(self) -> list[str]:
        """Return the names of the extents that are known."""
        return list(self._files)

    @staticmethod
    def codes_of(file_name: str) -> str:
        """Return the codes of an extent's blocks, joined."""
        return file_name.removesuffix(_SUFFIX).rpartition("-")[2]

    def write(self, extent: Extent) -> int:
        """Write an extent; returns its file's size. Raises OSError."""
        header = extent.header
        codes = "".join(map(self._seal.code, header.hashes))
        file_name = f"{_LETTER_OF[header.kind]}-{header.first}-{codes}{_SUFFIX}"
        sealed = self._seal.seal(pack_extent(extent), _context(self.folder, file_name))
        self._replace(file_name, sealed)
        stored = StoredExtent(file_name=file_name, num_bytes=len(sealed), used_s=self._clock())
        self._files[file_name] = stored
        self._letters.add(stored.letter)
        self.num_changes += 1
        _add(self._index, stored)
        return len(sealed)

    def read(self, stored: StoredExtent) -> Extent:
        """Return an extent. Raises OSError, and ExtentError for one that is not what was written.

        Such a file is removed: what it should hold will be written again.
        """
        try:
            return read_extent(self.folder, stored, self._seal)
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

    def code(self, block_hash: BlockHash) -> str:
        """Return what stands for a hash in names of files."""
        return self._seal.code(block_hash)

    def write_note(self, file_name: str, clear: bytes, secret: bytes) -> None:
        """Write a file beside the extents: a line for everyone, then what is sealed with it.

        Raises OSError.
        """
        sealed = self._seal.seal(secret, self._note_context(file_name, clear))
        self._replace(file_name, clear + b"\n" + sealed)

    def read_note(self, file_name: str) -> tuple[bytes, bytes]:
        """Return both parts. Raises OSError, and ExtentError for what was not written so."""
        clear, _, sealed = (self.folder / file_name).read_bytes().partition(b"\n")
        return clear, self._seal.open(sealed, self._note_context(file_name, clear))

    def _note_context(self, file_name: str, clear: bytes) -> str:
        return f"{_context(self.folder, file_name)}:{clear.hex()}"

    def _forget(self, stored: StoredExtent) -> None:
        self._gone.add(stored.file_name)
        self._files.pop(stored.file_name, None)
        self.num_changes += 1
        found = self._index.get(stored.key)  # perhaps as it was seen since
        if found is not None and found.file_name == stored.file_name:
            del self._index[stored.key]

    def _replace(self, file_name: str, content: bytes) -> None:
        """Write a file that others see whole or not at all."""
        part = self.folder / f".{os.getpid()}-{id(self):x}-{next(self._numbers)}{PART_SUFFIX}"
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


def read_about(folder: Path) -> About:
    """Return what a space is of; what its file does not say is unknown."""
    fingerprint = folder.name.removeprefix(SPACE_PREFIX)
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


def read_extent(folder: Path, stored: StoredExtent, seal: Seal) -> Extent:
    """Return the extent in a file. Raises OSError, and ExtentError where it is not as written."""
    with (folder / stored.file_name).open("rb") as file:
        sealed = file.read(stored.num_bytes + 1)
    opened = seal.open(sealed, _context(folder, stored.file_name))
    return unpack_extent(opened, is_opened=True)


def _add(index: dict[str, StoredExtent], stored: StoredExtent) -> None:
    known = index.get(stored.key)
    if known is None or known.end <= stored.end:
        index[stored.key] = stored


def _context(folder: Path, file_name: str) -> str:
    """Return what a file is sealed for: it is opened in its place only."""
    return f"{folder.name}/{file_name}"
