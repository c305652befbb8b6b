"""Find the principal of a request from its headers, in memory; end its requests with its key."""

import hmac
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal, Protocol

from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    PermissionDeniedError,
    RateLimitError,
)
from outrider.gateway.settings.keys import KeyMode
from outrider.gateway.tenancy.keys.admin_token import MAX_TOKEN_CHARS
from outrider.gateway.tenancy.keys.auth_throttle import AuthThrottle
from outrider.gateway.tenancy.keys.key_metrics import FailureReason, TenantMetrics
from outrider.gateway.tenancy.keys.key_registry import KeyEntry, KeyRegistry
from outrider.gateway.tenancy.keys.keys import (
    ANONYMOUS,
    SIGNED_IN_PREFIX,
    KeyHasher,
    Principal,
    Scopes,
    id_in,
)

EndRequest = Callable[[AuthenticationError], None]
"""Ends a running request with this error; called once, in the event loop, and must not block."""


class KeyState(Protocol):
    """Checks that a key is still valid."""

    def gone(self, key_id: str) -> AuthenticationError | None:
        """Return why the key of a running request is not valid any more; None: it is valid."""


class TokenCheck(Protocol):
    """Finds the principals of identity providers' tokens."""

    def principal(self, token: str) -> Principal:
        """Return whom a token stands for.

        Raises AuthenticationError, PermissionDeniedError or IssuerUnavailableError.
        """

    async def start(self) -> None:
        """Begin."""

    async def close(self) -> None:
        """End."""


class RunningRequests:
    """Requests under way, by the ids of their keys. For one event loop.

    `check` costs one look-up for each key that has requests under way; a token costs nothing.
    """

    def __init__(self, keys: KeyState) -> None:
        self._keys = keys
        self._ends: dict[str, set[EndRequest]] = {}

    def __len__(self) -> int:
        """Return the number of keys with requests under way."""
        return len(self._ends)

    @contextmanager
    def of_key(self, key_id: str, end: EndRequest) -> Iterator[None]:
        """Call `end` if the key ends in this context.

        Raises AuthenticationError where it has ended since the request was admitted.
        """
        if (error := self._keys.gone(key_id)) is not None:
            raise error
        ends = self._ends.setdefault(key_id, set())
        ends.add(end)
        try:
            yield
        finally:
            ends.discard(end)
            if not ends and self._ends.get(key_id) is ends:
                del self._ends[key_id]

    def check(self) -> None:
        """End the requests of keys that are not valid any more."""
        for key_id in list(self._ends):
            if (error := self._keys.gone(key_id)) is not None:
                for end in self._ends.pop(key_id):
                    end(error)


logger = logging.getLogger(__name__)

ADMIN_TOKEN_ID: Final = "admin-token"
ADMIN_TOKEN: Final = Principal(
    key_id=ADMIN_TOKEN_ID,
    name="admin token",
    tenant=ADMIN_TOKEN_ID,
    # It administrates and generates nothing: a generated answer would belong to no tenant.
    scopes=Scopes(models=frozenset(), tiers=frozenset(), is_admin=True),
)

API_KEY_ID: Final = "api-key"
API_KEY: Final = Principal(
    key_id=API_KEY_ID,
    name="keys.api_key",
    tenant=API_KEY_ID,
    scopes=Scopes(reads_metrics=True),
)
"""The principal of the key in the settings."""
_MAX_CREDENTIAL_CHARS: Final = MAX_TOKEN_CHARS + 1
"""Longer ones are cut to this; none that long is valid, and each costs the same to hash."""
_JWT: Final = "eyJ"
"""Begins every JWT: `{"` in base64."""
_MALFORMED: Final[FailureReason] = "malformed"
_HOW: Final = "Send the header authorization: Bearer KEY, or x-api-key: KEY."
_NOT_KNOWN: Final = (f"Unknown key. {_HOW}", "invalid_api_key")
_FAILURES: Final[Mapping[FailureReason, tuple[str, str]]] = {
    "missing": (f"A key is required. {_HOW}", "missing_api_key"),
    "malformed": _NOT_KNOWN,
    "unknown": _NOT_KNOWN,
    "expired": ("This key has expired. Ask the operator for a new one.", "api_key_expired"),
    "revoked": ("This key was revoked. Ask the operator for a new one.", "api_key_revoked"),
}


