"""Rows of a pass whose content only the device knows."""

from dataclasses import dataclass

from torch import Tensor

from outrider.engine.cache.kv_view import KVView


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Tree nodes of several sequences; the host knows how many rows there are, not what they hold.

    They stand in front of all slices of their pass. Sequence b has rows `row_starts[b]` to
    `row_starts[b] + num_rows[b]`, in ascending order; rows of no tree are padding. A row with a
    logical slot below 0 writes nothing, its logits mean nothing. Slots from `tree_starts[b]` on are
    seen only through `ancestor_words`: bit j of a row's words, low word first, is logical slot
    tree_start + j (its own slot's bit included); slots below are seen by every row.

    token_ids, positions, logical_slots, sequence_index: int64 [num_rows] (sequence_index also for
    padding, any valid number). ancestor_words: int64 [num_rows, num_words]. row_starts, num_rows,
    tree_starts, kv_lens: int32 [num_sequences]; kv_lens counts logical slots, this pass's included.
    `views`: one a sequence, with all slots reserved.
    """

    views: list[KVView]
    token_ids: Tensor
    positions: Tensor
    logical_slots: Tensor
    sequence_index: Tensor
    ancestor_words: Tensor
    row_starts: Tensor
    num_rows: Tensor
    tree_starts: Tensor
    kv_lens: Tensor

    @property
    def total_rows(self) -> int:
        """Rows of the pass, padding included."""
        return self.token_ids.shape[0]
