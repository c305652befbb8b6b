"""Prompts that are kept under a name: their blocks are held, within a part of each cache.

What is held leaves enough for the longest request, so that every request still ends.
"""

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.cache.kv_view import KVView
from outrider.engine.errors import EngineError, InvalidRequestError, PinTooLargeError
from outrider.engine.events import PinInfo
from outrider.engine.request import EngineRequest, Pin
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier


class PrefixCache(Protocol):
    """A tier's runner, as far as named prompts are concerned."""

    @property
    def max_context(self) -> int | None:
        """Tokens of its longest request."""

    def new_view(self, cache_salt: str) -> KVView:
        """Return an empty view."""


logger = logging.getLogger(__name__)

_PART: Final = 4
"""Named prompts hold at most one part of so many of a cache."""
_MOST_PINS: Final = 256

PinKey = tuple[str, str, Tier]
"""Tenant, name and tier."""


@dataclass(eq=False, slots=True, kw_only=True)
class KeptPrompt:
    """A prompt whose blocks are held. `until_s`: by the engine's clock."""

    request: EngineRequest
    pin: Pin
    view: KVView
    until_s: float


class PinStore(Protocol):
    """Keeps named prompts beyond a restart."""

    def keep(self, kept: KeptPrompt) -> None:
        """Take in a prompt that is kept from now on."""

    def let_go(self, kept: KeptPrompt) -> None:
        """Forget one."""

    def requests(self) -> list[EngineRequest]:
        """Return what has the prompts kept again that were kept before."""


class PinnedPrompts:
    """The prompts that an engine keeps. A name is one of a tenant's: others may have the same."""

    def __init__(
        self,
        runners: Mapping[Tier, PrefixCache],
        store: PinStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store`: keeps them beyond a restart; None where nothing does."""
        self._runners = runners
        self._store = store
        self._clock = clock
        self._kept: dict[PinKey, KeptPrompt] = {}

    def check(self, request: EngineRequest) -> None:
        """Raise PinTooLargeError or InvalidRequestError where a prompt cannot be kept.

        The prompt may lose its place until it is computed: `keep` looks again.
        """
        if request.pin is None:
            return
        view = self._runners[request.tier].new_view(request.cache_salt)
        size = view.pool.block_size
        if not view.has_prefix_caching:
            raise InvalidRequestError("nothing would be kept: prefix caching is off")
        if len(request.prompt_token_ids) < size:
            raise InvalidRequestError(
                f"nothing would be kept: prompts are kept in whole blocks of {size} tokens, and "
                f"this one has {len(request.prompt_token_ids)}"
            )
        self.expire()
        if _key(request) not in self._kept and len(self._kept) >= _MOST_PINS:
            raise InvalidRequestError(f"{_MOST_PINS} prompts are kept already; delete some")
        self._require_room(request, view, len(request.prompt_token_ids) // size)

    def _require_room(self, request: EngineRequest, view: KVView, num_blocks: int) -> None:
        max_context = self._runners[request.tier].max_context or 0
        size, most = view.pool.block_size, most_blocks(view.pool, max_context)
        others = self._others(request)
        held = sum(len(each.view.block_table) for each in others)
        if held + num_blocks > most or not _has_spare(view, max_context, num_blocks, others):
            raise PinTooLargeError(
                tier=request.tier,
                num_tokens=num_blocks * size,
                most_tokens=most * size,
                num_left=max(most - held, 0) * size,
            )

    def _others(self, request: EngineRequest) -> list[KeptPrompt]:
        """Return what is kept of a request's tier under other names."""
        own = _key(request)
        return [
            each
            for key, each in self._kept.items()
            if key != own and each.request.tier == request.tier
        ]

    def keep(self, sequence: Sequence) -> None:
        """Keep the prompt of a sequence that has computed it and holds it still.

        It takes the place of one with the same name. Raises PinTooLargeError.
        """
        request = sequence.request
        if request.pin is None:
            return
        view = sequence.view.twin()
        view.match_prefix([*request.prompt_token_ids, 0])  # all full blocks, none is left out
        try:
            self._require_room(request, view, len(view.block_table))
        except PinTooLargeError:
            view.release()
            raise
        key = _key(request)
        old = self._kept.pop(key, None)
        kept = KeptPrompt(
            request=request,
            pin=request.pin,
            view=view,
            until_s=self._clock() + request.pin.ttl_s,
        )
        self._kept[key] = kept
        if old is not None:
            self._let_go(old)
        if self._store is not None:
            self._store.keep(kept)

    def _let_go(self, kept: KeptPrompt) -> None:
        kept.view.release()
        if self._store is not None:
            self._store.let_go(kept)

    def release(self, tenant: str, name: str) -> list[PinInfo]:
        """Keep a tenant's prompt of this name no longer; return what was kept."""
        keys = [key for key in self._kept if key[:2] == (tenant, name)]
        found = [self._info(key) for key in keys]
        for key in keys:
            self._let_go(self._kept.pop(key))
        return found

    def restore(self, submit: Callable[[EngineRequest], None]) -> None:
        """Submit what has the prompts kept again that were kept before a restart."""
        for request in () if self._store is None else self._store.requests():
            try:
                submit(request)
            except EngineError as error:
                assert request.pin is not None
                logger.warning(
                    "a prompt is kept no more name=%s reason=%s", request.pin.name, error
                )

    def expire(self) -> None:
        """Let go of what was kept for its time."""
        if not self._kept:
            return
        now_s = self._clock()
        for key in [key for key, each in self._kept.items() if each.until_s <= now_s]:
            self._let_go(self._kept.pop(key))

    def infos(self) -> list[PinInfo]:
        """Describe what is kept."""
        self.expire()
        return [self._info(key) for key in self._kept]

    def _info(self, key: PinKey) -> PinInfo:
        tenant, name, tier = key
        kept = self._kept[key]
        return PinInfo(
            name=name,
            tenant=tenant,
            tier=tier,
            num_tokens=kept.view.num_computed_tokens,
            left_s=max(kept.until_s - self._clock(), 0.0),
        )


def _key(request: EngineRequest) -> PinKey:
    assert request.pin is not None
    return request.tenant, request.pin.name, request.tier


def most_blocks(pool: BlockPool, max_context: int) -> int:
    """Return how many blocks of a cache named prompts may hold."""
    longest = -(-max_context // pool.block_size)
    return max(min(pool.num_blocks // _PART, pool.num_blocks - longest), 0)


def _has_spare(
    view: KVView, max_context: int, num_blocks: int, others: SequenceOf[KeptPrompt]
) -> bool:
    """Return whether windowed and recurrent layers have room for another prompt."""
    window = view.pool.window
    if window is not None:
        tables = [each.view.window_table for each in others]
        held = sum(len(table) - table.count(0) for table in tables)
        seen = num_blocks - window.first_seen(num_blocks * view.pool.block_size)
        if held + seen > min(window.num_blocks // _PART, window.spare(max_context=max_context)):
            return False
    if view.line is not None:
        states, lines = view.line.pool.states, view.line.pool.lines
        num_checkpoints = states.num_blocks - 1 - 2 * lines.num_blocks
        return len(others) < num_checkpoints // _PART
    return True
