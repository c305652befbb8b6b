import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.rope import RopeConfig, RotaryTable, apply_rope, rope_frequencies

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


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
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
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
    expected = apply_rotary_pos_emb(query, key, *theirs(query, index[None]), unsqueeze_dim=2)
    result = apply_rope(query, key, *table.gather(index))
    for ours, other in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, other[0], atol=1e-5, rtol=1e-5)


def test_a_position_outside_the_table_is_an_error() -> None:
    table = RotaryTable(RopeConfig(head_dim=4), max_positions=8, dtype=torch.float32)
    with pytest.raises(IndexError):
        table.gather(torch.tensor([8]))


def test_wrong_settings_name_themselves() -> None:
    with pytest.raises(ValueError, match="rope_type='yarn'"):
        RopeConfig(head_dim=4, rope_type="yarn")
    with pytest.raises(ValueError, match="head_dim=5"):
        RopeConfig(head_dim=5)
