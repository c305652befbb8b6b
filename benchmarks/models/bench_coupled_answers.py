"""How many requests tell two arms apart, if both answer with the same noise or each with its own?

Method: arms answer the same hard held-out tasks, each several times with other seeds, and a program
checks the answers. With a seed, every arm draws from the same stream. Of the recorded answers,
*coupled* pairs have the same task and seed, *independent* ones the same task and different seeds,
and *separate* ones different tasks, as in an A/B experiment where each request has one arm.
Experiments are simulated by drawing such pairs with replacement, until the always-valid interval of
the mean difference (docs/experiments.md) leaves 0 out; they are looked at after every 10 requests.
A request counts once for each arm that answers it.

Reading it: `variance` is that of a pair's difference in rightness, over separate requests'.
`answers` until 50 and 80 % of 1,000 simulated experiments are decided. `wins` are shares of pairs
in which only that arm is right: they depend on how noise is drawn, the difference of the two does
not. `right | wrong`: how often the second arm is right where the first is wrong.

    python -m benchmarks.models.bench_coupled_answers
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.shared.driving import blocks_for, build_bench, drive, load_runner, make_requests
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    write_results,
)
from benchmarks.shared.prompts import Prompt, load_tokenizer, make_prompt, stop_token_ids
from outrider.draft.training.tasks.base import Task
from outrider.draft.training.tasks.families import check, stream
from outrider.engine.model.quantised.formats import SchemeName
from outrider.engine.request import EngineRequest
from outrider.gateway.experiments.statistics.means import reach_of_difference

_CONCURRENCY: Final = 32
_ALPHA: Final = 0.05
_NUM_SIMULATED: Final = 1000
_LOOK_EVERY: Final = 10
_FIRST_LOOK: Final = 50
_MOST_REQUESTS: Final = 20_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A model and a temperature."""

    is_large: bool = True
    scheme: SchemeName | None = None
    temperature: float = 1.0


