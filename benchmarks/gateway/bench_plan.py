"""By how much is `outrider plan` wrong?

Method: the step times, the host's part and the acceptance of the pair are measured as the planner
does it, then a gateway with the same settings is asked by `outrider bench` in a closed loop, at
several numbers of users and in three ways to serve: the large model alone, with speculation, and
`auto`, where the router gives the small model its share. Each run's own requests are then simulated
at the same concurrency, and the figures are put side by side.

Reading it: `error` is predicted over measured, less one; +0.10 is ten percent too much. The planner
knows nothing of the prefix cache, nor of what lies between engine and client but a constant. Only
the small model guesses here: in a closed loop of the same few prompts every answer was written
before, and text that repeats would guess nearly all of it.

    python -m benchmarks.gateway.bench_plan --dtype float32
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from benchmarks.shared.harness import (
    argument_parser,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    write_results,
)
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tools.demo.process import GatewayProcess
from outrider.gateway.tools.measuring.bench.client import TargetSettings
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings
from outrider.gateway.tools.measuring.bench.results import BenchResult
from outrider.gateway.tools.measuring.bench.runner import run_bench
from outrider.gateway.tools.measuring.bench.workloads import WorkloadSettings
from outrider.gateway.tools.measuring.plan.check import PredictedFigure, compare
from outrider.gateway.tools.measuring.plan.measure import Measurement, measure
from outrider.gateway.tools.measuring.plan.simulate import System

# The model that is asked for, and what each request says beside.
WAYS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "large alone": ("large", {"outrider": {"speculation": "off"}}),
    "speculation": ("large", {"outrider": {"sources": ["model"]}}),
    "auto": ("auto", {"outrider": {"sources": ["model"]}}),
}
_OVERHEAD_S: Final = 0.003


def system_of(found: Measurement, settings: Settings, way: str) -> System:
    """Return the system that the planner assumes."""
    options = settings.engine
    system = System(
        large=found.tiers["large"],
        small=found.tiers["small"],
        speculation=found.speculation,
        max_sequences=options.max_sequences,
        max_rows=options.max_tokens_per_step,
    )
    return replace(system, speculation=None) if way == "large alone" else system


def ask(url: str, way: str, num_users: int, arguments: argparse.Namespace) -> BenchResult:
    """One measured run."""
    model, fields = WAYS[way]
    plan = BenchPlan(
        target=TargetSettings(url=url, model=model),
        workload=WorkloadSettings(kind="prompts", max_tokens=arguments.max_new),
        load=LoadSettings(
            concurrency=num_users, duration_s=arguments.seconds, warm_up_s=arguments.seconds / 4
        ),
        request_fields={"temperature": 0, **fields},
        seed=arguments.seed,
    )
    return asyncio.run(run_bench(plan))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, predict, compare."""
    parser = argument_parser(__doc__)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measured run")
    parser.add_argument("--max-new", type=int, default=48, help="tokens of an answer at most")
    arguments = parser.parse_args(argv)
    prepare(arguments)
    flags = {
        "models.large": str(arguments.large),
        "models.small": str(arguments.small),
        "engine.dtype": arguments.dtype,
    }
    settings = load_settings(flags=flags, environ={})
    with console.status("timing passes"):
        found = measure(settings, lambda stage, share: None)
    router = arguments.large.parent / "router"
    given = [f"--large={arguments.large}", f"--small={arguments.small}"]
    given += [f"--dtype={arguments.dtype}", *([f"--router={router}"] if router.is_dir() else [])]
    compared: dict[str, list[PredictedFigure]] = {}
    with GatewayProcess(given) as gateway:
        url = gateway.start()
        for way in WAYS:
            for num_users in arguments.users:
                with console.status(f"{way}, {num_users} users"):
                    result = ask(url, way, num_users, arguments)
                system = system_of(found, settings, way)
                figures = compare(system, result, overhead_s=_OVERHEAD_S)
                compared[f"{way}, {num_users} users"] = figures
    show_table(
        "predicted and measured",
        ["", "figure", "predicted", "measured", "error"],
        [
            [
                name if number == 0 else "",
                f"{one.name}, {one.unit}",
                f"{one.predicted:.2f}",
                f"{one.measured:.2f}",
                f"{one.error:+.0%}",
            ]
            for name, figures in compared.items()
            for number, one in enumerate(figures)
        ],
        caption=f"closed loops of {arguments.seconds:g} s",
    )
    results = {
        name: [{**asdict(one), "error": one.error} for one in figures]
        for name, figures in compared.items()
    }
    measured = {
        "tiers": {tier: asdict(model) for tier, model in found.tiers.items()},
        "speculation": None if found.speculation is None else asdict(found.speculation),
    }
    write_results(
        "bench_plan",
        variant_name(arguments),
        {"compared": results, "measured": measured},
        arguments,
    )


if __name__ == "__main__":
    start(main)
