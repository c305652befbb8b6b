"""What do rounded weights cost in quality: perplexity, right answers, and the drafter's guesses?

Method: each tier of the pair in bfloat16 and rounded by each scheme that the engine has, on the
same held-out tasks, whose answers a program checks:

- right: share of right greedy answers; beside it the change against bfloat16 in percentage points
  with a 95 % interval (bootstrap over tasks, each with both of its answers);
- same: share of answers that are equal to those in bfloat16, token for token;
- perplexity of the tasks' canonical answers, and with `--text FILE` (plain text or JSON lines, .gz
  too, also relative to $OUTRIDER_DATA) of the beginning of that text, in bits a byte;
- of the large tier: the share of guesses of the *bfloat16* small model that it accepts, and the
  tokens that its passes yield, with trees of one size for all.

Left out, and said so, where there is no text. Goal: at most half a point of accuracy lost.

    python -m benchmarks.models.bench_quality
    OUTRIDER_DATA=... python -m benchmarks.models.bench_quality --text text/gsm8k_train.jsonl
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models.quality import (
    Answers,
    Text,
    answer_tasks,
    answer_texts,
    file_texts,
    perplexity,
)
from benchmarks.models.quality_plot import draw
from benchmarks.shared.driving import blocks_for, build_bench, draft_config, load_runner
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.prompts import load_tokenizer, stop_token_ids
from outrider.draft.training.tasks.base import Task
from outrider.draft.training.tasks.families import DIFFICULTIES, PLAIN_FAMILIES
from outrider.draft.training.tasks.files import distinct_tasks
from outrider.engine.model.quantised.formats import SCHEMES, SchemeName
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.params import Tier

FULL = "bfloat16"
_MOST_LOST = 0.005
_BOOTSTRAPS = 2000
_TIERS: tuple[Tier, ...] = ("large", "small")


class Quality:
    """Measures schemes of both tiers on the same tasks and texts."""

    def __init__(self, arguments: argparse.Namespace, texts: Mapping[str, Sequence[Text]]) -> None:
        self._arguments = arguments
        self._folders: dict[Tier, Path] = {"large": arguments.large, "small": arguments.small}
        self._tokenizer = load_tokenizer(arguments.large)
        self._tasks = held_out(arguments)
        self._texts = {"tasks": answer_texts(self._tokenizer, self._tasks), **texts}
        self._drafter = self._load("small", None)

    def _load(self, tier: Tier, scheme: SchemeName | None) -> ModelRunner:
        return load_runner(
            self._folders[tier],
            dtype="bfloat16",
            device=self._arguments.device,
            num_blocks=blocks_for(num_sequences=16, num_tokens=1024),
            scheme=scheme,
        )

    def measure(self, tier: Tier, scheme: SchemeName | None) -> tuple[dict[str, Any], Answers]:
        """One scheme of one tier."""
        runner = self._load(tier, scheme)
        runners: dict[Tier, ModelRunner] = {tier: runner}
        if tier == "large":
            runners["small"] = self._drafter
        bench = build_bench(runners, draft_config=draft_config(self._arguments))
        stop = stop_token_ids(self._folders[tier], self._tokenizer)
        answers = answer_tasks(bench, tier, self._tasks, self._tokenizer, stop=stop)
        texts = {name: perplexity(runner, texts) for name, texts in self._texts.items()}
        record = answers.record() | {"weight_bytes": runner.model.weight_bytes, "texts": texts}
        return record, answers

    def of_tier(self, tier: Tier) -> dict[str, dict[str, Any]]:
        """All schemes, with what each changes against bfloat16."""
        with console.status(f"{tier}, {FULL}"):
            full, reference = self.measure(tier, None)
        found = {FULL: full}
        for scheme in SCHEMES:
            with console.status(f"{tier}, {scheme}"):
                record, answers = self.measure(tier, scheme)
            found[scheme] = record | change(reference, answers, seed=self._arguments.seed)
        return found


def held_out(arguments: argparse.Namespace) -> list[Task]:
    """Tasks of all plain families and difficulties in equal numbers, each only once."""
    per_cell = max(arguments.num_tasks // (len(PLAIN_FAMILIES) * len(DIFFICULTIES)), 1)
    return [
        task
        for family in PLAIN_FAMILIES
        for level in DIFFICULTIES
        for task in islice(distinct_tasks(arguments.seed, "heldout", [family], [level]), per_cell)
    ]


def change(before: Answers, after: Answers, *, seed: int) -> dict[str, Any]:
    """The change of accuracy with its 95 % interval, and the share of answers that stayed."""
    moved = np.asarray(after.is_right, float) - np.asarray(before.is_right, float)
    draws = np.random.default_rng(seed).integers(len(moved), size=(_BOOTSTRAPS, len(moved)))
    low, high = np.percentile(moved[draws].mean(1), [2.5, 97.5])
    pairs = zip(before.token_ids, after.token_ids, strict=True)
    return {
        "accuracy_change": float(moved.mean()),
        "accuracy_change_interval": [float(low), float(high)],
        "same_answers": sum(list(a) == list(b) for a, b in pairs) / len(moved),
    }


def given_text(arguments: argparse.Namespace) -> dict[str, list[Text]]:
    """The text that the arguments name, or nothing where there is none."""
    if arguments.text is None:
        console.print("[yellow]no real text: --text names none[/yellow]")
        return {}
    data = os.environ.get("OUTRIDER_DATA")
    candidates = [arguments.text, *([Path(data) / arguments.text] if data else [])]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise SystemExit(f"--text {arguments.text}: no such file, nor below $OUTRIDER_DATA.")
    tokenizer = load_tokenizer(arguments.large)
    return {found.name: file_texts(tokenizer, found, num_bytes=arguments.text_bytes)}


def show(tiers: Mapping[Tier, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print the table and the goal."""
    rows = [
        [f"{tier}, {scheme}", *_figures(entry)]
        for tier, schemes in tiers.items()
        for scheme, entry in schemes.items()
    ]
    names = list(tiers["large"][FULL]["texts"])
    columns = ["", "MB", "right", "change, points", "same", "accepted", "a pass"]
    columns += ["perplexity, tasks", *(f"bits a byte, {name}" for name in names[1:])]
    show_table("quality", columns, rows)
    for tier, schemes in tiers.items():
        for scheme, entry in schemes.items():
            if scheme != FULL:
                is_met = entry["accuracy_change"] >= -_MOST_LOST
                console.print(f"{tier}, {scheme} loses at most half a point: {verdict(is_met)}")


