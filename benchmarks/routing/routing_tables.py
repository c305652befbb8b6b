"""The tables of bench_routing_quality."""

from collections.abc import Mapping
from typing import Any

from benchmarks.routing.routing_policies import names_of
from benchmarks.routing.routing_worth import COST_GRID, GOAL_COST, MARGIN
from benchmarks.shared.harness import milliseconds, show_table, verdict
from outrider.router.evaluation import RouterReport


def show(results: Mapping[str, Any], report: RouterReport) -> None:
    """The tables."""
    show_table(
        "who answers",
        ["", "accuracy", "95 %", "large", "cost", "p50 ms", "p95 ms"],
        [
            [
                name,
                f"{entry.accuracy.estimate:.3f}",
                f"{entry.accuracy.low:.3f}-{entry.accuracy.high:.3f}",
                f"{entry.strong_share:.1%}",
                f"{entry.cost:.3f}",
                "" if entry.p50_s is None else milliseconds(entry.p50_s),
                "" if entry.p95_s is None else milliseconds(entry.p95_s),
            ]
            for name, entry in results["policies"].items()
        ],
        caption=(
            f"parameters: {results['prices']}; shipped setting: accuracy "
            f"{report.setting.accuracy:.3f}, large {report.setting.strong_share:.1%}"
        ),
    )
    show_table(
        "how well the stages order prompts",
        ["", "APGR", "95 %", "CPT50", "CPT80", "within 1 point", "at cascade's cost"],
        [
            [
                names_of([stage])[stage],
                f"{entry.apgr.value:.3f}",
                f"{entry.apgr.low:.3f}-{entry.apgr.high:.3f}",
                f"{entry.cpt50.value:.3f}",
                f"{entry.cpt80.value:.3f}",
                _share(results["within_one_point"].get(stage)),
                str(results["cascade_gain_at_equal_cost"].get(stage, "")),
            ]
            for stage, entry in report.stages.items()
        ],
        caption="at cascade's cost: the cascade's accuracy minus this one's",
    )
    if "gain_per_cost" in results:
        show_worth(results["gain_per_cost"])
    if results["labelled_data"]:
        show_table(
            "text features on labelled data",
            ["", "APGR", "95 %", "goal", "met"],
            [
                [
                    f"{name}, {entry['num_gold']} gold",
                    f"{entry['apgr'].value:.3f}",
                    f"{entry['apgr'].low:.3f}-{entry['apgr'].high:.3f}",
                    f"{entry['goal']:.2f}",
                    verdict(entry["met"]),
                ]
                for name, entry in results["labelled_data"].items()
            ],
        )


def show_worth(found: Mapping[str, Any]) -> None:
    """The tables of gains per cost."""
    show_table(
        "cheapest within one point of always-large",
        ["looked at", "gain per", "accuracy", "token cost", "seconds", "large", "watched", "goal"],
        [
            [
                way,
                per,
                f"{one.accuracy.estimate:.3f}",
                f"{one.token_cost:.3f}",
                f"{one.seconds:.3f}",
                f"{one.strong_share:.1%}",
                f"{one.watched_share:.1%}",
                verdict(one.seconds <= GOAL_COST and one.minus_large.estimate >= -MARGIN),
            ]
            for way, by in found["within_one_point"].items()
            for per, one in by.items()
        ],
        caption=f"goal: {GOAL_COST:g} of always-large's seconds",
    )
    show_table(
        "accuracy at equal token cost",
        ["gain per", "", *(f"{cost:g}" for cost in COST_GRID)],
        [
            [per, way, *(_equal(each[way]) for each in by_cost.values())]
            for per, by_cost in found["at_equal_cost"].items()
            for way in next(iter(by_cost.values()))
        ],
    )


def _equal(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value.estimate:+.3f} ({value.low:+.3f} to {value.high:+.3f})"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
