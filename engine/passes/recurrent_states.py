"""A runner's part for recurrent layers: their cache, its owners, and the plans of its passes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.cache.recurrent_lines import RecurrentPool, RecurrentSizes
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.recurrent_cache import RecurrentCache, RecurrentPass
from outrider.engine.passes.flat_rows import FlatRows
from outrider.engine.passes.recurrent_plan import RecurrentPlanner


class RecurrentStates:
    """Lines and states of a model's sequences, beside a KV cache of `num_blocks` blocks."""

    def __init__(
        self, model: CausalModel, sizes: RecurrentSizes, *, num_blocks: int, block_size: int
    ) -> None:
        """Allocate. Raises ValueError for blocks that boundaries would cut."""
        shape = model.config.recurrence
        assert shape is not None, "the model has no recurrent layers"
        self.pool = RecurrentPool(sizes, block_size=block_size)
        self._block_size = block_size
        self._cache = RecurrentCache(
            shape,
            num_layers=model.config.num_recurrent_layers,
            num_lines=sizes.num_lines,
            num_states=sizes.num_states,
            num_blocks=num_blocks,
            dtype=model.dtype,
            device=model.device,
        )
        self._planner = RecurrentPlanner(
            self._cache, num_taps=shape.num_taps, block_size=block_size
        )

    @torch.inference_mode()
    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Move rows with the keys of slots of the KV cache: int64 [n] each, -1 for no move."""
        self._cache.move(src_slots, dst_slots, self._block_size)

    def plan(self, rows: FlatRows) -> RecurrentPass:
        """Plan a pass; the states of its sequences move on."""
        return self._planner.plan(rows.recurrent, len(rows.token_ids))

    # ---- states that leave and come back ----------------------------------------------------

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of a state's arrays of bytes: `read_state` gives one behind another."""
        return [tuple(part.shape) for part in self._parts(0)]

    @torch.inference_mode()
    def read_state(self, state: int) -> bytes:
        """Return all that a checkpoint holds, as bytes."""
        return b"".join(part.contiguous().cpu().numpy().tobytes() for part in self._parts(state))

    @torch.inference_mode()
    def write_state(self, state: int, parts: Sequence[Tensor]) -> None:
        """Write what `read_state` read, an array of bytes of each shape."""
        for own, part in zip(self._parts(state), parts, strict=True):
            own.copy_(part)

    def _parts(self, state: int) -> list[Tensor]:
        """Return a state's part of the cache as bytes: itself, and the inputs in front of it."""
        return [part.view(torch.uint8) for part in self._cache.state_parts(state)]
