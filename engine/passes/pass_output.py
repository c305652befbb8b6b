"""Holds what a pass computes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.padding import Padding


@dataclass(slots=True, kw_only=True)
class PassOutput:
    """Logits (float32) and final hidden states: of all device rows, then of the slices' asked ones.

    Valid until the runner's next pass, which may write its own into the same memory: keep copies.
    A read that is put in the device's queue before that pass sees this one's.
    """

    logits: Tensor
    """[num_logit_rows, vocab_size]."""
    hidden: Tensor
    """[num_logit_rows, hidden_size]."""
    taps: Tensor | None = None
    """[num_rows, number of taps * hidden_size]: of all device rows, then of all rows of the slices.
    None where the runner has no taps."""

    @classmethod
    def empty(cls, model: CausalModel, num_taps: int) -> "PassOutput":
        """Return the output of a pass without rows."""
        width, vocab_size = model.config.hidden_size, model.config.vocab_size
        hidden = torch.zeros((0, width), dtype=model.dtype, device=model.device)
        return cls(
            logits=torch.zeros((0, vocab_size), dtype=torch.float32, device=model.device),
            hidden=hidden,
            taps=hidden.new_zeros((0, num_taps * width)) if num_taps else None,
        )

    def padded(self, padding: Padding) -> "PassOutput":
        """Return the output with rows where padding was left out of the pass."""
        return PassOutput(
            logits=padding.put_in(self.logits),
            hidden=padding.put_in(self.hidden),
            taps=None if self.taps is None else padding.put_in(self.taps),
        )
