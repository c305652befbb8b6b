"""Settings of alerts (`[alerts]`)."""

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from outrider.gateway.settings.loopback import is_loopback
from outrider.gateway.settings.sections import Seconds, Section, split_list
from outrider.gateway.settings.tiers import Complaint

SECRET_PREFIX: Final = "whsec_"
_MIN_BYTES: Final = 24
_MAX_BYTES: Final = 64

_Share = Annotated[float, Field(gt=0, le=1)]


class AlertSettings(Section):
    """Alerts that are posted to a webhook: budgets, breakers, engines, the router's drift."""

    url: SecretStr | None = None
    """Address that gets them, https or on this machine; unset: there are none. It is not shown:
    such addresses often hold a token."""
    secret: SecretStr | None = None
    """Key of their signatures: whsec_ and 24 to 64 random bytes in base64, as Standard Webhooks
    writes it."""
    allow_http: bool = False
    """Allow an address on another machine without TLS."""
    budget_shares: Annotated[tuple[_Share, ...], NoDecode, BeforeValidator(split_list)] = (
        0.5,
        0.8,
        1.0,
    )
    """Shares of a key's or team's limits of money and tokens of a day or longer that are told."""
    window_s: Seconds = 60.0
    """Time between two alerts about one subject, such as a breaker that opens and closes."""
    timeout_s: Seconds = 10.0
    """Longest wait for the webhook's answer."""


def secret_bytes(secret: SecretStr) -> bytes:
    """Return the bytes that sign. Raises ValueError."""
    text = secret.get_secret_value()
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not text.startswith(SECRET_PREFIX) or not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise ValueError(
            f"must be {SECRET_PREFIX} and {_MIN_BYTES} to {_MAX_BYTES} bytes in base64: "
            f'echo "{SECRET_PREFIX}$(openssl rand -base64 32)"'
        )
    return key


def alert_complaints(alerts: AlertSettings) -> Iterator[Complaint]:
    """Yield what keeps alerts from being sent, or from being private."""
    if alerts.url is None:
        return
    address = urlsplit(alerts.url.get_secret_value())
    if address.scheme not in {"http", "https"} or not address.hostname:
        yield Complaint(("alerts", "url"), None, "must be an http or https address")
    elif address.scheme == "http" and not (alerts.allow_http or is_loopback(address.hostname)):
        what = "is not https, so others could read the alerts; see alerts.allow_http"
        yield Complaint(("alerts", "url"), None, what)
    if alerts.secret is None:
        yield Complaint(("alerts", "secret"), None, "is needed to sign alerts")
        return
    try:
        secret_bytes(alerts.secret)
    except ValueError as error:
        yield Complaint(("alerts", "secret"), None, str(error))
