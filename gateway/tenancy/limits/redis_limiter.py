"""Limits of several gateways, counted in Redis."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tenancy.keys.amounts import Amounts, Want
from outrider.gateway.tenancy.keys.keys import VERIFIED, Principal
from outrider.gateway.tenancy.limits.counters.end_users import digest_of, no_room
from outrider.gateway.tenancy.limits.counters.redis_seats import NO_SEAT
from outrider.gateway.tenancy.limits.headers import TOLD_UNITS
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics
from outrider.gateway.tenancy.limits.limit_rules import (
    Holding,
    LimitDemand,
    LimitPlan,
    LimitRule,
    ordered,
)
from outrider.gateway.tenancy.limits.limiter import LimitState
from outrider.gateway.tenancy.limits.redis_leases import RedisLeases, ScriptArgs, Store
from outrider.gateway.tenancy.limits.redis_scripts import Scripts
from outrider.gateway.tenancy.limits.refusals import LimitRefusal, decisive, refusal_error
from outrider.gateway.tenancy.limits.unlimited import UnlimitedReservation

logger = logging.getLogger(__name__)

_PREFIX: Final = "outrider:limits:"
_MAX_PLANS: Final = 65_536
_MAX_AMOUNT: Final = 2**53  # whole numbers of Lua are exact up to here


class RedisReservation:
    """Amounts that are entered in Redis. Made by `RedisLimiter.reserve`."""

    __slots__ = (
        "_holding", "_is_settled", "_limiter", "_plan", "_states", "_step", "end_user", "key",
        "reservation_id",
    )  # fmt: skip
    never_waits: ClassVar[bool] = False

    def __init__(
        self,
        limiter: "RedisLimiter",
        plan: LimitPlan,
        *,
        key: str,
        reservation_id: str,
        holding: Holding,
        states: dict[int, LimitState],
    ) -> None:
        self.key = key
        self.reservation_id = reservation_id
        self.end_user = ""
        """The name under which its end user is counted; empty before one is."""
        self._limiter = limiter
        self._plan = plan
        self._holding = holding
        self._states = states  # by rule
        self._step = 0
        self._is_settled = False

    @property
    def states(self) -> tuple[LimitState, ...]:
        """Return the limits of this request as of its last call, tightest first."""
        return ordered(tuple(self._states.values()))

    @property
    def reported(self) -> list[LimitState]:
        """Return those of the states that headers tell of."""
        return [state for state in self._states.values() if state.name in TOLD_UNITS]

    @property
    def reserved(self) -> Want:
        """Return the amounts that are reserved now."""
        return Want(by_tier=self._holding.by_tier)

    async def count_for(self, end_user: str) -> None:
        """Count it for an end user, too. Raises RateLimitError, BudgetError or StorageError."""
        plan = self._plan.for_end_users
        if plan is None or self._is_settled:
            return
        room = "verified:" if end_user.startswith(VERIFIED) else ""
        self.end_user = room + digest_of(end_user).hex()
        demands = plan.demands_from(len(self._plan.rules), self._holding.overall)
        self._states |= await self._limiter.extend(
            self, plan, demands, self._next_step(), is_first_of_end_user=True
        )
        self._plan = plan

    async def grow(self, more: Want) -> bool:
        """Reserve more, all or nothing; False where there is no room or Redis is unavailable."""
        if self._is_settled:
            return False
        overall, by_tier = self._holding.growth(more)
        demands = self._plan.demands(overall, by_tier)
        states = await self._limiter.grow(self, self._plan, demands, self._next_step())
        if states is None:
            return False
        self._add(overall, by_tier, states)
        return True

    async def extend(self, more: Want) -> None:
        """Reserve more, all or nothing. Raises RateLimitError, BudgetError or StorageError."""
        if self._is_settled:
            raise StorageError(
                "This request's reservation is already settled; send the request again."
            )
        overall, by_tier = self._holding.growth(more)
        demands = self._plan.demands(overall, by_tier)
        states = await self._limiter.extend(self, self._plan, demands, self._next_step())
        self._add(overall, by_tier, states)

    def _next_step(self) -> int:
        """Count an attempt: each one is a step of its own.

        A step whose reply was lost may have been entered; it is given back when the request
        settles.
        """
        self._step += 1
        return self._step

    def _add(
        self, overall: Amounts, by_tier: Mapping[str, Amounts], states: dict[int, LimitState]
    ) -> None:
        self._states |= states
        self._holding.add(overall, by_tier)

    async def settle(self, used: Mapping[str, Amounts]) -> None:
        """Give back the unused rest. Raises ValueError, and keeps all, for more than is
        reserved."""
        if self._is_settled:
            return
        self._is_settled = True
        total, fault = self._holding.spend(used)
        if fault:
            total, used = self._holding.overall, self._holding.by_tier
        args: ScriptArgs = [self.reservation_id]
        for i, amount in self._plan.demands(total, used):
            rule = self._plan.rules[i]
            args += [
                rule.period,
                _name(rule, self.end_user),
                0 if rule.period == "open" else amount,
            ]
        await self._limiter.leases.settle(self.reservation_id, self.key, args)
        if fault:
            raise ValueError(f"more than is reserved: {fault}")


class RedisLimiter:
    """Counts for all gateways on one Redis.

    A reservation has a lease of `lease_s`, renewed while its gateway lives; the next request of the
    same tenant gives back the reservations of dead gateways. All clocks are Redis' own. While Redis
    is unavailable, requests with limits are refused (StorageError), answers do not grow, and their
    usage is kept to be settled later.
    """

    def __init__(
        self,
        store: Store,
        *,
        scripts: Scripts | None = None,
        metrics: LimitMetrics | None = None,
        lease_s: float = 30.0,
        gateway_id: str | None = None,
    ) -> None:
        self._store = store
        self._scripts = scripts or Scripts()
        self._metrics = metrics or LimitMetrics()
        self._lease_s = lease_s
        self.leases = RedisLeases(store, self._scripts, lease_s=lease_s)
        self._gateway_id = gateway_id or secrets.token_hex(8)
        self._num_made = 0
        self._plans: dict[str, LimitPlan] = {}
        self._metrics.report_open(lambda: len(self.leases))

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        metrics: LimitMetrics | None = None,
        lease_s: float = 30.0,
        timeout_s: float = 1.0,
    ) -> "RedisLimiter":
        """Use the Redis at `url`. Raises SettingsError for a bad URL, or without the extra."""
        try:
            from outrider.gateway.tenancy.limits.redis_store import RedisStore
        except ModuleNotFoundError as error:
            raise SettingsError(
                "redis_url is set, but the Redis client is not installed: pip install redis"
            ) from error
        store = RedisStore.from_url(url, timeout_s=timeout_s, metrics=metrics)
        return cls(store, metrics=metrics, lease_s=lease_s)

    async def start(self) -> None:
        """Begin to renew leases. Redis need not be available yet."""
        try:
            await self._store.run(self._scripts.renew, f"{_PREFIX}{{start}}", [self._lease_s])
        except StorageError:
            logger.warning(
                "limits store does not answer; requests with limits are refused until it does"
            )
        self.leases.start()

    async def close(self) -> None:
        """Give back all open reservations, as far as Redis is available, and disconnect."""
        await self.leases.close()
        await self._store.close()

    async def reserve(
        self, principal: Principal, want: Want
    ) -> RedisReservation | UnlimitedReservation:
        """Reserve all or nothing. Raises RateLimitError, BudgetError, or StorageError without
        Redis."""
        plan = self._plan(principal)
        if not plan.rules and plan.for_end_users is None:
            return UnlimitedReservation(want)
        key = _key(principal)
        self._num_made += 1
        reservation_id = f"{self._gateway_id}-{self._num_made}"
        holding = Holding(want.by_tier, want.most)
        demands = plan.demands(holding.overall, want.by_tier)
        try:
            args: ScriptArgs = [reservation_id, self._lease_s, 0, *_lines(plan, demands)]
            reply = await self._store.run(self._scripts.reserve, key, args)
        except StorageError:  # should it have been entered all the same, its lease will end
            raise
        except BaseException:
            self.leases.settle_later(reservation_id, key, [reservation_id])
            raise
        states = self._entered(plan, demands, reply)
        reservation = RedisReservation(
            self, plan, key=key, reservation_id=reservation_id, holding=holding, states=states
        )
        self.leases.add(reservation_id, key)
        return reservation

    async def grow(
        self,
        reservation: RedisReservation,
        plan: LimitPlan,
        demands: Sequence[LimitDemand],
        step: int,
    ) -> dict[int, LimitState] | None:
        """Enter more for a reservation; return the rules' new states, None where there is no
        room."""
        try:
            reply = await self._step(reservation, plan, demands, step, self._scripts.reserve)
        except StorageError:
            return None
        if reply[0] == 1:
            return _states(plan, demands, reply)
        if reply[0] == 0:
            self._metrics.growth_refused(decisive(_refusals(plan, demands, reply)).rule)
        return None

    async def extend(
        self,
        reservation: RedisReservation,
        plan: LimitPlan,
        demands: Sequence[LimitDemand],
        step: int,
        *,
        is_first_of_end_user: bool = False,
    ) -> dict[int, LimitState]:
        """Enter more for a reservation; returns the rules' new states.

        Raises RateLimitError or BudgetError, and StorageError where Redis is away or has lost it.
        """
        script = self._scripts.count_for if is_first_of_end_user else self._scripts.reserve
        reply = await self._step(reservation, plan, demands, step, script)
        if reply[0] == NO_SEAT:
            raise no_room()
        if reply[0] == -1:
            raise StorageError(
                "The limits' store has lost this request's reservation; send the request again."
            )
        return self._entered(plan, demands, reply)

    def _entered(
        self, plan: LimitPlan, demands: Sequence[LimitDemand], reply: Sequence[int]
    ) -> dict[int, LimitState]:
        """Return the rules' states. Raises RateLimitError or BudgetError for a refusal."""
        states = _states(plan, demands, reply)
        if reply[0] != 1:
            refusals = _refusals(plan, demands, reply)
            self._metrics.refused(decisive(refusals).rule)
            raise refusal_error(refusals, ordered(tuple(states.values())))
        return states

    async def _step(
        self,
        reservation: RedisReservation,
        plan: LimitPlan,
        demands: Sequence[LimitDemand],
        step: int,
        script: str,
    ) -> list[int]:
        args: ScriptArgs = [reservation.reservation_id, self._lease_s, step]
        args += _lines(plan, demands, reservation.end_user)
        return await self._store.run(script, reservation.key, args)

    def _plan(self, principal: Principal) -> LimitPlan:
        """Return the principal's rules; cached while its limits are the same objects."""
        plan = self._plans.get(principal.key_id)
        if plan is None or not plan.is_of(principal):
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[principal.key_id] = LimitPlan(principal)
        return plan


