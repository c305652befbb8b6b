"""A drafter from beginning to end: out folder, answers, targets, training, card.

OUT/                    what `--small OUT` and transformers load, and README.md
OUT/training/           what a restart goes on from; may be deleted afterwards
    inputs.json         what the work below depends on
    answers.jsonl       the large model's answers, as they ended
    targets/            its likeliest next tokens, 64 sequences a file
    checkpoint.pt       weights, optimizer state, progress
    loss.jsonl          the curve
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from outrider.draft.text.vocabulary import describe_difference
from outrider.draft.training.distill import (
    DistillError,
    DistillPlan,
    DistillReport,
    copy_tokenizer,
    distil,
    fresh_drafter,
)
from outrider.draft.training.loop import load_model, publish_folder
from outrider.draft.training.model_card import drafter_card
from outrider.draft.training.own_answers import (
    AnswerPlan,
    TaughtRow,
    TokenRow,
    given_answers,
    render_prompts,
    teach,
    write_answers,
)
from outrider.draft.training.prompt_file import PromptDataError, read_prompts
from outrider.engine.core import Engine
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.engine.model.weights import resolve_checkpoint
from outrider.engine.passes.runner import ModelRunner

logger = logging.getLogger(__name__)


class OutFolderError(DistillError):
    """The out folder holds something that must not be overwritten or does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterJob:
    """A drafter to train."""

    large: str
    data: Path
    out: Path
    small: str | None = None
    """Checkpoint to start from; None: a new Llama of the given size."""
    num_layers: int | None = None
    hidden_size: int | None = None
    on_policy: bool = True
    """Learn from the large model's own answers; else from the answers in the data."""
    answers: AnswerPlan
    distill: DistillPlan

    @property
    def work_dir(self) -> Path:
        """Folder of everything that a restart needs."""
        return self.out / "training"

    def inputs(self) -> dict[str, Any]:
        """Return the inputs that the cached work depends on, comparable between runs."""
        large, small = (
            None if path is None else checkpoint_fingerprint(resolve_checkpoint(path))
            for path in (self.large, self.small)
        )
        return {
            "large": large,
            "small": small,
            "data": hashlib.sha256(self.data.read_bytes()).hexdigest(),
            "layers": self.num_layers,
            "width": self.hidden_size,
            "on_policy": self.on_policy,
            "temperature": self.answers.temperature,
            "max_tokens": self.answers.max_tokens,
            "max_length": self.answers.max_length,
            "top_k": self.answers.top_k,
            "seed": self.distill.seed,
            "batch_size": self.distill.batch_size,
            "held_out": self.distill.held_out,
        }


def open_folder(job: DrafterJob, *, resume: bool) -> None:
    """Make the out folder, or check that the work in it can be gone on with.

    Raises OutFolderError for a folder with other contents, and for one whose work was done from
    other inputs.
    """
    marker = job.work_dir / "inputs.json"
    inputs = job.inputs()
    if job.out.is_file():
        raise OutFolderError(f"{job.out} is a file; name a folder")
    if job.out.is_dir() and any(job.out.iterdir()):
        if not resume:
            raise OutFolderError(
                f"{job.out} is not empty. Name another folder, or resume the run in it with "
                "--resume."
            )
        if not marker.is_file():
            raise OutFolderError(f"{job.out} holds no training to resume; name another folder")
        former = json.loads(marker.read_text())
        changed = sorted(name for name in inputs if former.get(name) != inputs[name])
        if changed:
            raise OutFolderError(
                f"{job.out} was begun with other inputs ({', '.join(changed)} changed). Resume "
                "with the same ones, or begin in another folder. Steps, minutes and the learning "
                "rate may change."
            )
        return
    job.work_dir.mkdir(parents=True, exist_ok=True)
    partial = marker.with_suffix(".partial")
    partial.write_text(json.dumps(inputs, indent=1) + "\n")
    os.replace(partial, marker)


