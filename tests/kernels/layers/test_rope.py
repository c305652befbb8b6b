import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import (
    RopeConfig,
    RotaryTable,
    norm_and_rotate,
    norm_and_rotate_reference,
    rope_frequencies,
    rotate,
)
from outrider.kernels.triton_support import use_kernels
from tests.sizes import compiled_sizes

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("rope_type", "extra"), [("default", {}), ("linear", {"factor": 4.0}), ("llama3", LLAMA3)]
)
@given(
    positions=st.lists(st.integers(0, 511), max_size=9),
    head_dim=st.sampled_from([2, 16, 34]),
    theta=st.sampled_from([100.0, 10000.0, 500000.0]),
)
def test_equals_transformers(
    rope_type: str, extra: dict[str, float], positions: list[int], head_dim: int, theta: float
) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs = llama.LlamaRotaryEmbedding(
        llama.LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=512,
            rope_parameters={"rope_type": rope_type, "rope_theta": theta, **extra},
        )
    )
    config = RopeConfig(
        head_dim=head_dim,
        theta=theta,
        rope_type=rope_type,
        factor=extra.get("factor", 1.0),
        original_max_positions=int(extra.get("original_max_position_embeddings", 512)),
    )
    torch.testing.assert_close(rope_frequencies(config), theirs.inv_freq)
    index = torch.tensor(positions, dtype=torch.int64)
    table = RotaryTable(config, max_positions=512, dtype=torch.float32)
    query = torch.randn(len(positions), 4, head_dim)
    key = torch.randn(len(positions), 2, head_dim)
    expected = llama.apply_rotary_pos_emb(query, key, *theirs(query, index[None]), unsqueeze_dim=2)
    for heads, other in zip((query, key), expected, strict=True):
        ours = rotate(heads, *table.gather(index))
        torch.testing.assert_close(ours, other[0], atol=1e-5, rtol=1e-5)


def test_a_position_outside_the_table_is_an_error() -> None:
    table = RotaryTable(RopeConfig(head_dim=4), max_positions=8, dtype=torch.float32)
    with pytest.raises(IndexError):
        table.gather(torch.tensor([8]))


def test_wrong_settings_name_themselves() -> None:
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        RopeConfig(head_dim=4, rope_type="dynamic")
    with pytest.raises(ValueError, match="head_dim=5"):
        RopeConfig(head_dim=5)


def make_table(head_dim: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    config = RopeConfig(head_dim=head_dim, theta=100.0)
    return RotaryTable(config, max_positions=50, dtype=dtype, device=device)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    positions=st.lists(st.integers(0, 49), max_size=5),
    num_heads=compiled_sizes(range(1, 12), [11]),
    head_dim=compiled_sizes([2, 6, 34, 64, 96, 128, 256], [34, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    has_norm=st.booleans(),
)
def test_kernel_normalises_and_rotates_each_head(
    device: torch.device,
    positions: list[int],
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    has_norm: bool,
) -> None:
    """Against the reference in float64's place: float32 of the same rounded inputs."""
    table = make_table(head_dim, dtype, device)
    index = torch.tensor(positions, dtype=torch.int64, device=device)
    # the first of a fused projection's heads
    heads = torch.randn(len(positions), num_heads + 2, head_dim, device=device)
    heads = (heads * torch.logspace(-1, 1, head_dim, device=device)).to(dtype)[:, :num_heads]
    norm = exact_norm = None
    if has_norm:
        weight = torch.randn(num_heads, head_dim, device=device).to(dtype)
        norm, exact_norm = RmsNorm(weight, 1e-6), RmsNorm(weight.float(), 1e-6)
    exact_table = make_table(head_dim, torch.float32, device)
    exact_table._table = table.table.float()
    exact = norm_and_rotate_reference(heads.float(), index, exact_table, norm=exact_norm)
    with use_kernels("triton"):
        result = norm_and_rotate(heads, index, table, norm=norm)
    assert result.dtype == dtype
    assert result.shape == heads.shape
    scale = exact.abs().amax().item() if len(positions) else 1.0
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(
        result.float(), exact, atol=4e-7 * scale, rtol=1.01 * rounding if rounding > 1e-6 else 1e-5
    )
    torch.testing.assert_close(
        norm_and_rotate_reference(heads, index, table, norm=norm).float(),
        exact,
        atol=6 * rounding * scale,
        rtol=0.0,
    )


def test_kernel_takes_the_nearest_position_of_the_table(device: torch.device) -> None:
    table = make_table(8, torch.float32, device)
    heads = torch.randn(1, 2, 8, device=device).expand(4, 2, 8).contiguous()
    with use_kernels("triton"):
        far = norm_and_rotate(heads, torch.tensor([-1, 0, 49, 1 << 40], device=device), table)
    assert torch.equal(far[0], far[1])
    assert torch.equal(far[3], far[2])
    assert not torch.equal(far[0], far[3])
