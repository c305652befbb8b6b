"""A head and a small model side by side: the one that costs less for what it is right in drafts."""

from functools import cache

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest, SpeculationParams
from tests.engines import make_request, random_prompt, serve, texts
from tests.heads import head_runner, knowing_pair, make_head_engine
from tests.laws.same_answers import plainly

LARGE_PASS_S = 1.0
DRAFT = DraftConfig(
    max_branching=1, max_draft_depth=3, min_path_prob=0.0, sources=("head", "model")
)


def engine_with(*, head_pass_s: float, small_pass_s: float) -> Engine:
    """An engine whose clock tells what its passes take, of two drafters that are always right."""
    pair, head = knowing_pair()

    def clock() -> float:
        runners = engine._runners
        return (
            head_pass_s * head_runner(engine).times.num_passes
            + small_pass_s * runners["small"].times.num_passes
            + LARGE_PASS_S * runners["large"].times.num_passes
        )

    engine = make_head_engine(pair, head, has_small=True, draft=DRAFT, clock=clock)
    return engine


def drafted(engine: Engine) -> dict[str, int]:
    by_source = engine.stats().drafted_by_source
    return {source: sum(by_source.get(source, ())) for source in ("head", "model")}


def requests(**options: object) -> list[EngineRequest]:
    """Two, one of them sampled."""
    return [
        make_request(
            str(place), random_prompt(9, seed=place), max_tokens=150, seed=place,
            temperature=0.8 * place, **options,
        )
        for place in range(2)
    ]  # fmt: skip


@cache
def right() -> dict[str, list[int]]:
    return plainly(knowing_pair()[0], requests())


def rounds(engine: Engine, count: int, **options: object) -> dict[str, int]:
    """Serve the requests so many times; what each source guessed in them."""
    before = drafted(engine)
    for _ in range(count):
        assert texts(serve(engine, requests(**options))) == right()
    return {source: found - before[source] for source, found in drafted(engine).items()}


@pytest.mark.parametrize(
    ("head_pass_s", "small_pass_s", "cheaper", "dearer"),
    [
        pytest.param(0.05, 0.4, "head", "model", marks=pytest.mark.slow),
        (0.4, 0.05, "model", "head"),
    ],
)
def test_the_cheaper_one_drafts_and_the_other_is_tried(
    head_pass_s: float, small_pass_s: float, cheaper: str, dearer: str
) -> None:
    engine = engine_with(head_pass_s=head_pass_s, small_pass_s=small_pass_s)
    begun = rounds(engine, 2)
    assert begun[dearer] > 0  # how else would it be known?
    found = rounds(engine, 4)
    assert found[dearer] < 0.25 * found[cheaper]


def test_a_request_that_leaves_one_out_gets_the_other() -> None:
    engine = engine_with(head_pass_s=0.4, small_pass_s=0.05)
    only_head = rounds(engine, 1, speculation=SpeculationParams(sources=("head",)))
    assert only_head["model"] == 0
    assert only_head["head"] > 0
    only_small = rounds(engine, 1, speculation=SpeculationParams(sources=("model",)))
    assert only_small["head"] == 0
    assert only_small["model"] > 0
