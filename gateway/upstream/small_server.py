"""A server in the small model's part: what it tells of its answers, found out at the start."""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Final

from outrider.gateway.contract.errors.tree import GatewayError, UpstreamRefusalError
from outrider.gateway.upstream.call import TokenLogprob, UpstreamCall
from outrider.gateway.upstream.logprob_check import LogprobCheck
from outrider.gateway.upstream.tier import UpstreamTier

logger = logging.getLogger(__name__)

_PROBE_S: Final = 10.0
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_PROBE_TOKENS: Final = 8
_MAX_REASON_CHARS: Final = 160
_PROBE: Final = {
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": _PROBE_TOKENS,
    "stream": True,
}


class SmallServer:
    """The upstream tier that plays the small model's part. For one event loop.

    A request for a few tokens at the start says whether it has log-probabilities; a server that is
    down is asked again until it answers. `tier.settings.logprobs` may decide instead.
    """

    def __init__(
        self,
        tier: UpstreamTier,
        *,
        gateway_id: str,
        clock: Callable[[], float],
        on_untrusted: Callable[[str], None] = lambda tier: None,
    ) -> None:
        """`on_untrusted` is told the tier's name for each answer that `distrust` is told of."""
        self.tier = tier
        self.tells_logprobs: bool | None = None
        """None until it is known."""
        self.complaint = ""
        """Why its log-probabilities cannot be used; empty where they can, or nothing is known."""
        self._hops = (gateway_id,)
        self._clock = clock
        self._known = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._has_warned = False
        self._on_untrusted = on_untrusted

    async def start(self) -> None:
        """Begin to find out; does not wait."""
        if not self.tier.traits.has_logprobs:
            self._learned("this kind of server has none")
        elif self.tier.settings.logprobs != "auto":
            self._learned(
                "" if self.tier.settings.logprobs == "on" else "tiers.NAME.logprobs is off"
            )
        else:
            self._asking = asyncio.create_task(self._ask(), name=f"logprobs {self.tier.name}")

    async def close(self) -> None:
        """Stop to ask."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait((self._asking,))

    async def until_known(self, timeout_s: float = _PROBE_S) -> bool:
        """Return whether it tells log-probabilities; True where that is not known in time."""
        if self.tells_logprobs is None and self._asking is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._known.wait()
        return self.tells_logprobs is not False

    def distrust(self, complaint: str) -> None:
        """Count an answer whose log-probabilities could not be used; log the first one."""
        self._on_untrusted(self.tier.name)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "log-probabilities not used tier=%s reason=%s; its answers are judged by their "
                "text",
                self.tier.name,
                complaint,
            )

    @property
    def summary(self) -> str:
        """Return how its answers are judged, in a few words."""
        if self.tells_logprobs is None:
            return "not reached yet"
        if self.tells_logprobs:
            return "judged by its log-probabilities and its text"
        return f"judged by its text only: {self.complaint}"

    async def _ask(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async with asyncio.timeout(_PROBE_S):
                    self._learned(await self._probe())
                return
            except (GatewayError, TimeoutError) as error:
                logger.info(
                    "log-probabilities not known yet tier=%s error=%s; asking again in %g s",
                    self.tier.name,
                    type(error).__name__,
                    wait_s,
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _probe(self) -> str:
        """Ask for a few tokens; return why their log-probabilities cannot be used, else "".

        Raises GatewayError where the server does not answer.
        """
        model = self.tier.settings.model or next(iter(await self.tier.models()), "")
        call = UpstreamCall(
            endpoint="chat",
            document=_PROBE,
            model=model,
            request_id="logprobs-probe",
            arrival_s=self._clock(),
            hops=self._hops,
            wants_logprobs=True,
        )
        check, seen = LogprobCheck(), list[TokenLogprob]()
        answer = self.tier.answer(call, kind="probe")
        try:
            await answer.begin()
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    check.add(chunk)
                    seen += chunk.token_logprobs
        except UpstreamRefusalError as refused:
            return f"it refuses the request for them: {refused}"[:_MAX_REASON_CHARS]
        finally:
            await answer.aclose()
        if not seen:
            return "it sends none"
        if len(seen) > 1 and all(entry.logprob == 0.0 for entry in seen):
            return "all are 0"
        if all(math.isnan(entry.logprob) for entry in seen):
            return "they are no numbers"
        return check.complaint() or ""

    def _learned(self, complaint: str) -> None:
        self.complaint = complaint.replace("NAME", self.tier.name)
        self.tells_logprobs = not complaint
        self._known.set()
        level = logging.WARNING if complaint else logging.INFO
        logger.log(level, "small tier is a server tier=%s %s", self.tier.name, self.summary)
