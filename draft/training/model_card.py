"""Writes model cards from measurements: the pair's, and those of drafters made by users."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.draft.training.distill import DistillReport
    from outrider.draft.training.head_distil import HeadReport

_TEMPLATE = """---
license: apache-2.0
language: en
library_name: transformers
---

# The shipped pair

Two language models with one tokenizer, trained from nothing by
`python -m outrider.draft.training.pretrain`: the *large* one ({large_parameters:,} parameters)
answers, the *small* one ({small_parameters:,}) answers easy prompts and drafts for the large.
They are {ratio:.1f} times apart and exist so that the gateway, its demo and its tests run
anywhere, offline, on models that can do something. They are no general assistants.

## What they can do

{abilities}

The chat template takes tools (one line each: `name(city: string, days?: integer): what it does`),
writes calls as `<tool_call>` with JSON inside and shows results as `<tool_response>`.

## Data

Generated, nothing downloaded, no personal data. One prompt in twenty, by its hash, is held out.
What is held out is the wording with its numbers: an easy sum can come back in other words, from
three digits on almost every held-out sum is new. The lists of words, names and tools are closed:
spelling is memorised, and tools outside the list are called badly.

## Recipe

Llama architecture, tied embeddings, byte-level BPE of {vocab_size} tokens in which every digit
is a token of its own. Muon for the matrices, AdamW for the rest, bf16 autocast over fp32
weights, warm-up, constant rate, linear decay over the second half. The loss counts answers fully,
prompts by a tenth.

{recipe}

{command}

{recipe_table}

{making}

{notes}

## Accuracy on held-out prompts

Greedy decoding in bf16, {tasks} prompts, exact match of what the last line says. *Agreement* is
the share of the large model's answer tokens that are the small model's first choice: a proxy of
draft acceptance at temperature 0. With {tasks_per_difficulty} prompts a difficulty, two standard
errors are about 3 points.

{difficulty_table}

By family: small / large at difficulties 1 to 4, in percent, then agreement over all four.

{family_table}

{limits}

Raw numbers: [evaluation.json](evaluation.json).

## Licence

Apache-2.0, code, data and weights.
"""

_ABILITIES = """{num_families} families of tasks whose answers a program can check
(`draft/training/tasks/families.py`), each at four difficulties: {families}. Steps are written
out where there are some, and the last line reads `Answer: ...`. A *passage* is a text of
400 to 3000 tokens in which one sentence answers the question; a *follow up* is the last turn of a
chat; *tool call* wants the
one call that fits among one to six tools, a plain no, or the result of a call in words. A system
prompt is read and not obeyed."""

_MAKING = """Machine: {machine}. A budget in minutes makes the exact weights depend on the machine's
speed; the seed (the default, 0) fixes data and initialisation. The published folders are bf16 and
take {size_mb:.1f} MB together."""

_RECIPE = """**First stage**, from random weights, on sixteen of the families as they were then,
with rows of 256 tokens, in the last 15 % of 1024; the small model was finished by distillation:
KL from the large model's distributions on the same text.

| stage | tokens | steps | wall time | peak rate | tokens a step |
| --- | ---: | ---: | ---: | ---: | ---: |
| large | 15.2 M | 2,469 | 69 min | 0.003 | 6,144 |
| small | 10.8 M | 1,757 | 24 min | 0.004 | 6,144 |
| distil | 4.2 M | 691 | 22 min | 0.002 | 6,144 |

(then 5 minutes more of distillation, 0.8 M tokens, on rows of 1024.)

**Second stage**, `--init` from the published bf16 weights of the first, with the same tokenizer:
{num_families} families, a dial cut anew so that its upper end separates the two sizes, tools in
the chat template, positions up to 4096. Rows of 384 tokens, of --long-length at the end. A part of
the rows are interviews: a text and a question about each of its facts, since looking up is learnt
from many questions about one text. In three rows of ten the positions jump at the start of a turn,
so that short rows teach long distances (PoSE, arXiv 2309.10400)."""

_LIMITS = """## Limits

