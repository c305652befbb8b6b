"""CUDA graphs of a model's passes: recorded at start-up, replayed with new contents.

A small pass has hundreds of kernels that each run for some microseconds, less than launching them
takes. A graph launches them all at once, but with the addresses and sizes that it was recorded
with. So there is one graph for each of some numbers of rows (`BUCKETS`) and each shape of attention
tile that such passes may have. All read the same static inputs and write the same static outputs. A
pass is padded to the next size. What varies beside the contents, the work of attention, is worked
out on the device.

Prompts are bound by computing: above `MOST_LOGIT_ROWS` rows sizes are a fourth apart at most, so
that little is computed for padding. Each has the one shape of tile that long sequences have,
and at most so many rows get logits, those that the pass names.

Memory: inputs, outputs and attention's workspace are allocated before the first recording and
belong to this object. What lies between is private to the graphs, in one pool that all of them
share. No graph keeps anything there beyond its end. No two run at the same time, since all are
replayed on the engine's stream. The largest is recorded first, so that the others fit into its
memory. `estimate_bytes` says in advance what all this takes.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.protocol import CausalModel, ForwardOutput
from outrider.engine.passes.cuda_capture import (
    BYTES_PER_GRAPH,
    CaptureFn,
    Run,
    no_garbage_collection,
)
from outrider.engine.passes.step_buffers import PassLayout, StagedPass, StepBuffers, tree_rows
from outrider.engine.passes.tile_plans import MAX_WORKSPACE_BYTES, TilePlanner, prepare_plan
from outrider.kernels.attention.attention_tiles import MAX_SEQUENCES, TilePlan, TileShape
from outrider.kernels.attention.stage_rows import PassInputs, stage_rows

logger = logging.getLogger(__name__)

BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
)
# Passes of up to so many rows get logits for all of them, larger ones for at most as many.
MOST_LOGIT_ROWS = 256
# Static room for block ids, 4 bytes each; a pass with more is launched kernel by kernel.
MAX_BLOCK_IDS = 1 << 20
# cuBLAS's, for the stream of the recordings.
_CUBLAS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPass:
    """A recorded pass: its layout, its inputs, and how to run it again.

    The plan is kept because what was recorded goes on reading and writing its tensors.
    """

    layout: PassLayout
    inputs: PassInputs
    plan: TilePlan
    shape: TileShape
    max_keys: int
    replay: Run


class PassGraphs:
    """The recorded passes of one runner; see this module's docstring.

    What `run` returns are views of static outputs: valid until the next `run`. A caller that needs
    them longer makes a copy.
    """

    def __init__(
        self,
        *,
        model: CausalModel,
        kv_cache: KVCache,
        buffers: StepBuffers,
        planner: TilePlanner,
        max_context: int,
        max_rows: int = BUCKETS[-1],
        taps: tuple[int, ...] = (),
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._buffers = buffers
        self._planner = planner
        self._sizes = tuple(rows for rows in BUCKETS if rows <= max_rows)
        self._captured: dict[tuple[int, TileShape], CapturedPass] = {}
        largest = self._layout(self._sizes[-1])
        blocks_per_context = -(-max_context // buffers.block_size)
        self._max_block_ids = min(largest.num_sequences * blocks_per_context, MAX_BLOCK_IDS)
        device, config = model.device, model.config
        # Inputs of all sizes begin at the same place; passes run one after the other.
        self._words = torch.zeros(
            largest.num_words(self._max_block_ids), dtype=torch.int64, device=device
        )
        self._paths = planner.paths(largest.num_rows)
        num_logits = min(largest.num_rows, MOST_LOGIT_ROWS)
        self._logits = torch.zeros(
            (num_logits, config.vocab_size), dtype=torch.float32, device=device
        )

        def rows_of(width: int, count: int = largest.num_rows) -> Tensor:
            return torch.zeros((count, width), dtype=model.dtype, device=device)

        self._hidden = rows_of(config.hidden_size, num_logits)
        self._tap_layers = taps
        self._taps = rows_of(len(taps) * config.hidden_size) if taps else None
        self._features = rows_of(model.feature_size) if model.feature_size else None

    def _layout(self, num_rows: int) -> PassLayout:
        return self._buffers.layout(num_rows=num_rows, num_sequences=min(num_rows, MAX_SEQUENCES))

    @property
    def num_captured(self) -> int:
        """Count how many passes were recorded."""
        return len(self._captured)

    # ---- recording ------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(
        self, capture: CaptureFn, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Record every size and tile shape, the largest first; `on_progress(done, total)`.

        A pass for which the memory does not suffice is left out, and runs unrecorded later.
        """
        kinds = [
            (rows, shape)
            for rows in reversed(self._sizes)
            for shape in reversed(self._shapes(rows))
        ]
        begun_s = time.perf_counter()
        with no_garbage_collection():
            for done, (rows, shape) in enumerate(kinds, start=1):
                try:
                    self._captured[rows, shape] = self._capture_one(capture, rows, shape)
                except torch.OutOfMemoryError:
                    logger.warning("cuda graph left out rows=%d reason=out_of_memory", rows)
                if on_progress is not None:
                    on_progress(done, len(kinds))
        logger.info(
            "cuda graphs captured=%d of=%d seconds=%.1f",
            len(self._captured),
            len(kinds),
            time.perf_counter() - begun_s,
        )

    def _shapes(self, num_rows: int) -> tuple[TileShape, ...]:
        if num_rows > MOST_LOGIT_ROWS:
            return (self._planner.shape(num_rows),)
        return self._planner.shapes(num_rows)

    def _capture_one(self, capture: CaptureFn, num_rows: int, shape: TileShape) -> CapturedPass:
        layout = self._layout(num_rows)
        inputs = layout.inputs(self._words)
        max_keys = self._planner.max_keys(shape, num_rows)
        plan = self._planner.plan(
            inputs,
            shape=shape,
            max_keys=max_keys,
            zeros=layout.tensor(self._words, "zeros") if layout.has_full else None,
            paths=None if self._paths is None else self._paths[:num_rows],
            window_blocks=self._kv_cache.window_blocks,
        )
        self._write_padding(layout)
        logit_rows = None
        if num_rows > MOST_LOGIT_ROWS:
            logit_rows = layout.tensor(self._words, "logit_rows")[:MOST_LOGIT_ROWS]

        def run() -> None:
            self._run(inputs, plan, logit_rows)

        return CapturedPass(
            layout=layout,
            inputs=inputs,
            plan=plan,
            shape=shape,
            max_keys=max_keys,
            replay=capture(run),
        )

    def _write_padding(self, layout: PassLayout) -> None:
        """A pass of padding only, so that warming up writes to no sequence's cache."""
        packed = self._buffers.pack(self._buffers.stage([], None), layout)
        self._words[: len(packed)].copy_(packed, non_blocking=True)

    def _run(self, inputs: PassInputs, plan: TilePlan, logit_rows: Tensor | None) -> None:
        """Do what is recorded: from the static inputs to the static outputs.

        `logit_rows`: the rows that get logits, in a static input; None for all.
        """
        num_rows = len(inputs.token_ids)
        num_logits = num_rows if logit_rows is None else len(logit_rows)
        prepare_plan(plan, inputs, self._kv_cache.window_blocks)
        output = self._model.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            plan,
            self._kv_cache,
            logit_rows,
            logits_out=self._logits[:num_logits],
            taps=self._tap_layers,
            features=None if self._features is None else self._features[:num_rows],
        )
        self._hidden[:num_logits].copy_(output.hidden)
        if self._taps is not None:
            assert output.taps is not None, "the model yields the taps that it is asked for"
            self._taps[:num_rows].copy_(output.taps)

    # ---- replaying ------------------------------------------------------------------------

    def find(self, staged: StagedPass, shape: TileShape) -> CapturedPass | None:
        """The recorded pass that this one fits into; None where it must be launched plainly."""
        if staged.num_block_ids > self._max_block_ids:
            return None
        for rows in self._sizes:
            captured = self._captured.get((rows, shape))
            if rows > MOST_LOGIT_ROWS and (
                len(staged.logit_rows) > MOST_LOGIT_ROWS or 4 * rows > 5 * staged.num_rows
            ):
                continue
            if (
                captured is not None
                and staged.num_rows <= rows
                and staged.num_sequences <= captured.layout.num_sequences
                and staged.max_keys(self._buffers.block_size) <= captured.max_keys
            ):
                return captured
        return None

    @torch.inference_mode()
    def run(
        self,
        captured: CapturedPass,
        staged: StagedPass,
        packed: Tensor,
        features: Tensor | None = None,
    ) -> ForwardOutput:
        """Return the output for the rows that want logits, and the taps of all rows.

        `packed`: in the captured pass's layout; `features`: of all rows, for models that read some.
        """
        self._words[: len(packed)].copy_(packed, non_blocking=True)
        if features is not None:
            assert self._features is not None, "the model reads no features"
            self._features[: staged.num_rows].copy_(features, non_blocking=True)
        if staged.device_rows is not None:
            stage_rows(
                tree_rows(staged.device_rows),
                captured.inputs,
                block_size=self._buffers.block_size,
                window=self._buffers.window,
            )
        captured.replay()
        rows = staged.logit_rows
        first, number = (rows[0], len(rows)) if rows else (0, 0)
        if captured.layout.num_rows > MOST_LOGIT_ROWS:  # they are the named rows already
            logits, hidden = self._logits[:number], self._hidden[:number]
        elif not rows or rows[-1] - first == number - 1:  # ascending, so nothing is left out
            logits, hidden = (each[first : first + number] for each in (self._logits, self._hidden))
        else:
            index = captured.layout.tensor(self._words, "logit_rows")[:number]
            logits, hidden = (each.index_select(0, index) for each in (self._logits, self._hidden))
        taps = None if self._taps is None else self._taps[: staged.num_rows]
        return ForwardOutput(logits=logits, hidden=hidden, taps=taps)


