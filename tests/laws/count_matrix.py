"""Count the requests of the matrix law whose answers differ, and write the count down.

The cases are those of the law's long test: values of all axes, drawn at random. A case whose
numbers do not show what should have happened (no token drafted, nothing cached) is named as well.

    OMP_NUM_THREADS=1 python -m tests.laws.count_matrix
    OMP_NUM_THREADS=1 python -m tests.laws.count_matrix --requests 2000 --minutes 10
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.shared.harness import console, write_results
from benchmarks.shared.record import RESULTS
from tests.laws.matrix import AXES, any_cases, differences


def count(num_requests: int, *, seed: int, seconds: float) -> dict[str, Any]:
    """Serve random cases with so many requests; fewer where the time is over before."""
    values = {axis: Counter[str]() for axis in AXES}
    num_served, started_s, found = 0, time.perf_counter(), []
    for case in any_cases(random.Random(seed), num_requests):
        differing = differences(case)
        found += [{"case": case, "differences": differing}] if differing else []
        num_served += int(case["batch"])
        for axis, value in case.items():
            values[axis][value] += int(case["batch"])
        spent_s = time.perf_counter() - started_s
        console.print(f"{spent_s:6.0f} s {num_served:6} {'-'.join(case.values())} {differing}")
        if spent_s > seconds:
            break
    return {
        "num_requests": num_served,
        "num_differences": sum(_is_request(each) for case in found for each in case["differences"]),
        "found": found,
        "requests_by_value": {
            axis: {value: counted[value] for value in AXES[axis]}
            for axis, counted in values.items()
        },
        "seconds": time.perf_counter() - started_s,
    }


def _is_request(difference: str) -> bool:
    return difference.startswith("request ")


def main(argv: Sequence[str] | None = None) -> None:
    """Count, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=240.0, help="at most")
    parser.add_argument("--results", default=str(RESULTS), help="folder")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = count(arguments.requests, seed=arguments.seed, seconds=60 * arguments.minutes)
    write_results("count_matrix", f"{found['num_requests']}-requests", found, arguments)


if __name__ == "__main__":
    main()
