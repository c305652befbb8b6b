"""Launches around the layers: rows of a pass, tokens, trees."""

from functools import partial

import torch

from outrider.kernels.attention.stage_rows import (
    PassInputs,
    TreeRows,
    stage_rows,
    tree_paths,
)
from outrider.kernels.sampling.gumbel_noise import gumbel_noise
from outrider.kernels.sampling.penalties import apply_penalties
from outrider.kernels.sampling.sample import SamplingRows, perturb, top_tokens
from outrider.kernels.sampling.sampling_rows import SamplingTable
from outrider.kernels.sampling.truncation_floor import truncation_floor
from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.kernels.trees.choose_frontier import choose_frontier
from outrider.kernels.trees.expand_tree import EdgeTable, expand_tree
from outrider.kernels.trees.parent_rows import keep_rows, parent_rows
from outrider.kernels.trees.select_trees import select_trees
from outrider.kernels.trees.tree_state import TreeState
from outrider.kernels.trees.verify_tree import verify_tree
from tests.kernels.specimen import (
    BF16,
    BLOCK_SIZE,
    FP16,
    FP32,
    I32,
    NUM_ROWS,
    VOCAB_SIZE,
    Specimen,
    integers,
)


def _pass_inputs(num_rows: int, batch: int, *, has_own_words: bool) -> PassInputs:
    words = integers(num_rows, MASK_WORDS)
    first_keys = integers(batch, dtype=I32)
    return PassInputs(
        token_ids=integers(num_rows),
        positions=integers(num_rows),
        slots=integers(num_rows),
        ancestor_words=words,
        full_words=integers(num_rows, MASK_WORDS) if has_own_words else words,
        row_begins=integers(num_rows, dtype=I32),
        row_ends=integers(num_rows, dtype=I32),
        row_tree_starts=integers(num_rows, dtype=I32),
        row_starts=integers(batch, dtype=I32),
        num_rows=integers(batch, dtype=I32),
        kv_lens=integers(batch, dtype=I32),
        first_keys=first_keys,
        tree_starts=integers(batch, dtype=I32),
        block_indptr=integers(batch, dtype=I32),
        block_ids=integers(4096, dtype=I32),
    )


def _stage_rows(window: int | None, num_words: int) -> None:
    batch = 4
    rows = TreeRows(
        token_ids=integers(NUM_ROWS),
        positions=integers(NUM_ROWS),
        logical_slots=integers(NUM_ROWS),
        sequence_index=integers(NUM_ROWS),
        ancestor_words=integers(NUM_ROWS, num_words),
        row_starts=integers(batch, dtype=I32),
        num_rows=integers(batch, dtype=I32),
        tree_starts=integers(batch, dtype=I32),
        kv_lens=integers(batch, dtype=I32),
    )
    inputs = _pass_inputs(NUM_ROWS, 8, has_own_words=window is not None)
    stage_rows(rows, inputs, block_size=BLOCK_SIZE, window=window)


_PASSES = (
    *(
        Specimen(
            stem="stage_rows",
            name=f"window {window}, {words} words",
            run=partial(_stage_rows, window, words),
        )
        for window, words in ((None, 4), (None, 1), (128, 4))
    ),
    Specimen(
        stem="stage_rows",
        name="paths",
        run=lambda: tree_paths(
            integers(NUM_ROWS, MASK_WORDS),
            integers(NUM_ROWS, dtype=I32),
            integers(NUM_ROWS, MAX_TREE_NODES, dtype=I32),
        ),
    ),
)


# ---- tokens -------------------------------------------------------------------------------------


def _table(num_sequences: int, num_depths: int) -> SamplingTable:
    return SamplingTable(
        parameters=integers(4, num_sequences, dtype=I32),
        noise_keys=integers(num_sequences, num_depths, 2, dtype=I32),
        has_sampled=True,
        has_truncation=True,
    )


