"""Keys with which gateways and engine replicas know each other: CURVE pairs in a TOML file."""

import logging
import os
import secrets
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from outrider.gateway.settings.errors import SettingsError
from outrider.gateway.settings.loopback import is_loopback

logger = logging.getLogger(__name__)

_AUTH_DOMAIN: Final = "fleet"

_HEADER = """\
# Keys of an Outrider fleet (CURVE), for engine replicas and gateways alike. Whoever has this file
# can use the engines: keep it secret. Written by `outrider engine keygen`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE pair in Z85's 40 characters."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Self:
        """Return a random one."""
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """The pair of all replicas, and the pair of all gateways: each side has both files' halves."""

    server: KeyPair
    client: KeyPair


class _OnlyGateways:
    """Tells pyzmq's authenticator which public keys may connect: the fleet's gateways'."""

    def __init__(self, keys: FleetKeys) -> None:
        self._public = keys.client.public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the key is the gateways'."""
        return secrets.compare_digest(key, self._public)


def start_guard(context: "zmq.Context[zmq.Socket[bytes]]", keys: FleetKeys) -> ThreadAuthenticator:
    """Return an authenticator, running, that admits the fleet's gateways only; stop it."""
    authenticator = ThreadAuthenticator(context, log=logger)
    authenticator.start()
    authenticator.configure_curve_callback(_AUTH_DOMAIN, _OnlyGateways(keys))
    return authenticator


def guard(socket: "zmq.Socket[bytes]", keys: FleetKeys) -> None:
    """Have a socket ask its peers for their keys; before it is bound, beside `start_guard`."""
    socket.zap_domain = _AUTH_DOMAIN.encode()
    socket.curve_server = True
    socket.curve_secretkey = keys.server.secret


def write_fleet_keys(path: Path) -> None:
    """Write new keys into a new file with mode 0600. Raises SettingsError where it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SettingsError(
            f"{path} exists already, and engines may use its keys. Name another file, or remove it."
        ) from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(_HEADER)
        for name in ("server", "client"):
            pair = KeyPair.new()
            file.write(f'\n[{name}]\npublic = "{pair.public.decode()}"\n')
            file.write(f'secret = "{pair.secret.decode()}"\n')


def read_fleet_keys(path: Path) -> FleetKeys:
    """Read the keys; warns where other users can read the file. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        pairs = {name: _pair(document[name]) for name in ("server", "client")}
    except OSError as error:
        raise SettingsError(
            f"key file {path} cannot be read: {error.strerror}. `outrider engine keygen {path}` "
            "writes a new one, which every replica and gateway needs."
        ) from None
    except (KeyError, TypeError, ValueError, UnicodeError):
        raise SettingsError(
            f"{path} is not a key file of `outrider engine keygen`: it has [server] and [client], "
            "each with the public and the secret key that belong together."
        ) from None
    if mode & 0o077:
        logger.warning(
            "key file can be read by other users path=%s mode=%o advice=chmod 600", path, mode
        )
    return FleetKeys(**pairs)


def _pair(table: dict[str, str]) -> KeyPair:
    pair = KeyPair(public=table["public"].encode("ascii"), secret=table["secret"].encode("ascii"))
    if len(pair.secret) != 40 or zmq.curve_public(pair.secret) != pair.public:
        raise ValueError("the keys do not belong together")
    return pair


def require_safe(endpoint: str, keys: FleetKeys | None, *, insecure: bool = False) -> None:
    """Raise SettingsError for an address that is none, or one that other machines see in plain."""
    if endpoint.startswith("ipc://"):
        return
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not host or not port.isdecimal():
        raise SettingsError(f"{endpoint!r} is no address of an engine: write tcp://HOST:PORT.")
    if keys is None and not insecure and not is_loopback(host.strip("[]")):
        raise SettingsError(
            f"{endpoint} can be reached from other machines, and without keys all of them could "
            "read prompts and use the engine. Write keys with `outrider engine keygen fleet.key` "
            "and name the file (--key at the engine, --engine-key at the gateway), or say "
            "--insecure."
        )
