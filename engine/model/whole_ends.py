"""The ends of a model of which this process has a part: what a head that drafts for it shares.

Heads run on rank 0 alone. The large model's hidden states are whole on every rank, but its table of
tokens and the product that gives logits are not; a head that uses them gets them from the
checkpoint, whole, on rank 0's device.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.weights import CheckpointReader, resolve_checkpoint
from outrider.kernels.layers.row_invariant_linear import make_linear

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WholeEnds:
    """A large model as its heads see it (`outrider.draft.heads.protocol.TargetModel`)."""

    def __init__(self, model: DecoderModel) -> None:
        """Read the description anew: the model's own is that of its part."""
        self._folder = resolve_checkpoint(model.config.model_id)
        self.config = whole_config(model.config)
        self.dtype, self.device = model.dtype, model.device
        self.fingerprint, self.numerics = model.fingerprint, model.numerics
        self.scheme = model.scheme

    @cached_property
    def embedding(self) -> Tensor:
        """The table of tokens: [vocab_size, hidden_size]; read when it is first wanted."""
        return self._read(_TABLE)

    @cached_property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The product that gives logits, before they are scaled and capped."""
        if self.config.tie_word_embeddings:
            return make_linear(self.embedding, pack=False)
        return make_linear(self._read(_HEAD))

    def _read(self, name: str) -> Tensor:
        config = self.config
        with (
            torch.inference_mode(),
            CheckpointReader(
                self._folder,
                dtype=self.dtype,
                device=self.device,
                text_only=config.is_text_part,
                weight_format=config.weight_format,
            ) as reader,
        ):
            return reader.read(name, (config.vocab_size, config.hidden_size))


def whole_config(config: ModelConfig) -> ModelConfig:
    """Return the description of the whole model, of which `config` may describe a part."""
    return config if config.num_ranks == 1 else read_model_config(config.model_id)


def ends_of(model: DecoderModel) -> DecoderModel | WholeEnds:
    """Return what heads read of a model: itself, where it is in one piece."""
    return model if model.config.num_ranks == 1 else WholeEnds(model)
