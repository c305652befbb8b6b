"""Recent requests, so that feedback finds its arms."""

import asyncio
import hashlib
import re
from collections import deque
from typing import Final

import msgspec
from sqlalchemy import and_, or_, select

from outrider.gateway.contract.answers.outcomes import ArmRef, RequestOutcome
from outrider.gateway.experiments.totals import NUM_UNIT_BUCKETS
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import ledger
from outrider.gateway.tenancy.keys.keys import Principal

MAX_RECENT: Final = 50_000
"""Requests in memory; 40 to 50 MB."""
LEDGER_AGE_S: Final = 86_400.0
"""The age up to which the ledger is searched: it has no index by request."""
_ARM: Final = re.compile(r"([a-z0-9-]+):([0-9]{1,9})/([^,/:]+)")


class KnownRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that is over. `request_id` is ours, and unique.

    The garbage collector does not look at it: 50,000 of them would make its pauses long.
    """

    request_id: str
    arms: tuple[ArmRef, ...]
    names: tuple[str, ...] = ()
    """What finds it here: its owner with each id that its client knows."""


class RecentRequests:
    """The last MAX_RECENT requests, by the ids that their clients know. For one event loop."""

    def __init__(self, max_requests: int = MAX_RECENT) -> None:
        self._max_requests = max_requests
        self._by_name: dict[str, KnownRequest] = {}
        self._oldest: deque[KnownRequest] = deque()
        self._arrived = asyncio.Event()

    def observe(self, outcome: RequestOutcome) -> None:
        """Remember the outcome. The oldest is forgotten where there are too many."""
        if not outcome.request_id:
            return
        owner = _owner(outcome.team_id, outcome.key_id)
        names = tuple([owner + known_as for known_as in _ids(outcome)])
        known = KnownRequest(request_id=outcome.request_id, arms=outcome.arms, names=names)
        for name in names:
            self._by_name[name] = known
        self._oldest.append(known)
        if len(self._oldest) > self._max_requests:
            self._forget_oldest()
        self._arrived.set()
        self._arrived.clear()

    def find(self, principal: Principal, known_as: str) -> KnownRequest | None:
        """Find this tenant's request by the id of its answer, its x-request-id or our own id."""
        return self._by_name.get(_owner(principal.team_id or "", principal.key_id) + known_as)

    async def wait_for(
        self, principal: Principal, known_as: str, timeout_s: float
    ) -> KnownRequest | None:
        """Find it, with a wait: a client may be faster than our bookkeeping at the answer's end."""
        try:
            async with asyncio.timeout(timeout_s):
                while (known := self.find(principal, known_as)) is None:
                    await self._arrived.wait()
        except TimeoutError:
            return None
        return known

    def _forget_oldest(self) -> None:
        known = self._oldest.popleft()
        for name in known.names:
            if self._by_name.get(name) is known:
                del self._by_name[name]


def find_in_ledger(
    database: Database, principal: Principal, known_as: str, since_s: float
) -> KnownRequest | None:
    """Find this tenant's request by its x-request-id or our id; blocks. Raises StorageError.

    The ledger does not know the unit, so all of a key's requests are in one bucket.
    """
    row = ledger.c
    is_own = and_(row.key_id == principal.key_id, row.team_id.is_(None))
    if principal.team_id is not None:
        is_own = row.team_id == principal.team_id
    question = (
        select(row.request_id, row.arm, row.key_id)
        .where(is_own, row.ended_at >= since_s)
        .where(or_(row.client_request_id == known_as, row.request_id == known_as))
        .order_by(row.ended_at.desc())
        .limit(1)
    )
    with database.read() as connection:
        found = connection.execute(question).first()
    if found is None:
        return None
    return KnownRequest(request_id=found.request_id, arms=_arms(found.arm, found.key_id))


def _arms(text: str, key_id: str) -> tuple[ArmRef, ...]:
    digest = hashlib.blake2b(key_id.encode(), digest_size=4).digest()
    bucket = int.from_bytes(digest, "big") % NUM_UNIT_BUCKETS
    matches = (_ARM.fullmatch(part) for part in text.split(","))
    return tuple(
        ArmRef(experiment=match[1], version=int(match[2]), arm=match[3], unit_bucket=bucket)
        for match in matches
        if match is not None
    )


def _owner(team_id: str, key_id: str) -> str:
    """Name a team, or a key where it is in none; no id has a line feed."""
    return f"team {team_id}\n" if team_id else f"key {key_id}\n"


def _ids(outcome: RequestOutcome) -> dict[str, None]:
    """Return the ids that clients may use. Other APIs' answers have ids derived from ours."""
    answer_id = outcome.answer_id
    ids = [outcome.request_id, outcome.client_request_id, answer_id]
    if answer_id and outcome.endpoint == "messages":
        ids.append(f"msg_{answer_id.removeprefix('chatcmpl-').removeprefix('msg_')}")
    elif answer_id and outcome.endpoint == "responses":
        ids.append(f"resp_{answer_id.rpartition('-')[2]}")
    return dict.fromkeys([known_as for known_as in ids if known_as])
