"""What do adaptive trees of mixed sources gain over fixed guesses of the same drafter?

Method: batch 1, prompt by prompt: each prompt is answered by every policy before the next one is
asked, so that ratios are taken between neighbours in time (benchmarks/shared/turns.py). All
policies run on the same engine, weights and small model; they differ in the tree only:

- plain: no guesses;
- adaptive: as in serving. All sources, sized by calibrated chances and measured pass times;
- adaptive, model only: the same without suffix guesses;
- chain of N: N tokens of the small model in a row, always (no branches, no budget);
- tree of 32: the 32 likeliest nodes of the small model's tree, always (no budget).

Greedy and at temperature 0.8. The best chain is chosen *after* the measurement, by its rate on
these prompts, which flatters the chain. No request is told anything of an earlier one (own salt).

Reading it: `tok/s` has the prompts' time in it. `x plain`, `x best chain`: ratios of total rates
with a 95 % interval (bootstrap over prompts). `wasted`: verified nodes that were not accepted, per
emitted token. `equal`: answers equal to plain decoding, token for token, and for those that are not
the largest distance between the two tokens' scores (logits when greedy, else logits / temperature
plus noise): in bfloat16 the last bits depend on how many rows share a pass, so scores that nearly
tie may come out either way.

    python -m benchmarks.speculation.bench_tree_policies --dtype bfloat16 --expand-target 400M

With `--drafter HEAD` the same of a head that reads the large model's hidden states, "adaptive,
model only" being the head alone.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.compare import Comparison
from benchmarks.shared.driving import Bench, add_draft_options, make_requests
from benchmarks.shared.harness import (
    argument_parser,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.intervals import Interval
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.turns import Case, Turns, engine_case
from outrider.draft.config import DraftConfig
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Source

PLAIN = "plain"
ADAPTIVE = "adaptive"
ALONE = "adaptive, model only"
FIXED_TREE = "tree of 32"

_TREE_NODES = 32
_GOAL_OVER_PLAIN = 3.0
_GOAL_OVER_CHAIN = 1.25
_GOAL_OF_HEAD = 1.15
_GOAL_WASTE = 0.5


def chain(length: int, source: Source) -> DraftConfig:
    """Exactly `length` tokens of the drafter in a row, whatever it thinks of them."""
    return DraftConfig(
        max_draft_nodes=length,
        max_draft_depth=length,
        max_branching=1,
        max_frontier=1,
        min_path_prob=0.0,
        sources=(source,),
    )


def fixed_tree(config: DraftConfig, source: Source) -> DraftConfig:
    """The 32 likeliest nodes, as deep and as wide as `config` lets a tree be."""
    return DraftConfig(
        max_draft_nodes=_TREE_NODES,
        max_draft_depth=config.max_draft_depth,
        max_branching=config.max_branching,
        max_frontier=config.max_frontier,
        min_path_prob=0.0,
        sources=(source,),
    )


def chain_name(length: int) -> str:
    """For tables and results."""
    return f"chain of {length}"


def policies(
    pair: Pair, prompts: Sequence[Prompt], arguments: argparse.Namespace, temperature: float
) -> dict[str, Case]:
    """Name -> what answers a prompt under that policy."""

    def case(bench: Bench, **options: Any) -> Case:
        return engine_case(bench, partial(request_for, options=options))

    def request_for(question: int, options: Mapping[str, Any]) -> EngineRequest:
        (request,) = make_requests(
            [prompts[question]],
            tier="large",
            max_tokens=arguments.max_new,
            stop=pair.stop,
            temperature=temperature,
            seed=arguments.seed + question,
            **options,
        )
        return request

    adaptive = pair.bench()
    source: Source = "head" if pair.head else "model"
    fixed = partial(pair.bench, with_budget=False)
    found = {
        PLAIN: case(adaptive, speculate=False),
        ADAPTIVE: case(adaptive),
        ALONE: case(pair.bench(), sources=(source,)),
    }
    found |= {chain_name(length): case(fixed(chain(length, source))) for length in arguments.chains}
    found[FIXED_TREE] = case(fixed(fixed_tree(pair.config, source)))
    return found


def measure(
    pair: Pair, prompts: Sequence[Prompt], arguments: argparse.Namespace, temperature: float
) -> dict[str, Any]:
    """Run and report all policies at one temperature; with the plain answers' token ids."""
    turns = Turns.take(
        policies(pair, prompts, arguments, temperature),
        num_questions=len(prompts),
        num_rounds=arguments.repeats,
        description=f"temperature {temperature:g}",
    )
    reports = {name: turns.report(name) for name in turns.by_case}
    chains = [chain_name(length) for length in arguments.chains]
    best = max(chains, key=lambda name: reports[name]["tokens_per_s"])
    scores_of = pair.scores_of(temperature, arguments.seed)
    comparisons = {
        name: turns.compare(name, PLAIN, prompts, scores_of=scores_of)
        for name in turns.by_case
        if name != PLAIN
    }
    for name, report in reports.items():
        report["over_plain"] = turns.ratio(name, PLAIN)
        report["over_plain_decode"] = turns.ratio(name, PLAIN, decode=True)
        report["over_best_chain"] = turns.ratio(name, best)
    waste = reports[ADAPTIVE].get("wasted_nodes_per_token", 0.0)
    fixed_waste = reports[FIXED_TREE].get("wasted_nodes_per_token")
    waste_ratio = waste / fixed_waste if fixed_waste else None
    result = {
        "policies": reports,
        "best_chain": best,
        "waste_over_fixed_tree": waste_ratio,
        "equality": {name: comparison.record() for name, comparison in comparisons.items()},
        "answers": turns.answers(PLAIN),
    }
    _show(temperature, reports, best, comparisons)
    _show_goals(reports[ADAPTIVE], waste_ratio, _GOAL_OF_HEAD if pair.head else _GOAL_OVER_CHAIN)
    return result


