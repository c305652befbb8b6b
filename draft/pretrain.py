"""Trains the shipped pair from nothing: corpus, tokenizer, large, small, distillation, evaluation.

Everything is generated (draft/tasks.py), so there is nothing to download.
"""

import argparse
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from draft.corpus import Packer, load_tokenizer, save_tokenizer, train_tokenizer
from draft.model_card import Facts, model_card
from draft.pair_evaluation import EvaluationPlan, evaluate_pair, write_router_data
from draft.pair_training import (
    build_model,
    distillation_loss,
    folder_size_bytes,
    label_loss,
    packed_batches,
)
from draft.training import ModelShape, Trainer, TrainingPlan, load_model, publish_folder

logger = logging.getLogger("draft.pretrain")

STAGES = ("tokenizer", "large", "small", "distil", "evaluate")

LARGE = ModelShape(
    hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=64, mlp_size=768
)
SMALL = ModelShape(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=448
)
QUICK_LARGE = replace(
    LARGE, hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=1, mlp_size=256
)
QUICK_SMALL = replace(SMALL, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, mlp_size=64)

_EXAMPLES = """examples:
  train everything, about two and a half hours on two cores:
    python -m draft.pretrain --out draft/pair --run-dir runs/pair

  train the large model on one core, longer (an interrupted run resumes by itself):
    taskset -c 1 python -m draft.pretrain --stages large --threads 1 --minutes-large 120

  see that it works, in half a minute:
    python -m draft.pretrain --quick --out runs/quick/pair --run-dir runs/quick/run
"""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of `python -m draft.pretrain`."""
    parser = argparse.ArgumentParser(
        prog="python -m draft.pretrain",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("draft/pair"), help="folder of the pair")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/pair"), help="checkpoints and logs; resumes"
    )
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=STAGES, help="which steps to do (all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's choice)")
    parser.add_argument("--vocab-size", type=int, default=2048)
    for stage, minutes, lr in (("large", 75, 3e-3), ("small", 45, 4e-3), ("distil", 20, 2e-3)):
        parser.add_argument(
            f"--minutes-{stage}", type=float, default=minutes, help=f"training time ({minutes})"
        )
        parser.add_argument(f"--tokens-{stage}", type=int, help="also stop after so many tokens")
        parser.add_argument(f"--lr-{stage}", type=float, default=lr, help=f"peak ({lr})")
    parser.add_argument(
        "--long-fraction",
        type=float,
        default=0.15,
        help="share of each budget, at its end, in rows of 1024 tokens (0.15)",
    )
    parser.add_argument("--eval-tasks", type=int, default=30, help="per family and difficulty (30)")
    parser.add_argument("--router-rows", type=int, default=3000, help="rows of router_data.jsonl")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile"
    )
    parser.add_argument(
        "--card-command",
        default="python -m draft.pretrain --out draft/pair",
        help="the command that the model card shows",
    )
    parser.add_argument(
        "--card-machine",
        default=f"{os.cpu_count()} CPU cores, {platform.machine()}",
        help="the machine that the model card names",
    )
    parser.add_argument("--card-notes", default="", help="what else the model card should say")
    parser.add_argument("--quick", action="store_true", help="a tiny pair in half a minute")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        _make_quick(arguments)
    return arguments


def _make_quick(arguments: argparse.Namespace) -> None:
    for stage in ("large", "small", "distil"):
        setattr(arguments, f"tokens_{stage}", 6000)
    arguments.compile = False
    arguments.vocab_size = 400
    arguments.eval_tasks = 1
    arguments.router_rows = 8


class Pretraining:
    """The stages, in order; each finds what the former left in the output and run folders."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self._run_dir: Path = arguments.run_dir
        choice = arguments.device
        if choice == "auto":
            choice = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(choice)
        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)

    def run(self) -> None:
        """Do the chosen stages."""
        for stage in STAGES:
            if stage in self._arguments.stages:
                logger.info("stage=%s", stage)
                getattr(self, stage)()

    def tokenizer(self) -> None:
        """Train the tokenizer and publish a first, untrained pair that others can load."""
        arguments = self._arguments
        tokenizer = train_tokenizer(
            seed=arguments.seed,
            num_tasks=500 if arguments.quick else 60_000,
            vocab_size=arguments.vocab_size,
            max_context=2048,
        )
        save_tokenizer(tokenizer, self._run_dir / "tokenizer")
        for name in ("large", "small"):
            publish_folder(
                self._fresh(name, tokenizer), tokenizer.save_pretrained, self._out / name
            )

    def large(self) -> None:
        """Train the large model on the tasks."""
        self._train("large", "large")

    def small(self) -> None:
        """Train the small model on the tasks."""
        self._train("small", "small")

    def distil(self) -> None:
        """Continue the small model towards the large model's distributions."""
        self._train("small", "distil")

    def evaluate(self) -> None:
        """Measure the published pair; write evaluation.json, the model card and router data."""
        arguments = self._arguments
        plan = EvaluationPlan(
            tasks_per_cell=arguments.eval_tasks,
            router_rows=arguments.router_rows,
            max_answer_tokens=8 if arguments.quick else 256,
            seed=arguments.seed,
        )
        evaluation = evaluate_pair(self._out, plan, self._device)
        text = json.dumps(evaluation, indent=1) + "\n"
        (self._out / "evaluation.json").write_text(text)
        (self._out / "README.md").write_text(model_card(evaluation, self._facts()))
        router_data = self._run_dir.parent / "router_data.jsonl"
        write_router_data(self._out, router_data, plan, self._device)
        logger.info("overall=%s", evaluation["overall"])

    def _facts(self) -> Facts:
        networks = {
            name: load_model(self._out / name, torch.bfloat16, self._device)
            for name in ("large", "small")
        }
        summaries = {
            stage: json.loads(path.read_text())
            for stage in ("large", "small", "distil")
            if (path := self._run_dir / stage / "summary.json").exists()
        }
        return Facts(
            parameters={name: network.num_parameters() for name, network in networks.items()},
            vocab_size=networks["large"].config.vocab_size,
            size_bytes=sum(folder_size_bytes(self._out / name) for name in networks),
            command=self._arguments.card_command,
            machine=self._arguments.card_machine,
            notes=self._arguments.card_notes,
            summaries=summaries,
        )

    def _fresh(self, name: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
        quick = self._arguments.quick
        shapes = {
            "large": QUICK_LARGE if quick else LARGE,
            "small": QUICK_SMALL if quick else SMALL,
        }
        return build_model(shapes[name], tokenizer, self._arguments.seed)

    def _plan(self, stage: str) -> TrainingPlan:
        options = vars(self._arguments)
        plan = TrainingPlan(
            minutes=options[f"minutes_{stage}"],
            tokens=options[f"tokens_{stage}"],
            peak_lr=options[f"lr_{stage}"],
            long_fraction=options["long_fraction"],
        )
        if self._arguments.quick:
            return replace(plan, batch_tokens=512, short_length=128, long_length=256)
        return plan

    def _train(self, name: str, stage: str) -> None:
        tokenizer = load_tokenizer(self._run_dir / "tokenizer")
        model: PreTrainedModel = self._fresh(name, tokenizer)
        if stage == "distil":
            model = load_model(self._out / "small", torch.float32, self._device)
        trainer = Trainer(model, self._plan(stage), self._run_dir / stage, self._device)
        trainer.resume()
        if stage == "distil":
            teacher = load_model(self._out / "large", torch.bfloat16, self._device)
            loss = distillation_loss(trainer.model, teacher, self._device)
        else:
            loss = label_loss(trainer.model, self._device)
        if self._arguments.compile:
            loss = torch.compile(loss, dynamic=False)
        # The distillation reads batches that the first training of the small model did not.
        packer = Packer(tokenizer, self._arguments.seed + STAGES.index(stage))
        trainer.run(
            loss,
            packed_batches(packer),
            lambda: publish_folder(model, tokenizer.save_pretrained, self._out / name),
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen stages."""
    # Its bars for loading and saving a handful of tensors would bury ours.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    Pretraining(parse_arguments(argv)).run()


if __name__ == "__main__":
    main()
