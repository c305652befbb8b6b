"""A tier that is one upstream server, or several replicas with the same model."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.settings.server_traits import ServerTraits, traits_of
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.upstream.answer import UpstreamAnswer
from outrider.gateway.upstream.attempts import AttemptKind, UpstreamAttempt
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.credentials.base import (
    Credential,
    CredentialError,
    NoCredential,
    SignedRequest,
)
from outrider.gateway.upstream.fields import FieldFilter
from outrider.gateway.upstream.hedging import HedgeBudget
from outrider.gateway.upstream.latency import LatencyEstimate
from outrider.gateway.upstream.model_list import model_ids
from outrider.gateway.upstream.passing import PassedRequest, PassingDialect
from outrider.gateway.upstream.probing import Prober
from outrider.gateway.upstream.replicas import ReplicaSet
from outrider.gateway.upstream.tier_parts import TierParts, TierState

__all__ = ["TierParts", "UpstreamTier"]

logger = logging.getLogger(__name__)

_MODELS_PATH: Final = "/models"
_MODELS_TIMEOUT_S: Final = 5.0
_MODELS_KEPT_S: Final = 300.0
_MODELS_RETRY_S: Final = 10.0
"""Seconds after which a server that did not list its models is asked again."""


class UpstreamTier:
    """Answers calls, by whichever of its replicas can. Use it between `start` and `close`.

    It lives in one event loop. `replicas`, `first_token` and `total` are for its observers.
    """

    def __init__(
        self,
        name: str,
        settings: UpstreamSettings,
        parts: TierParts,
        credential: Credential | None = None,
    ) -> None:
        """`credential` signs requests in; None: no server asks for a key."""
        self.name = name
        self.settings = settings
        self.traits: ServerTraits = traits_of(
            settings.server, settings.url, continues=settings.continues
        )
        self.fields = FieldFilter(name, settings)
        """Selects the fields of a request for the tier's servers."""
        self.replicas: ReplicaSet = parts.replicas
        self.first_token = LatencyEstimate(clock=parts.clock)
        """Seconds to the first token of streamed answers."""
        self.total = LatencyEstimate(clock=parts.clock)
        """Seconds to the end of answers that came to it."""
        self._transport = parts.transport
        self._clock = parts.clock
        self._on_attempt = parts.on_attempt
        self._headers = headers = _merged_headers(parts.dialect.headers(None), settings.headers)
        self.credential: Credential = credential or NoCredential()
        self._state = TierState(
            name=name,
            settings=settings,
            traits=self.traits,
            parts=replace(parts, on_attempt=self._book),
            headers=headers,
            credential=self.credential,
            first_token=self.first_token,
            total=self.total,
            whole=LatencyEstimate(clock=parts.clock),
            hedges=HedgeBudget(settings.hedge_share),
        )
        self._prober = Prober(
            transport=parts.transport,
            replicas=parts.replicas,
            headers=headers,
            path=self.traits.probe_path,
        )
        # Images and sounds take other times than texts, by which hedging and hand-overs go.
        self._passed_times = LatencyEstimate(clock=parts.clock)
        self._tasks: list[asyncio.Task[None]] = []
        self._models: tuple[str, ...] = ()
        self._models_until_s: float | None = None
        self._models_lock = asyncio.Lock()
        self._complained = False

    async def start(self) -> None:
        """Open the pool of connections, and watch over the servers. Does not wait for them.

        Raises ValueError where the file of certificates cannot be used.
        """
        await self._transport.start()
        self._tasks = [
            asyncio.create_task(self._prober.run(), name=f"probe {self.name}"),
            asyncio.create_task(self._warm(), name=f"warm {self.name}"),
        ]

    async def close(self) -> None:
        """Stop all tasks; requests under way fail."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()

    @property
    def is_available(self) -> bool:
        """Return whether some replica takes requests."""
        return self.replicas.is_available

    @property
    def retry_after_s(self) -> float:
        """Return the seconds until some replica may take requests; 0 when one does now."""
        return self.replicas.retry_after_s

    def answer(self, call: UpstreamCall, *, kind: AttemptKind = "answer") -> UpstreamAnswer:
        """Return the answer to a call, not begun. A `mirror` or `probe` has one attempt."""
        return UpstreamAnswer(self._state, call, kind=kind)

    def pass_on(self, call: UpstreamCall, passed: PassedRequest) -> UpstreamAnswer:
        """Return the answer to a request that is passed on as it came, not begun; not streamed."""
        state = self._state
        state = replace(
            state,
            parts=replace(state.parts, dialect=PassingDialect(self.name, passed)),
            headers={**state.headers, "content-type": passed.content_type},
            first_token=self._passed_times,
            total=self._passed_times,
            whole=self._passed_times,
            hedges=HedgeBudget(0.0),
        )
        return UpstreamAnswer(state, call, kind="answer")

    async def models(self) -> tuple[str, ...]:
        """Return the ids of the models that the server lists; none if it fails. Never raises.

        Kept for five minutes. A list once read is kept for as long as the server is down. A model
        on demand has its adapters beside it, loaded or not.
        """
        if (own := self.settings.model_on_demand) is not None:
            return own.adapter_names
        async with self._models_lock:
            now_s = self._clock()
            if self._models_until_s is None or now_s >= self._models_until_s:
                models = await self._ask_for_models()
                kept_s = _MODELS_KEPT_S if models else _MODELS_RETRY_S
                self._models = models or self._models
                self._models_until_s = self._clock() + kept_s
            return self._models

    async def _ask_for_models(self) -> tuple[str, ...]:
        """Ask the replicas in turn for their models; skip those that are out of order."""
        for replica in self.replicas.replicas:
            if not replica.breaker.admits():
                continue
            url = replica.url + _MODELS_PATH
            try:
                headers = await self._signed("GET", url)
                status, body = await self._transport.get(url, headers, timeout_s=_MODELS_TIMEOUT_S)
            except CredentialError as error:
                logger.warning("no model list tier=%s reason=%r", self.name, str(error))
                return ()
            except UpstreamError as error:
                logger.info(
                    "no model list tier=%s replica=%s failure=%s",
                    self.name,
                    replica.name,
                    error.failure,
                )
                continue
            if status == 200 and (models := model_ids(body)):
                return models
        return ()

    async def _signed(self, method: str, url: str) -> Mapping[str, str]:
        """Return the headers of a request without a body. Raises CredentialError."""
        request = SignedRequest(method=method, url=url, headers=self._headers, body=b"")
        return {**self._headers, **await self.credential.headers(request)}

    async def _warm(self) -> None:
        """Have a connection to every replica open before the first request."""
        urls = [replica.url + self.traits.probe_path for replica in self.replicas.replicas]
        await asyncio.gather(*map(self._transport.warm, urls))
        await self.models()

    def _book(self, attempt: UpstreamAttempt) -> None:
        """Pass an attempt on; wake the prober and log an untrusted key where needed."""
        if attempt.outcome != "answered":
            self._prober.wake()  # a breaker may have opened, also by one that waited in vain
        if attempt.failure == "not_trusted" and not self._complained:
            self._complained = True
            logger.error(
                "key not taken tier=%s status=%s source=%s; look at tiers.%s.api_key_env",
                self.name,
                attempt.status,
                _key_source(self.settings),
                self.name,
            )
        elif attempt.outcome == "answered":
            self._complained = False
        self._on_attempt(attempt)


def _merged_headers(*parts: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of all parts, their names in lower case; later ones win."""
    return {name.lower(): value for part in parts for name, value in part.items()}


def _key_source(settings: UpstreamSettings) -> str:
    """Name the place of the tier's key, without the key."""
    if settings.api_key_file is not None:
        return str(settings.api_key_file)
    if settings.api_key_command:
        return settings.api_key_command[0]
    return settings.api_key_env or settings.sign_in or "none"
