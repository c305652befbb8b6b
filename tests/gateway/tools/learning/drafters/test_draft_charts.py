"""Charts of drafters: several side by side, and the limits of trees."""

from pathlib import Path

import pytest

from outrider.draft.training.compare import Compared
from outrider.draft.training.tune import DraftLimits, RunFigures, Tried, TuneReport
from outrider.gateway.tools.learning.drafters.charts import draw_comparison, draw_plots


def run(tokens_per_s: float, accepted_per_depth: tuple[int, ...] = (40, 20)) -> RunFigures:
    return RunFigures(
        num_tokens=100,
        elapsed_s=100 / tokens_per_s,
        num_steps=50,
        num_drafts=50,
        num_draft_tokens=200,
        num_accepted_tokens=60,
        accepted_per_depth=accepted_per_depth,
        pass_s={"large": 0.02, "small": 0.002},
    )


def compared(name: str, tokens_per_s: float) -> Compared:
    return Compared(
        name=name,
        kind="small",
        num_parameters=10,
        plain=(run(30.0),),
        chains=(run(40.0),),
        trees=(run(tokens_per_s),),
    )


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("html", b"<!doctype html>")]
)
def test_drafters_are_drawn_side_by_side(suffix: str, start: bytes, tmp_path: Path) -> None:
    found = [compared("one & two", 60.0), compared("head", 45.0)]
    path = draw_comparison(found, tmp_path / "new" / f"drafters.{suffix}")
    assert path.read_bytes().startswith(start)
    if suffix != "png":
        text = path.read_text(encoding="utf-8")
        for words in ("one &amp; two: 2.00 x plain", "head (small, 2.00 ms a level)"):
            assert words in text


@pytest.mark.parametrize("accepted_per_depth", [(40, 20), ()])
def test_tuned_limits_are_drawn_also_where_no_draft_was_accepted(
    accepted_per_depth: tuple[int, ...], tmp_path: Path
) -> None:
    tried = [
        Tried(
            limit="max_draft_nodes",
            choice=DraftLimits(
                max_draft_depth=2,
                max_draft_nodes=nodes,
                max_branching=2,
                max_frontier=2,
                adaptive=False,
            ),
            runs=(run(40.0, accepted_per_depth), run(50.0, accepted_per_depth)),
            ratios=(1.3, 1.6),
        )
        for nodes in (4, 8)
    ]
    report = TuneReport(best=tried[0].choice, plain_runs=[run(30.0)], tried=tried)
    for path in draw_plots(report, tmp_path / "plots"):
        assert path.read_bytes().startswith(b"\x89PNG")
