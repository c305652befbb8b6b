"""Tensors as they lie in a checkpoint, and what makes numbers of them."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from outrider.kernels.quantised.stored_weight import Number, StoredWeight


class StoredTensors(Protocol):
    """The tensors of a checkpoint by name."""

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        ...

    def raw(self, name: str) -> Tensor:
        """Return a tensor as it is stored. Raises ValueError for a missing one."""
        ...


class WeightDecoder(Protocol):
    """The way from a checkpoint's quantised weights back to numbers."""

    ignored: ClassVar[tuple[str, ...]]
    """Ends of the names of tensors that it does not need, such as scales of activations."""

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Return a weight's numbers, decoded if they are quantised.

        None where its name alone says that it is stored plainly.

        Raises ValueError, with the tensor's name, for tensors that do not fit together.
        """
        ...

    def packed(self, stored: StoredTensors, name: str) -> StoredWeight | None:
        """Return a weight as it is stored; None for one that has to be decoded, or is not coded.

        Raises as `decode` does.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Whole numbers of a weight, with scales for groups of its columns."""

    number: Number
    codes: Tensor
    """uint8 [out, in]."""
    scales: Tensor
    """float32 [out, groups]."""
    zeros: Tensor
    """int16 [out, groups], the codes that mean 0."""
    group_of: Tensor | None = None
    """The group of each column; None where they are in order."""

    def decoded(self, name: str) -> Tensor:
        """Return float32 [out, in]. Raises ValueError, with the tensor's name."""
        width = self.codes.shape[1]
        zeros = per_group(self.zeros, width, name, self.group_of)
        scales = per_group(self.scales, width, name, self.group_of)
        return (self.codes.float() - zeros) * scales

    def packed(self, name: str) -> StoredWeight | None:
        """Return it as products hold it; None where columns of a group are not neighbours."""
        width, groups = self.codes.shape[1], self.scales.shape[1]
        if self.group_of is not None:
            expect_group_of(self.group_of, width, groups, name)
        expect_whole_groups(width, groups, name)
        if self.group_of is not None:
            in_order = torch.arange(width) // (width // groups)
            if not torch.equal(self.group_of.long(), in_order):
                return None
        return StoredWeight(
            number=self.number, codes=self.codes, scales=self.scales, zeros=self.zeros
        )


def expect(fits: bool, name: str, why: str) -> None:
    """Raise ValueError unless a tensor fits."""
    if not fits:
        raise ValueError(f"the quantised tensor {name} cannot be decoded: {why}")


def words_of(stored: StoredTensors, name: str, part: str) -> Tensor:
    """Return the packed integers beside a weight, int32 [n, words]. Raises ValueError."""
    words = stored.raw(f"{stem_of(name)}.{part}")
    expect(words.dtype == torch.int32 and words.dim() == 2, name, f"{part} is no int32 matrix")
    return words


def scales_of(stored: StoredTensors, name: str, part: str) -> Tensor:
    """Return the scales beside a weight in float32. Raises ValueError unless all are finite."""
    scales = stored.raw(f"{stem_of(name)}.{part}")
    expect(scales.dtype.is_floating_point, name, f"{part} is stored as {scales.dtype}")
    scales = scales.float()
    expect(bool(scales.isfinite().all()), name, f"{part} holds numbers that are not finite")
    return scales


def expect_groups(scales: Tensor, width: int, group_size: int | None, name: str) -> None:
    """Raise ValueError unless scales [rows, groups] are as many as config.json's groups.

    `group_size`: None where it is not known; -1 for one group.
    """
    if group_size is None:
        return
    groups = 1 if group_size == -1 else -(-width // group_size)
    expect(
        scales.dim() == 2 and scales.shape[1] == groups,
        name,
        f"its scales {list(scales.shape)} do not fit: config.json's groups of {group_size} "
        f"columns make {groups} of {width}",
    )


def stem_of(name: str) -> str:
    """Return what stands before ".weight" in a name."""
    return name.removesuffix(".weight")


def per_group(scales: Tensor, width: int, name: str, group_of: Tensor | None = None) -> Tensor:
    """Spread [rows, groups] to [rows, width]: each for the columns of its group.

    `group_of`: the group of each column, where they are not in order. Raises ValueError.
    """
    groups = scales.shape[-1]
    if group_of is not None:
        expect_group_of(group_of, width, groups, name)
        return scales[:, group_of.long()]
    expect_whole_groups(width, groups, name)
    return scales.repeat_interleave(width // groups, dim=-1)


def expect_group_of(group_of: Tensor, width: int, groups: int, name: str) -> None:
    """Raise ValueError unless each column has a group."""
    known = group_of.shape == (width,) and bool(((group_of >= 0) & (group_of < groups)).all())
    expect(known, name, "g_idx does not name a group for each column")


def expect_whole_groups(width: int, groups: int, name: str) -> None:
    """Raise ValueError unless groups have equally many columns."""
    expect(
        groups > 0 and width % groups == 0,
        name,
        f"{width} columns are no whole number of {groups} groups",
    )
