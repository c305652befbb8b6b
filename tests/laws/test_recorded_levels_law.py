"""Levels that are recorded whole say what levels in pieces do: the same trees, every text plain."""

from typing import Any

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.core import Engine
from outrider.engine.trees.forest import Forest
from tests.laws.cached_text import BUSHY
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import ON_DEVICE, Way, assert_same_answers, by
from tests.recorded_levels import poison_levels, record_levels, watch_levels


def forests(engine: Engine) -> list[Any]:
    """What the trees of every step hold from now on."""
    found: list[Any] = []
    launch = engine._large.launch

    def noted(plan: Any, trees: Any) -> Any:
        forest: Forest | None = trees.forest
        if forest is not None:
            names = ("token_ids", "parent_index", "depth", "sources", "draft_offsets", "num_rows")
            found.append({name: getattr(forest, name).tolist() for name in names})
        return launch(plan, trees)

    engine._large.launch = noted  # type: ignore[method-assign]
    return found


def record(engine: Engine) -> list[int]:
    """Record levels; a list gets the rows of each that is replayed."""
    runner = record_levels(engine)
    poison_levels(runner)
    return watch_levels(runner)


def test_the_same_trees_and_texts() -> None:
    """Of two to eight trees, greedy and sampled; the last trees' remains mean nothing."""
    plain = assert_same_answers(mixed_requests()[::2], vary=ON_DEVICE | Way(watch=forests))
    recorded = Way(watch=lambda engine: (forests(engine), record(engine)))
    found = assert_same_answers(mixed_requests()[::2], vary=ON_DEVICE | recorded)
    grown, replayed = found.watched
    assert len(grown) > 10
    assert grown == plain.watched
    assert {rows // DraftConfig().max_frontier for rows in replayed} >= {2, 4, 8}


@pytest.mark.slow
def test_the_same_texts_of_wide_trees() -> None:
    """Of guesses that are almost as likely, which comes first depends on the rows beside them."""
    vary = ON_DEVICE | by(draft=BUSHY) | Way(watch=record)
    assert len(assert_same_answers(mixed_requests()[1::3], vary=vary).watched) > 20
