"""Request and answer bodies of /admin/keys and /admin/teams."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from msgspec.structs import asdict
from pydantic import ConfigDict, Field

from outrider.gateway.contract.schema.common import WHOLE, RequestModel, without_defaults
from outrider.gateway.contract.schema.kinds import Prefer, Reveals
from outrider.gateway.contract.schema.structs import CompleteModel
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import (
    KeyOrder,
    KeyRecord,
    KeyStatus,
    TeamOrder,
    TeamRecord,
)

MAX_NAME_CHARS = 128
MAX_LABELS = 64
MAX_NAMES = 256
MAX_GRACE_S = 366 * 86_400
MAX_PAGE = 1000
LAST_SECOND = 253_402_300_799
"""The end of the year 9999."""

_BY_TIER = "Further limits by tier, not by model: small, large or an upstream tier's name."
_ONE_LINE = r"^[^\x00-\x1f\x7f]*$"

AdminName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=_ONE_LINE)]
LabelText = Annotated[str, Field(max_length=256, pattern=_ONE_LINE)]
LabelName = Annotated[str, Field(min_length=1, max_length=64, pattern=_ONE_LINE)]
Words = Annotated[str, Field(min_length=1, max_length=256, pattern=_ONE_LINE)]
LabelMap = Annotated[
    dict[LabelName, LabelText],
    Field(
        max_length=MAX_LABELS,
        # pydantic says patternProperties, which would let other names pass.
        json_schema_extra={
            "propertyNames": {"minLength": 1, "maxLength": 64, "pattern": _ONE_LINE},
        },
    ),
]
LabelsPatch = Annotated[
    dict[LabelName, LabelText | None],
    Field(
        max_length=MAX_LABELS,
        json_schema_extra={
            "propertyNames": {"minLength": 1, "maxLength": 64, "pattern": _ONE_LINE},
        },
    ),
]
ScopeNames = Annotated[list[Words], Field(max_length=MAX_NAMES)]
LimitCount = Annotated[int, Field(ge=0, le=2**53), WHOLE]
Usd = Annotated[float, Field(ge=0, le=1e9)]
QueueWeight = Annotated[float, Field(ge=0.01, le=1000)]
UnixSeconds = Annotated[int, Field(ge=0, le=LAST_SECOND), WHOLE]


class TierLimits(RequestModel):
    """Limits; null or absent is no limit, 0 admits no request.

    Minutes slide; days, weeks (from Monday on) and months are UTC's; 7 and 30 days end today.
    """

    requests_per_minute: LimitCount | None = None
    tokens_per_minute: LimitCount | None = None
    requests_per_day: LimitCount | None = None
    tokens_per_day: LimitCount | None = None
    concurrent_requests: LimitCount | None = None
    usd_per_day: Usd | None = None
    usd_per_week: Usd | None = None
    usd_per_month: Usd | None = None
    usd_per_7_days: Usd | None = None
    usd_per_30_days: Usd | None = None


class KeyLimits(TierLimits):
    """Limits of all tiers together; `models` has further ones by the tier that answers.

    `end_user` has those of each end user by itself, as requests name them.
    """

    end_user: TierLimits | None = None

    models: Annotated[
        dict[Words, TierLimits],
        Field(
            description=_BY_TIER,
            max_length=256,
            json_schema_extra={
                "propertyNames": {"minLength": 1, "maxLength": 256, "pattern": _ONE_LINE},
            },
        ),
    ] = Field(default_factory=dict)

    def spec(self) -> LimitSpec:
        """Return the limits for limiters."""
        return LimitSpec.model_validate(self.model_dump(exclude_none=True))


class LimitsPatch(TierLimits):
    """Limits to change: those that are absent stay as they are, null deletes one.

    `models` is merged in the same way by tier and limit, and `end_user` by limit.
    """

    end_user: TierLimits | None = None

    models: (
        Annotated[
            dict[Words, TierLimits | None],
            Field(
                description=_BY_TIER,
                max_length=256,
                json_schema_extra={
                    "propertyNames": {"minLength": 1, "maxLength": 256, "pattern": _ONE_LINE},
                },
            ),
        ]
        | None
    ) = None


def unknown_tiers(
    limits: KeyLimits | LimitsPatch | None, known: Collection[str]
) -> tuple[str, ...]:
    """Return the tiers to limit that are not known; deleting their limits names none."""
    named = (limits and limits.models) or {}
    return tuple(tier for tier, own in named.items() if own is not None and tier not in known)


class KeyCreate(RequestModel):
    """A new key. `models`: names that it may request; `tiers`: tiers that may answer; null: all.

    `team`: a team's id or name. `weight`: the share of a full queue, where it is in no team.
    `expires_at`: seconds since 1970 (UTC); null: never. A key with `admin` may use /admin, one with
    `metrics` may read /metrics. `reveals`: what its answers tell: nothing but the answer, the tiers
    behind it, or the operator's costs too; null: as the alias says, else tiers, or nothing where
    `models` is set. `prefer`: what counts first in its requests that do not say it.
    """

    name: AdminName
    team: Words | None = None
    models: ScopeNames | None = None
    tiers: ScopeNames | None = None
    admin: bool = False
    metrics: bool = False
    reveals: Reveals | None = None
    prefer: Prefer | None = None
    limits: KeyLimits = Field(default_factory=KeyLimits)
    weight: QueueWeight = 1.0
    labels: LabelMap = Field(default_factory=dict)
    expires_at: UnixSeconds | None = None

    def order(self, team_id: str | None) -> KeyOrder:
        """Return the order for the store. `team_id` is the id of `team`."""
        return KeyOrder(
            name=self.name,
            team_id=team_id,
            scopes=Scopes(
                models=name_set(self.models),
                tiers=name_set(self.tiers),
                is_admin=self.admin,
                reads_metrics=self.metrics,
                reveals=self.reveals,
                prefer=self.prefer,
            ),
            limits=self.limits.spec(),
            weight=self.weight,
            labels=self.labels,
            expires_at=self.expires_at,
        )


class KeyUpdate(RequestModel):
    """Changes of a key: the given fields change, the others stay.

    Limits and labels are merged into the existing ones: absent ones stay, null deletes one, and
    null in place of the whole object deletes all.
    """

    model_config = ConfigDict(json_schema_extra=without_defaults)

    name: AdminName = ""
    team: Words | None = None
    models: ScopeNames | None = None
    tiers: ScopeNames | None = None
    admin: bool = False
    metrics: bool = False
    reveals: Reveals | None = None
    prefer: Prefer | None = None
    limits: LimitsPatch | None = None
    weight: QueueWeight = 1.0
    labels: LabelsPatch | None = None
    expires_at: UnixSeconds | None = None


class KeyRotate(RequestModel):
    """Seconds for which the old secret stays valid beside the new one."""

    grace_s: Annotated[float, Field(ge=0, le=MAX_GRACE_S)] = 0.0


class TeamCreate(RequestModel):
    """A new team: limits for all its keys together, one share of a full queue, one cache."""

    name: AdminName
    limits: KeyLimits = Field(default_factory=KeyLimits)
    weight: QueueWeight = 1.0
    labels: LabelMap = Field(default_factory=dict)

    def order(self) -> TeamOrder:
        """Return the order for the store."""
        return TeamOrder(
            name=self.name, limits=self.limits.spec(), weight=self.weight, labels=self.labels
        )


class TeamUpdate(RequestModel):
    """Changes of a team: the given fields change, the others stay.

    Limits and labels are merged into the existing ones: absent ones stay, null deletes one, and
    null in place of the whole object deletes all.
    """

    model_config = ConfigDict(json_schema_extra=without_defaults)

    name: AdminName = ""
    limits: LimitsPatch | None = None
    weight: QueueWeight = 1.0
    labels: LabelsPatch | None = None


class KeyReport(CompleteModel, kw_only=True):
    """A key, without its secret. Times are seconds since 1970 (UTC).

    `old_secret_until`: until then the secret before the last rotation is taken too.
    """

    object: Literal["key"] = "key"
    id: str
    prefix: str
    name: str
    team: str | None
    status: KeyStatus
    admin: bool
    metrics: bool
    reveals: Reveals | None
    prefer: Prefer | None
    models: list[str] | None
    tiers: list[str] | None
    limits: dict[str, Any]
    weight: float
    labels: dict[str, str]
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    old_secret_until: int | None


class NewKeyReport(KeyReport, kw_only=True):
    """A key with its secret, `key`, which is never shown again."""

    key: str


class KeyList(CompleteModel, kw_only=True):
    """A page of keys, by their ids; where `has_more`, continue with `after` = the last one's id."""

    object: Literal["list"] = "list"
    data: list[KeyReport]
    has_more: bool


