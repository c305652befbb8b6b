"""A watched folder of adapters: what appears or changes is loaded, what is gone unloaded."""

import asyncio
import logging
import os
from pathlib import Path

from outrider.engine.errors import EngineError
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.engines.adapters.files import tier_of, version_of
from outrider.gateway.engines.adapters.registry import AdapterRegistry
from outrider.gateway.settings.adapters import ADAPTER_NAME, NamedAdapter

logger = logging.getLogger(__name__)


class AdapterWatcher:
    """Keeps the registry's watched adapters as the folder has them."""

    def __init__(self, registry: AdapterRegistry, folder: Path, *, poll_s: float) -> None:
        self._registry = registry
        self._folder = folder.expanduser()
        self._poll_s = poll_s
        self._tried: dict[str, str] = {}
        """The version of each folder that was tried last: a broken one is not read every time."""
        self._seen: dict[str, str] = {}

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._poll_s)

    async def look(self) -> None:
        """Load and unload what has changed since the last look.

        A folder is read once it is the same in two looks: it may be being written.
        """
        found = await asyncio.to_thread(self._versions)
        settled = {name: each for name, each in found.items() if self._seen.get(name) == each}
        self._seen = found
        watched = {e.ref.folder: e.ref.name for e in self._registry.entries() if e.is_watched}
        for folder, name in watched.items():
            if Path(folder).name not in found:
                self._registry.unload(name)
                self._tried.pop(Path(folder).name, None)
        for folder_name, version in settled.items():
            if self._tried.get(folder_name) != version:
                await self._load(folder_name, version)

    async def _load(self, folder_name: str, version: str) -> None:
        name, tier = tier_of(folder_name)
        wanted = NamedAdapter(name=name, folder=str(self._folder / folder_name), tier=tier)
        if not ADAPTER_NAME.fullmatch(name):
            logger.warning("adapter left out folder=%r reason=name", folder_name[:80])
        else:
            try:
                await self._registry.load(wanted, is_watched=True)
            except GatewayError as error:
                logger.warning("adapter left out name=%s reason=%s", name, error)
            except EngineError:  # it is starting, or being restarted: again later
                return
        self._tried[folder_name] = version

    def _versions(self) -> dict[str, str]:
        """Return the folders with an adapter's files, and the files' versions."""
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            logger.warning("adapters' folder cannot be read reason=%s", error.strerror)
            return dict(self._seen)
        versions = {name: version_of(self._folder / name) for name in names}
        return {name: version for name, version in versions.items() if version}