class Authenticator:
    """Finds the principal of a request, and whether keys are required. For one event loop.

    Every credential is verified; only failures are throttled. So a valid key is accepted despite
    other traffic from its address: behind a proxy all clients share one. Guessing gains nothing by
    it, because keys hold 256 random bits and secrets of the settings are checked at the start.
    """

    def __init__(
        self,
        hasher: KeyHasher,
        registry: KeyRegistry | None,
        *,
        mode: KeyMode = "auto",
        tokens: Mapping[str, Principal] | None = None,
        throttle: AuthThrottle | None = None,
        metrics: TenantMetrics | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Store the arguments. `registry`: None without a database, and therefore without keys.

        `tokens`: the secrets of the settings, ADMIN_TOKEN's and API_KEY's.
        """
        self.hasher = hasher
        self._registry = registry
        self._mode = mode
        chosen = tokens or {}
        self._tokens = [(hasher.digest(token), principal) for token, principal in chosen.items()]
        self._has_api_key = API_KEY in chosen.values()
        self._throttle = AuthThrottle(time.monotonic) if throttle is None else throttle
        self._metrics = metrics
        self._wall_clock = wall_clock
        self.running = RunningRequests(self)
        """Requests under way by key; they are ended when their key is not valid any more."""
        self.sign_in: TokenCheck | None = None
        """Set where identity providers' tokens count beside keys."""
        if registry is not None:
            registry.subscribe(self.running.check)
        # The digest compared with for unknown keys, so that it takes the same time.
        self._nobody = KeyEntry(principal=ANONYMOUS, key_hash=bytes(32), is_revoked=True)
        if metrics is not None and registry is not None:
            metrics.report_keys(lambda: len(registry))

    @property
    def has_keys(self) -> bool:
        """Return whether there is a key in the settings, or has ever been one in the database.

        Identity providers are keys enough.
        """
        is_set = self._has_api_key or self.sign_in is not None
        return is_set or (self._registry is not None and self._registry.has_keys)

    @property
    def is_open(self) -> bool:
        """Return whether requests need no key now."""
        return self._mode == "off" or (self._mode == "auto" and not self.has_keys)

    async def start(self) -> None:
        """Read the keys, and watch for changes. Raises DatabaseError."""
        if self._registry is not None:
            await self._registry.start()
        if self.sign_in is not None:
            await self.sign_in.start()

    async def close(self) -> None:
        """Look no more."""
        if self.sign_in is not None:
            await self.sign_in.close()
        if self._registry is not None:
            await self._registry.close()

    def authenticate(
        self, authorization: str | None, api_key: str | None, peer: str | None
    ) -> Principal:
        """Return the principal of the headers `authorization` and `x-api-key` from address `peer`.

        While no key is required, a missing or wrong one makes the request ANONYMOUS. Raises
        AuthenticationError for a missing or wrong key, RateLimitError after too many wrong ones;
        for an identity provider's token IssuerUnavailableError too, and PermissionDeniedError.
        """
        credential = _credential(authorization, api_key)
        if credential is None:
            if self.is_open:
                return ANONYMOUS
            raise self._failure("missing", peer)
        digest = self.hasher.digest(credential)
        key_id = id_in(credential)
        if key_id is None:
            principal, reason = self._of_token(digest), _MALFORMED
            if principal is None and self.sign_in is not None:
                principal = self._of_jwt(self.sign_in, _bearer(authorization), digest, peer)
        else:
            principal, reason = self._key(key_id, digest)
        if principal is not None:
            return principal
        if self.is_open:
            return ANONYMOUS
        raise self._failure(self._counted(reason, key_id, digest, peer), peer)

    def require_admin(self, principal: Principal) -> None:
        """Raise AuthenticationError for ANONYMOUS, PermissionDeniedError for non-administrators."""
        if principal.scopes.is_admin:
            return
        if principal is ANONYMOUS:
            raise AuthenticationError(
                f"This needs a key with the admin scope, or the admin token. {_HOW}"
            )
        raise PermissionDeniedError("This needs a key with the admin scope.", code="admin_only")

    def require_metrics(self, principal: Principal) -> None:
        """Raise PermissionDeniedError for keys that may not read /metrics."""
        scopes = principal.scopes
        if not (self.is_open or scopes.reads_metrics or scopes.is_admin):
            raise PermissionDeniedError(
                "This needs a key with the metrics scope, or with the admin scope. Make one with "
                "`outrider keys create --name NAME --metrics`.",
                code="metrics_only",
            )

    def gone(self, key_id: str) -> AuthenticationError | None:
        """Return why the key of a running request is not valid any more; None: it is valid."""
        is_no_key = key_id in (ANONYMOUS.key_id, ADMIN_TOKEN_ID, API_KEY_ID)
        if self._registry is None or self._mode == "off" or is_no_key:
            return None
        entry = self._registry.find(key_id)
        if entry is None and key_id.startswith(SIGNED_IN_PREFIX):
            return None  # a token is good for what began with it
        reason: FailureReason | None = "unknown" if entry is None else self._ended(entry)
        if reason is None:
            return None
        message, code = _FAILURES[reason]
        return AuthenticationError(message, code=code)

    def principal_of(self, key_id: str) -> Principal:
        """Return what a key's id stands for now, for work that goes on without its requests.

        Raises AuthenticationError for a key that is not valid any more.
        """
        if (error := self.gone(key_id)) is not None:
            raise error
        entry = None if self._registry is None else self._registry.find(key_id)
        if entry is not None:
            return entry.principal
        known = (each for _, each in self._tokens if each.key_id == key_id)
        principal = next(known, ANONYMOUS if self.is_open else None)
        if principal is None:
            raise self._failure("missing", None)
        return principal

    def _counted(
        self, reason: FailureReason, key_id: str | None, digest: bytes, peer: str | None
    ) -> FailureReason:
        """Count a failure; return the reason to report. One line is logged for a new failure.

        The holder of a revoked or expired key has its secret and does not guess. So it gets the
        same reason however often it asks.
        """
        counted = self._throttle.count(peer, digest)
        if counted == "new":
            logger.warning(
                "key was not accepted reason=%s key_id=%s peer=%s", reason, key_id or "-", peer
            )
        is_guess = reason not in ("revoked", "expired")
        return "throttled" if counted == "throttled" and is_guess else reason

    def _of_token(self, digest: bytes) -> Principal | None:
        """Return the principal of a secret in the settings; each of them is compared."""
        found = None
        for token, principal in self._tokens:
            if hmac.compare_digest(digest, token):
                found = principal
        return found

    def _of_jwt(
        self, sign_in: TokenCheck, token: str, digest: bytes, peer: str | None
    ) -> Principal | None:
        """Return whom an identity provider's token stands for; None where it is no such token.

        Raises what `authenticate` does.
        """
        if not token.startswith(_JWT):
            return None
        try:
            return sign_in.principal(token)
        except AuthenticationError as error:
            if self.is_open:
                return None
            is_old = error.code == "token_expired"
            counted = self._counted("expired" if is_old else "token", None, digest, peer)
            if counted == "throttled":
                raise self._failure(counted, peer) from None
            if self._metrics is not None:
                self._metrics.failed(counted)
            raise

    def _key(self, key_id: str, digest: bytes) -> tuple[Principal | None, FailureReason]:
        """Return the key's principal if the digest matches. Takes as long for unknown ids."""
        entry = (None if self._registry is None else self._registry.find(key_id)) or self._nobody
        now_s = self._wall_clock()
        is_old = hmac.compare_digest(digest, entry.old_hash or self._nobody.key_hash)
        if not hmac.compare_digest(digest, entry.key_hash) and not (
            is_old and now_s < entry.old_hash_until
        ):
            return None, "unknown"
        ended = self._ended(entry)
        return (entry.principal if ended is None else None), ended or "unknown"

    def _ended(self, entry: KeyEntry) -> Literal["revoked", "expired"] | None:
        """Return why the key is not valid any more; None: it is valid."""
        if entry.is_revoked:
            return "revoked"
        is_over = entry.expires_at is not None and entry.expires_at <= self._wall_clock()
        return "expired" if is_over else None

    def _failure(self, reason: FailureReason, peer: str | None) -> Exception:
        """Return the error for the client."""
        if self._metrics is not None:
            self._metrics.failed(reason)
        if reason != "throttled":
            message, code = _FAILURES[reason]
            return AuthenticationError(message, code=code)
        wait_s = max(self._throttle.wait_s(peer), self._throttle.overall_wait_s)
        return RateLimitError(
            "Unknown key, and too many wrong keys came from this address. Send a valid key, or "
            f"wait {max(1, round(wait_s))} s before trying another one.",
            retry_after_s=wait_s,
            code="too_many_wrong_keys",
        )


def _bearer(authorization: str | None) -> str:
    """Return the credential of a header with the scheme Bearer; empty for another."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _credential(authorization: str | None, api_key: str | None) -> str | None:
    """Return the credential sent, cut to a bounded length: of two, the one with a key's form."""
    whole = (authorization or "").strip()
    scheme, _, token = whole.partition(" ")
    given = (token.strip() if scheme.lower() == "bearer" else whole, (api_key or "").strip())
    found = next((text for text in given if id_in(text)), given[0] or given[1])
    return found[:_MAX_CREDENTIAL_CHARS] or None
