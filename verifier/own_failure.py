"""Contains failures of one request's own rules, grammar, guesses or trace to that request."""

import logging
from types import TracebackType

from outrider.verifier.judged import JudgedSequence

logger = logging.getLogger(__name__)


class OwnFailure:
    """Record what fails inside as a sequence's own failure, so that the step goes on without it.

    To be put around host code that runs for one sequence and follows values which a client chose.
    The sequence keeps its place in the pass, whose shape is planned; nothing of it is emitted, and
    `Engine` ends it with `Failed`. MemoryError is no request's own: it leaves the step.
    """

    __slots__ = ("_sequence",)

    def __init__(self, sequence: JudgedSequence) -> None:
        self._sequence = sequence

    def __enter__(self) -> None:
        """Enter the block; nothing is needed before it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Keep the first failure; True swallows the exception."""
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return False
        if self._sequence.failure is None:
            self._sequence.failure = error
        logger.warning(
            "request failed alone request_id=%s error=%s",
            self._sequence.request_id,
            type(error).__name__,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
        return True