def _show(
    temperature: float,
    reports: Mapping[str, Mapping[str, Any]],
    best: str,
    comparisons: Mapping[str, Comparison],
) -> None:
    rows = [
        [
            f"{name} (best)" if name == best else name,
            f"{report['tokens_per_s']:.1f}",
            str(report["over_plain"]),
            str(report["over_best_chain"]),
            f"{report['tokens_per_pass']:.2f}",
            *_shares(report),
            str(comparisons.get(name, "")),
        ]
        for name, report in reports.items()
    ]
    columns = ["", "tok/s", "x plain", "x best chain", "tok/pass", "accepted", "wasted", "equal"]
    show_table(f"temperature {temperature:g}", columns, rows)


def _shares(report: Mapping[str, Any]) -> list[str]:
    if "acceptance_rate" not in report:
        return ["", ""]
    return [f"{report['acceptance_rate']:.0%}", f"{report['wasted_nodes_per_token']:.2f}"]


def _show_goals(adaptive: Mapping[str, Any], waste: float | None, goal: float) -> None:
    over_plain: Interval = adaptive["over_plain"]
    over_chain: Interval = adaptive["over_best_chain"]
    console.print(
        f"at least {_GOAL_OVER_PLAIN} x plain: "
        f"{verdict(over_plain.estimate >= _GOAL_OVER_PLAIN)}; "
        f"at least {goal} x the best chain: "
        f"{verdict(over_chain.estimate >= goal)}; "
        f"wasted nodes at most {_GOAL_WASTE} x the fixed tree's: "
        f"{verdict(waste is not None and waste <= _GOAL_WASTE)} "
        f"({'-' if waste is None else f'{waste:.2f}'})"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run all temperatures and write the results."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=24, max_new=96)
    parser.add_argument("--chains", type=int, nargs="+", default=[2, 4, 6, 8, 12, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    add_draft_options(parser)
    parser.add_argument(
        "--drafter",
        type=Path,
        help="folder of an EAGLE-3 head of the large model (before it is grown): it drafts in the "
        "small model's place",
    )
    parser.set_defaults(repeats=2)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folders = Folders.of(arguments)
    prompts = folders.task_prompts(arguments, arguments.num_prompts)
    pair = folders.load(arguments, prompts)
    measured = {
        f"{temperature:g}": measure(pair, prompts, arguments, temperature)
        for temperature in arguments.temperature
    }
    # Sampling that never leaves the greedy path would be no test of its own.
    answers = {name: result.pop("answers") for name, result in measured.items()}
    for name, result in measured.items():
        result["num_unlike_first_temperature"] = sum(
            ours != first
            for ours, first in zip(answers[name], next(iter(answers.values())), strict=True)
        )
        console.print(
            f"temperature {name}: {result['num_unlike_first_temperature']} of {len(prompts)} "
            f"answers are not those at temperature {arguments.temperature[0]:g}"
        )
    results = {
        **pair.describe(),
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        "temperatures": measured,
    }
    variant = variant_name(arguments, *(["head"] if pair.head else []))
    write_results("bench_tree_policies", variant, results, arguments)


if __name__ == "__main__":
    start(main)
