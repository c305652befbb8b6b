"""Rounded weights on disk, so that a checkpoint is rounded once.

A folder for each checkpoint and scheme; a file for each layer, written whole and then renamed. A
file that is not what it should be is made anew. Nothing here ends a start: without room or rights
the weights are rounded again next time.
"""

import logging
import os
import shutil
import zlib
from pathlib import Path
from typing import Final, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.kernels.quantised.weight import (
    Bits,
    QuantisedWeight,
    packed_nibbles,
    unpacked_nibbles,
)

logger = logging.getLogger(__name__)

# Raised whenever rounding gives other numbers than before.
_VERSION: Final = "3"
_SPARE_BYTES: Final = 1 << 30  # left free on the disk
_LAYERS: Final = "model.layers."


class KeptWeights:
    """Weights by name, in the order of the layers. `folder` None: nothing is kept."""

    def __init__(self, folder: Path | None, *, checkpoint: str, scheme: str) -> None:
        """checkpoint: its fingerprint."""
        self._label = {"checkpoint": checkpoint, "scheme": scheme, "version": _VERSION}
        name = "-".join(self._label.values())
        self._folder = None if folder is None else folder / name
        self._part = ""
        self._found: dict[str, QuantisedWeight] = {}
        self._new: dict[str, Tensor] = {}
        self._new_shapes: dict[str, str] = {}
        self._has_warned = False

    def get(self, name: str) -> QuantisedWeight | None:
        """Return a weight that was kept; None for another."""
        if (part := _part_of(name)) != self._part:
            self.flush()
            self._part, self._found = part, self._load(part)
        return self._found.pop(name, None)

    def put(self, name: str, weight: QuantisedWeight) -> None:
        """Keep a weight; it is written when the next layer begins."""
        if self._folder is not None:
            self._new |= _tensors(name, weight)
            self._new_shapes[name] = f"{weight.bits} {weight.group_size}"

    def flush(self) -> None:
        """Write what is new of the present layer."""
        tensors, self._new, self._found = self._new, {}, {}
        shapes, self._new_shapes = self._new_shapes, {}
        if not tensors or self._folder is None:
            return
        try:
            self._write(self._folder, tensors, shapes)
        except (OSError, SafetensorError) as error:
            self._folder = None
            logger.warning(
                "rounded weights are not kept, so the next start rounds them again error=%s", error
            )

    # ---- files ----------------------------------------------------------------------------

    def _write(self, folder: Path, tensors: dict[str, Tensor], shapes: dict[str, str]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if shutil.disk_usage(folder).free < num_bytes + _SPARE_BYTES:
            raise OSError(f"{folder} has no room for {num_bytes} bytes with a GiB to spare")
        place = folder / f"{self._part}.safetensors"
        draft = place.with_suffix(f".{os.getpid()}.tmp")
        about = self._label | {"crc32": _checksum(tensors)} | shapes
        try:
            save_file(tensors, draft, metadata=about)
            draft.replace(place)
        finally:
            draft.unlink(missing_ok=True)

    def _load(self, part: str) -> dict[str, QuantisedWeight]:
        place = None if self._folder is None else self._folder / f"{part}.safetensors"
        if place is None or not place.is_file():
            return {}
        try:
            with safe_open(place, framework="pt", device="cpu") as file:
                about: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return self._weights(about, tensors)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            if not self._has_warned:
                logger.warning("kept weights are made anew path=%s reason=%s", place, error)
            self._has_warned = True
            return {}

    def _weights(
        self, about: dict[str, str], tensors: dict[str, Tensor]
    ) -> dict[str, QuantisedWeight]:
        """Raises ValueError or KeyError for what was not written for this checkpoint and scheme."""
        if any(about.pop(name, "") != value for name, value in self._label.items()):
            raise ValueError("they are another checkpoint's, or another scheme's")
        if about.pop("crc32", "") != _checksum(tensors):
            raise ValueError("they are damaged")
        found = {}
        for name, shape in about.items():
            bits, group_size = map(int, shape.split())
            codes = tensors[f"{name}.codes"]
            found[name] = QuantisedWeight(
                codes=unpacked_nibbles(codes) if bits == 4 else codes,
                scales=tensors[f"{name}.scales"].clone(),  # not the file's map, which would stay
                zeros=tensors.get(f"{name}.zeros"),
                bits=cast(Bits, bits),
                group_size=group_size,
            )
        return found


def _part_of(name: str) -> str:
    """Return the name of the file that a weight is kept in: its layer's, or one for the others."""
    if name.startswith(_LAYERS):
        return "layer-" + name.removeprefix(_LAYERS).partition(".")[0]
    return "others"


def _tensors(name: str, weight: QuantisedWeight) -> dict[str, Tensor]:
    """Return what a file holds of a weight."""
    codes = packed_nibbles(weight.codes) if weight.bits == 4 else weight.codes
    parts = {"codes": codes, "scales": weight.scales}
    if weight.zeros is not None:
        parts["zeros"] = weight.zeros
    return {f"{name}.{part}": tensor.cpu().contiguous() for part, tensor in parts.items()}


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Return a number for all the bytes, in the order of the names."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].numpy(), total)  # type: ignore[arg-type]
    return f"{total:08x}"