def _rows(num_rows: int, *, truncates: bool, is_sampled: bool = True) -> SamplingRows:
    return SamplingRows(
        temperature=torch.empty(num_rows),
        top_k=integers(num_rows, dtype=I32),
        top_p=torch.empty(num_rows),
        min_p=torch.empty(num_rows),
        noise_keys=integers(num_rows, 2, dtype=I32),
        has_sampled=is_sampled,
        has_truncation=truncates,
    )


def _top(
    vocab_size: int,
    number: int,
    *,
    is_sampled: bool,
    truncates: bool,
    with_probs: bool,
    has_ids: bool = False,
) -> None:
    rows = _rows(NUM_ROWS, truncates=truncates, is_sampled=is_sampled)
    top_tokens(
        torch.empty(NUM_ROWS, vocab_size),
        rows,
        number,
        with_probs=with_probs,
        ids=integers(vocab_size) if has_ids else None,
    )


def _verify(num_nodes: int, num_trees: int, max_depth: int) -> None:
    columns = [integers(num_nodes) for _ in range(5)]
    verify_tree(*columns, num_trees=num_trees, max_depth=max_depth)


def _penalise(num_cells: int, num_overrides: int, *, has_factors: bool) -> None:
    apply_penalties(
        torch.empty(4, VOCAB_SIZE),
        integers(num_cells),
        torch.empty(num_cells),
        torch.empty(num_cells) if has_factors else None,
        num_overrides=num_overrides,
    )


_TOKENS = (
    *(
        Specimen(
            stem="penalties",
            name=f"{cells} cells, {overrides} override{', factors' if has_factors else ''}",
            run=partial(_penalise, cells, overrides, has_factors=has_factors),
        )
        for cells, overrides, has_factors in ((1024, 16, True), (333, 0, False))
    ),
    *(
        Specimen(
            stem="gumbel_noise",
            name=f"{size} tokens",
            run=partial(gumbel_noise, integers(NUM_ROWS, 2, dtype=I32), size),
        )
        for size in (VOCAB_SIZE, 32003)
    ),
    Specimen(
        stem="sampling_rows",
        name="a forest's rows",
        run=lambda: _table(4, 17).rows(integers(NUM_ROWS), integers(NUM_ROWS)),
    ),
    *(
        Specimen(
            stem="sample",
            name=f"{number} of {vocab_size}, {kind}",
            run=partial(
                _top,
                vocab_size,
                number,
                is_sampled=kind != "greedy",
                truncates=kind == "truncated",
                with_probs=number > 1,
            ),
            is_long=is_long,
        )
        for vocab_size, number, kind, is_long in (
            (VOCAB_SIZE, 1, "greedy", False),
            (VOCAB_SIZE, 3, "sampled", False),
            (VOCAB_SIZE, 1, "truncated", False),
            (32003, 8, "truncated", False),
            (VOCAB_SIZE, 3, "greedy", True),
            (VOCAB_SIZE, 8, "sampled", True),
            (VOCAB_SIZE, 1, "sampled", True),
            (512, 3, "truncated", True),
        )
    ),
    *(
        Specimen(
            stem="sample",
            name=f"3 of 32000 of a larger vocabulary, {kind}",
            run=partial(
                _top,
                32000,
                3,
                is_sampled=kind != "greedy",
                truncates=False,
                with_probs=True,
                has_ids=True,
            ),
        )
        for kind in ("greedy", "sampled")
    ),
    *(
        Specimen(
            stem="sample",
            name=f"whole rows{', no noise' if not with_noise else ''}",
            run=partial(
                perturb,
                torch.empty(NUM_ROWS, VOCAB_SIZE),
                _rows(NUM_ROWS, truncates=True),
                with_noise=with_noise,
            ),
        )
        for with_noise in (True, False)
    ),
    *(
        Specimen(
            stem="truncation_floor",
            name=f"{size} tokens",
            run=lambda size=size: truncation_floor(
                torch.empty(NUM_ROWS, size), _rows(NUM_ROWS, truncates=True)
            ),
        )
        for size in (VOCAB_SIZE, 32003)
    ),
    *(
        Specimen(
            stem="verify_tree",
            name=f"{trees} of {nodes}, depth {depth}",
            run=partial(_verify, nodes, trees, depth),
        )
        for nodes, trees, depth in ((64, 1, 8), (2048, 32, 17), (256, 1, 255))
    ),
)


