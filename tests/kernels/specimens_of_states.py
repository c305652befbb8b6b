"""Launches of recurrent layers."""

from functools import partial

import torch

from outrider.kernels.recurrent.delta_rows import (
    DeltaBatch,
    DeltaInputs,
    RowContributions,
    delta_rows,
)
from outrider.kernels.recurrent.fold_states import StateFolds, fold_states
from tests.kernels.specimen import Specimen, integers

_LINE_ROWS = 192
_NUM_STATES = 16
# (key heads, value heads): of Qwen3-Next and Qwen 3.5, and of small ones.
_HEADS = ((16, 32), (16, 16))
_SIZE = 128


def _rows(groups: int, heads: int) -> RowContributions:
    return RowContributions(
        keys=torch.empty(_LINE_ROWS * 4 + 1, groups, _SIZE),
        deltas=torch.empty(_LINE_ROWS * 4 + 1, heads, _SIZE),
        decays=torch.empty(_LINE_ROWS * 4 + 1, heads),
    )


def _delta(groups: int, heads: int, sequences: int, rows: int, prior: int) -> None:
    count = sequences * rows
    delta_rows(
        DeltaInputs(
            query=torch.empty(count, groups, _SIZE),
            key=torch.empty(count, groups, _SIZE),
            value=torch.empty(count, heads, _SIZE),
            beta=torch.empty(count, heads),
            log_decay=torch.empty(count, heads),
        ),
        _rows(groups, heads),
        torch.empty(_NUM_STATES, heads, _SIZE, _SIZE),
        DeltaBatch(
            rows=integers(sequences, rows),
            writes=integers(sequences, rows),
            prior=integers(sequences, prior),
            parent=integers(sequences, rows),
            sees_prior=torch.empty(sequences, rows, prior, dtype=torch.bool),
            sees_own=torch.empty(sequences, rows, rows, dtype=torch.bool),
            states=integers(sequences),
        ),
        torch.empty(count + 1, heads, _SIZE),
    )


def _fold(groups: int, heads: int) -> None:
    fold_states(
        _rows(groups, heads),
        torch.empty(_NUM_STATES, heads, _SIZE, _SIZE),
        StateFolds(
            sources=integers(2),
            targets=integers(2),
            rows=integers(2, 64),
            behind=(integers(0), integers(0)),
        ),
    )


STATES = (
    *(
        Specimen(
            stem="delta_rows",
            name=f"{rows} rows of {sequences}, {groups} and {heads} heads",
            run=partial(_delta, groups, heads, sequences, rows, prior),
        )
        for groups, heads in _HEADS
        for sequences, rows, prior in ((4, 1, 63), (1, 17, 40), (1, 64, 63))
    ),
    *(
        Specimen(
            stem="fold_states",
            name=f"{groups} and {heads} heads",
            run=partial(_fold, groups, heads),
        )
        for groups, heads in _HEADS
    ),
)
