"""A multimap from block hashes to small numbers (codes of replicas), in arrays of fixed size.

A hash has two buckets of eight slots and lies in the one that was emptier when it came (Azar et
al., "Balanced allocations", 1994). So buckets can be nine tenths full, and nothing is ever moved. A
slot has room for four codes; more of them are bits of a row that the slot names instead.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_BUCKET: Final = 8
_INLINE: Final = 4
_FILLED: Final = 0.8
_ROW: Final = 0xFFFF  # in a slot's first cell: the next two hold the number of a row
_BLOCKS_PER_ROW: Final = 8
_BACK_TO_INLINE: Final = 2


class BlockTable:
    """Pairs of a key (uint64, not 0) and a code (1 to `num_codes`)."""

    def __init__(self, max_keys: int, *, num_codes: int, seed: int = 0) -> None:
        """`seed`: of the hash function, so that chosen keys cannot fill one bucket."""
        if not 1 <= num_codes < _ROW:
            raise ValueError(f"num_codes={num_codes} must be in [1, {_ROW - 1}]")
        wanted = max(int(max_keys / _FILLED) // _BUCKET, 1)
        num_buckets = 1 << max((wanted - 1).bit_length(), 1)
        self.num_codes = num_codes
        self.num_slots = num_buckets * _BUCKET
        self._shift = np.uint64(64 - (num_buckets.bit_length() - 1))
        rng = np.random.default_rng(seed)
        self._factors = rng.integers(2**63, size=2, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        # Zeros take no memory until they are written.
        self._keys = np.zeros((num_buckets, _BUCKET), dtype=np.uint64)
        self._slot_keys = self._keys.reshape(-1)
        self._cells = np.zeros((self.num_slots, _INLINE), dtype=np.uint16)
        self._num_words = -(-(num_codes + 1) // 64)
        num_rows = max(max_keys // _BLOCKS_PER_ROW, 1)
        self._rows = np.zeros((num_rows, self._num_words), dtype=np.uint64)
        self._row_words = self._rows.reshape(-1)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_pairs = np.zeros(num_codes + 1, dtype=np.int64)
        self._is_retired = np.zeros(_ROW + 1, dtype=np.bool_)
        self._sweeping: list[int] = []  # codes that are gone when the sweep has come around
        self._retired: list[int] = []  # codes for the next one
        self._swept_to = 0
        self.num_lost = 0

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return self._keys.nbytes + self._cells.nbytes + self._rows.nbytes

    def num_pairs_of(self, code: int) -> int:
        """Count a code's keys."""
        return int(self._num_pairs[code])

    # ---- finding --------------------------------------------------------------------------

    def _buckets(self, keys: Keys) -> Ints:
        """Return both buckets of each key, [n, 2]."""
        return ((keys[:, None] * self._factors) >> self._shift).astype(np.int64)

    def _matches(self, keys: Keys, buckets: Ints) -> tuple[Ints, Ints]:
        """Return which of the keys are there, ascending, and their slots."""
        places = np.flatnonzero(self._keys[buckets] == keys[:, None, None])
        slots = buckets.ravel()[places // _BUCKET] * _BUCKET + places % _BUCKET
        return places // (2 * _BUCKET), slots

    def _find(self, keys: Keys, buckets: Ints) -> Ints:
        """Return the slot of each key, -1 for none."""
        slots = np.full(len(keys), -1, dtype=np.int64)
        numbers, found = self._matches(keys, buckets)
        slots[numbers] = found
        return slots

    def _row_of(self, cells: Codes) -> Ints:
        """Return the numbers of the rows that slots' cells name, [n]."""
        return cells[:, 1].astype(np.int64) | (cells[:, 2].astype(np.int64) << 16)

    def mark(self, keys: Keys, positions: Ints, depths: npt.NDArray[np.int32]) -> None:
        """Raise depths (by code) to the last of the ascending positions whose key a code has, + 1.

        depths[0] is left as it is.
        """
        chosen = keys[positions]
        found, slots = self._matches(chosen, self._buckets(chosen))
        if not len(found):
            return
        cells = self._cells[slots]
        ends = positions[found] + 1
        is_row = cells[:, 0] == _ROW
        if is_row.any():
            self._mark_rows(self._row_of(cells[is_row]), ends[is_row], depths)
            cells, ends = cells[~is_row], ends[~is_row]
        if not len(cells):
            return
        deepest = np.zeros_like(depths)
        deepest[cells.ravel()] = np.repeat(ends, _INLINE)  # of several, the last is written
        deepest[0] = 0
        np.maximum(depths, deepest, out=depths)

    def _mark_rows(self, rows: Ints, ends: Ints, depths: npt.NDArray[np.int32]) -> None:
        """Raise depths to the last of the ascending ends of rows that have a code's bit."""
        # Of a code are set, from the row of its deepest key on to the first of all, as many bits as
        # there are rows up to that one.
        seen = np.bitwise_or.accumulate(self._rows[rows[::-1]], axis=0)
        counts = np.add.reduce(_bits(seen), axis=0, dtype=np.uint8 if len(rows) < 256 else np.int64)
        by_count = np.zeros(len(rows) + 1, dtype=depths.dtype)
        by_count[1:] = ends
        np.maximum(depths, by_count[counts[: len(depths)]], out=depths)

    # ---- changing -------------------------------------------------------------------------

    def add(self, keys: Keys, codes: Codes) -> None:
        """Enter pairs, none of them twice; those that are there already stay."""
        if not len(keys):
            return
        different, inverse = np.unique(keys, return_inverse=True)
        slots = self._claim(different)[inverse]
        has_slot = slots >= 0
        self.num_lost += len(keys) - int(has_slot.sum())
        slots, codes = slots[has_slot], codes[has_slot]
        while len(slots):
            cells = self._cells[slots]
            is_row = cells[:, 0] == _ROW
            if is_row.any():
                self._set_bits(self._row_of(cells[is_row]), codes[is_row])
            is_open = ~is_row & ~(cells == codes[:, None]).any(axis=1)
            slots, codes, cells = slots[is_open], codes[is_open], cells[is_open]
            _, first = np.unique(slots, return_index=True)  # one code a slot at a time
            empty = cells[first] == 0
            has_room = empty.any(axis=1)
            taken = first[has_room]
            self._cells[slots[taken], empty.argmax(axis=1)[has_room]] = codes[taken]
            np.add.at(self._num_pairs, codes[taken], 1)
            is_left = np.ones(len(slots), dtype=np.bool_)
            is_left[taken] = False
            for number in first[~has_room].tolist():
                if not self._make_row(int(slots[number])):
                    is_lost = is_left & (slots == slots[number])
                    self.num_lost += int(is_lost.sum())
                    is_left &= ~is_lost
            slots, codes = slots[is_left], codes[is_left]

    def _claim(self, keys: Keys) -> Ints:
        """Return a slot of each of different keys; -1 where both of its buckets are full."""
        buckets = self._buckets(keys)
        slots = self._find(keys, buckets)
        missing = np.flatnonzero(slots < 0)
        while len(missing):
            is_empty = self._keys[buckets[missing]] == 0  # [n, 2, _BUCKET]
            num_empty = is_empty.sum(axis=2)
            side = num_empty.argmax(axis=1)
            numbers = np.arange(len(missing))
            has_room = num_empty[numbers, side] > 0
            place = is_empty[numbers, side].argmax(axis=1)
            wanted = buckets[missing, side] * _BUCKET + place
            missing, wanted = missing[has_room], wanted[has_room]
            own, first = np.unique(wanted, return_index=True)
            self._slot_keys[own] = keys[missing[first]]
            slots[missing[first]] = own
            missing = np.delete(missing, first)
        return slots

    def _set_bits(self, rows: Ints, codes: Codes) -> None:
        words, bits = self._words(rows, codes)
        is_new = (self._row_words[words] & bits) == 0
        np.bitwise_or.at(self._row_words, words, bits)
        np.add.at(self._num_pairs, codes[is_new], 1)

    def _words(self, rows: Ints, codes: Codes) -> tuple[Ints, Keys]:
        words = rows * self._num_words + (codes >> 6)
        return words, np.uint64(1) << (codes & np.uint16(63)).astype(np.uint64)

    def _make_row(self, slot: int) -> bool:
        """Give a slot whose cells are full a row of bits; False where there is none left."""
        if not self._free_rows:
            return False
        row = self._free_rows.pop()
        codes = self._cells[slot].copy()
        words, bits = self._words(np.full(_INLINE, row), codes)
        np.bitwise_or.at(self._row_words, words, bits)
        self._cells[slot] = (_ROW, row & 0xFFFF, row >> 16, 0)
        return True

    def remove(self, keys: Keys, codes: Codes) -> None:
        """Take out pairs, none of them twice; those that are not there do not matter."""
        if not len(keys):
            return
        slots = self._find(keys, self._buckets(keys))
        is_found = slots >= 0
        slots, codes = slots[is_found], codes[is_found]
        cells = self._cells[slots]
        is_row = cells[:, 0] == _ROW
        inline_slots, inline_codes = slots[~is_row], codes[~is_row]
        number, cell = np.nonzero(cells[~is_row] == inline_codes[:, None])
        self._cells[inline_slots[number], cell] = 0
        np.subtract.at(self._num_pairs, inline_codes[number], 1)
        self._free_empty(inline_slots[number])
        if is_row.any():
            rows, row_codes = self._row_of(cells[is_row]), codes[is_row]
            words, bits = self._words(rows, row_codes)
            is_set = (self._row_words[words] & bits) != 0
            np.bitwise_and.at(self._row_words, words, ~bits)
            np.subtract.at(self._num_pairs, row_codes[is_set], 1)
            self._shrink(slots[is_row])

    def _free_empty(self, slots: Ints) -> None:
        is_empty = ~self._cells[slots].any(axis=1)
        self._slot_keys[slots[is_empty]] = 0

    def _shrink(self, slots: Ints) -> None:
        """Give back rows with few codes."""
        slots = np.unique(slots)
        rows = self._row_of(self._cells[slots])
        num_codes = np.bitwise_count(self._rows[rows]).sum(axis=1, dtype=np.int64)
        for number in np.flatnonzero(num_codes <= _BACK_TO_INLINE).tolist():
            slot, row = int(slots[number]), int(rows[number])
            codes = np.flatnonzero(_bits(self._rows[row]))
            self._cells[slot] = 0
            self._cells[slot, : len(codes)] = codes
            self._rows[row] = 0
            self._free_rows.append(row)
            if not len(codes):
                self._slot_keys[slot] = 0

    # ---- codes that have gone -------------------------------------------------------------

    def retire(self, code: int) -> None:
        """Have all of a code's pairs taken out by and by, by `sweep`."""
        self._retired.append(code)
        self._num_pairs[code] = 0

    def sweep(self, num_slots: int) -> list[int]:
        """Go over so many slots; return the retired codes of which nothing is left."""
        if not self._sweeping:
            if not self._retired:
                return []
            self._sweeping, self._retired, self._swept_to = self._retired, [], 0
            self._is_retired[:] = False
            self._is_retired[self._sweeping] = True
        start, end = self._swept_to, min(self._swept_to + num_slots, self.num_slots)
        cells = self._cells[start:end]
        is_row = cells[:, 0] == _ROW
        is_gone = self._is_retired[cells]
        is_gone[is_row] = False
        cells[is_gone] = 0
        self._free_empty(np.flatnonzero(is_gone.any(axis=1)) + start)
        row_slots = np.flatnonzero(is_row) + start
        if len(row_slots):
            gone = np.zeros(self._num_words, dtype=np.uint64)
            for code in self._sweeping:
                gone[code >> 6] |= np.uint64(1 << (code & 63))
            self._rows[self._row_of(self._cells[row_slots])] &= ~gone
            self._shrink(row_slots)
        self._swept_to = end
        if end < self.num_slots:
            return []
        done, self._sweeping = self._sweeping, []
        return done


def _bits(words: Keys) -> npt.NDArray[np.uint8]:
    """Return the bits of words as zeros and ones, along the last axis."""
    # As bytes in the order of this machine, which numpy's unpackbits reads lowest bit first.
    return np.unpackbits(words.astype("<u8").view(np.uint8), axis=-1, bitorder="little")
