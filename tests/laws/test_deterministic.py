"""Deterministic mode: a token's logits have the same bits in whatever company it is computed."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor

from outrider.engine.config import EngineConfig
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.request import EngineRequest
from outrider.kernels.triton_support import use_kernels
from tests.engines import (
    PAIR_FOLDER,
    Answer,
    Pair,
    heldout_prompts,
    make_request,
    random_prompt,
    shipped_pair,
    texts,
)
from tests.laws.same_answers import (
    ALONE,
    AS_USUAL,
    UNDRAFTED,
    WARM,
    Way,
    assert_same_answers,
    by,
    serve_in,
)
from tests.sizes import repeats

# What the products compute with; int8 and int4 are schemes whose activations are bfloat16.
Dtype = Literal["float32", "bfloat16", "int8", "int4"]
DTYPES: list[Dtype] = ["float32", "bfloat16", "int8", "int4"]
# Two threads wait for each other at every operation: slow wherever a core is busy.
THREADED_DTYPES = [
    pytest.param("float32", marks=pytest.mark.long),
    pytest.param("bfloat16", marks=pytest.mark.slow),
    pytest.param("int8", marks=pytest.mark.slow),
    pytest.param("int4", marks=pytest.mark.slow),
]
NUM_STREAMS = repeats(8, 4)
BLOCK_SIZE = 16
# Random prompts after which two tokens are often so close that a last bit decides in bfloat16.
HESITANT = (17, 22, 37, 42, 43, 44, 79, 81)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@cache
def model(tier: str, dtype: Dtype, *, deterministic: bool) -> DecoderModel:
    folder = str(PAIR_FOLDER / tier)
    if dtype == "int8" or dtype == "int4":
        return DecoderModel.load(
            folder, deterministic=deterministic, rounding=Rounding(scheme=dtype)
        )
    return DecoderModel.load(folder, dtype=dtype, deterministic=deterministic)


@cache
def pair(dtype: Dtype, *, deterministic: bool = True) -> Pair:
    shipped = shipped_pair("float32" if dtype == "float32" else "bfloat16")
    return Pair(
        large=model("large", dtype, deterministic=deterministic),
        small=model("small", dtype, deterministic=deterministic),
        large_reference=shipped.large_reference,
        small_reference=shipped.small_reference,
    )


# ---- logits ---------------------------------------------------------------------------------


def prompts(count: int) -> list[list[int]]:
    """Prompts of 3 to some 250 tokens."""
    held = heldout_prompts(64)
    long = [token for prompt in held for token in prompt]
    rng = random.Random(3)
    return [
        long[start : start + rng.choice([3, 17, 40, 64, 101, 250])]
        for start in range(0, 40 * count, 40)
    ]


def a_tree(num_nodes: int) -> tuple[list[int], list[int]]:
    """(token ids, ancestor masks); node 0 is the root, depths reach some ten."""
    rng = random.Random(5)
    tokens, masks = [rng.randrange(3, 2000)], [1]
    for node in range(1, num_nodes):
        tokens.append(rng.randrange(3, 2000))
        masks.append(masks[rng.randrange(max(0, node - 8), node)] | 1 << node)
    return tokens, masks


class Passes:
    """Runs passes of one model, each sequence in a view of its own."""

    def __init__(self, decoder: DecoderModel) -> None:
        self.runner = ModelRunner(model=decoder, num_blocks=1200, block_size=BLOCK_SIZE)

    def slice(
        self, tokens: list[int], *, start: int = 0, num_logit_rows: int = 1, length: int = 0
    ) -> ForwardSlice:
        view = self.runner.new_view("")
        view.reserve(max(start + len(tokens), length))
        return ForwardSlice(
            view=view, token_ids=tokens, start_slot=start, num_logit_rows=num_logit_rows
        )

    def run(self, *slices: ForwardSlice) -> Tensor:
        return self.runner.forward(slices).logits

    def alone(self, tokens: list[int], chunk: int | None = None) -> Tensor:
        """Logits of the last token, of a prompt read at once or in chunks: [1, vocab_size]."""
        piece = self.slice(tokens)
        if chunk is None:
            return self.run(piece)
        logits = torch.empty(0)
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            logits = self.run(
                ForwardSlice(
                    view=piece.view,
                    token_ids=part,
                    start_slot=start,
                    num_logit_rows=1,
                )
            )
        return logits

    def in_a_tree(self, prefix: list[int], tokens: list[int], masks: list[int]) -> Tensor:
        """Logits of every node: [nodes, vocab_size]."""
        piece = self.slice(prefix, length=len(prefix) + len(tokens))
        self.run(piece)
        return self.run(
            ForwardSlice(
                view=piece.view,
                token_ids=tokens,
                start_slot=len(prefix),
                num_logit_rows=len(tokens),
                positions=[len(prefix) + mask.bit_count() - 1 for mask in masks],
                tree_start=len(prefix),
                ancestor_masks=masks,
            )
        )

    def one_by_one(self, tokens: list[int], num_last: int) -> Tensor:
        """Logits of the last token, read after the others as decoding reads them."""
        piece = self.slice(tokens[:-num_last], length=len(tokens))
        logits = self.run(piece)
        for place in range(len(tokens) - num_last, len(tokens)):
            logits = self.run(
                ForwardSlice(
                    view=piece.view,
                    token_ids=[tokens[place]],
                    start_slot=place,
                    num_logit_rows=1,
                )
            )
        return logits


def differences(decoder: DecoderModel) -> Iterator[str]:
    """Yield where a token's logits do not have the bits they have alone."""
    passes = Passes(decoder)

    def compare(name: str, logits: Tensor, expected: Tensor) -> Iterator[str]:
        if not torch.equal(logits.view(torch.int32), expected.view(torch.int32)):
            yield name

    sequences = prompts(repeats(32, 8))
    together = passes.run(*(passes.slice(tokens) for tokens in sequences))
    singles: list[Tensor] = []
    for number, tokens in enumerate(sequences):
        singles.append(passes.alone(tokens))
        yield from compare(
            f"prompt {number} in a batch of 32", together[number : number + 1], singles[-1]
        )
    yield from compare("read in chunks", passes.alone(sequences[5], 29), singles[5])
    yield from compare("read token by token", passes.one_by_one(sequences[5], 10), singles[5])
    # decoding rows of 32 sequences
    pieces = [passes.slice(tokens[:-1], length=len(tokens)) for tokens in sequences]
    passes.run(*pieces)
    steps = [
        ForwardSlice(
            view=piece.view, token_ids=[tokens[-1]], start_slot=len(tokens) - 1, num_logit_rows=1
        )
        for piece, tokens in zip(pieces, sequences, strict=True)
    ]
    decoded = passes.run(*steps)
    for number, single in enumerate(singles):
        yield from compare(
            f"row {number} of a decoding batch", decoded[number : number + 1], single
        )
    for num_nodes in (64, 7):
        tokens, masks = a_tree(num_nodes)
        for prefix in (sequences[3], sequences[4][:31], sequences[6][:1]):
            nodes = passes.in_a_tree(prefix, tokens, masks)
            for node in (0, 1, num_nodes // 2, num_nodes - 1):
                path = [tokens[j] for j in range(num_nodes) if masks[node] >> j & 1]
                single = passes.one_by_one(prefix + path, len(path))
                yield from compare(f"node {node} of {num_nodes}", nodes[node : node + 1], single)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_alone_in_a_tree_and_in_a_batch(dtype: Dtype) -> None:
    assert list(differences(model("large", dtype, deterministic=True))) == []


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", THREADED_DTYPES)
def test_logits_with_two_threads(dtype: Dtype) -> None:
    assert list(differences(model("large", dtype, deterministic=True))) == []


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("int8", marks=pytest.mark.long), "int4"]
)
def test_the_normal_mode_does_not_promise_that(dtype: Dtype) -> None:
    """The law above can fail: it does without the mode, in torch's operations."""
    load = model.__wrapped__  # weights are laid out for other operations: they are not kept
    with use_kernels("reference"):
        assert next(differences(load("large", dtype, deterministic=False)), None) is not None


