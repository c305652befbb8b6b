"""Rotary position embedding: tables and their application."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.cpu.product_library import is_portable
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.triton_support import (
    jit,
    launch,
    next_power_of_2,
    rounded,
    tl,
    triton,
    uses_triton,
)

# Elements of the heads that a program rotates.
_TILE = 1024

# Far above any model's; the order of a head's dimensions is a list.
_MAX_HEAD_DIM = 1 << 14

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotation frequencies as Hugging Face's `rope_parameters` describe them."""

    head_dim: int
    theta: float = 10000.0
    rope_type: str = "default"
    """One of `ROPE_TYPES`."""
    factor: float = 1.0
    """"linear" divides all frequencies by it."""
    low_freq_factor: float = 1.0
    """"llama3" divides frequencies by `factor` whose wavelength exceeds `original_max_positions /
    low_freq_factor`."""
    high_freq_factor: float = 4.0
    """"llama3" keeps those below `original_max_positions / high_freq_factor`, and blends in
    between."""
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    """"yarn" blends between `beta_slow` and `beta_fast` turns within `original_max_positions` (Peng
    et al., 2023)."""
    beta_slow: float = 1.0
    truncate: bool = True
    """Yarn's bounds are whole dimensions."""
    short_factors: tuple[float, ...] = ()
    """"longrope" divides each frequency by a factor of its own (Ding et al., 2024)."""
    long_factors: tuple[float, ...] = ()
    """The same where more than `original_max_positions` are to be served."""
    attention_factor: float = 1.0
    """The factor of sines and cosines."""
    rotary_dim: int | None = None
    """Leading dimensions of a head that turn; None: all, 0: none."""
    is_interleaved: bool = False
    """Dimension 2i turns with 2i + 1, not i with i + rotary_dim / 2."""

    def __post_init__(self) -> None:
        """Raise ValueError for a rope type or a head size that cannot be rotated."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type={self.rope_type!r} must be one of {ROPE_TYPES}")
        if self.head_dim % 2 or self.head_dim > _MAX_HEAD_DIM:
            raise ValueError(f"head_dim={self.head_dim} must be even, and at most {_MAX_HEAD_DIM}")
        if not 0.0 < self.theta < math.inf:
            raise ValueError(f"theta={self.theta} must be a number above 0")
        if self.num_rotated % 2 or not 0 <= self.num_rotated <= self.head_dim:
            raise ValueError(
                f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}"
            )
        for factors in (self.short_factors, self.long_factors):
            if self.rope_type == "longrope" and len(factors) != self.num_rotated // 2:
                raise ValueError(
                    f"{len(factors)} longrope factors do not fit {self.num_rotated} rotary "
                    f"dimensions: {self.num_rotated // 2} are needed"
                )

    @property
    def num_rotated(self) -> int:
        """Dimensions of a head that turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def serves_long(self, max_positions: int) -> bool:
        """Return whether so many positions make "longrope" take its other factors."""
        return self.rope_type == "longrope" and max_positions > self.original_max_positions

    def dimension_order(self) -> list[int] | None:
        """Return the order of a head's dimensions in which i turns with i + head_dim / 2.

        Queries and keys in that order have the same products, so one layout of tables and kernels
        serves interleaved and partial rotation. None: the order that they have.
        """
        turned, rest = self.num_rotated, list(range(self.num_rotated, self.head_dim))
        if self.is_interleaved:
            first, second = list(range(0, turned, 2)), list(range(1, turned, 2))
        else:
            first, second = list(range(turned // 2)), list(range(turned // 2, turned))
        middle = len(rest) // 2
        order = [*first, *rest[:middle], *second, *rest[middle:]]
        return None if order == sorted(order) else order


def _precise(numbers: Tensor) -> Tensor:
    """Return float32 numbers as they are, or in float64 where numerics are portable.

    What processors' functions differ in is then not among the digits that stay.
    """
    return numbers.double() if is_portable() else numbers


def rope_frequencies(config: RopeConfig, *, max_positions: int = 0) -> Tensor:
    """Angle per position for each pair of dimensions: [head_dim / 2] float32, radians.

    `max_positions`: how many are to be served, which longrope depends on. Dimensions that do not
    turn come last, with 0.
    """
    size = config.num_rotated
    exponents = _precise(torch.arange(0, size, 2, dtype=torch.float32) / max(size, 1))
    frequencies = 1.0 / (config.theta**exponents)  # [num_rotated / 2]
    if config.rope_type == "linear":
        frequencies = frequencies / config.factor
    elif config.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        blend = (config.original_max_positions / wavelengths - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        blend = blend.clamp(0.0, 1.0)  # 0: long waves, scaled; 1: short waves, kept
        frequencies = (1 - blend) * frequencies / config.factor + blend * frequencies
    elif config.rope_type == "yarn":
        kept = 1 - _yarn_ramp(config)
        frequencies = frequencies / config.factor * (1 - kept) + frequencies * kept
    elif config.rope_type == "longrope":
        is_long = config.serves_long(max_positions)
        factors = config.long_factors if is_long else config.short_factors
        frequencies = 1.0 / (torch.tensor(factors) * config.theta**exponents)
    return torch.cat((frequencies.float(), torch.zeros((config.head_dim - size) // 2)))


def _yarn_ramp(config: RopeConfig) -> Tensor:
    """Return how far each pair's frequency is scaled: 0 kept, 1 divided. [num_rotated / 2]."""
    size = config.num_rotated

    def dimension(turns: float) -> float:
        """Return the dimension that turns so often within the original positions."""
        ratio = config.original_max_positions / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    steps = torch.arange(size // 2, dtype=torch.float32)
    return ((steps - low) / max(high - low, 0.001)).clamp(0, 1)


class RotaryTable:
    """Cosines and signed sines for every position, gathered once for all layers of a pass.

    Heads have the dimensions in `RopeConfig.dimension_order`.

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
        frequencies = rope_frequencies(config, max_positions=max_positions)
        angles = _precise(torch.outer(positions, frequencies))  # [positions, head_dim / 2]
        length = torch.ones(config.head_dim // 2)
        length[: config.num_rotated // 2] = config.attention_factor
        cos, sin = angles.cos() * length, angles.sin() * length
        table = torch.cat((cos, cos, -sin, sin), -1).float()  # [positions, 2 * head_dim]
        self._table = table.to(dtype).to(device)
        self._head_dim = config.head_dim
        self.turns = config.num_rotated > 0  # else every head stays as it is

    @property
    def table(self) -> Tensor:
        """[max_positions, 2 * head_dim]: a row is (cos, cos, -sin, sin) of half a head each."""
        return self._table

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


def norm_and_rotate_reference(
    heads: Tensor, positions: Tensor, rotary: RotaryTable, *, norm: RmsNorm | None = None
) -> Tensor:
    """`norm_and_rotate` in torch; in half precision it rounds between the norm and the rotation."""
    return rotate(heads if norm is None else norm(heads), *rotary.gather(positions))


@jit
def rotated_halves(  # type: ignore[no-untyped-def] # noqa: PLR0913
    row_heads,
    head,
    weight,
    table,
    position,
    max_positions,
    eps,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """The halves of heads of a row, float32 [heads, HALF_BLOCK] each, 0 beyond HALF.

    The first NUM_ROTATED of the row's heads are normalised and rotated, others are as they were.
    Rows that only fill up a CUDA graph may be at any position; they get one of the table.
    """
    columns = tl.arange(0, HALF_BLOCK)
    is_inside = (head < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + columns[None, :]
    first = tl.load(row_heads + at, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(row_heads + at + HALF, mask=is_inside, other=0.0).to(tl.float32)
    is_rotated = (head < NUM_ROTATED)[:, None]
    normed_first, normed_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1)  # [heads]
        inverse = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        weighted = is_inside & is_rotated
        normed_first *= inverse * tl.load(weight + at, mask=weighted, other=0.0).to(tl.float32)
        normed_second *= inverse * tl.load(weight + at + HALF, mask=weighted, other=0.0).to(
            tl.float32
        )
    place = tl.minimum(tl.maximum(position, 0), max_positions - 1).to(tl.int64)
    angles = table + place * (4 * HALF) + columns
    cos = tl.load(angles, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles + 3 * HALF, mask=columns < HALF, other=0.0).to(tl.float32)[None, :]
    turned_first = normed_first * cos - normed_second * sin
    turned_second = normed_second * cos + normed_first * sin
    return tl.where(is_rotated, turned_first, first), tl.where(is_rotated, turned_second, second)


@jit
def _norm_and_rotate_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913
    heads,
    positions,
    table,
    weight,
    result,
    row_stride,
    max_positions,
    eps,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Program (i, j): heads j * HEADS and so on of row i."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_BLOCK)
    first, second = rotated_halves(
        heads + row * row_stride,
        head,
        weight,
        table,
        tl.load(positions + row),
        max_positions,
        eps,
        HAS_NORM,
        NUM_HEADS,
        NUM_HEADS,
        HALF,
        HALF_BLOCK,
    )
    is_inside = (head < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + columns[None, :]
    target = result + row * (2 * HALF * NUM_HEADS) + at
    tl.store(target, rounded(first, result.dtype.element_ty), mask=is_inside)
    tl.store(target + HALF, rounded(second, result.dtype.element_ty), mask=is_inside)


def heads_per_program(num_heads: int, head_dim: int) -> int:
    """Count how many heads make a tile of a row; a power of 2, whatever the number of rows."""
    return min(max(_TILE // next_power_of_2(head_dim), 1), next_power_of_2(num_heads))


def norm_and_rotate(
    heads: Tensor, positions: Tensor, rotary: RotaryTable, *, norm: RmsNorm | None = None
) -> Tensor:
    """Query and key heads as attention wants them: each normalised (QK-norm) and then rotated.

    `heads`: [n, num_heads, head_dim], a row's heads contiguous; `positions`: [n] int64; `norm`:
    with a weight of [num_heads, head_dim]. Returns [n, num_heads, head_dim]. A position outside the
    table is an IndexError on the CPU; a GPU takes the nearest one. Su et al., 2021; Henry et al.,
    2020.
    """
    if not uses_triton(heads):
        return norm_and_rotate_reference(heads, positions, rotary, norm=norm)
    num_rows, num_heads, head_dim = heads.shape
    result = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    tile = heads_per_program(num_heads, head_dim)
    launch(
        _norm_and_rotate_kernel,
        (num_rows, triton.cdiv(num_heads, tile)),
        heads,
        positions,
        rotary.table,
        None if norm is None else norm.weight,
        result,
        heads.stride(0),
        rotary.table.shape[0],
        0.0 if norm is None else norm.eps,
        num_warps=4,
        HAS_NORM=norm is not None,
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        HEADS=tile,
        HALF_BLOCK=next_power_of_2(head_dim // 2),
    )
    return result
