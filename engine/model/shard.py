"""The part of a model that one of several ranks holds, and what the ranks put together.

Tensor parallelism as in Shoeybi et al., 2019 (Megatron-LM): the projections into heads and inner
sizes are cut by their outputs, those back by their inputs, and a sum over the ranks follows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from outrider.kernels.layers.lora import LayerLora, Projection, project


class Collectives(Protocol):
    """Exchanges tensors between the ranks of a model; every rank makes the same calls in order."""

    def sum(self, rows: Tensor, *, in_order: bool) -> Tensor:
        """Return the sum of all ranks' tensors, on every rank. May overwrite `rows`.

        `in_order`: added in the order of the ranks, in float32, whatever the size is.
        """
        ...

    def gather(self, rows: Tensor) -> list[Tensor] | None:
        """Return all ranks' tensors, in order, on rank 0; None on the others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a model."""

    rank: int = 0
    """In [0, `count`)."""
    count: int = 1
    collectives: Collectives | None = None
    """None where there is one rank."""

    @property
    def is_whole(self) -> bool:
        """True if the model is in one piece."""
        return self.count == 1

    @property
    def name(self) -> str:
        """Return which part it is, "1of2" and so on."""
        return f"{self.rank}of{self.count}"

    def span(self, size: int) -> tuple[int, int]:
        """Return the first place of this rank's part of `size`, and the one behind it.

        All parts are as long as the first, but for the last ones of a size that is not divisible.
        """
        length = self.length(size)
        first = min(self.rank * length, size)
        return first, min(first + length, size)

    def length(self, size: int) -> int:
        """Return the places that each rank has for its part of `size`, perhaps with some spare."""
        return -(-size // self.count)

    def summed(self, rows: Tensor, *, in_order: bool) -> Tensor:
        """Return the ranks' sum of rows, [n, width]."""
        if self.collectives is None or not rows.numel():
            return rows
        return self.collectives.sum(rows, in_order=in_order)


WHOLE: Final = Shard()


class SummedProduct:
    """The product behind attention: [n, part of the inputs] -> [n, outputs].

    Each rank has some heads, so some inputs of the product.
    """

    __slots__ = ("_in_order", "_product", "_shard")

    def __init__(
        self, product: Callable[[Tensor], Tensor], shard: Shard, *, in_order: bool
    ) -> None:
        """`in_order`: see `Collectives.sum`."""
        self._product = product
        self._shard = shard
        self._in_order = in_order

    def __call__(self, x: Tensor, lora: LayerLora | None = None) -> Tensor:
        """Return the whole product, on every rank, with what the rows' adapters add to it."""
        part = project(self._product, x, Projection.OUTPUT, lora)
        return self._shard.summed(part, in_order=self._in_order)


class _PartialMlp(Protocol):
    def __call__(self, rows: Tensor, *, is_fused: bool, lora: LayerLora | None = None) -> Tensor:
        """Return a part of the rows' outputs."""


class SummedMlp:
    """A feed-forward layer, or a mixture of them, of which each rank has a part of the inside."""

    __slots__ = ("_in_order", "_mlp", "_shard")

    def __init__(self, mlp: _PartialMlp, shard: Shard, *, in_order: bool) -> None:
        """`in_order`: see `Collectives.sum`."""
        self._mlp = mlp
        self._shard = shard
        self._in_order = in_order

    def __call__(self, rows: Tensor, *, is_fused: bool, lora: LayerLora | None = None) -> Tensor:
        """Return the rows' whole outputs, on every rank. [n, width] -> [n, width]."""
        part = self._mlp(rows, is_fused=is_fused, lora=lora)
        return self._shard.summed(part, in_order=self._in_order)
