"""Checks as the settings want them."""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.gateway.settings.alerts import secret_bytes
from outrider.gateway.settings.checks import CheckSettings
from outrider.gateway.settings.extras import need_extra
from outrider.gateway.settings.tree import Settings, SettingsError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from outrider.gateway.answering.candidates.chains import ChainBook
    from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
    from outrider.gateway.checks.checks import Checks
    from outrider.gateway.checks.hooks import Hook
    from outrider.gateway.wiring.gateway_parts import GatewayParts


def build_checks(settings: Settings, registry: "CollectorRegistry | None") -> "Checks | None":
    """Build the checks that ask hooks; None where there are none. Raises SettingsError.

    Functions are imported, but nobody is asked yet.
    """
    asking = {name: check for name, check in settings.checks.items() if not check.redact}
    if not asking:
        return None
    from outrider.gateway.checks.check_metrics import CheckMetrics
    from outrider.gateway.checks.checks import Check, Checks

    metrics = CheckMetrics(registry)
    return Checks(
        checks=[
            Check(name=name, settings=check, hook=_hook(name, check), metrics=metrics)
            for name, check in asking.items()
        ]
    )


def finding_names(
    parts: "GatewayParts", catalog: "LiveModelCatalog", chains: "ChainBook"
) -> "GatewayParts":
    """Return the parts with checks that know which tiers may answer a request."""
    if parts.checks is None:
        return parts
    from outrider.gateway.answering.candidates.answering_names import AnsweringNames

    names = AnsweringNames(
        chains=chains,
        catalog=catalog,
        upstream=parts.upstream,
        experiments=parts.experiments.registry,
    )
    return replace(parts, checks=replace(parts.checks, find_names=names.find))


def build_redaction(settings: Settings) -> "Callable[[bytes], Awaitable[bytes]] | None":
    """Build what redacts requests to tiers elsewhere; None where nothing is to be redacted.

    Raises SettingsError without Presidio where that is to find it.
    """
    kinds = dict.fromkeys(kind for check in settings.checks.values() for kind in check.redact)
    if not kinds:
        return None
    from outrider.gateway.checks.redaction import forms, presidio, redaction

    if "presidio" not in kinds:
        return redaction(forms(kinds))
    need_extra("presidio", "redact = presidio")
    try:
        return redaction(forms(kinds), presidio(), is_slow=True)
    except LookupError as error:
        raise SettingsError(f"redact = presidio needs a model of spaCy's: {error}") from None


def _hook(name: str, check: CheckSettings) -> "Hook":
    from outrider.gateway.checks.hooks import FunctionHook, HttpHook

    if check.url is not None:
        key = None if check.secret is None else secret_bytes(check.secret)
        return HttpHook(check.url.get_secret_value(), key)
    if check.function is None:
        raise ValueError("neither url nor function is set")
    return FunctionHook(_function(name, check.function))


def _function(name: str, path: str) -> Callable[[Any], Any]:
    """Import a function. Raises SettingsError."""
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise SettingsError(f"checks.{name}.function = {path!r}: {what}") from error
    if not callable(found):
        raise SettingsError(f"checks.{name}.function = {path!r}: it cannot be called")
    function: Callable[[Any], Any] = found
    return function
