"""A rank's own process: it loads its part of the model and runs what rank 0 runs.

Standard input stays open for as long as rank 0 lives. A thread that reads it notices rank 0's end,
whichever way it ends, and ends this process too, also in the middle of an exchange.
"""

import logging
import os
import shutil
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from outrider.engine.cache.kv_view import KVView
from outrider.engine.errors import EngineError, UnsupportedModelError
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.shard import Shard
from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.parallel.collectives import TorchCollectives
from outrider.engine.parallel.messages import (
    AddAdapter,
    ChangeWindow,
    CopyBlocks,
    Loaded,
    MeasureRoom,
    MoveOnDevice,
    MoveSlots,
    OpenCache,
    RankFailed,
    RankSpec,
    Room,
    RunPass,
    SentView,
)
from outrider.engine.parallel.runner import RankRunner, num_packed, unpacked_rows
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.pass_memory import run_largest_pass
from outrider.kernels.layers.lora import LoraWeights

logger = logging.getLogger(__name__)

_EXIT_REPORTED = 3


def main() -> None:
    """Follow rank 0 until it ends, or lets go; the socket's descriptor is the argument."""
    # A Ctrl-C in the terminal and a service manager's SIGTERM reach the whole group, but rank 0
    # decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    status = 0
    folder = None
    try:
        spec: RankSpec = connection.recv()
        folder = spec.folder
        threading.Thread(target=_end_with_rank_0, args=[folder], daemon=True).start()
        _follow(connection, spec)
    except EOFError:  # rank 0 is gone, and perhaps could not remove where the ranks met
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("rank failed")
        text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        is_unsupported = isinstance(error, UnsupportedModelError)
        connection.send(RankFailed(text, is_unsupported=is_unsupported))
        status = _EXIT_REPORTED
    sys.stderr.flush()
    os._exit(status)


def _follow(connection: Connection, spec: RankSpec) -> None:
    logging.basicConfig(
        level=spec.log_level, format=f"%(levelname)s rank={spec.rank} %(name)s %(message)s"
    )
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(spec.num_threads)
    collectives = TorchCollectives(rank=spec.rank, count=spec.count, device=device)
    model = load_model(
        spec.model.path,
        dtype=spec.model.dtype,
        device=device,
        deterministic=spec.model.deterministic,
        max_context=spec.model.max_context,
        rounding=spec.model.rounding,
        shard=Shard(rank=spec.rank, count=spec.count, collectives=collectives),
    )
    connection.send(Loaded(model.numerics))
    collectives.connect(Path(spec.folder), timeout_s=spec.timeout_s)
    follower = _Follower(model, connection, collectives)
    with torch.inference_mode():
        while True:
            follower.run(connection.recv())


class _Follower:
    """Runs what rank 0 tells, on this rank's part of the weights and of the cache."""

    _runner: RankRunner
    """From the first cache on."""

    def __init__(
        self, model: CausalModel, connection: Connection, collectives: TorchCollectives
    ) -> None:
        self._model = model
        self._connection = connection
        self._collectives = collectives

    def _open(self, cache: OpenCache) -> None:
        self._runner = RankRunner(
            model=self._model,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            max_context=cache.max_context,
            kv_dtype=cache.kv_dtype,
            num_window_blocks=cache.num_window_blocks,
            taps=cache.taps,
            cuda_graphs=False,
        )
        # By rank 0's numbers.
        self._views: dict[int, KVView] = {}
        self._adapters: dict[int, LoraWeights] = {}

    def run(self, command: object) -> None:
        """Run a command."""
        match command:
            case RunPass():
                self._pass(command)
            case CopyBlocks(pairs):
                self._runner.copy_blocks(pairs)
            case MoveSlots(sources, destinations):
                self._runner.move_slots(sources, destinations)
            case MoveOnDevice(num_slots):
                slots = torch.empty((2, num_slots), dtype=torch.int64, device=self._runner.device)
                self._collectives.broadcast(slots)
                self._runner.compact(slots[0], slots[1])
            case ChangeWindow(changes, copies):
                self._runner.change_window(changes, copies)
            case AddAdapter(number, weights):
                self._adapters[number] = weights.to(self._model.device)
            case MeasureRoom(largest):
                run_largest_pass(self._model, largest, make_runner=RankRunner)
                self._connection.send(Room(self._free_bytes()))
            case OpenCache():
                self._open(command)
            case _:
                raise TypeError(f"no command: {command!r}")

    def _free_bytes(self) -> int | None:
        if self._model.device.type != "cuda":
            return None
        torch.cuda.empty_cache()  # what was freed counts as free again
        return torch.cuda.mem_get_info(self._model.device)[0]

    def _pass(self, command: RunPass) -> None:
        for number in command.forgotten:
            self._views.pop(number, None)
        for number in command.forgotten_adapters:
            self._adapters.pop(number, None)
        device_rows = None
        if command.device_rows is not None:
            device_rows = self._device_rows(command.device_views, *command.device_rows)
        slices = [
            ForwardSlice(
                view=self._view(piece.view),
                token_ids=piece.token_ids,
                start_slot=piece.start_slot,
                num_logit_rows=piece.num_logit_rows,
                positions=piece.positions,
                tree_start=piece.tree_start,
                ancestor_masks=piece.ancestor_masks,
            )
            for piece in command.slices
        ]
        self._runner.forward(slices, device_rows, picked=self._picked(command))
        self._runner.take_finished()

    def _picked(self, command: RunPass) -> PickedRows | None:
        if command.picked is None:
            return None
        words = None
        if command.is_sampled:
            count = PickedRows.num_words(len(command.picked))
            words = torch.empty(count, dtype=torch.int32, device=self._runner.device)
            self._collectives.broadcast(words)
        return PickedRows(rows=command.picked, words=words)

    def _view(self, sent: SentView) -> KVView:
        """Return a view with rank 0's block table; nothing is allocated for it here."""
        view = self._views.get(sent.number)
        if view is None:
            adapter = None if sent.adapter is None else self._adapters[sent.adapter]
            view = self._views[sent.number] = self._runner.new_view("", adapter)
        view.block_table[sent.kept :] = sent.tail
        view.window_table = sent.window_table
        return view

    def _device_rows(self, views: list[SentView], num_rows: int, num_words: int) -> DeviceRows:
        packed = torch.empty(
            num_packed(num_rows, num_words, len(views)),
            dtype=torch.int64,
            device=self._runner.device,
        )
        self._collectives.broadcast(packed)
        make = partial(DeviceRows, views=[self._view(view) for view in views])
        return unpacked_rows(packed, num_rows=num_rows, num_words=num_words, make=make)


def _end_with_rank_0(folder: str) -> None:
    """Wait for the end of standard input, after which nothing is left to follow."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
