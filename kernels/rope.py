"""Rotary position embedding: tables and their application."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotation frequencies as Hugging Face's `rope_parameters` describe them.

    `rope_type` is one of `ROPE_TYPES`. "linear" divides all frequencies by `factor`; "llama3"
    divides those whose wavelength exceeds `original_max_positions / low_freq_factor`, keeps
    those below `original_max_positions / high_freq_factor`, and blends in between.
    """

    head_dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        """Raise ValueError for a rope type or a head size that cannot be rotated."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type={self.rope_type!r} must be one of {ROPE_TYPES}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")


def rope_frequencies(config: RopeConfig) -> Tensor:
    """Angle per position for each pair of dimensions: [head_dim / 2] float32, radians."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.theta**exponents)  # [head_dim / 2]
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        blend = (config.original_max_positions / wavelengths - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        blend = blend.clamp(0.0, 1.0)  # 0: long waves, scaled; 1: short waves, kept
        return (1 - blend) * frequencies / config.factor + blend * frequencies
    return frequencies


class RotaryTable:
    """Cosines and signed sines for every position, gathered once for all layers of a pass.

    The sines of a row's first half are negated, so rotating is `x * cos + swap_halves(x) * sin`.
    """

    def __init__(
        self,
        config: RopeConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compute the table in float32 and round it to dtype, as Hugging Face's models do."""
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, rope_frequencies(config))  # [positions, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        table = torch.cat((cos, cos, -sin, sin), -1)  # [positions, 2 * head_dim]
        self._table = table.to(dtype).to(device)
        self._head_dim = config.head_dim

    @property
    def size_bytes(self) -> int:
        """Memory of the table."""
        return self._table.nbytes

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions [n]: each [n, 1, head_dim], to broadcast over heads."""
        rows = self._table.index_select(0, positions).unsqueeze(1)  # [n, 1, 2 * head_dim]
        return rows[..., : self._head_dim], rows[..., self._head_dim :]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [n, heads, head_dim] by `RotaryTable.gather`'s cos and sin.

    Halves are paired (dimension i with i + head_dim / 2), as in Hugging Face's checkpoints.
    Su et al., 2021.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query [n, num_query_heads, head_dim] and key [n, num_kv_heads, head_dim]."""
    return rotate(query, cos, sin), rotate(key, cos, sin)
