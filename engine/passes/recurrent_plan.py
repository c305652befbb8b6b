"""Plans what recurrent layers compute for a pass's rows: ancestors, lines, states, folds."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.recurrent_lines import BOUNDARY, LINE_ROWS, RecurrentLine
from outrider.engine.model.recurrent_cache import RecurrentCache, RecurrentPass, RecurrentStep
from outrider.kernels.arrays import Ints64
from outrider.kernels.recurrent.delta_rows import DeltaBatch
from outrider.kernels.recurrent.fold_states import StateFolds
from outrider.kernels.recurrent.tree_conv import ConvPlan
from outrider.kernels.triton_support import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentRows:
    """A sequence's rows of a pass."""

    view: KVView
    first_row: int
    """Row `first_row + i` of the pass is that of slot `slots[i]`."""
    slots: Sequence[int]
    tree_start: int | None = None
    """The rows before this slot are text; None: all rows are."""
    masks: Sequence[int] | None = None
    """The slots that each row of a tree sees; bit j is slot `tree_start + j`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    source: int
    target: int
    rows: Ints64
    behind: Ints64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Rows that one batch computes for a sequence; see `DeltaBatch`."""

    rows: Ints64
    writes: Ints64
    prior: Ints64
    state: int
    parent: Ints64
    sees_prior: npt.NDArray[np.bool_]
    sees_own: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Work:
    folds: list[_Fold] = field(default_factory=list)
    segments: list[_Segment] = field(default_factory=list)


