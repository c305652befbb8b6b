"""Record the compiled variants of all Triton launches: of an engine's warm-up, then of a load.

    python -m tests.kernels.mixed_load

A stand-in for Triton's compiler notes every launch and makes none. What launches would have written
is zeros, but trees and the choice of tokens are worked out by their references, so requests go
their way. Prints JSON: how many variants the warm-up had, and those that only the load had.
"""

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["OUTRIDER_KERNELS"] = "triton"

import torch

from draft.config import DraftConfig
from draft.tree_warm_up import warm_up_trees
from engine.core import Engine
from engine.request import CascadeParams, EngineRequest
from engine.warm_up import warm_up
from kernels import triton_support
from kernels.triton_support import Launch, use_kernels
from tests.engines import (
    Answer,
    Pair,
    engine_model,
    make_engine,
    make_request,
    random_prompt,
    step_once,
)
from tests.models import make_hf_model

CPU = torch.device("cpu")
# Modules whose functions decide what comes next.
COMPUTED = (
    "kernels.trees.choose_frontier", "kernels.trees.expand_tree", "kernels.trees.select_trees",
    "kernels.trees.verify_tree", "kernels.sampling.sample",
)  # fmt: skip


class Variants(list[Launch]):
    """A list of launches that keeps their variants, by the phase in which they came first."""

    phase = "warm-up"

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def append(self, launch: Launch) -> None:
        """Note what would be compiled."""
        self.found.setdefault(launch.variant(), self.phase)


def compute_as_well(names: tuple[str, ...]) -> None:
    """Have the modules' launchers record their launches, then return their references' results."""
    is_recording = False

    def both(function: FunctionType) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_recording
            if is_recording:
                return function(*args, **kwargs)
            is_recording = True
            try:
                function(*args, **kwargs)
            finally:
                is_recording = False
            with use_kernels("reference"):
                return function(*args, **kwargs)

        return run

    swapped: dict[FunctionType, Callable[..., Any]] = {}
    for name in names:
        for value in vars(importlib.import_module(name)).values():
            is_own = isinstance(value, FunctionType) and value.__module__ == name
            if is_own and "uses_triton" in value.__code__.co_names:
                swapped[value] = both(value)
    _swap(swapped)


def _swap(swapped: dict[FunctionType, Callable[..., Any]]) -> None:
    """Put other functions into the places of some, wherever they were imported."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("kernels", "engine", "draft", "verifier"):
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in swapped:
                    setattr(module, key, swapped[value])


def pair() -> Pair:
    """Two models with a vocabulary of whole 16 bytes, as those of real models."""
    models = [make_hf_model("qwen3", vocab_size=144, seed=seed) for seed in (1, 2)]
    with use_kernels("triton"):
        large, small = (engine_model(model) for model in models)
    return Pair(large=large, small=small, large_reference=models[0], small_reference=models[1])


def load() -> list[EngineRequest]:
    """Both tiers, all kinds of sampling, watched answers, cascades, predictions, long prompts."""
    cuts: tuple[dict[str, Any], ...] = (
        {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"presence_penalty": 0.3},
        {"logit_bias": ((3, 1.0),)}, {"repetition_penalty": 1.2},
    )  # fmt: skip
    requests = []
    for number in range(28):
        tier = "large" if number % 2 else "small"
        request = make_request(
            f"r{number}", random_prompt(3 + 8 * number, seed=number), tier=tier,
            max_tokens=4 + number % 9, temperature=0.8 * (number % 3 > 0), seed=number,
            num_logprobs=(None, 0, 2)[number % 3], may_escalate=number % 4 == 0,
            **cuts[number % len(cuts)],
        )  # fmt: skip
        if number % 8 == 3:
            request = replace(request, cascade=CascadeParams(alpha=0.4))
        elif number % 8 == 5:
            request = replace(request, prediction_token_ids=random_prompt(60, seed=number))
        requests.append(request)
    return requests


def serve(engine: Engine, requests: list[EngineRequest]) -> None:
    """Two requests come with each step; every other watched answer escalates."""
    answers: dict[str, Answer] = {}
    waiting = list(requests)
    while engine.has_work or waiting:
        for request in waiting[:2]:
            engine.submit(request)
        del waiting[:2]
        step_once(engine, answers)
        held = [name for name, answer in answers.items() if answer.held and not answer.finished]
        for name in held[:1]:
            engine.switch_tier(name, "large")
        for name in held[1:]:
            engine.settle(name)


def main() -> None:
    """Print what was found."""
    torch.set_num_threads(1)
    models = pair()
    compute_as_well(COMPUTED)
    zeros: Any = torch.zeros
    torch.empty, torch.empty_like = zeros, torch.zeros_like  # type: ignore[assignment]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign,assignment]
    variants = Variants()
    triton_support._recorder.set(variants)
    triton_support._assumed_architecture.set(90)
    with torch.inference_mode():
        config = DraftConfig()
        warm_up_trees(config, CPU)
        warm_up(make_engine(models, on_device=True, draft=config))
        variants.phase = "load"
        serve(make_engine(models, on_device=True, draft=config), load())
    late = [variant for variant, phase in variants.found.items() if phase == "load"]
    found = {"warm-up": len(variants.found) - len(late), "load": late}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
