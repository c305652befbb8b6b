"""Completions in the words of llama.cpp's /infill."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.http.apis.api import EVENT_STREAM
from outrider.gateway.http.apis.chat_chunks import (
    ChatChunkParser,
    ChatPiece,
    ChatUsage,
    read_completion,
)
from outrider.gateway.http.apis.events import one_line
from outrider.gateway.http.apis.infill.answers import InfillAnswer, InfillTimings, StopType


class InfillWriter:
    """Writes one answer. Use once."""

    media_type: Final = EVENT_STREAM

    def __init__(self, model: str, *, clock: Callable[[], float]) -> None:
        """`model`: as the request names it. `clock`: monotonic."""
        self._model = model
        self._clock = clock
        self._begin_s = clock()
        self._first_s: float | None = None
        self._reader = ChatChunkParser()
        self._finish_reason: str | None = None
        self._stop: str | None = None
        self._usage = ChatUsage()
        self._report: msgspec.Raw | None = None

    def part(self, part: bytes) -> bytes:
        """Whole events of a stream as events. Raises GenerationError."""
        return b"".join([self._written(piece) for piece in self._reader.read(part)])

    def whole(self, body: bytes) -> bytes:
        """A completion."""
        piece = read_completion(body)
        self._remember(piece)
        return one_line(self._last(piece.content))

    def ending_badly(self, problem: Problem, delivered: DeliveredReport | None) -> bytes:
        """The last event of a stream that broke off."""
        error = {"code": problem.status, "message": problem.message, "type": problem.type}
        return _event({"error": error, "outrider": delivered})

    def _written(self, piece: ChatPiece) -> bytes:
        if piece.comment:
            return piece.comment
        if piece.is_done:
            return _event(self._last(""))
        self._remember(piece)
        if not piece.content:
            return b""
        return _event(InfillAnswer(index=0, content=piece.content, stop=False, model=self._model))

    def _remember(self, piece: ChatPiece) -> None:
        """Keep what the end reports."""
        self._model = piece.model or self._model
        if self._first_s is None and piece.content:
            self._first_s = self._clock()
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._stop = piece.stop or self._stop
        self._usage = piece.usage or self._usage
        self._report = piece.report or self._report

    def _last(self, content: str) -> InfillAnswer:
        usage = self._usage
        return InfillAnswer(
            index=0,
            content=content,
            stop=True,
            model=self._model,
            tokens_predicted=usage.num_completion_tokens,
            tokens_evaluated=usage.num_prompt_tokens,
            tokens_cached=usage.num_cached_tokens,
            truncated=False,
            stop_type=self._stop_type(),
            stopping_word=self._stop or "",
            timings=self._timings(),
            outrider=self._report,
        )

    def _stop_type(self) -> StopType:
        if self._finish_reason == "length":
            return "limit"
        return "word" if self._stop else "eos"

    def _timings(self) -> InfillTimings:
        now_s, usage = self._clock(), self._usage
        first_s = now_s if self._first_s is None else self._first_s
        num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
        return InfillTimings(
            **_pace("prompt", num_computed, first_s - self._begin_s),
            **_pace("predicted", usage.num_completion_tokens, now_s - first_s),
        )


def _pace(name: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / num_tokens if num_tokens else None,
        f"{name}_per_second": num_tokens / seconds if seconds > 0 else None,
    }


def _event(document: object) -> bytes:
    return b"data: " + one_line(document) + b"\n\n"
