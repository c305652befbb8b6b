"""Reads answers as the Structs that they are described by."""

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

Answer = TypeVar("Answer")

_adapter = cache(TypeAdapter)


def read_answer(kind: type[Answer], document: object) -> Answer:
    """Return a document, or its JSON, as `kind`. Fails for a field that is not declared."""
    adapter: TypeAdapter[Any] = _adapter(kind)
    body = document if isinstance(document, bytes | str) else json.dumps(document)
    answer: Answer = adapter.validate_json(body, strict=True)
    return answer
