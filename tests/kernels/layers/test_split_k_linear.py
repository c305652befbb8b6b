"""Products of few rows with norm, gate and addition: their definition, splits, and row's bits."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import triton_support
from kernels.layers.gated_mul import Activation
from kernels.layers.linear import Linear
from kernels.layers.rms_norm import RmsNorm
from kernels.layers.split_k_linear import (
    FEW_ROWS,
    SplitScratch,
    SplitShape,
    can_split,
    split_k_linear,
    split_k_linear_reference,
    split_shape,
)
from kernels.triton_support import launches_early, record_launches, use_kernels
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

    def options(self) -> dict[str, Any]:
        residual = None if self.residual is None else self.residual.clone()
        return {"norm": self.norm, "activation": self.activation, "residual": residual}

    def expected(self) -> Tensor:
        bias, options = self.product.bias, self.options()
        if self.norm is not None:
            options["norm"] = RmsNorm(self.norm.weight.cpu().double(), self.norm.eps)
        if self.residual is not None:
            options["residual"] = self.residual.cpu().double()
        x, weight = self.x.cpu().double(), self.weight.cpu().double()
        if bias is not None:
            bias = bias.cpu().double()
        if self.norm is not None:
            norm = options.pop("norm")
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
        return split_k_linear_reference(x, weight, bias, **{"norm": None, **options})

    def run(self, scratch: SplitScratch, rows: slice = slice(None)) -> Tensor:
        options = self.options()
        if options["residual"] is not None:
            options["residual"] = options["residual"][rows].contiguous()
        return split_k_linear(self.x[rows].contiguous(), self.product, scratch, **options)

    def shape(self) -> SplitShape:
        return split_shape(self.weight, is_gated=self.activation is not None)

    def scratch(self) -> SplitScratch:
        scratch = SplitScratch(self.x.device, [self.shape()])
        scratch.partials.fill_(float("nan"))
        return scratch


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
        has_norm=has_norm,
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


def test_products_of_several_splits_share_their_scratch(device: torch.device) -> None:
    wide = make(3, 1280, 40, dtype=torch.bfloat16, device=device, has_norm=True, activation="silu")
    flat = make(3, 1024, 70, dtype=torch.bfloat16, device=device, adds=True)
    shapes = [problem.shape() for problem in (wide, flat)]
    if device.type == "cpu":
        assert [shape.num_splits for shape in shapes] == [3, 3]
    scratch = SplitScratch(device, shapes)
    for problem in (wide, flat, wide, flat):
        result = problem.run(scratch).cpu().double()
        torch.testing.assert_close(result, problem.expected(), atol=0.1, rtol=2e-2)


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


def test_shapes_follow_from_the_weight_and_fill_the_device() -> None:
    with record_launches(90):
        for (out, width), is_gated, splits in (
            ((6144, 4096), False, 3),
            ((4096, 4096), False, 5),
            ((24576, 4096), True, 1),
            ((4096, 12288), False, 5),
            ((4096, 1024), False, 4),
        ):
            weight = torch.empty(out, width, dtype=torch.bfloat16, device="meta")
            shape = split_shape(weight, is_gated=is_gated)
            assert shape.num_splits == splits
            assert shape.split * shape.num_splits >= width > shape.split * (shape.num_splits - 1)
            assert shape.num_tiles * shape.num_splits >= 250
            assert 4 * shape.partial_size < 0.06 * weight.nbytes or width < 4096


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


def test_early_launches_are_for_gpus_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(2, 64, 32, dtype=torch.float32, device=torch.device("cpu"))
    scratch = problem.scratch()

    def is_early(architecture: int) -> tuple[bool, bool]:
        with record_launches(architecture) as launches:
            problem.run(scratch)
        return launches[0].is_early, launches[0].constexprs["IS_EARLY"]

    assert is_early(90) == (False, False)
    monkeypatch.setattr(triton_support, "_wants_early_launches", lambda: True)
    monkeypatch.setattr(triton_support, "_IS_INTERPRETED", False)
    assert is_early(80) == (False, False)
    assert is_early(90) == (True, True)
    monkeypatch.setattr(triton_support, "triton", None)
    with pytest.raises(RuntimeError, match="OUTRIDER_PDL=1 needs Triton"):
        launches_early(torch.device("cpu"))
