"""Engines that are started when a gateway says that requests wait for them."""

import json
from collections.abc import Mapping
from typing import Final

from outrider.gateway.wiring.ray.plan import EnginePlan
from outrider.verifier.params import TIERS, Tier

MOST_BYTES: Final = 4096
_MOST_WANTED: Final = 16


class OnDemand:
    """The engines of a plan that may have no replica, and which of them has which tiers."""

    def __init__(self, engines: Mapping[str, EnginePlan]) -> None:
        self._tiers: dict[str, frozenset[Tier]] = {
            name: frozenset(plan.tiers) for name, plan in engines.items() if plan.min_replicas == 0
        }

    @property
    def startable(self) -> list[list[Tier]]:
        """The tiers of each of them, as gateways read it."""
        return [[tier for tier in TIERS if tier in tiers] for tiers in self._tiers.values()]

    def to_start(self, body: bytes) -> list[str]:
        """Return the engines that {"wanted": [["large"], ...]} asks for, the smallest that will do.

        Raises ValueError where it is not that.
        """
        try:
            wanted = json.loads(body)["wanted"]
            needs = [frozenset(each) for each in wanted]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError('send {"wanted": [["large"]]}') from None
        if len(needs) > _MOST_WANTED or not all(each and each <= set(TIERS) for each in needs):
            raise ValueError(f"wanted: at most {_MOST_WANTED} lists of {', '.join(TIERS)}")
        found: dict[str, None] = {}
        for each in needs:
            able = [name for name, tiers in self._tiers.items() if each <= tiers]
            if able:
                found[min(able, key=lambda name: len(self._tiers[name]))] = None
        return list(found)
