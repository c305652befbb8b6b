"""Settings of HTTP: bounds on connections, cross-origin requests, repeated requests."""

import re
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from outrider.gateway.settings.sections import Count, Seconds, Section, split_list

_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#*,@]+")
_HOST: Final = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]|\*")
ANY: Final = "*"
"""Stands for all, in lists of origins and hosts."""

NameList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]


class CorsSettings(Section):
    """Web pages of other origins that may call the API."""

    origins: NameList = ()
    """Allowed origins, such as https://app.example; "*" for all. Empty: none."""

    @field_validator("origins")
    @classmethod
    def _as_browsers_write_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin; write scheme, host and port only, as in "
                    'https://app.example:8443, or "*" for all'
                )
        return tuple(origin.lower() for origin in origins)


class HttpSettings(Section):
    """Bounds on connections and request bodies."""

    cors: CorsSettings = Field(default_factory=CorsSettings)
    edge: bool = True
    """Bound each connection. Off: uvicorn's own connections serve, for a uvicorn with which the
    bounded ones do not work; then the time-outs, `max_header_bytes`, `max_connections` and the
    checks of framing are the task of a proxy in front."""
    hosts: NameList = ()
    """Names by which requests without a key may call the gateway, beside localhost and 127.0.0.1,
    such as gateway.example or 10.0.0.5; "*" for all. A page of another site can let a name of its
    own point here, so list only names that you know."""
    header_timeout_s: Seconds = 10.0
    """Time for a request's headers, from its first byte."""
    body_timeout_s: Seconds = 30.0
    """Time between two parts of a request's body."""
    write_timeout_s: Seconds = 60.0
    """Time without progress in sending an answer, after which the connection is closed."""
    keep_alive_s: Seconds = 75.0
    """Time that a connection may be idle between two requests."""
    max_header_bytes: Count = 32 * 1024
    """Size of a request's line and headers together."""
    max_connections: Count = 10_000
    """Concurrent connections; further ones are refused."""
    max_bytes_in_flight: Count = 512 * 2**20
    """Total size of the bodies of all requests in progress; further requests are refused with
    503."""
    max_bytes_in_flight_per_key: Count = 128 * 2**20
    """The same bound for the requests of one key, or of one address while no key exists; 429."""
    idempotency_ttl_s: Seconds = 86_400.0
    """Time for which an answer is kept for repeated requests with the same idempotency-key."""
    idempotency_max_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Total memory of the kept answers; 0: the idempotency-key header is refused."""

    @field_validator("hosts")
    @classmethod
    def _without_ports(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        hosts = tuple(host.lower() for host in hosts)
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is not the name of a host; write it without scheme and port, as in "
                    'gateway.example or [2001:db8::1], or "*" for all'
                )
        return hosts
