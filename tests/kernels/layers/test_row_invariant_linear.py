"""The products and row-wise operations whose rows keep their bits in any company."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.layers import row_invariant_linear as module
from outrider.kernels.layers.gated_mul import Activation, gated_mul
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import rotate
from outrider.kernels.layers.row_invariant_linear import (
    RUN_ROWS,
    TILE_ROWS,
    RowInvariantLinear,
    make_linear,
    make_norm,
    row_invariant_linear,
    row_invariant_linear_reference,
)
from outrider.kernels.layers.row_invariant_ops import (
    RowInvariantNorm,
    row_invariant_gated_mul,
    row_invariant_rotate,
    row_invariant_softcap,
    softcap,
)
from outrider.kernels.triton_support import use_kernels
from tests.kernels.layers.bits import same_bits, torch_threads
from tests.sizes import compiled_sizes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# How far a result may lie from the exact one, in units of its dtype's rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param):
        yield request.param


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


COUNTS = (1, 2, 3, 5, 8, 16, 17, 31, 64, 65, 100)


def rows_that_depend_on_company(
    operation: Callable[..., Tensor], *inputs: Tensor, counts: tuple[int, ...] = COUNTS
) -> list[str]:
    """Windows of the rows whose bits differ from those of the whole."""
    whole = operation(*(values.clone() for values in inputs))
    return [
        f"{start}+{count}"
        for count in counts
        for start in (0, 1, 13)
        if start + count <= len(whole)
        and not same_bits(
            operation(*(values[start : start + count].clone() for values in inputs)),
            whole[start : start + count],
        )
    ]


# ---- Triton ---------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    num_rows=st.sampled_from([0, 1, 2, 33, 64, 65, 130]),
    out_features=compiled_sizes([1, 17, 32, 70], [17, 70]),
    in_features=compiled_sizes([1, 7, 48, 128, 131, 272], [128, 131]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_the_kernel_equals_the_reference(
    device: torch.device,
    num_rows: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    x = random(num_rows, in_features, dtype=dtype, seed=seed).to(device)
    weight = random(out_features, in_features, dtype=dtype, seed=seed + 1).to(device)
    bias = random(out_features, dtype=dtype, seed=seed + 2).to(device) if has_bias else None
    with use_kernels("triton"):
        result = row_invariant_linear(x, weight, bias)
    expected = row_invariant_linear_reference(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    limit = TOLERANCE[dtype] * in_features**0.5
    assert torch.allclose(result.double(), exact, atol=limit, rtol=TOLERANCE[dtype])
    assert torch.allclose(expected.double(), exact, atol=limit, rtol=TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.usefixtures("triton_kernels", "equal_rows")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 272), (70, 37)])
def test_a_row_of_the_kernel_keeps_its_bits(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = random(80, shape[1], dtype=dtype).to(device)
    weight = random(*shape, dtype=dtype, seed=1).to(device)
    bias = random(shape[0], dtype=dtype, seed=2).to(device)

    def product(rows: Tensor) -> Tensor:
        return row_invariant_linear(rows, weight, bias)

    assert rows_that_depend_on_company(product, x, counts=(1, 16, 65)) == []


@pytest.mark.usefixtures("triton_kernels")
def test_the_kernel_writes_every_element_and_reads_strided_rows(device: torch.device) -> None:
    wide = random(70, 2 * 48).to(device)
    x, weight = wide[:, 48:], random(33, 48, seed=1).to(device)
    poisoned = torch.full((70, 33), float("nan"), device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.torch, "empty", lambda *args, **kwargs: poisoned)
        result = row_invariant_linear(x, weight)
    assert result is poisoned
    torch.testing.assert_close(result, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("triton_kernels")
def test_many_tiles_of_rows_and_columns_are_each_computed_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tiles of rows than a group has, and a last group that is not full."""
    monkeypatch.setattr(module, "GROUP_TILES", 2)
    x, weight = random(5 * 32 - 3, 16).to(device), random(70, 16, seed=1).to(device)
    torch.testing.assert_close(row_invariant_linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


# ---- CPU ------------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shape", [(512, 256), (256, 768), (131, 48), (33, 7)])
def test_a_row_keeps_its_bits_on_the_cpu(
    threads: int, dtype: torch.dtype, pack: bool, shape: tuple[int, int]
) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1)
    linear = RowInvariantLinear(weight, bias, pack=pack)
    x = random(150, shape[1], dtype=dtype, seed=2)
    assert rows_that_depend_on_company(linear, x) == []
    exact = x.double() @ weight.double().T + bias.double()
    limit = TOLERANCE[dtype] * shape[1] ** 0.5
    assert torch.allclose(linear(x).double(), exact, atol=limit, rtol=TOLERANCE[dtype])


