"""The table of tokens and the head of a model in parts, of which each rank has some tokens.

A row's logits are spread over the ranks. Of most rows only the token that is chosen matters: then
each rank sends its few best tokens, ranked as they will be, under the same noise; all of a row's
logits are sent only where more is asked of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from outrider.engine.model.shard import Collectives, Shard
from outrider.kernels.layers.embedding import embed_tokens
from outrider.kernels.sampling.sample import top_tokens
from outrider.kernels.sampling.sampling_rows import SamplingRows, field_stride
from outrider.kernels.upload import upload

# Of each rank. One would do, if all ranks' arithmetic gave the same bits for columns in any place.
_NUM_CANDIDATES: Final = 4


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PickedRows:
    """The logit rows of a pass of which only argmax(logits / temperature + noise) is wanted."""

    rows: list[int]
    """Their numbers among all logit rows, ascending, on the host."""
    words: Tensor | None = None
    """int32 [field_stride(n) + 2 * n], on the device: the bits of their temperatures, 0 for a
    greedy row, and their noise keys' pairs. None where all are greedy."""

    @staticmethod
    def num_words(num_rows: int) -> int:
        """Return the length of `words`."""
        return field_stride(num_rows) + 2 * num_rows

    def sampling(self, device: torch.device) -> SamplingRows:
        """Return how the rows choose; what cuts no token is not there."""
        count = len(self.rows)
        words = self.words
        if words is None:
            words = torch.zeros(self.num_words(count), dtype=torch.int32, device=device)
        off = torch.zeros(count, dtype=torch.int32, device=device)
        return SamplingRows(
            temperature=words[:count].view(torch.float32),
            top_k=off,
            top_p=off.float() + 1.0,
            min_p=off.float(),
            noise_keys=words[field_stride(count) :].view(count, 2),
            has_sampled=self.words is not None,
            has_truncation=False,
        )


class SharedVocabulary:
    """The table of tokens and the head, of which each rank has the rows of some tokens."""

    __slots__ = ("_shard", "_table", "_vocab_size")

    def __init__(self, table: Tensor, shard: Shard, *, vocab_size: int) -> None:
        """`table`: [tokens of this rank, width]; `vocab_size`: of the whole."""
        self._table = table
        self._shard = shard
        self._vocab_size = vocab_size

    def look_up(self, token_ids: Tensor, *, is_fused: bool) -> Tensor:
        """Return the vectors of tokens, [n] -> [n, width]: one rank's row, and zeros of others."""
        own = token_ids - self._shard.span(self._vocab_size)[0]
        if is_fused:
            rows = embed_tokens(self._table, own)
        else:
            is_own = (own >= 0) & (own < self._table.shape[0])
            rows = self._table.index_select(0, own.where(is_own, 0))
            rows.masked_fill_(~is_own.unsqueeze(1), 0.0)
        return self._shard.summed(rows, in_order=False)  # one summand: any order is exact

    def joined(
        self, product: Tensor, finish: Callable[[Tensor], Tensor], picked: PickedRows | None
    ) -> Tensor:
        """Return logits on rank 0: [m, tokens of this rank] -> float32 [m, vocab_size].

        `finish`: from the head's product, in float32, to logits, in place. Picked rows have -inf
        but for each rank's best tokens. On the other ranks: rows that nothing reads.
        """
        num_rows, length = product.shape
        if picked is None or not picked.rows:
            return self._whole(product, finish)
        rest = None
        if len(picked.rows) < num_rows:
            is_picked = set(picked.rows)
            left = [row for row in range(num_rows) if row not in is_picked]
            rest = upload(np.array(left, np.int64), product.device)
            index = upload(np.array(picked.rows, np.int64), product.device)
        chosen = product if rest is None else product.index_select(0, index)
        parts = self._collectives.gather(self._best(finish(chosen.float()), picked))
        whole = None if rest is None else self._whole(product.index_select(0, rest), finish)
        if parts is None:
            return product
        width = self._shard.count * length  # the last ranks may have spare places
        rows = torch.full((len(chosen), width), -torch.inf, device=product.device)
        token_ids, bits = torch.stack(parts).unbind(-1)  # [ranks, n, candidates] each
        places = token_ids.transpose(0, 1).reshape(len(chosen), -1).to(torch.int64)
        rows.scatter_(1, places, bits.transpose(0, 1).reshape_as(places).view(torch.float32))
        rows = rows[:, : self._vocab_size]
        if rest is None or whole is None:
            return rows
        joined = rows.new_empty((num_rows, self._vocab_size))
        return joined.index_copy_(0, index, rows).index_copy_(0, rest, whole)

    @property
    def _collectives(self) -> Collectives:
        found = self._shard.collectives
        assert found is not None, "a whole vocabulary needs no joining"
        return found

    def _best(self, logits: Tensor, picked: PickedRows) -> Tensor:
        """Return this rank's best tokens and their logits' bits: int32 [n, candidates, 2]."""
        length = logits.shape[1]
        first, end = self._shard.span(self._vocab_size)
        if end - first < length:
            logits[:, end - first :] = -torch.inf
        begin = self._shard.rank * length
        token_ids = torch.arange(begin, begin + length, device=logits.device)
        best = top_tokens(
            logits, picked.sampling(logits.device), min(_NUM_CANDIDATES, length), ids=token_ids
        ).token_ids
        values = logits.gather(1, best - begin)
        return torch.stack((best.to(torch.int32), values.view(torch.int32)), dim=-1)

    def _whole(self, product: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Gather all logits; see `joined`."""
        if not product.numel():
            return torch.empty((0, self._vocab_size), device=product.device)
        parts = self._collectives.gather(product)
        if parts is None:
            return product
        length, left = product.shape[1], self._vocab_size
        real = []
        for part in parts:
            real.append(part[:, : min(length, left)])
            left -= real[-1].shape[1]
        return finish(torch.cat(real, 1).float())
