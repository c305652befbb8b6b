"""Small sentence encoders with random weights, and labels that only an embedding can tell."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel

from outrider.router.dataset import LabelledPrompts
from outrider.router.encoder.sentence import EmbeddedTexts, EncoderId

_WORDS = ("[UNK]", "what", "is", "the", "sum", "of", "a", "dog", "cat", "?", "def", "return")


def write_encoder(folder: Path, *, width: int = 16, num_layers: int = 3, seed: int = 0) -> Path:
    """A BERT of 12 words and 160 positions, with its tokenizer."""
    config = BertConfig(
        vocab_size=len(_WORDS),
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        intermediate_size=3 * width,
        max_position_embeddings=160,
        initializer_range=0.5,
    )
    torch.manual_seed(seed)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    words = {word: number for number, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def labels_near(num_rows: int, seed: int, *, is_told: bool = True) -> LabelledPrompts:
    """Prompts without a hint in their words; their embeddings lie in eight clusters, half hard."""
    rng = np.random.default_rng(seed)
    clusters = rng.integers(0, 8, num_rows)
    centres = np.random.default_rng(0).normal(size=(8, 12))
    rows = centres[clusters] + 0.2 * rng.normal(size=(num_rows, 12))
    if not is_told:
        rows = rng.normal(size=rows.shape)
    weak = (rng.random(num_rows) < np.where(clusters % 2, 0.9, 0.1)).astype(np.float64)
    strong = (rng.random(num_rows) < 0.95).astype(np.float64)
    found = EncoderId(source="nowhere", fingerprint="0" * 16, dimension=12, depth=2)
    return LabelledPrompts(
        prompts=[f"question number {number}" for number in rng.permutation(num_rows)],
        weak=weak,
        strong=strong,
        sha256="2" * 64,
        embeddings=EmbeddedTexts(id=found, rows=rows.astype(np.float32)),
    )
