"""Settings of checks (`[checks.NAME]`)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from outrider.gateway.settings.alerts import HookSecret, HookUrl
from outrider.gateway.settings.sections import (
    Count,
    NotNegative,
    Seconds,
    Section,
    split_list,
)
from outrider.gateway.settings.tiers import Complaint

Redacted = Literal["email", "card", "key", "account", "phone", "presidio"]

_Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]


class CheckSettings(Section):
    """A check of texts, made by a service (url), a function, or by redaction: one of the three."""

    where: Literal["before", "after", "stream"] = "before"
    """What is checked: the request before its answer, the answer before any of it is sent, or a
    stream in windows while it is sent. Redaction is before."""
    url: HookUrl | None = None
    """Service that is asked by POST; https, or on this machine. It is not shown."""
    secret: HookSecret | None = None
    """Key that signs what the service is sent: whsec_ and 24 to 64 random bytes in base64, as
    for alerts."""
    function: str | None = None
    """Python function that is asked, as MODULE:FUNCTION; def or async def."""
    redact: Annotated[tuple[Redacted, ...], NoDecode, BeforeValidator(split_list)] = ()
    """What is taken out of requests to upstream tiers on other machines: email, card, key
    (credentials of APIs), account (IBAN), phone; presidio: what Presidio finds."""
    models: _Names = ()
    """Models, tiers and aliases for which it is made, whatever name a request gives a model;
    empty: all."""
    keys: _Names = ()
    """Names or ids of keys and teams for which it is made; empty: all."""
    timeout_s: Seconds = 2.0
    """Longest wait for a verdict."""
    on_failure: Literal["open", "closed"] = "closed"
    """What becomes of a text without a verdict: it goes on unchecked, or its request fails."""
    window: Count = 1
    """Fewest characters of a stream that are checked at once. Those that come while a check runs
    are the next window."""
    hold_back: NotNegative = 0
    """Characters of a checked window that are not sent before they were checked again together
    with the next one."""


def check_complaints(checks: Mapping[str, CheckSettings]) -> Iterator[Complaint]:
    """Yield what keeps checks from being made."""
    for name, check in checks.items():
        path = ("checks", name)
        if sum(map(bool, (check.url, check.function, check.redact))) != 1:
            yield Complaint(path, None, "set one of url, function and redact")
        if check.function and not _is_function(check.function):
            yield Complaint((*path, "function"), check.function, "write MODULE:FUNCTION")
        if check.redact and (check.where != "before" or check.models or check.keys):
            what = "covers every request to a tier elsewhere: it has no where, models or keys"
            yield Complaint((*path, "redact"), ",".join(check.redact), what)


def _is_function(path: str) -> bool:
    module, _, name = path.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))
