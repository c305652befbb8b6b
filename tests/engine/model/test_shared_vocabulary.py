"""Rows that are chosen from the ranks' best tokens get the token that whole rows would."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.model.shard import Shard
from outrider.engine.model.shared_vocabulary import PickedRows, SharedVocabulary
from outrider.kernels.sampling.gumbel_noise import row_key
from outrider.kernels.sampling.sample import top_tokens
from outrider.kernels.sampling.sampling_rows import field_stride


class InTurn:
    """`Collectives` of ranks that run one after the other, rank 0 as the last."""

    def __init__(self) -> None:
        self.sent: list[list[Tensor]] = []

    def of(self, rank: int) -> "_Rank":
        return _Rank(self, rank)


class _Rank:
    def __init__(self, all_ranks: InTurn, rank: int) -> None:
        self._all, self._rank, self._number = all_ranks, rank, 0

    def sum(self, rows: Tensor, *, in_order: bool) -> Tensor:
        raise AssertionError("nothing is summed")

    def gather(self, rows: Tensor) -> list[Tensor] | None:
        if self._number == len(self._all.sent):
            self._all.sent.append([])
        parts = self._all.sent[self._number]
        parts.insert(0, rows)
        self._number += 1
        return parts if self._rank == 0 else None


def joined(
    logits: Tensor, count: int, picked: PickedRows | None, exchanges: InTurn | None = None
) -> Tensor:
    exchanges = exchanges or InTurn()
    vocab_size = logits.shape[1]
    length = Shard(rank=0, count=count).length(vocab_size)
    spare = torch.full((len(logits), count * length - vocab_size), 9.0)  # it must not be chosen
    parts = torch.cat((logits, spare), 1).split(length, 1)
    result = logits
    for rank in reversed(range(count)):
        shard = Shard(rank=rank, count=count, collectives=exchanges.of(rank))
        shared = SharedVocabulary(torch.empty(0), shard, vocab_size=vocab_size)
        result = shared.joined(parts[rank], lambda rows: rows.mul_(0.5), picked)
    return result


def words_of(temperatures: list[float]) -> Tensor:
    count = len(temperatures)
    words = torch.zeros(PickedRows.num_words(count), dtype=torch.int32)
    words[:count] = torch.tensor(temperatures).view(torch.int32)
    keys = [row_key(3, 0, position) for position in range(count)]
    words[field_stride(count) :] = torch.tensor(keys, dtype=torch.int32).view(-1)
    return words


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 8),
    vocab_size=st.integers(5, 140),
    temperatures=st.lists(st.sampled_from([0.0, 0.4, 1.0, 3.0]), min_size=1, max_size=5),
    has_ties=st.booleans(),
)
def test_tokens_are_those_of_whole_rows(
    seed: int, count: int, vocab_size: int, temperatures: list[float], has_ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(temperatures) + 2, vocab_size, generator=generator)
    if has_ties:
        logits = logits.round()
    picked_rows = list(range(1, 1 + len(temperatures)))  # the first and the last are whole
    is_greedy = not any(temperatures)
    picked = PickedRows(rows=picked_rows, words=None if is_greedy else words_of(temperatures))
    found = joined(logits, count, picked)
    right = joined(logits, count, None)
    assert torch.equal(right, logits * 0.5)
    assert torch.equal(found[[0, -1]], right[[0, -1]])
    sampling = picked.sampling(logits.device)
    assert torch.equal(
        top_tokens(found[1:-1], sampling, 1).token_ids,
        top_tokens(right[1:-1], sampling, 1).token_ids,
    )
    known = found[1:-1] > -torch.inf
    assert torch.equal(found[1:-1][known], right[1:-1][known])


def test_what_is_gathered_does_not_grow_with_the_vocabulary() -> None:
    logits = torch.randn(3, 1000)
    some, all_rows = InTurn(), InTurn()
    joined(logits, 2, PickedRows(rows=[0, 1, 2]), some)
    joined(logits, 2, None, all_rows)
    assert sum(part.nbytes for parts in some.sent for part in parts) == 2 * 3 * 4 * 8
    assert sum(part.nbytes for parts in all_rows.sent for part in parts) == 3 * 1000 * 4
