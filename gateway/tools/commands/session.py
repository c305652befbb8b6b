"""HTTP to the one server that a command talks to, by the environment's proxies."""

import json
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from outrider.gateway.tools.commands.user_errors import ChatError

# What a request raises; ValueError for a URL or a key that cannot be sent.
HTTP_ERRORS: Final = (aiohttp.ClientError, OSError, ValueError)


def open_session(
    url: str, *, timeout: aiohttp.ClientTimeout, key: str | None = None, max_connections: int = 1
) -> aiohttp.ClientSession:
    """Return a session for requests to `url`; `key` is sent as a bearer token.

    Raises ValueError for a URL that is none.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=max_connections),
        headers={"authorization": f"Bearer {key}"} if key else None,
        timeout=timeout,
        proxy=_proxy_of(url),
    )


async def ask_gateway(
    method: str, url: str, *, key: str | None, timeout_s: float, body: object = None
) -> dict[str, Any]:
    """Return what a gateway answers. Raises ChatError."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, connect=10.0)
    try:
        async with (
            open_session(url, timeout=timeout, key=key) as session,
            session.request(method, url, json=body) as response,
        ):
            said = await response.read()
    except HTTP_ERRORS as error:
        raise ChatError(f"{url}: {error or type(error).__name__}") from None
    with suppress(ValueError, LookupError, TypeError):
        answer: dict[str, Any] = json.loads(said)
        if response.status != 200:
            raise ChatError(str(answer["error"]["message"]))
        return dict(answer)
    raise ChatError(f"{url} answers with status {response.status}, and not as a gateway does")


def _proxy_of(url: str) -> str | None:
    """Return the environment's proxy for a URL.

    aiohttp's `trust_env` reads .netrc as well, and an entry there would exclude the key.
    """
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    host = parts.netloc.rpartition("@")[2]
    exceptions = proxies.get("no", "").split(",")
    if not proxy or proxy_bypass(host) or any(_is_in(parts.hostname, it) for it in exceptions):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_in(host: str | None, network: str) -> bool:
    """Return whether a host is an address in a network, as in 10.0.0.0/8."""
    try:
        return ip_address(host or "") in ip_network(network.strip(), strict=False)
    except ValueError:
        return False
