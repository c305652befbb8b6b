"""The folder that files lie in: written beside their place, then moved there."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

_PARTS: Final = "parts"
_OLD_S: Final = 86_400.0
"""Age at which a file that nothing speaks of was left by a process that was killed."""


class FileFolder:
    """Files by id, for their owner alone (0600). Blocks: in an event loop, use a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        """Make the folder. Raises OSError."""
        (self.folder / _PARTS).mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        """Return where a file of the database lies."""
        return self.folder / file_id

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Path, BinaryIO]]:
        """Open a new file that is deleted unless it is moved away."""
        part = self.folder / _PARTS / secrets.token_hex(16)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                yield part, file
        finally:
            part.unlink(missing_ok=True)

    def put(self, part: Path, file_id: str) -> None:
        """Move a file that is written to its place. One of the same id is replaced."""
        part.replace(self.path(file_id))

    def remove(self, file_id: str) -> None:
        """Delete a file, if it is there."""
        self.path(file_id).unlink(missing_ok=True)

    def left_over(self, now_s: float) -> Iterator[Path]:
        """Yield files that are old enough to be nobody's, if the database has them not either."""
        for path in (*self.folder.iterdir(), *(self.folder / _PARTS).iterdir()):
            with contextlib.suppress(OSError):
                if path.is_file() and now_s - path.stat().st_mtime > _OLD_S:
                    yield path
