"""A gated delta rule layer between its projections: convolution, state, gated norm."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ModelConfig, Recurrence
from outrider.engine.model.recurrent_cache import RecurrentPass
from outrider.engine.model.weights import CheckpointReader
from outrider.kernels.recurrent.delta_rows import DeltaInputs, delta_rows
from outrider.kernels.recurrent.fold_states import fold_states
from outrider.kernels.recurrent.tree_conv import tree_conv

_NORM_EPS = 1e-6  # of the lengths of queries and keys, as transformers has it


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The parameters of one layer beside its products."""

    shape: Recurrence
    conv: Tensor
    """float32 [num_taps, conv_size], the row's own tap last."""
    decay: Tensor
    """float32 [num_value_heads], exp(A_log)."""
    dt_bias: Tensor
    """float32 [num_value_heads]."""
    norm: Tensor
    """[value_dim]."""
    eps: float
    """The norm's."""

    def __call__(self, projected: Tensor, here: RecurrentPass, layer: int) -> Tensor:
        """Advance the states of a pass's sequences by its rows.

        `projected`: [n, conv_size + value_size + 2 * num_value_heads]: queries, keys and values
        before the convolution, gates, betas, decays. `layer`: its number among the recurrent ones.
        Returns [n, value_size].
        """
        shape, dtype = self.shape, projected.dtype
        sizes = (shape.conv_size, shape.value_size, shape.num_value_heads, shape.num_value_heads)
        mixed, gate, beta, step = projected.split_with_sizes(sizes, -1)
        cache = here.cache.layer(layer)
        mixed = tree_conv(mixed, self.conv, cache.inputs, here.conv)  # [n, conv_size] float32
        query, key, value = (
            mixed.to(dtype)
            .float()
            .split_with_sizes((shape.key_size, shape.key_size, shape.value_size), -1)
        )
        inputs = DeltaInputs(
            query=_unit(torch.unflatten(query, -1, (-1, shape.key_dim))).mul_(shape.key_dim**-0.5),
            key=_unit(torch.unflatten(key, -1, (-1, shape.key_dim))),
            value=torch.unflatten(value, -1, (-1, shape.value_dim)).contiguous(),
            beta=beta.sigmoid().float(),
            log_decay=-self.decay * F.softplus(step.float() + self.dt_bias),
        )
        output = inputs.value.new_empty(len(projected) + 1, *inputs.value.shape[1:])
        for work in here.steps:
            if work.folds is not None:
                fold_states(cache.rows, cache.states, work.folds)
            for batch in work.batches:
                delta_rows(inputs, cache.rows, cache.states, batch, output)
        return self._normalise(output[:-1], gate)

    def _normalise(self, rows: Tensor, gate: Tensor) -> Tensor:
        """Normalise each head, and gate it. `rows`: float32 [n, num_value_heads, value_dim]."""
        rows = rows.to(gate.dtype).float()
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)
        rows = self.norm * rows.to(gate.dtype)
        gated = rows.float().flatten(-2) * F.silu(gate.float())
        return gated.to(gate.dtype)


def _unit(heads: Tensor) -> Tensor:
    """Divide each head by its length. Float32 [n, heads, size]."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDeltaNet:
    """A layer's parameters, and how its projections are read."""

    net: DeltaNet
    projections: tuple[str, ...]
    """Their names below the decoder layer's."""
    projected: Callable[[], Tensor]
    """Reads all of them as one weight, in the order in which `DeltaNet` takes their rows."""


def read_delta_net(reader: CheckpointReader, config: ModelConfig, prefix: str) -> ReadDeltaNet:
    """Read a layer; `prefix`: of its tensors, with its point."""
    shape, width = config.recurrence, config.hidden_size
    assert shape is not None, "only models with a recurrence have recurrent layers"
    heads = shape.num_value_heads
    conv = reader.read(f"{prefix}conv1d.weight", (shape.conv_size, 1, shape.num_taps))
    net = DeltaNet(
        shape=shape,
        conv=conv[:, 0].T.float().contiguous(),
        decay=reader.read(f"{prefix}A_log", (heads,)).float().exp(),
        dt_bias=reader.read(f"{prefix}dt_bias", (heads,)).float(),
        norm=reader.read(f"{prefix}norm.weight", (shape.value_dim,)),
        eps=config.norm_eps,
    )
    sizes = {
        "in_proj_qkv": shape.conv_size,
        "in_proj_z": shape.value_size,
        "in_proj_b": heads,
        "in_proj_a": heads,
    }
    if shape.is_grouped:
        sizes = {"in_proj_qkvz": shape.conv_size + shape.value_size, "in_proj_ba": 2 * heads}

    def projected() -> Tensor:
        joined = torch.cat(
            [reader.read(f"{prefix}{name}.weight", (size, width)) for name, size in sizes.items()]
        )
        if not shape.is_grouped:
            return joined
        return joined.index_select(0, _ungrouped(shape).to(joined.device))

    return ReadDeltaNet(
        net=net, projections=tuple(f"linear_attn.{name}" for name in sizes), projected=projected
    )


def _ungrouped(shape: Recurrence) -> Tensor:
    """Return the rows of a key head's queries, keys, values, gates, then betas and decays.

    As Qwen3-Next stores them, a key head's rows of each stand together.
    """
    groups, ratio = shape.num_key_heads, shape.num_value_heads // shape.num_key_heads
    sizes = (shape.key_dim, shape.key_dim, *[ratio * shape.value_dim] * 2)
    first = torch.arange(groups * sum(sizes)).view(groups, -1).split_with_sizes(sizes, 1)
    second = torch.arange(2 * shape.num_value_heads).view(groups, 2, ratio) + groups * sum(sizes)
    return torch.cat([part.reshape(-1) for part in (*first, second[:, 0], second[:, 1])])


def refuse_modes(config: ModelConfig, *, is_rounded: bool, deterministic: bool | None) -> None:
    """Raise UnsupportedModelError for what models with recurrent layers do not do yet."""
    if deterministic:
        raise UnsupportedModelError(
            f"{config.model_id} has recurrent layers, whose sums depend on the shape of a pass, so "
            "it cannot run in deterministic mode: leave engine.deterministic at auto."
        )
    if is_rounded:
        raise UnsupportedModelError(
            f"{config.model_id} has recurrent layers, whose weights are not rounded: leave out "
            "--quantize for it."
        )
