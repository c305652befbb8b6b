"""The acceptance rule on scripted logits, against sampling position by position."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.cache.block_pool import BlockPool, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trees.forest import Forest
from outrider.kernels.sampling import sample, truncation_floor
from outrider.kernels.sampling.gumbel_noise import gumbel_noise, row_key
from outrider.kernels.sampling.sample import log_target
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import SamplingParams
from outrider.verifier.sampling import forest_sampling_rows
from outrider.verifier.token_tree import TokenTree
from tests.sizes import repeats

VOCAB_SIZE = 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(triton is None, reason="there is no triton for this system")
CHOICES = ["reference", pytest.param("triton", marks=needs_triton)]


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """The interpreter takes a vocabulary of a dozen for one of several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(sample, "_CHUNK", 8)
            patch.setattr(truncation_floor, "_CHUNK", 16)
            patch.setattr(truncation_floor, "_CAPACITY", 16)
        yield


SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 3, 6]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
    choice_index=st.integers(0, 3),
)


def make_sequence(sampling: SamplingParams, num_tokens: int) -> Sequence:
    prompt = tuple(range(num_tokens))
    request = EngineRequest(
        request_id="r", prompt_token_ids=prompt, tier="large", sampling=sampling
    )
    pool = BlockPool(num_blocks=8, block_size=16)
    return Sequence(
        request=request,
        tier="large",
        view=KVView(pool, root=root_hash("")),
        noise=SequenceNoise(sampling, "large", vocab_size=VOCAB_SIZE),
        submitted_s=0.0,
        token_ids=list(prompt),
    )


def make_tree(rng: random.Random, num_nodes: int) -> TokenTree:
    tokens, parents = [rng.randrange(VOCAB_SIZE)], [-1]
    while len(tokens) < num_nodes:
        parent = rng.randrange(len(tokens))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [token for token in range(VOCAB_SIZE) if token not in taken]
        if free:
            tokens.append(rng.choice(free))
            parents.append(parent)
    return TokenTree(token_ids=tokens, parent_index=parents)


def choose(row: Tensor, sampling: SamplingParams, position: int) -> int:
    """argmax(log target + noise) at one position, straight from the definition."""
    if sampling.temperature == 0.0:
        return int(row.argmax())
    scores = log_target(
        row[None],
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p]),
        torch.tensor([sampling.min_p]),
    )
    stream = 2 * sampling.choice_index + 1  # the large tier's
    key = torch.tensor([row_key(sampling.seed, stream, position)], dtype=torch.int32)
    return int((scores + gumbel_noise(key, row.shape[0])).argmax())


def expect(sequence: Sequence, tree: TokenTree, logits: Tensor) -> tuple[list[int], list[int]]:
    """Accepted nodes and emitted tokens: sample, and go on where the sample was guessed."""
    sampling = sequence.request.sampling
    here, depth = 0, 0
    path: list[int] = []
    emitted: list[int] = []
    while True:
        token = choose(logits[here], sampling, len(sequence.token_ids) + depth)
        emitted.append(token)
        children = [n for n, parent in enumerate(tree.parent_index) if parent == here and n > 0]
        right = [node for node in children if tree.token_ids[node] == token]
        if not right:
            return path, emitted
        here, depth = right[0], depth + 1
        path.append(here)


Case = tuple[SamplingParams, int, int]  # number of nodes, of tokens in front

