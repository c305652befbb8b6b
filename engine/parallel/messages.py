"""The messages of rank 0 to the others: what to load, and then, pass by pass, what to run.

Messages go through a socket pair of our own processes, so they are pickled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary, finalize

import torch

from outrider.engine.cache.kv_view import KVView
from outrider.engine.model.decoder import DtypeName
from outrider.engine.model.quantised.formats import Rounding, StoredWay
from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.pass_memory import LargestPass
from outrider.kernels.layers.lora import LoraWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A checkpoint and how it is loaded; the fields are `load_model`'s arguments."""

    path: str
    dtype: DtypeName = "auto"
    deterministic: bool | None = False
    max_context: int | None = None
    rounding: Rounding | StoredWay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The place of a rank, and what it needs to start."""

    rank: int
    count: int
    device: str
    folder: str
    """The folder in which the ranks meet."""
    num_threads: int
    """Threads of a rank on a CPU."""
    timeout_s: float
    log_level: int
    """Logging's."""
    model: ModelSource


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has its part of the weights; `numerics` has to be alike on all of them."""

    numerics: str


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank ends."""

    text: str
    """The reason."""
    is_unsupported: bool = False
    """The model or its files are the reason."""


@dataclass(frozen=True, slots=True)
class MeasureRoom:
    """Run the largest pass, then say what memory is free (`Room`)."""

    largest: LargestPass


@dataclass(frozen=True, slots=True)
class Room:
    """Free memory of a rank's GPU beside its weights; None on a CPU, which has one for all."""

    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCache:
    """Allocate a cache; the fields are `ModelRunner`'s."""

    num_blocks: int
    block_size: int
    max_context: int | None
    kv_dtype: torch.dtype | None
    num_window_blocks: int | None
    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SentView:
    """A view's block table, as the difference to what was sent last."""

    number: int
    adapter: int | None
    """The number of its `AddAdapter`."""
    kept: int
    """So many of the first blocks are as they were sent last."""
    tail: list[int]
    """The blocks behind the kept ones."""
    window_table: list[int]


@dataclass(frozen=True, slots=True)
class SentSlice:
    """A `ForwardSlice`."""

    view: SentView
    token_ids: list[int]
    start_slot: int
    num_logit_rows: int
    positions: list[int] | None
    tree_start: int | None
    ancestor_masks: list[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPass:
    """A pass."""

    slices: list[SentSlice]
    device_views: list[SentView]
    device_rows: tuple[int, int] | None
    """(rows, words of ancestors a row) of what is broadcast behind this."""
    picked: list[int] | None
    """`PickedRows.rows`, whose words are broadcast next where some are sampled."""
    is_sampled: bool
    forgotten: list[int]
    """Numbers of views that will not be sent again."""
    forgotten_adapters: list[int]
    """Numbers of adapters that will not be sent again."""


@dataclass(frozen=True, slots=True)
class AddAdapter:
    """Keep a rank's part of an adapter, which is on the CPU here."""

    number: int
    weights: LoraWeights


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks, (source, destination)."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MoveSlots:
    """Move keys and values between slots."""

    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class MoveOnDevice:
    """Move keys and values between so many slots, which are broadcast behind this."""

    num_slots: int


@dataclass(frozen=True, slots=True)
class ChangeWindow:
    """`ModelRunner.change_window`."""

    changes: dict[int, int]
    copies: list[tuple[int, int]]


RankCommand = (
    AddAdapter | MeasureRoom | RunPass | CopyBlocks | MoveSlots | MoveOnDevice | ChangeWindow
)


class SentViews:
    """Rank 0's memory of the block tables that the others have: only what is new is sent."""

    def __init__(self) -> None:
        self._numbers = count()
        self._sent: WeakKeyDictionary[KVView, tuple[int, list[int]]] = WeakKeyDictionary()
        self._forgotten: list[int] = []
        self._adapters: WeakKeyDictionary[LoraWeights, int] = WeakKeyDictionary()
        self._forgotten_adapters: list[int] = []

    def new_adapters(
        self, slices: Sequence[ForwardSlice], device_rows: DeviceRows | None
    ) -> Iterator[tuple[int, LoraWeights]]:
        """Number the adapters of a pass that the others do not have yet."""
        views = [piece.view for piece in slices]
        if device_rows is not None:
            views += device_rows.views
        for view in views:
            adapter = view.adapter
            if adapter is not None and adapter not in self._adapters:
                number = self._adapters[adapter] = next(self._numbers)
                finalize(adapter, self._forgotten_adapters.append, number)
                yield number, adapter

    def run_pass(
        self,
        slices: Sequence[ForwardSlice],
        device_rows: DeviceRows | None,
        picked: PickedRows | None,
    ) -> RunPass:
        """Return the message of a pass."""
        views, shape = [], None
        if device_rows is not None:
            views = [self._send(view) for view in device_rows.views]
            shape = (device_rows.total_rows, device_rows.ancestor_words.shape[1])
        sent = [
            SentSlice(
                self._send(piece.view),
                piece.token_ids,
                piece.start_slot,
                piece.num_logit_rows,
                piece.positions,
                piece.tree_start,
                piece.ancestor_masks,
            )
            for piece in slices
        ]
        forgotten, adapters = self._forgotten[:], self._forgotten_adapters[:]
        del self._forgotten[: len(forgotten)], self._forgotten_adapters[: len(adapters)]
        return RunPass(
            slices=sent,
            device_views=views,
            device_rows=shape,
            picked=None if picked is None else picked.rows,
            is_sampled=picked is not None and picked.words is not None,
            forgotten=forgotten,
            forgotten_adapters=adapters,
        )

    def _send(self, view: KVView) -> SentView:
        known = self._sent.get(view)
        if known is None:
            known = next(self._numbers), []
            self._sent[view] = known
            finalize(view, self._forgotten.append, known[0])
        number, sent = known
        table = view.block_table
        kept = min(len(sent), len(table))
        if sent[:kept] != table[:kept]:
            kept = next(place for place in range(kept) if sent[place] != table[place])
        tail = table[kept:]
        sent[kept:] = tail
        adapter = None if view.adapter is None else self._adapters[view.adapter]
        return SentView(number, adapter, kept, tail, list(view.window_table))
