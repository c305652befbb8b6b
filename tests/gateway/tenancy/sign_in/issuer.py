"""A scripted identity provider over real HTTP: keys, discovery, the code flow, and faults."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

AUDIENCE = "gateway"
CLIENT_ID = "pages"
CLIENT_SECRET = "a/secret of: the pages"
SUBJECT = "ada"

_RSA = [rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2)]
"""Two, since they take long to make; what is signed with them is told apart by their ids."""


@dataclass
class SigningKey:
    """A private key, as the issuer publishes it."""

    kid: str | None
    algorithm: str = "RS256"
    private: Any = _RSA[0]
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of the published key."""

    @property
    def jwk(self) -> dict[str, Any]:
        """The public key."""
        made = jwt.get_algorithm_by_name(self.algorithm).to_jwk(
            self.private.public_key(), as_dict=True
        )
        named = {} if self.kid is None else {"kid": self.kid}
        made.pop("key_ops", None)
        return {**made, **named, **self.more}


def new_key(kid: str | None, algorithm: str = "RS256", index: int = 0, **more: Any) -> SigningKey:
    """A key of this algorithm."""
    private: Any = _RSA[index]
    if algorithm.startswith("ES"):
        private = ec.generate_private_key(ec.SECP256R1())
    elif algorithm == "EdDSA":
        private = ed25519.Ed25519PrivateKey.generate()
    return SigningKey(kid, algorithm, private, more)


class ScriptedIssuer:
    """Its state; a test changes it while it serves."""

    def __init__(self) -> None:
        self.url = ""
        self.reset()

    def reset(self) -> None:
        """Do as it should."""
        self.keys = [new_key("k1")]
        self.answers: dict[str, Callable[[], tuple[int, dict[str, str], bytes]]] = {}
        """By path, in place of the usual answer."""
        self.claims: dict[str, Any] = {"sub": SUBJECT, "groups": ["research"]}
        self.changed: dict[str, Any] = {}
        """Claims of the next ID token that are other than they should be."""
        self.configured: dict[str, Any] = {}
        """Fields of the configuration that are other than they should be."""
        self.asked: list[str] = []
        self.released = threading.Event()
        """Answers that hang wait for it."""
        self.gateway = ""
        """Where browsers are sent back to; empty: where they came from."""
        self.codes: dict[str, dict[str, str]] = {}

    def token(self, key: SigningKey | None = None, **claims: Any) -> str:
        """An access token; None among the claims leaves one out."""
        now_s = time.time()
        usual = {"iss": self.url, "aud": AUDIENCE, "exp": now_s + 600, "iat": now_s, **self.claims}
        return self.signed({**usual, **claims}, key)

    def signed(self, claims: dict[str, Any], key: SigningKey | None = None, **header: Any) -> str:
        """A token with these claims."""
        key = key or self.keys[0]
        headers = {"kid": key.kid, **header} if key.kid is not None else header
        said = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(said, key.private, key.algorithm, headers=headers)

    def hang(self) -> tuple[int, dict[str, str], bytes]:
        """An answer that does not come."""
        self.released.wait(30)
        return 503, {}, b""

    def answer(self, path: str, form: dict[str, str], authorization: str) -> Any:
        """The usual answer: a JSON value, or a redirect's address."""
        if path == "/.well-known/openid-configuration":
            return {
                "issuer": self.url,
                "jwks_uri": f"{self.url}/keys",
                "authorization_endpoint": f"{self.url}/authorize?realm=tests",
                "token_endpoint": f"{self.url}/token",
                **self.configured,
            }
        if path == "/keys":
            return {"keys": [key.jwk for key in self.keys]}
        if path == "/authorize":
            code = f"code-{len(self.codes)}"
            self.codes[code] = form
            back = urlencode({"code": code, "state": form["state"], "iss": self.url})
            return f"{self.gateway or form['redirect_uri']}?{back}"
        if path == "/token":
            return self._exchange(form, authorization)
        return None

    def _exchange(self, form: dict[str, str], authorization: str) -> Any:
        asked = self.codes.pop(form["code"], None)  # a code counts once
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        is_client = authorization.startswith("Basic ") or form.get("client_secret") == CLIENT_SECRET
        if asked is None or challenge != asked["code_challenge"] or not is_client:
            return None
        now_s = time.time()
        claims = {"iss": self.url, "aud": asked["client_id"], "exp": now_s + 60, "iat": now_s}
        said = {**claims, "nonce": asked["nonce"], **self.claims, **self.changed}
        return {"token_type": "Bearer", "access_token": "unused", "id_token": self.signed(said)}


class _Handler(BaseHTTPRequestHandler):
    issuer: ScriptedIssuer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self._answer(parts.path, parts.query)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self._answer(self.path, self.rfile.read(length).decode())

    def _answer(self, path: str, form: str) -> None:
        self.issuer.asked.append(path)
        if (scripted := self.issuer.answers.get(path)) is not None:
            self._send(*scripted())
            return
        fields = {name: values[0] for name, values in parse_qs(form).items()}
        found = self.issuer.answer(path, fields, self.headers.get("authorization", ""))
        if isinstance(found, str):
            self._send(302, {"location": found}, b"")
        elif found is None:
            self._send(400, {}, b"{}")
        else:
            self._send(200, {}, json.dumps(found).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        with suppress(OSError):  # the gateway had enough
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def scripted_issuer() -> Iterator[ScriptedIssuer]:
    """Serve one on this machine."""
    issuer = ScriptedIssuer()
    handler = type("Handler", (_Handler,), {"issuer": issuer})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield issuer
    finally:
        issuer.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
