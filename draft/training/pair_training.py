"""The pair's own parts of training: its models, its batches, its losses."""

from pathlib import Path

import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from outrider.draft.training.corpus import Mix, Packer
from outrider.draft.training.loop import (
    Draw,
    LossFunction,
    ModelShape,
    Progress,
    TrainingPlan,
    build_llama,
)


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


def packed_batches(packer: Packer, mix: Mix | None = None, late_mix: Mix | None = None) -> Draw:
    """Token ids, weights and positions, each [rows, length]: long rows and late_mix at the end.

    A function of the plan and of the progress alone, so a resumed run sees the same batches.
    """

    def draw(
        plan: TrainingPlan, progress: Progress
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left = 1.0 - progress.fraction(plan)
        length = plan.long_length if left <= plan.long_fraction else plan.short_length
        rows = max(1, plan.batch_tokens // length)
        is_late = left <= plan.late_fraction
        batch = packer.batch(progress.step, rows, length, late_mix if is_late else mix)
        return batch.input_ids, batch.weights, batch.positions

    return draw


_CAUSAL = "outrider_causal"


def use_causal_attention(model: PreTrainedModel) -> None:
    """Let a model attend in blocks of rows, for full training rows only (no padding, no cache).

    Half of what plain attention computes is masked away. It also sees nothing in positions: those
    that jump would pass for the border of another text in transformers' own masks.
    """
    AttentionInterface.register(_CAUSAL, _causal_attention)
    model.set_attn_implementation(_CAUSAL)


def _causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """`query`: [rows, num_heads, length, head_dim]; `key`, `value`: the same with num_kv_heads."""
    length = query.shape[2]
    block = 128 if length <= 512 else 512
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    hidden = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)
    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        scores = (query[:, :, start:end] @ key[:, :, :end].transpose(-1, -2)).float() * scaling
        own = scores[..., start:].masked_fill(hidden[: end - start, : end - start], -torch.inf)
        scores = torch.cat([scores[..., :start], own], dim=-1)
        outputs.append(functional.softmax(scores, dim=-1).to(value.dtype) @ value[:, :, :end])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def label_loss(model: PreTrainedModel, device: torch.device) -> LossFunction:
    """Weighted cross-entropy of the next token."""

    def loss(
        input_ids: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(
                input_ids=input_ids, position_ids=positions, use_cache=False
            ).logits  # [rows, length, vocab]
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

    def loss(
        input_ids: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                goal = teacher(input_ids=input_ids, position_ids=positions, use_cache=False).logits
            logits = model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        log_goal = functional.log_softmax(goal[:, :-1].float(), dim=-1)
        log_draft = functional.log_softmax(logits[:, :-1].float(), dim=-1)
        divergence = (log_goal.exp() * (log_goal - log_draft)).sum(-1)  # [rows, length - 1]
        return (divergence * weights[:, 1:]).sum() / weights[:, 1:].sum()

    return loss


def folder_size_bytes(folder: Path) -> int:
    """Total size of the files directly in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
