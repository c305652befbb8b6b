"""What is watched in a gateway: breakers, engines, the router, budgets."""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

from outrider.gateway.alerts.conditions import Condition, Source
from outrider.gateway.engines.fleet.roster import ReplicaState
from outrider.gateway.settings.loopback import is_loopback
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
                subject=f"breaker/{name}/{_unique(replica.name, replica.url)}",
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
                subject=f"replica/{_unique(state.name, state.name)}",
                event="replica.back" if state.is_up else "replica.lost",
                is_trouble=not state.is_up,
                data={"replica": state.name, "reason": state.reason},
            )
            for state in found
            if state.name in were_up
        ]

    return look


def _unique(name: str, address: str) -> str:
    """Return a name that is another on each machine, where an address is reached from it only.

    One that several gateways reach is the same server's for all of them: one of them tells of it.
    """
    url = urlsplit(address)
    is_own = url.scheme == "ipc" or is_loopback(url.hostname or "")
    return f"{socket.gethostname()}/{name}" if is_own else name


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


def budgets(
    database: Database,
    registry: KeyRegistry,
    shares: Sequence[float],
    wall_clock: Callable[[], float] = time.time,
) -> Source:
    """Watch what keys and teams have used of their money and tokens, by the ledger.

    So what all gateways have charged counts, whichever counts the limits.
    """

    async def look() -> list[Condition]:
        return await asyncio.to_thread(read)

    def read() -> list[Condition]:
        rules = {
            (rule.scope, rule.owner, rule.model, rule.name): rule
            for principal in registry.limited()
            for rule in LimitPlan(principal).rules
            if rule.period in _STAMPS and rule.unit in _UNITS and rule.limit
        }
        if not rules:
            return []
        now_s = wall_clock()
        moment = ClockTimes(0.0, now_s)
        past = PastAmounts(past_days(database, now_s), moment)
        found = (_budget(rule, past, shares, moment) for rule in rules.values())
        return [condition for condition in found if condition is not None]

    return look


def _budget(
    rule: LimitRule, past: PastAmounts, shares: Sequence[float], now: ClockTimes
) -> Condition | None:
    """Return the largest share of a limit that is used; None below the smallest."""
    counter = Counters().make(rule.period)
    past.enter(rule, counter)
    used = counter.used(now)
    share = max((share for share in shares if used >= share * rule.limit), default=None)
    if share is None:
        return None
    period = datetime.fromtimestamp(now.wall_s, UTC).strftime(_STAMPS[rule.period])
    place = "/".join((rule.scope, rule.owner, rule.model or "all", rule.name, period))
    allowed = _amount(rule, rule.limit)
    return Condition(
        # With the amount: a limit that is raised is told of anew.
        subject=f"budget/{place}/{share:g}/{allowed:.12g}",
        event="budget.reached",
        is_trouble=True,
        is_once=True,
        data={
            "scope": rule.scope,
            "id": rule.owner,
            "tier": rule.model,
            "limit": rule.name,
            "period": period,
            "share": share,
            "used": _amount(rule, used),
            "allowed": allowed,
        },
    )


def _amount(rule: LimitRule, amount: int) -> float:
    """Return an amount in tokens or USD."""
    return amount / NANOS_PER_USD if rule.unit == "usd_nanos" else amount
