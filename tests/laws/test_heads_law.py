"""A drafter that reads the large model changes no text, whatever it knows of it.

On random weights, where wide trees have right guesses by chance, and on weights that were trained:
greedy and sampled, in batches, under pre-emption, in chunks, behind prefix hits, resumed, with
grammars, escalations and cascades; with a small model beside it or alone; with trees that grow on
the host or on the device.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.verifier.params import CascadeParams
from tests.engines import (
    FixedTimes,
    assert_idle,
    make_request,
    random_prompt,
    serve,
    shipped_tokenizer,
    texts,
)
from tests.grammars import schema_spec, shipped_compiler
from tests.heads import WIDE, head_runner, make_head_engine, random_head, random_pair
from tests.laws.head_cases import (
    NAMES,
    HeadCase,
    accepted,
    case_requests,
    conversations,
    head_case,
)
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import (
    AS_USUAL,
    PLAIN,
    Served,
    Way,
    assert_same_answers,
    by,
    total,
    with_head,
)
from tests.trained_heads import NUM_TOKENS, taught_prompts

BLOCK_SIZE = 4


def heads(*quick: str, of: str = "") -> pytest.MarkDecorator:
    """Cases with a name that begins so; all but the `quick` ones in the long run only."""
    names = [name for name in NAMES if name.startswith(of)]
    marks = {name: () if name in quick else pytest.mark.long for name in names}
    params = [pytest.param(name, marks=mark) for name, mark in marks.items()]
    return pytest.mark.parametrize("case", params, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> HeadCase:
    return head_case(request.param)


def assert_same(
    case: HeadCase,
    requests: SequenceOf[EngineRequest],
    ways: Way = AS_USUAL,
    *,
    like: Way = PLAIN,
    **engine: Any,
) -> Served:
    """Drafted by the head, with these arguments of `make_head_engine`, the answers are right."""
    make = partial(make_head_engine, case.pair, case.head)
    head = Way(make=lambda _, **options: make(**options), engine=engine)
    return assert_same_answers(requests, of=case.plain_pair, vary=head | ways, like=like)


SHAPES = {
    "usual": DraftConfig(),
    "wide": WIDE,
    "short catch-up": replace(WIDE, max_catch_up_tokens=7),
}
ALONE, BESIDE, ON_DEVICE = "alone", "beside a small model", "on the device"
QUICK = [
    ("random-eagle3", ALONE, "usual"),
    ("random-mtp", BESIDE, "usual"),
    ("taught-mtp", ALONE, "usual"),
    ("random-peagle", ALONE, "usual"),
    ("random-dflash", BESIDE, "usual"),
    ("taught-peagle", ALONE, "usual"),
]
SLOW = [
    ("taught-eagle3", BESIDE, "usual"),
    ("random-eagle3", ON_DEVICE, "usual"),
    ("random-peagle", BESIDE, "short catch-up"),
    ("taught-mtp", ON_DEVICE, "usual"),
]
LONG = [
    ("random-eagle3", BESIDE, "wide"),
    ("random-eagle3", ON_DEVICE, "wide"),
    ("random-mtp", ALONE, "short catch-up"),
    ("random-mtp", ON_DEVICE, "usual"),
    ("random-peagle", ON_DEVICE, "wide"),
    ("random-dflash", ALONE, "short catch-up"),
    ("random-dflash", ON_DEVICE, "wide"),
    ("taught-eagle3", ALONE, "wide"),
    ("taught-eagle3", ON_DEVICE, "usual"),
    ("taught-mtp", BESIDE, "short catch-up"),
    ("taught-peagle", BESIDE, "wide"),
]


@pytest.mark.parametrize(
    ("case", "way", "shape"),
    [
        *QUICK,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
        *(pytest.param(*each, marks=pytest.mark.long) for each in LONG),
    ],
    indirect=["case"],
)
def test_a_head_changes_no_text(case: HeadCase, way: str, shape: str) -> None:
    served = assert_same(
        case,
        case_requests(case),
        has_small=way == BESIDE,
        on_device=way == ON_DEVICE,
        draft=SHAPES[shape],
    )
    assert accepted(served.engine) > 0
    assert served.total("num_steps") < served.total("num_output_tokens")


@heads("random-mtp", "random-peagle")
def test_chunks_and_prefix_hits_do_not_matter(case: HeadCase) -> None:
    """Turns of conversations in a cache that is too small for all, in chunks of few tokens."""
    engine = make_head_engine(
        case.pair,
        case.head,
        num_blocks=75,
        block_size=BLOCK_SIZE,
        config=EngineConfig(max_tokens_per_step=20, min_prefill_tokens=2),
    )
    num_cached = 0
    for requests, right in conversations(case, 3):
        answers = serve(engine, requests)
        assert texts(answers) == right
        num_cached += total(answers, "num_cached_tokens")
    assert num_cached > 50
    assert accepted(engine) > 0
    assert_idle(engine)


# ---- beside other parts, on the shipped pair ----------------------------------------------------


@heads("taught-eagle3", of="taught")
def test_a_grammar_is_followed(case: HeadCase) -> None:
    schema = schema_spec({"type": "object", "properties": {"a": {"type": "integer"}}})
    requests = [
        replace(
            make_request(
                f"g{number}",
                prompt,
                max_tokens=NUM_TOKENS,
                seed=number,
                temperature=0.8 * (number % 2),
                stop_token_ids=(shipped_tokenizer().eos_token_id,),
            ),
            grammar=schema if number % 3 else None,
        )
        for number, prompt in enumerate(taught_prompts()[:4])
    ]
    served = assert_same(case, requests, grammars={"large": shipped_compiler()})
    assert accepted(served.engine) > 0


@heads("taught-mtp", of="taught")
@pytest.mark.parametrize("keeps_answer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_escalated_answer_goes_on_with_the_head(case: HeadCase, keeps_answer: bool) -> None:
    """As the large model's own; or, where it is kept, as without drafts."""
    requests = [
        make_request(
            f"e{number}", prompt, tier="small", max_tokens=NUM_TOKENS, seed=number,
            may_escalate=True, temperature=0.7 * (number % 2),
        )
        for number, prompt in enumerate(taught_prompts()[:4])
    ]  # fmt: skip
    handed_over = Way(escalate=lambda _: 3, keeps_answer=keeps_answer)
    like = handed_over | by(speculates=False) if keeps_answer else PLAIN
    served = assert_same(case, requests, handed_over, like=like, has_small=True)
    assert accepted(served.engine) > 0


