"""Keys on a database of their own, with clocks that tests turn."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry

from outrider.gateway.settings.keys import KeyMode
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys import authenticator
from outrider.gateway.tenancy.keys.auth_throttle import AuthThrottle
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.keys.key_metrics import TenantMetrics
from outrider.gateway.tenancy.keys.key_parts import KeyParts
from outrider.gateway.tenancy.keys.key_registry import KeyRegistry
from outrider.gateway.tenancy.keys.key_store import KeyStore
from outrider.gateway.tenancy.keys.keys import KeyHasher
from tests.databases import with_tables

HASHER = KeyHasher(b"a secret of these tests")
ADMIN_TOKEN = "a-token-of-these-tests"
Result = TypeVar("Result")


class World:
    """All parts; `now_s` is the time of every clock in it."""

    def __init__(
        self,
        folder: Path,
        *,
        mode: KeyMode = "auto",
        admin_token: str | None = ADMIN_TOKEN,
        api_key: str | None = None,
        refresh_s: float = 3600.0,
        slow_s: float = 10.0,
        isolate_tenants: bool = True,
    ) -> None:
        self.now_s = 1_000_000.0
        self.registry = CollectorRegistry()
        self.database = Database(with_tables(folder / "keys.db"))
        self.store = KeyStore(
            self.database, HASHER, randomness=random.Random(5), wall_clock=self.clock
        )
        metrics = TenantMetrics(self.registry)
        tokens = {admin_token: authenticator.ADMIN_TOKEN} if admin_token else {}
        if api_key is not None:
            tokens[api_key] = authenticator.API_KEY
        self.keys = KeyRegistry(
            self.store,
            HASHER,
            refresh_s=refresh_s,
            slow_s=slow_s,
            isolate_tenants=isolate_tenants,
            on_failure=metrics.lost_sight,
        )
        self.authenticator = Authenticator(
            HASHER,
            self.keys,
            mode=mode,
            tokens=tokens,
            throttle=AuthThrottle(self.clock, burst=5, per_minute=6),
            metrics=metrics,
            wall_clock=self.clock,
        )
        self.parts = KeyParts(
            authenticator=self.authenticator, store=self.store, registry=self.keys
        )

    def clock(self) -> float:
        """The time."""
        return self.now_s

    def count(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run something between start and close."""

        async def main() -> Result:
            await self.authenticator.start()
            try:
                return await work()
            finally:
                await self.authenticator.close()
                self.database.close()

        return asyncio.run(main())
