import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.shared.expand import main, max_logit_gap
from outrider.draft.training import expand_files
from outrider.draft.training.expand import expand
from outrider.draft.training.expand_files import EXPANDABLE_TYPES, Checkpoint, ExpandError
from outrider.draft.training.expand_shape import Shape, shape_for_parameters
from tests.models import HF_CONFIGS, make_hf_model

OLD = Shape(hidden_size=64, num_layers=3, intermediate_size=96, num_heads=4, num_kv_heads=2)
LARGER = Shape(hidden_size=256, num_layers=7, intermediate_size=160, num_heads=16, num_kv_heads=4)
EXPANDABLE = [
    name
    for name, (config, _) in sorted(HF_CONFIGS.items())
    if config.model_type in EXPANDABLE_TYPES
]
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


def source_model(folder: Path, name: str = "llama3", dtype: torch.dtype = torch.float32) -> Path:
    make_hf_model(name).to(dtype).save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    return tensors


def assert_same_function(source: Path, out: Path) -> None:
    gap, largest = max_logit_gap(source, out, dtype=torch.float32)
    assert largest > 1.0
    assert gap < 1e-5 * max(1.0, largest)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", EXPANDABLE)
def test_every_dimension_at_once_keeps_the_logits(tmp_path: Path, name: str) -> None:
    source = source_model(tmp_path / "old", name)
    expand(source, tmp_path / "new", LARGER)
    assert Shape.of(Checkpoint(tmp_path / "new").config) == LARGER
    assert_same_function(source, tmp_path / "new")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 96},
        {"num_layers": 5},
        {"intermediate_size": 97},
        {"num_heads": 8},
        {"num_heads": 8, "num_kv_heads": 4},
        # Smaller groups: old key-value heads are repeated.
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 8, "num_kv_heads": 8},
    ],
    ids=str,
)
def test_each_dimension_alone_keeps_the_logits(tmp_path: Path, changes: dict[str, int]) -> None:
    source = source_model(tmp_path / "old")
    expand(source, tmp_path / "new", OLD.replaced(changes))
    assert_same_function(source, tmp_path / "new")


@pytest.mark.slow
def test_greedy_text_is_equal(tmp_path: Path) -> None:
    source = source_model(tmp_path / "old")
    expand(source, tmp_path / "new", LARGER)
    old, new = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (source, tmp_path / "new")
    )
    prompts = torch.randint(3, 131, (4, 9), generator=torch.Generator().manual_seed(0))
    texts = [
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False
        )
        for model in (old, new)
    ]
    assert torch.equal(*texts)


def test_what_is_added_is_random_unless_it_would_reach_the_output(tmp_path: Path) -> None:
    source = source_model(tmp_path / "old")
    expand(source, tmp_path / "new", LARGER)
    old, new = tensors_of(source), tensors_of(tmp_path / "new")
    for name, tensor in new.items():
        share = float((tensor != 0).float().mean())
        if name in EMBEDDINGS:
            assert share == pytest.approx(0.25, abs=0.01)
        elif "o_proj" in name or "down_proj" in name:
            assert share < 0.2
        else:
            assert share == 1.0, name
    added = sum(tensor.numel() for tensor in new.values()) - sum(map(torch.numel, old.values()))
    nonzero = sum(int((tensor != 0).sum()) for tensor in new.values())
    assert nonzero - sum(map(torch.numel, old.values())) > 0.55 * added


def test_the_seed_decides_the_random_part_only(tmp_path: Path) -> None:
    source = source_model(tmp_path / "old")
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        expand(source, tmp_path / folder, LARGER, seed=seed)
    first, again, other = (tensors_of(tmp_path / folder) for folder in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])
    assert torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_four_times_the_width_is_exact_in_bf16(tmp_path: Path) -> None:
    source = source_model(tmp_path / "old", dtype=torch.bfloat16)
    expand(source, tmp_path / "new", LARGER)
    assert tensors_of(tmp_path / "new")["model.norm.weight"].dtype == torch.bfloat16
    assert Checkpoint(tmp_path / "new").config["dtype"] == "bfloat16"
    assert_same_function(source, tmp_path / "new")