def test_any_number_of_rows() -> None:
    linear = RowInvariantLinear(random(24, 40))
    x = random(200, 40, seed=1)
    whole = linear(x)
    for count in (0, *range(1, 70), 127, 128, 129):
        assert same_bits(linear(x[:count]), whole[:count]), count


def test_rows_that_begin_anywhere_in_memory() -> None:
    linear = RowInvariantLinear(random(24, 7))
    x = random(40, 7, seed=1)
    shifted = torch.empty(40 * 7 + 1)[1:].view(40, 7).copy_(x)
    strided = torch.cat((x, x), 1)[:, 7:]
    assert same_bits(linear(shifted), linear(x))
    assert same_bits(linear(strided), linear(x))


class _Fickle:
    """A product whose bits change with the rows beside a row, or with their number."""

    def __init__(self, weight: Tensor, bits_change: Callable[[Tensor], Tensor]) -> None:
        self._weight = weight
        self._bits_change = bits_change

    def __call__(self, x: Tensor, *_: object) -> Tensor:
        return torch.nn.functional.linear(x.double(), self._weight.double()).float() + (
            1e-3 * self._bits_change(x)
        )


def fickle_linear(weight: Tensor, bits_change: Callable[[Tensor], Tensor]) -> RowInvariantLinear:
    linear = RowInvariantLinear(weight)
    linear._run_rows.clear()
    linear._packed, linear._linear = weight, _Fickle(weight, bits_change)
    return linear


def test_row_counts_that_change_bits_are_not_run() -> None:
    def change(x: Tensor) -> Tensor:
        return torch.tensor(float(len(x) < 4 or len(x) in (24, 64)))

    weight, x = random(24, 40), random(200, 40, seed=1)
    assert rows_that_depend_on_company(_Fickle(weight, change), x) != []
    linear = fickle_linear(weight, change)
    assert rows_that_depend_on_company(linear, x) == []
    assert linear._run_rows[torch.get_num_threads()] == (4, 8, 12, 16, 32, 48)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 64])
def test_sums_in_another_order_are_found_behind_rounding(size: int, dtype: torch.dtype) -> None:
    weight = random(256, 768)

    def product(x: Tensor, *_: object) -> Tensor:
        whole = torch.nn.functional.linear(x.float(), weight)
        if len(x) == size:
            parts = zip(x.float().split(100, 1), weight.split(100, 1), strict=True)
            whole = torch.stack([rows @ part.T for rows, part in parts]).sum(0)
        return whole.to(dtype)

    x = random(64, 768, seed=1).to(dtype)
    in_runs, right = (torch.cat([product(rows) for rows in x.split(n)]) for n in (size, 16))
    assert 0 < (in_runs != right).sum() < in_runs.numel() / 100
    linear = RowInvariantLinear(weight)
    linear._run_rows.clear()
    linear._packed, linear._linear = weight.to(dtype), product
    linear(x)
    assert size not in linear._run_rows[torch.get_num_threads()]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.arange(len(x))[:, None] % 2.0,  # the place in the tile
        lambda x: x[0].sign().sum() * (len(x) > 1),  # the row that stands first
        lambda x: (torch.arange(len(x))[:, None] == TILE_ROWS - 1) * 1.0,  # the last place
    ],
)
def test_where_company_matters_rows_run_alone(change: Callable[[Tensor], Tensor]) -> None:
    weight, x = random(24, 40), random(70, 40, seed=1)
    assert rows_that_depend_on_company(_Fickle(weight, change), x) != []
    linear = fickle_linear(weight, change)
    assert rows_that_depend_on_company(linear, x) == []
    assert linear._run_rows[torch.get_num_threads()] == (1,)


def test_every_number_of_threads_is_tried() -> None:
    linear = RowInvariantLinear(random(24, 40))
    before = torch.get_num_threads()
    with torch_threads(3 - before if before < 3 else 1):
        linear(random(5, 40))
        assert set(linear._run_rows) == {before, torch.get_num_threads()}


def test_run_rows_hold_the_tile() -> None:
    assert TILE_ROWS in RUN_ROWS
    assert RUN_ROWS[-1] % TILE_ROWS == 0


