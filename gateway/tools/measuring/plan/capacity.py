"""Capacity table of a system under a workload: users, waiting times and cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.cache.window_blocks import BlockBytes, share_blocks, window_block_demand
from outrider.engine.config import EngineConfig
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes
from outrider.gateway.tools.measuring.plan.simulate import (
    SimulatedRequest,
    Simulation,
    System,
    TierName,
)
from outrider.gateway.tools.measuring.plan.simulation_figures import SimulationFigures, figures
from outrider.gateway.tools.measuring.plan.workload import LengthPairs

CONCURRENCIES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_REQUESTS_A_USER: Final = 6
_LEAST_REQUESTS: Final = 48
_OPEN_REQUESTS: Final = (240, 1200)
"""Least and most requests of an open loop; between them, twenty times those in flight."""
_BISECTIONS: Final = 9
_BLOCK_SIZE: Final = 16
_ENGINE: Final = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Latency objective in seconds, None for none, and the share of requests that must meet it."""

    ttft_s: float | None = None
    inter_token_s: float | None = None
    attainment: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to serve. `small_share` of the requests is answered by the small tier."""

    name: str
    system: System
    small_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """One row of the table. `usd_per_million` of answer tokens; None where no price was named."""

    num_users: int
    figures: SimulationFigures
    usd_per_million: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Capacity of a variant. `best`: at the highest rate that attains the goal, None for none."""

    variant: Variant
    lines: tuple[CapacityRow, ...]
    best_rate_per_s: float | None
    best: CapacityRow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The memory of one device. `pass_bytes`: about what its largest pass takes."""

    device: str
    total_bytes: float
    weight_bytes: float
    kv_bytes: float
    pass_bytes: float

    @property
    def free_bytes(self) -> float:
        """What is left."""
        return self.total_bytes - self.weight_bytes - self.kv_bytes - self.pass_bytes


def kv_tokens(
    memory_bytes: float,
    shapes: Sequence[ModelSizes],
    *,
    reserve_bytes: float = 0.0,
    max_sequences: int = _ENGINE.max_sequences,
    small_kv_ratio: float = 1.0,
) -> list[int]:
    """Return the tokens whose KV fits beside the weights, for each tier: the large one is first.

    `small_kv_ratio`: tokens of the second tier for each of the first.

    Raises ValueError if the weights alone do not fit.
    """
    left = memory_bytes - reserve_bytes - sum(shape.weight_bytes for shape in shapes)
    if left <= 0:
        needed = sum(shape.weight_bytes for shape in shapes) + reserve_bytes
        raise ValueError(
            f"the weights need {needed / 1e9:.1f} GB, the device has {memory_bytes / 1e9:.1f} GB; "
            "take a larger device, a smaller model, or several devices (--tensor-parallel)"
        )
    for shape in shapes:
        if shape.state_bytes:
            sizes = RecurrentSizes.within(
                left / len(shapes), max_sequences=max_sequences, state_bytes=shape.state_bytes
            )
            left -= sizes.num_bytes(line_bytes=shape.line_bytes, state_bytes=shape.state_bytes)
    tokens = [_token_bytes(each, max_sequences) for each in shapes]
    tokens[1:] = [replace(each, share=small_kv_ratio) for each in tokens[1:]]
    return share_blocks(max(left, 0.0), tokens)


def _token_bytes(shape: ModelSizes, max_sequences: int) -> BlockBytes:
    """Return a token's memory; layers with a window keep the keys of `max_sequences` windows."""
    demand = 0
    if shape.window is not None:
        demand = _BLOCK_SIZE * window_block_demand(
            shape.window,
            block_size=_BLOCK_SIZE,
            max_sequences=max_sequences,
            max_step_tokens=_ENGINE.max_tokens_per_step,
        )
    return BlockBytes(
        full=shape.kv_bytes_per_token - shape.windowed_kv_bytes,
        windowed=shape.windowed_kv_bytes,
        demand=demand,
    )