- Outside the families above the text is fluent nonsense, and no confidence in it means anything.
- A text is searched by what the question's verb asks for. Where the same is said of several people
  (two who live somewhere), one of them is picked as if at random: lessons in that were part of the
  first 4.6 M tokens of the second stage and were not learnt.
- Calls among five or six tools under unusual names, and spelling backwards with a letter left out,
  are hardly learnt: the large model is mostly wrong there as well.
- Tools that are not in the generator's list are called badly, and so are requests in other words.
- English only; other text survives the tokenizer and is not understood.
- Rows had at most 2048 tokens; longer distances are known from jumps in positions alone.
- Words that are not in the generator's lists are often spelled wrongly."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of the model card that the evaluation does not have: sizes, recipe, machine."""

    parameters: Mapping[str, int]
    vocab_size: int
    size_bytes: int
    command: str
    machine: str
    notes: str
    summaries: Mapping[str, Mapping[str, Any]]


def model_card(evaluation: Mapping[str, Any], facts: Facts) -> str:
    """The card as Markdown."""
    cells: Sequence[Mapping[str, Any]] = evaluation["cells"]
    families = list(dict.fromkeys(cell["family"] for cell in cells))
    return _TEMPLATE.format(
        large_parameters=facts.parameters["large"],
        small_parameters=facts.parameters["small"],
        ratio=facts.parameters["large"] / facts.parameters["small"],
        abilities=_wrapped(
            _ABILITIES.format(num_families=len(families), families=_listed(families))
        ),
        vocab_size=facts.vocab_size,
        recipe=_RECIPE.format(num_families=len(families)),
        command=textwrap.indent(facts.command, "    "),
        recipe_table=_recipe_table(facts.summaries),
        making=_wrapped(_MAKING.format(machine=facts.machine, size_mb=facts.size_bytes / 1e6)),
        notes=_wrapped(facts.notes),
        tasks=evaluation["tasks"],
        tasks_per_difficulty=evaluation["by_difficulty"][0]["tasks"],
        difficulty_table=_difficulty_table(evaluation),
        family_table=_family_table(cells, families),
        limits=_LIMITS,
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 98)


def _listed(families: Sequence[str]) -> str:
    return ", ".join(family.replace("_", " ") for family in families)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def _recipe_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [
            stage,
            f"{summary['tokens'] / 1e6:.1f} M",
            f"{summary['step']:,}",
            f"{summary['seconds'] / 60:.0f} min",
            f"{summary['plan']['peak_lr']:g}",
            f"{summary['plan']['batch_tokens']:,}",
        ]
        for stage, summary in summaries.items()
    ]
    return _table(
        ("stage", "tokens", "steps", "wall time", "peak rate", "tokens a step"),
        rows,
    )


def _difficulty_table(evaluation: Mapping[str, Any]) -> str:
    rows = [
        [str(row["difficulty"]), *(_percent(row[key]) for key in ("small", "large", "agreement"))]
        for row in evaluation["by_difficulty"]
    ]
    overall = evaluation["overall"]
    rows.append(["all", *(_percent(overall[key]) for key in ("small", "large", "agreement"))])
    return _table(("difficulty", "small %", "large %", "agreement %"), rows)


def _family_table(cells: Sequence[Mapping[str, Any]], families: Sequence[str]) -> str:
    rows = []
    for family in families:
        own = [cell for cell in cells if cell["family"] == family]
        mean = sum(cell["agreement"] for cell in own) / len(own)
        pairs = [f"{_percent(cell['small'])} / {_percent(cell['large'])}" for cell in own]
        rows.append([family.replace("_", " "), *pairs, _percent(mean)])
    return _table(("family", "1", "2", "3", "4", "agreement"), rows)


