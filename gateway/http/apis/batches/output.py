"""The output and error files of a batch: lines of results, written when it ends."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from outrider.gateway.http.apis.batches.folder import FileFolder
from outrider.gateway.http.apis.batches.input import LineFaultError, numbered_lines, read_line
from outrider.gateway.http.apis.batches.leases import BatchLeases
from outrider.gateway.http.apis.batches.objects import BatchFault
from outrider.gateway.http.apis.batches.records import BatchRecord, FileRecord

MAX_FAULTS_TOLD: Final = 100
"""Faults that a batch itself has; its error file has all of them."""


def line_id(batch_id: str, line: int) -> str:
    """Return the id of a batch's request, which its ledger's rows have as well."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line}"


def result_line(
    batch_id: str,
    line: int,
    custom_id: str | None,
    *,
    response: Mapping[str, Any] | None = None,
    fault: BatchFault | None = None,
) -> str:
    """Return a line of a result file."""
    error: dict[str, Any] | None = None
    if fault is not None:
        error = {"code": fault.code, "message": fault.message}
        if fault.line is not None:
            error |= {"line": fault.line, "param": fault.param}
    document = {
        "id": line_id(batch_id, line),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(document).decode()


class OutputWriter:
    """Writes a batch's files. Blocks: in an event loop, use a thread."""

    def __init__(
        self,
        folder: FileFolder,
        leases: BatchLeases,
        wall_clock: Callable[[], float],
        max_body_bytes: int,
    ) -> None:
        self._folder = folder
        self._leases = leases
        self._wall_clock = wall_clock
        self._max_body_bytes = max_body_bytes

    def write(self, batch: BatchRecord, unfinished: BatchFault | None) -> list[FileRecord]:
        """Write the results so far; `unfinished`: why the other requests have none.

        Returns the files, which have to be entered into the database.
        """
        failed = self._leases.results(batch.id, is_error=True)
        errors = (*failed,) if unfinished is None else self._with_rest(batch, failed, unfinished)
        answered = self._leases.results(batch.id, is_error=False)
        files = (self.file_of(batch, "output", answered), self.file_of(batch, "error", errors))
        return [file for file in files if file is not None]

    def _with_rest(
        self, batch: BatchRecord, failed: Iterable[str], fault: BatchFault
    ) -> Iterator[str]:
        yield from failed
        done = self._leases.done_lines(batch.id)
        path = self._folder.path(batch.input_file_id)
        if not path.is_file():
            return
        for number, line in numbered_lines(path, self._max_body_bytes):
            if number not in done:
                try:
                    found = read_line(number, line, batch.endpoint)
                except LineFaultError:
                    continue
                yield result_line(batch.id, number, found.custom_id, fault=fault)

    def file_of(self, batch: BatchRecord, kind: str, lines: Iterable[str]) -> FileRecord | None:
        """Write one of a batch's files; None where there are no lines.

        Its id follows from the batch's, so that a file that is written again takes its place.
        """
        num_bytes = 0
        file_id = f"file-{batch.id.removeprefix('batch_')}{kind[0]}"
        with self._folder.writing() as (part, file):
            for line in lines:
                num_bytes += file.write(line.encode() + b"\n")
            file.flush()
            if not num_bytes:
                return None
            self._folder.put(part, file_id)
        now_s = self._wall_clock()
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


def ids_of(written: Iterable[FileRecord]) -> dict[str, str]:
    """Return the columns of a batch that name its files."""
    return {
        "output_file_id" if record.id.endswith("o") else "error_file_id": record.id
        for record in written
    }
