"""Schemes: what a model's products compute with, at every number of rows, prompts included.

int8: weights in 8 bits with a scale for each output, rows in 8 bits. int4: weights in 4 bits with a
scale for each group of columns, rows in 8; the product with the table of tokens is as in int8.
Narrow weights stay as they are in both (`MIN_ROUNDED_SIDE`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.model.freed_memory import give_back_freed_memory
from outrider.engine.model.quantised.formats import (
    INT4_GROUP_SIZES,
    MIN_ROUNDED_SIDE,
    Rounding,
    WeightFormat,
)
from outrider.engine.model.quantised.kept import KeptWeights
from outrider.engine.model.weights import CheckpointReader
from outrider.kernels.layers.row_invariant_linear import rounds_rows
from outrider.kernels.quantised.stored_weight import NUMBERS, Number, StoredWeight
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int4, rounded_to_int8

logger = logging.getLogger(__name__)

Weight = Tensor | QuantisedWeight | StoredWeight
Read = Callable[[], Tensor | StoredWeight]
_HEAD = "lm_head.weight"


class WeightSource(Protocol):
    """Hands a product its weight. `scheme`: how it is rounded, None for not at all."""

    scheme: str | None
    num_rounded: int
    """Numbers that are held in few bits."""
    num_bytes: int
    """Bytes of them and of their scales."""

    @property
    def held(self) -> str | None:
        """Name what products hold as it is stored, None for plain numbers only."""
        ...

    def weight(self, name: str, read: Read, tensors: Sequence[str]) -> Weight:
        """Return a product's weight, as `read` has it or rounded.

        name: the product's, once in a model; tensors: names in the checkpoint that `read` reads.
        """
        ...


class StoredWeights:
    """Weights as the checkpoint has them: plain, or in few bits where products hold them so."""

    scheme: str | None = None

    def __init__(self, *, is_exact: bool = False) -> None:
        """is_exact: rows are not rounded where they are multiplied with weights in few bits."""
        self._is_exact = is_exact
        self._numbers: Counter[Number] = Counter()
        self._rounds_rows = False
        self.has_head = False
        """True if the head stays as it is stored."""
        self.num_rounded = 0
        """Numbers that are held as they are stored, in few bits."""
        self.num_bytes = 0
        """Bytes of them and of their scales."""

    @property
    def held(self) -> str | None:
        """Name what products hold, such as "stored int4"; None for plain numbers only."""
        found = [number for number in NUMBERS if self._numbers[number]]
        rows = ", rows in int8" if self._rounds_rows else ""
        return f"stored {'+'.join(found)}{rows}" if found else None

    def weight(self, name: str, read: Read, tensors: Sequence[str]) -> Weight:
        """Read it."""
        found = read()
        if isinstance(found, StoredWeight):
            found = replace(found, keeps_rows=self._is_exact)
            self._rounds_rows |= rounds_rows(found, found.codes.device)
            self.has_head |= name == _HEAD
            self._numbers[found.number] += 1
            self.num_rounded += found.codes.numel()
            self.num_bytes += found.num_bytes
        return found

    def finish(self) -> None:
        """Tell what stays as it is stored."""
        if self._numbers:
            logger.info(
                "weights stay as they are stored: %s",
                ", ".join(f"{count} of {number}" for number, count in self._numbers.items()),
            )


class RoundedWeights:
    """Weights that are rounded as they are read, or taken from where they were kept."""

    def __init__(self, reader: CheckpointReader, rounding: Rounding) -> None:
        self.scheme: str | None = rounding.scheme
        self._rounding = rounding
        self._reader = reader
        self._indivisible: list[str] = []
        self._narrow: list[str] = []
        self._kept = KeptWeights(
            rounding.keep_in, checkpoint=reader.rounded_name, scheme=rounding.scheme
        )
        self.num_rounded = 0
        """Numbers that are held rounded."""
        self.has_head = False
        """True if the head is rounded."""
        self.num_bytes = 0
        """Bytes of them and of their scales."""

    @property
    def held(self) -> None:
        """Nothing stays as it is stored."""
        return None

    def weight(self, name: str, read: Read, tensors: Sequence[str]) -> Weight:
        """Return it rounded, or as it is if it is narrow; what is kept is not read again."""
        found = self._kept.get(name)
        if found is None:
            weight = read()
            assert isinstance(weight, Tensor), "the reader decodes what is rounded again"
            if min(weight.shape) < MIN_ROUNDED_SIDE:
                self._narrow.append(f"{name} {list(weight.shape)}")
                return weight
            found = self._rounded(name, weight)
            del weight  # before what keeping and packing take
            give_back_freed_memory()
            self._kept.put(name, found)
        else:
            for tensor in tensors:
                self._reader.skip(tensor)
            found = found.to(self._reader.device)
            self._reader.num_parameters += found.codes.numel() if tensors else 0
        self.has_head |= name == _HEAD
        self.num_rounded += found.codes.numel()
        self.num_bytes += found.num_bytes
        return found

    def _rounded(self, name: str, weight: Tensor) -> QuantisedWeight:
        if self._rounding.scheme == "int8" or name == _HEAD:
            return rounded_to_int8(weight)
        for group_size in INT4_GROUP_SIZES:
            if weight.shape[1] % group_size == 0:
                return rounded_to_int4(weight, group_size=group_size)
        self._indivisible.append(f"{name} {list(weight.shape)}")
        return rounded_to_int8(weight)

    def finish(self) -> None:
        """Write the last ones; tell which weights are not as asked for."""
        self._kept.flush()
        if self._narrow:
            logger.info(
                "%d weights are not rounded: they have a side below %d first=%s",
                len(self._narrow),
                MIN_ROUNDED_SIDE,
                self._narrow[0],
            )
        if self._indivisible:
            logger.warning(
                "%d weights have 8 bits, not 4: groups of %s do not divide their columns first=%s",
                len(self._indivisible),
                INT4_GROUP_SIZES[-1],
                self._indivisible[0],
            )


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


def stored_dtype(weights: WeightFormat | None, dtype: torch.dtype) -> torch.dtype:
    """Return what activations are computed in where weights stay as they are stored.

    dtype: the checkpoint's own; half precision gives way, because their products have bfloat16.
    """
    stays = weights is not None and weights.can_stay
    return torch.bfloat16 if stays and dtype == torch.float16 else dtype
