"""Passes of a decoder made by hand, for tests: slices, trees, their slots and masks."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.recurrent_lines import RecurrentPool, RecurrentSizes
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.protocol import CausalModel, ForwardOutput
from outrider.engine.model.recurrent_cache import RecurrentCache
from outrider.engine.passes.recurrent_plan import RecurrentPlanner, RecurrentRows
from outrider.kernels.attention.paged_attention import AttentionBatch
from outrider.kernels.kv.compact_kv import compact_kv

BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_TOKENS = 41


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One sequence's part of a pass."""

    token_ids: Tensor
    num_computed: int  # keys in the cache before these rows
    block_table: list[int]
    tree_start: int | None = None
    masks: list[int] | None = None
    depths: list[int] | None = None


def tree_rows(nodes: Tensor, block_table: list[int], *, start: int, first: int = 0) -> "Rows":
    """The nodes of `PARENTS` from number `first` on, of a tree whose root is slot `start`."""
    paths = [ancestors_of(node) for node in range(first, first + len(nodes))]
    return Rows(
        token_ids=nodes,
        num_computed=start + first,
        block_table=block_table,
        tree_start=start,
        masks=[sum(1 << node for node in path) for path in paths],
        depths=[len(path) - 1 for path in paths],
    )


def run(
    model: CausalModel,
    cache: KVCache,
    *sequences: Rows,
    rows: Tensor | None = None,
    logits_out: Tensor | None = None,
    taps: tuple[int, ...] = (),
    features: Tensor | None = None,
) -> ForwardOutput:
    """One pass over the rows of all sequences; `rows`: which get logits, all by default.

    features: of all rows, for models that read some.
    """
    indptr, kv_lens, positions, slots = [0], [], [], []
    recurrent: list[RecurrentRows] = []
    for sequence in sequences:
        count = len(sequence.token_ids)
        first = sequence.num_computed
        indptr.append(indptr[-1] + count)
        kv_lens.append(first + count)
        logical = range(first, first + count)
        table = sequence.block_table
        if model.config.recurrence is not None:
            recurrent.append(_recurrent_rows(model, cache, sequence, indptr[-2]))
        slots += [table[s // BLOCK_SIZE] * BLOCK_SIZE + s % BLOCK_SIZE for s in logical]
        if sequence.depths is None:
            positions += list(logical)
        else:
            assert sequence.tree_start is not None
            positions += [sequence.tree_start + depth for depth in sequence.depths]
    batch = AttentionBatch(
        query_indptr=indptr,
        kv_lens=kv_lens,
        block_tables=[sequence.block_table for sequence in sequences],
        tree_starts=[
            kv_len if sequence.tree_start is None else sequence.tree_start
            for kv_len, sequence in zip(kv_lens, sequences, strict=True)
        ],
        ancestor_masks=[sequence.masks for sequence in sequences],
    )
    return model.forward(
        torch.cat([sequence.token_ids for sequence in sequences]).to(model.device),
        torch.tensor(positions, device=model.device),
        torch.tensor(slots, device=model.device),
        model.plan_attention(batch, block_size=BLOCK_SIZE),
        cache,
        None if rows is None else rows.to(model.device),
        logits_out=logits_out,
        taps=taps,
        features=features,
        recurrent=_states[cache].planner.plan(recurrent, indptr[-1]) if recurrent else None,
    )


@dataclass(frozen=True, kw_only=True)
class _States:
    """What recurrent layers keep beside a cache; views by their first block."""

    cache: RecurrentCache
    pool: RecurrentPool
    planner: RecurrentPlanner
    views: dict[int, KVView]


_states: WeakKeyDictionary[KVCache, _States] = WeakKeyDictionary()


def _states_of(model: CausalModel, cache: KVCache) -> _States:
    config, sizes = model.config, RecurrentSizes(num_lines=16, num_checkpoints=0)
    assert config.recurrence is not None
    states = RecurrentCache(
        config.recurrence,
        num_layers=config.num_recurrent_layers,
        num_lines=sizes.num_lines,
        num_states=sizes.num_states,
        num_blocks=cache.num_blocks,
        dtype=model.dtype,
        device=model.device,
    )
    return _States(
        cache=states,
        pool=RecurrentPool(sizes, block_size=BLOCK_SIZE),
        planner=RecurrentPlanner(
            states, num_taps=config.recurrence.num_taps, block_size=BLOCK_SIZE
        ),
        views={},
    )


def _recurrent_rows(
    model: CausalModel, cache: KVCache, sequence: Rows, first_row: int
) -> RecurrentRows:
    if cache not in _states:
        _states[cache] = _states_of(model, cache)
    states, table = _states[cache], sequence.block_table
    if table[0] not in states.views:
        pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        view = states.views[table[0]] = KVView(pool, root=b"", recurrent=states.pool)
        view.block_table = table
        assert view.line is not None
        view.line.hold()
    first = sequence.num_computed
    return RecurrentRows(
        view=states.views[table[0]],
        first_row=first_row,
        slots=range(first, first + len(sequence.token_ids)),
        tree_start=sequence.tree_start,
        masks=sequence.masks,
    )


def move(cache: KVCache, sources: list[int], destinations: list[int]) -> None:
    """Move what slots hold, as behind an accepted path."""
    both = torch.tensor(sources), torch.tensor(destinations)
    compact_kv(cache.groups[0].tensor, *both)
    if cache in _states:
        _states[cache].cache.move(*both, BLOCK_SIZE)


def new_cache(model: CausalModel, dtype: torch.dtype | None = None) -> KVCache:
    return KVCache(
        model.config,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=dtype or model.dtype,
        device=model.device,
    )


def make_table(seed: int) -> list[int]:
    """Blocks in no order, disjoint for seeds 0 to 3."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)) + 16 * seed
    return [int(block) for block in order]


def make_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 131, (count,), generator=torch.Generator().manual_seed(seed))


PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 0, 7, 9, 10, 11, 12]  # depth up to 9


def ancestors_of(node: int) -> list[int]:
    """The path from the root to the node."""
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


def hf_logits(hf: PreTrainedModel, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = hf(token_ids[None]).logits[0]
    return logits


def hf_taps(hf: PreTrainedModel, token_ids: Tensor, taps: tuple[int, ...]) -> Tensor:
    """[num_rows, number of taps * hidden_size]."""
    with torch.inference_mode():
        states = hf(token_ids[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in taps], dim=-1)


def assert_equal_logits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() < 1e-4
