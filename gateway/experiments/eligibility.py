"""The check of whether a request takes part in an experiment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from outrider.gateway.experiments.assigner import PassReason, Subject
from outrider.gateway.settings.arm_overlay import MODEL, related_fields
from outrider.gateway.settings.experiments import ExperimentSpec, UnitKind

ANY: Final = "*"
_NO_KEY_IDS: Final = frozenset({"", "anonymous"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligibility:
    """The units that take part, as a check of each request. None: all units."""

    keys: frozenset[str] | None
    teams: frozenset[str] | None
    models: frozenset[str] | None
    endpoints: frozenset[str] | None
    headers: tuple[tuple[str, str], ...]
    about: frozenset[str]
    """Settings that the request must not set itself, or arms could not be compared."""
    tiers: frozenset[str]
    """Those that arms name. The key must be allowed all of them: else some arms would be closed to
    it, and the others would be compared with a biased rest."""
    is_about_places: bool
    """Arms restrict the tiers that may answer, so keys restricted to some tiers take no part."""
    arm_models: frozenset[str]
    """Models that arms name in place of the request's, which is auto or one of `models`."""

    @classmethod
    def of(cls, spec: ExperimentSpec) -> "Eligibility":
        """Return the check for an experiment's spec."""
        wanted = spec.eligible
        return cls(
            keys=_names(wanted.keys),
            teams=_names(wanted.teams),
            models=_names(wanted.models),
            endpoints=_names(wanted.endpoints),
            headers=tuple(wanted.headers.items()),
            about=_about(spec),
            tiers=_tiers(spec),
            is_about_places="policy" in spec.about,
            arm_models=frozenset(
                model for arm in spec.arms if (model := spec.overlay(arm).model) is not None
            ),
        )

    def admits(self, subject: Subject) -> bool:
        """Return whether this request takes part."""
        return self.refusal(subject) is None

    def refusal(self, subject: Subject) -> PassReason | None:
        """Return why this request takes no part; None where it does."""
        if not self.about.isdisjoint(self._own_fields(subject)):
            return "own-setting"
        if not (
            self.is_open_to(subject)
            and (self.models is None or subject.model in self.models)
            and (self.endpoints is None or subject.endpoint in self.endpoints)
            and (not self.headers or _has_all(subject.headers, self.headers))
        ):
            return "not-eligible"
        may_have_all = (subject.models is None or self.arm_models <= subject.models) and (
            subject.tiers is None or self._may_have_any_arm(subject.tiers)
        )
        return None if may_have_all else "scope"

    def _own_fields(self, subject: Subject) -> frozenset[str]:
        """Return the request's own settings; arms may replace a model that takes part by name."""
        if self.arm_models and self.models is not None and subject.model in self.models:
            return subject.own_fields - {MODEL}
        return subject.own_fields

    def is_open_to(self, subject: Subject) -> bool:
        """Return whether requests of this key and team may take part."""
        return (self.keys is None or subject.key_id in self.keys) and (
            self.teams is None or subject.team_id in self.teams
        )

    def _may_have_any_arm(self, tiers: frozenset[str]) -> bool:
        is_told = self.is_about_places or self.arm_models  # any tier may be behind them
        return not is_told and self.tiers <= tiers


def unit_of(kind: UnitKind, subject: Subject) -> str:
    """Return the id that keeps its arm; empty where the request lacks it and takes no part.

    Users are known within their team, or their key where it is in none. Requests without a key have
    no user: together they would be a single unit.
    """
    match kind:
        case "user":
            user = subject.user
            return f"{subject.team_id or subject.key_id}\0{user}" if user else ""
        case "key":
            return "" if subject.key_id in _NO_KEY_IDS else subject.key_id
        case "conversation":
            return subject.conversation
        case "request":
            return subject.request_id


def _about(spec: ExperimentSpec) -> frozenset[str]:
    """Return the fields that a request must not set itself."""
    about = related_fields(spec.about)
    return about | {"privacy"} if "policy" in spec.about else about


def _tiers(spec: ExperimentSpec) -> frozenset[str]:
    named = (spec.overlay(arm).options.tier for arm in spec.arms)
    return frozenset(tier for tier in named if tier is not None)


def _names(names: list[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _has_all(headers: Mapping[str, str], wanted: tuple[tuple[str, str], ...]) -> bool:
    return all(
        name in headers and (value == ANY or headers[name] == value) for name, value in wanted
    )
