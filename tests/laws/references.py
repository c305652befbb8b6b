"""Logits of transformers' own models, to compare with."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Two ways to add up the same float32 numbers may order logits this close differently.
TIE = 1e-4


@torch.inference_mode()
def forced_logits(reference: PreTrainedModel, texts: list[list[int]]) -> list[Tensor]:
    """Logits at every position of every text, [num_tokens, vocab_size] each; right-padded."""
    width = max(map(len, texts))
    batch = torch.zeros(len(texts), width, dtype=torch.int64)
    mask = torch.zeros_like(batch)
    for row, tokens in enumerate(texts):
        batch[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    logits = reference(batch, attention_mask=mask).logits.float()
    return [logits[row, : len(tokens)] for row, tokens in enumerate(texts)]
