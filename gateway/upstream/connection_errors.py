"""Messages for errors of connections to servers."""

import socket
import ssl
from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError

from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.upstream.addresses import PrivateAddressError
from outrider.gateway.upstream.waits import ExchangeLimits

# OpenSSL's codes of certificate errors (X509_V_ERR_*).
_CERTIFICATE_WORDS: Final[Mapping[int, str]] = {
    2: "its certificate is from an authority that is not trusted here; name it in ca_file",
    9: "its certificate is not valid yet; check the clocks of both machines",
    10: "its certificate has expired",
    18: "its certificate is self-signed; name it in ca_file if it is to be trusted",
    19: "its certificate is from an authority that is not trusted here; name it in ca_file",
    20: "its certificate is from an authority that is not trusted here; name it in ca_file",
    21: "its certificate is from an authority that is not trusted here; name it in ca_file",
    62: "its certificate is for another host name",
    64: "its certificate is for another address",
}
_NO_TLS: Final = "the server does not speak TLS; is the URL https by mistake?"
# OpenSSL's errors for an answer that is not TLS: a status line, or any other text.
_NO_TLS_REASONS: Final = frozenset(
    {
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "HTTPS_PROXY_REQUEST",
        "UNKNOWN_PROTOCOL",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
        "BAD_RECORD_TYPE",
        "INVALID_RECORD_TYPE",
    }
)


def error_of(error: Exception, exchange: ExchangeLimits) -> UpstreamError:
    """Return a connection's failure as an UpstreamError that names the tier, not the host."""
    tls = _tls_words(error)
    if tls is not None:
        return exchange.error("tls", f"cannot be reached over TLS: {tls}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return exchange.error("refused", _connect_words(error))
    if isinstance(error, aiohttp.InvalidURL):
        return exchange.error("refused", "has an invalid URL; correct it")
    if isinstance(error, aiohttp.ClientResponseError):
        return _unreadable(error, exchange)
    if isinstance(error.__cause__, ContentEncodingError):
        return exchange.error("garbage", "sent a body that cannot be decoded")
    return exchange.error("reset", "broke the connection off")


def _tls_words(error: Exception) -> str | None:
    """Return the TLS problem; None where it is not about TLS."""
    # Errors after the handshake appear only as the cause of a lost connection.
    cause = error if isinstance(error, ssl.SSLError) else error.__cause__
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        words = _CERTIFICATE_WORDS.get(cause.verify_code)
        return words or f"its certificate is not accepted ({cause.verify_message})"
    if isinstance(cause, ssl.SSLError):
        reason = (cause.reason or "").upper()
        if reason in _NO_TLS_REASONS:
            return _NO_TLS
        if "CERTIFICATE_REQUIRED" in reason:
            return "the server requires a client certificate, which is not supported"
        return f"the handshake failed ({reason.lower().replace('_', ' ') or 'no reason given'})"
    return None


def _connect_words(error: aiohttp.ClientConnectorError) -> str:
    cause = error.os_error
    if isinstance(cause, PrivateAddressError):
        return "has a private address, and allow_private_upstreams is false"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "has a host name that cannot be looked up"
    if isinstance(cause, ConnectionRefusedError):
        return "refused the connection: the server may be down"
    if isinstance(cause, ConnectionResetError):
        return "broke the connection off while it was made"
    if isinstance(cause, socket.gaierror):
        return "has a host name that cannot be looked up"
    return f"cannot be reached ({cause.strerror or type(cause).__name__})"


def _unreadable(error: aiohttp.ClientResponseError, exchange: ExchangeLimits) -> UpstreamError:
    """Return the error for an answer whose head is not HTTP."""
    # A TLS server answers a plain request with an alert: record type 21, version 3.
    if "\\x15\\x03" in error.message:
        return exchange.error("tls", "speaks TLS; begin its URL with https")
    return exchange.error("garbage", "sent something that is not HTTP")
