"""The tensors of recurrent layers: states at boundaries, and what later rows contribute to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.cache.recurrent_lines import LINE_ROWS
from outrider.engine.model.config import Recurrence
from outrider.engine.model.kv_cache import lazy_zeros
from outrider.kernels.recurrent.delta_rows import DeltaBatch, RowContributions
from outrider.kernels.recurrent.fold_states import StateFolds
from outrider.kernels.recurrent.tree_conv import ConvPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """One layer's part of the cache."""

    inputs: Tensor
    """[rows + 3 * num_states, conv_size], what the convolution reads: of the lines' rows, then of
    the three rows in front of each state. The last two are zero and waste."""
    rows: RowContributions
    states: Tensor
    """float32 [num_states, num_value_heads, key_dim, value_dim]."""


class RecurrentCache:
    """Rows of `num_lines` sequences and `num_states` states, for every recurrent layer.

    A line has `LINE_ROWS` rows, of slot s row s modulo that. State 0 is the empty text's and stays
    zero. `line_blocks`: int64 [num_blocks], the first row of each block of the KV cache in the line
    of the sequence that computed it last, -1 before.
    """

    def __init__(
        self,
        shape: Recurrence,
        *,
        num_layers: int,
        num_lines: int,
        num_states: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeros; `dtype`: the model's."""
        self.num_lines = num_lines
        self.num_states = num_states
        self.num_rows = num_lines * LINE_ROWS
        self._num_tails = shape.num_taps - 1

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return lazy_zeros((num_layers, *sizes), dtype=dtype, device=device)

        num_inputs = self.num_rows + self._num_tails * num_states + 2
        self.inputs = zeros(num_inputs, shape.conv_size, dtype=dtype)
        heads = (shape.num_key_heads, shape.num_value_heads)
        # One row more: what is not to be kept is written there.
        self.keys = zeros(self.num_rows + 1, heads[0], shape.key_dim)
        self.deltas = zeros(self.num_rows + 1, heads[1], shape.value_dim)
        self.decays = zeros(self.num_rows + 1, heads[1])
        self.states = zeros(num_states, heads[1], shape.key_dim, shape.value_dim)
        self.line_blocks = torch.full((num_blocks,), -1, dtype=torch.int64, device=device)

    def layer(self, index: int) -> LayerStates:
        """Return the part of a layer, by its number among the recurrent ones."""
        return LayerStates(
            inputs=self.inputs[index],
            rows=RowContributions(
                keys=self.keys[index], deltas=self.deltas[index], decays=self.decays[index]
            ),
            states=self.states[index],
        )

    def tail(self, state: int, place: int) -> int:
        """Return the row of `inputs` that lies `place` rows (0 first) into a state's tail."""
        return self.num_rows + state * self._num_tails + place

    def state_parts(self, state: int) -> tuple[Tensor, Tensor]:
        """Return a state of all layers, and the inputs of the rows in front of it: views."""
        tail = self.tail(state, 0)
        return self.states[:, state], self.inputs[:, tail : tail + self._num_tails]

    @property
    def zero_input(self) -> int:
        """The row of `inputs` that is zero."""
        return self.inputs.shape[1] - 2

    @property
    def waste_input(self) -> int:
        """The row of `inputs` that takes what is not kept."""
        return self.inputs.shape[1] - 1

    def move(self, src_slots: Tensor, dst_slots: Tensor, block_size: int) -> None:
        """Move rows between slots of the KV cache, all layers. Slots: int64 [n], -1 for no move.

        All are read before one is written. Slots of blocks without a line are no moves either.
        """
        source, target = (self._rows_of(each, block_size) for each in (src_slots, dst_slots))
        is_move = (source >= 0) & (target >= 0)
        for tensor, waste in (
            (self.inputs, self.waste_input),
            (self.keys, self.num_rows),
            (self.deltas, self.num_rows),
            (self.decays, self.num_rows),
        ):
            moved = tensor[:, source.where(is_move, waste)]
            tensor[:, target.where(is_move, waste)] = moved

    def _rows_of(self, slots: Tensor, block_size: int) -> Tensor:
        """Return the slots' rows, -1 where there is none."""
        first = self.line_blocks[slots.clamp(min=0) // block_size]
        return (first + slots % block_size).where((slots >= 0) & (first >= 0), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStep:
    """Folds, then rows that read the states that were folded."""

    folds: StateFolds | None
    batches: tuple[DeltaBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPass:
    """What the recurrent layers have to know of a pass: `steps` follow each other."""

    cache: RecurrentCache
    conv: ConvPlan
    steps: tuple[RecurrentStep, ...]