def test_makers() -> None:
    weight = random(24, 40)
    assert type(make_linear(weight)) is Linear
    assert type(make_linear(weight, deterministic=True)) is RowInvariantLinear
    assert not make_linear(weight, pack=False, deterministic=True).is_packed
    norm = partial(make_norm, weight[0], 1e-5, dtype=torch.float32)
    assert type(norm()) is RmsNorm
    assert type(norm(deterministic=True)) is RowInvariantNorm


def test_bfloat16_has_the_same_product_in_either_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(24, 40, dtype=torch.bfloat16)
    if product_support().library is not None:
        monkeypatch.setattr(module, "prefers_onednn", lambda: False)
        assert type(make_linear(weight)) is PanelLinear
        assert type(make_linear(weight, deterministic=True)) is PanelLinear
        monkeypatch.setattr(module, "prefers_onednn", lambda: True)
        assert type(make_linear(weight)) is Linear
        assert type(make_linear(weight, deterministic=True)) is PanelLinear
        assert type(make_linear(weight, pack=False)) is Linear
        with use_kernels("reference"):
            assert type(make_linear(weight, deterministic=True)) is RowInvariantLinear


def test_without_the_compiled_products_bfloat16_is_torchs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = product_support(tmp_path)
    monkeypatch.setattr("outrider.kernels.cpu.panel_linear.product_support", lambda: missing)
    weight = random(24, 40, dtype=torch.bfloat16)
    assert type(make_linear(weight)) is Linear
    linear = make_linear(weight, deterministic=True)
    assert type(linear) is RowInvariantLinear
    assert rows_that_depend_on_company(linear, random(80, 40, dtype=torch.bfloat16)) == []


# ---- row-wise operations --------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 1000])
def test_the_norm_keeps_bits_and_equals_the_plain_one(
    threads: int, dtype: torch.dtype, width: int
) -> None:
    weight, x = random(width, dtype=dtype), random(120, width, dtype=dtype, seed=1)
    norm = RowInvariantNorm(weight, 1e-5)
    assert rows_that_depend_on_company(norm, x) == []
    torch.testing.assert_close(norm(x), RmsNorm(weight, 1e-5)(x))
    residual = random(120, width, dtype=dtype, seed=2)
    torch.testing.assert_close(
        norm.add(x, residual.clone()), RmsNorm(weight, 1e-5).add(x, residual.clone())
    )


@pytest.mark.slow_cases
def test_the_norm_over_heads_of_a_fused_projection(threads: int) -> None:
    weight = random(6, 64)
    heads = random(120, 8, 64, seed=1)
    norm = RowInvariantNorm(weight, 1e-5)
    assert rows_that_depend_on_company(lambda rows: norm(rows[:, :6]), heads) == []
    torch.testing.assert_close(norm(heads[:, :6]), RmsNorm(weight, 1e-5)(heads[:, :6]))


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [5, 64, 1000])
def test_the_gate_keeps_bits_and_equals_the_plain_one(
    threads: int, dtype: torch.dtype, width: int, activation: Activation
) -> None:
    gate = partial(row_invariant_gated_mul, activation=activation)
    gate_up = random(120, 2 * width, dtype=dtype)
    assert rows_that_depend_on_company(gate, gate_up) == []
    tolerance = TOLERANCE[dtype]
    plain = gated_mul(gate_up, activation)
    torch.testing.assert_close(gate(gate_up), plain, rtol=tolerance, atol=tolerance)
    assert gate(gate_up[:0]).shape == (0, width)


def test_a_softcap_keeps_bits(threads: int) -> None:
    logits = random(120, 131)
    cap = partial(row_invariant_softcap, cap=3.0)
    assert rows_that_depend_on_company(lambda rows: cap(rows.clone()), logits) == []
    torch.testing.assert_close(cap(logits.clone()), softcap(logits.clone(), 3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotation_keeps_bits_and_equals_the_plain_one(threads: int, dtype: torch.dtype) -> None:
    heads, cos, sin = (
        random(120, 6, 34, dtype=dtype),
        random(120, 1, 34, dtype=dtype, seed=1),
        random(120, 1, 34, dtype=dtype, seed=2),
    )
    assert rows_that_depend_on_company(row_invariant_rotate, heads, cos, sin) == []
    exact = rotate(heads.double(), cos.double(), sin.double()).to(dtype)
    torch.testing.assert_close(row_invariant_rotate(heads, cos, sin), exact)