CONTROL: Final = "large"
ARMS: Final[Mapping[str, Arm]] = {
    CONTROL: Arm(),
    "large in int4": Arm(scheme="int4"),
    "temperature 0.7": Arm(temperature=0.7),
    "small": Arm(is_large=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What an arm answered: [tasks, seeds]."""

    right: Floats
    num_tokens: Floats
    texts: list[list[tuple[int, ...]]]


def answered(arm: Arm, tasks: Sequence[Task], arguments: argparse.Namespace) -> Recorded:
    """Have an arm answer every task with every seed."""
    folder = arguments.large if arm.is_large else arguments.small
    tokenizer = load_tokenizer(folder)
    prompts = [
        make_prompt(tokenizer, [{"role": "user", "content": task.prompt}], kind=task.family)
        for task in tasks
    ]
    longest = max(len(prompt.token_ids) for prompt in prompts) + arguments.max_new
    # Every arm is served as the large tier, so that all draw from the same stream.
    runner = load_runner(
        folder,
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=blocks_for(num_sequences=_CONCURRENCY, num_tokens=longest),
        scheme=arm.scheme,
    )
    stop = stop_token_ids(folder, tokenizer)
    requests = seeded_requests(prompts, arm, stop, arguments)
    streams = drive(build_bench({"large": runner}), requests, concurrency=_CONCURRENCY).streams
    answers = [tuple(stream.token_ids) for stream in streams]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    each = arguments.num_seeds
    right = [check(tasks[index // each], text) for index, text in enumerate(texts)]
    shape = (len(tasks), each)
    return Recorded(
        right=np.array(right, dtype=np.float64).reshape(shape),
        num_tokens=np.array([len(answer) for answer in answers], dtype=np.float64).reshape(shape),
        texts=[answers[index * each : (index + 1) * each] for index in range(len(tasks))],
    )


def seeded_requests(
    prompts: Sequence[Prompt], arm: Arm, stop: tuple[int, ...], arguments: argparse.Namespace
) -> list[EngineRequest]:
    """Return a request for each task and seed; equal in all arms but for the temperature."""
    return make_requests(
        [prompt for prompt in prompts for _ in range(arguments.num_seeds)],
        tier="large",
        max_tokens=arguments.max_new,
        temperature=arm.temperature,
        seed=arguments.seed,
        speculate=False,
        stop=stop,
    )


# ---- pairs ------------------------------------------------------------------------------------


def pairs(one: Floats, other: Floats, kind: str) -> Floats:
    """Return values of both arms, [pairs, 2], of all pairs of a kind."""
    num_tasks, num_seeds = one.shape
    if kind == "coupled":
        return np.stack((one, other), axis=-1).reshape(-1, 2)
    if kind == "independent":
        shifted = [np.roll(other, -shift, axis=1) for shift in range(1, num_seeds)]
        return np.concatenate([np.stack((one, each), axis=-1).reshape(-1, 2) for each in shifted])
    shifted = [np.roll(other, -shift, axis=0) for shift in range(1, num_tasks)]
    return np.concatenate([np.stack((one, each), axis=-1).reshape(-1, 2) for each in shifted])


KINDS: Final = ("separate", "independent", "coupled")


def answers_needed(values: Floats, seed: int) -> dict[str, int | None]:
    """Return answers of both arms until 50 and 80 % of simulated experiments are decided."""
    rng = np.random.default_rng(seed)
    differences = values[:, 1] - values[:, 0]
    sums, squares = np.zeros(_NUM_SIMULATED), np.zeros(_NUM_SIMULATED)
    is_open = np.ones(_NUM_SIMULATED, dtype=bool)
    found: dict[str, int | None] = {"50": None, "80": None}
    for size in range(_LOOK_EVERY, _MOST_REQUESTS + 1, _LOOK_EVERY):
        drawn = differences[rng.integers(len(differences), size=(_NUM_SIMULATED, _LOOK_EVERY))]
        sums += drawn.sum(1)
        squares += (drawn**2).sum(1)
        if size < _FIRST_LOOK:
            continue
        mean = sums / size
        variance = np.maximum(squares / size - mean**2, 1e-12) * size / (size - 1)
        # Both arms answer each request: its number is that of both together, as in the gateway.
        unit = reach_of_difference(1.0, 2.0 * size, _ALPHA)
        is_open &= np.abs(mean) <= unit * np.sqrt(variance / size)
        for share, needed in found.items():
            if needed is None and 1.0 - is_open.mean() >= int(share) / 100:
                found[share] = 2 * size
        if None not in found.values():
            break
    return found


def compared(control: Recorded, arm: Recorded, seed: int) -> dict[str, Any]:
    """Return all figures of an arm against the control."""
    right = {kind: pairs(control.right, arm.right, kind) for kind in KINDS}
    length = {kind: pairs(control.num_tokens, arm.num_tokens, kind) for kind in KINDS}
    same = [
        mine == its
        for of_mine, of_its in zip(control.texts, arm.texts, strict=True)
        for mine, its in zip(of_mine, of_its, strict=True)
    ]
    return {
        "control_right": float(control.right.mean()),
        "arm_right": float(arm.right.mean()),
        "same_text": sum(same) / len(same),
        "by_noise": {kind: _figures(right[kind], length[kind], seed) for kind in KINDS},
    }


def _figures(right: Floats, length: Floats, seed: int) -> dict[str, Any]:
    control, arm = right.T
    is_wrong = control == 0.0
    return {
        "variance_right": float((arm - control).var()),
        "variance_tokens": float((length[:, 1] - length[:, 0]).var()),
        "answers_needed": answers_needed(right, seed),
        "control_wins": float((control > arm).mean()),
        "arm_wins": float((arm > control).mean()),
        "arm_right_where_control_wrong": float(arm[is_wrong].mean()) if is_wrong.any() else None,
    }


def main() -> None:
    """Parse, measure, report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--num-tasks", type=int, default=80)
    parser.add_argument("--num-seeds", type=int, default=5, help="answers of an arm to a task")
    parser.add_argument(
        "--difficulties", type=int, nargs="+", default=[3, 4], help="of the tasks, from 1 to 4"
    )
    parser.add_argument("--max-new", type=int, default=160, help="longest answer, in tokens")
    arguments = parser.parse_args()
    prepare(arguments)
    choose_threads(arguments, arguments.large)
    tasks = list(
        islice(
            stream(arguments.seed, "heldout", difficulties=arguments.difficulties),
            arguments.num_tasks,
        )
    )
    recorded = {}
    for name, arm in ARMS.items():
        with console.status(f"{name}: answering"):
            recorded[name] = answered(arm, tasks, arguments)
        console.print(f"{name}: {recorded[name].right.mean():.3f} right")
    found = {
        name: compared(recorded[CONTROL], each, arguments.seed)
        for name, each in recorded.items()
        if name != CONTROL
    }
    for name, one in found.items():
        report(name, one)
    write_results("bench_coupled_answers", variant_name(arguments), {"arms": found}, arguments)


def report(name: str, found: Mapping[str, Any]) -> None:
    """Print an arm's table."""
    base = found["by_noise"]["separate"]["variance_right"]
    base_tokens = found["by_noise"]["separate"]["variance_tokens"]
    rows = [
        [
            kind,
            f"{one['variance_right'] / base:.2f}",
            f"{one['variance_tokens'] / base_tokens:.2f}",
            " / ".join("-" if n is None else f"{n:,}" for n in one["answers_needed"].values()),
            f"{one['control_wins']:.3f} {one['arm_wins']:.3f}",
            "-"
            if one["arm_right_where_control_wrong"] is None
            else f"{one['arm_right_where_control_wrong']:.2f}",
        ]
        for kind, one in found["by_noise"].items()
    ]
    show_table(
        f"{CONTROL} ({found['control_right']:.3f}) against {name} ({found['arm_right']:.3f}), "
        f"{found['same_text']:.0%} of texts equal",
        ["noise", "variance", "of tokens", "answers 50 / 80 %", "wins", "right | wrong"],
        rows,
    )


if __name__ == "__main__":
    start(main)
