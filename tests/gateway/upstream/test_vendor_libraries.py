"""The vendors' own libraries, against token endpoints of the test: what they ask, what we keep.

Each part is skipped where its library is not installed (the extras azure, google and aws).
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.upstream.credentials.base import CredentialError, SignedRequest, bearer
from outrider.gateway.upstream.credentials.rotating import Fetch, RotatingCredential, Secret
from outrider.gateway.upstream.credentials.vendors import (
    ENTRA_SCOPE,
    GOOGLE_SCOPE,
    entra_fetch,
    google_fetch,
)
from tests.gateway.upstream.tiers import bench

LIFE_S = 3599
REQUEST = SignedRequest(method="POST", url="https://host/v1/x", headers={}, body=b"{}")


@dataclass
class Endpoint:
    """Answers every request with a token of the next number, or with `status`."""

    url: str = ""
    status: int = 200
    forms: list[dict[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def answer(self, form: dict[str, str], headers: dict[str, str]) -> bytes:
        self.forms.append(form)
        self.headers.append(headers)
        if self.status != 200:
            return json.dumps({"error": "invalid_grant", "error_description": "revoked"}).encode()
        return json.dumps(
            {
                "access_token": f"token-{len(self.forms)}",
                "token_type": "Bearer",
                "expires_in": LIFE_S,
                "expires_on": str(int(time.time()) + LIFE_S),
                "resource": form.get("resource", ""),
            }
        ).encode()


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            text = self.rfile.read(length).decode() or urlsplit(self.path).query
            form = {name: values[0] for name, values in parse_qs(text).items()}
            body = made.answer(form, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(made.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


async def fetched(fetch: Fetch) -> Secret:
    async with asyncio.timeout(30):
        return await fetch()


def assert_lasts(secret: Secret, now_s: float) -> None:
    """The library's expiry, on our clock."""
    assert secret.expires_s is not None
    assert secret.expires_s == pytest.approx(now_s + LIFE_S, abs=60)


# ---- Google ------------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path: Path) -> Iterator[tuple[Endpoint, Path, Any]]:
    """A service account whose token endpoint is the test's, its file, and its public key."""
    pytest.importorskip("google.auth", reason="google-auth is not installed: the extra google")
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    from cryptography.hazmat.primitives import serialization

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with endpoint() as made:
        told = {
            "type": "service_account",
            "project_id": "p",
            "private_key_id": "1",
            "private_key": pem.decode(),
            "client_email": "outrider@p.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": f"{made.url}/token",
        }
        file = tmp_path / "account.json"
        file.write_text(json.dumps(told))
        yield made, file, key.public_key()


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_default", [False, True])
def test_google_gets_an_assertion_that_the_accounts_key_signed(
    account: tuple[Endpoint, Path, Any], is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tier's own file, and by the application's default."""
    made, file, public_key = account
    jwt = pytest.importorskip("jwt")
    if is_default:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    fetch = google_fetch(lambda: 1000.0, None if is_default else file)
    secret = asyncio.run(fetched(fetch))
    assert secret.text == "token-1"
    assert_lasts(secret, 1000.0)
    (form,) = made.forms
    assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
    claims = jwt.decode(
        form["assertion"],
        public_key,
        algorithms=["RS256"],
        audience="https://oauth2.googleapis.com/token",  # whatever the endpoint
    )
    assert claims["iss"] == "outrider@p.iam.gserviceaccount.com"
    assert claims["scope"] == GOOGLE_SCOPE


def test_a_tier_of_google_sends_the_token_and_a_new_one_when_it_is_rejected(
    account: tuple[Endpoint, Path, Any],
) -> None:
    made, file, _ = account

    async def work() -> None:
        options = {"sign_in": "google", "google_account_file": file}
        async with bench(MockScript(), **options) as under_test:
            (mock,) = under_test.mocks
            for number in (1, 2):
                mock.api_key = f"token-{number}"  # the one before is rejected from now on
                answer = under_test.answer(stream=False)
                try:
                    await answer.whole()
                finally:
                    await answer.aclose()
                assert mock.requests[-1].headers["authorization"] == f"Bearer token-{number}"
        assert len(made.forms) == 2

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_revoked_account_is_told_without_its_key(account: tuple[Endpoint, Path, Any]) -> None:
    made, file, _ = account
    made.status = 400
    credential = RotatingCredential(
        google_fetch(time.monotonic, file), name="t", as_headers=bearer, clock=time.monotonic
    )
    with pytest.raises(CredentialError) as raised:
        asyncio.run(credential.headers(REQUEST))
    assert "PRIVATE" not in str(raised.value)


# ---- Entra -------------------------------------------------------------------------------------


def test_entra_asks_the_identity_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Azure's App Service, whose endpoint the environment names."""
    pytest.importorskip("azure.identity", reason="azure-identity is not installed: the extra azure")
    for name in ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with endpoint() as made:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{made.url}/msi/token")
        monkeypatch.setenv("IDENTITY_HEADER", "header-secret")
        fetch = entra_fetch(lambda: 1000.0)
        secret = asyncio.run(fetched(fetch))
        assert secret.text == "token-1"
        assert_lasts(secret, 1000.0)
        assert made.forms[0]["resource"] == ENTRA_SCOPE.removesuffix("/.default")
        assert made.headers[0]["x-identity-header"] == "header-secret"


def test_what_entra_refuses_is_a_credential_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.identity", reason="azure-identity is not installed: the extra azure")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
    with endpoint() as made:
        made.status = 400
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{made.url}/msi/token")
        monkeypatch.setenv("IDENTITY_HEADER", "header-secret")
        credential = RotatingCredential(
            entra_fetch(time.monotonic), name="t", as_headers=bearer, clock=time.monotonic
        )
        with pytest.raises(CredentialError) as raised:
            asyncio.run(credential.headers(REQUEST))
        assert "header-secret" not in str(raised.value)
