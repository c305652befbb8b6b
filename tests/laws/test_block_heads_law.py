"""Drafters of a block a pass change no text: P-EAGLE and DFlash, random or with much to say.

What they compute for a text depends on the text alone.
"""

from dataclasses import replace

import pytest

from draft.config import DraftConfig
from engine.config import EngineConfig
from tests.engines import assert_idle, serve, texts
from tests.heads import (
    WIDE,
    make_head_engine,
    random_head,
    random_pair,
)
from tests.laws.mixed import mixed_requests, plainly, total

KINDS = ("peagle", "dflash")
FEWEST = 38  # see test_preemption.py


@pytest.fixture(scope="module")
def right() -> dict[str, list[int]]:
    """The mixed batch's answers: plain decoding, each request alone."""
    return plainly(random_pair(), mixed_requests())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_small", [False, True])
@pytest.mark.parametrize(
    "draft",
    [
        DraftConfig(),
        pytest.param(WIDE, marks=pytest.mark.slow),
        pytest.param(replace(WIDE, max_catch_up_tokens=7), marks=pytest.mark.slow),
    ],
)
def test_a_block_changes_no_text(
    kind: str, has_small: bool, draft: DraftConfig, right: dict[str, list[int]]
) -> None:
    engine = make_head_engine(random_pair(), random_head(kind), has_small=has_small, draft=draft)
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    assert sum(engine.stats().accepted_by_source["head"]) > 0
    assert total(answers, "num_steps") < total(answers, "num_output_tokens")
    assert_idle(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "head_blocks"),
    [(FEWEST + 10, FEWEST)]
    + [
        pytest.param(*each, marks=pytest.mark.slow) for each in [(FEWEST, 999), (999, 20), (999, 3)]
    ],
)
def test_few_blocks_do_not_matter(
    kind: str,
    num_blocks: int,
    head_blocks: int,
    prefix_caching: bool,
    right: dict[str, list[int]],
) -> None:
    engine = make_head_engine(
        random_pair(),
        random_head(kind),
        draft=DraftConfig(min_path_prob=0.0, max_draft_nodes=24),
        num_blocks=num_blocks,
        head_blocks=head_blocks,
        block_size=4,
        prefix_caching=prefix_caching,
        config=EngineConfig(max_tokens_per_step=64),
    )
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    assert (total(answers, "num_preemptions") > 0) == (num_blocks < 999)
    assert_idle(engine)
