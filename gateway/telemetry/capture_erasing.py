"""Erasing of one tenant's or end user's exchanges from files of captured texts and of mirrors."""

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from outrider.gateway.telemetry.redaction import redact_text


def erase_lines(
    paths: Iterable[Path],
    own_ids: Collection[str],
    end_user_forms: Collection[str],
    key_ids: Collection[str] | None = None,
) -> int:
    """Remove the lines of `own_ids`, and of an end user of the keys `key_ids`; None: of any key.

    Lines that cannot be read go, too, and those whose end user was redacted to the same text.
    Returns the number of lines removed. Raises OSError.
    """
    names = {*end_user_forms, *map(redact_text, end_user_forms)}
    num_removed = 0
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _is_wanted(line, own_ids, names, key_ids)]
        if len(kept) == len(lines):
            continue
        num_removed += len(lines) - len(kept)
        part = path.with_suffix(".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(kept)
            part.replace(path)
        finally:  # such as on a full disk: nobody would remove these texts
            part.unlink(missing_ok=True)
    return num_removed


def _is_wanted(
    line: bytes,
    own_ids: Collection[str],
    names: Collection[str],
    key_ids: Collection[str] | None,
) -> bool:
    try:
        document: dict[str, Any] = json.loads(line)
        key_id, request = document["key"], document["request"]
        users = {request.get(name) for name in ("user", "safety_identifier")}
        users.add(document.get("end_user"))
        users.add((request.get("metadata") or {}).get("user_id"))
    except (ValueError, KeyError, AttributeError, TypeError):
        return True
    is_theirs = not users.isdisjoint(names) and (key_ids is None or key_id in key_ids)
    return key_id in own_ids or is_theirs
