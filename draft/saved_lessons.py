"""Where guesses do not pay, kept on disk beside pass times, for the next start.

No seconds are kept: a busy minute makes all steps longer, plain ones too.
Written by a thread of its own, and only where something changed. A wrong file costs nothing but
what it would have spared: it is ignored, with a line in the log, and written anew.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Final

from outrider.draft.budget.step_choice import StepChoice
from outrider.engine.passes.saved_times import replace_file

logger = logging.getLogger(__name__)

_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20
_EVERY_S: Final = 60.0
# What comes of a file that cannot be read, or is of no drafter.
_WRONG: Final = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class SavedLessons:
    """The file of one drafter; its name says what it holds for."""

    def __init__(self, path: Path, choice: StepChoice) -> None:
        self._path = path
        self._choice = choice
        self._written = b""
        self._is_closed = Event()

    def recall(self) -> None:
        """Have the drafter begin with what an earlier one learnt, where that makes sense."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                raise ValueError("too long")
            saved = json.loads(data)
            if saved["version"] != _VERSION:
                raise ValueError("version")
            self._choice.recall(saved["groups"])
        except FileNotFoundError:
            return
        except _WRONG as error:
            logger.info("what drafting learnt earlier is ignored reason=%r", error)

    def save(self) -> None:
        """Keep what was learnt, if it changed and the folder can be written."""
        data = json.dumps({"version": _VERSION, "groups": self._choice.learnt()}).encode()
        if data == self._written:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, data)
            self._written = data
        except OSError as error:
            logger.info("what drafting has learnt is not kept reason=%s", error)

    def start(self, every_s: float = _EVERY_S) -> Callable[[], None]:
        """Save now and then from now on; return what ends that and saves once more."""
        Thread(target=self._save_on, args=(every_s,), name="lessons", daemon=True).start()
        return self._close

    def _save_on(self, every_s: float) -> None:
        while not self._is_closed.wait(every_s):
            self.save()

    def _close(self) -> None:
        self._is_closed.set()
        self.save()
