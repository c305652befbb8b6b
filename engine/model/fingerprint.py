"""Tell checkpoints apart without reading gigabytes: 16 hexadecimal digits of a folder.

What a router has learnt of one pair of models says nothing of another pair. The fingerprint covers
the configuration, every tensor's name, dtype and shape, and the numbers themselves: all of them in
files below 64 MiB, samples of every tensor in larger ones. It is there to notice a mix-up and does
not resist forgery. Standard library only: the gateway's process, without torch, uses it too.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO, Final

# They name tools, places and defaults, not the function; a tensor's dtype stands in its file.
_IGNORED: Final = frozenset(
    {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
)
_WHOLE_BELOW_BYTES: Final = 64 * 2**20
_PIECE_BYTES: Final = 4096
_NUM_PIECES: Final = 256
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit


def checkpoint_fingerprint(folder: Path) -> str:
    """The fingerprint of a folder with config.json and *.safetensors; file names do not matter.

    Some milliseconds for a small checkpoint, well below a second for any. Raises ValueError naming
    the file that is missing or is not what its name says.
    """
    config_path = folder / "config.json"
    config = _read_json(config_path, config_path.read_bytes() if config_path.is_file() else None)
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} is not a JSON object")
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, {name: value for name, value in config.items() if name not in _IGNORED})
    paths = sorted(folder.glob("*.safetensors"))
    if (gguf := folder / "model.gguf").is_file():
        digest.update(_sampled(gguf))
    elif not paths:
        raise ValueError(f"{folder} holds no *.safetensors: it is not a checkpoint")
    # The order of the parts must not depend on how the files are named.
    for part in sorted(_file_digest(path) for path in paths):
        digest.update(part)
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start = 8 + header_bytes
        if header_bytes > _MAX_HEADER_BYTES or start > size_bytes:
            raise ValueError(f"{path} is not a safetensors file")
        header = _read_json(path, file.read(header_bytes))
        tensors = _tensors(path, header, size_bytes - start)
        _add(digest, [tensors, size_bytes - start])
        if size_bytes < _WHOLE_BELOW_BYTES:
            while chunk := file.read(2**20):
                digest.update(chunk)
        else:
            for place in _places(tensors, size_bytes - start):
                digest.update(_piece(file, start + place))
    return digest.digest()


def _sampled(path: Path) -> bytes:
    """Return a digest of a file of another format: all of it, or its size and many pieces."""
    size_bytes = path.stat().st_size
    digest = hashlib.blake2b(str(size_bytes).encode(), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_WHOLE_BELOW_BYTES if size_bytes < _WHOLE_BELOW_BYTES else 2**20))
        if size_bytes >= _WHOLE_BELOW_BYTES:
            for place in _places({}, size_bytes):
                digest.update(_piece(file, place))
    return digest.digest()


def _tensors(path: Path, header: object, data_bytes: int) -> dict[str, Any]:
    """The header without its metadata; raises ValueError unless the data hold all tensors."""
    tensors: dict[str, Any] = header if isinstance(header, dict) else {"": header}
    tensors.pop("__metadata__", None)
    try:
        is_sound = all(
            0 <= entry["data_offsets"][0] <= entry["data_offsets"][1] <= data_bytes
            for entry in tensors.values()
        )
    except (KeyError, IndexError, TypeError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{path} is not a safetensors file, or was cut off")
    return tensors


def _places(tensors: dict[str, Any], data_bytes: int) -> list[int]:
    """Return ascending offsets of the pieces to read: evenly spaced, and one in each tensor."""
    last = data_bytes - _PIECE_BYTES
    places = {last * index // (_NUM_PIECES - 1) for index in range(_NUM_PIECES)}
    for entry in tensors.values():
        begin, end = entry["data_offsets"]
        places.add(min(last, (begin + end) // 2))
    return sorted(places)


def _piece(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.read(_PIECE_BYTES)


def _add(digest: "hashlib.blake2b", value: object) -> None:
    digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")


def _read_json(path: Path, content: bytes | None) -> Any:
    if content is None:
        raise ValueError(f"{path} is missing: the folder is not a checkpoint")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
