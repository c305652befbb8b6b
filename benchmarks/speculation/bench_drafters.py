"""Does a drafter that reads the large model's hidden states guess better than one that reads text?

Method: the large model answers tasks greedily, and drafters learn from the same answers, in the
same batches and as many steps: an EAGLE-3 head (`outrider draft train --kind eagle3`) and small
Llama models of several shapes (`--kind small`). Then

- a level: the median time of a pass of 8 rows behind 128 tokens, all drafters in turn;
- by depth: how often the first choice is right where all guesses above it are, from every place of
  the large model's answers to held-out tasks;
- the same for the large model in int8: its own answers and hidden states, the drafters as they were
  trained on bfloat16.

How to read it: compare the head with the small model whose level takes as long, or longer. Weights
depend on the machine's speed where `--minutes` ends the head's training; the small models take the
steps that it took.

    python -m benchmarks.speculation.bench_drafters
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared.driving import load_runner
from benchmarks.shared.harness import (
    CACHE,
    argument_parser,
    console,
    milliseconds,
    prepare,
    show_table,
    start,
    timed,
    variant_name,
    write_results,
)
from benchmarks.shared.prompts import load_tokenizer, stop_token_ids
from benchmarks.speculation.drafter_training import (
    CPU,
    SmallShape,
    answered,
    small_acceptance,
    task_rows,
    trained_head,
    trained_small,
)
from outrider.draft.heads.read_head import read_head
from outrider.draft.training.distill import DistillPlan
from outrider.draft.training.head_distil import DepthAcceptance, measure_acceptance
from outrider.draft.training.own_answers import AnswerPlan
from outrider.engine.model.quantised.formats import SchemeName
from outrider.engine.passes.runner import ForwardSlice, ModelRunner

_DEPTH = 7
_SCHEMES: Mapping[str, SchemeName | None] = {"bfloat16": None, "int8": "int8"}
_ROWS, _CONTEXT = 8, 128
_SHAPES = (
    SmallShape(layers=2, width=128),
    SmallShape(layers=1, width=256),
    SmallShape(layers=2, width=256),
    SmallShape(layers=3, width=256),
)


def _level_pass(runner: ModelRunner, features: Tensor | None) -> float:
    """Seconds of one pass of a tree's level."""
    view = runner.new_view("level")
    view.reserve(_CONTEXT + _ROWS)
    piece = ForwardSlice(
        view=view,
        token_ids=list(range(3, 3 + _ROWS)),
        start_slot=_CONTEXT,
        num_logit_rows=_ROWS,
    )
    extra: dict[str, Any] = {} if features is None else {"features": features}
    seconds = timed(lambda: runner.forward([piece], **extra))
    view.release()
    return seconds


def _level_times(runners: Mapping[str, ModelRunner], repeats: int) -> dict[str, float]:
    """The median seconds of a level of each drafter, all of them in turn."""
    features = {
        name: torch.randn(_ROWS, runner.model.feature_size, dtype=runner.model.dtype)
        if runner.model.feature_size
        else None
        for name, runner in runners.items()
    }
    found: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(repeats + 20):
        for name, runner in runners.items():
            seconds = _level_pass(runner, features[name])
            if turn >= 20:
                found[name].append(seconds)
    return {name: median(times) for name, times in found.items()}


def _measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    large = Path(arguments.large)
    tokenizer = load_tokenizer(large)
    answers = AnswerPlan(
        max_tokens=256,
        max_length=640,
        top_k=16,
        stop_token_ids=stop_token_ids(large, tokenizer),
    )
    learnt = answered(
        large,
        task_rows("train", arguments.prompts, arguments.seed),
        answers,
        work / "learnt",
        tokenizer=tokenizer,
    )
    held_out = {
        name: answered(
            large,
            task_rows("heldout", arguments.held_out, arguments.seed),
            answers,
            work / f"held-out-{name}",
            tokenizer=tokenizer,
            scheme=scheme,
        )
        for name, scheme in _SCHEMES.items()
    }
    plan = DistillPlan(
        minutes=None if arguments.steps else arguments.minutes,
        steps=arguments.steps,
        batch_size=12,
        learning_rate=3e-3,
        held_out=0.02,
    )
    head, steps = trained_head(
        large, learnt, plan, work / "head", draft_vocab_size=arguments.draft_vocab, depth=_DEPTH
    )
    console.print(f"head: {steps} steps")
    acceptance: dict[str, dict[str, DepthAcceptance]] = {
        "head": {
            name: measure_acceptance(head, rows, _DEPTH, CPU) for name, rows in held_out.items()
        }
    }
    target = load_runner(large, dtype="auto", device="cpu", num_blocks=64)
    runners = {
        "head": ModelRunner(
            model=read_head(str(work / "head"), target.model),  # type: ignore[arg-type]
            num_blocks=64,
        )
    }
    small_plan = DistillPlan(steps=steps, batch_size=12, held_out=0.02)
    for shape in _SHAPES:
        name, folder = str(shape), work / f"small-{shape.layers}-{shape.width}"
        model = trained_small(large, learnt, small_plan, folder, shape)
        acceptance[name] = {
            kind: small_acceptance(model, rows, _DEPTH) for kind, rows in held_out.items()
        }
        runners[name] = load_runner(folder, dtype="auto", device="cpu", num_blocks=64)
    times = _level_times(runners, arguments.repeats)
    return {
        "steps": steps,
        "num_prompts": len(learnt),
        "num_held_out": {name: len(rows) for name, rows in held_out.items()},
        "drafters": {
            name: {
                "parameters": runner.model.num_parameters,
                "level_ms": 1e3 * times[name],
                "acceptance": acceptance[name],
            }
            for name, runner in runners.items()
        },
    }


def _show(results: Mapping[str, Any]) -> None:
    for kind in _SCHEMES:
        rows = []
        for name, drafter in results["drafters"].items():
            found = drafter["acceptance"][kind]
            rows.append(
                [
                    name,
                    f"{drafter['parameters'] / 1e6:.2f} M",
                    milliseconds(drafter["level_ms"] / 1e3),
                    *(f"{100 * share:.1f}" for share in found.levels),
                    f"{1 + sum(found.paths):.2f}",
                ]
            )
        show_table(
            f"first choice right below right ones, % by depth; large model in {kind}",
            ["drafter", "weights", "ms a level", *map(str, range(1, _DEPTH + 1)), "tokens a pass"],
            rows,
            caption=f"chains of {_DEPTH}; {results['steps']} steps on the same answers",
        )


def main() -> None:
    """Train all drafters, measure them, write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=2500, help="to learn from")
    parser.add_argument("--held-out", type=int, default=150, help="to measure on")
    parser.add_argument("--minutes", type=float, default=6.0, help="of the head's training")
    parser.add_argument("--steps", type=int, help="of the head's training, in place of minutes")
    parser.add_argument("--draft-vocab", type=int, default=1024, help="tokens that the head has")
    parser.add_argument("--resume", action="store_true", help="go on with what lies under runs/")
    parser.set_defaults(repeats=100)
    arguments = parser.parse_args()
    prepare(arguments)
    torch.set_num_threads(arguments.threads or 2)
    work = CACHE / "drafters"
    if not arguments.resume:
        shutil.rmtree(work, ignore_errors=True)
    results = _measure(arguments, work)
    _show(results)
    write_results("bench_drafters", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