# ---- trees --------------------------------------------------------------------------------------


def _state(num_sequences: int, capacity: int, width: int) -> TreeState:
    return TreeState(
        candidates=integers(num_sequences, 13, capacity, dtype=I32),
        numbers=integers(num_sequences, 8, dtype=I32),
        ancestor_words=integers(num_sequences, capacity, MASK_WORDS),
        frontier=integers(num_sequences, width, dtype=I32),
        sequence_index=integers(num_sequences * width),
        row_starts=integers(num_sequences, dtype=I32),
        root_slots=integers(num_sequences, dtype=I32),
    )


def _edge_table() -> EdgeTable:
    return EdgeTable(
        shifts=torch.empty(2, 32, 6, 15),
        bin_edges=torch.empty(14),
        depth_edges=integers(5, dtype=I32),
        least=0.001,
        most=0.999,
        model_bit=1,
    )


def _expand(capacity: int, width: int, branching: int, rows: int) -> None:
    guesses = (integers(4 * rows, branching), torch.empty(4 * rows, branching))
    expand_tree(_state(4, capacity, width), *guesses, _edge_table(), min_path_prob=0.02)


def _choose(capacity: int, width: int, *, is_stepwise: bool = False) -> None:
    choose_frontier(
        _state(4, capacity, width),
        min_path_prob=0.02,
        most_believed=0.7,
        is_stepwise=is_stepwise,
    )


def _parents(capacity: int, width: int, hidden_size: int, dtype: torch.dtype) -> None:
    rows = torch.empty(4, 1 + 8 * width, hidden_size, dtype=dtype)
    state = _state(4, capacity, width)
    keep_rows(state, parent_rows(state, rows), rows)


def _select(capacity: int) -> None:
    select_trees(_state(4, capacity, 4), num_nodes=64, caps=[64] * 4)


_CAPACITIES = (64, 128, 256, 512, 1024)
_COMMON_CAPACITIES = (64, 256, 1024)

_TREES = (
    *(
        Specimen(
            stem="expand_tree",
            name=f"{capacity} candidates, {rows} of {width} rows, {branching} children",
            run=partial(_expand, capacity, width, branching, rows),
            is_long=width != 4 or capacity not in _COMMON_CAPACITIES,
        )
        for capacity in _CAPACITIES
        for width, branching, rows in ((4, 3, 4), (4, 3, 1), (16, 8, 16), (64, 8, 64))
    ),
    *(
        Specimen(
            stem="choose_frontier",
            name=f"{capacity} candidates, {width} rows",
            run=partial(_choose, capacity, width),
            is_long=width != 4 or capacity not in _COMMON_CAPACITIES,
        )
        for capacity in _CAPACITIES
        for width in (1, 4, 16, 64)
    ),
    *(
        Specimen(
            stem="choose_frontier",
            name=f"{capacity} candidates, 4 rows, stepwise",
            run=partial(_choose, capacity, 4, is_stepwise=True),
            is_long=capacity not in _COMMON_CAPACITIES,
        )
        for capacity in _CAPACITIES
    ),
    *(
        Specimen(
            stem="parent_rows",
            name=f"{capacity} candidates, 4 rows of {hidden_size} {dtype}",
            run=partial(_parents, capacity, 4, hidden_size, dtype),
            is_long=capacity != 256,
        )
        for capacity in _COMMON_CAPACITIES
        for hidden_size, dtype in ((4096, BF16), (2880, BF16), (896, FP16), (896, FP32))
    ),
    *(
        Specimen(
            stem="select_trees",
            name=f"{capacity} candidates",
            run=partial(_select, capacity),
            is_long=capacity not in _COMMON_CAPACITIES,
        )
        for capacity in _CAPACITIES
    ),
)


AROUND_LAYERS = (*_PASSES, *_TOKENS, *_TREES)
