"""What do the commands of `outrider router` print of the routers that docs/router.md speaks of?

Method: the commands are run as a reader would type them, and their JSON is kept. Routers for MMLU
and GSM8K are trained on the gold files of `routing/` below --data or $OUTRIDER_DATA, and judged on
the dev files: `eval` with flips under paraphrase, and `drift`. The bundled router is judged on
held-out tasks of the demo pair's world (those of bench_features, whose labels under runs/ are used
where they are), with the prices that the document names; `calibrate` says how well it predicts
lengths. Prompts unlike its training are counted among new tasks of its own world and in
`prompts/`. What files are absent is left out.

Reading it: `stays` is the share of decisions that a change of form leaves as they were. For each
setting of the bundled router, `minus_text` compares it with the text alone at the same cost.

    python -m benchmarks.routing.bench_router_figures --data DATA
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.routing.routing_policies import known_by, mean_interval
from benchmarks.routing.routing_runs import label
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
from outrider.gateway.tools.learning.collect.data import read_questions
from outrider.router.calibration import (
    CalibrationTarget,
    OperatingPoint,
    StageRows,
    calibrate,
    expected_costs,
    measure,
    split,
)
from outrider.router.dataset import read_labelled_prompts
from outrider.router.features import FloatRows
from outrider.router.scorer import RouterScorer
from outrider.router.stages import stage_rows

_TEST_SEED: Final = 20_261_121
_OWN_SEED: Final = 20_261_203
_NUM_OWN: Final = 600
_PROMPTS: Final = {
    "HumanEval": "HumanEval.jsonl.gz",
    "MT-Bench": "mt_bench_question.jsonl",
    "Spec-Bench": "spec_bench_half.jsonl",
}
_PRICES: Final = ("--small-price", "0.05/0.2", "--large-price", "0.5/2")


def router(*words: str | Path) -> Any:
    """Run a command of `outrider router` and return its JSON. Status 1: a router has drifted."""
    command = [sys.executable, "-m", "outrider.gateway.cli", "router", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)


def judged(folder: Path, data: Path, *options: str) -> dict[str, Any]:
    """What `eval` says of a router, without its curves."""
    found = router("eval", "--router", folder, "--data", data, "--flips", *options)
    flips = found.pop("flips", {})
    kept = {name: value for name, value in found.items() if "curve" not in name and name != "bins"}
    return {**kept, "stays": {kind: 1.0 - one["share"] for kind, one in flips.items()}}


def of_csv(root: Path, name: str) -> dict[str, Any] | None:
    """Train on the gold file, judge on the dev file; None where they are absent."""
    gold, dev = (root / "routing" / f"{name}_{part}.csv" for part in ("gold", "dev"))
    if not (gold.is_file() and dev.is_file()):
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "router"
        trained = router("train", "--data", gold, "--out", out)
        return {
            "training": trained["training"],
            "eval": judged(out, dev),
            "drift": router("drift", "--router", out, "--data", dev),
        }


def of_bundled(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the bundled router is worth on tasks that it has not seen."""
    scorer = RouterScorer.load(arguments.router)
    folder = CACHE / "routing-features" / "test"
    path = folder / f"questions-{_TEST_SEED}-{arguments.num_prompts}.jsonl"
    write_tasks(path, num_rows=arguments.num_prompts, seed=_TEST_SEED)
    labels = label(arguments, read_questions(path), folder)
    lines = labels.path.read_text(encoding="utf-8").splitlines(keepends=True)
    prompts = [json.loads(line)["prompt"] for line in lines]
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "labels.jsonl"
        is_known = scorer.was_trained_on(prompts)
        data.write_text(
            "".join(line for line, known in zip(lines, is_known, strict=True) if not known)
        )
        return {
            "num_known": int(is_known.sum()),
            "eval": judged(arguments.router, data, *_PRICES),
            "calibrate": router(
                *("calibrate", "--router", arguments.router, "--data", data),
                *("--quality", "0.95", "--gain-per", "second"),
            ),
            "minus_text": minus_text(scorer, data),
        }


