"""What of a model can be cut for several ranks, and what is said of the others."""

from pathlib import Path

import pytest
import torch

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.load import load_model
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.shard import Shard
from outrider.engine.model.shard_reader import Cut
from outrider.engine.model.shared_config import check_shares, kv_head_span, share_of
from outrider.kernels.quantised.stored_weight import StoredWeight
from tests.models import save_hf_model


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("architecture", "count", "words"),
    [
        ("llama3", 3, "number of query heads .4. cannot .* divide all of it: 1, 2, 4"),
        ("gpt-oss", 8, "query heads"),
        ("olmo2", 2, "normalised over all heads together"),
        ("qwen3_5", 2, "recurrent layers"),
        ("gpt_neox", 2, "transformers' own modules"),
    ],
)
def test_models_that_cannot_be_cut(
    architecture: str, count: int, words: str, tmp_path: Path
) -> None:
    save_hf_model(architecture, tmp_path)
    config = read_model_config(tmp_path)
    check_shares(config, 1)
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(str(tmp_path), shard=Shard(rank=0, count=count))


def test_heads_are_shared_out_or_copied(tmp_path: Path) -> None:
    save_hf_model("llama3", tmp_path)  # 4 query heads, 2 for keys and values
    config = read_model_config(tmp_path)
    two, four = Shard(rank=1, count=2), [Shard(rank=rank, count=4) for rank in range(4)]
    assert kv_head_span(config, two) == (1, 2)
    assert [kv_head_span(config, each) for each in four] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert share_of(config, two).intermediate_size == config.intermediate_size // 2
    assert share_of(config, four[3]).num_query_heads == share_of(config, four[3]).num_kv_heads == 1


def test_a_vocabulary_that_is_not_divisible_ends_in_zeros() -> None:
    shard = Shard(rank=2, count=3)
    assert [Shard(rank=rank, count=3).span(5) for rank in range(3)] == [(0, 2), (2, 4), (4, 5)]
    cut = Cut(size=5, spans=(shard.span(5),), length=shard.length(5))
    table = torch.arange(10.0).view(5, 2)
    assert torch.equal(cut.of(table), torch.tensor([[8.0, 9.0], [0.0, 0.0]]))
    assert cut.whole((2, 7)) == (5, 7)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 6])
def test_a_part_of_a_stored_weight_has_the_numbers_of_the_whole(num_groups: int) -> None:
    generator = torch.Generator().manual_seed(num_groups)
    whole = StoredWeight(
        number="int8",
        codes=torch.randint(0, 256, (4, 48), generator=generator, dtype=torch.uint8),
        scales=torch.rand((4, num_groups), generator=generator),
        zeros=torch.randint(0, 9, (4, num_groups), generator=generator, dtype=torch.int16),
    )
    columns = Cut(dim=1, size=48, spans=((12, 24),), length=12).of_stored(whole)
    rows = Cut(dim=0, size=4, spans=((0, 1), (2, 4)), length=3).of_stored(whole)
    assert columns is not None
    assert rows is not None
    assert torch.equal(columns.decoded(), whole.decoded()[:, 12:24])
    assert torch.equal(rows.decoded(), whole.decoded()[[0, 2, 3]])
