"""How much of its drafts the bundled pair accepts, answered by the engine on the device."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report import say
from benchmarks.prompts import load_prompts, load_tokenizer, stop_token_ids
from benchmarks.record import ROOT
from draft.config import DraftConfig
from draft.tree_drafter import TreeDrafter
from engine.core import Engine
from engine.events import TokensEmitted
from engine.model.decoder import DecoderModel
from engine.passes.runner import ModelRunner
from engine.request import EngineRequest, SamplingParams
from verifier.coupled import CoupledVerifier

PAIR = ROOT / "draft" / "pair"
_NUM_BLOCKS = 256


def pair_acceptance(
    device: torch.device, *, num_prompts: int, max_tokens: int, seed: int
) -> dict[str, Any] | str:
    """Greedy answers to held-out tasks, one at a time; a sentence where there is nothing to ask."""
    if not num_prompts:
        return "not asked"
    config = DraftConfig()
    large, small = (_runner(PAIR / name, device) for name in ("large", "small"))
    engine = Engine(
        runners={"large": large, "small": small},
        verifier=CoupledVerifier(),
        drafter=TreeDrafter(runner=small, device_target=large, config=config),
    )
    tokenizer = load_tokenizer(PAIR / "large")
    prompts = load_prompts("tasks", tokenizer, num_prompts=num_prompts, seed=seed)
    stop = stop_token_ids(PAIR / "large", tokenizer)
    emitted: list[int] = []
    for number, prompt in enumerate(prompts):
        engine.submit(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=prompt.token_ids,
                tier="large",
                sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop),
            )
        )
        counts: list[int] = []
        while engine.has_work:
            events = engine.step()
            counts += [len(one.token_ids) for one in events if isinstance(one, TokensEmitted)]
        emitted += counts[1:]  # the first comes with the prompt's pass
    mean = sum(emitted) / max(len(emitted), 1)
    say(f"the bundled pair emits {mean:.2f} tokens a step on its own tasks (real acceptance)")
    return {
        "acceptance": "real",
        "trees": config,  # always as large: no budget of time
        "mean_tokens_per_step": mean,
        "num_prompts": len(prompts),
        "num_steps": len(emitted),
        "num_tokens": sum(emitted),
    }


def _runner(folder: Path, device: torch.device) -> ModelRunner:
    model = DecoderModel.load(str(folder), dtype="bfloat16", device=device)
    runner = ModelRunner(model=model, num_blocks=_NUM_BLOCKS)
    runner.capture_graphs(max_rows=64)
    return runner