def minus_text(scorer: RouterScorer, path: Path) -> list[dict[str, Any]]:
    """By setting of the router: accuracy minus that of the text alone at the same expected cost.

    The text takes the two settings around that cost, each for a share of the prompts.
    """
    rows = stage_rows(scorer, read_labelled_prompts(path))
    text = known_by(rows, "text")
    whole = CalibrationTarget(recovered_gap=1.0)
    by_text = sorted(
        (float(expected_costs(text, point).mean()), number, point)
        for number, point in enumerate(calibrate(text, whole).points)
    )
    costs = np.array([cost for cost, _, _ in by_text])
    found = []
    for point in () if scorer.calibration is None else scorer.calibration.points:
        cost = float(expected_costs(rows, point).mean())
        above = int(np.clip(np.searchsorted(costs, cost), 1, len(costs) - 1))
        span = costs[above] - costs[above - 1]
        share = float(np.clip((cost - costs[above - 1]) / span, 0.0, 1.0))
        low, high = (_scores(text, by_text[place][2]) for place in (above - 1, above))
        difference = _scores(rows, point) - share * high - (1.0 - share) * low
        found.append(
            {
                "cost": cost / costs[-1],
                "watched_share": measure(rows, point.threshold, point.band).watched_share,
                "difference": mean_interval(difference),
            }
        )
    return found


def _scores(rows: StageRows, point: OperatingPoint) -> FloatRows:
    is_strong, _ = split(rows, point.threshold, point.band)
    scores: FloatRows = np.where(is_strong, rows.strong, rows.weak)
    return scores


def unlike(scorer: RouterScorer, root: Path | None) -> dict[str, Any]:
    """Shares of prompts that are unlike the bundled router's training, by where they are from."""
    found = {}
    for name, prompts in _prompts(root):
        strange = [scorer.estimate_familiar(prompt) is None for prompt in prompts]
        found[name] = {"num_prompts": len(strange), "share": float(np.mean(strange))}
    return found


def _prompts(root: Path | None) -> Iterator[tuple[str, list[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.jsonl"
        write_tasks(path, num_rows=_NUM_OWN, seed=_OWN_SEED)
        yield "own world", [question.prompt for question in read_questions(path)]
    for name, file in _PROMPTS.items():
        place = None if root is None else root / "prompts" / file
        if place is None or not place.is_file():
            console.print(f"{name}: left out; name a folder with prompts/{file} by --data")
            continue
        opened = gzip.open if place.suffix == ".gz" else open
        with opened(place, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
            yield name, [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--router", type=Path, default=bundled_pair() / "router")
    parser.add_argument("--num-prompts", type=int, default=1000, help="held-out tasks")
    parser.add_argument("--data", type=Path, help="folder with routing/ and prompts/")
    parser.add_argument("--max-new", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--max-context", type=int, help="default: the models' own")
    parser.add_argument("--batch", type=int, default=32, help="questions answered at a time")
    parser.set_defaults(alphas=[])
    arguments = parser.parse_args(argv)
    prepare(arguments)
    variable = os.environ.get("OUTRIDER_DATA")
    root: Path | None = arguments.data or (Path(variable) if variable else None)
    results: dict[str, Any] = {
        "unlike": unlike(RouterScorer.load(arguments.router), root),
        "bundled": of_bundled(arguments),
    }
    for name in ("mmlu", "gsm8k"):
        if root is not None and (found := of_csv(root, name)) is not None:
            results[name] = found
    _show(results)
    write_results("bench_router_figures", variant_name(arguments), results, arguments)


def _show(results: Mapping[str, Any]) -> None:
    settings = results["bundled"]["minus_text"]
    below = sum(one["difference"].high < 0.0 for one in settings)
    watched = sum(one["watched_share"] > 0.0 for one in settings)
    console.print(f"{len(settings)} settings, {watched} with a watch, {below} below the text")
    for name, one in results["unlike"].items():
        console.print(f"unlike, {name}: {one['share']:.1%} of {one['num_prompts']}")
    for name in ("bundled", "mmlu", "gsm8k"):
        if name in results:
            console.print(f"{name}: APGR {results[name]['eval']['apgr']:.3f}")
            console.print(f"  stays {results[name]['eval']['stays']}")


if __name__ == "__main__":
    start(main)
