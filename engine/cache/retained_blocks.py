"""Blocks that no sequence holds and that are evicted behind others: their texts will come back.

Clients say so, and may say so of everything. So a tenant has at most its fair share of the cache
for such blocks, by the tenants of late; what is more is evicted as all else is.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_LATELY_S: Final = 600.0
_MOST_TENANTS: Final = 1024
# Tenants that are looked at for each block that is evicted.
_LOOKS: Final = 8


@dataclass(frozen=True, slots=True)
class Retention:
    """A tenant's wish to keep a text. `seconds`: from its last use; 0: as all others."""

    tenant: str
    seconds: float = 0.0


class RetainedBlocks:
    """Holds them by tenant, the least recently used first."""

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_blocks`: of the whole cache."""
        self._num_blocks = num_blocks
        self._clock = clock
        self._seen: OrderedDict[str, float] = OrderedDict()  # tenants, by their last text's end
        self._until: dict[str, OrderedDict[int, float]] = {}
        self._tenants: dict[int, str] = {}

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self._tenants)

    @property
    def share(self) -> int:
        """Blocks that a tenant may have: at most half of the cache."""
        return self._num_blocks // max(len(self._seen), 2)

    def note(self, tenant: str) -> None:
        """Note that a tenant uses the cache, whether it wishes anything or not."""
        now_s = self._clock()
        self._seen[tenant] = now_s
        self._seen.move_to_end(tenant)
        while len(self._seen) > _MOST_TENANTS or self._oldest_s < now_s - _LATELY_S:
            self._seen.popitem(last=False)

    @property
    def _oldest_s(self) -> float:
        return next(iter(self._seen.values()))

    def add(self, block: int, keep: Retention) -> list[int]:
        """Take a block in; return those of the tenant that are too many."""
        own = self._until.setdefault(keep.tenant, OrderedDict())
        own[block] = self._clock() + keep.seconds
        self._tenants[block] = keep.tenant
        return [self._pop(keep.tenant) for _ in range(len(own) - self.share)]

    def discard(self, block: int) -> bool:
        """Let a block go; False if it is not here."""
        tenant = self._tenants.pop(block, None)
        if tenant is None:
            return False
        del self._until[tenant][block]
        if not self._until[tenant]:
            del self._until[tenant]
        return True

    def pop_due(self) -> int | None:
        """Return a block whose time is over, or one of a tenant with too many; None for none."""
        now_s, share = self._clock(), self.share
        for _ in range(min(_LOOKS, len(self._until))):
            tenant = self._next_tenant()
            own = self._until[tenant]
            if len(own) > share or next(iter(own.values())) <= now_s:
                return self._pop(tenant)
        return None

    def pop(self) -> int | None:
        """Return a block to evict where there are no others; None where there is none here."""
        return self._pop(self._next_tenant()) if self._until else None

    def _next_tenant(self) -> str:
        """Return each tenant in turn."""
        tenant = next(iter(self._until))
        self._until[tenant] = self._until.pop(tenant)
        return tenant

    def _pop(self, tenant: str) -> int:
        block = next(iter(self._until[tenant]))
        self.discard(block)
        return block
