"""Settings of latency objectives: `[slo]` and `[slo.classes.NAME]`."""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from outrider.gateway.settings.sections import Count, Section

SHORT_CHAT: Final = "short-chat"
LONG_CONTEXT: Final = "long-context"
TOOL_CALLING: Final = "tool-calling"
BATCH: Final = "batch"
IDLE: Final = "idle"

MAX_CLASSES: Final = 32

_CLASS_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")

RefusalRule = Literal["own", "all", "never"]
QueueOrder = Literal["fair", "deadlines"]


class SloClassSettings(Section):
    """Latency objectives of a class of requests; 0 for no such objective."""

    ttft_ms: Annotated[float, Field(ge=0, le=86_400_000)] = 0.0
    """Time from a request's arrival to its first token."""
    inter_token_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 0.0
    """Mean time between the tokens of an answer."""
    is_batch: bool = False
    """Batch work, which uses only the capacity that other classes leave."""
    is_yielding: bool = False
    """Batch work that stands still while anything else is answered."""


# The first three lie around the limits of MLPerf Inference for chats (450 ms and 40 ms for
# interactive use to 6 s and 175 ms for the largest model).
_DEFAULT_CLASSES: Final = {
    SHORT_CHAT: SloClassSettings(ttft_ms=1000.0, inter_token_ms=100.0),
    LONG_CONTEXT: SloClassSettings(ttft_ms=6000.0, inter_token_ms=150.0),
    TOOL_CALLING: SloClassSettings(ttft_ms=2000.0, inter_token_ms=100.0),
    BATCH: SloClassSettings(is_batch=True),
    IDLE: SloClassSettings(is_batch=True, is_yielding=True),
}


def default_classes() -> dict[str, SloClassSettings]:
    """The built-in classes, with their defaults."""
    return dict(_DEFAULT_CLASSES)


class SloSettings(Section):
    """Latency objectives of requests that set none themselves."""

    classes: dict[str, SloClassSettings] = Field(default_factory=default_classes)
    """Classes by name; a request selects one with outrider.slo.class."""
    long_context_tokens: Count = 2048
    """Length of a prompt from which a request without a class belongs to long-context."""
    queue: QueueOrder = "deadlines"
    """Order of waiting requests of one tenant: deadlines puts the request with the least time left
    first, and holds others back where answers would miss their pace, so more are in time and the
    slowest first tokens come later; fair is by arrival, batch work last (docs/slo.md)."""
    refuse: RefusalRule = "own"
    """Requests refused at once, with 429, if the first token cannot come in time: own (those that
    send ttft_ms), all (those with an objective of a class as well), or never."""
    window_s: Annotated[float, Field(ge=5.0, le=3600.0)] = 60.0
    """Window over which goodput is exported."""

    @field_validator("classes", mode="before")
    @classmethod
    def _over_defaults(cls, given: object) -> object:
        """Merge the given settings of a built-in class over its defaults."""
        if not isinstance(given, dict):
            return given
        merged: dict[str, Any] = {
            name: settings.model_dump() for name, settings in _DEFAULT_CLASSES.items()
        }
        for written, settings in given.items():
            # A variable of the environment cannot have a hyphen in its name.
            name = str(written).replace("_", "-")
            said = settings.model_dump() if isinstance(settings, SloClassSettings) else settings
            is_both = isinstance(said, dict) and name in merged
            merged[name] = {**merged[name], **said} if is_both else said
        return merged

    @field_validator("classes")
    @classmethod
    def _can_be_named(cls, classes: dict[str, SloClassSettings]) -> dict[str, SloClassSettings]:
        for name in classes:
            if not _CLASS_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a class name; write 1 to 32 lower-case letters, digits and "
                    "-, beginning with a letter"
                )
        if len(classes) > MAX_CLASSES:
            raise ValueError(f"{len(classes)} classes are too many; define at most {MAX_CLASSES}")
        return classes
