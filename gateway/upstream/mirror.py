"""Copies of requests to another tier, for a second opinion in the background."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import GatewayError, UnavailableError
from outrider.gateway.settings.tiers import MirrorSettings
from outrider.gateway.telemetry.dated_files import DatedFiles
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.tier import UpstreamTier
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.upstream.usage import cost_usd

logger = logging.getLogger(__name__)

_LOOK_FOR_OLD_S: Final = 600.0
_OF_THE_STREAM: Final = frozenset({"stream", "stream_options"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredAnswer:
    """The answer that the client got, to be compared with the copy's."""

    tier: str
    texts: tuple[str, ...]
    """Its choices' contents."""
    duration_s: float
    """From arrival to the end."""
    is_private: bool
    """The request must not leave this machine, so it is not copied."""
    finish_reason: str | None = None
    num_completion_tokens: int | None = None
    key_id: str = ""
    """Whose the request is, so that it can be erased, as is the end user."""
    end_user: str = ""
    """In the form that the ledger keeps."""


class Mirror:
    """Sends a share of the answered requests to one tier, in the background.

    A copy begins when the client has its answer, is not streamed, and has neither the request's
    deadline nor its retries. There are at most `max_in_flight` of them; further ones are dropped,
    not queued. With a file, a line of JSON for each copy is appended to that of its day.
    """

    def __init__(
        self,
        tier: UpstreamTier,
        settings: MirrorSettings,
        *,
        metrics: UpstreamMetrics,
        clock: Callable[[], float],
        rng: random.Random,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Store the arguments. `clock` is the calls'; `wall_clock` is since 1970, for the file."""
        self._tier = tier
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._wall_clock = wall_clock
        self._files = None if settings.file is None else DatedFiles(settings.file.expanduser())
        self._copies: set[asyncio.Task[None]] = set()
        self._cleaning: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def tier(self) -> str:
        """Return the tier that gets the copies."""
        return self._tier.name

    def offer(self, call: UpstreamCall, answer: MirroredAnswer) -> bool:
        """Copy this request, or not; return whether a copy was begun. Never raises or waits.

        The tier's model, the stream, the deadline and the prediction of `call` do not matter.
        """
        if answer.is_private:
            logger.error("private request was offered request_id=%s", call.request_id)
            return False
        if self._is_closed or self._rng.random() >= self._settings.share:
            return False
        if len(self._copies) >= self._settings.max_in_flight or not self._tier.is_available:
            self._metrics.mirrored(self._tier.name, "dropped")
            return False
        copy = asyncio.create_task(self._copy(call, answer))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        return True

    async def start(self) -> None:
        """Delete old files, from now on."""
        days = self._settings.retention_days
        if self._files is not None and days is not None:
            self._cleaning = asyncio.create_task(self._clean(self._files, days), name="old copies")

    async def close(self) -> None:
        """End all copies. Offers are refused from now on."""
        self._is_closed = True
        tasks = [*self._copies, *((self._cleaning,) if self._cleaning else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _clean(self, files: DatedFiles, days: int) -> None:
        while True:
            try:
                await asyncio.to_thread(files.remove_old, self._wall_clock(), days)
            except OSError as error:
                logger.error("old copies cannot be deleted error=%s", error.strerror)
            await asyncio.sleep(_LOOK_FOR_OLD_S)

    async def _copy(self, call: UpstreamCall, answer: MirroredAnswer) -> None:
        """Ask, count and write; a failure appears in the log only."""
        try:
            copied = await self._ask(call)
            self._metrics.mirrored(self._tier.name, "failed" if "failure" in copied else "answered")
            if self._files is not None:
                now_s = self._wall_clock()
                line = msgspec.json.encode(self._record(call, answer, copied, now_s)) + b"\n"
                await asyncio.to_thread(_append, self._files.at(now_s), line)
        except Exception:
            logger.exception("copy failed request_id=%s tier=%s", call.request_id, self._tier.name)

    async def _ask(self, call: UpstreamCall) -> dict[str, Any]:
        """Return the copy's answer, or its failure, in the file's form."""
        started_s = self._clock()
        try:
            told = await self._answer(call)
        except GatewayError as error:
            failure = error.code or "bad_request"
            logger.info(
                "no copy request_id=%s tier=%s failure=%s",
                call.request_id,
                self._tier.name,
                failure,
            )
            told = {"failure": failure}
        return {"tier": self._tier.name, "duration_s": self._clock() - started_s, **told}

    async def _answer(self, call: UpstreamCall) -> dict[str, Any]:
        """Return the tier's answer. Raises GatewayError."""
        copy = await self._copied(call)
        async with aclosing(self._tier.answer(copy, kind="mirror")) as answer:
            whole = await answer.whole()
        return {
            "model": copy.model,
            "texts": whole.texts,
            "finish_reason": whole.finish_reason,
            "num_completion_tokens": answer.usage.num_completion_tokens,
            "cost_usd": cost_usd(answer.usage, self._tier.settings.price),
        }

    async def _copied(self, call: UpstreamCall) -> UpstreamCall:
        """Return the call for the mirror's tier. Raises UnavailableError."""
        model = self._tier.settings.model or next(iter(await self._tier.models()), None)
        if model is None:
            raise UnavailableError(
                f"The {self._tier.name} tier lists no model; name one in "
                f"tiers.{self._tier.name}.model."
            )
        document = {k: v for k, v in call.document.items() if k not in _OF_THE_STREAM}
        return replace(call, document=document, model=model, deadline_s=None, prediction="")

    def _record(
        self, call: UpstreamCall, answer: MirroredAnswer, copied: dict[str, Any], now_s: float
    ) -> dict[str, Any]:
        """Return a line of the file."""
        return {
            "time": datetime.fromtimestamp(now_s, UTC).isoformat(),
            "request_id": call.request_id,
            "key": answer.key_id,
            "end_user": answer.end_user,
            "endpoint": call.endpoint,
            "request": call.document,
            "answer": {
                "tier": answer.tier,
                "duration_s": answer.duration_s,
                "texts": answer.texts,
                "finish_reason": answer.finish_reason,
                "num_completion_tokens": answer.num_completion_tokens,
            },
            "mirror": copied,
        }


def _append(file: Path, line: bytes) -> None:
    """Add a line in one piece, so that those of several processes do not mix.

    The file holds people's prompts: a new one is readable by its owner only.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "ab", buffering=0) as opened:
        opened.write(line)
