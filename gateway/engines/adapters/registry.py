"""The adapters that have a name: what requests may ask for beside the models themselves."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from outrider.engine.errors import EngineError, InvalidAdapterError
from outrider.engine.events import AdapterInfo, TierInfo
from outrider.engine.request import AdapterRef
from outrider.gateway.contract.errors.tree import BadRequestError, ConflictError, NotFoundError
from outrider.gateway.engines.adapters.files import adapter_ref
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.settings.adapters import NamedAdapter
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEntry:
    """An adapter with its name."""

    ref: AdapterRef
    info: AdapterInfo | None = None
    """None while the engine was not asked about it."""
    is_routed: bool = False
    """The small model answers where the router trusts it, the large one with the adapter else, as
    for `auto`."""
    is_watched: bool = False
    """It came from the watched folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChange:
    """An adapter to load under its name, or, where `wanted` is None, to unload."""

    name: str
    wanted: NamedAdapter | None = None


class AdapterRegistry:
    """Loads and unloads adapters by name; belongs to one event loop.

    A name is there once the engine has read its files and found them right. Requests that run keep
    the adapter as it was when they began, whatever becomes of name and folder.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        max_named: int = 1024,
        taken: Collection[str] = (),
        initial: Sequence[NamedAdapter] = (),
    ) -> None:
        """`taken`: the other names that requests may use; `initial`: read at the engine's start."""
        self._engine = engine
        self._max_named = max_named
        self._taken = taken
        self._entries = {
            each.name: NamedEntry(ref=adapter_ref(each), is_routed=each.tier == "auto")
            for each in initial
        }
        self._lock = asyncio.Lock()

    def candidates(self, tiers: Mapping[Tier, TierInfo]) -> dict[str, tuple[TierInfo, ...]]:
        """Return the adapters' names with what answers to them, among the loaded tiers."""
        found: dict[str, tuple[TierInfo, ...]] = {}
        for name, entry in self._entries.items():
            base = tiers.get(entry.ref.tier)
            if base is None:
                continue
            adapted = replace(base, model_id=name, adapter=entry.ref)
            routed = entry.is_routed and "small" in tiers
            found[name] = (tiers["small"], adapted) if routed else (adapted,)
        return found

    @property
    def stamp(self) -> str:
        """A text that changes whenever a name comes, goes, or means another content."""
        return repr([(entry.ref, entry.is_routed) for entry in self.entries()])

    def entries(self) -> list[NamedEntry]:
        """The adapters, by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    async def described(self) -> list[NamedEntry]:
        """Return the adapters by name, with what the engine knows of them."""
        for name, entry in list(self._entries.items()):
            if entry.info is None:
                with suppress(EngineError):
                    info = await self._engine.prepare_adapter(entry.ref)
                    if self._entries.get(name) is entry:
                        self._entries[name] = replace(entry, info=info)
        return self.entries()

    async def load(self, wanted: NamedAdapter, *, is_watched: bool = False) -> NamedEntry:
        """Read an adapter and give it its name; one of that name is replaced.

        Raises BadRequestError for files that cannot be used, ConflictError for a name that is
        taken, EngineError where the engine does not run.
        """
        async with self._lock:
            await self._check_name(wanted.name)
            ref = await asyncio.to_thread(adapter_ref, wanted)
            try:
                info = await self._engine.prepare_adapter(ref)
            except InvalidAdapterError as error:
                raise BadRequestError(
                    f"adapter {wanted.name!r}: {error}.", param="path", code=error.code
                ) from None
            entry = self._entries[wanted.name] = NamedEntry(
                ref=ref, info=info, is_routed=wanted.tier == "auto", is_watched=is_watched
            )
            logger.info(
                "adapter loaded name=%s tier=%s rank=%d bytes=%d digest=%s",
                ref.name,
                ref.tier,
                info.max_rank,
                info.num_bytes,
                info.digest,
            )
            return entry

    async def _check_name(self, name: str) -> None:
        """Raise ConflictError for a name that is taken, or one too many."""
        tiers = (await self._engine.info()).tiers
        if name in self._taken or name in {info.model_id for info in tiers.values()}:
            raise ConflictError(f"{name!r} is the name of a model, a tier or an alias.")
        if name not in self._entries and len(self._entries) >= self._max_named:
            raise ConflictError(
                f"There are {self._max_named} adapters (adapters.max_named); unload one."
            )

    def entry(self, name: str) -> NamedEntry:
        """Return the adapter of this name. Raises NotFoundError."""
        if (found := self._entries.get(name)) is None:
            raise NotFoundError(f"There is no adapter {name[:64]!r}.")
        return found

    async def apply(self, change: AdapterChange) -> None:
        """Load or unload an adapter. Raises the errors of `load` and `unload`."""
        if change.wanted is None:
            self.unload(change.name)
        else:
            await self.load(change.wanted)

    def unload(self, name: str) -> None:
        """Take a name away; requests that run go on. Raises NotFoundError."""
        self.entry(name)
        del self._entries[name]
        logger.info("adapter unloaded name=%s", name)
