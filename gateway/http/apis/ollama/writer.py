"""Chat answers and completions in the words of Ollama's API: one JSON, or one a line."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.http.apis.chat_chunks import (
    CallPiece,
    ChatChunkParser,
    ChatPiece,
    ChatUsage,
    read_completion,
)
from outrider.gateway.http.apis.events import one_line
from outrider.gateway.http.apis.ollama.answers import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    DoneReason,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaError,
)

_NS: Final = 1_000_000_000
_decode: Final = msgspec.json.decode


class _Report(msgspec.Struct):
    ttft_s: float | None = None


def rfc3339(seconds: float) -> str:
    """Return a time since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter:
    """Writes one answer. `is_chat`: in messages, else as text."""

    media_type: Final = "application/x-ndjson"

    def __init__(
        self,
        model: str,
        *,
        is_chat: bool,
        shows_thinking: bool,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`model`: as the request names it. `clock`: monotonic, `wall_clock`: since 1970."""
        self._model = model
        self._is_chat = is_chat
        self._shows_thinking = shows_thinking
        self._clock = clock
        self._wall_clock = wall_clock
        self._begin_s = clock()
        self._first_s: float | None = None
        self._reader = ChatChunkParser()
        self._calls: dict[int, CallPiece] = {}
        self._finish_reason: str | None = None
        self._usage = ChatUsage()
        self._report: msgspec.Raw | None = None

    def part(self, part: bytes) -> bytes:
        """Whole events of a stream as lines. Raises GenerationError.

        This runs for each token of each client.
        """
        return b"".join([self._written(piece) for piece in self._reader.read(part)])

    def whole(self, body: bytes) -> bytes:
        """A chat completion, or a completion."""
        piece = read_completion(body)
        self._remember(piece)
        return self._line(piece, calls=piece.calls, **self._figures())

    def looked_up(self, reason: DoneReason) -> bytes:
        """The answer to a request that asks nothing."""
        return self._line(ChatPiece(model=self._model), done=True, done_reason=reason)

    def ending_badly(self, problem: Problem, delivered: DeliveredReport | None) -> bytes:
        """The last line of a stream that broke off."""
        return one_line(OllamaError(problem.message, delivered)) + b"\n"

    def _written(self, piece: ChatPiece) -> bytes:
        if piece.comment:
            return b""  # a line that is no JSON would end the client
        if piece.is_done:
            last = ChatPiece(model=self._model)
            return self._whole_calls() + self._line(last, **self._figures()) + b"\n"
        self._remember(piece)
        out = b""
        for call in piece.calls:
            out += self._whole_calls(but=call.index) + self._gather(call)
        if piece.content or piece.refusal or (piece.reasoning and self._shows_thinking):
            out += self._line(piece, done=False) + b"\n"
        return out

    def _remember(self, piece: ChatPiece) -> None:
        """Keep what the last line reports."""
        self._model = piece.model or self._model
        if self._first_s is None and (piece.content or piece.reasoning or piece.calls):
            self._first_s = self._clock()
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
        if piece.usage is not None:
            self._usage = piece.usage
        if piece.report is not None:
            self._report = piece.report

    def _gather(self, part: CallPiece) -> bytes:
        """Put a call together: it is told when it is whole."""
        begun = self._calls.get(part.index, CallPiece(index=part.index))
        self._calls[part.index] = CallPiece(
            index=part.index,
            name=begun.name or part.name,
            arguments=begun.arguments + part.arguments,
        )
        return b""

    def _whole_calls(self, but: int | None = None) -> bytes:
        """Tell the calls that are over: all `but` the one that is being written."""
        over = [index for index in self._calls if index != but]
        calls = [self._calls.pop(index) for index in over]
        if not (told := _answer_calls(calls)):
            return b""
        return self._line(ChatPiece(model=self._model), told=told, done=False) + b"\n"

    def _line(
        self,
        piece: ChatPiece,
        *,
        calls: Iterable[CallPiece] = (),
        told: list[AnswerCall] | None = None,
        **figures: Any,
    ) -> bytes:
        text = piece.content or piece.refusal
        thinking = piece.reasoning if self._shows_thinking and piece.reasoning else None
        created_at = rfc3339(self._wall_clock())
        model = piece.model or self._model
        if not self._is_chat:
            return one_line(
                OllamaAnswer(
                    model=model,
                    created_at=created_at,
                    response=text,
                    thinking=thinking,
                    **figures,
                )
            )
        told = told or _answer_calls(calls) or None
        message = AnswerMessage("assistant", text, thinking, told)
        return one_line(
            OllamaChatAnswer(model=model, created_at=created_at, message=message, **figures)
        )

    def _figures(self) -> dict[str, Any]:
        """Return what the end of an answer tells."""
        total_s = self._clock() - self._begin_s
        first_s = self._time_to_first(total_s)
        return {
            "done": True,
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            "total_duration": int(total_s * _NS),
            "load_duration": 0,
            "prompt_eval_count": self._usage.num_prompt_tokens,
            "prompt_eval_duration": int(first_s * _NS),
            "eval_count": self._usage.num_completion_tokens,
            "eval_duration": int((total_s - first_s) * _NS),
            "outrider": self._report,
        }

    def _time_to_first(self, total_s: float) -> float:
        """Return the report's; where it has none, that of the first token seen here."""
        report = _Report() if self._report is None else _decode(self._report, type=_Report)
        seen_s = total_s if self._first_s is None else self._first_s - self._begin_s
        return min(total_s, seen_s if report.ttft_s is None else report.ttft_s)


def _answer_calls(calls: Iterable[CallPiece]) -> list[AnswerCall]:
    """Return calls with their arguments as objects; one that was cut off could not be run."""
    told = []
    for call in calls:
        try:
            arguments = _decode(call.arguments or "{}")
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            told.append(AnswerCall(AnswerFunction(call.name, arguments)))
    return told
