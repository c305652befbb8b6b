"""The highest rate that a target carries: doubling until it is too much, then bisection."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How a search for the highest rate goes, and when it ends."""

    first_per_s: float = 1.0
    target_attainment: float = 0.9
    """The share of requests that has to meet its objectives."""
    tolerance: float = 0.1
    """Ends when the rates that are enough and too much are within this share of each other."""
    max_steps: int = 12
    """Ends after so many rates."""
    highest_per_s: float = 10_000.0
    lowest_per_s: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRate(Generic[Measured]):
    """A rate and what came of it."""

    rate_per_s: float
    is_enough: bool
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Generic[Measured]):
    """`best`: the highest rate that was enough, None where none was. `is_bounded`: whether a higher
    one was too much."""

    best: TriedRate[Measured] | None
    is_bounded: bool
    steps: list[TriedRate[Measured]]


async def find_highest_rate(
    measure: Callable[[float], Awaitable[tuple[bool, Measured]]], settings: SearchSettings
) -> SearchResult[Measured]:
    """`measure` runs at a rate per second and says whether that was enough.

    It supposes that what is too much stays so at higher rates. Near the edge a run is decided by
    chance: the intervals of the steps tell how much.
    """
    steps: list[TriedRate[Measured]] = []
    best: TriedRate[Measured] | None = None
    too_much: float | None = None
    rate = settings.first_per_s
    while len(steps) < settings.max_steps:
        is_enough, measured = await measure(rate)
        tried = TriedRate(rate_per_s=rate, is_enough=is_enough, measured=measured)
        steps.append(tried)
        if is_enough:
            best = tried
        else:
            too_much = rate
        following = _next(None if best is None else best.rate_per_s, too_much, settings)
        if following is None:
            break
        rate = following
    return SearchResult(best=best, is_bounded=too_much is not None, steps=steps)


def _next(enough: float | None, too_much: float | None, settings: SearchSettings) -> float | None:
    """The rate to try; None at the end of the search."""
    if too_much is None:
        assert enough is not None
        return 2 * enough if 2 * enough <= settings.highest_per_s else None
    if enough is None:
        return too_much / 2 if too_much / 2 >= settings.lowest_per_s else None
    if too_much <= enough * (1.0 + settings.tolerance):
        return None
    return (enough + too_much) / 2
