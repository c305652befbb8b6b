"""What a head computes in an engine is what its definition says, and so acceptance does not decay.

The rows of text and of trees, behind prefix hits, in chunks and under pre-emption, are compared
with the same weights in plain torch over transformers' hidden states of the text: a shift by one,
rows that carry another row's features or a cache that holds another text would be found.
"""

import pytest
import torch
from torch import Tensor

from outrider.draft.config import DraftConfig
from outrider.draft.training.head_model import TrainedHeadKind, UnrollRows
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from tests.engines import assert_idle, make_request, random_prompt, serve
from tests.heads import TextAndPath, make_head_engine, watch_head
from tests.laws.head_cases import conversations, head_case
from tests.laws.same_answers import total
from tests.sizes import repeats
from tests.trained_heads import (
    DEPTH,
    NUM_TOKENS,
    Taught,
    taught_answers,
    taught_head,
    taught_prompts,
)

BLOCK_SIZE = 4
KINDS = [
    "eagle3",
    pytest.param("mtp", marks=pytest.mark.slow),
    pytest.param("peagle", marks=pytest.mark.long),
]
# One guess a level, so that which ones are accepted does not depend on what was learnt before.
CHAIN = DraftConfig(
    sources=("head",),
    max_branching=1,
    max_frontier=1,
    max_draft_depth=DEPTH,
    min_path_prob=0.0,
)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "dflash" else pytest.mark.long)
        for kind in ("eagle3", "mtp", "peagle", "dflash")
    ],
)
def test_what_a_head_computes_depends_on_the_text_alone(kind: str) -> None:
    """The same logits as in an engine without a cache."""
    case = head_case(f"random-{kind}")
    turns = conversations(case, 5)
    alone: dict[TextAndPath, Tensor] = {}
    for request in (request for requests, _ in turns for request in requests):
        engine = make_head_engine(case.pair, case.head, prefix_caching=False)
        seen = watch_head(engine)
        serve(engine, [request])
        alone |= seen
    # A cache that is too small for all conversations, and chunks that split their prompts.
    engine = make_head_engine(
        case.pair,
        case.head,
        num_blocks=60,
        block_size=BLOCK_SIZE,
        config=EngineConfig(max_tokens_per_step=20),
    )
    seen = watch_head(engine)
    num_cached = num_common = 0
    for requests, _ in turns:
        answers = serve(engine, requests)
        num_cached += total(answers, "num_cached_tokens")
    for tokens, logits in seen.items():
        if tokens in alone:
            num_common += 1
            torch.testing.assert_close(logits, alone[tokens], rtol=1e-3, atol=1e-3)
    assert num_cached > 100
    assert num_common > len(seen) / 2
    assert_idle(engine)


@torch.inference_mode()
def defined(taught: Taught, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
    """Logits behind a text and a path of drafted tokens, over the head's own tokens."""
    output = taught.pair.large_reference(torch.tensor([text]), output_hidden_states=True)
    taps = torch.cat([output.hidden_states[tap] for tap in taught.head.tap_layers], dim=-1)
    nothing = torch.zeros(1, len(path), taps.shape[-1])
    rows = UnrollRows(
        token_ids=torch.tensor([[*text, *path]]),
        taps=torch.cat([taps, nothing], dim=1),
        rows=torch.tensor([[len(text) - 2]]),
    )
    *_, hidden = taught.trained.unroll(rows, len(path) + 1)
    return taught.trained.logits(hidden)[0, 0]


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_computes_what_it_was_trained_to(kind: TrainedHeadKind) -> None:
    taught = taught_head(kind)
    engine = make_head_engine(
        taught.pair,
        taught.head,
        block_size=BLOCK_SIZE,
        num_blocks=60,
        draft=DraftConfig(max_draft_depth=DEPTH, max_branching=3),
        config=EngineConfig(max_tokens_per_step=24),
    )
    seen = watch_head(engine)
    requests = [
        make_request(
            str(number), prompt, max_tokens=NUM_TOKENS, seed=number, temperature=0.8 * (number % 2)
        )
        for number, prompt in enumerate(taught_prompts())
    ]
    serve(engine, requests)
    answers = serve(engine, requests)  # behind prefix hits
    assert total(answers, "num_cached_tokens") > 20
    places = [*seen][:: max(1, len(seen) // repeats(120, 40))]
    assert {len(path) for _, path in places} == set(range(DEPTH))
    for place in places:
        torch.testing.assert_close(seen[place], defined(taught, *place), rtol=1e-2, atol=1e-2)
    assert_idle(engine)


# ---- acceptance -------------------------------------------------------------------------------


def taught_requests(number: int) -> list[EngineRequest]:
    """What was taught, from several places on."""
    return [
        make_request(f"{number}/{len(prompt)}/{begun}", (*prompt, *answer[:begun]), max_tokens=12)
        for prompt, answer in taught_answers()
        for begun in range(0, 8, 2)
    ]


def other_requests(number: int) -> list[EngineRequest]:
    """Texts that begin alike and go on with other tokens."""
    return [
        make_request(
            f"{number}/{place}",
            (
                *prompt,
                *answer[:place],
                *random_prompt(9, seed=10 * number + place, vocab_size=2000),
            ),
            max_tokens=3,
        )
        for place, (prompt, answer) in enumerate(taught_answers())
    ]


def accepted_shares(engine: Engine, requests: list[EngineRequest]) -> tuple[list[float], int]:
    """Of the guesses of each depth, the share that was accepted; and cached tokens of prompts."""

    def counts() -> tuple[list[int], list[int]]:
        stats = engine.stats()
        by_depth = (stats.accepted_by_source, stats.drafted_by_source)
        found = ([*each.get("head", ()), *[0] * DEPTH][:DEPTH] for each in by_depth)
        return tuple(found)  # type: ignore[return-value]

    before = counts()
    answers = serve(engine, requests)
    accepted, drafted = (
        [end - begin for begin, end in zip(*both, strict=True)]
        for both in zip(before, counts(), strict=True)
    )
    shares = [right / max(all_, 1) for right, all_ in zip(accepted, drafted, strict=True)]
    return shares, total(answers, "num_cached_tokens")


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_does_not_decay_over_prefix_hits(kind: str) -> None:
    """Hundreds of requests in one engine, whose cache drops blocks now and then."""
    taught = taught_head(kind)
    # A step takes the same prompts, however slow the machine: shares of steps are compared.
    in_one_pass = EngineConfig(min_prefill_tokens=EngineConfig().max_tokens_per_step)
    engine = make_head_engine(
        taught.pair,
        taught.head,
        draft=CHAIN,
        num_blocks=300,
        block_size=BLOCK_SIZE,
        config=in_one_pass,
    )
    first, _ = accepted_shares(engine, taught_requests(0))
    assert first[0] > 0.5
    num_cached = 0
    for number in range(1, repeats(12, 4)):
        serve(engine, other_requests(number))
        shares, cached = accepted_shares(engine, taught_requests(number))
        num_cached += cached
        assert shares == pytest.approx(first, abs=0.03)
    assert num_cached / number > 12 * len(taught_requests(0))
    assert_idle(engine)
