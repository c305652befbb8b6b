"""Trains the shipped pair from nothing: corpus, tokenizer, large, small, distillation, evaluation.

Everything is generated (draft/training/tasks/families.py), so there is nothing to download.
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
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from outrider.draft.training.chat_format import CHAT_TEMPLATE
from outrider.draft.training.corpus import (
    Mix,
    Packer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from outrider.draft.training.loop import (
    ModelShape,
    Trainer,
    TrainingPlan,
    load_model,
    publish_folder,
)
from outrider.draft.training.model_card import Facts, model_card
from outrider.draft.training.pair_evaluation import EvaluationPlan, evaluate_pair
from outrider.draft.training.pair_training import (
    build_model,
    distillation_loss,
    folder_size_bytes,
    label_loss,
    packed_batches,
    use_causal_attention,
)
from outrider.draft.training.tasks.families import DIFFICULTIES, FAMILIES

logger = logging.getLogger("outrider.draft.training.pretrain")

# Looking up, ordering and spelling are learnt late and have few telling tokens each: in the second
# half of a run they are drawn this many times as often as the others.
_LATE_WEIGHTS = {
    "lookup": 2.5,
    "follow_up": 1.5,
    "tool_call": 1.5,
    "sort_words": 2.0,
    "count_letters": 1.5,
    "reverse_word": 1.5,
    "sort_numbers": 2.0,
    "sequence": 1.5,
    "word_problem": 1.5,
}

MAX_CONTEXT = 4096

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
    python -m outrider.draft.training.pretrain --out draft/pair --run-dir runs/pair

  train the large model on one core, longer (an interrupted run resumes by itself):
    taskset -c 1 python -m outrider.draft.training.pretrain --stages large --threads 1 \\
      --minutes-large 120

  see that it works, in half a minute:
    python -m outrider.draft.training.pretrain --quick --out runs/quick/pair \\
      --run-dir runs/quick/run
"""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of `python -m outrider.draft.training.pretrain`."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.draft.training.pretrain",
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
        "--init",
        type=Path,
        help="begin from this pair's weights and tokenizer instead of from nothing",
    )
    _add_data_options(parser)
    parser.add_argument("--eval-tasks", type=int, default=30, help="per family and difficulty (30)")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile"
    )
    parser.add_argument(
        "--card-command",
        default="python -m outrider.draft.training.pretrain --out draft/pair",
        help="the command that the model card shows",
    )
    parser.add_argument(
        "--card-machine",
        default=f"{os.cpu_count()} CPU cores, {platform.machine()}",
        help="the machine that the model card names",
    )
    parser.add_argument("--card-notes", default="", help="further notes for the model card")
    parser.add_argument("--quick", action="store_true", help="a tiny pair in half a minute")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        _make_quick(arguments)
    return arguments


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--short-length", type=int, default=384, help="tokens of a row (384)")
    data.add_argument("--long-length", type=int, default=2048, help="of a late row (2048)")
    data.add_argument(
        "--long-fraction",
        type=float,
        default=0.15,
        help="share of each budget, at its end, in long rows (0.15)",
    )
    data.add_argument(
        "--difficulty-weights",
        type=_weights,
        default=(2.0, 4.0, 4.0, 4.0),
        metavar="A,B,C,D",
        help="how often tasks of difficulty 1 to 4 are drawn (2,4,4,4)",
    )
    data.add_argument(
        "--family-weights",
        type=_named_weights,
        metavar="FAMILY=W,...",
        help="how often families are drawn, 1 where not named; without this option the second half "
        "of the budget stresses what is learnt late",
    )
    data.add_argument(
        "--interviews",
        type=float,
        default=0.35,
        help="share of rows with many questions about one text (0.35)",
    )
    data.add_argument(
        "--skips", type=float, default=0.3, help="share of rows in which positions jump (0.3)"
    )


