"""What is the pair's own in its training: its models, its batches, its losses."""

from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from draft.corpus import Packer
from draft.training import Draw, LossFunction, ModelShape, Progress, TrainingPlan, build_llama


def build_model(
    shape: ModelShape, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """A randomly initialised fp32 model for a tokenizer."""
    return build_llama(
        shape,
        vocab_size=len(tokenizer),
        max_positions=tokenizer.model_max_length,
        seed=seed,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def packed_batches(packer: Packer) -> Draw:
    """Token ids and weights, each [rows, length]: short rows first, long and late ones at the end.

    A function of the plan and of the progress alone, so a resumed run sees the same batches.
    """

    def draw(plan: TrainingPlan, progress: Progress) -> tuple[torch.Tensor, torch.Tensor]:
        left = 1.0 - progress.fraction(plan)
        length = plan.long_length if left <= plan.long_fraction else plan.short_length
        rows = max(1, plan.batch_tokens // length)
        batch = packer.batch(progress.step, rows, length, late=left <= plan.late_fraction)
        return batch.input_ids, batch.weights

    return draw


def label_loss(model: PreTrainedModel, device: torch.device) -> LossFunction:
    """Weighted cross-entropy of the next token."""

    def loss(input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=input_ids, use_cache=False).logits  # [rows, length, vocab]
        losses = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten(), reduction="none"
        )
        flat_weights = weights[:, 1:].flatten()
        return (losses * flat_weights).sum() / flat_weights.sum()

    return loss


def distillation_loss(
    model: PreTrainedModel, teacher: PreTrainedModel, device: torch.device
) -> LossFunction:
    """KL from the teacher's next-token distribution, which is what draft acceptance depends on."""

    def loss(input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                goal = teacher(input_ids=input_ids, use_cache=False).logits
            logits = model(input_ids=input_ids, use_cache=False).logits
        log_goal = functional.log_softmax(goal[:, :-1].float(), dim=-1)
        log_draft = functional.log_softmax(logits[:, :-1].float(), dim=-1)
        divergence = (log_goal.exp() * (log_goal - log_draft)).sum(-1)  # [rows, length - 1]
        return (divergence * weights[:, 1:]).sum() / weights[:, 1:].sum()

    return loss


def folder_size_bytes(folder: Path) -> int:
    """Total size of the files directly in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
