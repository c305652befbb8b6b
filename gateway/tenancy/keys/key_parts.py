"""Settings and a database in, an authenticator out."""

import logging
import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import SecretStr

from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.storage.database import Database, DatabaseError
from outrider.gateway.tenancy.keys.admin_token import check_token
from outrider.gateway.tenancy.keys.auth_throttle import AuthThrottle
from outrider.gateway.tenancy.keys.authenticator import ADMIN_TOKEN, API_KEY, Authenticator
from outrider.gateway.tenancy.keys.key_metrics import TenantMetrics
from outrider.gateway.tenancy.keys.key_registry import KeyRegistry
from outrider.gateway.tenancy.keys.key_store import KeyStore, load_secret
from outrider.gateway.tenancy.keys.keys import KeyHasher, Principal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyParts:
    """Keys and their check."""

    authenticator: Authenticator
    has_open_metrics: bool = False
    """/metrics is answered without a key."""
    store: KeyStore | None = None
    """None without a database."""
    registry: KeyRegistry | None = None
    """None without a database."""
    hasher: KeyHasher = field(default_factory=lambda: KeyHasher(secrets.token_bytes(32)))
    """Makes digests under the secret of the keys."""


def open_parts() -> KeyParts:
    """Return the parts of a gateway without keys, which requires none."""
    return KeyParts(authenticator=Authenticator(KeyHasher(secrets.token_bytes(32)), None))


def key_store(settings: Settings, database: Database) -> KeyStore:
    """Return the keys of a database. Raises SettingsError where it is unavailable."""
    return KeyStore(database, key_hasher(settings, database), randomness=random.SystemRandom())


def build_key_parts(
    settings: Settings, database: Database | None, metrics: TenantMetrics | None = None
) -> KeyParts:
    """Build the check of keys that the settings describe. Blocks.

    Raises SettingsError for settings that contradict each other, and for an unavailable database.
    """
    keys = settings.keys
    tokens = {
        **_token("keys.admin_token", keys.admin_token, ADMIN_TOKEN),
        **_token("keys.api_key", keys.api_key, API_KEY),
    }
    if database is None and keys.api_key is None and keys.mode == "required":
        raise SettingsError(
            'keys.mode is required, but database_url is "none", so no key can exist; set '
            "keys.api_key"
        )
    hasher = key_hasher(settings, database)
    store = registry = None
    if database is not None:
        store = KeyStore(database, hasher, randomness=random.SystemRandom())
        registry = KeyRegistry(
            store,
            hasher,
            refresh_s=settings.keys.refresh_s,
            isolate_tenants=settings.isolate_tenants,
            on_failure=_nothing if metrics is None else metrics.lost_sight,
        )
    authenticator = Authenticator(
        hasher,
        registry,
        mode=settings.keys.mode,
        tokens=tokens,
        throttle=AuthThrottle(time.monotonic, num_processes=settings.server.workers),
        metrics=metrics,
    )
    return KeyParts(
        authenticator=authenticator,
        has_open_metrics=settings.keys.open_metrics,
        store=store,
        registry=registry,
        hasher=hasher,
    )


def _token(setting: str, hidden: SecretStr | None, principal: Principal) -> Mapping[str, Principal]:
    """Return a secret that the operator chose. Raises SettingsError for one that can be guessed."""
    if hidden is None:
        return {}
    token = hidden.get_secret_value()
    if (warning := check_token(setting, token)) is not None:
        logger.warning("secret may be weak setting=%s advice=%s", setting, warning)
    return {token: principal}


def _nothing() -> None:
    pass


def key_hasher(settings: Settings, database: Database | None) -> KeyHasher:
    """Return what makes digests under the keys' secret. Raises SettingsError."""
    if database is None:
        return KeyHasher(secrets.token_bytes(32))
    try:
        return KeyHasher(load_secret(database, settings.keys.secret, random.SystemRandom()))
    except DatabaseError as error:
        raise SettingsError(error.detail) from None
