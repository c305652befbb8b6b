"""A mixture's experts in one call against their products one by one, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu.expert_products import alike_panels
from outrider.kernels.cpu.panel_linear import Int8PanelLinear, PanelLinear
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.experts.expert_mlp import ExpertMlp, ExpertWeights
from outrider.kernels.experts.route import Routed
from outrider.kernels.layers import row_invariant_linear
from outrider.kernels.layers.gated_mul import Activation
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int4, rounded_to_int8
from tests.kernels.layers.bits import same_bits, torch_threads

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"compiled products: {product_support().detail}"
)
NUM_EXPERTS = 5


@pytest.fixture(autouse=True)
def _panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_invariant_linear, "prefers_onednn", lambda: False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weight(bits: int, *shape: int, seed: int) -> Tensor | QuantisedWeight:
    plain = random(*shape, seed=seed)
    if bits == 16:
        return plain
    return rounded_to_int8(plain) if bits == 8 else rounded_to_int4(plain, group_size=32)


def mixture(bits: tuple[int, int], width: int, inner: int, gate: Activation) -> ExpertMlp:
    experts = (
        ExpertWeights(
            gate_up=weight(bits[0], 2 * inner, width, seed=4 * number),
            down=weight(bits[1], width, inner, seed=4 * number + 1),
            gate_up_bias=random(2 * inner, seed=4 * number + 2),
            down_bias=random(width, seed=4 * number + 3),
        )
        for number in range(NUM_EXPERTS)
    )
    return ExpertMlp(experts, gate=gate, deterministic=True)


def routes(num_rows: int, num_chosen: int, seed: int) -> Routed:
    drawn = torch.rand(num_rows, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    weights, experts = drawn.sort(descending=True)
    return Routed(experts=experts[:, :num_chosen], weights=weights[:, :num_chosen])


@pytest.mark.slow_cases
@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (4, 4), (4, 8)], ids=str)
@given(
    shape=st.tuples(st.sampled_from([32, 96, 544]), st.sampled_from([32, 64, 288])),
    gate=st.sampled_from(["silu", "gelu_tanh"]),
    routing=st.tuples(st.sampled_from([0, 1, 2, 17, 150]), st.integers(1, NUM_EXPERTS)),
    num_threads=st.sampled_from([1, 2]),
    is_broken=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=8)
def test_one_call_has_the_bits_of_products_one_by_one(
    bits: tuple[int, int],
    shape: tuple[int, int],
    gate: Activation,
    routing: tuple[int, int],
    num_threads: int,
    is_broken: bool,
    seed: int,
) -> None:
    num_rows, mlp, routed = routing[0], mixture(bits, *shape, gate), routes(*routing, seed)
    assert mlp._compiled is not None
    rows = random(num_rows, shape[0], seed=seed)
    if is_broken and num_rows:
        rows[num_rows // 2, 3] = torch.inf
    expected = mlp._by_expert(rows, routed) if num_rows else rows
    with torch_threads(num_threads):
        found = mlp(rows, routed)
    # The bits of a NaN say nothing.
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found.nan_to_num(), expected.nan_to_num())


def test_what_does_not_fit_is_refused() -> None:
    mlp, rows = mixture((16, 16), 32, 32, "silu"), random(3, 32)
    assert mlp._compiled is not None
    routed = routes(3, 2, 0)
    for wrong in (-1, NUM_EXPERTS):
        experts = routed.experts.clone()
        experts[2, 1] = wrong
        with pytest.raises(IndexError, match="from 0 to 4"):
            mlp._compiled(rows, experts, routed.weights)
    with pytest.raises(ValueError, match="do not fit 3 rows"):
        mlp._compiled(rows, routed.experts[:2], routed.weights)
    with pytest.raises(ValueError, match=r"not \[n, 32\]"):
        mlp._compiled(random(3, 64), routed.experts, routed.weights)


def test_unlike_products_are_not_joined() -> None:
    wide, narrow = PanelLinear(random(64, 64)), PanelLinear(random(64, 32))
    rounded = Int8PanelLinear(rounded_to_int8(random(64, 64)))
    assert alike_panels([wide, wide]) == [wide, wide]
    for others in ([narrow], [rounded], [torch.nn.Identity()]):
        assert alike_panels([wide, *others]) == []
    assert alike_panels([]) == []
