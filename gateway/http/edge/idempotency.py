"""`Idempotency-Key`: a request that is repeated gets the first one's answer."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.contract.errors.tree import BadRequestError, IdempotencyKeyReusedError
from outrider.gateway.http.edge.answer_recorder import AnswerRecorder
from outrider.gateway.http.edge.cors import Header
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics, Repeat
from outrider.gateway.settings.http_bounds import HttpSettings

logger = logging.getLogger(__name__)

Make = Callable[[], Awaitable[Response]]

HEADER: Final = "idempotency-key"
_KEY: Final = re.compile(r"[!-~]{1,255}")
_REPLAYED: Final[Header] = (b"idempotent-replayed", b"true")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """A whole answer."""

    status: int
    headers: list[Header]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer(KeptAnswer):
    """An answer that is kept here. `num_bytes` is its size for the bound."""

    tenant: str
    num_bytes: int
    expires_s: float


class Elsewhere(Protocol):
    """The answers that other processes of this gateway keep."""

    async def claim(self, name: bytes, body_hash: bytes) -> KeptAnswer | Literal["reused"] | None:
        """Return another process's answer, when it has ended; None where this one is to answer."""

    def unclaim(self, name: bytes) -> None:
        """Leave a key to whichever process gets it next."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Slot:
    """One key of one owner at one endpoint. Until `ended` is set, a request works on it."""

    body_hash: bytes
    answer: _Answer | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class IdempotentAnswers:
    """Answers that are kept for their repetition, in this process's memory.

    Only whole answers of success are kept: failed requests may be repeated with the same key. When
    memory is short, the tenant that uses most of it loses its oldest answer. So a tenant may use
    all memory that others leave, and cannot push out answers of tenants that use less than it. For
    one event loop.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float],
        metrics: EdgeMetrics | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Store the arguments. `max_bytes` is for all answers; with 0 the header is refused."""
        self._elsewhere = elsewhere
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._metrics = metrics
        self._slots: dict[bytes, _Slot] = {}
        self._kept: dict[bytes, _Answer] = {}  # the oldest first, which expires first
        self._num_bytes = 0
        self._tenants: dict[str, _Holding] = {}

    @classmethod
    def of(
        cls,
        http: HttpSettings,
        clock: Callable[[], float],
        metrics: EdgeMetrics | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> "IdempotentAnswers":
        """Build the cache from the settings."""
        return cls(
            ttl_s=http.idempotency_ttl_s,
            max_bytes=http.idempotency_max_bytes,
            clock=clock,
            metrics=metrics,
            elsewhere=elsewhere,
        )

    @property
    def num_bytes(self) -> int:
        """Return the memory for answers, those included that are being recorded."""
        return self._num_bytes

    async def answer(
        self, request: Request, body: bytes, make: Make, *, owner: str, tenant: str | None = None
    ) -> Response:
        """Return the response to a request: that of `make`, or its first response again.

        `owner` is the id of the request's key: no key gets another one's answer. `tenant` shares
        the memory with others; the owner where it is None. With the header `make` is called when
        the response is sent, and only if it is needed; its errors are raised then. Raises
        BadRequestError for an invalid idempotency-key.
        """
        key = request.headers.get(HEADER)
        if key is None:
            return await make()
        self._check(key)
        name = _digest(owner.encode(), request.scope["path"].encode(), key.encode())
        return _RepeatableResponse(self, name, _digest(body), make, tenant or owner)

    def _check(self, key: str) -> None:
        if not self._max_bytes:
            raise BadRequestError(
                "idempotency is switched off: send no idempotency-key, or set "
                "http.idempotency_max_bytes above 0.",
                param=HEADER,
            )
        if not _KEY.fullmatch(key):
            raise BadRequestError(
                "idempotency-key: use 1 to 255 visible ASCII characters.", param=HEADER
            )

    def find(self, name: bytes, body_hash: bytes) -> _Slot | None:
        """Return the slot of the key. Raises IdempotencyKeyReusedError for another body."""
        now_s = self._clock()
        while self._kept and next(iter(self._kept.values())).expires_s <= now_s:
            self._drop(next(iter(self._kept)))
        slot = self._slots.get(name)
        if slot is not None and slot.body_hash != body_hash:
            self.count("reused")
            raise IdempotencyKeyReusedError
        return slot

    async def find_elsewhere(self, name: bytes, body_hash: bytes) -> KeptAnswer | None:
        """Return another process's answer; None where this one is to answer.

        Waits for an answer that is being made. Raises IdempotencyKeyReusedError for another body.
        """
        found = None
        if self._elsewhere is not None:
            found = await self._elsewhere.claim(name, body_hash)
        if found == "reused":
            self.count("reused")
            raise IdempotencyKeyReusedError
        return found

    async def kept_answer(
        self, asked: tuple[bytes, bytes]
    ) -> KeptAnswer | Literal["reused"] | None:
        """Return the answer to a key and a body, for another process; None where there is none."""
        name, body_hash = asked
        slot = self._slots.get(name)
        if slot is None:
            return None
        if slot.body_hash != body_hash:
            return "reused"
        await slot.ended.wait()
        kept = slot.answer
        if kept is None:
            return None
        return KeptAnswer(status=kept.status, headers=kept.headers, body=kept.body)

    def begin(self, name: bytes, body_hash: bytes) -> _Slot:
        """Take a free key."""
        self.count("first")
        slot = self._slots[name] = _Slot(body_hash=body_hash)
        return slot

    def end(self, name: bytes, slot: _Slot, recorder: AnswerRecorder, *, is_good: bool) -> None:
        """Keep a whole and good answer, and wake the requests that wait for it."""
        if is_good and recorder.is_whole:
            self._tenants[recorder.tenant].kept[name] = None
            slot.answer = self._kept[name] = _Answer(
                tenant=recorder.tenant,
                status=recorder.status,
                headers=recorder.headers,
                body=bytes(recorder.body),
                num_bytes=recorder.num_bytes,
                expires_s=self._clock() + self._ttl_s,
            )
        else:
            self._forget(name)
            recorder.give_up()
        self.stop_recording(recorder)
        slot.ended.set()

    def reserve(self, recorder: AnswerRecorder, num_bytes: int) -> bool:
        """Make room for more of an answer; False where its own tenant is the one to make it.

        Costs a look at each tenant that holds something, but only while memory is short.
        """
        own = self._tenants.setdefault(recorder.tenant, _Holding())
        own.recorders[recorder] = None
        while self._num_bytes + num_bytes > self._max_bytes:
            most = max(self._tenants.values(), key=lambda holding: holding.num_bytes)
            if own.num_bytes + num_bytes >= most.num_bytes:
                most = own
            if most.kept:
                self._drop(next(iter(most.kept)))
            elif most is own:
                return False
            else:
                next(iter(most.recorders)).give_up()
        self._count(own, num_bytes)
        return True

    def release(self, recorder: AnswerRecorder) -> None:
        """Give back a recorder's reservation, and forget it."""
        if (holding := self._tenants.get(recorder.tenant)) is not None:
            self._count(holding, -recorder.num_bytes)
        self.stop_recording(recorder)

    def stop_recording(self, recorder: AnswerRecorder) -> None:
        """Stop recording: the answer is kept, or never will be."""
        if (holding := self._tenants.get(recorder.tenant)) is not None:
            holding.recorders.pop(recorder, None)
            self._forget_empty(recorder.tenant)

    def count(self, outcome: Repeat) -> None:
        """Count the result of a request."""
        if self._metrics is not None:
            self._metrics.repeated(outcome)

    def _drop(self, name: bytes) -> None:
        answer = self._kept.pop(name)
        self._forget(name)
        holding = self._tenants[answer.tenant]
        del holding.kept[name]
        self._count(holding, -answer.num_bytes)
        self._forget_empty(answer.tenant)

    def _forget(self, name: bytes) -> None:
        del self._slots[name]
        if self._elsewhere is not None:
            self._elsewhere.unclaim(name)

    def _forget_empty(self, tenant: str) -> None:
        holding = self._tenants[tenant]
        if not (holding.kept or holding.recorders):
            del self._tenants[tenant]

    def _count(self, holding: "_Holding", num_bytes: int) -> None:
        holding.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if self._metrics is not None:
            self._metrics.kept_bytes.set(self._num_bytes)


