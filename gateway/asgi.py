"""HTTP beneath the endpoints: request ids, bodies, disconnects, and a generation's response."""

import asyncio
import logging
import re
import secrets
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineError
from gateway import sse
from gateway.errors import (
    BadRequestError,
    BodyTooLargeError,
    GenerationError,
    MediaTypeError,
    bad_request,
    problem_of,
)
from gateway.generation import Generation

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed", bound=BaseModel)

_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_JSON_TYPE: Final = re.compile(r"application/([\w.+-]+\+)?json", re.IGNORECASE)


class RequestIdMiddleware:
    """Gives every response an `x-request-id`: the client's own, if it is sane, else a new one.

    Also the last resort: an exception that nobody handled is answered with OpenAI's error body and
    raised on, so that the server logs it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Plain ASGI: nothing stands between the stream and the socket but this function."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"

        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if not has_started:
                await problem_of(error).response()(scope, receive, send_with_id)
            raise


async def read_json_body(request: Request, *, limit_bytes: int) -> bytes:
    """The body of a JSON request, unparsed.

    Raises BodyTooLargeError as soon as the limit is passed, MediaTypeError where JSON is not
    declared: a browser may send other types across sites without asking.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if not _JSON_TYPE.fullmatch(media_type):
        raise MediaTypeError(media_type)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLargeError(limit_bytes=limit_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit_bytes:
                raise BodyTooLargeError(limit_bytes=limit_bytes)
    except ClientDisconnect:
        raise BadRequestError("The body ended early.") from None
    return bytes(body)


def parse(model: type[Parsed], body: bytes) -> Parsed:
    """JSON to a validated request. Raises BadRequestError that names the field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error, body) from None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it as soon as the client leaves. The request's body must be read already.

    Raises ClientDisconnect when the client left first.
    """
    work_task = asyncio.ensure_future(work)
    watch_task = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((work_task, watch_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
    finally:
        for task in (work_task, watch_task):
            task.cancel()
        await asyncio.wait((work_task, watch_task))
        for task in (work_task, watch_task):
            if not task.cancelled():
                task.exception()  # seen: what matters is raised below
    work_task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GenerationResponse(Response):
    """Runs a generation and sends it, as a stream or whole.

    Whatever fails before the first byte is raised, and becomes an HTTP error. After it, a stream
    ends with an error event and without [DONE]. When the client leaves, the engine is told at once.
    """

    def __init__(
        self,
        generation: Generation,
        form: sse.Format,
        *,
        stream: bool,
        with_usage: bool = False,
        with_trace: bool = False,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._generation = generation
        self._form = form
        self._stream = stream
        self._with_usage = with_usage
        self._with_trace = with_trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises GatewayError or EngineError before the first byte only."""
        work = self._send_stream(send) if self._stream else self._send_whole(send)
        request_id = scope.get("state", {}).get("request_id")
        try:
            await until_disconnect(receive, work)
        except (ClientDisconnect, OSError):
            logger.info("client left request_id=%s", request_id)
        finally:
            self._log_end(request_id)

    def _log_end(self, request_id: str | None) -> None:
        """One line a request; what was said in it is nobody's business."""
        generation = self._generation
        ttft_s = generation.ttft_s()
        logger.info(
            "answered request_id=%s job=%s tier=%s reason=%r outcome=%s tokens=%d ttft_s=%s "
            "duration_s=%.3f",
            request_id,
            generation.job.job_id,
            generation.tier,
            generation.reason,
            generation.outcome,
            sum(choice.usage.num_tokens for choice in generation.choices),
            "-" if ttft_s is None else f"{ttft_s:.3f}",
            generation.duration_s(),
        )

    async def _send_whole(self, send: Send) -> None:
        async with aclosing(self._generation.deltas()) as deltas:
            collected = [delta async for delta in deltas]
        body = sse.whole_body(self._generation, self._form, collected)
        self.headers["content-type"] = "application/json"
        self.headers["content-length"] = str(len(body))
        await self._start(send)
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        writer = sse.ChunkWriter(
            self._generation, self._form, with_usage=self._with_usage, with_trace=self._with_trace
        )
        async with aclosing(self._generation.deltas()) as deltas:
            # Headers wait for the first text, so that what fails until then has its own status.
            first = await anext(deltas)
            self.headers["content-type"] = "text/event-stream; charset=utf-8"
            self.headers["cache-control"] = "no-cache"
            self.headers["x-accel-buffering"] = "no"
            await self._start(send)
            try:
                await _send_part(send, writer.chunk(first))
                async for delta in deltas:
                    await _send_part(send, writer.chunk(delta))
            except (GenerationError, EngineError) as error:
                await self._end_badly(send, error)
                return
            except Exception as error:
                await self._end_badly(send, error)
                raise
        await send({"type": "http.response.body", "body": writer.ending()})

    async def _end_badly(self, send: Send, error: Exception) -> None:
        problem = problem_of(error)
        logger.error(
            "stream failed job=%s code=%s error=%s",
            self._generation.job.job_id,
            problem.code,
            type(error).__name__,
        )
        await send({"type": "http.response.body", "body": sse.event(problem.body())})

    async def _start(self, send: Send) -> None:
        """The headers know the tier: of a stream, the one that gives the first text."""
        self.headers["x-outrider-tier"] = self._generation.tier
        self.headers["x-outrider-reason"] = header_text(self._generation.reason)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )


def header_text(text: str) -> str:
    """One line of ASCII, as a header must be."""
    return " ".join(text.encode("ascii", "replace").decode().split())


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
