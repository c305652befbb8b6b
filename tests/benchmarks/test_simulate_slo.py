"""Virtual time: the scheduler serves everything, and objectives help where the load is high."""

import random
from dataclasses import replace

import pytest

from benchmarks.shared.slo_trace import Arrival, scaled
from benchmarks.simulate.simulate_slo import (
    CASES,
    MACHINES,
    ORDER,
    SLO,
    carried,
    objectives,
    simulate,
)

QUIET = replace(MACHINES["demo pair, 2 cores"], noise=0.0, stalls=0.0)


def arrivals(count: int = 90) -> list[Arrival]:
    rng = random.Random(7)
    at_s, found = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(1.0)
        found.append(
            Arrival(
                at_s=at_s,
                num_prompt=rng.randrange(20, 400),
                num_answer=rng.randrange(10, 120),
                trace_class="batch" if number % 3 == 0 else "short-chat",
            )
        )
    return found


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("load", "least", "most"), [(0.4, 0.97, 1.1), (1.0, 1.3, 9.0), (1.5, 1.3, 9.0)]
)
def test_objectives_help_under_load_and_cost_nothing_without(
    load: float, least: float, most: float
) -> None:
    sample = scaled(arrivals(), context=512, rate=1.0)
    wanted = objectives(QUIET, sample, (10.0, 5.0))
    rate = load * carried(QUIET, sample, 16)
    found = simulate(QUIET, scaled(arrivals(), context=512, rate=rate), wanted, 16, seed=0)
    assert set(found) == set(CASES)
    assert found[ORDER]["over_order"] == 1.0
    assert least <= found[SLO]["over_order"] <= most
