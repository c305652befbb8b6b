"""Joins what many engines are and have done, as if they were one."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, Final, TypeVar

from outrider.engine.events import (
    EngineInfo,
    EngineStats,
    PeerStats,
    StoreStats,
    TierInfo,
    TierStats,
)
from outrider.verifier.params import TIERS, Tier

_NO_GAUGES: Final = {
    "num_running": 0,
    "num_waiting": 0,
    "num_blocks": 0,
    "num_used_blocks": 0,
    "num_adapters": 0,
    "adapter_bytes": 0,
    "num_held_newcomers": 0,
}

Key = TypeVar("Key")


class FleetStats:
    """Sums of the replicas' snapshots. Counters never fall, whether replicas restart or go."""

    def __init__(self) -> None:
        self._last: dict[str, EngineStats] = {}
        self._ended = EngineStats()  # of engines that are no more

    def note(self, name: str, stats: EngineStats) -> None:
        """Take in a replica's snapshot."""
        last = self._last.get(name)
        if last is not None and stats.num_steps < last.num_steps:  # it was started anew
            self.drop(name)
        self._last[name] = stats

    def drop(self, name: str) -> None:
        """Keep a replica's counters only: its engine has ended."""
        if (last := self._last.pop(name, None)) is not None:
            self._ended = _sum((self._ended, _without_gauges(last)))

    def total(self, up: Iterable[str]) -> EngineStats:
        """Return the sums; of replicas that are not `up`, the counters only."""
        names = set(up)
        each = (
            stats if name in names else _without_gauges(stats) for name, stats in self._last.items()
        )
        return _sum((self._ended, *each))


def joined_info(infos: Iterable[EngineInfo]) -> EngineInfo:
    """Return the tiers that any of the replicas has, with the longest context of each."""
    tiers: dict[Tier, TierInfo] = {}
    drafters: dict[str, None] = {}
    speculation = False
    for info in infos:
        speculation |= info.speculation
        drafters.update(dict.fromkeys(info.drafters))
        for tier, own in info.tiers.items():
            known = tiers.setdefault(tier, own)
            tiers[tier] = replace(
                known,
                max_context=max(known.max_context, own.max_context),
                deterministic=known.deterministic and own.deterministic,
            )
    return EngineInfo(
        tiers={tier: tiers[tier] for tier in TIERS if tier in tiers},
        speculation=speculation,
        drafters=tuple(drafters),
    )


def _without_gauges(stats: EngineStats) -> EngineStats:
    tiers = {tier: replace(own, **_NO_GAUGES) for tier, own in stats.tiers.items()}
    return replace(
        stats,
        tiers=tiers,
        store=replace(stats.store, num_extents=0, num_bytes=0, bytes_per_s=0.0),
        pins=[],
        peers=replace(stats.peers, bytes_per_s=0.0),
    )


def _sum(each: Iterable[EngineStats]) -> EngineStats:
    total = EngineStats()
    for stats in each:
        total = EngineStats(
            **{
                f.name: _added(getattr(total, f.name), getattr(stats, f.name))
                for f in fields(stats)
            }
        )
    return total


def _added(first: Any, second: Any) -> Any:
    """Add numbers, tuples place by place, tables by key, and the counts of tiers."""
    match first:
        case dict():
            return _added_tables(first, second)
        case tuple():
            return tuple(a + b for a, b in zip_longest(first, second, fillvalue=0))
        case TierStats() | StoreStats() | PeerStats():
            names = (f.name for f in fields(first))
            return type(first)(**{n: getattr(first, n) + getattr(second, n) for n in names})
        case _:
            return first + second


def _added_tables(first: Mapping[Key, Any], second: Mapping[Key, Any]) -> dict[Key, Any]:
    both = {key: _added(first[key], second[key]) for key in first if key in second}
    return {**first, **second, **both}