def users_that_fit(num_kv_tokens: int, lengths: LengthPairs, window: int | None = None) -> int:
    """Return the number of answers whose KV fits at once, by the mean over their steps."""
    held = lengths.mean_held if window is None else min(lengths.mean_held, window)
    return int(num_kv_tokens // max(held, 1.0))


def plan(
    variant: Variant,
    lengths: LengthPairs,
    goal: Goal,
    *,
    usd_per_hour: float | None = None,
    concurrencies: Sequence[int] = CONCURRENCIES,
    seed: int = 0,
) -> Capacity:
    """Simulate a variant at several numbers of users, and search its highest rate.

    Raises ValueError for requests that cannot be served at all.
    """
    lines = []
    for num_users in concurrencies:
        asks = _asks(variant, lengths, max(_LEAST_REQUESTS, num_users * _REQUESTS_A_USER), seed)
        served = Simulation(variant.system).run(asks, num_users=num_users)
        found = figures(served, ttft_s=goal.ttft_s, inter_token_s=goal.inter_token_s)
        lines.append(_line(num_users, found, usd_per_hour))
    rate, best = _search(variant, lengths, goal, lines, seed)
    return Capacity(
        variant=variant,
        lines=tuple(lines),
        best_rate_per_s=rate,
        best=None if best is None else _line(0, best, usd_per_hour),
    )


def at_rate(
    variant: Variant,
    lengths: LengthPairs,
    goal: Goal,
    rate_per_s: float,
    *,
    alone_s: float,
    seed: int = 0,
) -> tuple[SimulationFigures, bool]:
    """Simulate Poisson arrivals at a rate; return the figures, and whether the queue stays bounded.

    `alone_s`: time of a request on an idle system. A system that cannot keep up still has a queue
    when the last request arrives.
    """
    least, most = _OPEN_REQUESTS
    count = int(min(max(20 * rate_per_s * alone_s, least), most))
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    gaps *= count / rate_per_s / gaps.sum()  # the rate itself is not left to chance
    asks = _asks(variant, lengths, count, seed)
    timed = [replace(ask, at_s=float(at)) for ask, at in zip(asks, np.cumsum(gaps), strict=True)]
    served = Simulation(variant.system).run(timed)
    found = figures(served, ttft_s=goal.ttft_s, inter_token_s=goal.inter_token_s)
    last_s = float(gaps.sum())
    left_s = max(one.end_s for one in served) - last_s
    return found, left_s <= 4 * alone_s + 0.02 * last_s


def _asks(variant: Variant, lengths: LengthPairs, count: int, seed: int) -> list[SimulatedRequest]:
    """Return `count` requests with the given lengths in turn."""
    is_small = np.random.default_rng(seed).random(count) < variant.small_share
    tiers: Iterator[TierName] = ("small" if small else "large" for small in is_small)
    if variant.system.large is None:
        tiers = iter(["small"] * count)
    return [
        SimulatedRequest(
            num_prompt=int(lengths.prompts[number % len(lengths)]),
            num_answer=int(lengths.answers[number % len(lengths)]),
            tier=tier,
        )
        for number, tier in enumerate(tiers)
    ]


def _search(
    variant: Variant, lengths: LengthPairs, goal: Goal, lines: Sequence[CapacityRow], seed: int
) -> tuple[float | None, SimulationFigures | None]:
    """The highest rate at which enough requests attain the goal, by bisection."""
    high = max(line.figures.requests_per_s for line in lines) * 1.2
    low, best = 0.0, None
    alone_s = lines[0].num_users / lines[0].figures.requests_per_s
    lowest = high / 2**_BISECTIONS
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        found, keeps_up = at_rate(variant, lengths, goal, rate, alone_s=alone_s, seed=seed)
        if found.attainment >= goal.attainment and keeps_up:
            low, best = rate, found
        else:
            high = rate
    return (low, best) if low > lowest else (None, None)


def _line(num_users: int, found: SimulationFigures, usd_per_hour: float | None) -> CapacityRow:
    usd = None
    if usd_per_hour is not None and found.tokens_per_s > 0:
        usd = usd_per_hour / 3600 / found.tokens_per_s * 1e6
    return CapacityRow(num_users=num_users, figures=found, usd_per_million=usd)
