"""Embeds prompts on a thread of its own, beside the small model's prefill."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Final

from outrider.router.encoder.bert import EncoderError, Floats32
from outrider.router.encoder.sentence import SentenceEncoder

logger = logging.getLogger(__name__)

# Prompts behind it would wait longer than their small model's prefill; they do without.
_MAX_WAITING: Final = 8

PendingEmbedding = Future[Floats32 | None]
"""An embedding, [dimension]; None for a prompt that is judged without one."""


class Embedder:
    """Takes prompts on the event loop and never blocks it."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        self._encoder = encoder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sentence-encoder")
        self._places = BoundedSemaphore(_MAX_WAITING)

    def submit(self, text: str) -> PendingEmbedding:
        """Begin to embed a prompt; where too many wait, the result is None at once."""
        if not self._places.acquire(blocking=False):
            return without_embedding()
        return self._pool.submit(self._embed, text)

    def _embed(self, text: str) -> Floats32 | None:
        try:
            return self._encoder.embed(text)
        except EncoderError as error:
            logger.warning("a prompt is judged without its embedding reason=%s", error)
            return None
        finally:
            self._places.release()


def without_embedding() -> PendingEmbedding:
    """Return a result that is there and None."""
    done: PendingEmbedding = Future()
    done.set_result(None)
    return done


def once(embedder: Embedder | None, text: str) -> Callable[[], PendingEmbedding]:
    """Return a function that begins to embed a text when it is first called, and only then."""
    begun: list[PendingEmbedding] = []

    def pending() -> PendingEmbedding:
        if not begun:
            begun.append(without_embedding() if embedder is None else embedder.submit(text))
        return begun[0]

    return pending
