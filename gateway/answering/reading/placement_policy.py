"""Settings for the places that answer requests: this machine's models, or an upstream tier."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from outrider.gateway.contract.answers.responder import Place
from outrider.gateway.contract.schema.kinds import Policy
from outrider.gateway.settings.tiers import HandoffSettings
from outrider.verifier.params import Tier

Named = Literal["auto", "local", "upstream"]
"""The meaning of a request's model: any that suits, a local model, or an upstream tier."""

PLACES: Final[dict[Policy, tuple[Place, ...]]] = {
    "local_only": ("small_upstream", "local"),
    "prefer_local": ("small_upstream", "local", "upstream"),
    "prefer_cloud": ("upstream", "small_upstream", "local"),
    "cloud_only": ("upstream",),
}
NO_LOCAL: Final = "no model is loaded on this machine, and no tier is marked as local"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """The settings for hand-offs."""

    policy: Policy = "prefer_local"
    """For requests that name none."""
    upstream_tier: str | None = None
    """The tier that takes hand-offs; None without upstream tiers."""
    small: str | None = None
    """The tier in the small model's part."""
    on_device: Collection[str] = frozenset()
    """The tiers that are servers on this device."""
    has_local: bool = True
    """This process runs a model."""
    strong_place: Place = "local"
    """The place for what is too hard for the small model."""
    max_queue_s: float | None = None
    """Requests that would wait longer for the local models are handed over."""
    deadline_s: float | None = None
    """From the arrival of requests that name no deadline."""
    continue_on_failure: bool | None = None
    """Another model may continue an answer that broke off. None: where the request's policy is
    prefer_local."""

    @property
    def is_small_on_device(self) -> bool:
        """Return whether the small model's server is on this device."""
        return self.small is not None and self.small in self.on_device

    @property
    def answers_here(self) -> bool:
        """Return whether this device can answer by itself."""
        return self.has_local or bool(self.on_device)

    @classmethod
    def of(
        cls,
        settings: HandoffSettings,
        *,
        tiers: Sequence[str],
        local: Collection[Tier],
        on_device: Collection[str] = (),
    ) -> "PlacementPolicy":
        """Resolve each `auto` of the settings.

        `tiers` are the names of the upstream ones, in the file's order; `local` those that are
        loaded here, `on_device` the upstream ones that are servers on this device. Raises
        ValueError, with a message, for settings that cannot be met.
        """
        others = [name for name in tiers if name != settings.small]
        upstream = settings.tier or next(iter(others), None)
        if upstream is not None and upstream not in tiers:
            raise ValueError(f"handoff.tier: unknown tier {upstream!r}; set tiers.{upstream}.url")
        policy: Policy
        if settings.policy == "auto":
            policy = "prefer_local" if local or settings.small else "cloud_only"
        else:
            policy = settings.policy
        if policy in ("local_only", "prefer_local") and not (local or on_device or settings.small):
            raise ValueError(f"handoff.policy: {policy}, but {NO_LOCAL}")
        if PLACES[policy][0] == "upstream" and upstream is None:
            raise ValueError(f"handoff.policy: {policy}, but there is no upstream tier")
        if settings.strong == "cloud" and upstream is None:
            raise ValueError("handoff.strong: cloud, but there is no upstream tier")
        if settings.strong == "local" and not local:
            raise ValueError(f"handoff.strong: local, but {NO_LOCAL}")
        is_local = "large" in local or upstream is None
        if settings.strong != "auto":
            is_local = settings.strong == "local"
        return cls(
            policy=policy,
            upstream_tier=upstream,
            small=settings.small,
            on_device=frozenset(on_device),
            has_local=bool(local),
            strong_place="local" if is_local else "upstream",
            max_queue_s=_seconds(settings.max_queue_ms),
            deadline_s=_seconds(settings.deadline_ms),
            continue_on_failure=settings.continue_on_failure,
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
