"""Read one rank's part of a checkpoint: of each tensor the rows or columns that the rank holds.

Files are mapped into memory, so of plain tensors only these rows or columns are read.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from outrider.engine.model.config import ExpertsConfig, ModelConfig
from outrider.engine.model.shard import Shard
from outrider.engine.model.shared_config import kv_head_span
from outrider.engine.model.weights import CheckpointReader
from outrider.kernels.quantised.stored_weight import StoredWeight

_LAYER = re.compile(r"model\.layers\.\d+\.(.*)")
_WHOLE_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a tensor that a rank reads."""

    dim: int = 0
    """The dimension that is cut."""
    size: int = 0
    """Its whole size."""
    spans: tuple[tuple[int, int], ...] = ()
    """The places along it that are put together."""
    length: int = 0
    """The length of the part; zeros stand behind what there is."""
    is_elsewhere: bool = False
    """The tensor is read by another rank alone, which adds it; here it is zero."""

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the checkpoint of a part that has `shape`."""
        if self.is_elsewhere:
            return shape
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    @property
    def num_spare(self) -> int:
        """Places of zeros at the end."""
        return self.length - sum(end - first for first, end in self.spans)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor, a view of it where it can be."""
        if self.is_elsewhere:
            return torch.zeros_like(tensor)
        parts = [tensor.narrow(self.dim, first, end - first) for first, end in self.spans]
        if self.num_spare:
            shape = (*tensor.shape[: self.dim], self.num_spare, *tensor.shape[self.dim + 1 :])
            parts.append(tensor.new_zeros(shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def of_stored(self, weight: StoredWeight) -> StoredWeight | None:
        """Return the part of a weight as it is stored; None where it has zeros at the end."""
        if self.num_spare or self.is_elsewhere:
            return None
        if self.dim == 0:
            rows = torch.cat([torch.arange(first, end) for first, end in self.spans])
            return weight.rows(rows)
        ((first, end),) = self.spans
        finer = _with_smaller_groups(weight, first, end)
        size = finer.group_size
        groups = slice(first // size, end // size)
        if weight.scales.shape[1] == 1:  # one scale a row, whatever its width
            finer, groups = weight, slice(0, 1)
        return replace(
            finer,
            codes=weight.codes[:, first:end].contiguous(),
            scales=finer.scales[:, groups].contiguous(),
            zeros=None if finer.zeros is None else finer.zeros[:, groups].contiguous(),
            minimums=None if finer.minimums is None else finer.minimums[:, groups].contiguous(),
        )


class ShardReader(CheckpointReader):
    """Hands out one rank's part of each tensor, in the shapes of `share_of` the description."""

    def __init__(self, *args: Any, config: ModelConfig, shard: Shard, **options: Any) -> None:
        """`config`: the whole model's; the others are `CheckpointReader`'s."""
        super().__init__(*args, **options)
        self._cut_of = Cuts(config, shard)
        self._shard = shard
        self._num_left_out = 0

    @property
    def num_whole_parameters(self) -> int:
        """Numbers of the whole model, as far as it has been read."""
        return self.num_parameters + self._num_left_out

    @property
    def rounded_name(self) -> str:
        """Return the checkpoint and the rank's part of it."""
        return f"{self.fingerprint}-{self._shard.name}"

    def _stored(self, name: str, shape: Iterable[int]) -> Tensor:
        wanted = tuple(shape)
        cut = self._cut_of(name)
        if cut is None:
            return super()._stored(name, wanted)
        whole = cut.whole(wanted)
        self._num_left_out += prod(whole) - prod(wanted)
        return cut.of(super()._stored(name, whole))

    def _kept(self, name: str, shape: Iterable[int]) -> StoredWeight | None:
        wanted = tuple(shape)
        cut = self._cut_of(name)
        if cut is None:
            return super()._kept(name, wanted)
        whole = cut.whole(wanted)
        found = super()._kept(name, whole)
        part = None if found is None else cut.of_stored(found)
        if part is not None:
            self._num_left_out += prod(whole) - prod(wanted)
        return part


class Cuts:
    """Finds the part of a tensor that a rank has, by the tensor's name."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self._shard = shard
        self._vocab_size = config.vocab_size
        self._modules = {**self._attention(config), **self._dense(config)}
        if config.experts is not None:
            self._modules |= self._mixture(config.experts)
        self._expert = None
        if config.experts is not None:
            names, inner = config.experts.names, config.experts.inner_size
            numbered = re.escape(names.expert).replace(r"\{\}", r"\d+")
            parts = {names.gate: self._rows(inner), names.up: self._rows(inner)}
            parts[names.down] = self._columns(inner)
            self._expert = re.compile(rf"{numbered}\.([^.]+)")
            self._expert_parts = parts

    def __call__(self, name: str) -> Cut | None:
        """Return the part; None for a tensor that every rank has."""
        if name in _WHOLE_TABLES:
            return self._rows(self._vocab_size)(name)
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        own = match[1]
        if own in self._modules:
            return self._modules[own](own)
        module, _, kind = own.rpartition(".")
        found = self._modules.get(module)
        if found is None and self._expert is not None and (each := self._expert.fullmatch(module)):
            found = self._expert_parts.get(each[1])
        return None if found is None else found(kind)

    # ---- what is cut, by module or tensor --------------------------------------------------

    def _attention(self, config: ModelConfig) -> "dict[str, _Part]":
        head_dim = config.head_dim
        queries = self._shard.span(config.num_query_heads)
        keys = kv_head_span(config, self._shard)
        counts = (config.num_query_heads, config.num_kv_heads, config.num_kv_heads)
        spans = [(first * head_dim, end * head_dim) for first, end in (queries, keys, keys)]
        return {
            **self._joint(config.names.qkv, [count * head_dim for count in counts], spans),
            "self_attn.o_proj": self._columns(config.num_query_heads * head_dim),
            "self_attn.sinks": self._rows(config.num_query_heads),
        }

    def _dense(self, config: ModelConfig) -> "dict[str, _Part]":
        inner = config.intermediate_size
        spans = [self._shard.span(inner)] * 2
        return {
            **self._joint(config.names.gate_up, [inner, inner], spans),
            "mlp.down_proj": self._columns(inner),
        }

    def _mixture(self, experts: ExpertsConfig) -> "dict[str, _Part]":
        shared, inner = experts.names.shared, experts.inner_size
        found = {
            f"{shared}.gate_proj": self._rows(experts.shared_size),
            f"{shared}.up_proj": self._rows(experts.shared_size),
            f"{shared}.down_proj": self._columns(experts.shared_size),
        }
        if experts.is_stacked:  # gates and ups in turn, transposed
            found |= {
                "mlp.experts.gate_up_proj": self._places(2 * inner, dim=2),
                "mlp.experts.gate_up_proj_bias": self._places(2 * inner, dim=1),
                "mlp.experts.down_proj": self._places(inner, dim=1),
                "mlp.experts.down_proj_bias": lambda _: self._of_first(),
            }
        return found

    # ---- kinds of parts --------------------------------------------------------------------

    def _joint(
        self, names: tuple[str, ...], sizes: list[int], spans: list[tuple[int, int]]
    ) -> "dict[str, _Part]":
        """Return the parts of projections by their outputs; a single name has them all."""
        if len(names) > 1:
            each = zip(names, sizes, spans, strict=True)
            return {name: _outputs(size, (span,)) for name, size, span in each}
        begins = [sum(sizes[:number]) for number in range(len(sizes))]
        moved = tuple(
            (begin + first, begin + end) for begin, (first, end) in zip(begins, spans, strict=True)
        )
        return {names[0]: _outputs(sum(sizes), moved)}

    def _rows(self, size: int) -> "_Part":
        return self._places(size, dim=0)

    def _places(self, size: int, *, dim: int) -> "_Part":
        span, length = self._shard.span(size), self._shard.length(size)
        return lambda _: Cut(dim=dim, size=size, spans=(span,), length=length)

    def _columns(self, size: int) -> "_Part":
        """Return the part of a product by its inputs; its bias is added once, on rank 0."""
        weight = self._places(size, dim=1)
        return lambda kind: self._of_first() if kind == "bias" else weight(kind)

    def _of_first(self) -> Cut | None:
        return Cut(is_elsewhere=True) if self._shard.rank else None


# From the kind of a tensor, "weight" or "bias", to the part of it.
_Part = Callable[[str], Cut | None]


def _outputs(size: int, spans: tuple[tuple[int, int], ...]) -> _Part:
    length = sum(end - first for first, end in spans)
    return lambda _: Cut(dim=0, size=size, spans=spans, length=length)


def _with_smaller_groups(weight: StoredWeight, first: int, end: int) -> StoredWeight:
    """Return a weight whose groups of columns begin at `first` and end at `end`, too."""
    size = gcd(weight.group_size, first, end - first)
    times = weight.group_size // size
    if times == 1:
        return weight

    def spread(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.repeat_interleave(times, 1)

    scales = spread(weight.scales)
    assert scales is not None
    return replace(
        weight, scales=scales, zeros=spread(weight.zeros), minimums=spread(weight.minimums)
    )
