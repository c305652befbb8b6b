"""Keys and teams as rows of their tables, there and back."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar, cast, get_args

from sqlalchemy import RowMapping

from outrider.gateway.contract.schema.kinds import Prefer, Reveals
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder, KeyRecord, TeamOrder, TeamRecord

logger = logging.getLogger(__name__)

Record = TypeVar("Record")

_DOCUMENTS: Final = frozenset({"models", "tiers", "limits", "labels"})
"""Columns that hold JSON."""


def fields_of(
    order: KeyOrder | TeamOrder, kind: type[KeyOrder] | type[TeamOrder]
) -> dict[str, Any]:
    """Return the fields that `kind` has, by name."""
    return {field.name: getattr(order, field.name) for field in fields(kind)}


def key_of(row: RowMapping) -> KeyRecord:
    """Return a key. Raises ValueError for a row that no key can have."""
    old_hash = row["old_hash"]
    return KeyRecord(
        key_id=row["id"],
        name=row["name"],
        team_id=row["team_id"],
        key_hash=bytes.fromhex(row["hash"]),
        hashed_with=row["hashed_with"],
        old_hash=None if old_hash is None else bytes.fromhex(old_hash),
        old_hash_until=row["old_hash_until"],
        scopes=Scopes(
            models=_names(row["models"]),
            tiers=_names(row["tiers"]),
            is_admin=row["is_admin"],
            reads_metrics=row["reads_metrics"],
            reveals=_reveals(row["reveals"]),
            prefer=_prefer(row["prefer"]),
        ),
        limits=LimitSpec.model_validate_json(row["limits"]),
        weight=row["weight"],
        labels=json.loads(row["labels"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


def team_of(row: RowMapping) -> TeamRecord:
    """Return a team. Raises ValueError for a row that no team can have."""
    return TeamRecord(
        team_id=row["id"],
        name=row["name"],
        limits=LimitSpec.model_validate_json(row["limits"]),
        weight=row["weight"],
        labels=json.loads(row["labels"]),
        created_at=row["created_at"],
    )


def row_of_key(order: KeyOrder) -> dict[str, Any]:
    """Return the fields of a key that may be changed."""
    return {
        "name": order.name,
        "team_id": order.team_id,
        "models": _list(order.scopes.models),
        "tiers": _list(order.scopes.tiers),
        "is_admin": order.scopes.is_admin,
        "reads_metrics": order.scopes.reads_metrics,
        "reveals": order.scopes.reveals,
        "prefer": order.scopes.prefer,
        "limits": order.limits.model_dump_json(exclude_defaults=True),
        "weight": order.weight,
        "labels": json.dumps(dict(order.labels)),
        "expires_at": order.expires_at,
    }


def row_of_team(order: TeamOrder) -> dict[str, Any]:
    """Return the fields of a team that may be changed."""
    return {
        "name": order.name,
        "limits": order.limits.model_dump_json(exclude_defaults=True),
        "weight": order.weight,
        "labels": json.dumps(dict(order.labels)),
    }


def audited(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `row_of_key` or `row_of_team` returned, for the audit log."""
    return {
        name: json.loads(value) if name in _DOCUMENTS and value is not None else value
        for name, value in row.items()
    }


def readable(rows: Iterable[RowMapping], read: Callable[[RowMapping], Record]) -> Iterator[Record]:
    """Return the records of valid rows; invalid ones, edited by other programs, are logged."""
    for row in rows:
        try:
            record = read(row)
        except (ValueError, TypeError) as error:
            kind = type(error).__name__  # the error's text may contain anything
            logger.error("row of a key or team is damaged id=%s error=%s", row["id"], kind)
        else:
            yield record


def _reveals(text: str | None) -> Reveals | None:
    if text is not None and text not in get_args(Reveals):
        raise ValueError("the column reveals holds another word")
    return cast("Reveals | None", text)


def _prefer(text: str | None) -> Prefer | None:
    if text is not None and text not in get_args(Prefer):
        raise ValueError("the column prefer holds another word")
    return cast("Prefer | None", text)


def _names(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(json.loads(text))


def _list(names: frozenset[str] | None) -> str | None:
    return None if names is None else json.dumps(sorted(names))
