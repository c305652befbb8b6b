"""The first part of a GGUF file: what it says of the model, and where its tensors lie.

A file is not trusted: every count and length is checked against the bytes that are there, before
anything of that size is made. Without torch: the gateway's process reads headers, too.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from outrider.engine.errors import UnsupportedModelError

_MAGIC: Final = b"GGUF"
_MIN_BYTES: Final = 24
_VERSIONS: Final = (2, 3)
_MAX_FIELDS: Final = 10_000
_MAX_TENSORS: Final = 200_000
_MAX_NAME_BYTES: Final = 512
_MAX_TEXT_BYTES: Final = 16 << 20
_MAX_DIMENSIONS: Final = 4
_MAX_SIZE: Final = 1 << 40
_MAX_VALUES: Final = 1 << 22  # of all arrays: a large vocabulary has a million of tokens and merges
_STRING, _ARRAY = 8, 9
_SCALARS: Final[Mapping[int, str]] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


class TensorType(NamedTuple):
    """A way to store numbers: so many in a block of so many bytes."""

    name: str
    block_numbers: int
    block_bytes: int


# By their numbers in the format.
TENSOR_TYPES: Final[Mapping[int, TensorType]] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in the file."""

    kind: int
    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    first_byte: int
    """In the file."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in the file."""
        return _num_bytes(self.kind, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The contents of a GGUF file's header."""

    path: Path
    fields: Mapping[str, Any]
    """Values by name, lists for arrays."""
    tensors: Mapping[str, StoredTensor]
    """By llama.cpp's names."""


def read_header(path: Path) -> GgufHeader:
    """Read a file's header. Raises UnsupportedModelError for what is no sound GGUF file."""
    try:
        with path.open("rb") as file:
            begin = file.read(_MIN_BYTES)
            if len(begin) < _MIN_BYTES or not begin.startswith(_MAGIC):
                raise _BrokenFileError(f"it does not begin as a GGUF file; {_way_out(begin)}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
    except (OSError, MemoryError, _BrokenFileError) as error:
        raise UnsupportedModelError(f"{path} cannot be read as GGUF: {error}.") from error


def _way_out(begin: bytes) -> str:
    """Say what a file is that begins otherwise, and what to do."""
    if begin.startswith(b"version https://git"):
        return "it is a pointer of Git LFS: run `git lfs pull` in its folder"
    if begin.startswith((b"tjgg", b"fmgg", b"lmgg")):  # GGJT, GGMF, GGML, as they lie in files
        return "it is of llama.cpp's old format: convert it, or download it as GGUF"
    if begin.lstrip()[:1] in (b"<", b"{"):
        return "it is a page or a message of a server: download it again"
    return "it was cut short or is another format: download it again"


class _BrokenFileError(Exception):
    """What is wrong with a file, as the end of a sentence."""


class _Parser:
    """Reads a header from its beginning to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._place = 4
        self._num_values = 0

    def header(self) -> GgufHeader:
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise _BrokenFileError(f"it is of version {version}; read are versions 2 and 3")
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_fields = self._count("fields", _MAX_FIELDS)
        fields = dict(self._field() for _ in range(num_fields))
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise _BrokenFileError(f"general.alignment is {str(alignment)[:50]}")
        begin = -(-self._place // alignment) * alignment
        tensors = {name: self._placed(name, each, begin) for name, each in described}
        if len(tensors) < num_tensors:
            raise _BrokenFileError("two of its tensors have the same name")
        return GgufHeader(path=self._path, fields=fields, tensors=tensors)

    # ---- parts ----------------------------------------------------------------------------

    def _field(self) -> tuple[str, Any]:
        name = self._name()
        kind = self._scalar("<I")
        return name, self._array(name) if kind == _ARRAY else self._value(name, kind)

    def _array(self, name: str) -> list[Any]:
        kind = self._scalar("<I")
        if kind != _STRING and kind not in _SCALARS:
            raise _BrokenFileError(f"the array {name} is of type {kind}, which is not read")
        smallest = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        count = self._scalar("<Q")
        if count * smallest > len(self._data) - self._place:
            raise _BrokenFileError(f"the array {name} of {count} values is cut short")
        self._num_values += count
        if self._num_values > _MAX_VALUES:
            raise _BrokenFileError(f"its arrays have more than {_MAX_VALUES} values, up to {name}")
        if kind == _STRING:
            return [self._text(_MAX_TEXT_BYTES) for _ in range(count)]
        form = f"<{count}{_SCALARS[kind][1:]}"
        values = struct.unpack_from(form, self._data, self._place)
        self._place += struct.calcsize(form)
        return list(values)

    def _value(self, name: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(_MAX_TEXT_BYTES)
        if kind not in _SCALARS:
            raise _BrokenFileError(f"{name} is of type {kind}, which is not read")
        return self._scalar(_SCALARS[kind])

    def _tensor(self) -> tuple[str, StoredTensor]:
        name = self._name()
        num_dimensions = self._scalar("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _BrokenFileError(f"the tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dimensions))[::-1]
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        if not all(1 <= size <= _MAX_SIZE for size in shape):
            raise _BrokenFileError(f"the tensor {name} has the shape {list(shape)}")
        if kind not in TENSOR_TYPES:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            raise _BrokenFileError(
                f"the tensor {name} is of type {kind}, which is not read; {known} are"
            )
        block = TENSOR_TYPES[kind].block_numbers
        if shape[-1] % block:
            raise _BrokenFileError(
                f"the tensor {name} has rows of {shape[-1]} numbers, which blocks of {block} "
                f"({TENSOR_TYPES[kind].name}) do not divide"
            )
        return name, StoredTensor(kind=kind, shape=shape, first_byte=offset)

    def _placed(self, name: str, tensor: StoredTensor, begin: int) -> StoredTensor:
        first = begin + tensor.first_byte
        if first + tensor.num_bytes > len(self._data):
            raise _BrokenFileError(
                f"the tensor {name} ends at byte {first + tensor.num_bytes} of a file of "
                f"{len(self._data)}: it was cut short"
            )
        return StoredTensor(kind=tensor.kind, shape=tensor.shape, first_byte=first)

    # ---- bytes ----------------------------------------------------------------------------

    def _count(self, name: str, most: int) -> int:
        count = self._scalar("<Q")
        if count > most:
            raise _BrokenFileError(f"it says that it has {count} {name}; at most {most} are read")
        return int(count)

    def _scalar(self, form: str) -> Any:
        end = self._place + struct.calcsize(form)
        if end > len(self._data):
            raise _BrokenFileError(f"it was cut short at byte {len(self._data)}")
        (value,) = struct.unpack_from(form, self._data, self._place)
        self._place = end
        return value

    def _name(self) -> str:
        place, name = self._place, self._text(_MAX_NAME_BYTES)
        if not name.isprintable():
            raise _BrokenFileError(f"the name at byte {place} has characters that none has")
        return name

    def _text(self, most: int) -> str:
        length = self._scalar("<Q")
        end = self._place + length
        if length > most or end > len(self._data):
            raise _BrokenFileError(
                f"at byte {self._place} it has a text of {length} bytes, which is too long"
            )
        text = self._data[self._place : end].decode(errors="replace")
        self._place = end
        return text


def _num_bytes(kind: int, shape: tuple[int, ...]) -> int:
    stored = TENSOR_TYPES[kind]
    blocks = shape[-1] // stored.block_numbers
    for size in shape[:-1]:
        blocks *= size
    return blocks * stored.block_bytes