class RecurrentPlanner:
    """Plans the passes of one model; the views' states move on as it does."""

    def __init__(self, cache: RecurrentCache, *, num_taps: int, block_size: int) -> None:
        self._cache = cache
        self._num_far = num_taps - 1
        self._block_size = block_size
        self._device = cache.line_blocks.device
        self._known_blocks: Ints64 = np.full(len(cache.line_blocks), -1, dtype=np.int64)

    def plan(self, pieces: Iterable[RecurrentRows], num_rows: int) -> RecurrentPass:
        """Plan a pass of `num_rows` rows, all of which are in `pieces`."""
        by_view: dict[int, list[RecurrentRows]] = defaultdict(list)
        for piece in pieces:
            by_view[id(piece.view)].append(piece)
        pass_ = _PassPlan(self._cache, num_rows, self._num_far)
        blocks: dict[int, int] = {}
        for own in by_view.values():
            # Rows in front of a tree come with it in any order.
            own.sort(key=lambda piece: piece.slots[0])
            pass_.add(own)
            self._note_blocks(own[-1], blocks)
        self._set_blocks(blocks)
        return pass_.finish(self._device)

    def _note_blocks(self, piece: RecurrentRows, blocks: dict[int, int]) -> None:
        """Note the rows of the blocks that a tree's accepted path is moved between."""
        if piece.masks is None or piece.tree_start is None:
            return
        size, table = self._block_size, piece.view.block_table
        line = _line_of(piece)
        for index in range(piece.tree_start // size, min(max(piece.slots) // size + 1, len(table))):
            first = _line_row(line, index * size)
            if self._known_blocks[table[index]] != first:
                self._known_blocks[table[index]] = first
                blocks[table[index]] = first

    def _set_blocks(self, blocks: dict[int, int]) -> None:
        if blocks:
            both = torch.tensor([list(blocks), list(blocks.values())], device=self._device)
            self._cache.line_blocks.index_copy_(0, both[0], both[1])


class _PassPlan:
    """The plan of one pass as it is made, view by view."""

    def __init__(self, cache: RecurrentCache, num_rows: int, num_far: int) -> None:
        self._cache = cache
        self._num_rows = num_rows
        self._num_far = num_far
        self._works: list[_Work] = []
        self._taps: Ints64 = np.full((num_rows, num_far), -1, dtype=np.int64)
        self._kept_taps: Ints64 = np.full((num_rows, num_far), cache.zero_input, dtype=np.int64)
        self._kept: Ints64 = np.full(num_rows, cache.waste_input, dtype=np.int64)
        self._tails: list[tuple[int, int, int]] = []
        self._released: list[tuple[RecurrentLine, int]] = []
        self._folded = -1  # the step of the view's last fold

    def add(self, pieces: list[RecurrentRows]) -> None:
        """Add all pieces of one view, ascending."""
        line = _line_of(pieces[0])
        inputs = _Inputs(self._cache, line, pieces, self._num_far)
        inputs.write_taps(self._taps, self._kept_taps)
        first_tokens, step = line.num_tokens, 0
        self._folded = -1
        for piece in pieces:
            step = self._add_piece(line, piece, step)
        for piece in pieces:
            slots = np.asarray(piece.slots, dtype=np.int64)
            rows = _rows_of(line, slots)
            is_kept = slots >= line.num_tokens
            own = self._kept[piece.first_row : piece.first_row + len(slots)]
            own[is_kept] = rows[is_kept]
        if line.num_tokens > first_tokens:
            for place in range(self._num_far):
                row, kept = inputs.place(line.num_tokens - self._num_far + place)
                self._tails.append((row, kept, self._cache.tail(line.state, place)))

    def _add_piece(self, line: RecurrentLine, piece: RecurrentRows, step: int) -> int:
        """Add a piece's segments and the folds before them; returns the next free step."""
        slots = np.asarray(piece.slots, dtype=np.int64)
        start = int(slots[0]) if piece.tree_start is None else piece.tree_start
        assert start >= line.num_tokens, "rows before the state"
        while start >= line.num_tokens + BOUNDARY:
            step = self._fold(line, step, behind=start)
        if piece.masks is not None:
            for first in range(0, len(slots), BOUNDARY):  # a batch has no more rows than a text's
                self._work(step).segments.append(self._tree_segment(line, piece, slots, first))
                step += 1
            return step
        begin = 0
        while begin < len(slots):
            if slots[begin] >= line.num_tokens + BOUNDARY:
                step = self._fold(line, step, behind=int(slots[begin]))
            count = min(len(slots) - begin, line.num_tokens + BOUNDARY - int(slots[begin]))
            segment = self._text_segment(line, piece.first_row + begin, int(slots[begin]), count)
            self._work(step).segments.append(segment)
            begin += count
            step += 1
        return step

    def _fold(self, line: RecurrentLine, step: int, *, behind: int) -> int:
        """Fold a view's next rows in a step that has no other fold of it; returns that step."""
        begin = line.num_tokens
        source, target, is_released = line.fold()
        if is_released:
            self._released.append((line, source))
        fold = _Fold(
            source=source,
            target=target,
            rows=_line_rows(line, begin, begin + BOUNDARY),
            behind=_line_rows(line, begin + BOUNDARY, behind),
        )
        self._folded = step = max(step, self._folded + 1)
        self._work(step).folds.append(fold)
        return step

    def _work(self, step: int) -> _Work:
        while len(self._works) <= step:
            self._works.append(_Work())
        return self._works[step]

    def _text_segment(self, line: RecurrentLine, row: int, start: int, count: int) -> _Segment:
        prior = _line_rows(line, line.num_tokens, start)
        return _Segment(
            rows=np.arange(row, row + count),
            writes=_line_rows(line, start, start + count),
            prior=prior,
            state=line.state,
            parent=np.full(count, len(prior) - 1),
            sees_prior=np.ones((count, len(prior)), dtype=np.bool_),
            sees_own=np.tri(count, count, -1, dtype=np.bool_),
        )

    def _tree_segment(
        self, line: RecurrentLine, piece: RecurrentRows, slots: Ints64, begin: int
    ) -> _Segment:
        """Return a tree's rows from number `begin` on as a segment; `slots`: of all, ascending."""
        slots = slots[begin : begin + BOUNDARY]
        base, first = line.num_tokens, int(slots.min())
        start = piece.tree_start
        assert start is not None, "a tree begins somewhere"
        assert piece.masks is not None, "a tree's rows have masks"
        assert int(slots.max()) - base < LINE_ROWS, "a tree is larger than its line"
        masks = piece.masks[begin : begin + BOUNDARY]
        bits = _unpacked(masks, int(slots.max()) + 1 - start)  # [rows, slots of the tree]
        num_prior = first - base
        sees_prior = np.ones((len(slots), num_prior), dtype=np.bool_)
        sees_prior[:, start - base :] = bits[:, : first - start]
        sees_own = bits[:, slots - start]
        np.fill_diagonal(sees_own, val=False)
        # An ancestor's slot is below its descendants': the last one that is seen is the nearest.
        last = num_prior - 1 - sees_prior[:, ::-1].argmax(1) if num_prior else -1
        return _Segment(
            rows=piece.first_row + begin + np.arange(len(slots)),
            writes=_rows_of(line, slots),
            prior=_line_rows(line, base, first),
            state=line.state,
            parent=np.where(sees_prior.any(1), last, -1),
            sees_prior=sees_prior,
            sees_own=sees_own,
        )

    def finish(self, device: torch.device) -> RecurrentPass:
        """Put the plan on the device, and give back the states that it went on from."""
        for line, state in self._released:
            line.pool.states.release([state])
        tails = np.array(self._tails, dtype=np.int64).reshape(-1, 3)
        return RecurrentPass(
            cache=self._cache,
            conv=ConvPlan(
                taps=_upload(self._taps, device),
                kept_taps=_upload(self._kept_taps, device),
                kept=_upload(self._kept, device),
                tails=(
                    _upload(tails[:, 0], device),
                    _upload(tails[:, 1], device),
                    _upload(tails[:, 2], device),
                ),
            ),
            steps=tuple(
                RecurrentStep(
                    folds=_folds(work.folds, device) if work.folds else None,
                    batches=tuple(
                        _batch(segments, self._num_rows, self._cache.num_rows, device)
                        for segments in _by_size(work.segments)
                    ),
                )
                for work in self._works
            ),
        )


class _Inputs:
    """Where the convolution finds the inputs of a view's slots: in the pass, its line, its tail."""

    def __init__(
        self,
        cache: RecurrentCache,
        line: RecurrentLine,
        pieces: list[RecurrentRows],
        num_far: int,
    ) -> None:
        self._cache = cache
        self._line = line
        self._pieces = pieces
        self._num_far = num_far
        self._num_tokens, self._state = line.num_tokens, line.state  # before the pass
        self._row_of = {
            slot: piece.first_row + number
            for piece in pieces
            for number, slot in enumerate(piece.slots)
        }

    def place(self, slot: int) -> tuple[int, int]:
        """Return (row of the pass or -1, row of the cached inputs) of a slot."""
        row = self._row_of.get(slot)
        if row is not None:
            return row, self._cache.zero_input
        if slot < 0:
            return -1, self._cache.zero_input
        if slot >= self._num_tokens:
            return -1, _line_row(self._line, slot)
        return -1, self._cache.tail(self._state, slot - self._num_tokens + self._num_far)

    def write_taps(self, taps: Ints64, kept_taps: Ints64) -> None:
        """Write each row's ancestors, the parent last."""
        for piece in self._pieces:
            slots = piece.slots
            if piece.masks is None and len(slots) > self._num_far:
                slots = slots[: self._num_far]
                rows = np.arange(piece.first_row, piece.first_row + len(piece.slots) - len(slots))
                taps[rows + self._num_far] = rows[:, None] + np.arange(self._num_far)
            for number, slot in enumerate(slots):
                row = piece.first_row + number
                for tap, ancestor in enumerate(self._ancestors(piece, number, slot)):
                    taps[row, tap], kept_taps[row, tap] = self.place(ancestor)

    def _ancestors(self, piece: RecurrentRows, number: int, slot: int) -> list[int]:
        """Return the slots of a row's nearest ancestors, the parent last."""
        found: list[int] = []
        before = slot
        if piece.masks is not None and piece.tree_start is not None:
            mask = piece.masks[number] & ((1 << (slot - piece.tree_start)) - 1)
            while mask and len(found) < self._num_far:
                highest = mask.bit_length() - 1
                found.append(piece.tree_start + highest)
                mask ^= 1 << highest
            before = piece.tree_start
        found += range(before - 1, before - 1 - self._num_far + len(found), -1)
        return found[::-1]


def _line_of(piece: RecurrentRows) -> RecurrentLine:
    line = piece.view.line
    assert line is not None, "the view has no recurrent layers"
    return line


def _line_row(line: RecurrentLine, slot: int) -> int:
    """Return the cache's row of a line's slot."""
    assert line.number is not None, "the view has reserved nothing"
    return line.number * LINE_ROWS + slot % LINE_ROWS


def _rows_of(line: RecurrentLine, slots: Ints64) -> Ints64:
    return _line_row(line, 0) + slots % LINE_ROWS


def _line_rows(line: RecurrentLine, first: int, last: int) -> Ints64:
    return _rows_of(line, np.arange(first, last))


def _unpacked(masks: Sequence[int], num_bits: int) -> npt.NDArray[np.bool_]:
    """Return bits as columns: [masks, num_bits]."""
    num_bytes = -(-num_bits // 8)
    low = (1 << (8 * num_bytes)) - 1
    packed = b"".join((mask & low).to_bytes(num_bytes, "little") for mask in masks)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), num_bytes)
    return np.unpackbits(rows, axis=1, bitorder="little")[:, :num_bits].astype(np.bool_)


