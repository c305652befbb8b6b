"""What does it cost, and how long does it take, to be right: routers and cascades on new tasks?

Method: held-out tasks of the demo pair's world with a seed of their own; prompts that the router
was trained on are left out. Both models answer all of them through the engine, greedily and with
the tasks' own checkers (the work of `outrider router collect`; answers are kept under runs/ and
reused while the checkpoints stay the same). The shipped router's stages then judge each prompt:
the text, the hidden state of the prompt's last token in the small model (probe), the
log-probabilities of its first 16 tokens (cascade). The speculative cascade answers with both models
at once (`outrider.quality`). Latencies are measured on the large model grown to 400 M parameters
without changing what it computes, one request at a time, every way of answering in turn, on the
first prompts of the same list that have at most 384 tokens; a policy's latency is that of the way
it takes with each prompt.

Reading it: `accuracy` with a 95 % interval over prompts. `large` is the share of prompts that the
large model answered. `cost`: tokens times the parameters of the model that they went through, as
a share of always-large's; an escalated request pays the small model's prompt and held tokens as
well, the speculative cascade counts as large. Settings are chosen for 95 % of the gap between the
two models on one half of the prompts and judged on the other. `shipped` is the router's own
setting. APGR: RouteLLM's, 0.5 is a random router; goal 0.85 with the probe. `within 1 point`: the
least large share within one point of always-large's accuracy, goal 0.5.

Gains per cost: the same stages, asked where they add most for each token cost or second
(`outrider router calibrate --gain-per`), with expected costs fitted on the other half. Goal: within
one point of always-large at 0.60 of its seconds. Those are modelled: rates for a request, a prompt
token and an answer token, fitted to the latencies and to some prompts beyond 384 tokens.

MMLU and GSM8K: routers of text features, trained on the gold file and judged on the dev file of
`routing/` below --data or $OUTRIDER_DATA; goals 0.64 and 0.62. Left out where there are none.

    python -m benchmarks.routing.bench_routing_quality
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.routing.routing_plot import draw
from benchmarks.routing.routing_policies import (
    LARGE,
    SMALL,
    Outcome,
    Places,
    PolicyFigures,
    cross_fitted,
    curve,
    figures,
    gain_at_equal_cost,
    known_by,
    least_share,
    names_of,
    one_tier,
    oracle,
    seconds_of,
)
from benchmarks.routing.routing_runs import (
    HOLD_BACK_TOKENS,
    SPECULATIVE,
    Labels,
    by_way,
    label,
    latencies,
)
from benchmarks.routing.routing_tables import show
from benchmarks.routing.routing_worth import (
    GOAL_COST,
    MARGIN,
    Costs,
    Given,
    at_equal_cost,
    measured_rates,
    with_modelled_seconds,
    within_one_point,
)
from benchmarks.shared.harness import (
    CACHE,
    argument_parser,
    console,
    prepare,
    start,
    variant_name,
    write_results,
)
from outrider.draft.training.tasks.files import write_tasks
from outrider.gateway.settings.tree import bundled_pair
from outrider.gateway.tools.learning.collect.data import CollectQuestion, read_questions
from outrider.router.calibration import CalibrationTarget, Prices, Stage, StageRows
from outrider.router.costs import prices_by_size
from outrider.router.dataset import read_labelled_prompts
from outrider.router.evaluation import RouterReport, evaluate
from outrider.router.features import FloatRows
from outrider.router.scorer import RouterScorer
from outrider.router.stages import stage_rows
from outrider.router.worth import CostRates

_TASK_SEED = 20_261_121
_TARGET = CalibrationTarget(recovered_gap=0.95)
_GOAL_PROBE_APGR = 0.85
_GOAL_SHARE = 0.5
_LABELLED_DATA = {"mmlu": 0.64, "gsm8k": 0.62}


def questions_for(
    arguments: argparse.Namespace, scorer: RouterScorer, folder: Path
) -> list[CollectQuestion]:
    """Held-out tasks that the router has not seen."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"questions-{arguments.task_seed}-{arguments.num_prompts}.jsonl"
    write_tasks(path, num_rows=arguments.num_prompts, seed=arguments.task_seed)
    questions = read_questions(path)
    seen = scorer.was_trained_on([question.prompt for question in questions])
    if seen.any():
        console.print(f"{int(seen.sum())} tasks were among the router's own: left out")
    return [question for question, is_seen in zip(questions, seen, strict=True) if not is_seen]


def rows_of(labels: Labels, scorer: RouterScorer) -> StageRows:
    """The router's estimates of the kept questions, in their order."""
    data = read_labelled_prompts(labels.path)
    if labels.pair is not None and scorer.pair not in (None, labels.pair):
        console.print("[yellow]The router was trained for another pair of models.[/yellow]")
    return stage_rows(scorer, data, hold_back_tokens=HOLD_BACK_TOKENS)


