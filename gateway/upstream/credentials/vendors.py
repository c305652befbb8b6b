"""Tokens and signatures by the vendors' own libraries, which are imported when they are needed."""

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from outrider.gateway.upstream.credentials.base import CredentialError, SignedRequest
from outrider.gateway.upstream.credentials.rotating import Fetch, Secret, in_daemon, token_secret

ENTRA_SCOPE: Final = "https://cognitiveservices.azure.com/.default"
GOOGLE_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
_AWS_SERVICE: Final = "bedrock"
_AWS_TIMEOUT_S: Final = 10.0
LIBRARIES: Final[Mapping[str, tuple[str, str]]] = {
    "entra": ("azure.identity", "azure-identity"),
    "google": ("google.auth", "google-auth requests"),
    "aws": ("botocore", "botocore"),
}
"""The module that a way to sign in needs, and the packages that have it."""


def missing_library(sign_in: str) -> str | None:
    """Return what to install for a way to sign in; None where it is there."""
    if sign_in not in LIBRARIES:
        return None
    module, packages = LIBRARIES[sign_in]
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return None
    return f"{module} is not installed: pip install {packages}"


def entra_fetch(clock: Callable[[], float]) -> Fetch:
    """Fetch Entra tokens by what the environment offers: a managed identity, a secret, the CLI."""
    made: list[Any] = []

    def token() -> tuple[str, float]:
        if not made:
            from azure.identity import DefaultAzureCredential

            made.append(DefaultAzureCredential())
        found = made[0].get_token(ENTRA_SCOPE)
        return found.token, float(found.expires_on)

    return _in_thread(token, clock)


def google_fetch(clock: Callable[[], float], account: Path | None) -> Fetch:
    """Fetch Google's tokens: of a service account's file, else of the application's default."""
    made: list[Any] = []

    def token() -> tuple[str, float]:
        from google.auth.transport.requests import Request

        if not made:
            made.append(_google_credentials(account))
        made[0].refresh(Request())
        expiry = made[0].expiry.replace(tzinfo=UTC)  # the library leaves the zone out
        return made[0].token, float(expiry.timestamp())

    return _in_thread(token, clock)


def _google_credentials(account: Path | None) -> Any:
    import google.auth
    from google.oauth2 import service_account

    if account is None:
        found, _ = google.auth.default(scopes=[GOOGLE_SCOPE])
        return found
    of_file: Any = service_account.Credentials.from_service_account_file  # untyped
    return of_file(str(account), scopes=[GOOGLE_SCOPE])


def _in_thread(token: Callable[[], tuple[str, float]], clock: Callable[[], float]) -> Fetch:
    """Run a library that blocks. A call that hangs keeps its thread, and no second one begins."""

    async def fetch() -> Secret:
        text, expires_at = await in_daemon(token)
        return token_secret(text, expires_at, clock_s=clock(), wall_s=time.time())

    return fetch


class AwsSignature:
    """Signs requests by SigV4 with the credentials that botocore finds, and renews by itself."""

    def __init__(self, region: str, *, session: Any = None) -> None:
        """`session`: botocore's; by default one that looks at environment, files and roles."""
        self._region = region
        self._session = session
        self._credentials: Any = None
        self._frozen: Any = None

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secret key and the session's token."""
        if self._frozen is None:
            return ()
        return tuple(text for text in (self._frozen.secret_key, self._frozen.token) if text)

    async def headers(self, request: SignedRequest) -> Mapping[str, str]:
        """Return the signature's headers. Raises CredentialError."""
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        try:
            async with asyncio.timeout(_AWS_TIMEOUT_S):
                self._frozen = await in_daemon(self._found)
        except TimeoutError:
            raise CredentialError("AWS credentials took longer than 10 s") from None
        except CredentialError:
            raise
        except Exception as error:  # the library's many kinds
            raise CredentialError(f"AWS credentials failed: {type(error).__name__}") from error
        signed = AWSRequest(
            method=request.method,
            url=request.url,
            data=request.body,
            headers={"content-type": request.headers.get("content-type", "application/json")},
        )
        SigV4Auth(self._frozen, _AWS_SERVICE, self._region).add_auth(signed)
        return {name.lower(): value for name, value in signed.headers.items()}

    async def renew(self, rejected: Mapping[str, str]) -> bool:
        """Return False: botocore has renewed what had expired; another signature would not help."""
        del rejected
        return False

    def _found(self) -> Any:
        if self._credentials is None:
            if self._session is None:
                import botocore.session

                self._session = botocore.session.get_session()
            self._credentials = self._session.get_credentials()
            if self._credentials is None:
                raise CredentialError(
                    "no AWS credentials are found: set AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, a profile or a role"
                )
        return self._credentials.get_frozen_credentials()
