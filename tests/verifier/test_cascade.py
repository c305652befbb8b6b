"""The cascade's mixture against its definition, and what the verifier makes of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.cache.block_pool import BlockPool, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.triton_support import triton, use_kernels
from outrider.verifier.cascade import log_mixture
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import CascadeParams, CascadeRule, SamplingParams, Tier
from outrider.verifier.sampling import RowGroup
from outrider.verifier.token_tree import TokenTree
from tests.verifier.mixtures import MARGIN, mixture, probs_of

VOCAB_SIZE = 12


def make_sequence(
    cascade: CascadeParams | None, num_tokens: int = 6, tier: Tier = "large", **sampling: float
) -> Sequence:
    params = SamplingParams(max_tokens=50, **sampling)
    prompt = tuple(range(num_tokens))
    request = EngineRequest(
        request_id="r", prompt_token_ids=prompt, tier=tier, sampling=params, cascade=cascade
    )
    pool = BlockPool(num_blocks=8, block_size=16)
    return Sequence(
        request=request,
        tier=tier,
        view=KVView(pool, root=root_hash("")),
        noise=SequenceNoise(params, tier, vocab_size=VOCAB_SIZE + 4),
        submitted_s=0.0,
        token_ids=list(prompt),
    )


# ---- the mixture ----------------------------------------------------------------------------

ROUNDING = 1e-6  # of float32; the definitions below are in double precision


def is_clear(small: Tensor, large: Tensor, sampling: SamplingParams, own: CascadeParams) -> bool:
    """Return whether every rule is clear of its bar by more than float32's error."""
    (small_probs, small1), (large_probs, large1) = (
        probs_of(small, sampling),
        probs_of(large, sampling),
    )
    distance = np.maximum(small_probs - large_probs, 0.0).sum()
    if own.rule == "opt":
        lead = large1.max() - own.alpha * distance - small1.max()
        return bool(abs(lead - MARGIN) > ROUNDING)
    below = large1[large1 < large1.max()]
    return bool((np.abs(below - (1 - own.alpha) * large1.max()) > ROUNDING).all())


CASCADES = st.builds(
    CascadeParams,
    alpha=st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.9, 1.0]),
    rule=st.sampled_from(["opt", "token_specific"]),
)
SAMPLINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.6]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.1]),
    }
)


