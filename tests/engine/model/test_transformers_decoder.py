"""Decoders of transformers over the paged cache, against transformers' own forward pass."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODEL_TYPES

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.read_config import read_model_config
from tests.engine.model.architectures import largest_difference, survey, table, written_table
from tests.engine.model.decoder_passes import (
    PARENTS,
    Rows,
    ancestors_of,
    assert_equal_logits,
    hf_logits,
    hf_taps,
    make_table,
    make_tokens,
    new_cache,
    run,
    tree_rows,
)
from tests.transformers_models import make_transformers_model

Pair = tuple[PreTrainedModel, CausalModel]


@pytest.fixture(
    scope="module",
    params=[
        "gpt_neox",
        "starcoder2",  # with a window
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpt2", "cohere", "nemotron", "persimmon", "phi", "stablelm")
        ),
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_transformers_model(request.param)
    reference.save_pretrained(folder)
    return reference, load_model(str(folder))


@pytest.mark.slow_cases
def test_runs_through_transformers_with_its_parameters(pair: Pair) -> None:
    reference, model = pair
    assert not isinstance(model, DecoderModel)
    assert model.num_parameters == reference.num_parameters()
    assert model.weight_bytes == 4 * model.num_parameters
    assert not model.can_record


def test_a_prompt_in_chunks(pair: Pair) -> None:
    reference, model = pair
    assert largest_difference(model, reference) < 1e-4


@pytest.mark.parametrize("wanted", [[], [18], [3, 0, 18]])
def test_only_the_wanted_rows_come_back(pair: Pair, wanted: list[int]) -> None:
    reference, model = pair
    token_ids, index = make_tokens(19), torch.tensor(wanted, dtype=torch.int64)
    rows = Rows(token_ids=token_ids, num_computed=0, block_table=make_table(0))
    output = run(model, new_cache(model), rows, rows=index)
    assert output.logits.dtype == torch.float32
    assert output.hidden.shape == (len(wanted), model.config.hidden_size)
    assert output.logits.shape == (len(wanted), model.config.vocab_size)
    if wanted:
        assert_equal_logits(output.logits, hf_logits(reference, token_ids)[index])


def test_taps_are_the_hidden_states_of_transformers(pair: Pair) -> None:
    reference, model = pair
    token_ids, taps = make_tokens(19), (model.config.num_layers, 0, 1)
    rows = Rows(token_ids=token_ids, num_computed=0, block_table=make_table(0))
    output = run(model, new_cache(model), rows, rows=torch.tensor([18]), taps=taps)
    assert output.taps is not None
    assert_equal_logits(output.taps, hf_taps(reference, token_ids, taps))


def test_sequences_of_every_kind_share_a_pass(pair: Pair) -> None:
    """A prefill, a decode, a tree and a chunk behind a prefix: each as if it were alone."""
    reference, model = pair
    cache = new_cache(model)
    tables = [make_table(seed) for seed in range(4)]
    prompts = [make_tokens(count, seed=count) for count in (11, 30, 19, 8)]
    for index in (1, 2, 3):
        first = Rows(token_ids=prompts[index], num_computed=0, block_table=tables[index])
        run(model, cache, first, rows=torch.tensor([], dtype=torch.int64))
    nodes = make_tokens(len(PARENTS), seed=1)
    one, chunk = make_tokens(1, seed=50), make_tokens(9, seed=51)
    output = run(
        model,
        cache,
        Rows(token_ids=prompts[0], num_computed=0, block_table=tables[0]),
        Rows(token_ids=one, num_computed=30, block_table=tables[1]),
        tree_rows(nodes, tables[2], start=19),
        Rows(token_ids=chunk, num_computed=8, block_table=tables[3]),
    ).logits
    assert_equal_logits(output[:11], hf_logits(reference, prompts[0]))
    longer = torch.cat([prompts[1], one])
    assert_equal_logits(output[11:12], hf_logits(reference, longer)[-1:])
    for node in range(len(PARENTS)):
        theirs = hf_logits(reference, torch.cat([prompts[2], nodes[ancestors_of(node)]]))
        assert_equal_logits(output[12 + node], theirs[-1])
    assert_equal_logits(output[26:], hf_logits(reference, torch.cat([prompts[3], chunk]))[-9:])


# ---- loading and refusals -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_transformers_model("gpt_neox").save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_log_says_which_class_runs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider.engine.model.load"):
        load_model(str(folder))
    assert "GPTNeoXForCausalLM, through transformers" in caplog.text


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, r"\d+ misshapen tensor"),
        ({"num_hidden_layers": 4}, r"\d+ missing tensor"),
        ({"num_hidden_layers": 2}, r"\d+ unexpected tensor"),
        ({"model_type": "gpt_next", "transformers_version": "9.1.0"}, r"written by 9\.1\.0"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "trust_remote_code"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "change as a sequence grows",
        ),
    ],
)
def test_an_unsupported_model_is_refused_in_one_line(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_deterministic_mode_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"engine\.deterministic cannot hold"):
        load_model(str(folder), deterministic=True)


def test_weights_that_are_missing(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"1 missing tensor.*dense_4h_to_h"):
        load_model(str(folder))


def test_half_precision(folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.weight_bytes == 2 * model.num_parameters


# ---- every architecture -------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("model_type", "outcome"),
    [
        ("deepseek_v3", "through transformers"),  # latent attention: keys longer than values
        ("gemma3n_text", "through transformers"),
        ("granitemoe_swa", "through transformers"),  # sinks, experts
        ("llama4_text", "through transformers"),
        ("opt", "through transformers"),  # learned positions
        ("smollm3", "native"),
        ("bloom", "its forward pass takes no position_ids."),
        ("falcon", "its attention does not go through transformers' attention interface."),
        ("bart", "it is an encoder-decoder."),
        ("mamba", "it has layers that are not attention over all keys or a window of them"),
    ],
)
def test_some_architectures_run_and_some_are_refused(model_type: str, outcome: str) -> None:
    """`survey` compares the logits of those that run."""
    found = survey(model_type)
    assert (found.reason or found.outcome).startswith(outcome)


@pytest.mark.long
def test_the_table_of_all_architectures_is_current() -> None:
    assert written_table() == table(survey(name) for name in sorted(MODEL_TYPES))


def test_a_llama4_is_served_up_to_its_first_chunk(tmp_path: Path) -> None:
    make_transformers_model("llama4_text", attention_chunk_size=64).save_pretrained(tmp_path)
    assert read_model_config(tmp_path).max_position_embeddings == 64
