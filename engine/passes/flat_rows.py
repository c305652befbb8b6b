"""The rows of a pass as host lists: slices laid out one behind the other."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.recurrent_plan import RecurrentRows
from outrider.kernels.attention.paged_attention import AttentionBatch
from outrider.kernels.layers.lora import LoraRows, LoraWeights, gather_lora


@dataclass(slots=True, kw_only=True)
class ForwardSlice:
    """The rows that one sequence adds to a pass.

    Without a tree the rows are consecutive tokens and see everything before them. With one, all
    rows are its nodes; rows in front of a tree are a slice of their own.
    """

    view: KVView
    token_ids: list[int]
    start_slot: int
    """Row i is written to logical slot `start_slot + i`."""
    num_logit_rows: int
    """So many of the last rows get logits."""
    positions: list[int] | None = None
    tree_start: int | None = None
    """Slots from here on are seen only through `ancestor_masks`."""
    ancestor_masks: list[int] | None = None
    """One a row; bit j is slot `tree_start + j`."""

    @property
    def end_slot(self) -> int:
        """The first logical slot behind the rows."""
        return self.start_slot + len(self.token_ids)


@dataclass(slots=True)
class FlatRows:
    """The rows of a pass, as host lists."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    query_indptr: list[int] = field(default_factory=lambda: [0])
    kv_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    window_tables: list[list[int]] = field(default_factory=list)
    tree_starts: list[int] = field(default_factory=list)
    ancestor_masks: list[list[int] | None] = field(default_factory=list)
    adapters: list[LoraWeights | None] = field(default_factory=list)
    """The adapter of each sequence."""
    recurrent: list[RecurrentRows] = field(default_factory=list)

    def add(self, piece: ForwardSlice, block_size: int) -> None:
        """Append one slice."""
        start, end = piece.start_slot, piece.end_slot
        table = piece.view.block_table
        assert len(table) * block_size >= end, "slots were not reserved"
        self.token_ids.extend(piece.token_ids)
        self.positions.extend(range(start, end) if piece.positions is None else piece.positions)
        self.slots += [
            table[slot // block_size] * block_size + slot % block_size for slot in range(start, end)
        ]
        total = len(self.token_ids)
        self.logit_rows.extend(range(total - piece.num_logit_rows, total))
        self.query_indptr.append(total)
        self.kv_lens.append(end)
        self.block_tables.append(table)
        self.window_tables.append(piece.view.window_table)
        self.tree_starts.append(end if piece.tree_start is None else piece.tree_start)
        self.ancestor_masks.append(piece.ancestor_masks)
        self.adapters.append(piece.view.adapter)
        if piece.view.line is not None:
            slots = range(start, end)
            self._add_recurrent(piece.view, slots, piece.tree_start, piece.ancestor_masks)

    def _add_recurrent(
        self,
        view: KVView,
        slots: Sequence[int],
        tree_start: int | None,
        masks: Sequence[int] | None,
    ) -> None:
        """Note the last rows for recurrent layers, where the model has some."""
        if view.line is not None and slots:
            first = len(self.token_ids) - len(slots)
            self.recurrent.append(
                RecurrentRows(
                    view=view, first_row=first, slots=slots, tree_start=tree_start, masks=masks
                )
            )

    def add_device_rows(self, rows: DeviceRows) -> list[int]:
        """Append what the device holds, which is waited for: all rows that are no padding.

        Returns their row numbers among the device rows; all of them get logits.
        """
        token_ids, positions = rows.token_ids.tolist(), rows.positions.tolist()
        logical_slots = rows.logical_slots.tolist()
        masks = [
            int.from_bytes(words.numpy().tobytes(), "little") for words in rows.ancestor_words.cpu()
        ]
        bounds = torch.stack((rows.row_starts, rows.num_rows, rows.tree_starts, rows.kv_lens), 1)
        found: list[int] = []
        for view, (first, count, tree_start, kv_len) in zip(
            rows.views, bounds.tolist(), strict=True
        ):
            real = [row for row in range(first, first + count) if logical_slots[row] >= 0]
            found += real
            self.token_ids += [token_ids[row] for row in real]
            self.positions += [positions[row] for row in real]
            self.slots += [view.slot(logical_slots[row]) for row in real]
            self.query_indptr.append(len(self.token_ids))
            self.kv_lens.append(kv_len)
            self.block_tables.append(view.block_table)
            self.window_tables.append(view.window_table)
            self.tree_starts.append(tree_start)
            own_masks = [masks[row] for row in real]
            self.ancestor_masks.append(own_masks)
            self.adapters.append(view.adapter)
            own_slots = [logical_slots[row] for row in real]
            self._add_recurrent(view, own_slots, tree_start, own_masks)
        self.logit_rows += range(len(self.logit_rows), len(self.token_ids))
        return found

    def mean_context(self) -> float:
        """Count how many tokens a row sees, on average."""
        total = sum(
            (end - start) * kv_len
            for start, end, kv_len in zip(
                self.query_indptr, self.query_indptr[1:], self.kv_lens, strict=False
            )
        )
        return total / max(len(self.token_ids), 1)

    def lora(self, *, deterministic: bool) -> LoraRows | None:
        """Return the rows with their adapters; None where no row has one."""
        if not any(self.adapters):
            return None
        counts = [end - start for start, end in pairwise(self.query_indptr)]
        return gather_lora(*number_adapters(self.adapters, counts), deterministic=deterministic)

    def attention_batch(self) -> AttentionBatch:
        """Return what the attention kernel needs to know."""
        return AttentionBatch(
            query_indptr=self.query_indptr,
            kv_lens=self.kv_lens,
            block_tables=self.block_tables,
            window_tables=self.window_tables if any(self.window_tables) else None,
            tree_starts=self.tree_starts,
            ancestor_masks=self.ancestor_masks,
        )


def number_adapters(
    adapters: Sequence[LoraWeights | None], counts: Sequence[int]
) -> tuple[list[LoraWeights], list[int]]:
    """Return the different adapters, and for each row the number of its own, -1 for none.

    `adapters`: of each sequence; `counts`: its rows.
    """
    numbers: dict[LoraWeights, int] = {}
    slots: list[int] = []
    for adapter, count in zip(adapters, counts, strict=True):
        number = -1 if adapter is None else numbers.setdefault(adapter, len(numbers))
        slots += [number] * count
    return list(numbers), slots


def to_tensors(*lists: list[int], device: torch.device) -> list[Tensor]:
    """Bring lists of integers to the device, each as int64 [its length]."""
    flat = list(chain(*lists))
    # `struct` packs a list in a third of the time of numpy, let alone of torch.
    numbers = np.frombuffer(bytearray(struct.pack(f"{len(flat)}q", *flat)), dtype=np.int64)
    tensors: list[Tensor] = []
    start = 0
    for each in lists:
        end = start + len(each)
        tensors.append(torch.from_numpy(numbers[start:end]))
        start = end
    return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]
