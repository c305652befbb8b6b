"""Record the compiled variants of all Triton launches: of an engine's warm-up, then of a load.

    python -m tests.kernels.mixed_load                   a pair of plain models
    python -m tests.kernels.mixed_load experts int4      other kinds, see KINDS; all: every one

A stand-in for Triton's compiler notes every launch and makes none. What launches would have written
is zeros, but trees and the choice of tokens are worked out by their references, so requests go
their way. Prints JSON for each kind: how many variants the warm-up had, and those that only the
load had.
"""

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["OUTRIDER_KERNELS"] = "triton"

import torch

from outrider.draft.config import DraftConfig
from outrider.draft.device.draft_levels import capture_levels
from outrider.draft.device.tree_warm_up import warm_up_trees
from outrider.engine.adapters.warm_up import adapter_of_nothing
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised import scheme as schemes
from outrider.engine.model.quantised.formats import Rounding, SchemeName
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.warm_up import warm_up_passes
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.engine.warm_up import warm_up
from outrider.kernels import triton_support
from outrider.kernels.triton_support import Launch, use_kernels
from outrider.verifier.params import CascadeParams
from tests.adapters import adapter_ref, make_adapter
from tests.engines import (
    Answer,
    Pair,
    engine_model,
    make_engine,
    make_request,
    random_prompt,
    step_once,
)
from tests.heads import make_head_engine, random_head
from tests.models import make_hf_model

CPU = torch.device("cpu")
PARTS = ("kernels", "engine", "draft", "verifier")
# Modules whose functions decide what comes next.
COMPUTED = (
    "outrider.kernels.trees.choose_frontier",
    "outrider.kernels.trees.expand_tree",
    "outrider.kernels.trees.select_trees",
    "outrider.kernels.trees.verify_tree",
    "outrider.kernels.sampling.sample",
)


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
        if name.startswith(tuple(f"outrider.{one}." for one in PARTS)):
            for key, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in swapped:
                    setattr(module, key, swapped[value])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way of serving. scheme: of rounded weights; kv_dtype: of both caches."""

    architecture: str = "qwen3"
    scheme: SchemeName | None = None
    kv_dtype: torch.dtype | None = None
    has_adapters: bool = False
    has_head: bool = False
    is_recorded: bool = False
    overrides: Mapping[str, int] = field(default_factory=dict)


# So many experts that their wide tiles are for prompts of 512 rows and more: the warm-up's requests
# have fewer, the load's have more, so only `warm_up_passes` has the tiles compiled in time.
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 32, "max_position_embeddings": 1024}
KINDS = {
    "plain": Kind(),
    "fp8": Kind(kv_dtype=torch.float8_e4m3fn),
    "int8": Kind(scheme="int8"),
    "int4": Kind(scheme="int4"),
    "experts": Kind(architecture="qwen3-moe", overrides=_EXPERTS),
    "int8 experts": Kind(architecture="qwen3-moe", scheme="int8", overrides=_EXPERTS),
    "recurrent": Kind(architecture="qwen3_5"),
    "windows": Kind(architecture="gemma2"),
    "adapters": Kind(has_adapters=True),
    "head": Kind(has_head=True),
    "recorded": Kind(is_recorded=True),
    "recorded int4": Kind(is_recorded=True, scheme="int4"),
}


def pair(kind: Kind) -> Pair:
    """Two models with a vocabulary of whole 16 bytes, as those of real models."""
    models = [
        make_hf_model(kind.architecture, vocab_size=144, seed=seed, **kind.overrides)
        for seed in (1, 2)
    ]
    with use_kernels("triton"):
        large, small = (_loaded(model, kind) for model in models)
    return Pair(large=large, small=small, large_reference=models[0], small_reference=models[1])


def _loaded(reference: Any, kind: Kind) -> Any:
    if kind.scheme is None:
        return engine_model(reference)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return DecoderModel.load(folder, dtype="bfloat16", rounding=Rounding(scheme=kind.scheme))


class Engines:
    """Engines on the same models, as that which warms up and that which serves."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._pair = pair(kind)
        self.max_context = self._pair.large.config.max_position_embeddings
        self.config = DraftConfig()
        self.adapters: list[AdapterRef] = []
        if kind.has_adapters:
            parent = Path(tempfile.mkdtemp())
            self.adapters = [
                adapter_ref(
                    make_adapter(
                        parent / str(rank), self._pair.large_reference, seed=rank, rank=rank,
                        modules=modules,
                    )
                )
                for rank, modules in ((2, ("q_proj", "down_proj")), (17, ("v_proj", "gate_proj")))
            ]  # fmt: skip

    def make(self, *, prefill_chunk_s: float) -> Engine:
        """Return a new one; where passes are recorded, they are."""
        if self._kind.has_head:
            return make_head_engine(
                self._pair, random_head(), has_small=True, on_device=True, draft=self.config
            )
        engine = make_engine(
            self._pair,
            on_device=True,
            draft=self.config,
            config=EngineConfig(prefill_chunk_s=prefill_chunk_s),
            kv_dtype=self._kind.kv_dtype,
        )
        if self._kind.is_recorded:
            runners = engine._runners
            for runner in runners.values():
                assert isinstance(runner, ModelRunner)
                assert runner.capture_graphs(capture=_record) > 0
            assert capture_levels(self.config, runners["small"], runners["large"]) > 0
        return engine