def outcomes_of(
    rows: StageRows, labels: Labels, prices: Prices
) -> tuple[dict[str, Outcome], dict[str, Stage]]:
    """By policy; and which stage decides, for those that are a router's."""
    names = names_of(rows.stages)
    outcomes = {
        "always small": one_tier(rows, SMALL, prices),
        "always large": one_tier(rows, LARGE, prices),
    }
    for stage, name in names.items():
        outcomes[name] = cross_fitted(known_by(rows, stage), _TARGET, prices)
    assert rows.num_prompt_tokens is not None
    for alpha, (scores, tokens) in labels.speculative.items():
        price = prices["large"]
        outcomes[SPECULATIVE.format(alpha=alpha)] = Outcome(
            scores=scores,
            costs=1e-6 * (price.prompt * rows.num_prompt_tokens + price.completion * tokens),
            ways=np.full(len(scores), LARGE, dtype=np.int64),
        )
    outcomes["oracle"] = oracle(rows, prices)
    return outcomes, {name: stage for stage, name in names.items()}


def policy_figures(
    outcomes: Mapping[str, Outcome],
    stages: Mapping[str, Stage],
    seconds: Mapping[str, FloatRows],
    places: Places,
) -> dict[str, PolicyFigures]:
    """The table's rows. `seconds` are those of the prompts at `places`."""
    table = {}
    for name, outcome in outcomes.items():
        if name in seconds:  # a way of its own
            took_s = seconds[name]
        else:
            took_s = seconds_of(outcome, by_way(seconds, stages.get(name, "text")), places)
        table[name] = figures(outcome, outcomes["always large"], took_s)
    return table


def labelled_data(arguments: argparse.Namespace) -> dict[str, Any]:
    """APGR of text routers on MMLU and GSM8K, where the files are."""
    root = arguments.data or (Path(os.environ["OUTRIDER_DATA"]) if _has_data() else None)
    found: dict[str, Any] = {}
    for name, goal in _LABELLED_DATA.items():
        files = _gold_and_dev(root, name)
        if files is None:
            console.print(
                f"{name}: left out; name a folder with routing/{name}_gold.csv and "
                f"{name}_dev.csv by --data or $OUTRIDER_DATA"
            )
            continue
        from outrider.router.estimator import TrainConfig, train_router

        gold, dev = (read_labelled_prompts(path) for path in files)
        with console.status(f"training a router on {name}"):
            scorer = train_router(gold, TrainConfig()).scorer
        report = evaluate(
            stage_rows(scorer, dev),
            threshold=scorer.threshold,
            num_resamples=arguments.resamples,
        )
        apgr = report.stages["text"].apgr
        found[name] = {
            "num_gold": len(gold.prompts),
            "num_dev": len(dev.prompts),
            "apgr": apgr,
            "cpt50": report.stages["text"].cpt50,
            "cpt80": report.stages["text"].cpt80,
            "goal": goal,
            "met": apgr.value >= goal,
        }
    return found


def _has_data() -> bool:
    return bool(os.environ.get("OUTRIDER_DATA"))


