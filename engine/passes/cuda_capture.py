"""Recording CUDA graphs: what the recorded passes and the recorded levels of trees share."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# What the driver keeps for a graph's few hundred kernels.
BYTES_PER_GRAPH = 2 << 20

Run = Callable[[], None]
# Records what a function does and returns how to do it again, with the tensors' new contents.
CaptureFn = Callable[[Run], Run]


class CudaCapture:
    """Records CUDA graphs whose private memory is one pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Warmed up and recorded on one stream: cuBLAS has a workspace for each stream, which must
        # be there before the recording, and memory is shared within a stream only.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run) -> Run:
        """Run twice, so that kernels are compiled, loaded and chosen; then record."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",  # other threads may use CUDA meanwhile
        ):
            run()
        replay: Run = graph.replay
        return replay


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Objects that hold CUDA memory must not be collected in the middle of a recording."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
