"""A router's two files: JSON for people and sizes, safetensors for numbers. Never pickle.

- `router.json`: format and version, sizes of the features, heads, threshold, the pair of models,
  calibration, how it was trained, and two checksums: of the weights and of this file's own values;
- `router.safetensors`: float arrays, and the hashes of the prompts that it was trained on.

The checksums find damage and careless editing. They are no signature: write access to the folder
is enough to write a valid router.
"""

import hashlib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

CONFIG_NAME: Final = "router.json"
WEIGHTS_NAME: Final = "router.safetensors"
FORMAT: Final = "outrider-router"
FORMAT_VERSION: Final = 4
_READ_VERSIONS: Final = (2, 3, 4)  # 2 has no sentence encoder, 3 no more than two tiers
_MAX_CONFIG_BYTES: Final = 2**20
_MAX_WEIGHTS_BYTES: Final = 2**26
_ARRAY_TYPES: Final = (np.dtype("<f4"), np.dtype("<f8"), np.dtype("<u8"))

_Record = TypeVar("_Record")


class RouterFileError(ValueError):
    """The folder does not hold a router that this version can read. The message says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: {why}. A router is the folder that `outrider router train` writes."
        )
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterFiles:
    """Contents of a router's two files, checked for damage but not for validity."""

    config: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]


def write_files(folder: Path, files: RouterFiles) -> None:
    """Write both files, with format, version and checksums; the folder is made if missing.

    Raises ValueError for numbers that JSON does not have (NaN, infinity).
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = save_safetensors(dict(files.arrays))
    config = {"format": FORMAT, "version": FORMAT_VERSION, **files.config}
    config["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    config["config_sha256"] = _config_sha256(config)
    text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / WEIGHTS_NAME).write_bytes(weights)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def read_files(folder: Path) -> RouterFiles:
    """Read both files; raises RouterFileError for what is not a router of this format."""
    path = folder / CONFIG_NAME
    config = _read_config(path)
    arrays = _read_weights(folder / WEIGHTS_NAME, config.pop("weights_sha256"))
    return RouterFiles(config=config, arrays=arrays)


def record_from(kind: type[_Record], values: object) -> _Record:
    """A dataclass from JSON values; raises ValueError unless names and types are exactly its own.

    Fields may be numbers, strings, Literals, None, tuples of these, and dataclasses.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} must be a JSON object, not {type(values).__name__}")
    hints = get_type_hints(kind)
    known = {entry.name for entry in fields(cast("Any", kind))}
    if set(values) != known:
        raise ValueError(f"{kind.__name__} must name {sorted(known)}, not {sorted(values)}")
    return kind(**{name: _value_from(hints[name], values[name], name) for name in known})


def _value_from(kind: Any, value: object, name: str) -> Any:
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        (kind,) = (option for option in options if option is not type(None))
        return _value_from(kind, value, name)
    if origin is Literal:
        if value not in options:
            raise ValueError(f"{name}={value!r} must be one of {options}")
        return value
    if origin is tuple:
        return _tuple_from(options, value, name)
    if is_dataclass(kind):
        return record_from(cast("type[Any]", kind), value)
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r} must be a string")
        return value
    return _number_from(kind, value, name)


def _tuple_from(options: tuple[Any, ...], value: object, name: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, not {value!r}")
    kinds = (options[0],) * len(value) if options[1:] == (...,) else options
    if len(value) != len(kinds):
        raise ValueError(f"{name} has {len(value)} entries, not {len(kinds)}")
    return tuple(_value_from(kind, entry, name) for kind, entry in zip(kinds, value, strict=True))


def _number_from(kind: type, value: object, name: str) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(cast("float", value)):
        raise ValueError(f"{name}={value!r} is not a finite number")
    number = cast("float", value)
    if kind is float:
        return float(number)
    if number != int(number):
        raise ValueError(f"{name}={value!r} must be a whole number")
    return int(number)


def _config_sha256(config: Mapping[str, Any]) -> str:
    """Return the digest of the values, so that spaces and line ends do not matter."""
    values = {name: value for name, value in config.items() if name != "config_sha256"}
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            raise RouterFileError(path, f"{size_bytes} bytes, at most {max_bytes} are read")
        return path.read_bytes()
    except OSError as error:
        raise RouterFileError(path, error.strerror or "cannot be read") from error


def _read_config(path: Path) -> dict[str, Any]:
    content = _read_bytes(path, _MAX_CONFIG_BYTES)
    try:
        config = json.loads(content, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RouterFileError(path, f"not JSON ({error})") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RouterFileError(path, f'not a router: "format" must be "{FORMAT}"')
    version = config.get("version")
    if version not in _READ_VERSIONS:
        hint = "; train the router again with this version" if version == 1 else ""
        available = ", ".join(map(str, _READ_VERSIONS))
        raise RouterFileError(path, f"unknown version {version}; available: {available}{hint}")
    for name in ("weights_sha256", "config_sha256"):
        if not isinstance(config.get(name), str):
            raise RouterFileError(path, f'"{name}" is missing')
    if _config_sha256(config) != config["config_sha256"]:
        raise RouterFileError(path, "was changed after it was written (SHA-256 differs)")
    for name in ("format", "version", "config_sha256"):
        del config[name]
    return config


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _read_weights(path: Path, sha256: str) -> dict[str, NDArray[Any]]:
    content = _read_bytes(path, _MAX_WEIGHTS_BYTES)
    try:
        arrays: dict[str, NDArray[Any]] = load_safetensors(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise RouterFileError(path, f"not safetensors ({error})") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RouterFileError(path, f"does not belong to its {CONFIG_NAME} (SHA-256 differs)")
    for name, array in arrays.items():
        if array.dtype not in _ARRAY_TYPES:
            raise RouterFileError(path, f"{name} is {array.dtype}, not float32, float64 or uint64")
    return arrays
