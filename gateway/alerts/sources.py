"""What is watched in a gateway: breakers, engines, the router, budgets."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from outrider.gateway.alerts.conditions import Condition, Source
from outrider.gateway.engines.fleet.roster import ReplicaState
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD
from outrider.gateway.tenancy.keys.key_registry import KeyRegistry
from outrider.gateway.tenancy.ledger.history import past_days
from outrider.gateway.tenancy.limits.counters.slots import Counters
from outrider.gateway.tenancy.limits.limit_rules import LimitPlan, LimitRule
from outrider.gateway.tenancy.limits.past import PastAmounts
from outrider.gateway.tenancy.limits.windows import ClockTimes
from outrider.gateway.upstream.replicas import ReplicaSet
from outrider.router.guard import RouteGuard

_EVERY_S: Final = 1.0
_IDLE_TIMES: Final = 50.0
"""So many times as long as reading the ledger took, it is left alone: it takes 2 % of the time."""
_STAMPS: Final = {
    **{"day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m"},
    **{"7_days": "%Y-%m-%d", "30_days": "%Y-%m-%d"},
}
"""How the periods that are watched are named, each day anew where they roll on."""
_UNITS: Final = frozenset({"tokens", "usd_nanos"})


def breakers(tiers: Mapping[str, ReplicaSet]) -> Source:
    """Watch the breakers of upstream tiers' servers."""

    async def look() -> list[Condition]:
        return [
            Condition(
                subject=f"breaker/{name}/{replica.name}",
                event="breaker.closed" if replica.breaker.state == "closed" else "breaker.opened",
                is_trouble=replica.breaker.state != "closed",
                data={"tier": name, "server": replica.name},
            )
            for name, servers in tiers.items()
            for replica in servers.replicas
        ]

    return look


def replicas(states: Callable[[], Sequence[ReplicaState]]) -> Source:
    """Watch engines, once each was up."""
    were_up: set[str] = set()

    async def look() -> list[Condition]:
        found = states()
        were_up.update(state.name for state in found if state.is_up)
        were_up.intersection_update({state.name for state in found})
        return [
            Condition(
                subject=f"replica/{state.name}",
                event="replica.back" if state.is_up else "replica.lost",
                is_trouble=not state.is_up,
                data={"replica": state.name, "reason": state.reason},
            )
            for state in found
            if state.name in were_up
        ]

    return look


def drift(guard: RouteGuard) -> Source:
    """Watch whether requests still are what the router was calibrated for."""

    async def look() -> list[Condition]:
        numbers = guard.numbers()
        return [
            Condition(
                subject="router",
                event="router.drifted" if numbers.is_drifting else "router.recovered",
                is_trouble=numbers.is_drifting,
                data={
                    "strong_share": numbers.strong_share,
                    "expected_share": numbers.expected_share,
                    "quality_shift": numbers.quality_shift,
                },
            )
        ]

    return look


class Budgets:
    """Watches what keys and teams have used of their money and tokens, by the ledger.

    So it sees what all gateways have charged, whichever counts the limits.
    """

    def __init__(
        self,
        database: Database,
        registry: KeyRegistry,
        shares: Sequence[float],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._registry = registry
        self._shares = sorted(shares)
        self._clock = clock
        self._wall_clock = wall_clock
        self._next_s = clock()
        self._found: list[Condition] = []

    async def look(self) -> list[Condition]:
        """Return a condition for each limit that is used to one of the shares or more."""
        begun_s = self._clock()
        if begun_s >= self._next_s:
            self._found = await asyncio.to_thread(self._read)
            took_s = self._clock() - begun_s
            self._next_s = begun_s + max(_EVERY_S, took_s * _IDLE_TIMES)
        return self._found

    def _read(self) -> list[Condition]:
        rules = {
            (rule.scope, rule.owner, rule.model, rule.name): rule
            for principal in self._registry.limited()
            for rule in LimitPlan(principal).rules
            if rule.period in _STAMPS and rule.unit in _UNITS and rule.limit
        }
        if not rules:
            return []
        now_s = self._wall_clock()
        return [*self._conditions(rules.values(), now_s)]

    def _conditions(self, rules: Iterable[LimitRule], now_s: float) -> Iterator[Condition]:
        """Yield one for each rule: of the largest share that is used."""
        now, moment, counters = (
            datetime.fromtimestamp(now_s, UTC),
            ClockTimes(0.0, now_s),
            Counters(),
        )
        past = PastAmounts(past_days(self._database, now_s), moment)
        for rule in rules:
            counter = counters.make(rule.period)
            past.enter(rule, counter)
            used = counter.used(moment)
            passed = [share for share in self._shares if used >= share * rule.limit]
            if not passed:
                continue
            period = now.strftime(_STAMPS[rule.period])
            place = "/".join((rule.scope, rule.owner, rule.model or "all", rule.name, period))
            allowed = _amount(rule, rule.limit)  # a limit that is raised is told of anew
            yield Condition(
                subject=f"budget/{place}/{passed[-1]:g}/{allowed:.12g}",
                event="budget.reached",
                is_trouble=True,
                is_once=True,
                data={
                    "scope": rule.scope,
                    "id": rule.owner,
                    "tier": rule.model,
                    "limit": rule.name,
                    "period": period,
                    "share": passed[-1],
                    "used": _amount(rule, used),
                    "allowed": allowed,
                },
            )


def _amount(rule: LimitRule, amount: int) -> float:
    """Return an amount in tokens or USD."""
    return amount / NANOS_PER_USD if rule.unit == "usd_nanos" else amount
