"""Sign-in as the settings want it."""

import time
from typing import TYPE_CHECKING

from outrider.gateway.http.sign_in.code_flow import CodeFlow
from outrider.gateway.http.sign_in.endpoints import SignInEndpoints
from outrider.gateway.http.sign_in.sessions import Sessions
from outrider.gateway.settings.extras import need_extra
from outrider.gateway.settings.sign_in import SignInSettings
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.keys.key_parts import KeyParts
from outrider.gateway.tenancy.sign_in.issuer import Issuer
from outrider.gateway.tenancy.sign_in.issuer_client import IssuerClient
from outrider.gateway.tenancy.sign_in.sign_in import SignIn
from outrider.gateway.tenancy.sign_in.sign_in_metrics import SignInMetrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def build_sign_in(settings: Settings, keys: KeyParts, registry: "CollectorRegistry") -> SignIn:
    """Build the check of tokens; no issuer is asked yet. Raises SettingsError."""
    need_extra("sign-in", "sign_in.issuers")
    if keys.registry is None:
        raise SettingsError('sign_in needs teams, and database_url is "none", so there are none')
    client = IssuerClient(allow_private=settings.allow_private_upstreams)
    metrics = SignInMetrics(registry)
    issuers = [
        Issuer(name, issuer, client, clock=time.monotonic, metrics=metrics)
        for name, issuer in settings.sign_in.issuers.items()
    ]
    return SignIn(issuers, keys.registry, metrics)


def sign_in_endpoints(authenticator: Authenticator, settings: SignInSettings) -> SignInEndpoints:
    """Build /auth: for people, where an issuer knows this gateway as a client."""
    sign_in = authenticator.sign_in
    has_client = any(issuer.client_id for issuer in settings.issuers.values())
    if not isinstance(sign_in, SignIn) or settings.url is None or not has_client:
        return SignInEndpoints()
    return SignInEndpoints(
        flow=CodeFlow(sign_in, authenticator.hasher, settings.url),
        sessions=Sessions(authenticator.hasher, sign_in, settings.session_s),
    )
