"""Pairs of recorded answers, and the answers that decide an experiment."""

import numpy as np

from benchmarks.models.bench_coupled_answers import Recorded, answers_needed, compared, pairs


def _recorded(right: list[list[float]]) -> Recorded:
    values = np.array(right)
    return Recorded(
        right=values,
        num_tokens=values + 3.0,
        texts=[[(int(value),) for value in row] for row in right],
    )


def test_pairs_are_of_one_seed_of_one_task_or_of_two_tasks() -> None:
    one = np.arange(6.0).reshape(2, 3)
    assert [tuple(pair) for pair in pairs(one, one, "coupled")] == [(n, n) for n in range(6)]
    independent = {tuple(pair) for pair in pairs(one, one, "independent")}
    assert independent == {
        (a, b) for a in range(6) for b in range(6) if a != b and a // 3 == b // 3
    }
    assert all(a // 3 != b // 3 for a, b in pairs(one, one, "separate"))


def test_the_difference_is_the_same_for_all_pairs_and_wins_are_not() -> None:
    rng = np.random.default_rng(0)
    control = (rng.random((20, 4)) < 0.6).astype(float)
    arm = np.where(rng.random((20, 4)) < 0.1, 1.0, control)
    found = compared(_recorded(control.tolist()), _recorded(arm.tolist()), seed=0)["by_noise"]
    differences = {round(one["arm_wins"] - one["control_wins"], 9) for one in found.values()}
    assert len(differences) == 1
    assert found["coupled"]["control_wins"] == 0.0 < found["independent"]["control_wins"]
    assert found["coupled"]["variance_right"] < found["independent"]["variance_right"]


def test_pairs_that_vary_less_decide_sooner() -> None:
    rng = np.random.default_rng(0)
    base = (rng.random(4000) < 0.5).astype(float)
    near = np.where(rng.random(4000) < 0.1, 1.0, base)
    coupled = answers_needed(np.stack((base, near), axis=-1), seed=0)
    shuffled = answers_needed(np.stack((rng.permutation(base), near), axis=-1), seed=0)
    assert coupled["80"] is not None
    assert shuffled["50"] is None or coupled["80"] < shuffled["50"]