def _key(principal: Principal) -> str:
    """Return the prefix of all keys of a request. Its braces keep them on one node of a cluster."""
    if principal.team_id is not None:
        return f"{_PREFIX}{{team:{principal.team_id}}}"
    return f"{_PREFIX}{{key:{principal.key_id}}}"


def _lines(plan: LimitPlan, demands: Sequence[LimitDemand], end_user: str = "") -> ScriptArgs:
    """Return the demands as scripts take them."""
    lines: ScriptArgs = []
    for i, amount in demands:
        rule = plan.rules[i]
        lines += [rule.period, _name(rule, end_user), min(rule.limit, _MAX_AMOUNT), amount]
    return lines


def _name(rule: LimitRule, end_user: str) -> str:
    if rule.scope == "end_user":
        return f"{rule.scope}:{rule.owner}:{end_user}:{rule.name}"
    return f"{rule.scope}:{rule.owner}:{rule.model or ''}:{rule.name}"


def _states(
    plan: LimitPlan, demands: Sequence[LimitDemand], reply: Sequence[int]
) -> dict[int, LimitState]:
    """Return the limits' states by rule."""
    states = {}
    for n, (i, _) in enumerate(demands):
        used, reset_ms = reply[1 + 3 * n], reply[3 + 3 * n]
        states[i] = plan.rules[i].state(used, reset_ms / 1000)
    return states


def _refusals(
    plan: LimitPlan, demands: Sequence[LimitDemand], reply: Sequence[int]
) -> list[LimitRefusal]:
    refusals = []
    for n, (i, amount) in enumerate(demands):
        used, wait_ms = reply[1 + 3 * n], reply[2 + 3 * n]
        if wait_ms >= 0:
            rule = plan.rules[i]
            refusals.append(
                LimitRefusal(rule=rule, wanted=amount, used=used, wait_s=wait_ms / 1000)
            )
    return refusals