@pytest.mark.slow
def test_shards_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_files, "_MAX_SHARD_BYTES", 400_000)
    source = source_model(tmp_path / "old")
    expand(source, tmp_path / "new", LARGER)
    assert len(list((tmp_path / "new").glob("model-*-of-*.safetensors"))) > 3
    assert_same_function(source, tmp_path / "new")
    # And a sharded checkpoint can itself be expanded.
    expand(tmp_path / "new", tmp_path / "newer", LARGER.replaced({"num_layers": 8}))
    assert_same_function(source, tmp_path / "newer")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_size": 32}, "hidden_size=32 is below the checkpoint's 64"),
        ({"num_layers": 2}, "num_layers=2 is below"),
        ({"num_heads": 9, "num_kv_heads": 2}, "do not divide"),
        ({"num_kv_heads": 1, "num_heads": 8}, "num_kv_heads=1 is below"),
        ({"num_heads": 6}, "hidden_size=64 is not a multiple of num_heads=6"),
        ({"num_heads": 3, "num_kv_heads": 3}, "num_heads=3 is below"),
        ({"intermediate_size": 1}, "intermediate_size=1"),
    ],
)
def test_impossible_expansions_are_refused(
    tmp_path: Path, changes: dict[str, int], why: str
) -> None:
    source = source_model(tmp_path / "old")
    with pytest.raises(ExpandError, match=why):
        expand(source, tmp_path / "new", OLD.replaced(changes))
    assert not (tmp_path / "new").exists()


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    # 2 groups of 4 query heads would become 4 groups of up to 3: there is room for 3.
    source = tmp_path / "old"
    make_hf_model("llama3", num_attention_heads=8).save_pretrained(source)
    shape = OLD.replaced({"num_heads": 9, "num_kv_heads": 3})
    with pytest.raises(ExpandError, match="2 groups of 4 query heads do not fit into 3 groups"):
        expand(source, tmp_path / "new", shape)
    expand(
        source,
        tmp_path / "new",
        OLD.replaced({"hidden_size": 96, "num_heads": 12, "num_kv_heads": 4}),
    )
    assert_same_function(source, tmp_path / "new")


def test_a_folder_in_use_and_a_foreign_model_are_refused(tmp_path: Path) -> None:
    source = source_model(tmp_path / "old")
    with pytest.raises(ExpandError, match="is not empty"):
        expand(source, source, LARGER)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ExpandError, match="model_type gpt2"):
        expand(source, tmp_path / "new", LARGER)
    (source / "model.safetensors").unlink()
    with pytest.raises(ExpandError, match="no safetensors"):
        expand(source, tmp_path / "new", LARGER)


@pytest.mark.parametrize(("target", "number"), [("5M", 5e6), ("40M", 4e7), ("1.5B", 1.5e9)])
def test_a_picked_shape_has_about_the_parameters(target: str, number: float) -> None:
    config = {
        **{"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 448},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"vocab_size": 2048, "tie_word_embeddings": True},
    }
    shape = shape_for_parameters(config, target)
    assert shape.num_parameters(config) == pytest.approx(number, rel=0.05)
    assert shape.hidden_size in (128 * 4, 128 * 16, 128)
    assert shape.num_heads // shape.num_kv_heads == 2


@pytest.mark.parametrize("target", ["1K", "many", "-4M", "nan"])
def test_an_impossible_size_is_refused(target: str) -> None:
    config = {
        **{"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 448},
        **{"num_attention_heads": 4, "vocab_size": 2048},
    }
    with pytest.raises(ValueError, match="parameters"):
        shape_for_parameters(config, target)


def test_command_line_writes_a_folder_that_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_model(tmp_path / "old")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(source)
    out = tmp_path / "new"
    main(["--model", str(source), "--out", str(out), "--hidden-size", "256", "--dtype", "bfloat16"])
    printed = capsys.readouterr().out
    assert "float32: logits differ by at most" in printed
    assert "bfloat16: logits differ by at most" in printed
    assert AutoTokenizer.from_pretrained(out).get_vocab() == {"a": 0, "<unk>": 1}
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 256
    with pytest.raises(SystemExit, match="is not empty"):
        main(["--model", str(source), "--out", str(out)])
