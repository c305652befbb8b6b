"""The runner of rank 0: it has the other ranks run every pass and every move that it runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.parallel.messages import (
    AddAdapter,
    ChangeWindow,
    CopyBlocks,
    MoveOnDevice,
    MoveSlots,
    OpenCache,
    RankCommand,
    SentViews,
)
from outrider.engine.parallel.ranks import Ranks
from outrider.engine.passes.cache_moves import CacheMoves
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.runner import ModelRunner, PassOutput
from outrider.kernels.layers.lora import LoraWeights


@dataclass(kw_only=True)
class RankRunner(ModelRunner):
    """`ModelRunner` of a part of a model, which runs when the other ranks' do."""

    def _joined(self, output: PassOutput, picked: PickedRows | None) -> PassOutput:
        assert isinstance(self.model, DecoderModel), "only our own decoders are shared out"
        with torch.inference_mode():
            return replace(output, logits=self.model.join_logits(output.logits, picked))


@dataclass(kw_only=True)
class ParallelRunner(RankRunner):
    """`ModelRunner` of a model that several ranks share; its pool decides for all of them.

    Everything raises RankLostError once a rank is gone.
    """

    ranks: Ranks
    _views: SentViews = field(init=False, default_factory=SentViews)
    # Of adapters that no pass had yet: the other ranks' parts, in their order.
    _parts: WeakKeyDictionary[LoraWeights, list[LoraWeights]] = field(
        init=False, default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        """Allocate the caches, here and on the other ranks."""
        super().__post_init__()
        self._moves = SharedMoves(self.kv_cache, self.pool, self.ranks)
        self.ranks.open_cache(
            OpenCache(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_context=self.max_context,
                kv_dtype=self.kv_dtype,
                num_window_blocks=self.num_window_blocks,
                taps=self.taps,
            )
        )

    @property
    def picks(self) -> bool:
        """True: what only the chosen token needs is not gathered."""
        return True

    def keep_parts(self, adapter: LoraWeights, others: list[LoraWeights]) -> None:
        """Keep the other ranks' parts of an adapter until a pass has it; from any thread.

        An adapter without has the same on all ranks, as that which warms up.
        """
        self._parts[adapter] = others

    def check(self) -> None:
        """Raise RankLostError if a rank is gone."""
        self.ranks.check()

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()

    def forward(
        self,
        slices: Sequence[ForwardSlice],
        device_rows: DeviceRows | None = None,
        features: Tensor | None = None,
        picked: PickedRows | None = None,
    ) -> PassOutput:
        """`ModelRunner.forward`, on all ranks."""
        with self.ranks.watched():
            self._moves.apply_window_changes()
            for number, adapter in self._views.new_adapters(slices, device_rows):
                parts = self._parts.pop(adapter, None)
                self.ranks.send_each(
                    AddAdapter(number, part)
                    for part in parts or repeat(adapter.to(torch.device("cpu")))
                )
            self.ranks.send(self._views.run_pass(slices, device_rows, picked))
            if device_rows is not None:
                self.ranks.broadcast(packed_rows(device_rows))
            if picked is not None and picked.words is not None:
                self.ranks.broadcast(picked.words)
            return super().forward(slices, device_rows, features, picked)


class SharedMoves(CacheMoves):
    """`CacheMoves` on all ranks."""

    def __init__(self, kv_cache: KVCache, pool: BlockPool, ranks: Ranks) -> None:
        super().__init__(kv_cache, pool, None)
        self._ranks = ranks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination) pairs."""
        with self._sending(CopyBlocks(list(pairs)) if pairs else None):
            super().copy_blocks(pairs)

    def move_slots(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Move keys and values between cache slots, safe under overlap."""
        if source_slots:
            self.apply_window_changes()
            with self._sending(MoveSlots(source_slots, destination_slots)):
                super().move_slots(source_slots, destination_slots)

    def compact(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """`move_slots` for slots that only rank 0's device knows."""
        if src_slots.numel():
            self.apply_window_changes()
            with self._sending(MoveOnDevice(src_slots.numel())):
                self._ranks.broadcast(torch.stack((src_slots.view(-1), dst_slots.view(-1))))
                super().compact(src_slots, dst_slots)

    def change_window(self, changes: dict[int, int], copies: list[tuple[int, int]]) -> None:
        """Give blocks their window blocks, by block; then copy window blocks, in pairs."""
        with self._sending(ChangeWindow(changes, copies)):
            super().change_window(changes, copies)

    @contextmanager
    def _sending(self, command: RankCommand | None) -> Iterator[None]:
        with self._ranks.watched():
            if command is not None:
                self._ranks.send(command)
            yield


def packed_rows(rows: DeviceRows) -> Tensor:
    """Return all integers of device rows behind each other, int64: see `unpacked_rows`."""
    parts = (
        *(rows.token_ids, rows.positions, rows.logical_slots, rows.sequence_index),
        rows.ancestor_words.reshape(-1),
        *(rows.row_starts, rows.num_rows, rows.tree_starts, rows.kv_lens),
    )
    return torch.cat([part.to(torch.int64) for part in parts])


def num_packed(num_rows: int, num_words: int, num_views: int) -> int:
    """Return the length of `packed_rows`."""
    return num_rows * (4 + num_words) + 4 * num_views


def unpacked_rows(
    packed: Tensor, *, num_rows: int, num_words: int, make: Callable[..., DeviceRows]
) -> DeviceRows:
    """Return what `packed_rows` packed; `make`: `DeviceRows` with its views."""
    num_views = (len(packed) - num_rows * (4 + num_words)) // 4
    sizes = [*[num_rows] * 4, num_rows * num_words, *[num_views] * 4]
    parts = torch.split(packed, sizes)
    starts, counts, tree_starts, kv_lens = (part.to(torch.int32) for part in parts[5:])
    return make(
        token_ids=parts[0],
        positions=parts[1],
        logical_slots=parts[2],
        sequence_index=parts[3],
        ancestor_words=parts[4].view(num_rows, num_words),
        row_starts=starts,
        num_rows=counts,
        tree_starts=tree_starts,
        kv_lens=kv_lens,
    )
