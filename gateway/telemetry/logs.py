"""Log lines for people (key=value) or for programs (JSON), from the same calls.

A call is `logger.info("words of the event name=%s other=%d", name, other)`. The JSON format finds
the fields in the call's template, so their values keep their types. A request's ids are added to
every line on its way. No line holds a prompt, an answer, a key or a URL's query.

Neither format lets a value begin a line of its own: control characters are escaped. A traceback on
the way of a request names the exception's type and not its text, which may quote the request.
"""

import datetime
import json
import logging
import re
import sys
import traceback
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, Literal, TextIO

from outrider.gateway.telemetry.log_context import log_context

LogFormat = Literal["text", "json"]
_ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)

# A conversion of a template, with the field's name in front of it where it has one.
_PART: Final = re.compile(
    r"(?:(?:^|(?<=[\s:;,]))(?P<name>[A-Za-z_][\w.]*)=)?"
    r"(?P<conversion>%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]))"
)
_NUMBERS: Final = frozenset("dieEfFgG")
_MAX_CAUSES: Final = 8
_MAX_PATH_CHARS: Final = 256
_OWN_FIELDS: Final = frozenset(
    {"time", "level", "process", "logger", "event", "message", "exception"}
)
_QUIET: Final[tuple[str, ...]] = (
    "aiohttp",
    "alembic",
    "asyncio",
    "httpcore2",
    "httpx2",
    "huggingface_hub",
    "psycopg",
    "redis",
    "sqlalchemy",
    "urllib3",
)
"""Loggers that would write statements with their values, and whole URLs, at lower levels."""

# Characters that end a line in some reader, or move a terminal's cursor: the control characters of
# ASCII and Latin-1, Unicode's line ends, and marks that turn the direction of the following text.
_ESCAPES: Final[dict[int, str]] = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))
} | {
    code: f"\\u{code:04x}"
    for code in (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_ESCAPES.update({ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"})


def configure_logging(
    level: str,
    log_format: LogFormat = "text",
    *,
    process: str = "gateway",
    stream: TextIO | None = None,
) -> None:
    """Set the root logger up, uvicorn's lines included. Replaces any earlier setup.

    `process` is part of every line. `stream`: standard error unless another is given.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    at_least_warning = max(logging.WARNING, root.level)
    for name in (*_QUIET, "uvicorn.error"):
        logging.getLogger(name).setLevel(at_least_warning)
    access = logging.getLogger("uvicorn.access")
    access.filters = [AccessFilter()]


class _Formatter(logging.Formatter):
    """The common part of both formats."""

    def formatException(self, ei: _ExceptionInfo) -> str:
        """Return the traceback, without texts that may quote a request."""
        if log_context() is None:
            return super().formatException(ei)
        return "\n".join(_traceback_lines(ei[1]))


class TextFormatter(_Formatter):
    """One line of key=value; a traceback follows below it."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, with the request's ids at its end where it does not name them."""
        message = record.message.translate(_ESCAPES)
        more = [
            f" {name}={value}"
            for name, value in _context_fields().items()
            if f"{name}=" not in message
        ]
        record.message = message + "".join(more).translate(_ESCAPES)
        return super().formatMessage(record)


class JsonFormatter(_Formatter):
    """One JSON object a line: time (UTC), level, process, logger, event and the event's fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Values without a JSON form become text."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
        }
        line.update(_event_of(record))
        for name, value in _context_fields().items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))  # ASCII: half a character is escaped, too


class AccessFilter(logging.Filter):
    """Makes uvicorn's access lines like ours, without the query: it may contain secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; it is always written."""
        arguments = record.args
        if isinstance(arguments, tuple) and len(arguments) == 5:
            client, method, path, version, status = arguments
            record.msg = "access client=%s method=%s path=%s http=%s status=%d"
            shown = str(path).partition("?")[0][:_MAX_PATH_CHARS]
            record.args = (client, method, shown, version, status)
        return True


@dataclass(frozen=True, slots=True)
class _Template:
    """A message's words with its conversions."""

    words: str
    """The event's words, with conversions that belong to no field."""
    parts: tuple[tuple[str | None, str], ...]
    """One a conversion: the field's name, None where it has none, and the conversion."""


@lru_cache(maxsize=1024)
def _template_of(template: str) -> _Template | None:
    """Return the template; None where it is no call of ours: values, but no names."""
    found = [part for part in _PART.finditer(template) if part["conversion"] != "%%"]
    names = [part["name"] for part in found]
    words = _PART.sub(_without_field, template)
    is_other = "%" in _PART.sub("", template)
    if is_other or (names and not any(names)):
        return None
    return _Template(
        " ".join(words.split()).strip(" :;,"),
        tuple(
            (
                f"{part['name']}_" if part["name"] in _OWN_FIELDS else part["name"],
                part["conversion"],
            )
            for part in found
        ),
    )


def _without_field(part: re.Match[str]) -> str:
    return part[0] if part["name"] is None or part["conversion"] == "%%" else ""


def _event_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the event and its fields; all in one text where the call is not one of ours."""
    template = _template_of(record.msg) if isinstance(record.msg, str) else None
    values = record.args or ()
    if template is None or not isinstance(values, tuple) or len(values) != len(template.parts):
        return {"message": record.getMessage()}
    parts = list(zip(template.parts, values, strict=True))
    nameless = tuple(value for (name, _), value in parts if name is None)
    line: dict[str, Any] = {"event": template.words % nameless}
    for (name, conversion), value in parts:
        if name is not None:
            line[name] = _value(conversion, value)
    return line


def _value(conversion: str, value: object) -> object:
    """Return a number as the template rounds it; any other value as text."""
    if value is None or isinstance(value, bool):
        return value
    if conversion[-1] in _NUMBERS and isinstance(value, int | float):
        return int(value) if conversion[-1] in "di" else _finite(float(conversion % value))
    if isinstance(value, int | float):
        return _finite(value)
    return str(value)


def _traceback_lines(error: BaseException | None) -> list[str]:
    """Return where the error and its causes were raised; the last call comes last."""
    blocks: list[list[str]] = []
    while error is not None and len(blocks) < _MAX_CAUSES:
        frames = "".join(traceback.format_tb(error.__traceback__)).rstrip("\n").splitlines()
        kind = type(error)
        blocks.append(
            ["Traceback (most recent call last):", *frames, f"{kind.__module__}.{kind.__name__}"]
        )
        hidden = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or hidden
    return [line for block in reversed(blocks) for line in block]


def _finite(number: float) -> float | str:
    """Replace infinities, which JSON lacks."""
    return number if abs(number) < float("inf") else str(number)


def _context_fields() -> dict[str, str]:
    context = log_context()
    if context is None:
        return {}
    fields = {"request_id": context.request_id}
    if context.key is not None:
        fields["key"] = context.key
    if context.tier is not None:
        fields["tier"] = context.tier
    if context.trace_id is not None:
        fields["trace_id"] = context.trace_id
    return fields
