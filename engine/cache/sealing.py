"""Seals what leaves the process: keys and values say what the prompt was.

AES-256-GCM by the package `cryptography`, which is needed here alone. The key lies in a file of its
own. A name on the disk says nothing about a text to who lacks the key.
"""

import base64
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from outrider.engine.cache.block_pool import BlockHash
from outrider.engine.cache.extents import ExtentError
from outrider.engine.errors import EngineError

CODE_SIZE: Final = 8
_CODE_BYTES: Final = 5
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12


class Seal:
    """Seals and opens with one key."""

    def __init__(self, key: bytes) -> None:
        """Raise EngineError where the package is not installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise EngineError(
                "A folder for keys and values (engine.kv_folder) is sealed by the package "
                "cryptography, which is not installed: pip install 'outrider[kv]'."
            ) from error
        self._cipher = AESGCM(hashlib.sha256(b"seal" + key).digest())
        self.names_key = hashlib.sha256(b"names" + key).digest()
        """Makes codes of hashes, and opens nothing."""
        self._wrong = InvalidTag

    def code(self, block_hash: BlockHash) -> str:
        """Return what stands for a hash in a file's name: `CODE_SIZE` letters and digits.

        Two hashes may have one code: what the file holds says whether it is meant.
        """
        return code_of(self.names_key, block_hash)

    def seal(self, plain: bytes, context: str) -> bytes:
        """Return the bytes sealed; they are opened with the same `context` only."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, plain, context.encode())

    def open(self, sealed: bytes, context: str) -> bytes:
        """Return what was sealed. Raises ExtentError for anything else."""
        nonce, rest = sealed[:_NONCE_BYTES], memoryview(sealed)[_NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, rest, context.encode())
        except (self._wrong, ValueError) as error:
            raise ExtentError("changed, cut off, or sealed with another key or name") from error


def code_of(names_key: bytes, block_hash: BlockHash) -> str:
    """Return what stands for a hash in a file's name, by a seal's `names_key`."""
    digest = hashlib.blake2b(block_hash, key=names_key, digest_size=_CODE_BYTES).digest()
    return base64.b32encode(digest).decode().lower()


def read_key(path: Path) -> bytes:
    """Return the key in a file, which is made where it is not there. Raises EngineError."""
    try:
        if not path.exists():
            _write_key(path)
        key, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise EngineError(
            f"engine.kv_folder_key: {path} cannot be read or made: {error.strerror}."
        ) from error
    if len(key) != _KEY_BYTES:
        raise EngineError(f"engine.kv_folder_key: {path} holds no key of {_KEY_BYTES} bytes.")
    if stat.S_IMODE(mode) & 0o077:
        raise EngineError(
            f"engine.kv_folder_key: others can read {path}; they must not: chmod 600 {path}"
        )
    return key


def _write_key(path: Path) -> None:
    """Make a key. Of two engines that start at once, both have the same one afterwards."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.link(new, path)
    except FileExistsError:  # another one was faster
        pass
    finally:
        new.unlink()
