"""Batches of sequences with trees over a paged cache, for the attention benchmark."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.gpu_timing import num_input_sets
from outrider.kernels.attention.attention_tiles import TilePlan
from outrider.kernels.attention.paged_attention import (
    AttentionBatch,
    paged_attention,
    plan_attention,
)

BLOCK_SIZE = 16
_PARENT_REACH = 8  # a node's parent is one of so many before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads and how they are stored."""

    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: as dtype

    @property
    def slot_bytes(self) -> int:
        """Keys and values of one slot in one layer, with their scales where there are any."""
        item = (self.kv_dtype or self.dtype).itemsize
        scale = 4 if self.kv_dtype is not None else 0
        return 2 * self.num_kv_heads * (self.head_dim * item + scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`batch` sequences with `context` slots and then `nodes` rows each."""

    batch: int
    context: int
    nodes: int

    @property
    def name(self) -> str:
        """For tables and results."""
        return f"batch {self.batch}, context {self.context}, nodes {self.nodes}"

    def num_bytes(self, shape: Shape) -> int:
        """Return what must be read and written once."""
        rows = self.batch * self.nodes
        row_bytes = 2 * shape.num_query_heads * shape.head_dim * shape.dtype.itemsize
        return self.batch * (self.context + self.nodes) * shape.slot_bytes + rows * row_bytes

    def num_flops(self, shape: Shape) -> int:
        """Count the operations of both products, 2 for each multiplication with its sum."""
        pairs = self.batch * self.nodes * (self.context + self.nodes)
        return 4 * pairs * shape.num_query_heads * shape.head_dim


def random_tree(num_nodes: int, rng: random.Random) -> list[int]:
    """Ancestor masks, own bit included, of a random tree; node 0 is its root."""
    masks = [1]
    for node in range(1, num_nodes):
        parent = rng.randrange(max(0, node - _PARENT_REACH), node)
        masks.append(masks[parent] | 1 << node)
    return masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One set of inputs. `batch`: what the plan was made from, for the comparisons."""

    query: Tensor
    plan: Any
    batch: AttentionBatch


class Cache:
    """Random keys and values of one layer, shared by all cases."""

    def __init__(self, shape: Shape, *, num_bytes: int, device: torch.device, seed: int) -> None:
        self.shape, self.device = shape, device
        self.num_blocks = max(num_bytes // (shape.slot_bytes * BLOCK_SIZE), 8)
        size = (self.num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.keys, self.values = (self._random(size) for _ in range(2))
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if shape.kv_dtype is not None:
            self.k_scale, self.v_scale = (
                torch.rand(size[:3], device=device) * 0.5 + 0.75 for _ in range(2)
            )
        self._rng = random.Random(seed)
        self._order = list(range(self.num_blocks))
        self._rng.shuffle(self._order)

    def _random(self, size: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(
            size, dtype=self.shape.kv_dtype or self.shape.dtype, device=self.device
        )
        for part in torch.split(tensor, 1 << 14):  # a bounded float32 copy
            part.copy_(torch.randn(part.shape, device=self.device))
        return tensor

    def inputs(self, problem: Problem) -> list[Inputs]:
        """As many sets as the L2 cache demands and the blocks allow, on blocks of their own."""
        blocks_each = -(-(problem.context + problem.nodes) // BLOCK_SIZE)
        fitting = self.num_blocks // (blocks_each * problem.batch)
        if fitting < 1:
            raise ValueError(f"{problem.name}: the cache has only {self.num_blocks} blocks")
        number = min(num_input_sets(problem.num_bytes(self.shape), self.device), fitting)
        blocks = iter(self._order)
        sets = []
        for _ in range(number):
            tables = [list(islice(blocks, blocks_each)) for _ in range(problem.batch)]
            sets.append(self._one(problem, tables))
        if isinstance(sets[0].plan, TilePlan):  # layers and passes share one workspace
            workspace = sets[0].plan.workspace
            sets = [replace(one, plan=replace(one.plan, workspace=workspace)) for one in sets]
        return sets

    def _one(self, problem: Problem, tables: list[list[int]]) -> Inputs:
        nodes, batch_size = problem.nodes, problem.batch
        is_tree = nodes > 1
        kv_len = problem.context + nodes
        batch = AttentionBatch(
            query_indptr=list(range(0, (batch_size + 1) * nodes, nodes)),
            kv_lens=[kv_len] * batch_size,
            block_tables=tables,
            tree_starts=[problem.context if is_tree else kv_len] * batch_size,
            ancestor_masks=[
                random_tree(nodes, self._rng) if is_tree else None for _ in range(batch_size)
            ],
        )
        shape = self.shape
        plan = plan_attention(
            batch,
            block_size=BLOCK_SIZE,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=self.device,
        )
        if isinstance(plan, TilePlan):
            plan.prepare()
        size = (batch_size * nodes, shape.num_query_heads, shape.head_dim)
        query = torch.randn(size, device=self.device, dtype=shape.dtype)
        return Inputs(query=query, plan=plan, batch=batch)

    def attend(self, inputs: Inputs) -> Tensor:
        """The kernel under test."""
        return paged_attention(
            inputs.query,
            self.keys,
            self.values,
            inputs.plan,
            scale=self.shape.head_dim**-0.5,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def calls(self, problem: Problem) -> list[Callable[[], object]]:
        """The case for the clock."""
        return [partial(self.attend, inputs) for inputs in self.inputs(problem)]

    # ---- for torch's functions

    def gather(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Keys and values, [batch, num_kv_heads, kv_len, head_dim] each."""
        return self.gather_blocks(self.block_index(inputs), inputs.batch.kv_lens[0])

    def block_index(self, inputs: Inputs) -> Tensor:
        """Block ids, int64 [batch, blocks of a sequence]."""
        return torch.tensor(inputs.batch.block_tables, device=self.device)

    def gather_blocks(self, index: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        """As `gather`, from block ids on the device."""
        batch = index.shape[0]
        shape = (batch, -1, self.shape.num_kv_heads, self.shape.head_dim)
        parts = []
        for cache, scale in ((self.keys, self.k_scale), (self.values, self.v_scale)):
            if scale is None:
                rows = cache[index].view(shape)
            else:  # indexing knows no float8
                rows = cache.view(torch.uint8)[index].view(cache.dtype).view(shape).float()
                rows = rows * scale[index].view(shape[:3])[..., None]
            parts.append(rows[:, :kv_len].to(self.shape.dtype).transpose(1, 2))
        return parts[0], parts[1]

    def mask(self, inputs: Inputs) -> Tensor | None:
        """Return the visible keys, bool [batch, nodes, kv_len]; None for plain decoding: all."""
        batch = inputs.batch
        if batch.ancestor_masks[0] is None:
            return None
        kv_len, tree_start = batch.kv_lens[0], batch.tree_starts[0]
        num_nodes = kv_len - tree_start
        bits = torch.tensor(
            [
                [[mask >> node & 1 for node in range(num_nodes)] for mask in masks or ()]
                for masks in batch.ancestor_masks
            ],
            dtype=torch.bool,
            device=self.device,
        )
        return F.pad(bits, (tree_start, 0), value=True)

    def pack(self, query: Tensor, batch: int) -> Tensor:
        """Heads that share keys become rows: [batch, num_kv_heads, nodes * group, head_dim]."""
        shape = self.shape
        rows = query.view(batch, -1, shape.num_kv_heads, self.group_size, shape.head_dim)
        return rows.transpose(1, 2).reshape(batch, shape.num_kv_heads, -1, shape.head_dim)

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.shape.num_query_heads // self.shape.num_kv_heads
