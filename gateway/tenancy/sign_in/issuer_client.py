"""Asks issuers for JSON, bounded in time and bytes; follows no redirect to anywhere."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from outrider.gateway.settings.sign_in import checked_url
from outrider.gateway.upstream.addresses import check_url, socket_maker

_MAX_BYTES: Final = 512 * 1024
_TIMEOUT_S: Final = 5.0


class IssuerError(Exception):
    """An issuer did not say what it is to say."""


class IssuerClient:
    """Sends requests to issuers: each on a connection of its own, for there are few."""

    def __init__(self, *, allow_private: bool = True, timeout_s: float = _TIMEOUT_S) -> None:
        """`allow_private`: addresses of private networks may be asked."""
        self._allow_private = allow_private
        self._make_socket = socket_maker(allow_private=allow_private)
        self._timeout_s = timeout_s

    async def ask(self, url: str, form: Mapping[str, str] | None = None, **headers: str) -> Any:
        """Return the JSON at an address, or what is answered to a form. Raises IssuerError."""
        import aiohttp  # takes a while, and most gateways need it not for this

        try:
            check_url(checked_url(url), allow_private=self._allow_private)
            body = await self._read(url, form, headers)
            return await asyncio.to_thread(json.loads, body)
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise IssuerError(f"{url}: {str(error) or type(error).__name__}") from None

    async def _read(
        self, url: str, form: Mapping[str, str] | None, headers: Mapping[str, str]
    ) -> bytes:
        import aiohttp

        connector = aiohttp.TCPConnector(socket_factory=self._make_socket)
        usual = {"accept": "application/json", "accept-encoding": "identity"}
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                headers={**usual, **headers},
                auto_decompress=False,
            ) as session,
            session.request(
                "GET" if form is None else "POST", url, data=form, allow_redirects=False
            ) as response,
        ):
            if response.status != 200:
                raise IssuerError(f"{url} answered with status {response.status}")
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > _MAX_BYTES:
                    raise IssuerError(f"{url} answered with more than {_MAX_BYTES} bytes")
            return bytes(body)
