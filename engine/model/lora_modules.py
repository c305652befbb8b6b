"""The modules of a decoder that LoRA adapters may change, and their places in its projections."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.layers import turned_rows
from outrider.kernels.layers.lora import Projection, site_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """A module: some columns of a projection."""

    site: int
    start: int
    """The first of its columns."""
    size: int
    """The number of its columns."""
    width: int
    """The width of the projection's input rows."""
    order: Tensor | None = None
    """The order of the projection's columns, by the checkpoint's; None where it is the same."""


def lora_modules(config: ModelConfig) -> dict[str, LoraModule]:
    """Return the modules by name, "layers.0.self_attn.q_proj" and so on; none of transformers' own.

    Models with recurrent layers have none either. Experts and routers are not among them. Of a part
    of a model: the part of each module.
    """
    if not config.is_native or config.recurrence is not None:
        return {}
    return {
        f"layers.{index}.{name}": module
        for index in range(config.num_layers)
        for name, module in _of_layer(config, index)
    }


def num_sites(config: ModelConfig) -> int:
    """Return how many projections a model has that adapters may change."""
    return config.num_layers * len(Projection)


def _of_layer(config: ModelConfig, index: int) -> Iterator[tuple[str, LoraModule]]:
    names, width, inner = config.names, config.hidden_size, config.intermediate_size
    query_size = config.num_query_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    sizes = (query_size, kv_size, kv_size)
    order = turned_rows(config, config.layers[index].rope, sum(sizes))
    qkv = site_of(index, Projection.QKV)
    for name, start, size in _parts(names.qkv, sizes):
        own = None if order is None else order[start : start + size] - start
        yield name, LoraModule(site=qkv, start=start, size=size, width=width, order=own)
    output = site_of(index, Projection.OUTPUT)
    yield "self_attn.o_proj", LoraModule(site=output, start=0, size=width, width=query_size)
    if config.layers[index].is_sparse:
        return
    gate_up = site_of(index, Projection.GATE_UP)
    for name, start, size in _parts(names.gate_up, (inner, inner)):
        yield name, LoraModule(site=gate_up, start=start, size=size, width=width)
    down = site_of(index, Projection.DOWN)
    yield "mlp.down_proj", LoraModule(site=down, start=0, size=width, width=inner)


def _parts(names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first column, columns); a single name has them all."""
    if len(names) == 1:
        yield names[0], 0, sum(sizes)
        return
    start = 0
    for name, size in zip(names, sizes, strict=True):
        yield name, start, size
        start += size
