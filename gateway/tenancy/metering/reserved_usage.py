"""The usage that a request of a limited tenant reserves, and its charge."""

from functools import partial
from typing import Final

import msgspec

from outrider.gateway.contract.errors.tree import BudgetError
from outrider.gateway.contract.schema.kinds import Units
from outrider.gateway.tenancy.keys.amounts import Amounts, Want
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.limits.headers import ratelimit_headers
from outrider.gateway.tenancy.limits.limiter import Reservation
from outrider.gateway.tenancy.metering.charging import NONE, Reserved, beyond, capped, missing, used
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance

_ONE_REQUEST: Final = {"": Amounts(requests=1)}
"""A request whose tier is unknown: it counts for the limits over all models."""
_LEAST_TOKENS: Final = 16
"""The least number of tokens to reserve for an answer without a maximum length."""


class UsageEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The most that an answer can take, its prompts counted once."""

    tiers: tuple[str, ...]
    """Those that may answer."""
    num_prompt_tokens: int
    num_choices: int
    max_tokens: int
    """The most tokens of each choice."""
    is_bounded: bool
    """The client set `max_tokens`."""
    is_enforced_upstream: bool = False
    """An upstream server enforces `max_tokens`."""
    num_predicted_tokens: int = 0
    """Tokens of the client's predicted answer. An upstream server may count them for each choice in
    addition."""
    units: Units | None = None
    """Images or sound, which may be priced in place of the tokens."""


class ReservedUsage:
    """Reserves at the limits of a key and its team, and charges at most what is reserved."""

    def __init__(self, tenancy: Tenancy, endpoint: str, reservation: Reservation) -> None:
        """`reservation` holds the request itself (see `reserve_request`)."""
        self._tenancy = tenancy
        self._endpoint = endpoint
        self._reservation = reservation
        self._reserved = Reserved(dict(_ONE_REQUEST), _ONE_REQUEST[""])
        self._has_end_user = False

    @property
    def never_waits(self) -> bool:
        """True where reserving and settling wait for nothing: `charge` then ends at once."""
        return self._reservation.never_waits

    @property
    def headers(self) -> dict[str, str]:
        """Return the x-ratelimit headers."""
        return ratelimit_headers(self._reservation.reported)

    async def count_for(self, end_user: str) -> None:
        """Count the request for an end user, too. Raises RateLimitError or BudgetError."""
        if not self._has_end_user:
            await self._reservation.count_for(end_user)
            self._has_end_user = True

    async def admit(self, estimate: UsageEstimate) -> TokenAllowance | None:
        """Reserve the answer's usage, in addition to the request itself.

        Returns the allowance, which can grow; None where the answer cannot take more than is
        reserved. Where other tiers were to answer before, only the difference is reserved. Raises
        RateLimitError or BudgetError.
        """
        if estimate.is_bounded:
            await self._reserve(self._wanted(estimate, estimate.max_tokens))
            per_choice = estimate.max_tokens
        else:
            per_choice = await self._reserve_usual(estimate)
        if per_choice >= estimate.max_tokens and not estimate.is_enforced_upstream:
            return None
        grow = partial(self._grow, estimate)
        return TokenAllowance(per_choice * estimate.num_choices, grow)

    async def _reserve_usual(self, estimate: UsageEstimate) -> int:
        """Reserve the usual length of such answers; return the tokens of each choice.

        Where even an unused limit is too small for that, the answer begins with less and may grow.
        """
        lengths, endpoint = self._tenancy.lengths, self._endpoint
        num_tokens = max(
            lengths.expected(tier, endpoint, at_most=estimate.max_tokens) for tier in estimate.tiers
        )
        while True:
            try:
                await self._reserve(self._wanted(estimate, num_tokens))
            except BudgetError as error:
                if error.reset_s is not None or num_tokens <= _LEAST_TOKENS:
                    raise
                num_tokens = max(num_tokens // 4, _LEAST_TOKENS)
            else:
                return num_tokens

    def _wanted(self, estimate: UsageEstimate, per_choice: int) -> dict[str, Amounts]:
        num_completion = (per_choice + estimate.num_predicted_tokens) * estimate.num_choices
        return {
            tier: self._amounts(tier, estimate.num_prompt_tokens, num_completion, estimate.units)
            for tier in estimate.tiers
        }

    def _amounts(
        self, tier: str, num_prompt: int, num_completion: int, units: Units | None = None
    ) -> Amounts:
        most = self._tenancy.prices.most(
            tier,
            num_prompt_tokens=num_prompt,
            num_completion_tokens=num_completion,
            units=units,
        )
        return Amounts(requests=1, tokens=num_prompt + num_completion, usd_nanos=most.charge_nanos)

    async def _reserve(self, wanted: dict[str, Amounts]) -> None:
        """Reserve the amounts that are not reserved yet. Raises RateLimitError or BudgetError."""
        reserved = self._reserved.by_tier
        more = {t: beyond(amounts, reserved.get(t, NONE)) for t, amounts in wanted.items()}
        if any(amounts != NONE for amounts in more.values()):
            await self._reservation.extend(Want(by_tier=more))
            self._reserved.add(more)

    async def _grow(self, estimate: UsageEstimate, num_tokens: int) -> bool:
        """Count more of the answer, whichever tier writes it, at the price behind its prompt."""
        more = {}
        for tier in estimate.tiers:
            before, after = (
                self._amounts(tier, estimate.num_prompt_tokens, num) for num in (0, num_tokens)
            )
            amounts = beyond(after, before)
            # Money is rounded down; amounts reserved in parts are charged as one sum.
            more[tier] = Amounts(requests=0, tokens=amounts.tokens, usd_nanos=amounts.usd_nanos + 1)
        return await self._grow_by(more)

    async def _grow_by(self, more: dict[str, Amounts]) -> bool:
        if not await self._reservation.grow(Want(by_tier=more)):
            return False
        self._reserved.add(more)
        return True

    def capped(self, rows: list[LedgerRow]) -> list[LedgerRow]:
        """Return the rows, charged with no more than is reserved."""
        return capped(rows, self._reserved)

    async def charge(self, rows: list[LedgerRow], *, is_counted: bool) -> list[LedgerRow]:
        """Return the rows as they can be charged, and give back the rest of the reservation.

        `is_counted`: the request itself counts although it pays for no tokens.
        """
        more = missing(rows, self._reserved)
        if more and not await self._grow_by(more):
            rows = self.capped(rows)
        taken = used(rows)
        if not taken and is_counted:
            taken = self._request_alone()
        await self._reservation.settle(taken)
        return rows

    def _request_alone(self) -> dict[str, Amounts]:
        """Return the charge of a request that pays for no tokens but made the server work.

        It counts for all models, and for the first tier that it was admitted to.
        """
        tier = next(filter(None, self._reserved.by_tier), "")
        return {tier: Amounts(requests=1)}


async def reserve_request(tenancy: Tenancy, principal: Principal, endpoint: str) -> ReservedUsage:
    """Reserve a request by itself. Raises RateLimitError or BudgetError."""
    reservation = await tenancy.limiter.reserve(principal, Want(by_tier=_ONE_REQUEST))
    return ReservedUsage(tenancy, endpoint, reservation)