@dataclass(eq=False, slots=True)
class _Holding:
    """The memory of one tenant: answers and recorders, the oldest first of each."""

    num_bytes: int = 0
    kept: dict[bytes, None] = field(default_factory=dict)
    recorders: dict[AnswerRecorder, None] = field(default_factory=dict)


class _RepeatableResponse(Response):
    """The answer to a request with an idempotency-key: made, waited for, or repeated."""

    def __init__(
        self,
        answers: IdempotentAnswers,
        name: bytes,
        body_hash: bytes,
        make: Make,
        tenant: str,
    ) -> None:
        super().__init__()
        self._answers = answers
        self._name = name
        self._body_hash = body_hash
        self._make = make
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises the errors of `make` and its response, and IdempotencyKeyReusedError."""
        answers = self._answers
        has_waited = False
        if answers.find(self._name, self._body_hash) is None:
            kept = await answers.find_elsewhere(self._name, self._body_hash)
            if kept is not None:
                answers.count("replayed")
                await _replay(kept, send)
                return
        while (slot := answers.find(self._name, self._body_hash)) is not None:
            if not slot.ended.is_set():
                has_waited = True
                if not await _happens(slot.ended, receive):
                    logger.info("client left while an equal request was answered")
                    return
            if slot.answer is not None:
                answers.count("waited" if has_waited else "replayed")
                await _replay(slot.answer, send)
                return
        await self._lead(scope, receive, send)

    async def _lead(self, scope: Scope, receive: Receive, send: Send) -> None:
        slot = self._answers.begin(self._name, self._body_hash)
        recorder = AnswerRecorder(
            send, self._tenant, reserve=self._answers.reserve, release=self._answers.release
        )
        is_good = False
        try:
            response = await self._make()
            await response(scope, receive, recorder)
            # A stream that broke off has the status of success.
            is_good = getattr(response, "may_be_kept", True)
        finally:
            self._answers.end(self._name, slot, recorder, is_good=is_good)


async def _replay(answer: KeptAnswer, send: Send) -> None:
    headers = [*answer.headers, _REPLAYED]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


async def _happens(event: asyncio.Event, receive: Receive) -> bool:
    """Wait for the event; False where the client leaves first. The body must be read already."""
    waiting = asyncio.ensure_future(event.wait())
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((waiting, watching), return_when=asyncio.FIRST_COMPLETED)
        return waiting.done()
    finally:
        for task in (waiting, watching):
            task.cancel()
        await asyncio.wait((waiting, watching))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _digest(*parts: bytes) -> bytes:
    """Return a hash of the parts and their ends."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
