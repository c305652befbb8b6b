"""Erasing of one tenant's or end user's exchanges from the files of captured texts."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from outrider.gateway.telemetry.capture import captured_files


def erase_captured(folder: Path, key_ids: Collection[str], end_user: str | None = None) -> int:
    """Remove the lines of these keys, and of this end user only; no keys: of any key.

    Lines that cannot be read go, too. Returns the number of lines removed. Raises OSError.
    """
    num_removed = 0
    for path in captured_files(folder):
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _is_wanted(line, key_ids, end_user)]
        if len(kept) == len(lines):
            continue
        num_removed += len(lines) - len(kept)
        part = path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(kept)
        part.replace(path)
    return num_removed


def _is_wanted(line: bytes, key_ids: Collection[str], end_user: str | None) -> bool:
    try:
        document: dict[str, Any] = json.loads(line)
        is_of_keys = not key_ids or document["key"] in key_ids
        request = document["request"]
        users = {request.get(name) for name in ("user", "safety_identifier")}
        users.add((request.get("metadata") or {}).get("user_id"))
    except (ValueError, KeyError, AttributeError, TypeError):
        return True
    return is_of_keys and (end_user is None or end_user in users)
