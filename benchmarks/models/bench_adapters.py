"""What do LoRA adapters cost?

Question: how much throughput do 8 different adapters in a batch take, and what does an adapter cost
that no request uses?

Method: the same prompts, greedy, a batch of `--batch`, in turn: without adapters before any is
loaded (`base`), without while 8 are resident (`unused`), and with 8, each for an equal share of the
requests (`adapters`); plain, and speculating with the base's small model. The adapters change all
seven projections of every layer unless `--modules` says otherwise. Their A is random and their B is
zero: that costs what any other numbers cost, and all cases write the same text, with the same
guesses accepted, which is checked.

Reading it: `cost` is the throughput that a case loses against `base` of the same round and kind,
median over rounds. With speculation a step has more rows, so products of the base take longer.

    python -m benchmarks.models.bench_adapters --dtype bfloat16 --expand-target 400M
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.shared.driving import (
    Bench,
    Drive,
    blocks_for,
    build_bench,
    drive,
    load_runner,
    make_requests,
    tree_budget,
)
from benchmarks.shared.grown import grown_large, grown_small
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    choose_threads,
    console,
    measure_in_turn,
    paired_ratio,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.prompts import Prompt, load_prompts, load_tokenizer
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.lora_modules import lora_modules
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import AdapterRef
from outrider.verifier.params import Tier

_TARGET = 0.15


def write_adapter(
    folder: Path, config: ModelConfig, *, rank: int, modules: Sequence[str], seed: int
) -> AdapterRef:
    """Write an adapter with a random A and a zero B."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in lora_modules(config).items():
        if name.rsplit(".", 1)[-1] not in modules:
            continue
        key = f"base_model.model.model.{name}.lora_"
        a = torch.randn(rank, module.width, generator=generator)
        tensors[f"{key}A.weight"] = a.to(torch.bfloat16)
        tensors[f"{key}B.weight"] = torch.zeros(module.size, rank, dtype=torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return AdapterRef(name=folder.name, tier="large", folder=str(folder))


def run(
    bench: Bench, prompts: Sequence[Prompt], refs: Sequence[AdapterRef], *, tokens: int, guess: bool
) -> Drive:
    """Answer all prompts in one batch, with the adapters in turn."""
    requests = make_requests(prompts, tier="large", max_tokens=tokens, speculate=guess)
    if refs:
        requests = [
            replace(request, adapters=(refs[number % len(refs)],))
            for number, request in enumerate(requests)
        ]
    return drive(bench, requests, concurrency=len(requests))


def build(arguments: argparse.Namespace, prompts: Sequence[Prompt], folder: Path) -> list[Bench]:
    """Two engines over the same models; adapters are loaded into the second one only."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    load = partial(
        load_runner,
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=blocks_for(
            num_sequences=arguments.batch, num_tokens=longest + arguments.max_new
        ),
    )
    with console.status("loading, and profiling step times"):
        runners: dict[Tier, ModelRunner] = {
            "large": load(folder),
            "small": load(grown_small(arguments)),
        }
        budget = tree_budget(runners)
        first = build_bench(runners, budget=budget)
        return [first, build_bench(runners, budget=budget, forward_cpu=first.forward_cpu)]


def report(rounds: Sequence[Drive], base: Sequence[Drive]) -> dict[str, Any]:
    """Figures of one case."""
    rates = [done.tokens_per_s for done in rounds]
    kept = paired_ratio(rates, [done.tokens_per_s for done in base])
    return {
        "tokens_per_s": Summary.of(rates),
        "kept": kept,
        "cost": 1.0 - kept.median,
        "same_text_as_base": all(
            mine.outputs == theirs.outputs for mine, theirs in zip(rounds, base, strict=True)
        ),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--adapters", type=int, default=8, help="different adapters in the batch")
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-new", type=int, default=64, help="tokens of an answer")
    parser.add_argument(
        "--modules",
        nargs="+",
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folder = grown_large(arguments)
    choose_threads(arguments, folder)
    prompts = load_prompts(
        "tasks", load_tokenizer(folder), num_prompts=arguments.batch, seed=arguments.seed
    )
    with tempfile.TemporaryDirectory() as scratch:
        plain, adapted = build(arguments, prompts, folder)
        refs = [
            write_adapter(
                Path(scratch) / f"adapter-{seed}",
                plain.runners["large"].model.config,
                rank=arguments.rank,
                modules=arguments.modules,
                seed=seed,
            )
            for seed in range(arguments.adapters)
        ]
        cases: dict[str, Callable[..., Drive]] = {}
        for kind, guess in (("plain", False), ("speculating", True)):
            cases[f"base, {kind}"] = partial(run, plain, prompts, [], guess=guess)
            cases[f"unused, {kind}"] = partial(run, adapted, prompts, [], guess=guess)
            cases[f"adapters, {kind}"] = partial(run, adapted, prompts, refs, guess=guess)
        run(adapted, prompts, refs, tokens=2, guess=False)  # all are resident from here on
        rounds = measure_in_turn(
            {name: partial(case, tokens=arguments.max_new) for name, case in cases.items()},
            repeats=arguments.repeats,
            warm_up={name: partial(case, tokens=8) for name, case in cases.items()},
            description="adapters",
        )
    results = {
        name: report(done, rounds["base, " + name.split(", ")[1]]) for name, done in rounds.items()
    }
    show_table(
        f"{arguments.adapters} adapters of rank {arguments.rank}, batch of {arguments.batch}",
        ["", "tok/s", "cost", f"at most {_TARGET:.0%}", "same text"],
        [
            [
                name,
                f"{entry['tokens_per_s'].median:.1f}",
                f"{entry['cost']:.1%}",
                verdict(entry["cost"] <= _TARGET),
                verdict(entry["same_text_as_base"]),
            ]
            for name, entry in results.items()
        ],
        caption=f"{arguments.repeats} rounds of {arguments.max_new} tokens",
    )
    write_results("bench_adapters", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
