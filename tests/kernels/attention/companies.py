"""Rows in company, and the path that a row sees by itself."""

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.kernels.attention.attention_plan import AttentionBatch
from outrider.kernels.attention.ordered_plan import SPLIT_KEYS
from tests.kernels.layers.bits import same_bits, torch_threads


def chain(kv_len: int, num_rows: int, table: list[int]) -> AttentionBatch:
    return AttentionBatch(
        query_indptr=[0, num_rows],
        kv_lens=[kv_len],
        block_tables=[table],
        tree_starts=[kv_len],
        ancestor_masks=[None],
    )


def path_of(batch: AttentionBatch, index: int, row: int) -> list[int]:
    """The cache slots that a row sees, by position (blocks of one slot)."""
    table, tree_start = batch.block_tables[index], batch.tree_starts[index]
    masks = batch.ancestor_masks[index]
    if masks is None:
        num_rows = batch.query_indptr[index + 1] - batch.query_indptr[index]
        return table[: batch.kv_lens[index] - num_rows + row + 1]
    ancestors = [j for j in range(masks[row].bit_length()) if masks[row] >> j & 1]
    return table[:tree_start] + [table[tree_start + j] for j in ancestors]


def company(seed: int, *, num_blocks: int = 900) -> AttentionBatch:
    """A tree of 64 nodes, chunks of several lengths, single rows; blocks of one slot."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(num_blocks, generator=generator).tolist()
    masks = [1]
    for node in range(1, 64):
        parent = int(torch.randint(max(0, node - 9), node, (1,), generator=generator))
        masks.append(masks[parent] | 1 << node)
    indptr, kv_lens, tables, starts = [0], [], [], []
    pieces: list[tuple[int, list[int] | None]] = [
        (0, None), (37, None), (63, masks), (100, None), (31, masks[:1]), (32, masks[20:40]),
        (5, None), (SPLIT_KEYS - 1, None), (SPLIT_KEYS, None),
    ]  # fmt: skip
    num_rows = [1, 5, 64, 70, 1, 20, 0, 1, 1]
    for (prefix, nodes), count in zip(pieces, num_rows, strict=True):
        kv_len = prefix + (40 if nodes is not None and len(nodes) == 20 else count)
        tables.append(blocks[:kv_len])
        blocks = blocks[kv_len:]
        indptr.append(indptr[-1] + count)
        kv_lens.append(kv_len)
        starts.append(kv_len if nodes is None else prefix)
    return AttentionBatch(
        query_indptr=indptr,
        kv_lens=kv_lens,
        block_tables=tables,
        tree_starts=starts,
        ancestor_masks=[nodes for _, nodes in pieces],
    )


Attend = Callable[[AttentionBatch, Tensor, Tensor], Tensor]
"""Attention of a batch's rows: queries, and both caches [2, num_blocks, 1, num_kv_heads, head_dim].
"""


def alone(
    attend: Attend, batch: AttentionBatch, index: int, row: int, query: Tensor, caches: Tensor
) -> Tensor:
    """The row at the end of a chain of its ancestors, which lie elsewhere in the cache."""
    path = path_of(batch, index, row)
    moved = torch.zeros_like(caches[:, :1]).repeat(1, len(path) + 3, 1, 1, 1)
    moved[:, 3:] = caches[:, path]
    start = batch.query_indptr[index] + row
    table = list(range(3, len(path) + 3))
    return attend(chain(len(path), 1, table), query[start : start + 1].clone(), moved)


def assert_rows_as_alone(
    attend: Attend,
    batch: AttentionBatch,
    query: Tensor,
    caches: Tensor,
    *,
    every: int,
    threads: int,
) -> None:
    """In company a row has the bits that it has alone; `every` so many rows are looked at."""
    with torch_threads(threads):
        together = attend(batch, query, caches)
    places = [
        (index, row)
        for index in range(len(batch.kv_lens))
        for row in range(batch.query_indptr[index + 1] - batch.query_indptr[index])
    ]
    for number, (index, row) in list(enumerate(places))[::every]:
        expected = alone(attend, batch, index, row, query, caches)
        assert same_bits(together[number : number + 1], expected), (index, row)


def assert_no_neighbour_is_read(attend: Attend, query: Tensor, caches: Tensor) -> None:
    """What a tree's rows and keys hold reaches no other row of `company(0)`, however large."""
    batch = company(0)
    clean = attend(batch, query, caches)
    caches[:, batch.block_tables[2][63:]] = float("inf")  # the tree
    query[6:70] = float("nan")
    spoilt = attend(batch, query, caches)
    others = torch.ones(len(query), dtype=torch.bool)
    others[6:70] = False
    assert same_bits(spoilt[others], clean[others])
    assert spoilt[6:70].isnan().all()