class TeamReport(CompleteModel, kw_only=True):
    """A team."""

    object: Literal["team"] = "team"
    id: str
    name: str
    limits: dict[str, Any]
    weight: float
    labels: dict[str, str]
    created_at: int


class TeamList(CompleteModel, kw_only=True):
    """All teams, by name."""

    object: Literal["list"] = "list"
    data: list[TeamReport]


def name_set(names: list[str] | None) -> frozenset[str] | None:
    """Return the names of a scope as a set."""
    return None if names is None else frozenset(names)


def key_report(record: KeyRecord, now_s: float) -> KeyReport:
    """Describe a key."""
    scopes = record.scopes
    has_old = record.old_hash_until is not None and record.old_hash_until > now_s
    return KeyReport(
        id=record.key_id,
        prefix=record.prefix,
        name=record.name,
        team=record.team_id,
        status=record.status(now_s),
        admin=scopes.is_admin,
        metrics=scopes.reads_metrics,
        reveals=scopes.reveals,
        prefer=scopes.prefer,
        models=None if scopes.models is None else sorted(scopes.models),
        tiers=None if scopes.tiers is None else sorted(scopes.tiers),
        limits=limits_report(record.limits),
        weight=record.weight,
        labels=dict(record.labels),
        created_at=int(record.created_at),
        expires_at=_whole(record.expires_at),
        revoked_at=_whole(record.revoked_at),
        old_secret_until=_whole(record.old_hash_until) if has_old else None,
    )


def new_key_report(record: KeyRecord, key: str, now_s: float) -> NewKeyReport:
    """Describe a key that was just made, with its secret."""
    return NewKeyReport(**asdict(key_report(record, now_s)), key=key)


def team_report(record: TeamRecord) -> TeamReport:
    """Describe a team."""
    return TeamReport(
        id=record.team_id,
        name=record.name,
        limits=limits_report(record.limits),
        weight=record.weight,
        labels=dict(record.labels),
        created_at=int(record.created_at),
    )


def limits_report(limits: LimitSpec) -> dict[str, Any]:
    """Return only the limits that are set."""
    return limits.model_dump(exclude_defaults=True)


def _whole(moment_s: float | None) -> int | None:
    return None if moment_s is None else int(moment_s)
