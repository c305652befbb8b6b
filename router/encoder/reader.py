"""Reads prompts on a thread of its own, beside the small model's prefill."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Final

from outrider.router.encoder.bert import EncoderError
from outrider.router.encoder.neighbours import Neighbours
from outrider.router.encoder.sentence import SentenceEncoder
from outrider.router.features import FloatRows

logger = logging.getLogger(__name__)

# Prompts behind it would wait longer than their small model's prefill; they do without.
_MAX_WAITING: Final = 8

PendingShares = Future[FloatRows | None]
"""What a prompt's neighbours say, [num_heads]; None where the prompt is judged without them."""


class PromptReader:
    """Takes prompts on the event loop and never blocks it."""

    def __init__(self, encoder: SentenceEncoder, neighbours: Neighbours) -> None:
        self._encoder = encoder
        self._neighbours = neighbours
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sentence-encoder")
        self._places = BoundedSemaphore(_MAX_WAITING)

    def submit(self, text: str) -> PendingShares:
        """Begin to read a prompt; where too many wait, the result is None at once."""
        if not self._places.acquire(blocking=False):
            return without_shares()
        return self._pool.submit(self._read, text)

    def _read(self, text: str) -> FloatRows | None:
        try:
            shares: FloatRows = self._neighbours.shares(self._encoder.embed(text)[None])[0]
        except EncoderError as error:
            logger.warning("a prompt is judged without its embedding reason=%s", error)
            return None
        finally:
            self._places.release()
        return shares


def without_shares() -> PendingShares:
    """Return a result that is there and None."""
    done: PendingShares = Future()
    done.set_result(None)
    return done


def once(reader: PromptReader | None, text: str) -> Callable[[], PendingShares]:
    """Return a function that begins to read a text when it is first called, and only then."""
    begun: list[PendingShares] = []

    def pending() -> PendingShares:
        if not begun:
            begun.append(without_shares() if reader is None else reader.submit(text))
        return begun[0]

    return pending
