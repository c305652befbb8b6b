"""Runs one model on rows of many sequences, flattened into one forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.engine.cache.block_news import BlockNews
from outrider.engine.cache.block_pool import BlockPool, owner_tag, prefix_root
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.cache.window_blocks import WindowBlocks
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.passes.cache_extents import CacheExtents
from outrider.engine.passes.cache_moves import CacheMoves
from outrider.engine.passes.cuda_capture import CaptureFn, CudaCapture
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.flat_rows import FlatRows, ForwardSlice, to_tensors
from outrider.engine.passes.level_graphs import TREE_COUNTS, LevelConfig, LevelGraphs, RecordedTrees
from outrider.engine.passes.padding import Padding
from outrider.engine.passes.pass_clock import PassClock, PassTime, PassTimes
from outrider.engine.passes.pass_graphs import BUCKETS, MAX_BLOCK_IDS, PassGraphs
from outrider.engine.passes.pass_output import PassOutput
from outrider.engine.passes.recurrent_states import RecurrentStates
from outrider.engine.passes.step_buffers import StagedPass, StepBuffers, tree_rows
from outrider.engine.passes.tile_plans import TilePlanner, prepare_plan
from outrider.kernels.attention.attention_tiles import MAX_SEQUENCES
from outrider.kernels.attention.stage_rows import stage_rows
from outrider.kernels.layers.compiled_pass import WholePass
from outrider.kernels.layers.lora import LoraWeights
from outrider.kernels.triton_support import uses_triton

__all__ = ["ForwardSlice", "ModelRunner", "PassOutput", "PassTime", "PassTimes"]


@dataclass(kw_only=True)
class ModelRunner:
    """A model, its KV cache and the pool of the cache's blocks."""

    model: CausalModel
    num_blocks: int
    block_size: int = 16
    max_context: int | None = None
    prefix_caching: bool = True
    kv_dtype: torch.dtype | None = None
    """The type of the cache; None: the model's."""
    cuda_graphs: bool = True
    """Whether `capture_graphs` records passes. Before it is called, and for passes that are none of
    the recorded ones, kernels are launched one by one."""
    num_window_blocks: int | None = None
    """Blocks of layers that have a window, where they get a smaller cache of their own
    (`outrider.engine.cache.window_blocks`)."""
    recurrent_sizes: RecurrentSizes = field(default_factory=RecurrentSizes)
    """The sizes of what recurrent layers keep, where the model has some."""
    taps: tuple[int, ...] = ()
    """The hidden states that every pass yields of all its rows (`outrider.kernels.layers.taps`)."""
    pool: BlockPool = field(init=False)
    kv_cache: KVCache = field(init=False)
    on_pass: Callable[[int, float, float], None] | None = field(init=False, default=None)
    """Called with the rows, the seconds and the rows' mean context of every pass, once it is
    over."""
    _recurrent: RecurrentStates | None = field(init=False, default=None)
    _moves: CacheMoves = field(init=False)
    extents: CacheExtents = field(init=False)
    """Moves blocks of the prefix cache out of this runner, and into it."""
    _clock: PassClock = field(init=False)
    _buffers: StepBuffers = field(init=False)
    _planner: TilePlanner | None = field(init=False, default=None)
    _graphs: PassGraphs | None = field(init=False, default=None)
    _capture: CaptureFn | None = field(init=False, default=None)
    """Its graphs share one memory."""
    _levels: LevelGraphs | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Allocate the cache. Raises ValueError for a cache or taps that the model cannot use."""
        model = self.model
        model.config.check_taps(self.taps)
        if self.kv_dtype not in (None, model.dtype, torch.float8_e4m3fn):
            raise ValueError(
                f"kv_dtype={self.kv_dtype} must be the model's ({model.dtype}) or "
                "torch.float8_e4m3fn, the one with scales"
            )
        window = None
        if self.num_window_blocks is not None and model.config.sliding_window is not None:
            window = WindowBlocks(
                num_blocks=self.num_window_blocks,
                window=model.config.sliding_window,
                block_size=self.block_size,
            )
        self.pool = BlockPool(num_blocks=self.num_blocks, block_size=self.block_size, window=window)
        self.kv_cache = KVCache(
            model.config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self.kv_dtype or model.dtype,
            device=model.device,
            num_window_blocks=None if window is None else window.num_blocks,
        )
        if model.config.recurrence is not None:
            self._recurrent = RecurrentStates(
                model,
                self.recurrent_sizes,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
            )
        self._moves = CacheMoves(self.kv_cache, self.pool, self._recurrent)
        self.extents = CacheExtents(
            self.kv_cache, self.pool, self._recurrent, self._moves, numerics=self.numerics
        )
        trained = model.config.max_position_embeddings
        self.max_context = min(
            self.max_context or trained, trained, self.num_blocks * self.block_size
        )
        self._clock = PassClock(device=model.device, listener=self._report_pass)
        self._buffers = StepBuffers(
            device=model.device,
            block_size=self.block_size,
            window=model.config.sliding_window,
            has_full=model.config.has_mixed_windows,
        )

    @property
    def device(self) -> torch.device:
        """Device that holds the model."""
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.model.config.vocab_size

    @property
    def numerics(self) -> str:
        """The fingerprint of the model's arithmetic, and the type of its keys and values."""
        return f"{self.model.numerics} {self.kv_cache.dtype}"

    def new_view(
        self, cache_salt: str, adapter: LoraWeights | None = None, *, is_shared: bool = True
    ) -> KVView:
        """An empty view whose prefix cache is shared only under the same salt and adapter.

        `is_shared`: off, it neither takes blocks from the prefix cache nor leaves any there.
        """
        digest = "" if adapter is None else adapter.digest
        return KVView(
            self.pool,
            root=prefix_root(self.model.numerics, str(self.kv_cache.dtype), cache_salt, digest),
            prefix_caching=self.prefix_caching and is_shared,
            adapter=adapter,
            recurrent=None if self._recurrent is None else self._recurrent.pool,
            owner=owner_tag(cache_salt),
        )

    def block_news(self, name: str) -> BlockNews:
        """Return what collects the news of the prefix cache, once it is told to listen."""
        states = None if self._recurrent is None else self._recurrent.pool.states
        return BlockNews(self.pool, states, name)

    # ---- keys and values that move --------------------------------------------------------

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: (source, destination) pairs."""
        self._moves.copy_blocks(pairs)

    def move_slots(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Move keys and values between cache slots, safe under overlap."""
        self._moves.move_slots(source_slots, destination_slots)

    def compact(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """`move_slots` for slots that only the device knows: int64 [n] each, -1 for no move."""
        self._moves.compact(src_slots, dst_slots)

    def change_window(self, changes: dict[int, int], copies: list[tuple[int, int]]) -> None:
        """`CacheMoves.change_window`, for a runner that follows another one's pool."""
        self._moves.change_window(changes, copies)

    # ---- passes ---------------------------------------------------------------------------

    def forward(
        self,
        slices: Sequence[ForwardSlice],
        device_rows: DeviceRows | None = None,
        features: Tensor | None = None,
        picked: PickedRows | None = None,
    ) -> PassOutput:
        """Run one pass over the device's rows, which all get logits, and all rows of all slices.

        `features`: what the rows carry beside their tokens, [num_rows, feature_size] in the order
        of `PassOutput.taps`, padding included; None for a model that reads none. `picked`: logit
        rows of which only the chosen token is wanted, so that others may have -inf; None for none.
        With Triton's kernels the host does not wait for the device, neither for what the rows hold
        nor for the result. Without them, device rows are read by the host first.
        """
        self._clock.start()
        self._moves.apply_window_changes()
        if self._graphs is not None or self._is_staged:
            staged = self._buffers.stage(slices, device_rows)
            output = self._joined(self._run_staged(staged, features), picked)
            self._clock.stop(
                staged.num_rows, len(output.logits), staged.mean_context(self.block_size)
            )
            return output
        rows, padding = FlatRows(), None
        if device_rows is not None:
            real = rows.add_device_rows(device_rows)
            if len(real) < device_rows.total_rows:
                padding = Padding(real=real, total_rows=device_rows.total_rows)
        for piece in slices:
            rows.add(piece, self.block_size)
        if padding is not None and features is not None:
            features = padding.left_out(features)
        output = self._run_flat(rows, features)
        if padding is not None:
            output = output.padded(padding)
        output = self._joined(output, picked)
        self._clock.stop(len(rows.token_ids), len(rows.logit_rows), rows.mean_context())
        return output

    def _joined(self, output: PassOutput, picked: PickedRows | None) -> PassOutput:
        """Return the output of all devices that the model is on."""
        return output

    @property
    def _is_staged(self) -> bool:
        """True if plans lie on the device: for one shape of heads, and no recurrent layers."""
        config = self.model.config
        is_plain = config.full_heads is None and config.recurrence is None
        return is_plain and uses_triton(self.device)

    def _run_flat(self, rows: FlatRows, features: Tensor | None) -> PassOutput:
        """A pass that is planned on the host."""
        if not rows.token_ids:
            self._clock.start_work()
            return PassOutput.empty(self.model, len(self.taps))
        plan = self.model.plan_attention(rows.attention_batch(), block_size=self.block_size)
        token_ids, positions, slots, logit_rows = to_tensors(
            rows.token_ids, rows.positions, rows.slots, rows.logit_rows, device=self.device
        )
        recurrent = None if self._recurrent is None else self._recurrent.plan(rows)
        self._clock.start_work()
        output = self.model.forward(
            token_ids,
            positions,
            slots,
            plan,
            self.kv_cache,
            logit_rows,
            lora=rows.lora(deterministic=self.model.deterministic),
            recurrent=recurrent,
            taps=self.taps,
            features=features,
        )
        return PassOutput(logits=output.logits, hidden=output.hidden, taps=output.taps)

    @torch.inference_mode()
    def _run_staged(self, staged: StagedPass, features: Tensor | None) -> PassOutput:
        """A pass whose plan lies on the device: a recorded one, or kernel by kernel."""
        if not staged.num_rows:
            self._clock.start_work()
            return PassOutput.empty(self.model, len(self.taps))
        shape = self._plans().shape(staged.rows_per_sequence)
        lora = staged.lora()  # no recording has adapters' products
        if self._graphs is not None and lora is None:
            captured = self._graphs.find(staged, shape)
            if captured is not None:
                packed = self._buffers.pack(staged, captured.layout)
                self._clock.start_work()
                output = self._graphs.run(captured, staged, packed, features)
                return PassOutput(logits=output.logits, hidden=output.hidden, taps=output.taps)
        assert staged.num_sequences <= MAX_SEQUENCES, "more sequences than attention can search"
        layout = self._buffers.layout(num_rows=staged.num_rows, num_sequences=staged.num_sequences)
        packed = self._buffers.pack(staged, layout)
        self._clock.start_work()
        words = packed.to(self.device, non_blocking=True)
        inputs = layout.inputs(words)
        if staged.device_rows is not None:
            stage_rows(
                tree_rows(staged.device_rows),
                inputs,
                block_size=self.block_size,
                window=self._buffers.window,
            )
        plan = self._plans().plan(
            inputs,
            shape=shape,
            max_keys=staged.max_keys(self.block_size),
            zeros=layout.tensor(words, "zeros") if layout.has_full else None,
            paths=self._plans().paths(staged.num_rows),
            window_blocks=self.kv_cache.window_blocks,
        )
        prepare_plan(plan, inputs, self.kv_cache.window_blocks)
        logit_rows = None
        if not staged.wants_all_logits:
            logit_rows = layout.tensor(words, "logit_rows")[: len(staged.logit_rows)]
        output = self.model.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            plan,
            self.kv_cache,
            logit_rows,
            lora=lora,
            taps=self.taps,
            features=features,
        )
        return PassOutput(logits=output.logits, hidden=output.hidden, taps=output.taps)

    @torch.inference_mode()
    def grow_level(self, trees: RecordedTrees) -> None:
        """Run a recorded level: a pass, and what grows the trees around it."""
        self._clock.start()
        self._moves.apply_window_changes()
        self._clock.start_work()
        trees.replay()
        self._clock.stop(trees.num_rows, trees.num_rows, trees.mean_context)

    def _plans(self) -> TilePlanner:
        """Made when first wanted: it allocates the attention's workspace."""
        if self._planner is None:
            assert self.max_context is not None  # set when this was made
            self._planner = TilePlanner(
                self.model.config,
                dtype=self.model.dtype,
                device=self.device,
                is_deterministic=self.model.deterministic,
                max_rows=BUCKETS[-1],
                max_context=self.max_context,
            )
        return self._planner

    @property
    def picks(self) -> bool:
        """True if passes are cheaper where `picked` says of which rows a token is all."""
        return False

    def check(self) -> None:
        """Raise EngineError where what was computed lately may be wrong: a device was lost."""

    def whole_pass(self) -> WholePass | None:
        """Return what the compiled library needs to run passes itself; None where it cannot.

        A pass that it has run is `note_pass`ed.
        """
        is_plain = self._recurrent is None and self.pool.window is None and not self.taps
        if not is_plain or not isinstance(self.model, DecoderModel):
            return None
        return self.model.whole_pass(self.kv_cache)

    def note_pass(self, done: PassTime, whole_s: float) -> None:
        """Count a pass that was not run by `forward`; `whole_s`: with what made it ready."""
        self._clock.add(done, whole_s)

    # ---- graphs ---------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_graphs(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        capture: CaptureFn | None = None,
        max_rows: int = BUCKETS[-1],
    ) -> int:
        """Record the passes of up to `max_rows` rows; returns how many were.

        Nothing is recorded where `cuda_graphs` is off, where no Triton kernels run on CUDA, or
        where the model's passes cannot be recorded. The cache may hold anything, and nothing is
        written to it. `capture`: how to record, where it is not to be a CUDA graph.
        """
        if capture is None:
            on_cuda = self.device.type == "cuda" and uses_triton(self.device)
            if not (self.cuda_graphs and on_cuda and self.model.can_record):
                return 0
            capture = CudaCapture(self.device)
        assert self.max_context is not None  # set when this was made
        graphs = PassGraphs(
            model=self.model,
            kv_cache=self.kv_cache,
            buffers=self._buffers,
            planner=self._plans(),
            max_context=self.max_context,
            max_rows=max_rows,
            taps=self.taps,
        )
        graphs.capture(capture, on_progress)
        self._graphs, self._capture = graphs, capture
        return graphs.num_captured

    @torch.inference_mode()
    def capture_levels(self, config: LevelConfig) -> int:
        """Record the levels of trees that grow on the device; returns how many were.

        As the passes were recorded, and nothing where none were.
        """
        if self._graphs is None or self._capture is None:
            return 0
        assert self.max_context is not None  # set when this was made
        blocks_per_context = -(-self.max_context // self.block_size)
        levels = LevelGraphs(
            config=config,
            model=self.model,
            kv_cache=self.kv_cache,
            buffers=self._buffers,
            planner=self._plans(),
            max_block_ids=min(TREE_COUNTS[-1] * blocks_per_context, MAX_BLOCK_IDS),
        )
        levels.capture(self._capture)
        self._levels = levels
        return levels.num_captured

    def levels_for(self, config: LevelConfig) -> LevelGraphs | None:
        """Return the recorded levels of such trees; None where there are none."""
        levels = self._levels
        return levels if levels is not None and levels.config.fits(config) else None

    # ---- times ----------------------------------------------------------------------------

    @property
    def times(self) -> PassTimes:
        """Return how long the passes took that are known to be over."""
        return self._clock.times

    def take_finished(self) -> list[PassTime]:
        """The passes that have ended since this was last asked, oldest first; never waits."""
        return self._clock.take_finished()

    def wait(self) -> float:
        """Wait for all passes; returns the seconds of the last one."""
        return self._clock.wait()

    def _report_pass(self, num_rows: int, seconds: float, mean_context: float) -> None:
        if self.on_pass is not None:
            self.on_pass(num_rows, seconds, mean_context)