@given(
    cases=st.lists(st.tuples(CASCADES, SAMPLINGS, st.integers(0, 3)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    drift=st.sampled_from([0.1, 1.0]),
)
def test_the_mixture_is_the_papers(
    cases: list[tuple[CascadeParams, dict[str, float], int]], seed: int, drift: float
) -> None:
    sequences = [make_sequence(cascade, **sampling) for cascade, sampling, _ in cases]
    groups = [
        RowGroup(sequence=sequence, depths=list(range(num_rows)), paths=list)
        for sequence, (_, _, num_rows) in zip(sequences, cases, strict=True)
    ]
    num_rows = sum(len(group.depths) for group in groups)
    torch.manual_seed(seed)
    large = torch.randn(num_rows, VOCAB_SIZE)
    small = large + drift * torch.randn(num_rows, VOCAB_SIZE)
    got = log_mixture(small, large, groups).softmax(-1).double().numpy() if num_rows else []
    row = 0
    for sequence, group in zip(sequences, groups, strict=True):
        cascade, sampling = sequence.cascade, sequence.request.sampling
        assert cascade is not None
        for _ in group.depths:
            assume(is_clear(small[row], large[row], sampling, cascade))
            right = mixture(small[row], large[row], sampling, cascade)
            assert right.sum() == pytest.approx(1.0, abs=1e-6)
            assert got[row] == pytest.approx(right, abs=1e-6)
            row += 1


def mix(
    small: list[float], large: list[float], alpha: float, rule: CascadeRule, **sampling: float
) -> list[float]:
    """pi from probabilities."""
    sequence = make_sequence(CascadeParams(alpha=alpha, rule=rule), **sampling)
    group = RowGroup(sequence=sequence, depths=[0], paths=list)
    rows = [torch.tensor([probs]).log() for probs in (small, large)]
    return log_mixture(rows[0], rows[1], [group]).softmax(-1)[0].tolist()


def test_opt_by_hand() -> None:
    small, large = [0.5, 0.3, 0.2], [0.1, 0.7, 0.2]  # the distance is 0.4
    assert mix(small, large, 0.4, "opt", temperature=1.0) == pytest.approx(large)  # .5 < .7 - .16
    assert mix(small, large, 0.6, "opt", temperature=1.0) == pytest.approx(small)  # .5 > .7 - .24
    # The smaller model may be sure of itself: then it is never deferred.
    assert mix([0.9, 0.1, 0.0], large, 0.0, "opt", temperature=1.0) == pytest.approx([0.9, 0.1, 0])
    # At temperature 0 the two differ altogether, and the difference of the maxima decides.
    assert mix(small, large, 0.1, "opt", temperature=0.0) == [0.0, 1.0, 0.0]
    assert mix(small, large, 0.3, "opt", temperature=0.0) == [1.0, 0.0, 0.0]


def test_token_specific_by_hand() -> None:
    small, large = [0.5, 0.3, 0.2], [0.4, 0.5, 0.1]
    mixed = mix(small, large, 0.3, "token_specific", temperature=1.0)  # token 2 is not good enough
    assert mixed == pytest.approx([0.5 + 0.4 * 0.2, 0.3 + 0.5 * 0.2, 0.1 * 0.2])
    assert mix(small, large, 0.1, "token_specific", temperature=0.0) == [0.0, 1.0, 0.0]
    assert mix(small, large, 0.3, "token_specific", temperature=0.0) == [1.0, 0.0, 0.0]


@pytest.mark.slow_cases
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_equal_models_or_two_tokens_are_no_matter_of_rounding(alpha: float) -> None:
    """Where the sides of the rule are equal, the last bits of the logits must not decide."""
    torch.manual_seed(0)
    for _ in range(200):
        logits = 3 * torch.randn(1, 2)
        small = (logits if alpha < 1.0 else 0.9 * logits) + 1e-6 * torch.randn(1, 2)
        group = RowGroup(
            sequence=make_sequence(CascadeParams(alpha=alpha), temperature=1.0),
            depths=[0],
            paths=list,
        )
        assert torch.equal(log_mixture(small, logits, [group]), small)


def test_tokens_unknown_to_the_small_model_are_left_to_the_large() -> None:
    nothing = torch.full((1, 3), -torch.inf)
    large = torch.tensor([[0.5, 0.2, 0.3]]).log()
    for rule in ("opt", "token_specific"):
        for temperature in (0.0, 1.0):
            sequence = make_sequence(CascadeParams(alpha=0.5, rule=rule), temperature=temperature)
            group = RowGroup(sequence=sequence, depths=[0], paths=list)
            pi = log_mixture(nothing, large, [group]).softmax(-1)
            expected = [1.0, 0.0, 0.0] if temperature == 0.0 else [0.5, 0.2, 0.3]
            assert pi[0].tolist() == pytest.approx(expected)


# ---- the verdict ----------------------------------------------------------------------------


def row(token: int, *, width: int = VOCAB_SIZE, size: float = 9.0) -> Tensor:
    """Logits that are sure of one token."""
    logits = torch.zeros(width)
    logits[token] = size
    return logits


LENIENT = CascadeParams(alpha=1.0)  # the small model always
CHAIN = TokenTree(token_ids=[5, 1, 2, 3], parent_index=[-1, 0, 1, 2])


def chain_of(known: list[bool], tokens: tuple[int, ...] = (1, 2, 3, 4)) -> TokenTree:
    logits = [row(token) if known[node] else None for node, token in enumerate(tokens)]
    return replace(CHAIN, draft_logits=logits)


LARGE = torch.stack([row(1), row(2), row(9), row(4)])  # another opinion behind node 2


@pytest.mark.parametrize(
    ("known", "accepted", "emitted"),
    [
        ([True, True, True, True], [1, 2, 3], [1, 2, 3, 4]),
        ([True, True, True, False], [1, 2, 3], [1, 2, 3]),
        ([True, True, False, True], [1, 2], [1, 2]),
        ([True, False, True, True], [1], [1]),
        ([False, True, True, True], [], []),
    ],
)
def test_the_walk_stops_where_the_small_distribution_is_unknown(
    known: list[bool], accepted: list[int], emitted: list[int]
) -> None:
    sequence = make_sequence(LENIENT)
    (verdict,) = CoupledVerifier().verify([sequence], [chain_of(known)], LARGE)
    assert verdict.accepted_nodes == accepted
    assert verdict.token_ids == emitted
    assert verdict.nodes == [0, 1, 2, 3][: len(emitted)]
    assert verdict.unratified == [False, False, True, False][: len(emitted)]


def test_a_tree_without_any_logits_emits_nothing() -> None:
    sequence = make_sequence(LENIENT)
    (verdict,) = CoupledVerifier().verify([sequence], [CHAIN], LARGE)
    assert (verdict.accepted_nodes, verdict.token_ids) == ([], [])


def test_a_mismatch_still_gives_a_token() -> None:
    """The next token comes from the last accepted node, where its distribution is known."""
    tree = chain_of([True, True, True, True], tokens=(1, 7, 3, 4))
    (verdict,) = CoupledVerifier().verify([make_sequence(LENIENT)], [tree], LARGE)
    assert verdict.accepted_nodes == [1]
    assert verdict.token_ids == [1, 7]
    assert verdict.unratified == [False, True]


def test_the_other_sequences_of_the_pass_are_judged_as_ever() -> None:
    torch.manual_seed(1)
    lossless = [make_sequence(None, temperature=t, seed=3) for t in (0.0, 1.0)]
    small = make_sequence(LENIENT, tier="small")  # what was handed over has no cascade any more
    trees = [TokenTree.root_only(5), CHAIN, TokenTree.root_only(5)]
    logits = torch.cat([torch.randn(5, VOCAB_SIZE), torch.randn(1, VOCAB_SIZE)])
    alone = CoupledVerifier().verify([*lossless, small], trees, logits)
    tree = chain_of([True, True, False, True])
    mixed = CoupledVerifier().verify(
        [lossless[0], make_sequence(LENIENT), lossless[1], small],
        [trees[0], tree, trees[1], trees[2]],
        torch.cat([logits[:1], LARGE, logits[1:]]),
    )
    assert mixed[1].token_ids == [1, 2]
    for verdict, expected in zip([mixed[0], mixed[2], mixed[3]], alone, strict=True):
        assert verdict.token_ids == expected.token_ids
        assert verdict.accepted_nodes == expected.accepted_nodes
        assert not any(verdict.unratified)


@pytest.mark.parametrize("rule", ["opt", "token_specific"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_that_one_model_lacks_are_impossible(rule: CascadeRule, temperature: float) -> None:
    """The small model could not read on behind them, and the large one does not know its own."""
    sequence = make_sequence(CascadeParams(alpha=0.2, rule=rule), temperature=temperature, seed=1)
    wide = VOCAB_SIZE + 4
    wider_large = TokenTree(token_ids=[5], parent_index=[-1], draft_logits=[row(3)])
    logits = (row(wide - 1, width=wide, size=50.0) + row(3, width=wide, size=20.0))[None]
    (verdict,) = CoupledVerifier().verify([sequence], [wider_large], logits)
    assert verdict.token_ids == [3]
    assert verdict.unratified == [True]  # alone, the large model says what only it knows
    wider_small = replace(wider_large, draft_logits=[row(wide - 1, width=wide, size=50.0)])
    (verdict,) = CoupledVerifier().verify([sequence], [wider_small], row(3, size=50.0)[None])
    assert verdict.token_ids == [3]


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason="there is no triton for this system")
def test_the_kernels_give_the_same_verdicts() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    sequences = [
        make_sequence(CascadeParams(alpha=0.3), temperature=1.0, top_k=5, seed=1),
        make_sequence(CascadeParams(alpha=0.2, rule="token_specific"), temperature=0.8, seed=2),
        make_sequence(CascadeParams(alpha=0.9), temperature=0.0),
        make_sequence(None, temperature=1.0, top_p=0.8, seed=4),
    ]
    large = 3 * torch.randn(16, VOCAB_SIZE)
    small = large + torch.randn(16, VOCAB_SIZE)
    known = [True, True, True, False]
    trees = [
        replace(
            CHAIN,
            token_ids=[5, *large[4 * n : 4 * n + 3].argmax(-1).tolist()],
            draft_logits=[
                row.to(device) if known[node] else None
                for node, row in enumerate(small[4 * n : 4 * n + 4])
            ],
        )
        for n in range(4)
    ]
    verdicts = {}
    for choice in ("reference", "triton"):
        with use_kernels(choice):
            verdicts[choice] = CoupledVerifier().verify(sequences, trees, large.to(device))
    assert verdicts["triton"] == verdicts["reference"]
    assert sum(verdict.num_accepted_tokens for verdict in verdicts["triton"]) > 3
    assert any(any(verdict.unratified) for verdict in verdicts["triton"])
    assert any(len(v.token_ids) == v.num_accepted_tokens for v in verdicts["triton"])  # open
