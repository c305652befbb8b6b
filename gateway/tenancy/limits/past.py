"""Usage from the ledger, sorted by limit, until a counter asks for it."""

import math
from typing import Final

from outrider.gateway.tenancy.keys.amounts import PastUse, PastUses
from outrider.gateway.tenancy.limits.limit_rules import LimitRule, Period, Unit
from outrider.gateway.tenancy.limits.windows import WINDOW_S, ClockTimes, Counter

UNITS: Final[tuple[Unit, ...]] = ("requests", "tokens", "usd_nanos")
_OF_DAYS: Final[tuple[Period, ...]] = ("day", "week", "month", "7_days", "30_days")
_Name = tuple[str, str, str | None, Period, Unit]


class PastAmounts:
    """Amounts from before the start: by owner, tier, period and unit, with their moments.

    `now`: the moment of the start, which joins the two clocks.
    """

    def __init__(self, uses: PastUses, now: ClockTimes) -> None:
        self._amounts: dict[_Name, list[tuple[int, ClockTimes]]] = {}
        for use in sorted(uses.minute, key=lambda use: use.at_s):  # as clocks go
            self._keep("minute", use, minute_moment(use.at_s, now))
        for use in uses.days:
            for period in _OF_DAYS:
                self._keep(period, use, ClockTimes(now.clock_s, use.at_s))

    def enter(self, rule: LimitRule, counter: Counter) -> None:
        """Enter the past usage into a new counter."""
        name = (rule.scope, rule.owner, rule.model, rule.period, rule.unit)
        for amount, moment in self._amounts.pop(name, ()):
            counter.add(amount, moment)

    def _keep(self, period: Period, use: PastUse, moment: ClockTimes) -> None:
        owners = [("key", use.key_id)]
        if use.team_id is not None:
            owners.append(("team", use.team_id))
        for scope, owner in owners:
            for model in (None, use.tier):
                for unit in UNITS:
                    amount = getattr(use, unit)
                    if amount:
                        name = (scope, owner, model, period, unit)
                        self._amounts.setdefault(name, []).append((amount, moment))


def minute_moment(at_s: int, now: ClockTimes) -> ClockTimes:
    """Return the latest time that it can have been: the ledger holds whole seconds only."""
    ago_s = max(0.0, now.wall_s - (at_s + 1))
    return ClockTimes(math.floor(now.clock_s - min(ago_s, WINDOW_S)), at_s)
