"""Schemes: what a model's products compute with, at every number of rows, prompts included."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.model.quantised.formats import Rounding
from engine.model.quantised.kept import KeptWeights
from engine.model.weights import CheckpointReader
from kernels.quantised.weight import QuantisedWeight, rounded_to_int8

Weight = Tensor | QuantisedWeight


class WeightSource(Protocol):
    """Hands a product its weight."""

    def weight(self, name: str, read: Callable[[], Tensor], tensors: Sequence[str]) -> Weight:
        """Return a product's weight, as `read` has it or rounded.

        name: the product's, once in a model; tensors: names in the checkpoint that `read` reads.
        """
        ...


class StoredWeights:
    """Weights in the model's own precision."""

    scheme: str | None = None

    def weight(self, name: str, read: Callable[[], Tensor], tensors: Sequence[str]) -> Weight:
        """Read it."""
        return read()


class RoundedWeights:
    """Weights of 8 bits with a scale for each output.

    Rounded as they are read, one after the other, or taken from where they were kept.
    """

    def __init__(self, reader: CheckpointReader, rounding: Rounding) -> None:
        self.scheme: str | None = rounding.scheme
        self._reader = reader
        self._kept = KeptWeights(
            rounding.keep_in, checkpoint=reader.fingerprint, scheme=rounding.scheme
        )
        self.num_rounded = 0
        """Numbers that are held rounded."""
        self.num_bytes = 0
        """Bytes of them and of their scales."""

    def weight(self, name: str, read: Callable[[], Tensor], tensors: Sequence[str]) -> Weight:
        """Return it rounded; only where it is not kept is the checkpoint read."""
        found = self._kept.get(name)
        if found is None:
            found = rounded_to_int8(read())
            self._kept.put(name, found)
        else:
            for tensor in tensors:
                self._reader.skip(tensor)
            found = found.to(self._reader.device)
            self._reader.num_parameters += found.codes.numel() if tensors else 0
        self.num_rounded += found.codes.numel()
        self.num_bytes += found.codes.nbytes + found.scales.nbytes
        return found

    def finish(self) -> None:
        """Write the last ones."""
        self._kept.flush()


def computing_dtype(
    rounding: Rounding | None, dtype: torch.dtype, *, is_asked: bool
) -> torch.dtype:
    """Return what activations are computed in.

    is_asked: whether the user named `dtype`. Raises ValueError where the two exclude each other.
    """
    if rounding is None:
        return dtype
    if is_asked and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"quantised weights ({rounding.scheme}) are computed with in bfloat16, not in {name}: "
            "leave engine.dtype at auto, or models.quantize off."
        )
    return torch.bfloat16
