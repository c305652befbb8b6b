"""Files with a day in their names, of which old ones are deleted: `capture-2026-11-22.jsonl`."""

import contextlib
import logging
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

logger = logging.getLogger(__name__)


class DatedFiles:
    """The files of one name, a day each (UTC)."""

    def __init__(self, path: Path) -> None:
        """`path`: without the day, which stands in front of its ending."""
        self._path = path
        self._cleaned_on: date | None = None

    def at(self, moment_s: float) -> Path:
        """Return the file of a moment, in seconds since 1970."""
        day = datetime.fromtimestamp(moment_s, UTC).date()
        return self._path.with_name(f"{self._path.stem}-{day}{self._path.suffix}")

    def all(self) -> list[Path]:
        """Return those that are there, the oldest first."""
        return [path for path, _ in self._found()]

    def remove_old(self, now_s: float, days: int) -> None:
        """Delete those of days that are too long ago; once a day, and at first. Raises OSError."""
        today = datetime.fromtimestamp(now_s, UTC).date()
        if today == self._cleaned_on:
            return
        self._cleaned_on = today
        for path, day in self._found():
            if day < today - timedelta(days=days):
                path.unlink(missing_ok=True)
                logger.info("old file deleted file=%s", path.name)

    def _found(self) -> Iterator[tuple[Path, date]]:
        folder, stem, suffix = self._path.parent, f"{self._path.stem}-", self._path.suffix
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            told = path.name.removeprefix(stem).removesuffix(suffix)
            with contextlib.suppress(ValueError):
                day = date.fromisoformat(told)
                if path.name == f"{stem}{day}{suffix}":
                    yield path, day
