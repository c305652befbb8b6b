"""Fold the rows since a sequence's state into its next state."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.recurrent.delta_rows import RowContributions
from outrider.kernels.triton_support import (
    dot,
    jit,
    launch,
    next_power_of_2,
    tl,
    triton,
    uses_triton,
)

_VALUE_BLOCK = 16
_ROW_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolds:
    """New states of f sequences."""

    sources: Tensor
    """int64 [f]."""
    targets: Tensor
    """int64 [f]; no target is another's source."""
    rows: Tensor
    """int64 [f, m], the cached rows between a state and the next, in order."""
    behind: tuple[Tensor, Tensor]
    """(rows, folds), int64 [any] each: rows that lie behind a new state, and whose it is. Their
    decays count from there afterwards."""


def fold_states_reference(rows: RowContributions, states: Tensor, folds: StateFolds) -> None:
    """The states of `fold_states` in torch."""
    keys = rows.keys[folds.rows]  # [f, m, groups, key_dim]
    ratio = states.shape[1] // keys.shape[2]
    decays = rows.decays[folds.rows]  # [f, m, heads]
    shares = (decays[:, -1:] - decays).exp_().transpose(1, 2)[..., None]  # [f, heads, m, 1]
    deltas = rows.deltas[folds.rows].transpose(1, 2) * shares  # [f, heads, m, value_dim]
    by_group = torch.unflatten(deltas, 1, (-1, ratio))
    added = torch.matmul(keys.permute(0, 2, 3, 1)[:, :, None], by_group).flatten(1, 2)
    kept = states[folds.sources] * decays[:, -1].exp()[..., None, None]
    states.index_copy_(0, folds.targets, kept.add_(added))


@jit
def _fold_states_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    keys,
    deltas,
    decays,
    states,
    sources,
    targets,
    fold_rows,
    num_rows,
    RATIO: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """Program (i, h, j): fold i, value head h, columns j * VALUE_BLOCK and so on."""
    fold = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    group = head // RATIO
    num_groups = num_heads // RATIO
    features = tl.arange(0, KEY_BLOCK)
    columns = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_key = features < KEY_DIM
    in_value = columns < VALUE_DIM
    is_state = in_key[:, None] & in_value[None, :]
    places = head * KEY_DIM * VALUE_DIM + features[:, None] * VALUE_DIM + columns[None, :]
    state_size = num_heads * KEY_DIM * VALUE_DIM
    source = tl.load(sources + fold)
    target = tl.load(targets + fold)
    last = tl.load(fold_rows + fold * num_rows + num_rows - 1)
    total = tl.load(decays + last * num_heads + head)
    state = tl.load(states + source * state_size + places, mask=is_state, other=0.0)
    state = state * tl.exp(total)
    for first in range(0, num_rows, ROW_BLOCK):
        number = first + tl.arange(0, ROW_BLOCK)
        is_row = number < num_rows
        row = tl.load(fold_rows + fold * num_rows + number, mask=is_row, other=0)
        decay = tl.load(decays + row * num_heads + head, mask=is_row, other=0.0)
        key = tl.load(
            keys + (row * num_groups + group)[None, :] * KEY_DIM + features[:, None],
            mask=in_key[:, None] & is_row[None, :],
            other=0.0,
        )  # [KEY_BLOCK, ROW_BLOCK]
        delta = tl.load(
            deltas + (row * num_heads + head)[:, None] * VALUE_DIM + columns[None, :],
            mask=is_row[:, None] & in_value[None, :],
            other=0.0,
        )
        state = dot(key, delta * tl.exp(total - decay)[:, None], state)
    tl.store(states + target * state_size + places, state, mask=is_state)


def fold_states(rows: RowContributions, states: Tensor, folds: StateFolds) -> None:
    """Write the states behind each fold's rows; count the decays behind them from there.

    `states`: float32 [any, num_value_heads, key_dim, value_dim], read and written.
    """
    if uses_triton(states):
        _, num_heads, key_dim, value_dim = states.shape
        value_block = min(_VALUE_BLOCK, max(next_power_of_2(value_dim), 16))
        launch(
            _fold_states_kernel,
            (len(folds.sources), num_heads, triton.cdiv(value_dim, value_block)),
            rows.keys,
            rows.deltas,
            rows.decays,
            states,
            folds.sources,
            folds.targets,
            folds.rows,
            folds.rows.shape[1],
            num_warps=4,
            num_stages=1,
            RATIO=num_heads // rows.keys.shape[1],
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_BLOCK=max(next_power_of_2(key_dim), 16),
            VALUE_BLOCK=value_block,
            ROW_BLOCK=_ROW_BLOCK,
        )
    else:
        fold_states_reference(rows, states, folds)
    behind, fold_of = folds.behind
    if len(behind):
        before = rows.decays[folds.rows[fold_of, -1]]  # [any, heads]
        rows.decays.index_copy_(0, behind, rows.decays[behind] - before)