def _by_size(segments: list[_Segment]) -> list[list[_Segment]]:
    """Put segments of about as many rows together: few rows are padded, and few kinds exist."""
    found: dict[int, list[_Segment]] = defaultdict(list)
    for segment in segments:
        found[next_power_of_2(len(segment.rows))].append(segment)
    return list(found.values())


def _batch(segments: list[_Segment], no_row: int, waste: int, device: torch.device) -> DeltaBatch:
    """Put segments into one batch, with padding behind each."""
    count = len(segments)
    num_rows = max(len(each.rows) for each in segments)
    num_prior = max(len(each.prior) for each in segments)
    rows = np.full((count, num_rows), no_row, dtype=np.int64)
    writes = np.full((count, num_rows), waste, dtype=np.int64)
    parent = np.full((count, num_rows), -1, dtype=np.int64)
    prior = np.full((count, num_prior), waste, dtype=np.int64)
    sees_prior = np.zeros((count, num_rows, num_prior), dtype=np.bool_)
    sees_own = np.zeros((count, num_rows, num_rows), dtype=np.bool_)
    for number, each in enumerate(segments):
        own, cached = len(each.rows), len(each.prior)
        rows[number, :own], writes[number, :own] = each.rows, each.writes
        parent[number, :own], prior[number, :cached] = each.parent, each.prior
        sees_prior[number, :own, :cached] = each.sees_prior
        sees_own[number, :own, :own] = each.sees_own
    return DeltaBatch(
        rows=_upload(rows, device),
        writes=_upload(writes, device),
        prior=_upload(prior, device),
        parent=_upload(parent, device),
        sees_prior=_upload(sees_prior, device),
        sees_own=_upload(sees_own, device),
        states=_upload(np.array([each.state for each in segments], dtype=np.int64), device),
    )


def _folds(folds: list[_Fold], device: torch.device) -> StateFolds:
    numbers = np.repeat(np.arange(len(folds)), [len(each.behind) for each in folds])
    return StateFolds(
        sources=_upload(np.array([each.source for each in folds], dtype=np.int64), device),
        targets=_upload(np.array([each.target for each in folds], dtype=np.int64), device),
        rows=_upload(np.stack([each.rows for each in folds]), device),
        behind=(
            _upload(np.concatenate([each.behind for each in folds]), device),
            _upload(numbers, device),
        ),
    )


def _upload(values: "Ints64 | npt.NDArray[np.bool_]", device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
