"""A world with a known model: what each stage of a router sees of prompts, and what is true."""

import numpy as np

from outrider.router.calibration import StageRows
from outrider.router.features import FloatRows


def staged_rows(
    num_rows: int,
    seed: int = 0,
    *,
    has_answer: bool = True,
    has_prompt: bool = True,
    has_costs: bool = True,
) -> StageRows:
    """Rows whose stages know the chances that the tiers are right better and better.

    Every stage is calibrated: it gives the mean chance of the prompts that look alike to it.
    """
    rng = np.random.default_rng(seed)
    parts = rng.integers(0, 2, size=(3, num_rows)).astype(np.float64)  # what a stage each finds out
    weak_chance = 0.05 + 0.9 * parts.mean(axis=0)
    strong_chance = 0.9 + 0.1 * parts[0]

    def known(num_parts: int) -> FloatRows:
        seen = parts[:num_parts].sum(axis=0) + 0.5 * (3 - num_parts)
        quality: FloatRows = 1.0 - (strong_chance - (0.05 + 0.9 * seen / 3))
        return quality

    num_weak = rng.integers(2, 60, size=num_rows).astype(np.float64)
    return StageRows(
        text=known(1),
        prompt=known(2) if has_prompt else known(1),
        answer=known(3) if has_answer else None,
        weak=(rng.random(num_rows) < weak_chance).astype(np.float64),
        strong=(rng.random(num_rows) < strong_chance).astype(np.float64),
        num_prompt_tokens=np.full(num_rows, 100.0) if has_costs else None,
        num_weak_tokens=num_weak if has_costs else None,
        num_strong_tokens=num_weak + 10.0 if has_costs else None,
        weak_s=0.01 * num_weak if has_costs else None,
        strong_s=0.05 * num_weak if has_costs else None,
    )
