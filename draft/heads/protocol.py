"""A head and the large model that it reads, as the drafter and the passes see them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.protocol import CausalModel

HeadKind = Literal["eagle3", "mtp", "peagle", "dflash"]


class HeadError(UnsupportedModelError, ValueError):
    """A drafter that cannot be used, or not with this large model; the sentence says why."""


class TargetModel(Protocol):
    """The large model, as far as its heads share its weights.

    embedding: [vocab_size, hidden_size], rows as the checkpoint has them (not scaled); head: the
    product with the table of tokens, [n, hidden_size] -> [n, vocab_size], neither scaled nor
    capped.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    numerics: str
    scheme: str
    """What products compute with, as `CausalModel` has it."""

    @property
    def embedding(self) -> Tensor:
        """The table of tokens that rows are looked up in."""
        ...

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The product that gives logits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The rows that a block drafter runs in one pass, and what their logits say.

    The first row carries the last token, the others `mask_token_id`. Positions ascend by one.
    """

    num_rows: int
    first_row: int
    """Row `first_row + i` has the logits of depth i + 1."""
    mask_token_id: int
    is_bidirectional: bool
    """Every row of a block sees all of its rows; else a row sees those up to its own."""
    is_behind_text: bool
    """The first row lies in the slot behind the row that carries the last features; else it is that
    row."""

    @property
    def num_depths(self) -> int:
        """Return how many tokens a pass guesses."""
        return self.num_rows - self.first_row

    @property
    def num_slots_behind(self) -> int:
        """Return how many slots behind those of the text a pass writes to."""
        return self.num_rows if self.is_behind_text else self.num_rows - 1

    def token_ids(self, last_token: int) -> list[int]:
        """Return the tokens of a block's rows."""
        return [last_token, *[self.mask_token_id] * (self.num_rows - 1)]

    def ancestor_masks(self) -> list[int]:
        """Return which of a block's rows each row sees: bit i is row i (see `ForwardSlice`)."""
        if self.is_bidirectional:
            return [(1 << self.num_rows) - 1] * self.num_rows
        return [(2 << row) - 1 for row in range(self.num_rows)]


class HeadModel(CausalModel, Protocol):
    """A drafter's weights and forward pass over a paged KV cache of its own.

    Row j of a head's text carries token j + 1 and the features of the large model's row j. Its
    logits say what follows token j + 1.
    """

    kind: HeadKind
    tap_layers: tuple[int, ...]
    """The large model's hidden states that it reads, numbered as `Taps` numbers them."""
    target_token_ids: Tensor | None
    """int64 [config.vocab_size], the large model's token of each of its own. None where they are
    the same."""
    block: BlockLayout | None
    """The rows of a pass that guesses several tokens at once. None for a head that guesses one a
    pass."""
    mask_features: Tensor | None
    """[feature_size] for a block's rows behind its first. None where they carry none that
    matter."""

    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Return what rows carry beside their tokens: [n, taps * hidden_size] -> [n, feature_size].

        `ForwardOutput.hidden` of a head is what the rows of its next level carry instead.
        """
        ...
