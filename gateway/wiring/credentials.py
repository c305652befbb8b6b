"""A tier's credential, as the settings want it."""

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.upstream.credentials.base import (
    AsHeaders,
    Credential,
    CredentialError,
    NoCredential,
    api_key_header,
    bearer,
    checked,
)
from outrider.gateway.upstream.credentials.rotating import (
    CommandKey,
    FileKey,
    RotatingCredential,
    Secret,
)
from outrider.gateway.upstream.credentials.vendors import (
    AwsSignature,
    entra_fetch,
    google_fetch,
    missing_library,
)
from outrider.gateway.upstream.dialects.base import Dialect

_MIN_SECRET_CHARS: Final = 8


def build_credential(
    name: str,
    options: UpstreamSettings,
    dialect: Dialect,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
) -> Credential:
    """Build a tier's credential; nothing is read, run or asked yet."""
    where = f"tiers.{name}"
    if options.sign_in == "aws":
        return AwsSignature(options.region or "")
    if options.sign_in == "entra":
        fetch = entra_fetch(clock)
        return RotatingCredential(fetch, name=f"{where} (entra)", as_headers=bearer, clock=clock)
    if options.sign_in == "google":
        fetch = google_fetch(clock, options.google_account_file)
        return RotatingCredential(fetch, name=f"{where} (google)", as_headers=bearer, clock=clock)
    as_headers = api_key_header if options.sign_in == "api_key_header" else _key_headers(dialect)
    if options.api_key_file is not None:
        setting = f"{where}.api_key_file"
        file = FileKey(options.api_key_file, setting, clock)
        return RotatingCredential(
            file.fetch, name=setting, as_headers=as_headers, clock=clock, is_stale=file.is_stale
        )
    if options.api_key_command:
        setting = f"{where}.api_key_command"
        command = CommandKey(options.api_key_command, setting, options.api_key_ttl_s, clock)
        return RotatingCredential(command.fetch, name=setting, as_headers=as_headers, clock=clock)
    if options.api_key_env is None:
        return NoCredential()
    variable = options.api_key_env

    async def fetch_variable() -> Secret:
        return Secret(text=checked(environ.get(variable, ""), f"the variable {variable}"))

    return RotatingCredential(
        fetch_variable, name=f"{where}.api_key_env", as_headers=as_headers, clock=clock
    )


def _key_headers(dialect: Dialect) -> AsHeaders:
    """Return the way in which the server's own API carries a key."""
    plain = dialect.headers(None)

    def as_headers(secret: str) -> Mapping[str, str]:
        named = dialect.headers(secret)
        return {name: value for name, value in named.items() if plain.get(name) != value}

    return as_headers


def credential_complaints(
    name: str, options: UpstreamSettings, environ: Mapping[str, str]
) -> Iterator[str]:
    """Yield what keeps a tier from signing in, without a secret. No server is asked."""
    where = f"tiers.{name}"
    if (variable := options.api_key_env) is not None and options.sign_in not in _WITHOUT_KEY:
        key = environ.get(variable, "")
        if not key.strip():
            yield (
                f"{where}.api_key_env = {variable!r}: the environment variable {variable} is not "
                "set; it is to hold the server's key"
            )
        else:
            try:
                checked(key, f"the environment variable {variable}")
            except CredentialError as error:
                yield f"{where}.api_key_env = {variable!r}: {error}"
    if options.sign_in is not None and (missing := missing_library(options.sign_in)):
        yield f"{where}.sign_in = {options.sign_in!r}: {missing}"
    for setting in ("api_key_file", "google_account_file"):
        path = getattr(options, setting)
        if path is not None and not path.is_file():
            yield f"{where}.{setting} = {str(path)!r}: no such file"
    if options.api_key_command and shutil.which(options.api_key_command[0]) is None:
        yield f"{where}.api_key_command: no program {options.api_key_command[0]!r} is found"


_WITHOUT_KEY: Final = ("aws", "entra", "google")


class LiveSecrets(Collection[str]):
    """Secrets that are sent to servers, now: those of the settings, and those of credentials."""

    def __init__(self, fixed: Collection[str], credentials: Collection[Credential]) -> None:
        self._fixed = frozenset(fixed)
        self._credentials = credentials

    def _all(self) -> frozenset[str]:
        told = [secret for one in self._credentials for secret in one.secrets]
        words = {word for value in told for word in (value, value.rpartition(" ")[2])}
        return self._fixed | {word for word in words if len(word) >= _MIN_SECRET_CHARS}

    def __iter__(self) -> Iterator[str]:
        """Iterate over them, the longest first: one may hold another."""
        return iter(sorted(self._all(), key=len, reverse=True))

    def __contains__(self, word: object) -> bool:
        """Return whether a word is one of them."""
        return word in self._all()

    def __len__(self) -> int:
        """Count them."""
        return len(self._all())
