"""What the end users of keys and teams have used, in few bytes, and bounded in number."""

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from outrider.gateway.contract.errors.tree import RateLimitError
from outrider.gateway.tenancy.keys.amounts import LimitName, PastUse, PastUses
from outrider.gateway.tenancy.keys.keys import SIGNED_IN_PREFIX, VERIFIED
from outrider.gateway.tenancy.limits.counters.slots import Counters, PackedCounter, packed
from outrider.gateway.tenancy.limits.limit_rules import LimitRule
from outrider.gateway.tenancy.limits.past import UNITS, minute_moment
from outrider.gateway.tenancy.limits.windows import ClockTimes, Counter

MAX_END_USERS: Final = 100_000
"""End users of one key or team that are remembered."""
_KEYS: Final = 4
"""All keys and teams together may have so many times the end users of one."""
_LOOKS: Final = 64
"""Remembered end users that are looked at to make room for another one."""
_RETRY_S: Final = 60.0
_DIGEST_BYTES: Final = 16
_PAST_FIELDS: Final = 5
"""Numbers of a past use: whether of the last minute, its second, requests, tokens, money."""
_CODES: Final = {name: code for code, name in enumerate(get_args(LimitName))}


def digest_of(end_user: str) -> bytes:
    """Return the name under which an end user is counted: short, however long the id is."""
    words = end_user.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(words, digest_size=_DIGEST_BYTES).digest()


def no_room() -> RateLimitError:
    """Return the error of a new end user beyond the number that is remembered."""
    return RateLimitError(
        "This key has had so many end users who have used up half of a limit or more that no "
        "further one can be counted. Try again later.",
        retry_after_s=_RETRY_S,
        limit="end_users",
    )


@dataclass(slots=True)
class _Owner:
    """The end users of one key or team, the least recently seen first."""

    rules: tuple[LimitRule, ...] = ()
    """The limits of each of them."""
    amounts: dict[bytes, "array[int]"] = field(default_factory=dict)
    """Packed counters, by `digest_of` the end user."""


class EndUsers:
    """Counters of end users. For one event loop.

    Of more than `most` under one key or team, those go first that were not seen for longest
    and have used less than half of each limit. So whoever invents end users makes no other's
    used-up budget forgotten, and takes no more memory. Subjects of verified tokens have room of
    their own.
    """

    def __init__(self, make: Counters, most: int = MAX_END_USERS) -> None:
        self._slots = make.slots
        self._most = most
        self._owners: dict[tuple[str, bool], _Owner] = {}
        self._num_users = 0
        self._past: dict[tuple[str, bytes], array[int]] = {}

    def __len__(self) -> int:
        """Return the number of end users that are remembered."""
        return self._num_users

    def keep_past(self, uses: PastUses, now: ClockTimes) -> None:
        """Keep usage from before the start until its end user comes again."""
        for use in uses.minute:
            self._keep(use, second=math.floor(minute_moment(use.at_s, now).clock_s))
        for use in uses.end_user_days:
            self._keep(use, second=None)

    def _keep(self, use: PastUse, second: int | None) -> None:
        is_verified = use.key_id.startswith(SIGNED_IN_PREFIX)
        digest = digest_of(VERIFIED + use.end_user if is_verified else use.end_user)
        amounts = (use.requests, use.tokens, use.usd_nanos)
        for owner in filter(None, ("" if is_verified else use.key_id, use.team_id)):
            past = self._past.setdefault((owner, digest), packed())
            past.extend((second is not None, use.at_s if second is None else second, *amounts))

    def counters(
        self, rules: Sequence[LimitRule], end_user: str, moment: ClockTimes
    ) -> tuple[Counter, ...]:
        """Return a counter for each rule of an end user. Raises RateLimitError for one too many."""
        amounts = {
            owner: self._seen(owner, end_user, tuple(r for r in rules if r.owner == owner), moment)
            for owner in {rule.owner for rule in rules}
        }
        return tuple(self._counter(rule, amounts[rule.owner]) for rule in rules)

    def _seen(
        self, name: str, end_user: str, rules: tuple[LimitRule, ...], moment: ClockTimes
    ) -> "array[int]":
        """Return an end user's amounts, as the latest one that was seen."""
        owner = self._owners.setdefault((name, end_user.startswith(VERIFIED)), _Owner())
        owner.rules, digest = rules, digest_of(end_user)
        amounts = owner.amounts.pop(digest, None)
        if amounts is None:
            self._make_room(owner, moment)
            amounts = packed()
            self._enter_past(self._past.pop((name, digest), None), rules, amounts)
            self._num_users += 1
        owner.amounts[digest] = amounts
        return amounts

    def _enter_past(
        self, past: "array[int] | None", rules: tuple[LimitRule, ...], amounts: "array[int]"
    ) -> None:
        for at in range(0, len(past or ()), _PAST_FIELDS):
            is_minute, second, *used = (past or packed())[at : at + _PAST_FIELDS]
            for rule in rules:
                amount = used[UNITS.index(rule.unit)]
                if amount and rule.period != "open" and (rule.period == "minute") == is_minute:
                    self._counter(rule, amounts).add(amount, ClockTimes(second, second))

    def _make_room(self, owner: _Owner, moment: ClockTimes) -> None:
        """Forget an end user where there are too many. Raises RateLimitError."""
        if len(owner.amounts) < self._most:
            if self._num_users < _KEYS * self._most:
                return
            owner = max(self._owners.values(), key=lambda each: len(each.amounts))
        for _ in range(min(_LOOKS, len(owner.amounts))):
            digest = next(iter(owner.amounts))
            amounts = owner.amounts.pop(digest)
            if not any(self._is_half_used(rule, amounts, moment) for rule in owner.rules):
                self._num_users -= 1
                return
            owner.amounts[digest] = amounts
        raise no_room()

    def _is_half_used(self, rule: LimitRule, amounts: "array[int]", moment: ClockTimes) -> bool:
        used = self._counter(rule, amounts).used(moment)
        return bool(used) and 2 * used >= rule.limit

    def _counter(self, rule: LimitRule, amounts: "array[int]") -> PackedCounter:
        return PackedCounter(self._slots[rule.period], amounts, _CODES[rule.name])
