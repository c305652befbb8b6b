"""A folder of extents on a disk: private, sealed, bounded, and shared by the engines of a machine.

    FOLDER/v1-FINGERPRINT/about.json      the model, and what computing a token of it takes
    FOLDER/v1-FINGERPRINT/b-32-CODES.kv   blocks of a text from number 32 on, a code for each
    FOLDER/v1-FINGERPRINT/w-32-CODES.kv   the same with the keys of windowed layers
    FOLDER/v1-FINGERPRINT/s-63-CODE.kv    the state of recurrent layers behind block 63
    FOLDER/v1-FINGERPRINT/p-CODE.pin      a named prompt, whose extents stay (pin_files.py)

A file is written under another name first, so one that is there is whole. Its time of change is
that of its last use. Files and folders with other names are left alone. Whoever has another model
or version has another folder, and sees this one's files only as bytes that count.
"""

import contextlib
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from outrider.engine.cache.extent_space import (
    PART_SUFFIX,
    SPACE_PREFIX,
    About,
    ExtentSpace,
    StoredExtent,
    read_about,
    read_extent,
    stored_extents,
)
from outrider.engine.cache.extents import Extent, ExtentError
from outrider.engine.cache.pin_files import pinned_codes
from outrider.engine.cache.sealing import Seal
from outrider.engine.errors import EngineError

_FILLED: Final = 0.9  # of the budget is kept when there is no room
_PART_LIFE_S: Final = 60.0  # no write takes longer
_AHEAD_S: Final = 3600.0  # so far, clocks of one machine do not differ
_HALF_LIFE_S: Final = 60.0  # so old, a text returns half as likely as a new one
_DEPTH_WEIGHT: Final = 1e-5  # of two equals the one nearer to its text's beginning is worth more
_OVERHEAD_BYTES: Final = 16 * 2**10  # of a file beside its payload, at most


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
        self.names_key = seal.names_key
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
        """Return the space of a fingerprint, which is made where it is not there.

        What computing a token takes is known from earlier engines, if there were any.
        """
        folder = self.folder / (SPACE_PREFIX + about.fingerprint)
        about = replace(about, row_s=read_about(folder).row_s)
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
        now_s, num_removed, total = self._clock(), 0, 0
        files: list[tuple[float, ExtentSpace | Path, StoredExtent]] = []
        for folder in space_folders(self.folder):
            space = self._spaces.get(folder.name)
            about = read_about(folder) if space is None else space.about
            total += remove_parts(folder, now_s)
            pinned = pinned_codes(folder, now_s)
            found = stored_extents(folder, pauses=True)
            for each in found if space is None else space.scan(pauses=True):
                if pinned and any(
                    each.code(index) in pinned for index in range(each.first, each.end)
                ):
                    files.append((math.inf, space or folder, each))
                    continue
                if each.used_s > now_s + _AHEAD_S:
                    _touch(space or folder, each, now_s)
                if now_s - each.used_s > self._ttl_s:
                    _remove(space or folder, each)
                    num_removed += 1
                else:
                    files.append((value_of(each, about, now_s), space or folder, each))
        total += sum(each.num_bytes for _, _, each in files)
        if total + num_bytes > self._budget_bytes:
            room = int(self._budget_bytes * _FILLED) - num_bytes
            for value, place, each in sorted(files, key=lambda file: file[0]):
                if total <= room or value == math.inf:
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
    # The root of the uses: else what was popular once would stay for good.
    chance = math.sqrt(1 + stored.num_uses) / (1 + age_s / _HALF_LIFE_S)
    depth = 1 / (1 + _DEPTH_WEIGHT * stored.first)
    return saved_s / max(stored.num_bytes, 1) * chance * depth


def space_folders(folder: Path) -> list[Path]:
    """Return the folders of this version's spaces."""
    return sorted(
        each for each in folder.iterdir() if each.name.startswith(SPACE_PREFIX) and each.is_dir()
    )


def other_files(folder: Path) -> list[Path]:
    """Return what lies in the folder and is no space of this version: it is left alone."""
    ours = set(space_folders(folder))
    return sorted(each for each in folder.iterdir() if each not in ours)


def check_extents(folder: Path, seal: Seal) -> Iterator[tuple[Path, ExtentError | OSError | None]]:
    """Read all files of all spaces; yield each with what is wrong with it. Nothing is removed."""
    for space in space_folders(folder):
        for stored in sorted(stored_extents(space), key=lambda each: each.file_name):
            try:
                read_extent(space, stored, seal)
            except (ExtentError, OSError) as error:
                yield space / stored.file_name, error
            else:
                yield space / stored.file_name, None


def remove_parts(folder: Path, now_s: float) -> int:
    """Remove what writers left behind that were killed; return the bytes of those left."""
    num_bytes = 0
    for part in folder.glob(f".*{PART_SUFFIX}"):
        with contextlib.suppress(OSError):
            found = part.stat()
            if abs(now_s - found.st_mtime) > _PART_LIFE_S:
                part.unlink()
            else:
                num_bytes += found.st_size
    return num_bytes


def _touch(place: ExtentSpace | Path, stored: StoredExtent, now_s: float) -> None:
    """Have a file that a clock dated ahead count as used now, or it would never expire."""
    stored.used_s = now_s
    folder = place.folder if isinstance(place, ExtentSpace) else place
    with contextlib.suppress(OSError):
        os.utime(folder / stored.file_name, (now_s, now_s))


def _remove(place: ExtentSpace | Path, stored: StoredExtent) -> None:
    if isinstance(place, ExtentSpace):
        place.remove(stored)
        return
    with contextlib.suppress(OSError):
        (place / stored.file_name).unlink()
