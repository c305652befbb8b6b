"""The gate of a SwiGLU feed-forward layer."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused projection.

    gate_up: [n, 2 * d], the gate in the first half; returns [n, d]. Shazeer, 2020.
    """
    gate, up = gate_up.chunk(2, -1)  # [n, d] each
    return F.silu(gate).mul_(up)