def _weights(text: str) -> tuple[float, ...]:
    weights = tuple(map(float, text.split(",")))
    if len(weights) != len(DIFFICULTIES):
        raise ValueError(f"{len(DIFFICULTIES)} weights are needed, not {len(weights)}")
    return weights


def _named_weights(text: str) -> dict[str, float]:
    weights = {
        name: float(weight) for name, _, weight in (p.partition("=") for p in text.split(","))
    }
    if unknown := set(weights) - set(FAMILIES):
        raise argparse.ArgumentTypeError(
            f"unknown families {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}"
        )
    return weights


def _make_quick(arguments: argparse.Namespace) -> None:
    for stage in ("large", "small", "distil"):
        setattr(arguments, f"tokens_{stage}", 6000)
    arguments.compile = False
    arguments.vocab_size = 400
    arguments.eval_tasks = 1


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
        """Train or take over the tokenizer; publish a first pair that others can load."""
        arguments = self._arguments
        if arguments.init is None:
            tokenizer = train_tokenizer(
                seed=arguments.seed,
                num_tasks=500 if arguments.quick else 60_000,
                vocab_size=arguments.vocab_size,
                max_context=MAX_CONTEXT,
            )
        else:
            tokenizer = load_tokenizer(arguments.init / "large")
            tokenizer.chat_template = CHAT_TEMPLATE
            tokenizer.model_max_length = MAX_CONTEXT
        save_tokenizer(tokenizer, self._run_dir / "tokenizer")
        for name in ("large", "small"):
            publish_folder(
                self._start(name, tokenizer), tokenizer.save_pretrained, self._out / name
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
        """Measure the published pair; write evaluation.json, the model card."""
        arguments = self._arguments
        plan = EvaluationPlan(
            tasks_per_cell=arguments.eval_tasks,
            max_answer_tokens=8 if arguments.quick else 256,
            seed=arguments.seed,
        )
        evaluation = evaluate_pair(self._out, plan, self._device)
        text = json.dumps(evaluation, indent=1) + "\n"
        (self._out / "evaluation.json").write_text(text)
        (self._out / "README.md").write_text(model_card(evaluation, self._facts()))
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

    def _start(self, name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        """Random weights, or those of --init."""
        if self._arguments.init is not None:
            model = load_model(self._arguments.init / name, torch.float32, self._device)
            model.config.max_position_embeddings = tokenizer.model_max_length
            return model
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
            short_length=options["short_length"],
            long_length=options["long_length"],
        )
        if self._arguments.quick:
            return replace(plan, batch_tokens=512, short_length=128, long_length=256)
        return plan

    def _mixes(self) -> tuple[Mix, Mix]:
        """Return the mixes of rows for the first and the second half of a stage."""
        arguments = self._arguments
        chosen = arguments.family_weights
        mix = Mix(
            difficulty_weights=arguments.difficulty_weights,
            family_weights=chosen or {},
            interviews=arguments.interviews,
            skips=arguments.skips,
            max_positions=MAX_CONTEXT,
        )
        return mix, replace(mix, family_weights=_LATE_WEIGHTS if chosen is None else chosen)

    def _train(self, name: str, stage: str) -> None:
        tokenizer = load_tokenizer(self._run_dir / "tokenizer")
        model = self._start(name, tokenizer)
        if stage == "distil":
            model = load_model(self._out / "small", torch.float32, self._device)
        trainer = Trainer(model, self._plan(stage), self._run_dir / stage, self._device)
        trainer.resume()
        use_causal_attention(trainer.model)
        if stage == "distil":
            teacher = load_model(self._out / "large", torch.bfloat16, self._device)
            use_causal_attention(teacher)
            loss = distillation_loss(trainer.model, teacher, self._device)
        else:
            loss = label_loss(trainer.model, self._device)
        if self._arguments.compile:
            loss = torch.compile(loss, dynamic=False)
        # The distillation reads batches that the first training of the small model did not.
        packer = Packer(tokenizer, self._arguments.seed + STAGES.index(stage))
        trainer.run(
            loss,
            packed_batches(packer, *self._mixes()),
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
