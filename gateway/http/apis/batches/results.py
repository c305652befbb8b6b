"""The lines of a batch's output and error files."""

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.gateway.http.apis.batches.objects import BatchFault


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
    document = {
        "id": line_id(batch_id, line),
        "custom_id": custom_id,
        "response": response,
        "error": fault and {"code": fault.code, "message": fault.message},
    }
    return msgspec.json.encode(document).decode()


def told_body(body: bytes) -> Any:
    """Return the JSON of an answer as it is, on one line; text where it is none."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"text": body.decode("utf-8", "replace")}
    return msgspec.Raw(body) if b"\n" not in body else document
