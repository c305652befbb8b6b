"""A chat answer as a response: the whole object, or the events of its stream."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
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
from outrider.gateway.http.apis.responses.conversation import StoredAnswer
from outrider.gateway.http.apis.responses.event_log import EventLog, EventSink, NoEvents
from outrider.gateway.http.apis.responses.output import Output
from outrider.gateway.http.apis.responses.paths import in_own_words
from outrider.gateway.http.apis.responses.tools import OfferedTool

_SANE_TAIL: Final = re.compile(r"[A-Za-z0-9]{1,64}")
# Why an answer is not complete, by chat's reason to end.
_CUTS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_RATE_LIMITED: Final = 429


class ResponseWriter:
    """Writes one answer. Use once, for a stream or for a whole body."""

    media_type: Final = EVENT_STREAM

    def __init__(
        self,
        repeated: Mapping[str, Any],
        *,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        tools: Mapping[str, OfferedTool] = MappingProxyType({}),
        storage: StoredAnswer | None = None,
    ) -> None:
        """`repeated`: what the response says of its request. `clock`: seconds since 1970.

        `tools`: those that the model may call, by their names in the chat.
        `new_id` makes the response's id where it is stored, by `storage`, so that nobody can guess
        it; and where the chat answer has none that is fit for it.
        """
        self._repeated = repeated
        self._tools = tools
        self._clock = clock
        self._new_id = new_id
        self._storage = storage
        self._reader = ChatChunkParser()
        self._log = EventLog()
        self._answer: _Answer | None = None

    def part(self, part: bytes) -> bytes:
        """The events for whole events of the chat's stream. Raises GenerationError.

        `response.created` comes with the first of them that says something.
        """
        for piece in self._reader.read(part):
            if piece.comment:
                self._log.pass_on(piece.comment)
                continue
            answer = self._answer or self._begin(piece)
            if piece.is_done:
                self._finish(answer)
            else:
                answer.add(piece)
        return self._log.take()

    def whole(self, body: bytes) -> bytes:
        """The response. Raises GenerationError for what is no completion."""
        piece = read_completion(body)
        answer = self._new_answer(piece, NoEvents())
        answer.add(piece)
        return one_line(self._finish(answer))

    def ending_badly(self, problem: Problem, delivered: DeliveredReport | None) -> bytes:
        """`response.failed`, with what there is of the output."""
        answer = self._answer or self._begin(ChatPiece())
        answer.fail(in_own_words(problem), delivered)
        return self._log.take()

    def _finish(self, answer: "_Answer") -> dict[str, Any]:
        response = answer.finish()
        if self._storage is not None:
            self._storage.note(response)
        return response

    def _begin(self, piece: ChatPiece) -> "_Answer":
        self._answer = answer = self._new_answer(piece, self._log)
        answer.send_event("response.created")
        answer.send_event("response.in_progress")
        return answer

    def _new_answer(self, piece: ChatPiece, events: EventSink) -> "_Answer":
        is_stored = self._storage is not None and self._storage.is_wanted
        tail = "" if is_stored else piece.answer_id.rpartition("-")[2]
        return _Answer(
            {**self._repeated, "store": is_stored},
            piece,
            Output(tail if _SANE_TAIL.fullmatch(tail) else self._new_id(), events, self._tools),
            events,
            clock=self._clock,
        )


class _Answer:
    """The response while its answer comes."""

    def __init__(
        self,
        repeated: Mapping[str, Any],
        first: ChatPiece,
        output: Output,
        events: EventSink,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._events = events
        self._output = output
        self._model = first.model
        self._created = first.created or int(clock())
        self._id = f"resp_{output.tail}"
        self._repeated = repeated
        self._finish_reason: str | None = None
        self._service_tier: str | None = None
        self._usage: ChatUsage | None = None
        self._report: msgspec.Raw | None = None
        self._is_over = False

    def add(self, piece: ChatPiece) -> None:
        """A piece of the answer."""
        is_last = piece.finish_reason is not None or piece.usage is not None
        trace = None if is_last or piece.report is None else bytes(piece.report)
        self._output.add(piece, trace)
        self._model = piece.model or self._model
        self._finish_reason = piece.finish_reason or self._finish_reason
        self._service_tier = piece.service_tier or self._service_tier
        self._usage = piece.usage or self._usage
        self._report = piece.report or self._report

    def finish(self) -> dict[str, Any]:
        """The answer is over: the events that say so, and the response."""
        cut = _CUTS.get(self._finish_reason or "")
        self._output.close(is_cut=cut is not None)
        status = "completed" if cut is None else "incomplete"
        fields: dict[str, Any] = {
            "completed_at": int(self._clock()) if cut is None else None,
            "incomplete_details": None if cut is None else {"reason": cut},
        }
        if self._report is not None:
            fields["outrider"] = self._report
        response = self._response(status, self._output.items(), fields)
        self._end(status, response)
        return response

    def fail(self, problem: Problem, delivered: DeliveredReport | None) -> None:
        """The answer broke off."""
        error = {
            "code": "rate_limit_exceeded" if problem.status == _RATE_LIMITED else "server_error",
            "message": problem.message,
            "type": problem.type,
            "param": problem.param,
        }
        known = {} if delivered is None else msgspec.structs.asdict(delivered)
        fields = {"error": error, "outrider": {**known, "code": problem.code}}
        items = self._output.items(is_broken=True)
        self._end("failed", self._response("failed", items, fields))

    def send_event(self, event: str) -> None:
        """The response as it begins."""
        self._events.add(event, {"response": self._response("in_progress", [], {})})

    def _end(self, status: str, response: dict[str, Any]) -> None:
        """Once only: what comes behind it is not told."""
        if not self._is_over:
            self._is_over = True
            self._events.add(f"response.{status}", {"response": response})

    def _response(
        self, status: str, items: list[dict[str, Any]], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": items,
            "service_tier": self._service_tier,
            "usage": None if self._usage is None else _usage(self._usage),
            **self._repeated,
            **fields,
        }


def _usage(usage: ChatUsage) -> dict[str, Any]:
    """Writes to the cache are not counted."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_total_tokens,
    }