def _record(run: Callable[[], None]) -> Callable[[], None]:
    """Launch what is recorded, once; replaying compiles nothing."""
    run()
    return lambda: None


def load(engines: Engines, number_of_requests: int) -> list[EngineRequest]:
    """Both tiers, all kinds of sampling, watched answers, cascades, predictions, long prompts."""
    cuts: tuple[dict[str, Any], ...] = (
        {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"presence_penalty": 0.3},
        {"logit_bias": ((3, 1.0),)}, {"repetition_penalty": 1.2},
    )  # fmt: skip
    requests = []
    for number in range(number_of_requests):
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
        elif engines.adapters and tier == "large":
            request = replace(request, adapters=(engines.adapters[number // 2 % 2],))
        requests.append(request)
    longest = min(engines.max_context - 8, 700)
    requests.append(make_request("long", random_prompt(longest), tier="large", max_tokens=4))
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
            engine.keep_on_tier(name)


def variants_of(kind: Kind, number_of_requests: int) -> dict[str, Any]:
    """Warm up and serve; how many variants the first had, and what only the second had."""
    variants = Variants()
    triton_support._recorder.set(variants)
    engines = Engines(kind)
    # A GPU takes a long prompt in one chunk, but not while kernels are compiled: passes look slow.
    warming, serving = engines.make(prefill_chunk_s=1e-9), engines.make(prefill_chunk_s=1e6)
    warm_up_trees(engines.config, CPU)
    for runner in warming._runners.values():
        assert isinstance(runner, ModelRunner)
        warm_up_passes(runner, max_rows=EngineConfig().max_tokens_per_step)
        if engines.adapters:
            adapter = adapter_of_nothing(runner.model)
            warm_up_passes(runner, max_rows=64, adapter=adapter)
    warm_up(warming)
    variants.phase = "load"
    serve(serving, load(engines, number_of_requests))
    late = [variant for variant, phase in variants.found.items() if phase == "load"]
    return {"warm-up": len(variants.found) - len(late), "load": late}


def main(names: list[str]) -> None:
    """Print what was found."""
    torch.set_num_threads(1)
    compute_as_well(COMPUTED)
    zeros: Any = torch.zeros
    torch.empty, torch.empty_like = zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign,assignment]
    schemes.MIN_ROUNDED_SIDE = 32  # type: ignore[attr-defined]
    triton_support._assumed_architecture.set(90)
    with torch.inference_mode():
        for name in names:
            # The plain load is the whole one; of the others, each has every kind of request.
            found = variants_of(KINDS[name], 28 if name == "plain" else 16)
            sys.stdout.write(json.dumps({"kind": name, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(list(KINDS) if sys.argv[1:] == ["all"] else sys.argv[1:] or ["plain"])
