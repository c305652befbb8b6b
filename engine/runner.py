"""Runs one model on slices of many sequences, flattened into one forward pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.block_pool import BlockPool, root_hash
from engine.kv_cache import KVCache
from engine.kv_view import KVView
from engine.model import DecoderModel
from kernels.compact_kv import compact_kv
from kernels.paged_attention import AttentionBatch


@dataclass(slots=True, kw_only=True)
class ForwardSlice:
    """The rows that one sequence adds to a pass.

    Row i is written to logical slot `start_slot + i`. Without a tree the rows are consecutive
    tokens and see everything before them. With one, all rows are its nodes, and slots from
    `tree_start` on are seen only through `ancestor_masks` (bit j is slot tree_start + j; one mask a
    row); rows in front of a tree are a slice of their own. `num_logit_rows`: how many of the last
    rows get logits.
    """

    view: KVView
    token_ids: list[int]
    start_slot: int
    num_logit_rows: int
    positions: list[int] | None = None
    tree_start: int | None = None
    ancestor_masks: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """Logits (float32) and final hidden states of the asked rows, in the order of the slices.

    logits: [num_logit_rows, vocab_size]; hidden: [num_logit_rows, hidden_size].
    """

    logits: Tensor
    hidden: Tensor


@dataclass(slots=True)
class PassTimes:
    """How long the forward passes of a runner took, in seconds."""

    total_s: float = 0.0
    last_s: float = 0.0
    num_passes: int = 0


@dataclass(kw_only=True)
class ModelRunner:
    """A model, its KV cache and the pool of the cache's blocks."""

    model: DecoderModel
    num_blocks: int
    block_size: int = 16
    max_context: int | None = None
    prefix_caching: bool = True
    pool: BlockPool = field(init=False)
    kv_cache: KVCache = field(init=False)
    times: PassTimes = field(init=False, default_factory=PassTimes)
    # Told the rows, the seconds and the rows' mean context of every pass where passes are
    # synchronous, that is on the CPU.
    on_pass: Callable[[int, float, float], None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Allocate the cache."""
        model = self.model
        self.pool = BlockPool(num_blocks=self.num_blocks, block_size=self.block_size)
        self.kv_cache = KVCache(
            model.config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=model.dtype,
            device=model.device,
        )
        trained = model.config.max_position_embeddings
        self.max_context = min(
            self.max_context or trained, trained, self.num_blocks * self.block_size
        )

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.model.config.vocab_size

    def new_view(self, cache_salt: str) -> KVView:
        """An empty view whose prefix cache is shared only under the same salt."""
        return KVView(
            self.pool,
            root=root_hash(str(self.model.dtype), cache_salt),
            prefix_caching=self.prefix_caching,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination) pairs."""
        if pairs:
            offsets = range(self.block_size)
            self.move_slots(
                [source * self.block_size + offset for source, _ in pairs for offset in offsets],
                [copy * self.block_size + offset for _, copy in pairs for offset in offsets],
            )

    def move_slots(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Move keys and values between cache slots, safe under overlap."""
        if source_slots:
            compact_kv(
                self.kv_cache.tensor,
                torch.tensor(source_slots, dtype=torch.int64, device=self.device),
                torch.tensor(destination_slots, dtype=torch.int64, device=self.device),
            )

    def forward(self, slices: Sequence[ForwardSlice]) -> PassOutput:
        """One pass over all rows of all slices."""
        begun_s = time.perf_counter()
        rows = _FlatRows()
        for piece in slices:
            rows.add(piece, self.block_size)
        plan = self.model.plan_attention(rows.attention_batch(), block_size=self.block_size)
        integers = torch.tensor(
            [rows.token_ids, rows.positions, rows.slots], dtype=torch.int64, device=self.device
        )  # [3, num_rows]
        logit_rows = torch.tensor(rows.logit_rows, dtype=torch.int64, device=self.device)
        started_s = time.perf_counter()
        output = self.model.forward(
            integers[0], integers[1], integers[2], plan, self.kv_cache, logit_rows
        )
        self.times.last_s = time.perf_counter() - started_s
        self.times.total_s += self.times.last_s
        self.times.num_passes += 1
        if self.on_pass is not None and self.device.type == "cpu":
            self.on_pass(len(rows.token_ids), time.perf_counter() - begun_s, rows.mean_context())
        return PassOutput(logits=output.logits, hidden=output.hidden)


@dataclass(slots=True)
class _FlatRows:
    """The rows of a pass, as host lists."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    query_indptr: list[int] = field(default_factory=lambda: [0])
    kv_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    tree_starts: list[int] = field(default_factory=list)
    ancestor_masks: list[list[int] | None] = field(default_factory=list)

    def add(self, piece: ForwardSlice, block_size: int) -> None:
        """Append one slice."""
        num_rows = len(piece.token_ids)
        start, end = piece.start_slot, piece.start_slot + num_rows
        table = piece.view.block_table
        assert len(table) * block_size >= end, "slots were not reserved"
        self.token_ids.extend(piece.token_ids)
        self.positions.extend(range(start, end) if piece.positions is None else piece.positions)
        self.slots.extend(
            table[slot // block_size] * block_size + slot % block_size for slot in range(start, end)
        )
        total = len(self.token_ids)
        self.logit_rows.extend(range(total - piece.num_logit_rows, total))
        self.query_indptr.append(total)
        self.kv_lens.append(end)
        self.block_tables.append(table)
        self.tree_starts.append(end if piece.tree_start is None else piece.tree_start)
        self.ancestor_masks.append(piece.ancestor_masks)

    def mean_context(self) -> float:
        """How many tokens a row sees, on average."""
        total = sum(
            (end - start) * kv_len
            for start, end, kv_len in zip(
                self.query_indptr, self.query_indptr[1:], self.kv_lens, strict=False
            )
        )
        return total / max(len(self.token_ids), 1)

    def attention_batch(self) -> AttentionBatch:
        """What the attention kernel needs to know."""
        return AttentionBatch(
            query_indptr=self.query_indptr,
            kv_lens=self.kv_lens,
            block_tables=self.block_tables,
            tree_starts=self.tree_starts,
            ancestor_masks=self.ancestor_masks,
        )