_DRAFTER = """---
library_name: transformers
---

# A drafter for {large}

{parameters:,} parameters, distilled by `outrider draft train` from {origin}. It shares the
tokenizer of {large} and guesses what that model writes next:

    outrider serve --large {large} --small .

On its own it is no assistant, and in other company no drafter.

## Recipe

Forward KL divergence to the {top_k} likeliest next tokens of {large} and the rest as one
outcome, on {text}, prompts from `{data}`: {num_learnt:,} sequences,
{steps:,} steps, {tokens:,} tokens (padding counted), {minutes:.1f} minutes.

    {plan}

## Measured

On {num_held_out:,} sequences held out ({num_tokens:,} answer tokens), teacher-forced: how often the
first choice of {large} is the drafter's first (the chance that a guess of one token is accepted at
temperature 0), or one of its first three.

{table}

`outrider draft tune` measures what that is worth in tokens per second.
"""


def drafter_card(report: "DistillReport", facts: Mapping[str, str]) -> str:
    """The card of a distilled drafter as Markdown.

    `facts`: large, origin, text, data, top_k and plan, each as it is to be read.
    """
    rows = [
        [name, f"{100 * agreement.first:.1f}", f"{100 * agreement.top3:.1f}"]
        for name, agreement in (("before", report.before), ("after", report.after))
    ]
    return _DRAFTER.format(
        **facts,
        parameters=report.num_parameters,
        num_learnt=report.num_learnt,
        num_held_out=report.num_held_out,
        num_tokens=report.after.num_tokens,
        steps=report.steps,
        tokens=report.tokens,
        minutes=report.seconds / 60,
        table=_table(("", "first choice %", "first three %"), rows),
    )


_HEAD = """---
library_name: transformers
---

# {title} for {large}

{parameters:,} parameters, trained by `outrider draft train --kind {kind}`. It reads hidden states
of {large} and guesses what that model writes next:

    outrider serve --large {large} --drafter .

It has no meaning without {large}, nor with another model; `target_fingerprint` in config.json
tells. {layout}

## Recipe

Training-time test of {unroll} levels (Li et al., EAGLE-3, 2025): forward KL divergence to the
{top_k} likeliest next tokens of {large} and the rest as one outcome, level after level on the
head's own outputs, on {text}, prompts from `{data}`: {num_learnt:,} sequences, {steps:,} steps,
{tokens:,} tokens (padding counted), {minutes:.1f} minutes.

    {plan}

## Measured

On {num_held_out:,} sequences held out ({num_roots:,} places), teacher-forced: how often the head's
first choice is the one of {large}, where all guesses above it are right, and how often a whole
chain so deep is. Its vocabulary has {coverage:.2f} % of the tokens of these answers.

{table}

`outrider draft compare` measures what that is worth in tokens per second.
"""
_HEAD_TITLES = {"eagle3": "An EAGLE-3 head", "mtp": "An MTP module"}
_HEAD_LAYOUTS = {
    "eagle3": "The layout is the one of SpecForge and SafeAILab, which vLLM and SGLang read.",
    "mtp": "The layout is the one of speculators.",
}


def head_card(report: "HeadReport", facts: Mapping[str, str]) -> str:
    """The card of a trained head as Markdown; facts as `drafter_card`'s, kind and unroll."""
    rows = [
        [str(depth), *(f"{100 * share:.1f}" for share in shares)]
        for depth, shares in enumerate(
            zip(report.before.levels, report.after.levels, report.after.paths, strict=True), start=1
        )
    ]
    return _HEAD.format(
        **facts,
        title=_HEAD_TITLES[facts["kind"]],
        layout=_HEAD_LAYOUTS[facts["kind"]],
        parameters=report.num_parameters,
        num_learnt=report.num_learnt,
        num_held_out=report.num_held_out,
        num_roots=report.after.num_roots,
        steps=report.steps,
        tokens=report.tokens,
        minutes=report.seconds / 60,
        coverage=100 * report.coverage,
        table=_table(("depth", "before %", "after %", "whole chain %"), rows),
    )
