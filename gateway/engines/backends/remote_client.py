"""An engine replica on this or another machine, which other gateways may share."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final

from outrider.engine.errors import EngineError
from outrider.gateway.engines.backends.fleet_keys import FleetKeys
from outrider.gateway.engines.backends.replica_link import HandshakeError, ReplicaRefusedError
from outrider.gateway.engines.backends.supervised_client import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    ReconnectPolicy,
    SupervisedClient,
)
from outrider.gateway.engines.backends.wire import EngineDraining, Reply, Welcome
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

_DEFAULT_POLICY: Final = ReconnectPolicy()
_MOST_HANDSHAKES: Final = 3  # that fail in a row, before a start fails


class RemoteEngineClient(SupervisedClient):
    """An `EngineClient` over a connection to an engine replica (`outrider engine`).

    A new connection shares nothing with the one before it. The replica aborts the old connection's
    requests, and late messages of it are ignored. Requests go on behind what their readers have
    (`EngineRequest.resumed_token_ids`), or end with `Failed` where the policy does not let them
    wait. If the next replica that sends `Welcome` is another process, the requests have met a
    death.
    """

    def __init__(
        self,
        endpoint: str,
        keys: FleetKeys | None = None,
        *,
        policy: ReconnectPolicy = _DEFAULT_POLICY,
        tokenizers: "Future[Mapping[Tier, str]] | None" = None,
        on_lost: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:
        """`keys`: None for a replica without. `rng`: spreads out the attempts of many gateways.

        `tokenizers`: fingerprints, by tier, from the thread that loads them; a replica with others
        is refused. `on_lost` is called when a connection has ended: the next replica's cache may
        be another.
        """
        super().__init__(policy)
        self.endpoint = endpoint
        self._keys = keys
        self._rng = random.Random() if rng is None else rng
        self._tokenizers = tokenizers
        self._on_lost = on_lost
        self._generation = ""
        self._is_draining = False
        self._reason = "it was not tried yet"

    async def _reach_first(self) -> None:
        """Connect, and wait until the replica serves, for as long as that takes.

        Raises ReplicaRefusedError where waiting does not help: the key, the version or the models
        are others.
        """
        await self._connect_until(may_fail=True)

    @property
    def is_ready(self) -> bool:
        """True if the replica takes requests, and has answered lately."""
        return super().is_ready and not self._is_draining

    @property
    def generation(self) -> str:
        """The replica's process that welcomed us last: a restarted one has another."""
        return self._generation

    @property
    def is_draining(self) -> bool:
        """True if the replica is about to end: it finishes what it has, and takes nothing new."""
        return self._is_draining

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the replica is not ready."""
        if self._is_draining:
            return "The engine is being stopped; try again soon."
        return f"The engine cannot be reached ({self._reason}); try again soon."

    async def _supervise(self) -> None:
        while True:
            self._reason = await self._until_lost()
            logger.error("engine is lost endpoint=%s reason=%s", self.endpoint, self._reason)
            await self._connect_until(may_fail=False)
            logger.info("engine is connected again endpoint=%s", self.endpoint)

    async def _connect_until(self, *, may_fail: bool) -> None:
        """Return when a replica has welcomed us; `may_fail`: raise where it never will."""
        backoff_s, num_handshakes = MIN_BACKOFF_S, 0
        while True:
            try:
                await self._connect()
            except EngineError as error:
                if str(error) != self._reason:
                    logger.warning("engine cannot be used reason=%s", error)
                self._reason = str(error)
                num_handshakes = num_handshakes + 1 if isinstance(error, HandshakeError) else 0
                is_final = isinstance(error, ReplicaRefusedError)
                if may_fail and (is_final or num_handshakes == _MOST_HANDSHAKES):
                    raise ReplicaRefusedError(str(error)) from None
                # Many gateways wait for one replica: they should not come all at once.
                await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S / 6)
            else:
                return

    async def _connect(self) -> None:
        """Make one connection to a replica of our models. Raises EngineError."""
        welcome = await self._meet(self.endpoint, self._keys, self._policy.stall_timeout_s)
        await self._check(welcome)
        if self._generation and welcome.generation != self._generation and not self._is_draining:
            self._streams.count_death()
        self._generation, self._is_draining = welcome.generation, False
        self._info = welcome.info
        self._resume()

    async def _check(self, welcome: Welcome) -> None:
        """Raise ReplicaRefusedError for a replica of other models than the gateway's."""
        if self._tokenizers is None:
            return
        expected = await asyncio.shield(asyncio.wrap_future(self._tokenizers))
        for tier, fingerprint in welcome.tokenizers.items():
            if expected.get(tier, fingerprint) != fingerprint:
                raise ReplicaRefusedError(
                    f"The engine at {self.endpoint} serves {welcome.info.tiers[tier].model_id} as "
                    f"its {tier} model, whose tokenizer ({fingerprint[:12]}) is another than that "
                    f"of the gateway's ({expected[tier][:12]}). Give both the same --{tier}."
                )

    def _note_lost(self) -> None:
        self._streams.lost(resumes=self._policy.resume_within_s > 0)
        self._give_up_later()
        self._on_lost()

    def _handle(self, reply: Reply) -> None:
        if isinstance(reply, EngineDraining):
            logger.info("engine is draining endpoint=%s", self.endpoint)
            self._is_draining = True
        super()._handle(reply)
