"""The acceptance rule on scripted logits, against sampling position by position."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.block_pool import BlockPool, root_hash
from engine.kv_view import KVView
from engine.noise import SequenceNoise
from engine.request import EngineRequest, SamplingParams
from engine.sequence import Sequence
from engine.token_tree import TokenTree
from kernels.gumbel_noise import gumbel_noise, row_key
from kernels.sample import log_target
from verifier.coupled import CoupledVerifier

VOCAB_SIZE = 12

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


@given(
    cases=st.lists(
        st.tuples(SAMPLINGS, st.integers(1, 12), st.integers(1, 40)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 2.0]),
)
def test_equals_sampling_one_position_after_the_other(
    cases: list[tuple[SamplingParams, int, int]], seed: int, spread: float
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sequences = [make_sequence(sampling, length) for sampling, _, length in cases]
    trees, blocks = [], []
    for sequence, (_, num_nodes, _) in zip(sequences, cases, strict=True):
        tree = make_tree(rng, num_nodes)
        rows = spread * torch.randn(num_nodes, VOCAB_SIZE)
        for node, parent in enumerate(tree.parent_index):
            if parent >= 0 and rng.random() < 0.5:  # or else no path would be long
                rows[parent, tree.token_ids[node]] += 30.0
        trees.append(tree)
        blocks.append(rows)
        assert sequence.num_prompt_tokens > 0
    verdicts = CoupledVerifier().verify(sequences, trees, torch.cat(blocks))
    for sequence, tree, rows, verdict in zip(sequences, trees, blocks, verdicts, strict=True):
        path, emitted = expect(sequence, tree, rows)
        assert verdict.accepted_nodes == path
        assert verdict.token_ids == emitted
        assert verdict.nodes == [0, *path]
        assert verdict.num_accepted_tokens == len(path) == len(emitted) - 1


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=3)
    sequence = make_sequence(sampling, 6)
    logits = torch.randn(1, VOCAB_SIZE)
    (verdict,) = CoupledVerifier().verify([sequence], [TokenTree.root_only(5)], logits)
    assert verdict.token_ids == [choose(logits[0], sampling, 6)]
    assert verdict.accepted_nodes == []


def test_the_target_is_judged_on_its_own_logits_not_changed() -> None:
    sequences = [make_sequence(SamplingParams(max_tokens=5, temperature=t), 4) for t in (0.0, 1.0)]
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    CoupledVerifier().verify(sequences, [TokenTree.root_only(1)] * 2, logits)
    assert torch.equal(logits, before)  # log-probabilities are reported from them afterwards
