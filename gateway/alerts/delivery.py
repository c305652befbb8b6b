"""Delivery of alerts: signed, tried again, never more than a few in memory."""

import asyncio
import base64
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from outrider.gateway.alerts.conditions import Alert
from outrider.gateway.settings.alerts import AlertSettings, secret_bytes

logger = logging.getLogger(__name__)

_MAX_WAITING: Final = 256
_FIRST_DELAY_S: Final = 1.0
_MAX_TRIES: Final = 8
"""With delays that double: about two minutes."""
_CLOSING_S: Final = 5.0
_TRIED_AGAIN: Final = frozenset({408, 425, 429})
HEADERS: Final = {"content-type": "application/json", "user-agent": "outrider"}


def signed(key: bytes, message_id: str, now_s: float, body: bytes) -> dict[str, str]:
    """Return the headers of Standard Webhooks: HMAC-SHA256 over id, time and body."""
    moment = str(int(now_s))
    text = b".".join((message_id.encode(), moment.encode(), body))
    mac = base64.b64encode(hmac.digest(key, text, "sha256")).decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": moment,
        "webhook-signature": f"v1,{mac}",
    }


class Webhook:
    """Posts alerts to the address of the settings. For one event loop."""

    def __init__(
        self,
        settings: AlertSettings,
        registry: CollectorRegistry | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`sleep` waits before another try. Raises ValueError without address or secret."""
        if settings.url is None or settings.secret is None:
            raise ValueError("alerts.url and alerts.secret are not set")
        self._url = settings.url.get_secret_value()
        self._key = secret_bytes(settings.secret)
        self._timeout_s = settings.timeout_s
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._waiting: asyncio.Queue[Alert] = asyncio.Queue(_MAX_WAITING)
        self._counter = Counter(
            "outrider_alerts", "Alerts sent, failed or dropped.", ["state"], registry=registry
        )

    def offer(self, alert: Alert) -> None:
        """Have it delivered; beyond 256 that wait it is dropped."""
        try:
            self._waiting.put_nowait(alert)
        except asyncio.QueueFull:
            self._count("dropped", alert, "too many alerts wait")

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            alert = await self._waiting.get()
            try:
                await self._deliver(alert)
            finally:
                self._waiting.task_done()

    async def close(self) -> None:
        """Wait a moment for what is being delivered; call it before `run` is cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                await self._waiting.join()

    async def _deliver(self, alert: Alert) -> None:
        for number in range(_MAX_TRIES):
            if number:
                await self._sleep(_FIRST_DELAY_S * 2 ** (number - 1))
            outcome = await self.post(alert)
            if isinstance(outcome, int) and 200 <= outcome < 300:
                self._counter.labels("sent").inc()
                return
            if isinstance(outcome, int) and outcome < 500 and outcome not in _TRIED_AGAIN:
                break
        self._count("failed", alert, outcome)

    async def post(self, alert: Alert) -> int | str:
        """Post it once; return the answer's status, or why there is none.

        Redirects are not followed, and the answer's body is not read.
        """
        import aiohttp  # takes a while, and most gateways send no alerts

        body = alert.body
        headers = HEADERS | signed(self._key, alert.alert_id, self._wall_clock(), body)
        try:
            async with aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            ) as session:
                answer = await session.post(
                    self._url, data=body, headers=headers, allow_redirects=False
                )
                answer.close()
                return answer.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return type(error).__name__  # its text may hold the address

    def _count(self, state: str, alert: Alert, reason: object) -> None:
        self._counter.labels(state).inc()
        logger.error("alert was not sent state=%s event=%s reason=%s", state, alert.event, reason)
