"""Our decoder against transformers' own, on the same random weights."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.decoder import DecoderModel, DtypeName
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.passes.runner import ModelRunner
from tests.engine.model.decoder_passes import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_TOKENS,
    PARENTS,
    Rows,
    ancestors_of,
    assert_equal_logits,
    hf_logits,
    hf_taps,
    make_table,
    make_tokens,
    move,
    new_cache,
    run,
    tree_rows,
)
from tests.models import HF_CONFIGS, save_hf_model

# What they have, others of the quick set have as well.
_SLOW = {
    "gemma",
    "glm",
    "llama-yarn",
    "mistral-full",
    "mixtral",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen3-moe",
    "smollm3",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else [])
        for name in sorted(HF_CONFIGS)
    ],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, DecoderModel]:
    folder = tmp_path_factory.mktemp(request.param)
    hf = save_hf_model(request.param, folder)
    return hf, DecoderModel.load(str(folder))


Pair = tuple[PreTrainedModel, DecoderModel]


@pytest.mark.slow_cases
def test_has_the_parameters_of_transformers(pair: Pair) -> None:
    hf, model = pair
    corrections = [
        buffer for name, buffer in hf.named_buffers() if name.endswith("correction_bias")
    ]
    assert model.num_parameters == hf.num_parameters() + sum(map(torch.numel, corrections))
    assert model.weight_bytes == model.num_parameters * 4


@pytest.mark.slow_cases
@pytest.mark.parametrize("chunks", [[41], [13, 1, 7, 20], [1] * 41, [2, 39]])
def test_prefill_and_decode(pair: Pair, chunks: list[int]) -> None:
    """Whole, in odd pieces, and token by token."""
    hf, model = pair
    token_ids, cache, table = make_tokens(NUM_TOKENS), new_cache(model), make_table(1)
    outputs, done = [], 0
    for count in chunks:
        piece = Rows(token_ids=token_ids[done : done + count], num_computed=done, block_table=table)
        outputs.append(run(model, cache, piece).logits)
        done += count
    assert_equal_logits(torch.cat(outputs), hf_logits(hf, token_ids))


def test_hidden_state_is_after_the_final_norm(pair: Pair) -> None:
    hf, model = pair
    token_ids = make_tokens(NUM_TOKENS)
    rows = Rows(token_ids=token_ids, num_computed=0, block_table=make_table(0))
    output = run(model, new_cache(model), rows)
    with torch.inference_mode():
        hidden = hf.model(token_ids[None]).last_hidden_state[0]
    assert (output.hidden - hidden).abs().max().item() < 1e-4


@pytest.mark.slow_cases
@pytest.mark.parametrize("wanted", [None, [40]])
def test_taps_are_the_hidden_states_of_transformers(pair: Pair, wanted: list[int] | None) -> None:
    """Of all rows, whichever get logits; in any order."""
    hf, model = pair
    token_ids, num_layers = make_tokens(NUM_TOKENS), model.config.num_layers
    index = None if wanted is None else torch.tensor(wanted)
    for taps in ((num_layers, 0), (1,)):
        rows = Rows(token_ids=token_ids, num_computed=0, block_table=make_table(0))
        output = run(model, new_cache(model), rows, rows=index, taps=taps)
        assert output.taps is not None
        assert_equal_logits(output.taps, hf_taps(hf, token_ids, taps))
        logits = hf_logits(hf, token_ids)
        assert_equal_logits(output.logits, logits if index is None else logits[index])


@pytest.mark.slow_cases
@pytest.mark.parametrize("wanted", [[], [40], [3, 0, 40], list(range(40, -1, -1))])
def test_only_the_wanted_rows_come_back(pair: Pair, wanted: list[int]) -> None:
    hf, model = pair
    token_ids, cache, table = make_tokens(NUM_TOKENS), new_cache(model), make_table(0)
    index = torch.tensor(wanted, dtype=torch.int64)
    rows = Rows(token_ids=token_ids, num_computed=0, block_table=table)
    output = run(model, cache, rows, rows=index)
    assert output.logits.dtype == torch.float32
    if not wanted:
        assert output.logits.shape == (0, 131)
        assert output.hidden.shape == (0, 64)
    else:
        assert_equal_logits(output.logits, hf_logits(hf, token_ids)[index])
    # the others are in the cache all the same
    following = Rows(token_ids=make_tokens(1, seed=9), num_computed=NUM_TOKENS, block_table=table)
    longer = torch.cat([token_ids, following.token_ids])
    assert_equal_logits(run(model, cache, following).logits, hf_logits(hf, longer)[-1:])


@pytest.mark.slow_cases
@pytest.mark.parametrize("pieces", [[14], [1, 2, 5, 6]])
def test_each_branch_of_a_tree_equals_its_plain_sequence(pair: Pair, pieces: list[int]) -> None:
    """In one pass, and level by level as a drafter grows a tree."""
    hf, model = pair
    prompt, nodes = make_tokens(19), make_tokens(len(PARENTS), seed=1)
    cache, table = new_cache(model), make_table(2)
    run(model, cache, Rows(token_ids=prompt, num_computed=0, block_table=table))
    logits, done = [], 0
    for count in pieces:
        rows = tree_rows(nodes[done : done + count], table, start=19, first=done)
        logits.append(run(model, cache, rows).logits)
        done += count
    ours = torch.cat(logits)
    for node in range(len(PARENTS)):
        path = ancestors_of(node)
        theirs = hf_logits(hf, torch.cat([prompt, nodes[path]]))
        assert_equal_logits(ours[node], theirs[-1])


@pytest.mark.slow_cases
def test_after_compaction_the_accepted_path_continues(pair: Pair) -> None:
    hf, model = pair
    prompt, nodes = make_tokens(19), make_tokens(len(PARENTS), seed=1)
    cache, table = new_cache(model), make_table(2)
    run(model, cache, Rows(token_ids=prompt, num_computed=0, block_table=table))
    run(model, cache, tree_rows(nodes, table, start=19))
    path = ancestors_of(13)
    slots = [table[s // BLOCK_SIZE] * BLOCK_SIZE + s % BLOCK_SIZE for s in range(19, 40)]
    move(cache, [slots[node] for node in path], slots[: len(path)])
    following = Rows(
        token_ids=make_tokens(3, seed=5), num_computed=19 + len(path), block_table=table
    )
    whole = torch.cat([prompt, nodes[path], following.token_ids])
    assert_equal_logits(run(model, cache, following).logits, hf_logits(hf, whole)[-3:])


@pytest.mark.slow_cases
def test_sequences_of_every_kind_share_a_pass(pair: Pair) -> None:
    """A prefill, a decode, a tree and a chunk behind a prefix: each as if it were alone."""
    hf, model = pair
    cache = new_cache(model)
    tables = [make_table(seed) for seed in range(4)]
    prompts = [make_tokens(count, seed=count) for count in (11, 30, 19, 8)]
    for index in (1, 2, 3):
        first = Rows(token_ids=prompts[index], num_computed=0, block_table=tables[index])
        run(model, cache, first, rows=torch.tensor([], dtype=torch.int64))
    nodes = make_tokens(len(PARENTS), seed=1)
    paths = [ancestors_of(node) for node in range(len(PARENTS))]
    one, chunk = make_tokens(1, seed=50), make_tokens(9, seed=51)
    output = run(
        model,
        cache,
        Rows(token_ids=prompts[0], num_computed=0, block_table=tables[0]),
        Rows(token_ids=one, num_computed=30, block_table=tables[1]),
        tree_rows(nodes, tables[2], start=19),
        Rows(token_ids=chunk, num_computed=8, block_table=tables[3]),
    ).logits
    assert_equal_logits(output[:11], hf_logits(hf, prompts[0]))
    assert_equal_logits(output[11:12], hf_logits(hf, torch.cat([prompts[1], one]))[-1:])
    for node, path in enumerate(paths):
        theirs = hf_logits(hf, torch.cat([prompts[2], nodes[path]]))
        assert_equal_logits(output[12 + node], theirs[-1])
    assert_equal_logits(output[26:], hf_logits(hf, torch.cat([prompts[3], chunk]))[-9:])


@pytest.mark.slow_cases
@pytest.mark.parametrize("count", [2, 5, 16])
def test_many_decoding_sequences_share_a_pass(pair: Pair, count: int) -> None:
    hf, model = pair
    cache = KVCache(model.config, num_blocks=256, block_size=BLOCK_SIZE, dtype=model.dtype)
    order = [int(block) for block in torch.randperm(256)]
    rows, whole = [], []
    for index in range(count):
        table = order[16 * index : 16 * index + 16]
        prompt = make_tokens(5 + 3 * index, seed=index)
        run(model, cache, Rows(token_ids=prompt, num_computed=0, block_table=table))
        one = make_tokens(1, seed=100 + index)
        rows.append(Rows(token_ids=one, num_computed=len(prompt), block_table=table))
        whole.append(torch.cat([prompt, one]))
    logits = run(model, cache, *rows).logits
    for index, token_ids in enumerate(whole):
        assert_equal_logits(logits[index], hf_logits(hf, token_ids)[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_half_precision_stays_as_close_as_transformers_own(
    name: str, dtype: DtypeName, tmp_path: Path
) -> None:
    """Rounding differs, so compare distances from the float32 model."""
    hf = save_hf_model(name, tmp_path)
    model = DecoderModel.load(str(tmp_path), dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert model.weight_bytes == model.num_parameters * 2
    token_ids = make_tokens(NUM_TOKENS)
    exact = hf_logits(hf, token_ids)
    theirs = hf_logits(hf.to(model.dtype), token_ids).float()
    rows = Rows(token_ids=token_ids, num_computed=0, block_table=make_table(0))
    ours = run(model, new_cache(model), rows).logits
    their_error = (theirs - exact).square().mean().sqrt().item()
    assert (ours - exact).square().mean().sqrt().item() < 1.5 * their_error


def test_auto_takes_the_checkpoints_own_dtype(tmp_path: Path) -> None:
    hf = save_hf_model("llama2", tmp_path)
    hf.to(torch.bfloat16).save_pretrained(tmp_path)
    assert DecoderModel.load(str(tmp_path)).dtype == torch.bfloat16
    assert DecoderModel.load(str(tmp_path), dtype="float32").dtype == torch.float32


def test_a_dtype_that_is_none_of_ours(tmp_path: Path) -> None:
    save_hf_model("llama2", tmp_path)
    with pytest.raises(UnsupportedModelError, match="'int8'"):
        DecoderModel.load(str(tmp_path), dtype="int8")  # type: ignore[arg-type]


def test_cache_size(tmp_path: Path) -> None:
    save_hf_model("llama3", tmp_path)
    model = DecoderModel.load(str(tmp_path))
    cache = new_cache(model)
    per_block = KVCache.bytes_per_block(model.config, block_size=BLOCK_SIZE, dtype=model.dtype)
    assert cache.size_bytes == NUM_BLOCKS * per_block == 3 * 2 * 64 * 4 * 2 * 16 * 4
    with pytest.raises(ValueError, match="num_blocks=0"):
        KVCache(model.config, num_blocks=0, block_size=4, dtype=torch.float32)


def test_longrope_has_short_factors_where_no_more_is_served(tmp_path: Path) -> None:
    hf = save_hf_model("phi3-long", tmp_path, original_max_position_embeddings=NUM_TOKENS)
    token_ids = make_tokens(NUM_TOKENS)
    rows = Rows(token_ids=token_ids, num_computed=0, block_table=make_table(0))
    short = DecoderModel.load(str(tmp_path), max_context=NUM_TOKENS)
    assert_equal_logits(run(short, new_cache(short), rows).logits, hf_logits(hf, token_ids))
    long = DecoderModel.load(str(tmp_path))
    assert not torch.allclose(run(long, new_cache(long), rows).logits, hf_logits(hf, token_ids))
    assert long.numerics != short.numerics


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("cohere2", "gpt-oss", "olmo2", "qwen2-moe")
        ),
    ],
)
def test_deterministic_rows_keep_their_bits_in_any_company(name: str, tmp_path: Path) -> None:
    save_hf_model(name, tmp_path)
    model = DecoderModel.load(str(tmp_path), deterministic=True)
    one = Rows(token_ids=make_tokens(7), num_computed=0, block_table=make_table(0))
    others = [
        Rows(token_ids=make_tokens(count, seed=count), num_computed=0, block_table=make_table(seed))
        for seed, count in ((1, 19), (2, 1), (3, 30))
    ]
    alone = run(model, new_cache(model), one)
    together = run(model, new_cache(model), *others[:2], one, others[2])
    assert torch.equal(together.logits[20:27], alone.logits)


def test_what_recurrent_layers_do_not_do_is_refused_by_name(tmp_path: Path) -> None:
    save_hf_model("qwen3-next", tmp_path)
    with pytest.raises(UnsupportedModelError, match="deterministic mode"):
        load_model(str(tmp_path), deterministic=True)
    with pytest.raises(UnsupportedModelError, match="--quantize"):
        load_model(str(tmp_path), rounding=Rounding(scheme="int8"))
    assert not load_model(str(tmp_path), deterministic=None).deterministic
    with pytest.raises(ValueError, match="block_size=48 must divide 64"):
        ModelRunner(model=load_model(str(tmp_path)), num_blocks=4, block_size=48)
