"""A head from beginning to end: as `drafter_job`, with the large model's hidden states as inputs.

OUT holds what `--drafter OUT` loads; OUT/training/targets also has the taps, by 64 sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from outrider.draft.training.distill import DistillError
from outrider.draft.training.drafter_job import DrafterJob, card_facts, open_folder, taught_rows
from outrider.draft.training.head_distil import HeadReport, distil_head, frequent_tokens
from outrider.draft.training.head_files import (
    DEFAULT_DRAFT_VOCAB,
    begin_from_target,
    check_can_have_mtp,
    default_taps,
    head_sizes,
    read_target_ends,
    write_head,
)
from outrider.draft.training.head_model import HEADS, TrainedHead, TrainedHeadKind
from outrider.draft.training.model_card import head_card
from outrider.draft.training.own_answers import TappedRow, given_answers, render_prompts
from outrider.draft.training.prompt_file import read_prompts
from outrider.engine.core import Engine
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.weights import resolve_checkpoint
from outrider.engine.passes.runner import ModelRunner

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadJob(DrafterJob):
    """A head to train."""

    kind: TrainedHeadKind
    draft_vocab_size: int | None = None
    """Tokens that it can guess, the most frequent ones. None for all, at most 32,000."""
    unroll: int = 7
    """Levels of training-time test."""

    def inputs(self) -> dict[str, Any]:
        """Return the inputs that the cached work depends on, comparable between runs."""
        own = {
            "kind": self.kind,
            "draft_vocab": self.draft_vocab_size,
            "unroll": self.unroll,
        }
        return DrafterJob.inputs(self) | own


def train_head(
    job: HeadJob,
    load: Callable[[], tuple[Engine, ModelRunner]],
    *,
    resume: bool = False,
    num_threads: int | None = None,
) -> HeadReport:
    """Make a head and write it to `job.out`; arguments and errors as `train_drafter`'s."""
    rows = read_prompts(job.data)
    folder = resolve_checkpoint(job.large)
    target = read_model_config(folder)
    vocab_size = _draft_vocab_size(job, target)
    if job.unroll < 1:
        raise DistillError(f"--unroll {job.unroll} must be at least 1")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompts = render_prompts(rows, tokenizer)
    given = None
    if not job.on_policy:
        given = given_answers(rows, tokenizer, job.answers.max_length)
    open_folder(job, resume=resume)

    def load_tapped() -> tuple[Engine, ModelRunner]:
        engine, runner = load()
        return engine, tapped_runner(runner, default_taps(job.kind, target.num_layers))

    taught, device, dtype = taught_rows(job, prompts, given, load_tapped)
    tapped = [row for row in taught if isinstance(row, TappedRow)]
    if len(tapped) < len(taught):
        raise DistillError(
            f"{job.work_dir}: its targets have no hidden states; delete {job.work_dir.name} and "
            "begin again"
        )
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    head = fresh_head(job.kind, folder, tapped, vocab_size, seed=job.distill.seed)
    report = distil_head(head, tapped, job.distill, job.work_dir, depth=job.unroll, device=device)
    write_head(head, folder, job.out, dtype)
    facts = card_facts(job) | {"kind": job.kind, "unroll": str(job.unroll)}
    (job.out / "README.md").write_text(head_card(report, facts))
    return report


def tapped_runner(runner: ModelRunner, taps: tuple[int, ...]) -> ModelRunner:
    """A runner of the same weights that yields hidden states; its cache holds one sequence."""
    context = runner.max_context
    assert context is not None  # set when it was made
    return ModelRunner(
        model=runner.model,
        num_blocks=-(-context // _BLOCK_SIZE) + 1,
        block_size=_BLOCK_SIZE,
        max_context=context,
        prefix_caching=False,
        taps=taps,
    )


def fresh_head(
    kind: TrainedHeadKind,
    large: Path,
    rows: Sequence[TappedRow],
    draft_vocab_size: int,
    *,
    seed: int,
) -> TrainedHead:
    """An untrained head that can guess the tokens most frequent in the rows' answers."""
    target = read_model_config(large)
    token_ids = frequent_tokens(rows, target.vocab_size, draft_vocab_size)
    ends = read_target_ends(large)
    torch.manual_seed(seed)
    head = HEADS[kind](head_sizes(kind, target, draft_vocab_size), ends, token_ids)
    begin_from_target(head, large)
    return head


def _draft_vocab_size(job: HeadJob, target: ModelConfig) -> int:
    """Tokens of the head; raises DistillError for a number that cannot be."""
    if job.kind == "mtp":
        check_can_have_mtp(target)
        if job.draft_vocab_size is not None:
            raise DistillError(
                "--draft-vocab is for --kind eagle3; an MTP module has the large model's vocabulary"
            )
        return target.vocab_size
    wanted = job.draft_vocab_size
    if wanted is not None and not 1 <= wanted <= target.vocab_size:
        raise DistillError(
            f"--draft-vocab {wanted} must be from 1 to the large model's {target.vocab_size} tokens"
        )
    return wanted or min(target.vocab_size, DEFAULT_DRAFT_VOCAB)
