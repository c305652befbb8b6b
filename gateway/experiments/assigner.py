"""Assignment of requests to arms: the subject of an experiment and its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal, Protocol

from outrider.gateway.contract.answers.outcomes import ArmRef
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.settings.arm_overlay import NO_OVERLAY, Overlay

ARM_HEADER: Final = "x-outrider-arm"
"""Forces an arm, written EXPERIMENT/ARM; the answer has it too."""

PassReason = Literal["no-unit", "share", "own-setting", "not-eligible", "scope"]
"""no-unit: no user, key or conversation; share: the unit is outside the share; own-setting: it sets
what the arms set; not-eligible: as `eligible` says; scope: its key may not use every arm."""

_CONVERSATION_BYTES: Final = 16
_MAX_NAMED: Final = 32
_MAX_QUOTED_CHARS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A request, as far as experiments look at it."""

    key_id: str
    team_id: str = ""
    user: str = ""
    """Empty where it is unknown."""
    conversation: str = ""
    """See `conversation_unit`; empty where it is unknown."""
    request_id: str = ""
    model: str = ""
    endpoint: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By names in lower case."""
    own_fields: frozenset[str] = frozenset()
    """Fields of the `outrider` object that the request sets itself, and "service_tier". A request
    that sets a field which an experiment is about takes no part in it."""
    tiers: frozenset[str] | None = None
    """Those that may answer this key; None for all."""
    models: frozenset[str] | None = None
    """Those that this key may name; None for all."""
    is_admin: bool = False
    """It may see, and force, the arms of all experiments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The arms of a request and their combined settings.

    `measured` has the arms that count it; a forced request has none.
    """

    arms: tuple[ArmRef, ...]
    overlay: Overlay = NO_OVERLAY
    label: str = ""
    """"experiment:version/arm", several joined by commas, with "forced:" before a forced one."""
    is_forced: bool = False
    """It is not measured."""

    @property
    def measured(self) -> tuple[ArmRef, ...]:
        """Return the arms for the request's outcome."""
        return () if self.is_forced else self.arms


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A request that takes no part in a running experiment, and why."""

    experiment: str
    version: int
    reason: PassReason


class Assigner(Protocol):
    """Assigns the arms of a request. Called on the event loop for every request."""

    @property
    def wants_conversation(self) -> bool:
        """Return whether `Subject.conversation` is needed; else it need not be computed."""

    @property
    def sets_models(self) -> bool:
        """Return whether an arm names a model."""

    def assign(self, subject: Subject) -> Assignment | None:
        """Return the arms of a request; None for none.

        Raises BadRequestError where the header forces an arm that does not exist.
        """

    def passed_over(self, subject: Subject) -> list[PassedOver]:
        """Return the running experiments that this request takes no part in."""


class NullAssigner:
    """No experiments: no request is in an arm, and no arm can be forced."""

    wants_conversation: Final = False
    sets_models: Final = False

    def assign(self, subject: Subject) -> Assignment | None:
        """Return None. Raises BadRequestError for a request that forces an arm."""
        if ARM_HEADER in subject.headers:
            raise unknown_arm(subject.headers[ARM_HEADER], ())
        return None

    def passed_over(self, subject: Subject) -> list[PassedOver]:
        """Return none: there is no experiment."""
        return []


def conversation_unit(key_id: str, first_user_text: str) -> str:
    """Return a conversation's id in experiments: a digest of its key and its first text.

    The same in every process, so that a conversation keeps its arm in all of them.
    """
    parts = (key_id, first_user_text.strip())
    digest = blake2b(digest_size=_CONVERSATION_BYTES)
    for part in (text.encode("utf-8", "surrogatepass") for text in parts):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


def unknown_arm(wanted: str, known: Sequence[str]) -> BadRequestError:
    """Return the error for an unknown forced arm. `known`: the valid ones, EXPERIMENT/ARM."""
    named = ", ".join(known[:_MAX_NAMED]) or "none"
    more = f" and {len(known) - _MAX_NAMED} more" if len(known) > _MAX_NAMED else ""
    return BadRequestError(
        f"{ARM_HEADER}: unknown arm {wanted[:_MAX_QUOTED_CHARS]!r}; available: {named}{more}.",
        param=ARM_HEADER,
        code="unknown_arm",
    )
