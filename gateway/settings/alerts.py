"""Settings of alerts (`[alerts]`)."""

import base64
from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from outrider.gateway.settings.sections import Seconds, Section, split_list
from outrider.gateway.settings.sign_in import checked_url
from outrider.gateway.settings.tiers import Complaint

_PREFIX: Final = "whsec_"
_MIN_BYTES: Final = 24
_MAX_BYTES: Final = 64


def secret_bytes(secret: SecretStr) -> bytes:
    """Return the bytes that sign. Raises ValueError."""
    text = secret.get_secret_value()
    try:
        key = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not text.startswith(_PREFIX) or not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise ValueError(
            f"must be {_PREFIX} and {_MIN_BYTES} to {_MAX_BYTES} bytes in base64: "
            f'echo "{_PREFIX}$(openssl rand -base64 32)"'
        )
    return key


def _checked_url(url: SecretStr) -> SecretStr:
    checked_url(url.get_secret_value())
    return url


def _checked_secret(secret: SecretStr) -> SecretStr:
    secret_bytes(secret)
    return secret


HookUrl = Annotated[SecretStr, AfterValidator(_checked_url)]
"""An address that is safe to post to. It is not shown: such addresses often hold a token."""
HookSecret = Annotated[SecretStr, AfterValidator(_checked_secret)]
"""A key of signatures, as Standard Webhooks writes it."""
_Share = Annotated[float, Field(gt=0, le=1)]


class AlertSettings(Section):
    """Alerts that are posted to a webhook: budgets, breakers, engines, the router's drift."""

    url: HookUrl | None = None
    """Address that gets them, https or on this machine; unset: there are none. It is not shown:
    such addresses often hold a token."""
    secret: HookSecret | None = None
    """Key of their signatures: whsec_ and 24 to 64 random bytes in base64, as Standard Webhooks
    writes it."""
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


def alert_complaints(alerts: AlertSettings) -> Iterator[Complaint]:
    """Yield what keeps alerts from being signed."""
    if alerts.url is not None and alerts.secret is None:
        yield Complaint(("alerts", "secret"), None, "is needed to sign alerts")
