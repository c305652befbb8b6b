"""A target and its drafter, loaded once, with the prompts that they are asked."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.shared.compare import NextLogits, runner_logits, sampled_scores
from benchmarks.shared.disagreeing import measured_agreement
from benchmarks.shared.driving import (
    Bench,
    blocks_for,
    build_bench,
    draft_config,
    load_runner,
    load_with_head,
    tree_budget,
)
from benchmarks.shared.grown import grown_head, grown_large, grown_small
from benchmarks.shared.harness import choose_threads, console
from benchmarks.shared.prompts import Prompt, load_prompts, load_tokenizer, stop_token_ids
from benchmarks.shared.step_timer import ForwardCpu
from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.guesses.head_texts import Head
from outrider.engine.model.quantised.formats import SchemeName
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.params import SamplingParams, Tier


@dataclass(kw_only=True)
class Pair:
    """Both models in our engine, and how serving would draft with them."""

    large_folder: Path
    small_folder: Path
    tokenizer: Any
    stop: tuple[int, ...]
    """The ids that end an answer."""
    runners: dict[Tier, ModelRunner]
    budget: TreeBudget
    """From step times measured when it was loaded."""
    config: DraftConfig
    head: Head | None = None
    """Drafts in the small model's place, which is not loaded then."""
    _forward_cpu: ForwardCpu | None = field(default=None)

    def bench(self, config: DraftConfig | None = None, *, with_budget: bool = True) -> Bench:
        """An engine over the models; drafts as in serving unless another config is given."""
        bench = build_bench(
            self.runners,
            draft_config=config or self.config,
            budget=self.budget if with_budget else None,
            head=self.head,
            forward_cpu=self._forward_cpu,
        )
        self._forward_cpu = bench.forward_cpu
        return bench

    def describe(self) -> dict[str, Any]:
        """For the results."""
        large = self.runners["large"].model
        small = self.head.model if self.head else self.runners["small"].model
        return {
            "target_parameters": large.num_parameters,
            "drafter_parameters": small.num_parameters,
            "dtype": str(large.dtype).removeprefix("torch."),
            "agreement": None if self.head else measured_agreement(self.small_folder),
            "draft_config": self.config,
        }

    @cached_property
    def next_logits(self) -> NextLogits:
        """The target's logits by teacher forcing."""
        return runner_logits(self.runners["large"])

    def scores_of(self, temperature: float, seed: int) -> Callable[[int], NextLogits]:
        """By question, what the emitted token is the argmax of; see `turns.engine_case`."""

        def scores(question: int) -> NextLogits:
            sampling = SamplingParams(max_tokens=1, temperature=temperature, seed=seed + question)
            return sampled_scores(self.next_logits, sampling)

        return scores


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Folders of the models, grown where the arguments say so; and their tokenizer."""

    large: Path
    small: Path
    tokenizer: Any
    head: Path | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Folders":
        """Also chooses torch's threads for a target of this size."""
        large = grown_large(arguments)
        choose_threads(arguments, large)
        return cls(
            large=large,
            small=grown_small(arguments),
            tokenizer=load_tokenizer(large),
            head=grown_head(arguments, large) if hasattr(arguments, "drafter") else None,
        )

    def task_prompts(self, arguments: argparse.Namespace, num_prompts: int) -> list[Prompt]:
        """Held-out tasks, or the file that the arguments name."""
        return load_prompts(
            arguments.prompts,
            self.tokenizer,
            num_prompts=num_prompts,
            seed=arguments.seed,
            max_tokens=arguments.max_prompt,
        )

    def load(
        self,
        arguments: argparse.Namespace,
        prompts: Sequence[Prompt],
        *,
        num_sequences: int = 1,
        scheme: SchemeName | None = None,
    ) -> Pair:
        """Load both with a cache for so many of these prompts at a time, and time their passes.

        `scheme`: how the large model's weights are rounded.
        """
        longest = max(len(prompt.token_ids) for prompt in prompts) + arguments.max_new
        options: dict[str, Any] = {
            "dtype": arguments.dtype,
            "device": arguments.device,
            "num_blocks": blocks_for(num_sequences=num_sequences, num_tokens=longest),
        }
        head: Head | None = None
        runners: dict[Tier, ModelRunner] = {}
        with console.status("loading, and profiling step times"):
            if self.head is None:
                runners["large"] = load_runner(self.large, scheme=scheme, **options)
                runners["small"] = load_runner(self.small, **options)
            else:
                runners["large"], head = load_with_head(
                    self.large, self.head, scheme=scheme, **options
                )
            budget = tree_budget(runners, head=head)
        model = runners["large"].model
        console.print(
            f"target {model.num_parameters / 1e6:.1f} M parameters, {model.dtype}, "
            f"{arguments.threads} threads"
        )
        return Pair(
            large_folder=self.large,
            small_folder=self.small,
            tokenizer=self.tokenizer,
            stop=stop_token_ids(self.large, self.tokenizer),
            runners=runners,
            budget=budget,
            config=draft_config(arguments),
            head=head,
        )


def add_prompt_options(
    parser: argparse.ArgumentParser, *, num_prompts: int, max_new: int = 128
) -> None:
    """Add options for the prompts and for the length of answers."""
    parser.add_argument(
        "--prompts",
        default="tasks",
        help='"tasks" (held out, of the shipped pair\'s world) or a JSON-lines file, also relative '
        "to $OUTRIDER_DATA, such as prompts/spec_bench_half.jsonl",
    )
    parser.add_argument("--num-prompts", type=int, default=num_prompts)
    parser.add_argument("--max-prompt", type=int, default=1024, help="longest prompt, in tokens")
    parser.add_argument("--max-new", type=int, default=max_new, help="longest answer, in tokens")
