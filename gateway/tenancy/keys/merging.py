"""Merges changes of limits and labels into the existing ones."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.tenancy.keys.admin_schema import (
    KeyLimits,
    KeyUpdate,
    LabelMap,
    TeamUpdate,
    limits_report,
)
from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder

_LABELS: Final[TypeAdapter[dict[str, str]]] = TypeAdapter(LabelMap)


def merged(before: Mapping[str, Any], patch: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `before` with a JSON merge patch (RFC 7396): null deletes, objects are merged."""
    after = dict(before)
    for name, value in (dict.fromkeys(before) if patch is None else patch).items():
        if value is None:
            after.pop(name, None)
        elif isinstance(value, Mapping):
            inner = after.get(name)
            after[name] = merged(inner if isinstance(inner, Mapping) else {}, value)
        else:
            after[name] = value
    return after


def merged_changes(before: KeyOrder | TeamOrder, wanted: KeyUpdate | TeamUpdate) -> dict[str, Any]:
    """Return the limits and labels that a request changes, as they are afterwards.

    Raises BadRequestError for more of them than are allowed.
    """
    changes: dict[str, Any] = {}
    patch = wanted.model_dump(include={"limits", "labels"}, exclude_unset=True)
    try:
        if "limits" in patch:
            limits = merged(limits_report(before.limits), patch["limits"])
            limits["models"] = {tier: own for tier, own in limits.get("models", {}).items() if own}
            limits["end_user"] = limits.get("end_user") or None
            changes["limits"] = KeyLimits.model_validate(limits).spec()
        if "labels" in patch:
            changes["labels"] = _LABELS.validate_python(merged(before.labels, patch["labels"]))
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        raise BadRequestError(
            f"With this change the key or team would have too many limits or labels: "
            f"{detail['msg']}. Delete some with null.",
            param="limits" if "limits" not in changes and "limits" in patch else "labels",
        ) from None
    return changes
