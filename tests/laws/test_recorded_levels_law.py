"""Levels that are recorded whole say what levels in pieces do: the same trees, every text plain."""

from typing import Any

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.core import Engine
from outrider.engine.trees.forest import Forest
from tests.engines import (
    assert_idle,
    make_engine,
    serve,
    texts,
    tiny_pair,
)
from tests.laws.cached_text import BUSHY
from tests.laws.mixed import mixed_requests
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


def test_the_same_trees_and_texts(right: dict[str, list[int]]) -> None:
    """Of two to eight trees, greedy and sampled; the last trees' remains mean nothing."""
    found = []
    requests = mixed_requests()[::2]
    expected = {request.request_id: right[request.request_id] for request in requests}
    for is_recorded in (False, True):
        engine = make_engine(tiny_pair(), on_device=True)
        grown = forests(engine)
        if is_recorded:
            runner = record_levels(engine)
            poison_levels(runner)
            replayed = watch_levels(runner)
        assert texts(serve(engine, requests)) == expected
        assert_idle(engine)
        found.append(grown)
    assert len(found[0]) > 10
    assert found[0] == found[1]
    assert {rows // DraftConfig().max_frontier for rows in replayed} >= {2, 4, 8}


@pytest.mark.slow
def test_the_same_texts_of_wide_trees(right: dict[str, list[int]]) -> None:
    """Of guesses that are almost as likely, which comes first depends on the rows beside them."""
    engine = make_engine(tiny_pair(), on_device=True, draft=BUSHY)
    runner = record_levels(engine)
    poison_levels(runner)
    replayed = watch_levels(runner)
    requests = mixed_requests()[1::3]
    expected = {request.request_id: right[request.request_id] for request in requests}
    assert texts(serve(engine, requests)) == expected
    assert len(replayed) > 20