def _gold_and_dev(root: Path | None, name: str) -> tuple[Path, Path] | None:
    for folder in () if root is None else (root / "routing", root):
        files = (folder / f"{name}_gold.csv", folder / f"{name}_dev.csv")
        if all(file.is_file() for file in files):
            return files
    return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argument_parser(__doc__)
    parser.add_argument("--router", type=Path, default=bundled_pair() / "router")
    parser.add_argument("--num-prompts", type=int, default=1000, help="held-out tasks")
    parser.add_argument("--num-latency", type=int, default=48, help="of them, timed")
    parser.add_argument("--num-long", type=int, default=4, help="timed beyond the longest prompt")
    parser.add_argument(
        "--max-latency-prompt", type=int, default=384, help="longest prompt timed, in tokens"
    )
    parser.add_argument("--task-seed", type=int, default=_TASK_SEED)
    parser.add_argument("--max-new", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--max-context", type=int, help="default: the models' own")
    parser.add_argument("--batch", type=int, default=32, help="questions answered at a time")
    parser.add_argument("--alphas", type=float, nargs="*", default=[0.3, 0.7])
    parser.add_argument("--data", type=Path, help="folder with routing/*.csv")
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap of APGR")
    parser.add_argument("--quick", action="store_true", help="only to see that everything works")
    parser.set_defaults(dtype="bfloat16", expand_target="400M")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.num_prompts, arguments.num_latency, arguments.resamples = 96, 4, 100
        arguments.num_long = 1
        arguments.max_new, arguments.expand_target = 128, "100M"
    return arguments


def judge(
    arguments: argparse.Namespace, rows: StageRows, labels: Labels, scorer: RouterScorer
) -> tuple[dict[str, Any], dict[str, Outcome], dict[str, Stage], RouterReport]:
    """Return what needs no clock: figures of the stages and goals, the policies' outcomes."""
    prices = prices_by_size({tier: info.num_parameters for tier, info in labels.tiers.items()})
    outcomes, stages = outcomes_of(rows, labels, prices)
    chosen = scorer.calibration.chosen if scorer.calibration is not None else None
    report = evaluate(
        rows,
        threshold=scorer.threshold,
        band=None if chosen is None else chosen.band,
        num_resamples=arguments.resamples,
    )
    within = {stage: least_share(known_by(rows, stage), MARGIN) for stage in rows.stages}
    watch = outcomes.get(names_of(["answer"])["answer"])
    probe, best = report.stages.get("prompt"), within[rows.stages[-1]]
    results = {
        "curves": {name: curve(known_by(rows, stage), prices) for name, stage in stages.items()},
        "stages": {
            stage: {
                "apgr": entry.apgr,
                "cpt50": entry.cpt50,
                "cpt80": entry.cpt80,
                "calibration_error": entry.ece,
            }
            for stage, entry in report.stages.items()
        },
        "shipped_setting": {
            "point": report.setting,
            "accuracy": report.setting_accuracy,
            "large_share": report.setting_share,
        },
        "within_one_point": within,
        "cascade_gain_at_equal_cost": {
            stage: gain_at_equal_cost(watch, known_by(rows, stage), prices)
            for stage in rows.stages
            if watch is not None and stage != "answer"
        },
        "goals": {
            "probe_apgr": _GOAL_PROBE_APGR,
            "probe_apgr_met": probe is not None and probe.apgr.value >= _GOAL_PROBE_APGR,
            "large_share": _GOAL_SHARE,
            "large_share_met": best is not None and best <= _GOAL_SHARE,
        },
    }
    return results, outcomes, stages, report


def gain_per_cost(
    rows: StageRows, labels: Labels, scorer: RouterScorer, rates: Mapping[str, CostRates]
) -> dict[str, Any]:
    """Figures of routers that weigh gains by costs; `rates` are the measured seconds."""
    data = read_labelled_prompts(labels.path)
    given = Given(
        data=with_modelled_seconds(data, rows, rates),
        rows=rows,
        whole=stage_rows(scorer, data, hold_back_tokens=None),
        features=scorer.features,
        prices=prices_by_size({tier: info.num_parameters for tier, info in labels.tiers.items()}),
    )
    costs = Costs(given)
    return {
        "second_rates": rates,
        "goal_seconds": GOAL_COST,
        "within_one_point": within_one_point(given, costs),
        "at_equal_cost": at_equal_cost(given, costs),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Label, judge, time, and write the results and the plot."""
    arguments = parse(argv)
    prepare(arguments)
    scorer = RouterScorer.load(arguments.router)
    folder = CACHE / "routing-quality"
    labels = label(arguments, questions_for(arguments, scorer, folder), folder)
    rows = rows_of(labels, scorer)
    judged, outcomes, stages, report = judge(arguments, rows, labels, scorer)
    assert rows.num_prompt_tokens is not None
    # A passage of 4,000 tokens takes many seconds to read, every way again.
    places = np.flatnonzero(rows.num_prompt_tokens <= arguments.max_latency_prompt)
    places = places[: arguments.num_latency]
    beyond = np.flatnonzero(rows.num_prompt_tokens > arguments.max_latency_prompt)
    timed = np.concatenate((places, beyond[: arguments.num_long]))
    seconds, grown = latencies(arguments, [labels.kept[place] for place in timed.tolist()])
    worth = gain_per_cost(rows, labels, scorer, measured_rates(rows, timed, seconds))
    seconds = {name: values[: len(places)] for name, values in seconds.items()}
    results: dict[str, Any] = {
        "conditions": {
            "num_prompts": len(rows.text),
            "num_latency_prompts": len(places),
            "max_latency_prompt_tokens": arguments.max_latency_prompt,
            "latency": f"large of {grown.tiers['large'].num_parameters / 1e6:.0f} M",
            "task_seed": arguments.task_seed,
            "target": "95 % of the gap, chosen on the other half",
            "router_pair": scorer.pair,
            "pair": labels.pair,
        },
        "prices": {tier: info.num_parameters for tier, info in labels.tiers.items()},
        "latency_parameters": {tier: info.num_parameters for tier, info in grown.tiers.items()},
        "policies": policy_figures(outcomes, stages, seconds, places),
        **judged,
        "gain_per_cost": worth,
        "labelled_data": labelled_data(arguments),
    }
    show(results, report)
    path = write_results("bench_routing_quality", variant_name(arguments), results, arguments)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    start(main)
