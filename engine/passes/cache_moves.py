"""Keys, values and states that move from block to block and from slot to slot of one cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.model.kv_cache import KVCache, LayerGroup
from outrider.engine.passes.recurrent_states import RecurrentStates
from outrider.engine.passes.step_buffers import upload_integers
from outrider.kernels.kv.compact_kv import compact_kv


class CacheMoves:
    """Moves what a cache holds; nothing waits for the device.

    `recurrent`: the states of recurrent layers, which move with the keys of their rows.
    """

    def __init__(
        self, kv_cache: KVCache, pool: BlockPool, recurrent: RecurrentStates | None
    ) -> None:
        self._kv_cache = kv_cache
        self._pool = pool
        self._recurrent = recurrent

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination) pairs."""
        if pairs:
            slots = self._upload_pairs(self._slots_of_blocks(pairs))
            self._move_in(self._kv_cache.full, *slots)
            if self._pool.window is None:
                self._move_in(self._kv_cache.window, *slots)
        self.apply_window_changes()

    def move_slots(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Move keys and values between cache slots, safe under overlap."""
        if source_slots:
            self._move(*self._upload_pairs((source_slots, destination_slots)))

    def compact(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """`move_slots` for slots that only the device knows: int64 [n] each, -1 for no move."""
        if src_slots.numel():
            self._move(src_slots.where(dst_slots >= 0, -1), dst_slots)

    def _slots_of_blocks(self, pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Return all slots of the pairs' first blocks, and all slots of their second ones."""
        first, second = (
            [
                block * self._pool.block_size + offset
                for block in blocks
                for offset in range(self._pool.block_size)
            ]
            for blocks in zip(*pairs, strict=True)
        )
        return first, second

    def _upload_pairs(self, slots: tuple[list[int], list[int]]) -> tuple[Tensor, Tensor]:
        number = len(slots[0])
        padding = [0] * (number % 2)  # the second half is to begin at a multiple of 16 bytes
        both = upload_integers(slots[0] + padding + slots[1], self._kv_cache.device)
        return both[:number], both[number + len(padding) :]

    def _move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        self.apply_window_changes()
        cache = self._kv_cache
        self._move_in(cache.full, src_slots, dst_slots)
        if cache.window is not None:
            self._move_in(cache.window, cache.slots_of(src_slots), cache.slots_of(dst_slots))
        if self._recurrent is not None:
            self._recurrent.move(src_slots, dst_slots)

    @torch.inference_mode()
    def _move_in(self, group: LayerGroup | None, src_slots: Tensor, dst_slots: Tensor) -> None:
        if group is not None:
            compact_kv(group.tensor, src_slots, dst_slots, group.scales)

    def apply_window_changes(self) -> None:
        """Tell the device which window blocks the views have got, and make the copies they want."""
        if (window := self._pool.window) is not None:
            changes, copies = window.take_changes(), window.take_copies()
            if changes or copies:
                self.change_window(changes, copies)

    @torch.inference_mode()
    def change_window(self, changes: dict[int, int], copies: list[tuple[int, int]]) -> None:
        """Give blocks their window blocks, by block; then copy window blocks, in pairs."""
        table = self._kv_cache.window_blocks
        if table is None:
            return
        if changes:
            blocks, own = self._upload_pairs((list(changes), list(changes.values())))
            table.index_copy_(0, blocks, own.to(torch.int32))
        if copies:
            slots = self._upload_pairs(self._slots_of_blocks(copies))
            self._move_in(self._kv_cache.window, *slots)
