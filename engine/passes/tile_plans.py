"""Attention plans over a pass's tensors, for kernels that find their work on the device."""

import torch
from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.kernels.attention.attention_tiles import (
    TilePlan,
    TileShape,
    new_work,
    tile_shape,
    workspace_size,
)
from outrider.kernels.attention.stage_rows import PassInputs, tree_paths
from outrider.kernels.tree_bounds import MAX_TREE_NODES
from outrider.kernels.triton_support import architecture

# Of partial sums. Only deterministic passes over many keys could use more; they get their own.
MAX_WORKSPACE_BYTES = 256 << 20


class TilePlanner:
    """Chooses tile shapes and makes plans for one runner's passes.

    The plans share one workspace, allocated here, because passes run one after the other. max_rows
    and max_context bound the passes that it is sized for; larger ones get a workspace of their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_deterministic: bool,
        max_rows: int,
        max_context: int,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._is_deterministic = is_deterministic
        self._max_context = max_context
        wanted = max(
            self._workspace_size(shape, num_rows=max_rows, max_keys=max_context)
            for shape in self.shapes(max_rows)
        )
        size = min(wanted, MAX_WORKSPACE_BYTES // 4)
        self._workspace = torch.empty(size, dtype=torch.float32, device=device)

    def shape(self, rows_per_sequence: int) -> TileShape:
        """The tile shape for passes whose longest sequence has about so many rows."""
        config = self._config
        return tile_shape(
            max_rows_per_sequence=max(rows_per_sequence, 1),
            group_size=config.num_query_heads // config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
            architecture=architecture(self._device),
            deterministic=self._is_deterministic,
        )

    def shapes(self, num_rows: int) -> tuple[TileShape, ...]:
        """Return all shapes that passes of up to so many rows may have."""
        return tuple(dict.fromkeys(self.shape(rows) for rows in range(1, num_rows + 1)))

    def max_keys(self, shape: TileShape, num_rows: int) -> int:
        """Keys that a sequence of a pass may have for the shared workspace to be enough."""
        keys = self._max_context
        while keys and self._workspace_size(shape, num_rows=num_rows, max_keys=keys) > len(
            self._workspace
        ):
            keys //= 2
        return keys

    def paths(self, num_rows: int) -> Tensor | None:
        """int32 [num_rows, 256] for the rows' paths, where plans need them."""
        if not self._is_deterministic:
            return None
        return torch.empty((num_rows, MAX_TREE_NODES), dtype=torch.int32, device=self._device)

    def plan(
        self,
        inputs: PassInputs,
        *,
        shape: TileShape,
        max_keys: int,
        zeros: Tensor | None,
        paths: Tensor | None,
        window_blocks: Tensor | None = None,
    ) -> TilePlan:
        """The plan of a pass; `prepare_plan` must run before each use.

        `zeros`: int32 as many as rows or sequences, where some layers have a window and some none;
        `paths`: see `paths`. `window_blocks`: `KVCache.window_blocks`.
        """
        num_rows, num_sequences = len(inputs.token_ids), len(inputs.row_starts)
        needed = self._workspace_size(shape, num_rows=num_rows, max_keys=max_keys)
        workspace = self._workspace
        if needed > len(workspace):
            workspace = torch.empty(needed, dtype=torch.float32, device=self._device)

        def plan_of(
            begins: Tensor,
            first_keys: Tensor,
            words: Tensor,
            block_ids: Tensor,
            full: TilePlan | None,
        ) -> TilePlan:
            return TilePlan(
                row_starts=inputs.row_starts,
                num_rows=inputs.num_rows,
                kv_lens=inputs.kv_lens,
                first_keys=first_keys,
                tree_starts=inputs.tree_starts,
                block_indptr=inputs.block_indptr,
                block_ids=block_ids,
                row_begins=begins,
                row_ends=inputs.row_ends,
                ancestor_words=words,
                path_slots=paths,
                work=new_work(num_sequences, self._device),
                workspace=workspace,
                shape=shape,
                num_kv_heads=self._config.num_kv_heads,
                max_tiles=self._max_tiles(shape, num_rows, num_sequences),
                full=full,
            )

        full = None
        if zeros is not None:
            full = plan_of(
                zeros[:num_rows],
                zeros[:num_sequences],
                inputs.full_words,
                inputs.block_ids,
                None,
            )
        block_ids = inputs.block_ids
        if window_blocks is not None:
            block_ids = torch.empty_like(block_ids)  # written by `prepare_plan`
        return plan_of(inputs.row_begins, inputs.first_keys, inputs.ancestor_words, block_ids, full)

    def _max_tiles(self, shape: TileShape, num_rows: int, num_sequences: int) -> int:
        return min(num_rows, num_sequences + num_rows // shape.rows_per_tile)

    def _workspace_size(self, shape: TileShape, *, num_rows: int, max_keys: int) -> int:
        """Return the workspace's size in floats."""
        return workspace_size(
            shape,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            device=self._device,
            max_tiles=self._max_tiles(shape, num_rows, num_rows),
            max_kv_len=max_keys,
        )


def prepare_plan(plan: TilePlan, inputs: PassInputs, window_blocks: Tensor | None = None) -> None:
    """Work out on the device what a plan derives from a pass's inputs, which may have changed.

    `window_blocks`: as for `TilePlanner.plan`.
    """
    if window_blocks is not None:
        # A recorded pass's ids go on to the end of its buffer, where larger passes have left rows.
        known = inputs.block_ids.clamp(0, len(window_blocks) - 1)
        torch.index_select(window_blocks, 0, known, out=plan.block_ids)
    if plan.path_slots is not None:
        tree_paths(inputs.full_words, inputs.row_tree_starts, plan.path_slots)
    plan.prepare()
