"""The short causal convolution in front of a recurrent layer, along each row's own ancestors."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPlan:
    """The sources of the inputs of a pass's rows, and which are kept."""

    taps: Tensor
    """int64 [n, num_taps - 1], each row's ancestors from the farthest to the parent: rows of the
    pass, -1 for a cached one."""
    kept_taps: Tensor
    """int64 [n, num_taps - 1]: where a tap is a cached one, its row of `inputs`."""
    kept: Tensor
    """int64 [n], where a row's input is written."""
    tails: tuple[Tensor, Tensor, Tensor]
    """(sources, kept sources, targets), int64 [m] each, alike: inputs in front of new states."""


def tree_conv(rows: Tensor, weight: Tensor, inputs: Tensor, plan: ConvPlan) -> Tensor:
    """Convolve each row with its ancestors, then silu; keep the inputs that later rows need.

    `rows`: [n, channels]; `weight`: float32 [num_taps, channels]; `inputs`: [any, channels], read
    before it is written. Returns float32 [n, channels]. Sums go from the farthest tap to the row
    itself.
    """
    far = _gather(rows, inputs, plan.taps.reshape(-1), plan.kept_taps.reshape(-1))
    far = far.view(*plan.taps.shape, -1)  # [n, num_taps - 1, channels]
    sources, kept_sources, targets = plan.tails
    tails = _gather(rows, inputs, sources, kept_sources)
    total = far[:, 0].float() * weight[0]
    for tap in range(1, far.shape[1]):
        total.addcmul_(far[:, tap].float(), weight[tap])
    total.addcmul_(rows.float(), weight[-1])
    inputs.index_copy_(0, plan.kept, rows)
    inputs.index_copy_(0, targets, tails)
    return F.silu(total)


def _gather(rows: Tensor, inputs: Tensor, places: Tensor, kept_places: Tensor) -> Tensor:
    """Return rows of the pass, and cached ones where their place is negative."""
    own = rows.index_select(0, places.clamp(min=0))
    return torch.where((places >= 0)[:, None], own, inputs.index_select(0, kept_places))
