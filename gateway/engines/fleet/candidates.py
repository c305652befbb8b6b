"""Finds the replicas that may have a request: up, with its tiers, its numerics and room for it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from outrider.engine.request import EngineRequest
from outrider.gateway.engines.fleet.block_table import Ints
from outrider.gateway.engines.fleet.replica import EngineReplica, needed_tiers, num_tokens
from outrider.verifier.params import Tier

_FRESH_S: Final = 0.05  # so long the replicas are not looked through again


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request that is to be placed, and what its replica must be like."""

    request: EngineRequest
    numerics: dict[Tier, str] = field(default_factory=dict)
    """The replica's numerics, by tier; empty where any will do."""
    refused: frozenset[EngineReplica] = frozenset()
    has_begun: bool = False
    """An engine had it before, so a draining replica may have it where there is no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Able:
    """The replicas that may have requests of a kind, as they were at some time."""

    replicas: list[EngineReplica]
    columns: Ints
    """Theirs on the `LoadBoard`, [n]."""
    least_context: dict[Tier, int]
    at_s: float


class Candidates:
    """Looks through a pool's replicas, and remembers for a moment what it found."""

    def __init__(self, replicas: Mapping[str, EngineReplica]) -> None:
        """`replicas` are the pool's, which may change; `forget` is to be called then."""
        self._replicas = replicas
        self._able: dict[tuple[object, ...], Able] = {}

    def forget(self) -> None:
        """Look anew for the next request."""
        self._able.clear()

    def of(self, wanted: Wanted) -> Able:
        """Return the replicas that may have a request, as they were a moment ago."""
        key = (needed_tiers(wanted.request), tuple(wanted.numerics.items()), wanted.has_begun)
        now_s = time.monotonic()
        found = self._able.get(key)
        if found is None or not found.replicas or now_s - found.at_s > _FRESH_S:
            found = self._able[key] = self._find(wanted, now_s)
        if wanted.refused:
            left = [each for each in found.replicas if each not in wanted.refused]
            found = replace(found, replicas=left, columns=_columns(left))
        if num_tokens(wanted.request) > found.least_context.get(wanted.request.tier, 0):
            # Where none has the room, its error says so.
            roomy = [each for each in found.replicas if each.has_context_for(wanted.request)]
            if roomy:
                found = replace(found, replicas=roomy, columns=_columns(roomy))
        return found

    def _find(self, wanted: Wanted, now_s: float) -> Able:
        """Look through all replicas for those that may have a request."""
        able = [
            replica
            for replica in self._replicas.values()
            if replica.serves(wanted.request, wanted.numerics) and replica.is_up
        ]
        taking = [replica for replica in able if not replica.is_draining]
        # One that computes prompts for others answers where no other can.
        taking = [each for each in taking if each.role != "prefill"] or taking
        if not taking and wanted.has_begun:
            taking = able
        infos = [replica.info for replica in taking if replica.info is not None]
        least = {
            tier: min(info.tiers[tier].max_context for info in infos)
            for tier in needed_tiers(wanted.request)
            if infos
        }
        return Able(replicas=taking, columns=_columns(taking), least_context=least, at_s=now_s)


def _columns(replicas: list[EngineReplica]) -> Ints:
    return np.array([replica.column for replica in replicas], dtype=np.int64)