@heads("taught-eagle3", of="taught")
def test_a_cascade_is_drafted_by_the_small_model(case: HeadCase) -> None:
    requests = [
        replace(
            make_request(f"c{number}", prompt, max_tokens=NUM_TOKENS, seed=number, temperature=0.7),
            cascade=CascadeParams(alpha=0.3) if number % 2 else None,
        )
        for number, prompt in enumerate(taught_prompts()[:4])
    ]
    assert_same(case, requests, like=AS_USUAL, has_small=True)
    alone = assert_same(case, requests[1::2], like=AS_USUAL, has_small=True).engine
    assert accepted(alone, "model") > 0
    assert head_runner(alone).times.num_passes == 0


# ---- what is asked of it ------------------------------------------------------------------------


def test_a_request_may_leave_the_head_out() -> None:
    speculation = SpeculationParams(sources=("suffix", "prediction"))
    requests = mixed_requests(speculation=speculation)
    vary = with_head(head=random_head(), draft=WIDE)
    engine = assert_same_answers(requests, of=random_pair(), vary=vary).engine
    assert not engine.stats().drafted_by_source.get("head")
    assert head_runner(engine).times.num_passes == 0


def test_a_head_that_is_never_right_is_switched_off() -> None:
    """Its levels cost a third of a pass and bring nothing; so does reading for it."""
    target, own = FixedTimes(lambda rows: 0.010 + 0.0002 * rows), FixedTimes(lambda rows: 0.003)
    budget = TreeBudget(target_pass_s=target, draft_pass_s=own, head_pass_s=own)
    engine = make_head_engine(random_pair(), random_head(), budget=budget)
    for number in range(3):
        request = make_request(f"r{number}", random_prompt(9, seed=number), max_tokens=150)
        serve(engine, [request])
    begun = head_runner(engine).times.num_passes
    requests = [
        make_request(f"s{number}", random_prompt(9, seed=number), max_tokens=100)
        for number in range(4)
    ]
    answers = serve(engine, requests)
    num_passes = head_runner(engine).times.num_passes - begun
    assert num_passes < 0.15 * total(answers, "num_steps") / len(requests)
