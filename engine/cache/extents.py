"""Extents: the keys and values of some blocks of one text, as contiguous bytes that may be moved.

An extent says what it holds: the version of the format, the fingerprint of the arithmetic and the
cache that it is from, the shapes, the hashes of its blocks, and the hash before them. Of what does
not fit, or was changed, nothing is used. An extent is no secret's keeper: whoever sends one to a
disk or another machine seals it (`outrider.engine.cache.sealing`).
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from outrider.engine.cache.block_pool import BlockHash

EXTENT_VERSION: Final = 1
EXTENT_BYTES: Final = 2**20
"""An extent holds as many blocks as fit, at most 16, but at least one."""
MOST_BLOCKS: Final = 16
_MAGIC: Final = b"OUTRKV"
_PREFIX: Final = struct.Struct("<6sHI")  # magic, version, bytes of the header
_DIGEST_BYTES: Final = 32
_MOST_HEADER_BYTES: Final = 2**20

ExtentKind = Literal["blocks", "windowed", "state"]
"""windowed: blocks with the keys of their windowed layers, which have a cache of their own. state:
of recurrent layers, behind the block that it names."""


class ExtentError(ValueError):
    """An extent is damaged, or from another model, cache or version. Its text is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentHeader:
    """What an extent holds."""

    fingerprint: str
    """Of the arithmetic, the types and the block size of the cache that it is from."""
    kind: ExtentKind
    first: int
    """The index of the first block in its text."""
    parent: BlockHash
    """The hash that the first block's chains on; empty for a state."""
    hashes: tuple[BlockHash, ...]
    """Of the blocks, in order; for a state the one of the block before it."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the arrays of bytes that the payload consists of, one behind the other."""
    owner: str = ""
    """Whose text it is (`owner_tag`); empty where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A header and the bytes that it describes."""

    header: ExtentHeader
    payload: bytes | memoryview

    @property
    def num_bytes(self) -> int:
        """Return the size of the payload."""
        return len(self.payload)


def blocks_per_extent(block_bytes: int) -> int:
    """Return how many blocks an extent holds at most."""
    return max(min(EXTENT_BYTES // max(block_bytes, 1), MOST_BLOCKS), 1)


def pack_extent(extent: Extent) -> bytes:
    """Return an extent as bytes, with a checksum over all of it."""
    fields = asdict(extent.header)
    fields["parent"] = extent.header.parent.hex()
    fields["hashes"] = [each.hex() for each in extent.header.hashes]
    header = json.dumps(fields).encode()
    parts = (_PREFIX.pack(_MAGIC, EXTENT_VERSION, len(header)), header, extent.payload)
    return b"".join((*parts, _checksum(parts)))


def unpack_extent(packed: bytes, *, is_opened: bool = False) -> Extent:
    """Return the extent in these bytes. Raises ExtentError unless every one of them is right.

    `is_opened`: a seal was opened, which has checked each byte in a fifth of the checksum's time.
    """
    if len(packed) < _PREFIX.size + _DIGEST_BYTES:
        raise ExtentError("cut off")
    magic, version, header_bytes = _PREFIX.unpack_from(packed)
    if magic != _MAGIC:
        raise ExtentError("no extent")
    if version != EXTENT_VERSION:
        raise ExtentError(f"of version {version}, not {EXTENT_VERSION}")
    view, start = memoryview(packed), _PREFIX.size + header_bytes
    if header_bytes > _MOST_HEADER_BYTES or start + _DIGEST_BYTES > len(packed):
        raise ExtentError("cut off")
    if not is_opened and _checksum((view[:-_DIGEST_BYTES],)) != packed[-_DIGEST_BYTES:]:
        raise ExtentError("its checksum is another one")
    payload = view[start:-_DIGEST_BYTES]
    try:
        header = _header(json.loads(packed[_PREFIX.size : start]))
    except (ValueError, KeyError, TypeError) as error:
        raise ExtentError(f"its header is none: {error!r}") from error
    if sum(map(math.prod, header.shapes)) != len(payload):
        raise ExtentError("its payload is not what its header says")
    return Extent(header=header, payload=payload)


def _checksum(parts: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _header(fields: dict[str, Any]) -> ExtentHeader:
    return ExtentHeader(
        fingerprint=str(fields["fingerprint"]),
        kind=fields["kind"],
        first=int(fields["first"]),
        parent=bytes.fromhex(fields["parent"]),
        hashes=tuple(bytes.fromhex(each) for each in fields["hashes"]),
        shapes=tuple(tuple(map(int, shape)) for shape in fields["shapes"]),
        owner=str(fields.get("owner", "")),
    )
