"""The work on one batch: its lines are checked, answered and written to files, in this order.

It can be killed anywhere: what it has done is in the database, and the next process that takes the
batch goes on from there.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import AuthenticationError, StorageError
from outrider.gateway.http.apis.batches.calls import Answered, Ask, IdleGate
from outrider.gateway.http.apis.batches.input import (
    BatchLine,
    LineFaultError,
    checked_lines,
    numbered_lines,
    portions,
    read_line,
    request_body,
)
from outrider.gateway.http.apis.batches.leases import BatchLeases, LeaseLostError, LineResult
from outrider.gateway.http.apis.batches.metrics import BatchMetrics
from outrider.gateway.http.apis.batches.objects import BatchFault
from outrider.gateway.http.apis.batches.output import (
    MAX_FAULTS_TOLD,
    OutputWriter,
    ids_of,
    line_id,
    result_line,
)
from outrider.gateway.http.apis.batches.records import BatchRecord
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.tenancy.ledger.row import printable

logger = logging.getLogger(__name__)

_HELD_S: Final = 60.0
"""A batch that has waited so long for idle capacity is left to other processes."""
_RETRY_S: Final = 1.0
_MAX_WAIT_S: Final = 60.0
_MAX_TRIES: Final = 3
_MAX_MODEL_CHARS: Final = 256
_GRACE_S: Final = 30.0
_LOST: Final = "The input file is not there any more."
_FULL: Final = 429
_WAITED_FOR: Final = frozenset({_FULL, 503})
_REPEATED: Final = frozenset({500, 502})
_FAILURE: Final = frozenset({401, 403})


class HeldError(Exception):
    """Other requests leave no capacity for the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkParts:
    """What the work on all batches of a process has in common."""

    store: BatchStore
    leases: BatchLeases
    writer: OutputWriter
    ask: Ask
    gate: IdleGate
    key_error: Callable[[str], AuthenticationError | None]
    """Why a key is not valid any more; None: it is valid."""
    slots: asyncio.Semaphore
    """Requests that may be answered at once."""
    metrics: BatchMetrics
    max_body_bytes: int
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True, kw_only=True, eq=False)
class BatchWork:
    """The work on one batch. `record` changes when the batch is cancelled."""

    parts: WorkParts
    record: BatchRecord
    _is_input_lost: bool = False
    _uncommitted: list[tuple[LineResult, asyncio.Future[None]]] = field(default_factory=list)
    _commits: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> BatchRecord:
        """Work until the batch is over. Raises LeaseLostError, HeldError or StorageError."""
        if self.record.status == "validating" and (over := await self._validated()) is not None:
            return over
        if self.record.status == "in_progress":
            path = self.parts.store.folder.path(self.record.input_file_id)
            if await asyncio.to_thread(path.is_file):
                await self._answer_lines(path)
            else:
                self._is_input_lost = True
        return await self._end()

    # ---- before

    async def _validated(self) -> BatchRecord | None:
        """Check the whole file; return the batch where it ends here."""
        leases, now_s = self.parts.leases, self.parts.store.wall_clock()
        found, values = await asyncio.to_thread(self._check)
        if found:
            written, faults = found
            errors = msgspec.json.encode(faults).decode()
            return await asyncio.to_thread(
                leases.finish, self.record.id, written, status="failed", failed_at=now_s,
                errors=errors, **ids_of(written),
            )  # fmt: skip
        changes = {"status": "in_progress", "in_progress_at": now_s, **values}
        await self._change(("validating",), changes)
        return None

    async def _change(self, was: tuple[str, ...], values: dict[str, Any]) -> None:
        """Change the batch, unless it is cancelled meanwhile."""
        leases, batch_id = self.parts.leases, self.record.id
        record = await asyncio.to_thread(lambda: leases.update(batch_id, was=was, **values))
        if record is None:
            record = msgspec.structs.replace(self.record, status="cancelling")
        self.record = record

    def _check(self) -> tuple[Any, dict[str, Any]]:
        """Return the error file and the first faults, if there are any, and what was counted."""
        record, store = self.record, self.parts.store
        faults: list[BatchFault] = []
        counted: dict[str, Any] = {"num_total": 0, "model": ""}
        lines = checked_lines(
            store.folder.path(record.input_file_id),
            record.endpoint,
            max_lines=store.settings.max_lines,
            max_body_bytes=self.parts.max_body_bytes,
        )

        def wrong() -> Iterator[str]:
            for line in lines:
                if isinstance(line, BatchLine):
                    counted["num_total"] += 1
                    counted["model"] = counted["model"] or _model_of(line)
                    continue
                if len(faults) < MAX_FAULTS_TOLD:
                    faults.append(line.fault)
                number = line.fault.line or 0
                yield result_line(record.id, number, line.custom_id, fault=line.fault)

        try:
            written = self.parts.writer.file_of(record, "error", wrong())
        except FileNotFoundError:
            return ((), [BatchFault(code="file_not_found", message=_LOST)]), {}
        return (None if written is None else ((written,), faults)), counted

    # ---- meanwhile

    async def _answer_lines(self, path: Path) -> None:
        """Answer all requests that have no result yet, until something stops the batch."""
        done = await asyncio.to_thread(self.parts.leases.done_lines, self.record.id)
        lines = numbered_lines(path, self.parts.max_body_bytes)
        waiting = portions((number, line) for number, line in lines if number not in done)
        seats = asyncio.Semaphore(self.parts.store.settings.concurrent_requests)
        answering: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:
            while part := await asyncio.to_thread(next, waiting, None):
                for number, line in part:
                    await self._seated(seats)
                    if self._fault() is not None:
                        await _ended(answering)
                        return
                    task = tasks.create_task(self._answer_line(number, line))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
                    task.add_done_callback(lambda _: seats.release())
            while answering and self._fault() is None:
                await asyncio.wait(answering, timeout=_RETRY_S)
            await _ended(answering)

    async def _seated(self, seats: asyncio.Semaphore) -> None:
        """Wait for a seat, but not where the batch is stopped."""
        while self._fault() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await seats.acquire()
                    return

    def _fault(self) -> BatchFault | None:
        """Return what stops the batch before all of its requests are over."""
        record = self.record
        if record.status == "cancelling":
            text = "This request was not executed before the batch was cancelled."
            return BatchFault(code="batch_cancelled", message=text)
        if self.parts.store.wall_clock() >= record.expires_at:
            text = "This request could not be executed before the completion window expired."
            return BatchFault(code="batch_expired", message=text)
        if self._is_input_lost:
            return BatchFault(code="file_not_found", message=_LOST)
        if (error := self.parts.key_error(record.key_id)) is not None:
            return BatchFault(code=error.code or "invalid_api_key", message=str(error))
        return None

    async def _answer_line(self, number: int, line: bytes) -> None:
        """Answer one request, and store its result; leave it as it is where the batch is stopped.

        A seat is held meanwhile, so that few are under way and few wait.
        """
        try:
            found = read_line(number, line, self.record.endpoint)
            body = request_body(found)
        except LineFaultError as error:  # the file was changed since
            await self._commit(self._faulty(number, error.custom_id, error.fault))
            return
        num_tries = 0
        while self._fault() is None:
            answered = await self._asked(number, body)
            if answered is None:
                return
            num_tries += 1
            wait_s = self._wait_s(answered, num_tries)
            if wait_s is None:
                await self._commit(self._result(number, found.custom_id, answered))
                return
            self.parts.ask.forgive(answered.rows)
            self.parts.metrics.ended("repeated")
            await self._sleep(wait_s)

    async def _asked(self, number: int, body: bytes) -> Answered | None:
        """Ask once there is idle capacity; None where the batch was stopped first."""
        parts, record = self.parts, self.record
        async with parts.slots:
            until_s = parts.clock() + _HELD_S
            while not await parts.gate.wait(min(until_s, parts.clock() + _RETRY_S), parts.clock):
                if self._fault() is not None:
                    return None
                if parts.clock() >= until_s and not parts.gate.num_own:
                    raise HeldError
            if self._fault() is not None:
                return None
            parts.gate.num_own += 1
            parts.metrics.requests.inc()
            try:
                answered = await parts.ask.ask(
                    record.key_id, record.endpoint, body, line_id(record.id, number)
                )
            finally:
                parts.gate.num_own -= 1
                parts.metrics.requests.dec()
        if answered.status in _FAILURE and parts.key_error(record.key_id) is not None:
            parts.ask.forgive(answered.rows)
            return None
        return answered

    def _wait_s(self, answered: Answered, num_tries: int) -> float | None:
        """Return when to ask again; None where this answer is the result.

        Limits are waited for as long as the batch lasts. One that has no room by then refuses.
        """
        if answered.status in _REPEATED and num_tries < _MAX_TRIES:
            return _RETRY_S * num_tries
        if answered.status not in _WAITED_FOR:
            return None
        told = answered.headers.get("retry-after", "")
        if not told.isdigit():
            is_final = answered.headers.get("x-should-retry") == "false"
            is_over = is_final or answered.status == _FULL
            return None if is_over else min(_RETRY_S * num_tries, _MAX_WAIT_S)
        left_s = self.record.expires_at - self.parts.store.wall_clock()
        return None if int(told) > left_s else min(float(told), _MAX_WAIT_S)

    async def _sleep(self, seconds: float) -> None:
        """Wait, but not where the batch is stopped."""
        until_s = self.parts.clock() + seconds
        while self._fault() is None and (left_s := until_s - self.parts.clock()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, _RETRY_S))

    def _result(self, number: int, custom_id: str, answered: Answered) -> LineResult:
        response = {
            "status_code": answered.status,
            "request_id": line_id(self.record.id, number),
            "body": _body_of(answered.body),
        }
        return LineResult(
            line=number,
            is_error=answered.status >= 400,
            result=result_line(self.record.id, number, custom_id, response=response),
            rows=answered.rows,
        )

    def _faulty(self, number: int, custom_id: str | None, fault: BatchFault) -> LineResult:
        told = result_line(self.record.id, number, custom_id, fault=fault)
        return LineResult(line=number, is_error=True, result=told)

    async def _commit(self, result: LineResult) -> None:
        """Store a result; those that come meanwhile are stored together. Raises LeaseLostError."""
        stored = asyncio.get_running_loop().create_future()
        self._uncommitted.append((result, stored))
        async with self._commits:
            if stored.done():
                return
            waiting, self._uncommitted = self._uncommitted, []
            results = [each for each, _ in waiting]
            await self._store(results)
            for _, future in waiting:
                future.set_result(None)
        self.parts.metrics.ended("failed", sum(each.is_error for each in results))
        self.parts.metrics.ended("completed", sum(not each.is_error for each in results))

    async def _store(self, results: list[LineResult]) -> None:
        """Store results, as soon as the database takes them. Raises LeaseLostError."""
        while True:
            try:
                await asyncio.to_thread(self.parts.leases.commit, self.record.id, results)
            except LeaseLostError:
                for each in results:
                    self.parts.ask.forgive(each.rows)
                raise
            except StorageError as error:
                logger.warning("results of a batch wait for the database error=%s", error)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    # ---- after

    async def _end(self) -> BatchRecord:
        """Write the files, and end the batch."""
        fault = None if self.record.status == "finalizing" else self._fault()
        now_s = self.parts.store.wall_clock()
        if fault is None and self.record.status != "finalizing":
            await self._change(("in_progress",), {"status": "finalizing", "finalizing_at": now_s})
            fault = self._fault() if self.record.status == "cancelling" else None
        written = await asyncio.to_thread(self.parts.writer.write, self.record, fault)
        status = _ended_as(fault)
        values: dict[str, Any] = {"status": status, f"{status}_at": self.parts.store.wall_clock()}
        if status == "failed":
            values["errors"] = msgspec.json.encode([fault]).decode()
        leases = self.parts.leases
        return await asyncio.to_thread(
            leases.finish, self.record.id, written, **values, **ids_of(written)
        )


async def _ended(answering: set[asyncio.Task[None]]) -> None:
    """Give requests that are being answered some time, and then end them uncharged."""
    if answering:
        _, late = await asyncio.wait(answering, timeout=_GRACE_S)
        for task in late:
            task.cancel()


def _ended_as(fault: BatchFault | None) -> str:
    if fault is None:
        return "completed"
    known = {"batch_cancelled": "cancelled", "batch_expired": "expired"}
    return known.get(fault.code, "failed")


def _model_of(line: BatchLine) -> str:
    try:
        model = msgspec.json.decode(line.body.get("model", b'""'), type=str)
    except msgspec.ValidationError:
        return ""
    return printable(model[:_MAX_MODEL_CHARS])


def _body_of(body: bytes) -> Any:
    """Return the JSON of an answer as it is, on one line; text where it is none."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"text": body.decode("utf-8", "replace")}
    return msgspec.Raw(body) if b"\n" not in body else document
