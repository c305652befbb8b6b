"""The work on one batch: its lines are checked, answered and written to files, in this order.

It can be killed anywhere: what it has done is in the database, and the next process that takes the
batch goes on from there.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from outrider.gateway.contract.errors.tree import AuthenticationError, StorageError
from outrider.gateway.http.apis.batches.calls import Answered, Ask, IdleGate
from outrider.gateway.http.apis.batches.input import (
    InputCheck,
    LineFaultError,
    Lines,
    portions,
    read_line,
    request_body,
)
from outrider.gateway.http.apis.batches.leases import BatchLeases, LeaseLostError, LineResult
from outrider.gateway.http.apis.batches.metrics import BatchMetrics
from outrider.gateway.http.apis.batches.objects import BatchFault
from outrider.gateway.http.apis.batches.records import BatchRecord, FileRecord
from outrider.gateway.http.apis.batches.results import line_id, result_line, told_body
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.settings.slo import BATCH, IDLE

logger = logging.getLogger(__name__)

T = TypeVar("T")
_BREATH_S: Final = 0.002
"""Between two parts of a file: other requests take their turns."""
_POLL_S: Final = 0.05
_RETRY_S: Final = 1.0
_MAX_WAIT_S: Final = 60.0
_MAX_TRIES: Final = 3
_GRACE_S: Final = 30.0
_FULL: Final = 429
_WAITED_FOR: Final = frozenset({_FULL, 503})
_REPEATED: Final = frozenset({500, 502})
_KEY_FAILURES: Final = frozenset({401, 403})
_CANCELLED: Final = BatchFault(
    code="batch_cancelled",
    message="This request was not executed before the batch was cancelled.",
)
_EXPIRED: Final = BatchFault(
    code="batch_expired",
    message="This request could not be executed before the completion window expired.",
)
_LOST: Final = BatchFault(code="file_not_found", message="The input file is not there any more.")
_ENDS: Final = {_CANCELLED.code: "cancelled", _EXPIRED.code: "expired"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkParts:
    """What the work on all batches of a process has in common."""

    store: BatchStore
    leases: BatchLeases
    ask: Ask
    gate: IdleGate
    key_error: Callable[[str], AuthenticationError | None]
    """Why a key is not valid any more; None: it is valid."""
    slots: asyncio.Semaphore
    """Requests that may be answered at once."""
    metrics: BatchMetrics
    max_body_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class BatchWork:
    """The work on one batch. `record` changes when the batch is cancelled."""

    parts: WorkParts
    record: BatchRecord
    _is_input_lost: bool = False

    async def run(self) -> BatchRecord:
        """Work until the batch is over. Raises LeaseLostError or StorageError."""
        try:
            if self.record.status == "validating":
                faults = await self._check()
                if faults:
                    return await self._finish("failed", errors=faults)
            if self.record.status == "in_progress":
                await self._answer_lines()
        except* FileNotFoundError:
            self._is_input_lost = True
        return await self._end()

    def _fault(self) -> BatchFault | None:
        """Return what stops the batch before all of its requests are over."""
        record = self.record
        if record.status == "cancelling":
            return _CANCELLED
        if self.parts.store.wall_clock() >= record.expires_at:
            return _EXPIRED
        if self._is_input_lost:
            return _LOST
        if (error := self.parts.key_error(record.key_id)) is not None:
            return BatchFault(code=error.code or "invalid_api_key", message=str(error))
        return None

    def _portions(self) -> Iterator[Lines]:
        """Yield the lines of the input. Raises FileNotFoundError."""
        path = self.parts.store.path(self.record.input_file_id)
        return portions(path, self.parts.max_body_bytes)

    async def _change(self, was: str, **values: Any) -> None:
        """Change the batch, unless it is cancelled meanwhile."""
        leases, batch_id = self.parts.leases, self.record.id
        self.record = await asyncio.to_thread(lambda: leases.update(batch_id, was, **values))

    # ---- before

    async def _check(self) -> list[BatchFault]:
        """Read the whole file; return what is wrong with it."""
        check = InputCheck(endpoint=self.record.endpoint)
        async for is_enough in _paced(map(check.look_at, self._portions())):
            if is_enough or self._fault() is not None:
                break
        if check.faults:
            return check.faults
        if self._fault() is None:
            if not check.num_lines:
                return [BatchFault(code="empty_file", message="The file has no request.")]
            await self._change(
                "validating",
                status="in_progress",
                in_progress_at=self.parts.store.wall_clock(),
                num_total=check.num_lines,
                model=check.model,
            )
        return []

    # ---- meanwhile

    async def _answer_lines(self) -> None:
        """Answer all requests that have no result yet, until something stops the batch."""
        lines = self._undone_lines(await asyncio.to_thread(self._done))
        next_line = asyncio.Lock()

        async def work() -> None:
            while True:
                async with next_line:
                    found = await anext(lines, None)
                if found is None or self._fault() is not None:
                    return
                await self._answer_line(*found)

        async with asyncio.TaskGroup() as tasks:
            count = self.parts.store.settings.concurrent_requests
            workers = [tasks.create_task(work()) for _ in range(count)]
            while self._fault() is None:
                if not (await asyncio.wait(workers, timeout=_RETRY_S))[1]:
                    return
            for late in (await asyncio.wait(workers, timeout=_GRACE_S))[1]:
                late.cancel()

    def _done(self) -> set[int]:
        return self.parts.leases.done_lines(self.record.id)

    async def _undone_lines(self, done: set[int]) -> AsyncIterator[tuple[int, bytes]]:
        async for part in _paced(self._portions()):
            for number, line in part:
                if number not in done:
                    yield number, line

    async def _answer_line(self, number: int, line: bytes) -> None:
        """Answer one request and store its result; leave it as it is where the batch is stopped."""
        try:
            found = read_line(line, self.record.endpoint)
        except LineFaultError as error:  # the rules were others when the batch began
            await self._store(number, None, fault=error.fault(number))
            return
        body = request_body(found, BATCH if self.parts.gate.max_others else IDLE)
        num_tries = 0
        while self._fault() is None:
            answered = await self._asked(number, body)
            if answered is None:
                return
            num_tries += 1
            wait_s = self._wait_s(answered, num_tries)
            if wait_s is None:
                await self._store(number, found.custom_id, answered)
                return
            self.parts.ask.forgive(answered.rows)
            self.parts.metrics.requests_ended.labels("repeated").inc()
            while wait_s > 0 and self._fault() is None:
                await asyncio.sleep(min(wait_s, _RETRY_S))
                wait_s -= _RETRY_S

    async def _asked(self, number: int, body: bytes) -> Answered | None:
        """Ask once there is idle capacity; None where the batch was stopped first."""
        parts, record = self.parts, self.record
        async with parts.slots:
            while not await parts.gate.is_open():
                if self._fault() is not None:
                    return None
                await asyncio.sleep(_POLL_S)
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
        if answered.status in _KEY_FAILURES and parts.key_error(record.key_id) is not None:
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

    async def _store(
        self,
        number: int,
        custom_id: str | None,
        answered: Answered | None = None,
        fault: BatchFault | None = None,
    ) -> None:
        """Store a result as soon as the database takes it. Raises LeaseLostError."""
        parts, batch_id = self.parts, self.record.id
        response = None
        if answered is not None:
            response = {
                "status_code": answered.status,
                "request_id": line_id(batch_id, number),
                "body": told_body(answered.body),
            }
        result = LineResult(
            line=number,
            is_error=answered is None or answered.status >= 400,
            result=result_line(batch_id, number, custom_id, response=response, fault=fault),
            rows=() if answered is None else answered.rows,
        )
        while True:
            try:
                await asyncio.to_thread(parts.leases.commit, batch_id, result)
            except LeaseLostError:
                parts.ask.forgive(result.rows)
                raise
            except StorageError as error:
                logger.warning("results of a batch wait for the database error=%s", error)
                await asyncio.sleep(_RETRY_S)
            else:
                break
        outcome = "failed" if result.is_error else "completed"
        parts.metrics.requests_ended.labels(outcome).inc()

    # ---- after

    async def _end(self) -> BatchRecord:
        """Write the files, and end the batch."""
        fault = None if self.record.status == "finalizing" else self._fault()
        if fault is None and self.record.status != "finalizing":
            now_s = self.parts.store.wall_clock()
            await self._change("in_progress", status="finalizing", finalizing_at=now_s)
            fault = _CANCELLED if self.record.status == "cancelling" else None
        results, batch_id = self.parts.leases.results, self.record.id
        output = await self._written("output", results(batch_id, is_error=False))
        errors = results(batch_id, is_error=True)
        error = await self._written("error", errors if fault is None else self._rest(errors, fault))
        status = "completed" if fault is None else _ENDS.get(fault.code, "failed")
        return await self._finish(status, output, error, [fault] if fault else [])

    def _rest(self, errors: Iterator[list[str]], fault: BatchFault) -> Iterator[list[str]]:
        """Yield the errors, and then those of the requests that were not answered."""
        yield from errors
        done = self._done()
        with contextlib.suppress(FileNotFoundError):
            for part in self._portions():
                yield [
                    result_line(self.record.id, number, self._custom_id(line), fault=fault)
                    for number, line in part
                    if number not in done
                ]

    def _custom_id(self, line: bytes) -> str | None:
        try:
            return read_line(line, self.record.endpoint).custom_id
        except LineFaultError:
            return None

    async def _written(self, kind: str, parts: Iterator[list[str]]) -> FileRecord | None:
        """Write one of the batch's files; None where there are no lines.

        Its id follows from the batch's, so that a file that is written again takes its place.
        """
        store, batch, num_bytes = self.parts.store, self.record, 0
        file_id = f"file-{batch.id.removeprefix('batch_')}{kind[0]}"
        with store.writing() as file:
            async for texts in _paced(parts):
                content = "".join(f"{text}\n" for text in texts).encode()
                num_bytes += await asyncio.to_thread(file.write, content)
            if not num_bytes:
                return None
            await asyncio.to_thread(store.put, file, file_id)
        now_s = store.wall_clock()
        return FileRecord(
            id=file_id,
            tenant=batch.tenant,
            key_id=batch.key_id,
            purpose="batch_output",
            filename=f"{batch.id}_{kind}.jsonl",
            num_bytes=num_bytes,
            created_at=now_s,
            expires_at=now_s + batch.output_ttl_s,
        )

    async def _finish(
        self,
        status: str,
        output: FileRecord | None = None,
        error: FileRecord | None = None,
        errors: list[BatchFault] | None = None,
    ) -> BatchRecord:
        values: dict[str, Any] = {"status": status, f"{status}_at": self.parts.store.wall_clock()}
        if status == "failed":
            values["errors"] = msgspec.json.encode(errors).decode()
        values |= {"output_file_id": output and output.id, "error_file_id": error and error.id}
        leases, batch_id = self.parts.leases, self.record.id
        written = [file for file in (output, error) if file is not None]
        return await asyncio.to_thread(lambda: leases.finish(batch_id, written, **values))


async def _paced(parts: Iterator[T]) -> AsyncIterator[T]:
    """Take parts one by one in threads: neither those nor the event loop are kept from others."""
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part
        await asyncio.sleep(_BREATH_S)