# ---- streams --------------------------------------------------------------------------------


@cache
def stream_prompts() -> tuple[tuple[int, ...], ...]:
    """Tasks, and random tokens after which the model hesitates."""
    hesitant = (random_prompt(12 + seed % 40, seed=seed, vocab_size=2000) for seed in HESITANT)
    return (*heldout_prompts(8), *hesitant)


def stream_requests(last: int = NUM_STREAMS) -> list[EngineRequest]:
    """The last ones of all, greedy."""
    requests = [
        make_request(str(number), prompt, max_tokens=32)
        for number, prompt in enumerate(stream_prompts())
    ]
    return requests[-last:]


@cache
def alone(dtype: Dtype) -> dict[str, Answer]:
    """Return the streams of plain decoding, one request at a time."""
    return serve_in(ALONE | UNDRAFTED, stream_requests(), pair(dtype)).answers


@pytest.mark.slow
def test_greedy_streams_in_float32() -> None:
    """Those of the other numbers are the matrix' (`test_matrix_law.py`)."""
    chunks = by(config=EngineConfig(max_tokens_per_step=24, min_prefill_tokens=1))
    in_fours = Way(at_a_time=4)
    for vary in (ALONE, AS_USUAL, UNDRAFTED, in_fours | WARM, in_fours | chunks):
        assert_same_answers(
            stream_requests(), of=pair("float32"), vary=vary, right=alone("float32")
        )


@pytest.mark.slow
def test_bfloat16_streams_of_the_normal_mode_part() -> None:
    """The laws above can fail: they do without the mode, in torch's operations."""
    of = pair("bfloat16", deterministic=False)
    with use_kernels("reference"):
        plain = texts(serve_in(ALONE | UNDRAFTED, stream_requests(), of).answers)
        for vary in (AS_USUAL, UNDRAFTED):
            assert plain != texts(serve_in(vary, stream_requests(), of).answers)
