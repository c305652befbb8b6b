"""Mixtures of experts against transformers' own blocks, and every row's independence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import outrider.kernels.layers.linear
from outrider.kernels.experts.cut_tiles import cut_tiles
from outrider.kernels.experts.expert_mlp import ExpertMlp, ExpertWeights, GateKind, clamped_swiglu
from outrider.kernels.experts.grouped_mlp import grouped_mlp
from outrider.kernels.experts.integer_experts import ExpertProduct
from outrider.kernels.experts.route import Routed, RoutingRule, route
from outrider.kernels.layers.gated_mul import gated_mul_reference
from outrider.kernels.quantised.rows import int4_linear_reference, int8_linear_reference
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int4, rounded_to_int8
from outrider.kernels.triton_support import use_kernels

WIDTH, INNER, NUM_EXPERTS = 48, 40, 6
GATES: list[GateKind] = ["silu", "gelu", "gelu_tanh", "clamped_swiglu"]

Parts = TypeVar("Parts", ExpertWeights, Routed)


@contextmanager
def kernels_of(kind: str, device: torch.device) -> Iterator[torch.device]:
    """Triton's kernels on `device`, or the CPU's own; yields where they run."""
    with use_kernels("triton" if kind == "triton" else "reference"):
        yield device if kind == "triton" else torch.device("cpu")


def moved(parts: Parts, device: torch.device) -> Parts:
    values = {field.name: getattr(parts, field.name) for field in fields(parts)}
    return replace(parts, **{name: v if v is None else v.to(device) for name, v in values.items()})


def mlp_on(
    where: torch.device, experts: list[ExpertWeights], **options: Any
) -> Callable[[Tensor, Routed], Tensor]:
    """The experts' feed-forward layers on a device, for rows and results on the host."""
    mlp = ExpertMlp((moved(one, where) for one in experts), **options)
    return lambda rows, routed: mlp(rows.to(where), moved(routed, where)).cpu()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_experts(
    *, has_bias: bool = False, dtype: torch.dtype = torch.float32
) -> list[ExpertWeights]:
    return [
        ExpertWeights(
            gate_up=(random(2 * INNER, WIDTH, seed=4 * index) * 0.3).to(dtype),
            down=(random(WIDTH, INNER, seed=4 * index + 1) * 0.3).to(dtype),
            gate_up_bias=random(2 * INNER, seed=4 * index + 2).to(dtype) if has_bias else None,
            down_bias=random(WIDTH, seed=4 * index + 3).to(dtype) if has_bias else None,
        )
        for index in range(NUM_EXPERTS)
    ]


def one_by_one(
    rows: Tensor, routed: Routed, experts: list[ExpertWeights], gate: GateKind
) -> Tensor:
    """Each row through each of its experts, in float64."""
    results = torch.zeros(rows.shape, dtype=torch.float64)
    for row, (numbers, weights) in enumerate(zip(routed.experts, routed.weights, strict=True)):
        for number, weight in zip(numbers.tolist(), weights.tolist(), strict=True):
            expert = experts[number]
            inner = expert.gate_up.double() @ rows[row].double()
            if expert.gate_up_bias is not None:
                inner += expert.gate_up_bias.double()
            if gate == "clamped_swiglu":
                gated = clamped_swiglu(inner[None])[0].double()
            else:
                gated = gated_mul_reference(inner[None], gate)[0]
            result = expert.down.double() @ gated
            if expert.down_bias is not None:
                result += expert.down_bias.double()
            results[row] += weight * result
    return results