def _figures(entry: Mapping[str, Any]) -> list[str]:
    texts = list(entry["texts"].values())
    moved = ""
    if "accuracy_change" in entry:
        low, high = (100 * bound for bound in entry["accuracy_change_interval"])
        moved = f"{100 * entry['accuracy_change']:+.2f} ({low:+.2f} to {high:+.2f})"
    same, accepted = entry.get("same_answers"), entry["acceptance_rate"]
    return [
        f"{entry['weight_bytes'] / 1e6:.1f}",
        f"{entry['accuracy']:.2%}",
        moved,
        "" if same is None else f"{same:.1%}",
        "" if accepted is None else f"{accepted:.3f}",
        f"{entry['tokens_per_pass']:.2f}",
        f"{texts[0]['perplexity']:.5f}",
        *(f"{text['bits_per_byte']:.4f}" for text in texts[1:]),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both tiers, write the results and the plot."""
    parser = argument_parser(__doc__)
    parser.add_argument("--num-tasks", type=int, default=960)
    parser.add_argument("--text", type=Path, help="real text for perplexity")
    parser.add_argument("--text-bytes", type=int, default=200_000, help="how much of it is read")
    arguments = parser.parse_args(argv)
    prepare(arguments)
    choose_threads(arguments, arguments.large)
    quality = Quality(arguments, given_text(arguments))
    tiers = {tier: quality.of_tier(tier) for tier in _TIERS}
    show(tiers)
    results = {"num_tasks": len(held_out(arguments)), "tiers": tiers}
    path = write_results("bench_quality", variant_name(arguments), results, arguments)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    start(main)
