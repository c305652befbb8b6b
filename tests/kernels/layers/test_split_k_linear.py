"""Products of few rows with norm, gate and addition: their definition, splits, and row's bits."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.layers.gated_mul import Activation
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.split_k_linear import (
    FEW_ROWS,
    HalfNormed,
    SplitScratch,
    SplitShape,
    can_split,
    split_k_add,
    split_k_add_norm,
    split_k_linear,
    split_k_linear_reference,
    split_shape,
)
from outrider.kernels.triton_support import record_launches, use_kernels
from tests.sizes import repeats

pytestmark = pytest.mark.usefixtures("triton_kernels")

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclasses.dataclass(kw_only=True)
class Problem:
    """A product with random numbers, and what it should give, in float64."""

    x: Tensor
    product: Linear
    norm: RmsNorm | None
    activation: Activation | None
    residual: Tensor | None

    @property
    def weight(self) -> Tensor:
        assert self.product.plain_weight is not None
        return self.product.plain_weight

    def expected(self) -> Tensor:
        bias, residual, x = self.product.bias, self.residual, _wide(self.x)
        if self.norm is not None:
            mean = x.square().mean(-1, keepdim=True)
            x = x * torch.rsqrt(mean + self.norm.eps) * _wide(self.norm.weight)
        return split_k_linear_reference(
            x,
            _wide(self.weight),
            None if bias is None else _wide(bias),
            activation=self.activation,
            residual=None if residual is None else _wide(residual),
        )

    def rows(self, rows: slice = slice(None)) -> Tensor | HalfNormed:
        """What the product takes: with a norm as `split_k_add_norm` leaves it, in three parts."""
        x = self.x[rows].contiguous()
        if self.norm is None:
            return x
        squares = x.new_zeros((3, FEW_ROWS), dtype=torch.float32)
        for part, columns in enumerate(x.float().tensor_split(3, -1)):
            squares[part, : len(x)] = columns.square().sum(-1)
        values = (x.float() * self.norm.weight.float()).to(x.dtype)
        return HalfNormed(values=values, squares=squares, eps=self.norm.eps)

    def run(self, scratch: SplitScratch, rows: slice = slice(None)) -> Tensor:
        x = self.rows(rows)
        if self.residual is None:
            return split_k_linear(x, self.product, scratch, activation=self.activation)
        assert isinstance(x, Tensor)
        stream = self.residual[rows].clone().contiguous()
        split_k_add(x, self.product, scratch, stream)
        return stream

    def shape(self) -> SplitShape:
        return split_shape(self.weight, is_gated=self.activation is not None)

    def scratch(self) -> SplitScratch:
        scratch = SplitScratch(self.x.device, [self.shape()])
        scratch.partials.fill_(float("nan"))
        return scratch


def _wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()


def make(  # noqa: PLR0913 - what there is of a product
    rows: int,
    width: int,
    columns: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    has_norm: bool = False,
    has_bias: bool = False,
    activation: Activation | None = None,
    adds: bool = False,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).to(device)

    out = columns * (1 if activation is None else 2)
    weight = random(out, width) / width**0.5
    return Problem(
        x=random(rows, width) * 3,
        product=Linear(weight, random(out) if has_bias else None, pack=False),
        norm=RmsNorm(random(width) + 1, 1e-6) if has_norm else None,
        activation=activation,
        residual=random(rows, columns) if adds else None,
    )


@pytest.mark.slow
@settings(max_examples=repeats(14, 6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, FEW_ROWS),
    width=st.sampled_from([1, 17, 48, 200, 512, 777, 1280]),
    columns=st.sampled_from([1, 5, 32, 70, 129]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_norm=st.booleans(),
    has_bias=st.booleans(),
    ending=st.sampled_from(["plain", "adds", "silu", "gelu", "gelu_tanh"]),
    seed=st.integers(0, 1 << 30),
)
def test_equals_the_definition(  # noqa: PLR0913 - what is drawn
    rows: int,
    width: int,
    columns: int,
    dtype: torch.dtype,
    has_norm: bool,
    has_bias: bool,
    ending: Any,
    seed: int,
    device: torch.device,
    poison: None,
) -> None:
    problem = make(
        rows,
        width,
        columns,
        dtype=dtype,
        device=device,
        has_norm=has_norm and ending != "adds",
        has_bias=has_bias,
        activation=None if ending in ("plain", "adds") else ending,
        adds=ending == "adds",
        seed=seed,
    )
    scratch = problem.scratch()
    tolerance = TOLERANCES[dtype]
    for _ in range(2):  # as a graph is replayed: what a launch leaves behind serves the next
        result = problem.run(scratch)
        assert result.dtype == dtype
        torch.testing.assert_close(
            result.cpu().double(), problem.expected(), atol=6 * tolerance, rtol=tolerance
        )
        assert not scratch.arrivals.any()


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 64, 70), (3, 1280, 129), (16, 48, 5)])
def test_the_stream_in_front_of_the_next_product(
    device: torch.device, dtype: torch.dtype, rows: int, width: int, columns: int, poison: None
) -> None:
    """Two products with a norm between them: what the first leaves is what the second takes."""
    first = make(rows, width, columns, dtype=dtype, device=device, adds=True)
    second = make(rows, columns, 40, dtype=dtype, device=device, has_norm=True, seed=1)
    assert first.residual is not None
    assert second.norm is not None
    scratch = SplitScratch(device, [first.shape(), second.shape()])
    scratch.partials.fill_(float("nan"))
    for _ in range(2):
        second.x = first.residual.clone()
        half = split_k_add_norm(first.x, first.product, scratch, second.x, second.norm)
        assert torch.equal(second.x, first.run(scratch))  # the stream, as without the norm
        values = second.x.float() * second.norm.weight.float()
        torch.testing.assert_close(half.values, values.to(dtype), atol=0, rtol=0)
        squares = half.squares.sum(0)[:rows]
        torch.testing.assert_close(squares, second.x.float().square().sum(-1))
        result = split_k_linear(half, second.product, scratch)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            _wide(result), second.expected(), atol=6 * tolerance, rtol=tolerance
        )


@pytest.mark.slow
def test_products_of_several_splits_share_their_scratch(device: torch.device) -> None:
    wide = make(3, 1280, 40, dtype=torch.bfloat16, device=device, has_norm=True, activation="silu")
    flat = make(3, 1024, 70, dtype=torch.bfloat16, device=device, adds=True)
    shapes = [problem.shape() for problem in (wide, flat)]
    if device.type == "cpu":
        assert all(shape.num_splits > 1 for shape in shapes)
    scratch = SplitScratch(device, shapes)
    for problem in (wide, flat, wide, flat):
        result = problem.run(scratch).cpu().double()
        torch.testing.assert_close(result, problem.expected(), atol=0.1, rtol=2e-2)


@pytest.mark.slow
def test_a_row_has_its_bits_in_any_company_of_few(device: torch.device, equal_rows: None) -> None:
    problem = make(
        FEW_ROWS, 1280, 40, dtype=torch.bfloat16, device=device, has_norm=True, activation="silu"
    )
    assert problem.shape().num_splits > 1
    scratch = problem.scratch()
    whole = problem.run(scratch)
    for rows in (slice(0, 1), slice(15, 16), slice(3, 10)):
        assert torch.equal(problem.run(scratch, rows), whole[rows])


def test_a_row_of_nans_spoils_no_other(device: torch.device) -> None:
    problem = make(4, 512, 33, dtype=torch.float32, device=device, has_norm=True)
    scratch = problem.scratch()
    clean = problem.run(scratch)
    problem.x[2] = float("nan")
    spoilt = problem.run(scratch)
    assert spoilt[2].isnan().all()
    assert torch.equal(spoilt[[0, 1, 3]], clean[[0, 1, 3]])


def test_shapes_follow_from_the_weight_and_occupy_the_device_evenly() -> None:
    with record_launches(90):  # 132 multiprocessors
        for (out, width), is_gated, splits in (
            ((6144, 4096), False, 4),
            ((4096, 4096), False, 4),
            ((24576, 4096), True, 1),
            ((4096, 12288), False, 4),
            ((4096, 1024), False, 4),
            ((1024, 2048), False, 8),
            ((6144, 1024), True, 4),
            ((1024, 3072), False, 8),
        ):
            weight = torch.empty(out, width, dtype=torch.bfloat16, device="meta")
            shape = split_shape(weight, is_gated=is_gated)
            assert shape.num_splits == splits
            assert shape.split * shape.num_splits >= width > shape.split * (shape.num_splits - 1)
            programs = shape.num_tiles * shape.num_splits / 132
            assert programs > 0.95 * math.ceil(programs)
            assert 4 * shape.partial_size < 0.04 * weight.nbytes or width < 4096


def test_what_it_does_not_take(device: torch.device) -> None:
    weight = torch.randn(8, 32, device=device)
    assert can_split(Linear(weight, pack=False))
    assert not can_split(Linear(weight.half(), pack=False))
    assert not can_split(object())
    with use_kernels("reference"):
        assert not can_split(Linear(weight, pack=False))
    problem = make(FEW_ROWS + 1, 32, 8, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="17 rows"):
        problem.run(problem.scratch())