def choose(num_rows: int, num_chosen: int, *, crowded: bool = False, seed: int = 0) -> Routed:
    """Experts at random, or one that every row wants."""
    logits = random(num_rows, NUM_EXPERTS, seed=seed)
    if crowded:
        logits[:, 4] += 100
    return route(logits, RoutingRule(num_chosen=num_chosen))


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["cpu", "triton"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("has_bias", [False, True])
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 17, 33]),
    num_chosen=st.integers(1, 3),
    crowded=st.booleans(),
)
@settings(max_examples=6)
def test_rows_go_through_their_experts(
    device: torch.device,
    kind: str,
    gate: GateKind,
    has_bias: bool,
    num_rows: int,
    num_chosen: int,
    crowded: bool,
) -> None:
    experts = make_experts(has_bias=has_bias)
    rows = random(num_rows, WIDTH, seed=7)
    routed = choose(num_rows, num_chosen, crowded=crowded)
    with kernels_of(kind, device) as where:
        result = mlp_on(where, experts, gate=gate)(rows, routed)
    expected = one_by_one(rows, routed, experts, gate)
    torch.testing.assert_close(result.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_large_experts_are_multiplied_by_repeated_rows(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider.kernels.layers.linear, "STREAMED_BYTES", 0)
    monkeypatch.setattr(outrider.kernels.layers.linear, "_plain_max_rows", lambda weight: 0)
    experts, rows, routed = (
        make_experts(has_bias=True),
        random(num_rows, WIDTH),
        choose(num_rows, 2),
    )
    seen: list[int] = []
    mlp = ExpertMlp(iter(experts))
    gate = mlp._gate
    mlp._gate = lambda inner: seen.append(len(inner)) or gate(inner)  # type: ignore[func-returns-value]
    result = mlp(rows, routed)
    counts = torch.bincount(routed.experts.reshape(-1)).tolist()
    assert seen == [sum(4 if count in (1, 2) else count for count in counts)]
    expected = one_by_one(rows, routed, experts, "silu")
    torch.testing.assert_close(result.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_rows", [3, 70])
def test_the_grouped_kernels_in_half_precision(
    device: torch.device, num_rows: int, deterministic: bool
) -> None:
    experts = make_experts(dtype=torch.bfloat16)
    rows, routed = random(num_rows, WIDTH).bfloat16(), choose(num_rows, 2)
    with use_kernels("triton"):
        result = mlp_on(device, experts, deterministic=deterministic)(rows, routed)
    expected = one_by_one(rows, routed, experts, "silu")
    assert (result - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_rows_keep_their_bits_in_any_company(
    gate: GateKind, dtype: torch.dtype
) -> None:
    mlp = ExpertMlp(iter(make_experts(dtype=dtype)), gate=gate, deterministic=True)
    rows, routed = random(70, WIDTH).to(dtype), choose(70, 2)
    together = mlp(rows, routed)
    for row in (0, 1, 33, 69):
        alone = Routed(experts=routed.experts[row : row + 1], weights=routed.weights[row : row + 1])
        assert torch.equal(mlp(rows[row : row + 1], alone)[0], together[row])


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["cpu", "triton"])
@pytest.mark.parametrize("gate", GATES)
def test_a_broken_row_breaks_no_other(device: torch.device, kind: str, gate: GateKind) -> None:
    experts, rows, routed = make_experts(), random(9, WIDTH), choose(9, 2)
    with kernels_of(kind, device) as where:
        mlp = mlp_on(where, experts, gate=gate)
        right = mlp(rows, routed)
        rows[4] = torch.nan
        result = mlp(rows, routed)
    assert result[4].isnan().all()
    keep = [row for row in range(9) if row != 4]
    torch.testing.assert_close(result[keep], right[keep])


# ---- weights of few bits ------------------------------------------------------------------------


def make_rounded(bits: int, *, has_bias: bool = False) -> list[ExpertWeights]:
    """Experts of 64 columns, rounded."""

    def rounded(rows: int, width: int, seed: int) -> QuantisedWeight:
        weight = (random(rows, width, seed=seed) * 0.3).bfloat16()
        return rounded_to_int8(weight) if bits == 8 else rounded_to_int4(weight, group_size=32)

    return [
        ExpertWeights(
            gate_up=rounded(2 * 64, 96, 4 * index),
            down=rounded(96, 64, 4 * index + 1),
            gate_up_bias=random(2 * 64, seed=4 * index + 2).bfloat16() if has_bias else None,
            down_bias=random(96, seed=4 * index + 3).bfloat16() if has_bias else None,
        )
        for index in range(NUM_EXPERTS)
    ]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("num_rows", "crowded"), [(5, True), pytest.param(40, False, marks=pytest.mark.slow)]
)
def test_grouped_products_have_the_references_bits(
    device: torch.device, bits: int, num_rows: int, crowded: bool
) -> None:
    weights = [each.gate_up for each in make_rounded(bits)]
    biases = [random(128, seed=number).bfloat16() for number in range(NUM_EXPERTS)]
    rows = random(num_rows, 96, seed=7).bfloat16()
    routed = choose(num_rows, 2, crowded=crowded)
    with use_kernels("triton"):
        tiles = cut_tiles(routed.experts.to(device), NUM_EXPERTS, 16)
        product = ExpertProduct(
            [weight.to(device) for weight in weights], [bias.to(device) for bias in biases]
        )
        found = product(rows.to(device), tiles, num_chosen=2, tile_rows=16, is_first=True).cpu()
        back = product(rows[:1].expand(len(tiles.order), -1).to(device), tiles, num_chosen=2,
                       tile_rows=16, is_first=False).cpu()  # fmt: skip
    experts = routed.experts.reshape(-1)
    for place, pair in enumerate(tiles.order.tolist()):
        weight, bias = weights[experts[pair]], biases[experts[pair]]
        assert torch.equal(found[place], product_of(rows[pair // 2], weight, bias))
        assert torch.equal(back[pair], product_of(rows[0], weight, bias))


def product_of(row: Tensor, weight: QuantisedWeight, bias: Tensor) -> Tensor:
    if weight.bits == 4:
        return int4_linear_reference(row[None], weight, bias)[0]
    return int8_linear_reference(row[None], weight.codes, weight.scales.flatten(), bias)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "gate", "has_bias"),
    [
        (8, "silu", False),
        (8, "clamped_swiglu", True),
        (4, "silu", True),
        (4, "clamped_swiglu", False),
    ],
)
def test_rounded_experts_in_groups_are_those_one_by_one(
    device: torch.device, bits: int, gate: GateKind, has_bias: bool
) -> None:
    rows, routed = random(9, 96, seed=7).bfloat16(), choose(9, 2)
    with use_kernels("triton"):
        grouped = mlp_on(device, make_rounded(bits, has_bias=has_bias), gate=gate)
        found = grouped(rows, routed)
        alone = Routed(experts=routed.experts[3:4], weights=routed.weights[3:4])
        assert torch.equal(grouped(rows[3:4], alone)[0], found[3])
    with use_kernels("reference"):
        apart = ExpertMlp(iter(make_rounded(bits, has_bias=has_bias)), gate=gate)
        expected = apart(rows, routed)
    # The gate rounds once or twice, by the device.
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.slow
def test_experts_of_which_only_one_weight_is_rounded_are_decoded(device: torch.device) -> None:
    experts = [
        replace(one, down=one.down.dequantised(torch.bfloat16))
        for one in make_rounded(8)
        if isinstance(one.down, QuantisedWeight)
    ]
    rows, routed = random(5, 96, seed=7).bfloat16(), choose(5, 2)
    with use_kernels("triton"):
        found = mlp_on(device, experts)(rows, routed)
    expected = one_by_one(rows, routed, [plain(one) for one in experts], "silu")
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def plain(weights: ExpertWeights) -> ExpertWeights:
    assert isinstance(weights.gate_up, QuantisedWeight)
    return replace(weights, gate_up=weights.gate_up.dequantised(torch.bfloat16))


# ---- routing -----------------------------------------------------------------------------------


def their_choice(block: torch.nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(experts, weights) of a transformers router."""
    with torch.inference_mode():
        _, weights, experts = block(hidden)
    return experts, weights.float()


def assert_same_choice(routed: Routed, experts: Tensor, weights: Tensor) -> None:
    ours, theirs = routed.experts.sort(-1), experts.sort(-1)
    assert torch.equal(ours.values, theirs.values)
    torch.testing.assert_close(
        routed.weights.gather(1, ours.indices), weights.gather(1, theirs.indices)
    )


@pytest.mark.parametrize("renormalises", [False, True])
def test_softmax_over_all_experts_is_qwens(renormalises: bool) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen.Qwen3MoeConfig(
        hidden_size=WIDTH, num_experts=NUM_EXPERTS, num_experts_per_tok=3,
        norm_topk_prob=renormalises,
    )  # fmt: skip
    router = qwen.Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    hidden = random(40, WIDTH)
    rule = RoutingRule(num_chosen=3, renormalise=renormalises)
    routed = route(hidden @ router.weight.detach().T, rule)
    assert_same_choice(routed, *their_choice(router, hidden))


def test_softmax_over_the_chosen_is_gpt_oss() -> None:
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = oss.GptOssConfig(
        hidden_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2
    )
    router = oss.GptOssTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.bias)
    hidden = random(40, WIDTH)
    logits = hidden @ router.weight.detach().T + router.bias.detach()
    routed = route(logits, RoutingRule(num_chosen=2, scores="softmax_of_chosen"))
    assert_same_choice(routed, *their_choice(router, hidden))


def test_sigmoid_within_groups_is_glms() -> None:
    glm = pytest.importorskip("transformers.models.glm4_moe.modeling_glm4_moe")
    config = glm.Glm4MoeConfig(
        hidden_size=WIDTH, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=1.5, moe_intermediate_size=8, n_shared_experts=1,
    )  # fmt: skip
    block = glm.Glm4MoeMoE(config)
    torch.nn.init.normal_(block.gate.weight)
    torch.nn.init.normal_(block.gate.e_score_correction_bias)
    hidden = random(40, WIDTH)
    logits = hidden @ block.gate.weight.detach().T
    with torch.inference_mode():
        found = block.gate(hidden)
        if isinstance(found, Tensor):
            experts, weights = block.route_tokens_to_experts(found)
        else:
            _, weights, experts = found
    rule = RoutingRule(
        num_chosen=2, scores="sigmoid", renormalise=True, scale=1.5, num_groups=4, kept_groups=2
    )
    routed = route(logits, rule, block.gate.e_score_correction_bias.float())
    assert_same_choice(routed, experts, weights.float())


# ---- whole blocks ------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_router_and_experts_are_qwens_block(device: torch.device, kind: str) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = qwen.Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=NUM_EXPERTS,
        num_experts_per_tok=3, norm_topk_prob=True,
    )  # fmt: skip
    block = with_random_weights(qwen.Qwen3MoeSparseMoeBlock(config))
    theirs = block.experts
    experts = [
        ExpertWeights(gate_up=theirs.gate_up_proj[number].data, down=theirs.down_proj[number].data)
        for number in range(NUM_EXPERTS)
    ]
    rule = RoutingRule(num_chosen=3, renormalise=True)
    hidden = random(21, WIDTH)
    with kernels_of(kind, device) as where, torch.inference_mode():
        routed = route(hidden @ block.gate.weight.T, rule)
        result = mlp_on(where, experts)(hidden, routed)
        expected = block(hidden[None])[0]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_router_and_experts_are_gpt_oss_block(device: torch.device, kind: str) -> None:
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = oss.GptOssConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
    )  # fmt: skip
    block = with_random_weights(oss.GptOssMLP(config))
    theirs = block.experts
    experts = [
        ExpertWeights(
            gate_up=torch.cat([theirs.gate_up_proj[number, :, half::2].T for half in (0, 1)]),
            down=theirs.down_proj[number].T.contiguous(),
            gate_up_bias=torch.cat([theirs.gate_up_proj_bias[number, half::2] for half in (0, 1)]),
            down_bias=theirs.down_proj_bias[number].data,
        )
        for number in range(NUM_EXPERTS)
    ]
    hidden = random(21, WIDTH)
    rule = RoutingRule(num_chosen=2, scores="softmax_of_chosen")
    with kernels_of(kind, device) as where, torch.inference_mode():
        routed = route(hidden @ block.router.weight.T + block.router.bias, rule)
        result = mlp_on(where, experts, gate="clamped_swiglu")(hidden, routed)
        expected = block(hidden[None])[0][0]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def with_random_weights(block: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return block.requires_grad_(False)


def test_equal_scores_choose_the_lower_numbers() -> None:
    routed = route(torch.zeros(3, NUM_EXPERTS), RoutingRule(num_chosen=2))
    assert routed.experts.tolist() == [[0, 1]] * 3


def test_no_rows_need_no_kernel(device: torch.device) -> None:
    with use_kernels("triton"):
        mlp = ExpertMlp(moved(one, device) for one in make_experts())
        assert mlp._stack is not None
        empty = grouped_mlp(random(0, WIDTH).to(device), moved(choose(0, 2), device), mlp._stack)
    assert empty.shape == (0, WIDTH)
