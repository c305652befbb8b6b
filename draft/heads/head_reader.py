"""Read a head's tensors: named alike for every layout, finite, and shared with the large model."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from outrider.draft.heads.head_config import HeadConfig
from outrider.draft.heads.protocol import HeadError, TargetModel
from outrider.engine.model.decoder import DTYPES
from outrider.engine.model.quantised.formats import Rounding, WeightFormat
from outrider.engine.model.quantised.scheme import RoundedWeights, StoredWeights, WeightSource
from outrider.engine.model.weights import CheckpointReader, ProgressCallback
from outrider.kernels.layers.row_invariant_linear import Product, make_linear

_PLAIN: Final = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TARGET_OF_DRAFT, DRAFT_OF_TARGET = "d2t", "t2d"


class HeadReader(CheckpointReader):
    """A `CheckpointReader` of a head's folder, which refuses numbers that are not finite."""

    def __init__(
        self,
        folder: Path,
        target: TargetModel,
        *,
        renamed: Callable[[str], str | None],
        weight_format: WeightFormat | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """`renamed`: what a tensor is called here, None for one that is left alone."""
        super().__init__(
            folder,
            dtype=target.dtype,
            device=target.device,
            on_progress=on_progress,
            weight_format=weight_format,
        )
        self.rename(renamed)
        self.folder = folder
        self.target = target
        rounds = weight_format is None and _has_few_bits(target)
        self.weights: WeightSource = (
            RoundedWeights(self, Rounding(scheme="int8")) if rounds else StoredWeights()
        )
        """Beside a large model in few bits in 8: guesses are read from memory, too, and what they
        are does not change what is emitted."""

    def read(self, name: str, shape: Iterable[int]) -> Tensor:
        """Return a tensor; raises as `CheckpointReader.read` does, and for NaN and infinity."""
        return self._finite(name, super().read(name, shape))

    def read_joined(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """Return matrices one below the other; raises as `read` does."""
        return self._finite(names[0], super().read_joined(names, sizes, width))

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise HeadError(
                f"{self.folder}: the tensor {name} has numbers that are not finite: it was never "
                "trained, or the file is damaged."
            )
        return tensor

    def linear(self, name: str, shape: tuple[int, int]) -> Product:
        """Return the product with a matrix, [output, input]; raises as `read` does."""
        return make_linear(self.weights.weight(name, lambda: self.read(name, shape), (name,)))

    # ---- what the large model has, too ----------------------------------------------------

    def embedding(self, width: int) -> Tensor:
        """Return the table of the large model's tokens, of rows of `width`.

        It is the large model's own where the file has none, or the same.
        """
        table = self.target.embedding
        if EMBEDDING not in self:
            if table.shape[1] != width:
                raise HeadError(
                    f"{self.folder} has no table of tokens (embed_tokens.weight) and computes with "
                    f"{width} numbers a row, so it cannot use the large model's, which has "
                    f"{table.shape[1]}."
                )
            return table
        own = self.read(EMBEDDING, (table.shape[0], width))
        return table if self._is_same(own, table) else own

    def head(self, num_tokens: int, width: int) -> Callable[[Tensor], Tensor]:
        """Return the product [n, width] -> [n, num_tokens]; the large model's without a file's."""
        if HEAD in self:
            return self.linear(HEAD, (num_tokens, width))
        config = self.target.config
        if (num_tokens, width) != (config.vocab_size, config.hidden_size):
            raise HeadError(
                f"{self.folder} has no lm_head.weight, and the large model's gives "
                f"{config.vocab_size} logits of {config.hidden_size} numbers, not {num_tokens} of "
                f"{width}: the file is not complete."
            )
        return self.target.head

    @staticmethod
    def _is_same(own: Tensor, table: Tensor) -> bool:
        return own.shape == table.shape and own.dtype == table.dtype and torch.equal(own, table)

    # ---- vocabularies ---------------------------------------------------------------------

    def target_token_ids(self, config: HeadConfig) -> Tensor | None:
        """Return the large model's token of each of the head's; None where they are the same.

        d2t holds how much larger the former is. Raises HeadError for ids that are none, for two
        tokens of one id, and where t2d disagrees (the mask of the tokens that the head has).
        """
        num_tokens, num_target = config.layers.vocab_size, config.target_vocab_size
        if TARGET_OF_DRAFT not in self:
            if num_tokens != num_target:
                raise HeadError(
                    f"{self.folder} guesses {num_tokens} of {num_target} tokens, but has no table "
                    "d2t that says which: the file is not complete."
                )
            return None
        offsets = self._table(TARGET_OF_DRAFT, num_tokens).to(torch.int64)
        token_ids = offsets + torch.arange(num_tokens)
        low, high = token_ids.aminmax()
        if low < 0 or high >= num_target:
            raise HeadError(
                f"{self.folder}: the table d2t leads to the tokens {int(low)} to {int(high)}, but "
                f"the large model has those from 0 to {num_target - 1}."
            )
        if len(set(token_ids.tolist())) < num_tokens:
            raise HeadError(f"{self.folder}: the table d2t leads to one token from several.")
        if DRAFT_OF_TARGET in self:
            is_known = self._table(DRAFT_OF_TARGET, num_target).to(torch.bool)
            if int(is_known.sum()) != num_tokens or not is_known[token_ids].all():
                raise HeadError(
                    f"{self.folder}: the tables d2t and t2d disagree about which tokens the head "
                    "has: the file is damaged."
                )
        is_identity = num_tokens == num_target and not offsets.any()
        return None if is_identity else token_ids.to(self.device)

    def _table(self, name: str, size: int) -> Tensor:
        """Return a table of whole numbers, a copy on the CPU."""
        stored = self.raw(name)
        if tuple(stored.shape) != (size,) or stored.dtype.is_floating_point or stored.is_complex():
            raise HeadError(
                f"{self.folder}: the table {name} is {stored.dtype} of the shape "
                f"{list(stored.shape)}, but config.json requires {size} whole numbers."
            )
        return stored.clone()


def _has_few_bits(target: TargetModel) -> bool:
    """Return whether products of the large model have weights of 8 bits or fewer."""
    return target.scheme not in _PLAIN