CASES = st.lists(
    st.tuples(SAMPLINGS, st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=4
)
FEW_CASES = st.lists(  # the interpreter is slow
    st.tuples(SAMPLINGS, st.integers(1, 5), st.integers(1, 40)), min_size=1, max_size=2
)


def make_case(
    cases: list[Case], seed: int, spread: float
) -> tuple[list[Sequence], list[TokenTree], list[Tensor]]:
    """Sequences, their trees, and logits under which some guesses are right."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sequences = [make_sequence(sampling, length) for sampling, _, length in cases]
    trees, blocks = [], []
    for _, num_nodes, _ in cases:
        tree = make_tree(rng, num_nodes)
        rows = spread * torch.randn(num_nodes, VOCAB_SIZE)
        for node, parent in enumerate(tree.parent_index):
            if parent >= 0 and rng.random() < 0.5:  # or else no path would be long
                rows[parent, tree.token_ids[node]] += 30.0
        trees.append(tree)
        blocks.append(rows)
    return sequences, trees, blocks


def check_verify(cases: list[Case], seed: int, spread: float) -> None:
    sequences, trees, blocks = make_case(cases, seed, spread)
    verdicts = CoupledVerifier().verify(sequences, trees, torch.cat(blocks).to(DEVICE))
    with use_kernels("reference"):
        expected = [expect(*parts) for parts in zip(sequences, trees, blocks, strict=True)]
    for verdict, (path, emitted) in zip(verdicts, expected, strict=True):
        assert verdict.accepted_nodes == path
        assert verdict.token_ids == emitted
        assert verdict.nodes == [0, *path]
        assert verdict.num_accepted_tokens == len(path) == len(emitted) - 1


@given(cases=CASES, seed=st.integers(0, 2**32), spread=st.sampled_from([0.1, 2.0]))
def test_equals_sampling_one_position_after_the_other(
    cases: list[Case], seed: int, spread: float
) -> None:
    check_verify(cases, seed, spread)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows compute with any garbage
@settings(max_examples=repeats(6, 2))
@given(cases=FEW_CASES, seed=st.integers(0, 2**32))
def test_the_kernels_are_that_rule(cases: list[Case], seed: int) -> None:
    with use_kernels("triton"):
        check_verify(cases, seed, 2.0)


def forest_of(
    sequences: list[Sequence], trees: list[TokenTree], *, slack: int, padding: int
) -> Forest:
    """The trees as a forest, with padding rows behind them."""
    sizes = [tree.num_nodes for tree in trees]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    flat = torch.tensor(
        [
            [token for tree in trees for token in tree.token_ids] + [0] * padding,
            [
                -1 if parent < 0 else start + parent
                for start, tree in zip(starts, trees, strict=True)
                for parent in tree.parent_index
            ]
            + [-1] * padding,
            [depth for tree in trees for depth in tree.depth] + [0] * padding,
            [number for number, size in enumerate(sizes) for _ in range(size)] + [-1] * padding,
        ],
        device=DEVICE,
    )
    max_depth = max(max(tree.depth) for tree in trees) + slack
    forest = SimpleNamespace(
        sequences=sequences,
        num_trees=len(trees),
        sampling=forest_sampling_rows(sequences, max_depth, DEVICE),
        max_depth=max_depth,
        token_ids=flat[0],
        parent_index=flat[1],
        depth=flat[2],
        tree_index=flat[3],
    )
    return cast(Forest, forest)


def check_forest(cases: list[Case], seed: int, slack: int, padding: int) -> None:
    sequences, trees, blocks = make_case(cases, seed, spread=2.0)
    forest = forest_of(sequences, trees, slack=slack, padding=padding)
    garbage = torch.full((padding, VOCAB_SIZE), torch.nan)
    found = CoupledVerifier().judge_forest(forest, torch.cat((*blocks, garbage)).to(DEVICE))
    assert found.accepted_path.shape == (len(cases), forest.max_depth)
    assert found.emitted_tokens.shape == (len(cases), forest.max_depth + 1)
    with use_kernels("reference"):
        expected = [expect(*parts) for parts in zip(sequences, trees, blocks, strict=True)]
    start = 0
    for number, (path, emitted) in enumerate(expected):
        own = [row for row in found.accepted_path[number].tolist() if row >= 0]
        assert own == [start + node for node in path]
        assert [t for t in found.emitted_tokens[number].tolist() if t >= 0] == emitted
        start += trees[number].num_nodes


@given(cases=CASES, seed=st.integers(0, 2**32), slack=st.integers(0, 2), padding=st.integers(0, 3))
def test_a_forest_is_judged_by_the_same_rule(
    cases: list[Case], seed: int, slack: int, padding: int
) -> None:
    check_forest(cases, seed, slack, padding)


@pytest.mark.slow
@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows compute with any garbage
@settings(max_examples=repeats(6, 2))
@given(cases=FEW_CASES, seed=st.integers(0, 2**32), padding=st.integers(0, 3))
def test_the_kernels_judge_a_forest_so(cases: list[Case], seed: int, padding: int) -> None:
    with use_kernels("triton"):
        check_forest(cases, seed, 1, padding)


@pytest.mark.parametrize("choice", CHOICES)
def test_plain_decoding_is_a_tree_of_one_node(choice: KernelChoice) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    sequence = make_sequence(sampling, 6)
    logits = torch.randn(1, VOCAB_SIZE)
    with use_kernels(choice):
        (verdict,) = CoupledVerifier().verify(
            [sequence], [TokenTree.root_only(5)], logits.to(DEVICE)
        )
    assert verdict.token_ids == [choose(logits[0], sampling, 6)]
    assert verdict.accepted_nodes == []


@settings(max_examples=repeats(100, 20))
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.sampled_from([VOCAB_SIZE, 16, 53]),
    st.sampled_from([(), (float("nan"),), (float("inf"), -float("inf"))]),
    st.integers(0, 10**6),
)
def test_greedy_trees_are_judged_alike_with_and_without_the_library(
    sizes: list[int], vocab_size: int, odd: tuple[float, ...], seed: int
) -> None:
    rng = random.Random(seed)
    greedy = SamplingParams(max_tokens=50, temperature=0.0)
    trees = [make_tree(rng, size) for size in sizes]
    sequences = [make_sequence(greedy, 4) for _ in sizes]
    # Of few numbers, so that some are equal; every third row has what is no number.
    rows = [rng.choices((-1.0, 0.0, 2.0, 3.0), k=vocab_size) for _ in range(sum(sizes))]
    for row in rows[::3]:
        row[rng.randrange(vocab_size)] = rng.choice((0.0, *odd))
    logits = torch.tensor(rows)
    found = CoupledVerifier().verify(sequences, trees, logits)
    with use_kernels("reference"):
        assert found == CoupledVerifier().verify(sequences, trees, logits)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_target_is_judged_on_its_own_logits_not_changed(choice: KernelChoice) -> None:
    sequences = [make_sequence(SamplingParams(max_tokens=5, temperature=t), 4) for t in (0.0, 1.0)]
    logits = torch.randn(2, VOCAB_SIZE, device=DEVICE)
    before = logits.clone()
    with use_kernels(choice):
        CoupledVerifier().verify(sequences, [TokenTree.root_only(1)] * 2, logits)
    assert torch.equal(logits, before)  # log-probabilities are reported from them afterwards
