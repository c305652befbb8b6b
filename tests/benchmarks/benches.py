"""A bench over a tiny pair, and prompts for it."""

from benchmarks.shared import driving
from benchmarks.shared.driving import build_bench
from benchmarks.shared.prompts import Prompt
from outrider.engine.passes.runner import ModelRunner
from tests.engines import random_prompt, tiny_pair


def make_bench(*, num_blocks: int = 256) -> driving.Bench:
    pair = tiny_pair()
    return build_bench(
        {
            "large": ModelRunner(model=pair.large, num_blocks=num_blocks),
            "small": ModelRunner(model=pair.small, num_blocks=num_blocks),
        }
    )


def make_prompts(number: int) -> list[Prompt]:
    return [
        Prompt(messages=(), token_ids=random_prompt(5 + seed, seed=seed), kind="random")
        for seed in range(number)
    ]
