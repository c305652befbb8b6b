"""What `outrider router eval` says beside a router's own figures: the scores of the field, flips
under paraphrase, and a comparison with another router.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outrider.gateway.tools.commands.terminal import make_console, print_whole
from outrider.gateway.tools.learning.routers.inputs import (
    JudgeFlags,
    RouterEvaluation,
    estimate_rows,
    wary_notes,
    with_embeddings,
)
from outrider.gateway.tools.reports.grids import Grid
from outrider.router.calibration import Prices, measure
from outrider.router.comparison import Comparison, JudgedRouter, compare
from outrider.router.dial import Dial
from outrider.router.evaluation import BootstrapInterval
from outrider.router.frontier import Answerer, Frontier, frontier
from outrider.router.paraphrase import Flips, count_flips
from outrider.router.policy import TrainedPolicy, own_setting
from outrider.router.scorer import RouterScorer
from outrider.router.tier_policy import TierPolicy, TierWish

_MAX_PARAPHRASED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareFlags:
    """What a router is compared with."""

    against: Annotated[
        Path | None, typer.Option(help="Another router: a paired bootstrap of both.")
    ] = None
    margin: Annotated[
        float,
        typer.Option(min=0.0, help="Accuracy that may be lost to --against at most."),
    ] = 0.01
    flips: Annotated[
        bool,
        typer.Option(
            "--flips",
            help="Share of decisions that change with case, spacing, typos, order of options.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldScores:
    """The figures; None or empty where they were not asked for."""

    frontier: Frontier
    flips: Mapping[str, Flips]
    comparison: Comparison | None
    against: Path | None

    @property
    def missing(self) -> list[str]:
        """What the scores of the field lack."""
        lacking = []
        if self.frontier.setting.cost_usd is None:
            lacking.append(
                "AIQ and RouterArena's score need prices, and token counts as `collect` writes them"
            )
        if self.frontier.setting.p50_s is None:
            lacking.append("latencies need weak_s and strong_s, as `collect` writes them")
        return lacking


def field_scores(
    judged: RouterEvaluation, flags: CompareFlags, how: JudgeFlags, prices: Prices | None
) -> FieldScores:
    """Measure them. Raises the errors of `router_errors`."""
    calibration = judged.scorer.calibration
    points = () if calibration is None else calibration.points
    return FieldScores(
        frontier=frontier(judged.rows, points, judged.report.setting, prices),
        flips=_flips(judged, how.seed) if flags.flips else {},
        comparison=None
        if flags.against is None
        else _comparison(judged, flags.against, flags.margin, how, prices),
        against=flags.against,
    )


def _flips(judged: RouterEvaluation, seed: int) -> dict[str, Flips]:
    scorer, prompts = judged.scorer, judged.data.prompts
    if scorer.tiers is not None:
        tiers = TierPolicy(scorer=scorer, ladder=scorer.tiers, abstains=False)
        return _counted(prompts, lambda prompt: tiers.route(prompt, TierWish()).order[0], seed)
    policy = TrainedPolicy(
        scorer=scorer,
        current_setting=lambda: own_setting(scorer),
        dial=None if scorer.calibration is None else Dial(scorer.calibration),
    )

    def decide(prompt: str) -> tuple[str, bool]:
        route = policy.route(prompt)
        return route.tier, route.watch is not None

    return _counted(prompts, decide, seed)


def _counted(prompts: list[str], decide: Callable[[str], object], seed: int) -> dict[str, Flips]:
    step = -(-len(prompts) // _MAX_PARAPHRASED)
    with make_console(stderr=True).status("paraphrasing"):
        return count_flips(prompts[::step], decide, seed=seed)


def _comparison(
    judged: RouterEvaluation, other: Path, margin: float, how: JudgeFlags, prices: Prices | None
) -> Comparison:
    scorer = RouterScorer.load(other)
    data = with_embeddings(scorer, judged.data, how.encoder)
    _, found = wary_notes(scorer, data, strict=how.strict)
    for note in found:
        typer.echo(f"note: {other}: {note}", err=True)
    hold_back = None if how.whole_answers else how.hold_back_tokens
    rows = estimate_rows(scorer, data, hold_back)
    chosen = None if scorer.calibration is None else scorer.calibration.chosen
    point = measure(rows, scorer.threshold, None if chosen is None else chosen.band)
    return compare(
        JudgedRouter(rows=judged.rows, point=judged.report.setting),
        JudgedRouter(rows=rows, point=point),
        margin=margin,
        prices=prices,
        num_resamples=how.resamples,
        seed=how.seed,
    )


def field_json(field: FieldScores) -> dict[str, Any]:
    """The figures by name."""
    lines = _lines(field.frontier)
    found: dict[str, Any] = {
        "answerers": {name: _answerer_json(one) for name, one in lines.items()},
        "aiq": {name: aiq for name, aiq in _aiqs(field.frontier).items() if aiq is not None},
        "missing": field.missing,
    }
    if field.flips:
        found["flips"] = {
            kind: {"num_prompts": one.num_prompts, "share": one.share}
            for kind, one in field.flips.items()
        }
    if field.comparison is not None:
        one = field.comparison
        found["comparison"] = {
            "against": str(field.against),
            "margin": one.margin,
            "is_not_inferior": one.is_not_inferior,
            **{
                name: None if each is None else [each.value, each.low, each.high]
                for name, each in _differences(one).items()
            },
        }
    return found


def print_field(field: FieldScores) -> None:
    """Print the figures below the router's own."""
    console = make_console()
    for grid in field_grids(field):
        console.print()
        print_whole(console, grid.terminal())
    for line in field.missing:
        console.print(f"Not stated: {line}.", markup=False)
    if field.comparison is not None:
        one = field.comparison
        verdict = "not inferior" if one.is_not_inferior else "NOT shown to be not inferior"
        console.print(f"\nBy a margin of {one.margin:g} the router is {verdict}.", markup=False)