def estimate_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    max_rows: int = BUCKETS[-1],
    *,
    num_taps: int = 0,
    feature_size: int = 0,
) -> int:
    """Device memory that the graphs of a model take at most, workspaces included.

    The static inputs and outputs, the widest moment of a pass (logits before and after they become
    float32, or one layer's activations), and what driver and cuBLAS need.
    """
    sizes = [rows for rows in BUCKETS if rows <= max_rows]
    num_rows, num_logits = sizes[-1], min(sizes[-1], MOST_LOGIT_ROWS)
    outputs = config.vocab_size * 4 + config.hidden_size * dtype.itemsize
    # Taps lie in the pass's own memory first.
    of_all = (2 * num_taps * config.hidden_size + feature_size) * dtype.itemsize
    head = config.vocab_size * (4 + dtype.itemsize)
    heads = (2 * config.num_query_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = (4 * config.hidden_size + 3 * config.intermediate_size + 2 * heads) * dtype.itemsize
    num_graphs = sum(3 if rows <= MOST_LOGIT_ROWS else 1 for rows in sizes)
    return (
        num_logits * outputs
        + num_rows * of_all
        + max(num_logits * head, num_rows * layer)
        + num_graphs * BYTES_PER_GRAPH
        + _CUBLAS_BYTES
        + MAX_WORKSPACE_BYTES
        + MAX_BLOCK_IDS * 4
    )
