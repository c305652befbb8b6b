"""Rows of a pass whose content only the device knows."""

from dataclasses import dataclass

from torch import Tensor

from outrider.engine.cache.kv_view import KVView


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Tree nodes of several sequences; the host knows how many rows there are, not what they hold.

    They stand in front of all slices of their pass. Sequence b has rows `row_starts[b]` to
    `row_starts[b] + num_rows[b]`, in ascending order; rows of no tree are padding.
    """

    views: list[KVView]
    """One a sequence, with all slots reserved."""
    token_ids: Tensor
    """int64 [num_rows]."""
    positions: Tensor
    """int64 [num_rows]."""
    logical_slots: Tensor
    """int64 [num_rows]. Below 0: the row writes nothing, and its logits mean nothing."""
    sequence_index: Tensor
    """int64 [num_rows]; any valid number for padding."""
    ancestor_words: Tensor
    """int64 [num_rows, num_words], low word first. Bit j is logical slot tree_start + j, the row's
    own slot included."""
    row_starts: Tensor
    """int32 [num_sequences]."""
    num_rows: Tensor
    """int32 [num_sequences]."""
    tree_starts: Tensor
    """int32 [num_sequences]. Slots below are seen by every row, those from here on only through
    `ancestor_words`."""
    kv_lens: Tensor
    """int32 [num_sequences]: logical slots, this pass's included."""

    @property
    def total_rows(self) -> int:
        """Rows of the pass, padding included."""
        return self.token_ids.shape[0]
