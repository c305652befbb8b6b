"""Computes the live page's figures from the engine's snapshots."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.engine.events import EngineStats, StoreStats, TierStats
from outrider.gateway.http.dashboard.schema import (
    Acceptance,
    EngineFigures,
    EngineHistory,
    EngineTier,
    KvFolderFigures,
    SourceFigures,
)
from outrider.verifier.params import Tier

_KEPT_S: Final = 300.0
_MIN_GAP_S: Final = 0.9
_MAX_MOMENTS: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    at_s: float
    stats: EngineStats


_START: Final = EngineStats()


@dataclass(slots=True)
class EngineMoments:
    """Snapshots of the engine over the last five minutes, one for each time it was sampled."""

    _moments: deque[_Moment] = field(default_factory=lambda: deque(maxlen=_MAX_MOMENTS))

    def add(self, stats: EngineStats, at_s: float) -> None:
        """Keep a snapshot. A restarted engine counts from zero: earlier ones are dropped."""
        moments = self._moments
        if moments and stats.num_steps < moments[-1].stats.num_steps:
            moments.clear()
        if len(moments) > 1 and at_s - moments[-2].at_s < _MIN_GAP_S:
            moments.pop()
        moments.append(_Moment(at_s=at_s, stats=stats))
        while at_s - moments[0].at_s > _KEPT_S:
            moments.popleft()

    def figures(self, now_s: float) -> EngineFigures | None:
        """Return the latest snapshot and its difference to the oldest; None without any."""
        if not self._moments:
            return None
        first, last = self._moments[0], self._moments[-1]
        over_s = last.at_s - first.at_s
        has_span = over_s >= _MIN_GAP_S
        before = (
            first.stats if has_span and first.stats.num_drafts < last.stats.num_drafts else None
        )
        step_ms, host_ms = _step_times(last.stats, first.stats if has_span else _START)
        return EngineFigures(
            over_s=over_s if has_span else None,
            step_ms=step_ms,
            host_ms=host_ms,
            tiers=[
                _tier(name, stats, first.stats.tiers.get(name), over_s if has_span else None)
                for name, stats in last.stats.tiers.items()
            ],
            acceptance=_acceptance(last.stats, before or _START),
            kv_folder=_kv_folder(last.stats, first.stats if has_span else _START),
            history=self._history(now_s),
        )

    def _history(self, now_s: float) -> EngineHistory:
        moments = self._moments
        names = list(moments[-1].stats.tiers)

        def of(name: Tier) -> list[TierStats]:
            return [moment.stats.tiers.get(name, TierStats()) for moment in moments]

        return EngineHistory(
            age_s=[round(now_s - moment.at_s, 3) for moment in moments],
            num_running={name: [tier.num_running for tier in of(name)] for name in names},
            num_waiting={name: [tier.num_waiting for tier in of(name)] for name in names},
            kv_cache_usage={
                name: [round(tier.kv_cache_usage, 4) for tier in of(name)] for name in names
            },
        )


def _step_times(now: EngineStats, before: EngineStats) -> tuple[float | None, float | None]:
    """Return the mean time of a step, and that of its host work, in ms; None without steps."""
    if now.num_steps <= before.num_steps:
        before = _START  # an idle window, as below
    num_steps = now.num_steps - before.num_steps
    if not num_steps:
        return None, None
    host_s = max(now.step_host_s - before.step_host_s, 0.0)
    passes_s = max(now.step_forward_s - before.step_forward_s, 0.0)
    return (host_s + passes_s) / num_steps * 1000.0, host_s / num_steps * 1000.0


def _tier(name: str, now: TierStats, before: TierStats | None, over_s: float | None) -> EngineTier:
    """Return a tier's rates since `before`; for the same time, shares since the start."""
    tokens_per_s = None
    base = TierStats()
    if before is not None and over_s is not None:
        base = before
        tokens_per_s = max(0, now.num_output_tokens - before.num_output_tokens) / over_s
    num_queried = now.prefix_cache_queries - base.prefix_cache_queries
    num_hits = now.prefix_cache_hits - base.prefix_cache_hits
    if num_queried <= 0:  # an idle window: figures since the start are more useful than none
        num_queried, num_hits = now.prefix_cache_queries, now.prefix_cache_hits
    before_holds = base if now.num_newcomer_holds > base.num_newcomer_holds else TierStats()
    num_holds = now.num_newcomer_holds - before_holds.num_newcomer_holds + now.num_held_newcomers
    held_s = max(now.newcomer_held_s - before_holds.newcomer_held_s, 0.0)
    return EngineTier(
        name=name,
        num_running=now.num_running,
        num_waiting=now.num_waiting,
        num_held=now.num_held_newcomers,
        held_mean_ms=held_s / num_holds * 1000.0 if num_holds else None,
        kv_cache_usage=now.kv_cache_usage,
        num_preemptions=now.num_preemptions,
        prefix_hit_share=_share(num_hits, num_queried),
        tokens_per_s=tokens_per_s,
    )


def _kv_folder(now: EngineStats, before: EngineStats) -> KvFolderFigures | None:
    store = now.store
    if store == StoreStats():
        return None
    if _num_queried(now) <= _num_queried(before):
        before = _START  # an idle window, as above
    num_queried = _num_queried(now) - _num_queried(before)
    num_restored = store.num_restored_tokens - before.store.num_restored_tokens
    return KvFolderFigures(
        memory_share=_share(_num_hits(now) - _num_hits(before) - num_restored, num_queried),
        disk_share=_share(num_restored, num_queried),
        num_restored_tokens=store.num_restored_tokens,
        saved_s=store.saved_s,
        num_read_bytes=store.num_read_bytes,
        num_written_bytes=store.num_written_bytes,
        num_bytes=store.num_bytes,
    )


def _num_queried(stats: EngineStats) -> int:
    return sum(tier.prefix_cache_queries for tier in stats.tiers.values())


def _num_hits(stats: EngineStats) -> int:
    return sum(tier.prefix_cache_hits for tier in stats.tiers.values())


def _acceptance(now: EngineStats, before: EngineStats) -> Acceptance:
    num_drafts = now.num_drafts - before.num_drafts
    num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
    num_compared = now.num_stretched_steps - before.num_stretched_steps
    by_depth = _differences(now.accepted_per_depth, before.accepted_per_depth)
    sources = []
    for name in now.drafted_by_source:
        drafted = _differences(now.drafted_by_source[name], before.drafted_by_source.get(name, ()))
        accepted = _differences(
            now.accepted_by_source.get(name, ()), before.accepted_by_source.get(name, ())
        )
        accepted += [0] * (len(drafted) - len(accepted))
        sources.append(
            SourceFigures(
                name=name,
                num_drafted=sum(drafted),
                num_accepted=sum(accepted),
                by_depth=[_share(good, num) for good, num in zip(accepted, drafted, strict=False)],
            )
        )
    return Acceptance(
        num_drafts=num_drafts,
        num_draft_tokens=now.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=num_accepted,
        tokens_per_step=1 + num_accepted / num_drafts if num_drafts else None,
        stretch=(now.stretch_plain_steps - before.stretch_plain_steps) / num_compared
        if num_compared > 0
        else None,
        accepted_by_depth=[_share(good, num_drafts) or 0.0 for good in by_depth],
        sources=[source for source in sources if source.num_drafted],
    )


def _differences(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return the differences by depth; new depths may have come since."""
    return [n - (before[i] if i < len(before) else 0) for i, n in enumerate(now)]


def _share(part: int, whole: int) -> float | None:
    """Return the share, None of 0; readings of one snapshot may be a node apart, so at most 1."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None