def field_grids(field: FieldScores) -> list[Grid]:
    """The tables: answerers by cost and time, flips, the comparison."""
    answerers = _answerers_grid(field.frontier)
    grids = [] if answerers is None else [answerers]
    if field.flips:
        rows = [
            [kind, str(one.num_prompts), f"{one.share:.1%}" if one.num_prompts else ""]
            for kind, one in field.flips.items()
        ]
        grids.append(Grid(head=["paraphrase", "prompts", "decisions that flip"], rows=rows))
    if field.comparison is not None:
        rows = [
            [name, f"{each.value:+.4g} [{each.low:+.4g}, {each.high:+.4g}]"]
            for name, each in _differences(field.comparison).items()
            if each is not None
        ]
        head = [f"this router minus {field.against and field.against.name}", "paired, 95 %"]
        grids.append(Grid(head=head, rows=rows))
    return grids


def _answerers_grid(bounds: Frontier) -> Grid | None:
    """Columns that the data and prices do not tell are left out.

    None where that leaves the accuracies, which stand above.
    """
    lines, aiqs = _lines(bounds), _aiqs(bounds)
    columns: dict[str, list[float | None]] = {
        "USD a request": [one.cost_usd for one in lines.values()],
        "p50 s": [one.p50_s for one in lines.values()],
        "p95 s": [one.p95_s for one in lines.values()],
        "RouterArena": [one.arena_score for one in lines.values()],
        "AIQ": [aiqs.get(name) for name in lines],
    }
    known = {name: values for name, values in columns.items() if any(values)}
    if not known:
        return None
    rows = [
        [
            name,
            f"{one.accuracy:.3f}",
            *("" if values[place] is None else f"{values[place]:.3g}" for values in known.values()),
        ]
        for place, (name, one) in enumerate(lines.items())
    ]
    kinds = ["chosen" if row[0] == "this router" else "" for row in rows]
    return Grid(head=["answered by", "accuracy", *known], rows=rows, kinds=kinds)


def _lines(bounds: Frontier) -> dict[str, Answerer]:
    return {
        **{f"always {name}": one for name, one in bounds.singles.items()},
        "a fair coin": bounds.coin,
        "this router": bounds.setting,
        "oracle": bounds.oracle,
    }


def _aiqs(bounds: Frontier) -> dict[str, float | None]:
    return {
        "a fair coin": bounds.aiq(bounds.random),
        "this router": bounds.aiq((*bounds.settings, bounds.setting)),
        "oracle": bounds.aiq((bounds.oracle,)),
    }


def _answerer_json(one: Answerer) -> dict[str, float | None]:
    return {
        "accuracy": one.accuracy,
        "strong_share": one.strong_share,
        "cost_usd": one.cost_usd,
        "p50_s": one.p50_s,
        "p95_s": one.p95_s,
        "arena_score": one.arena_score,
    }


def _differences(one: Comparison) -> dict[str, BootstrapInterval | None]:
    return {
        "accuracy": one.accuracy,
        "strong_share": one.strong_share,
        "apgr": one.apgr,
        "cost_usd": one.cost_usd,
    }