def train_drafter(
    job: DrafterJob,
    load: Callable[[], tuple[Engine, ModelRunner]],
    *,
    resume: bool = False,
    num_threads: int | None = None,
) -> DistillReport:
    """Make a drafter and write it to `job.out`.

    `load`: the large model in an engine of its own, and its runner. It is called after everything
    cheap was checked, and let go before the training. `num_threads`: of the training; None for as
    many as the engine had.

    Raises PromptDataError, DistillError (OutFolderError) and EngineError, each with what to do.
    """
    rows = read_prompts(job.data)
    folder = resolve_checkpoint(job.large)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = _initial_model(job, folder, tokenizer)
    prompts = render_prompts(rows, tokenizer)
    given = None
    if not job.on_policy:
        given = given_answers(rows, tokenizer, job.answers.max_length)
    # Whatever can be wrong with the inputs is known by now.
    open_folder(job, resume=resume)
    taught, device, dtype = taught_rows(job, prompts, given, load)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    report = distil(
        model, taught, job.distill, job.work_dir, device=device, is_fresh=job.small is None
    )
    publish_folder(model, lambda made: copy_tokenizer(folder, made), job.out, dtype)
    (job.out / "README.md").write_text(drafter_card(report, card_facts(job)))
    return report


def taught_rows(
    job: DrafterJob,
    prompts: Sequence[tuple[int, ...]],
    given: Sequence[TokenRow] | None,
    load: Callable[[], tuple[Engine, ModelRunner]],
) -> tuple[list[TaughtRow], torch.device, torch.dtype]:
    """Sequences with the large model's targets, its device and its precision."""
    engine, runner = load()
    sequences = given
    if sequences is None:
        sequences = write_answers(engine, prompts, job.answers, job.work_dir / "answers.jsonl")
    num_left_out = len(prompts) - len(sequences)
    if num_left_out:
        logger.warning("left out, longer than the context: prompts=%d", num_left_out)
    if not sequences:
        raise PromptDataError(
            f"{job.data}: none of its {len(prompts)} prompts leaves room for an answer in "
            f"{job.answers.max_length} tokens; raise --max-length or give shorter prompts"
        )
    taught = teach(runner, sequences, job.answers.top_k, job.work_dir / "targets")
    return taught, runner.device, runner.model.dtype


def _initial_model(job: DrafterJob, large: Path, tokenizer: Any) -> PreTrainedModel:
    """The untrained drafter in float32. Raises DistillError for a start with other tokens."""
    if job.small is None:
        return fresh_drafter(
            large,
            num_layers=job.num_layers,
            hidden_size=job.hidden_size,
            seed=job.distill.seed,
        )
    if job.num_layers is not None or job.hidden_size is not None:
        raise DistillError(
            "--layers and --width are for a new drafter; one that starts from --small has its size"
        )
    small = resolve_checkpoint(job.small)
    own: Any = AutoTokenizer.from_pretrained(small, trust_remote_code=False)
    difference = describe_difference(tokenizer.get_vocab(), own.get_vocab())
    if difference is not None:
        raise DistillError(
            f"{job.small} has another tokenizer than {job.large} ({difference}). Start from one "
            "with the same tokenizer, or omit --small to start from random weights."
        )
    return load_model(small, torch.float32, torch.device("cpu"))


def card_facts(job: DrafterJob) -> dict[str, str]:
    """Return what a drafter's card says of a job, each as it is to be read."""
    origin = "a random initialisation" if job.small is None else f"`{Path(job.small).name}`"
    greedy = job.answers.temperature == 0
    how = "greedy" if greedy else f"sampled at temperature {job.answers.temperature:g}"
    return {
        "large": Path(job.large).name,
        "origin": origin,
        "text": f"the large model's own answers ({how})" if job.on_policy else "given answers",
        "data": job.data.name,
        "top_k": str(job.answers.top_k),
        "plan": json.dumps(asdict(job.distill)),
    }
