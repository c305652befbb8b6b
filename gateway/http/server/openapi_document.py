"""Serves /openapi.json: built once for what is loaded, and not on the event loop."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from outrider.gateway.contract.schema.loaded_limits import LoadedLimits
from outrider.gateway.contract.schema.openapi import build_document


class OpenApiEndpoint:
    """The endpoint. Building takes half a second, so it happens in a thread and is remembered."""

    def __init__(
        self,
        app: FastAPI,
        read_limits: Callable[[], Awaitable[LoadedLimits | None]],
        *,
        models: tuple[type, ...],
        upstream_tiers: tuple[str, ...],
    ) -> None:
        """`read_limits` returns the loaded models' limits; None while the engine is not ready."""
        self._app = app
        self._read_limits = read_limits
        self._models = models
        self._upstream_tiers = upstream_tiers
        self._bodies: dict[LoadedLimits | None, bytes] = {}  # two at most: models do not change
        self._lock = asyncio.Lock()

    async def answer(self) -> Response:
        """Return the document for what is loaded now."""
        limits = await self._read_limits()
        async with self._lock:  # requests that arrive meanwhile wait for the same building
            if limits not in self._bodies:
                self._bodies[limits] = await asyncio.to_thread(self._build, limits)
        return Response(self._bodies[limits], media_type="application/json")

    def _build(self, limits: LoadedLimits | None) -> bytes:
        document = build_document(
            self._app,
            limits,
            models=self._models,
            upstream_tiers=self._upstream_tiers,
        )
        return msgspec.json.encode(document)
