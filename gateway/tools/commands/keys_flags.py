"""Limits and labels of keys and teams, as `outrider keys` takes them on the command line."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer

from outrider.gateway.settings.tree import SettingsError

NO_VALUE: Final = "none"
"""The value that deletes a limit, a label or an expiry date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFlags:
    """Limits of a new key or team, named as in /admin; its labels and its weight."""

    requests_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Requests in any 60 seconds.")
    ] = None
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Tokens of prompts and answers in any 60 seconds.")
    ] = None
    requests_per_day: Annotated[int | None, typer.Option(min=0, help="Requests in a UTC day.")] = (
        None
    )
    tokens_per_day: Annotated[int | None, typer.Option(min=0, help="Tokens in a UTC day.")] = None
    concurrent_requests: Annotated[
        int | None, typer.Option(min=0, help="Requests at the same time.")
    ] = None
    usd_per_day: Annotated[float | None, typer.Option(min=0, help="Charges in a UTC day.")] = None
    usd_per_week: Annotated[
        float | None, typer.Option(min=0, help="Charges in a UTC week, from Monday on.")
    ] = None
    usd_per_month: Annotated[float | None, typer.Option(min=0, help="Charges in a UTC month.")] = (
        None
    )
    usd_per_7_days: Annotated[
        float | None, typer.Option(min=0, help="Charges today and in the 6 days before, UTC.")
    ] = None
    usd_per_30_days: Annotated[
        float | None, typer.Option(min=0, help="Charges today and in the 29 days before, UTC.")
    ] = None
    model_limits: Annotated[
        list[str] | None,
        typer.Option(
            "--model-limit",
            metavar="TIER:LIMIT=N",
            help="A further limit of one tier, such as large:tokens_per_minute=10000; repeatable.",
        ),
    ] = None
    end_user_limits: Annotated[
        list[str] | None,
        typer.Option(
            "--end-user-limit",
            metavar="LIMIT=N",
            help="A limit of each end user, such as usd_per_day=0.5; repeatable.",
        ),
    ] = None
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=TEXT", help="A label, for your own use; repeatable."),
    ] = None
    weight: Annotated[float, typer.Option(help="Its share of a full queue; other keys have 1.")] = (
        1.0
    )

    def document(self) -> dict[str, Any]:
        """Return the fields as /admin takes them. Raises SettingsError."""
        limits = asdict(self)
        labels, weight = labels_of(limits.pop("labels") or []), limits.pop("weight")
        limits["models"] = model_limits_of(limits.pop("model_limits") or [])
        limits["end_user"] = _amounts(limits.pop("end_user_limits"), "--end-user-limit") or None
        return {"limits": limits, "labels": labels, "weight": weight}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeFlags:
    """What a new key may do."""

    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="A model name that it may request; repeatable. Default: all."),
    ] = None
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier", help="A tier that may answer its requests; repeatable. Default: all."
        ),
    ] = None
    admin: Annotated[bool, typer.Option("--admin", help="It may use /admin.")] = False
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics", help="It may read /metrics, and nothing else without --model or --tier."
        ),
    ] = False
    reveals: Annotated[
        str | None,
        typer.Option(
            metavar="nothing|tiers|costs",
            help="What its answers tell. Default: tiers, or nothing with --model.",
        ),
    ] = None
    prefer: Annotated[
        str | None,
        typer.Option(
            metavar="latency|price|quality",
            help="What counts first in its requests for auto that do not say it.",
        ),
    ] = None

    def document(self) -> dict[str, Any]:
        """Return the scope as /admin takes it."""
        is_reader = self.metrics and not (self.models or self.tiers or self.admin)
        every: list[str] | None = [] if is_reader else None
        return asdict(self) | {"models": self.models or every, "tiers": self.tiers or every}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeFlags:
    """Changes of a key or team; what is not named stays as it is."""

    name: Annotated[str | None, typer.Option("--name", help="Its new name.")] = None
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="LIMIT=N|none",
            help="A limit to set or delete, such as tokens_per_minute=10000; repeatable.",
        ),
    ] = None
    model_limits: Annotated[
        list[str] | None,
        typer.Option(
            "--model-limit",
            metavar="TIER:LIMIT=N|none",
            help="A limit of one tier to set or delete; repeatable.",
        ),
    ] = None
    end_user_limits: Annotated[
        list[str] | None,
        typer.Option(
            "--end-user-limit",
            metavar="LIMIT=N|none",
            help="A limit of each end user to set or delete; repeatable.",
        ),
    ] = None
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="NAME=TEXT|none", help="A label to set or delete; repeatable."
        ),
    ] = None
    weight: Annotated[
        float | None,
        typer.Option("--weight", help="Its share of a full queue; other keys have 1."),
    ] = None

    def plain(self) -> dict[str, Any]:
        """Return the new values of single fields."""
        given = {"name": self.name, "weight": self.weight}
        return {name: value for name, value in given.items() if value is not None}

    def patches(self) -> dict[str, Any]:
        """Return the changes of limits and labels, as the body of a PATCH has them."""
        patch: dict[str, Any] = {}
        own = _amounts(self.limits, "--limit")
        if theirs := _amounts(self.end_user_limits, "--end-user-limit"):
            own["end_user"] = theirs
        for path, text in _pairs(self.model_limits, "--model-limit"):
            tier, _, name = path.rpartition(":")
            if not tier:
                raise SettingsError(
                    f"--model-limit {path}={text}: write it as large:tokens_per_minute=10000"
                )
            own.setdefault("models", {}).setdefault(tier, {})[name] = _amount(name, text)
        if own:
            patch["limits"] = own
        if self.labels:
            pairs = _pairs(self.labels, "--label")
            patch["labels"] = {name: None if text == NO_VALUE else text for name, text in pairs}
        return patch


def model_limits_of(texts: list[str]) -> dict[str, dict[str, float]]:
    """Parse `TIER:LIMIT=N` texts. Raises SettingsError for any other form."""
    limits: dict[str, dict[str, float]] = {}
    for text in texts:
        # Names of tiers may have colons, names of limits have none.
        tier, colon, rest = text.rpartition(":")
        name, equals, number = (part.strip() for part in rest.partition("="))
        try:
            value = float(number) if name.startswith("usd") else int(number)
        except ValueError:
            value = -1
        if not (tier.strip() and colon and equals and value >= 0):
            raise SettingsError(f"--model-limit {text}: write it as large:tokens_per_minute=10000")
        limits.setdefault(tier.strip(), {})[name] = value
    return limits


def _pairs(texts: list[str] | None, flag: str) -> Iterator[tuple[str, str]]:
    """Parse `NAME=VALUE` texts. Raises SettingsError for any other form."""
    for text in texts or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise SettingsError(f"{flag} {text}: write it as NAME=VALUE, or NAME=none to delete it")
        yield name, value


def _amounts(texts: list[str] | None, flag: str) -> dict[str, Any]:
    """Parse `LIMIT=N` texts, where N may be `none`. Raises SettingsError for any other form."""
    return {name: _amount(name, text) for name, text in _pairs(texts, flag)}


def _amount(name: str, text: str) -> Any:
    """Parse a limit's number; None for `none`. The schema refuses what is not a number."""
    if text == NO_VALUE:
        return None
    try:
        return float(text) if name.startswith("usd") else int(text)
    except ValueError:
        return text


def labels_of(texts: list[str]) -> dict[str, str]:
    """Parse `NAME=TEXT` texts. Raises SettingsError for any other form."""
    labels = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"--label {text}: write it as --label name=text")
        labels[name.strip()] = value.strip()
    return labels
