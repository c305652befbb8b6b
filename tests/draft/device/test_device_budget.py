"""What steps take beside their passes where trees grow on the device, and what follows from it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulate.processors import H100
from outrider.draft.budget.budget import DraftGain, TreeBudget
from outrider.draft.forecast import Grower, TreeForecast, num_levels, share_nodes
from tests.draft.virtual_machine import VirtualMachine
from tests.engines import drafter_of, fixed_budget

# Recorded shape of an 8B and a 0.6B model on one GPU: milliseconds of the passes in their graphs,
# of what surrounds a level (ranking, tree kernels, the host's gap) and of what surrounds a step.
LARGE_S, LARGE_ROW_S = 4.95e-3, 4e-6
SMALL_S, LEVEL_BESIDE_S, STEP_BESIDE_S = 1.15e-3, 0.3e-3, 0.4e-3


def recorded_budget() -> TreeBudget:
    return fixed_budget(target=LARGE_S, row=LARGE_ROW_S, draft=SMALL_S)


@pytest.mark.parametrize("num_sequences", [3, 8])
def test_at_recorded_times_streams_in_company_get_more_than_the_root(num_sequences: int) -> None:
    """With all that a level takes in the budget, the stretch alone would rule drafts out."""
    step = recorded_budget().of_step(
        num_sequences=num_sequences,
        context=1000.0,
        base_tokens=num_sequences,
        part_host_s=LEVEL_BESIDE_S,
        step_host_s=STEP_BESIDE_S,
    )
    # By the stretch the root's level and no other.
    assert STEP_BESIDE_S + LARGE_S + 2 * step.level_s(4) > 1.3 * (LARGE_S + STEP_BESIDE_S)
    gains = [DraftGain(acceptance=0.8)] * num_sequences
    assert step.num_worth_drafting(gains, np.empty(0), 8) == num_sequences
    forecast = TreeForecast()
    forecast.by_rank[:] = forecast.by_depth[:] = 0.8 ** np.arange(1.0, len(forecast.by_rank) + 1)
    growers = [Grower(forecast=forecast, urgency=1.0, max_depth=8, max_nodes=32)] * num_sequences
    step.spend(num_sequences)
    number = num_levels(growers, step, width=4, min_gain=0.05)
    assert number >= 2
    for _ in range(number):
        step.spend(4 * num_sequences)
    num_nodes, _ = share_nodes(growers, np.empty(0), step)
    assert num_nodes >= 3 * num_sequences
    # Nothing comes for nothing: ten times as much beside each level leaves fewer of them.
    dear = recorded_budget().of_step(
        num_sequences=num_sequences, context=1000.0, base_tokens=num_sequences,
        part_host_s=10 * LEVEL_BESIDE_S, step_host_s=STEP_BESIDE_S,
    )  # fmt: skip
    dear.spend(num_sequences)
    assert num_levels(growers, dear, width=4, min_gain=0.05) < number


def test_what_is_beside_every_step_makes_a_level_dearer_by_less() -> None:
    """A step that takes long anyway has more use for a level."""

    def levels(step_host_s: float) -> int:
        step = recorded_budget().of_step(
            num_sequences=1, context=0.0, base_tokens=1.0,
            part_host_s=LEVEL_BESIDE_S, step_host_s=step_host_s,
        )  # fmt: skip
        grower = Grower(forecast=TreeForecast(), urgency=1.0, max_depth=8, max_nodes=32)
        step.spend(1)
        return num_levels([grower], step, width=4, min_gain=0.05)

    assert levels(0.0) < levels(0.03)


@pytest.mark.slow
def test_a_drafter_learns_both_while_it_serves() -> None:
    """A level takes half a millisecond beside its pass, and every step a quarter."""
    machine = VirtualMachine(
        replace(H100, step_host_s=0.00025, tree_host_s=0.0005, stream_host_s=0.0),
        agreement=0.7,
        on_device=True,
    )
    machine.run(3.0)
    found = drafter_of(machine.engine)._budgets.host_times
    assert found.plain(1) == pytest.approx(0.00025, abs=0.0003)
    assert found.part(1) == pytest.approx(0.0005, abs=0.0002)
