"""Device time by graph replay, and the ceilings that times are compared with.

A case is a list of calls that do the same with different inputs, together larger than the L2
cache, so that no call finds its inputs there. They are captured as one CUDA graph; its replays are
timed with events, so neither Python nor launches are in the figure. Cases are replayed round by
round, A B A B, and comparisons are ratios within a round.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.shared.record import Summary, paired_ratio

Calls = Sequence[Callable[[], object]]

# A replay lasts at least this long, so that the events' own resolution does not matter.
_REPLAY_S = 400e-6
_MAX_CALLS = 4096
_WARM_REPLAYS = 2
# The inputs of a case are this many times as large as the L2 cache, where that is affordable.
_L2_MULTIPLE = 3
_MAX_SETS = 256
_COPY_BYTES = 1 << 30
_MATMUL_SIZE = 8192
_CEILING_ROUNDS = 15


# ---- device time --------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_input_sets(set_bytes: int, device: torch.device) -> int:
    """Return how many different inputs a case needs so that none of them stays in the L2 cache."""
    if device.type != "cuda":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(_MAX_SETS, -(-_L2_MULTIPLE * l2_bytes // max(set_bytes, 1))))


def poison(device: torch.device, *, num_bytes: int = 1 << 28) -> None:
    """Leave NaN in memory that the allocator gives out next, so that unwritten outputs show.

    Blocks of several sizes are filled and given back: small and large pools keep them apart.
    """
    if device.type != "cuda":
        num_bytes = min(num_bytes, 1 << 20)
    blocks = [
        torch.full((size // 4,), float("nan"), device=device)
        for size in (num_bytes, 1 << 20, 1 << 18, 1 << 16, 1 << 14, 1 << 12)
        for _ in range(4 if size < 1 << 20 else 1)
    ]
    del blocks


class Replayed:
    """The calls of a case, captured; without a GPU, or where `captures` is false, only called."""

    def __init__(self, calls: Calls, device: torch.device, *, captures: bool = True) -> None:
        """Run every call once (kernels are compiled then), and capture."""
        self._calls = calls
        self._device = device
        self._captures = captures and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self.num_calls = len(calls)
        if device.type != "cuda":
            return
        for call in calls:
            call()
        synchronize(device)
        self._record()
        for _ in range(_WARM_REPLAYS):
            seconds = self._replay()
        wanted = min(int(_REPLAY_S / max(seconds, 1e-9)) + 1, _MAX_CALLS // len(calls))
        if wanted > 1:
            self.num_calls = wanted * len(calls)
            self._record()
            self._replay()

    def seconds(self) -> float:
        """Return the seconds of one call, in the mean of a replay."""
        return self._replay() / self.num_calls

    def close(self) -> None:
        """Give the graph's memory back."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _record(self) -> None:
        self.close()
        if not self._captures:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._call_all()
        self._graph = graph

    def _call_all(self) -> None:
        for index in range(self.num_calls):
            self._calls[index % len(self._calls)]()  # its output is freed and used again

    def _replay(self) -> float:
        """Seconds of one replay."""
        if self._device.type != "cuda":
            started_s = time.perf_counter()
            self._call_all()
            return time.perf_counter() - started_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        if self._graph is None:
            self._call_all()
        else:
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def measure(
    cases: Mapping[str, Calls],
    *,
    device: torch.device,
    rounds: int = 21,
    uncaptured: Collection[str] = (),
) -> dict[str, list[float]]:
    """Seconds of a call of each case in every round; all cases warm before the first round.

    `uncaptured`: cases that no CUDA graph can hold, because the host takes part. Theirs is the time
    between two events with all calls in between, the host's included where it is the slower one.
    """
    replayed: dict[str, Replayed] = {}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    with torch.no_grad():
        try:
            for name, calls in cases.items():
                replayed[name] = Replayed(calls, device, captures=name not in uncaptured)
            for _ in range(rounds if device.type == "cuda" else 1):
                for name, one in replayed.items():
                    samples[name].append(one.seconds())
        finally:
            for one in replayed.values():
                one.close()
    return samples


def ratio_of(samples: Mapping[str, Sequence[float]], above: str, below: str) -> float:
    """The median of the ratios within the rounds."""
    return paired_ratio(samples[above], samples[below]).median


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Between two results, as a share of the expected ones' greatest; NaN where one has a NaN."""
    scale = expected.float().abs().max().clamp(min=1e-6)
    return float((found.float() - expected.float()).abs().max() / scale)


# ---- ceilings -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The best rates of this device, measured in this run.

    `copy_bytes_per_s`: read and written bytes of a large device-to-device copy. `read_bytes_per_s`:
    of a sum, for comparison only: ceilings are the copy's. `matmul_flops_per_s`: a bfloat16
    8192 x 8192 x 8192 product of random numbers (zeros draw less power and run faster).
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    matmul_flops_per_s: float

    def floor_s(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """The least seconds in which so much can be moved and computed."""
        return max(num_bytes / self.copy_bytes_per_s, num_flops / self.matmul_flops_per_s)

    def is_memory_bound(self, num_bytes: float, num_flops: float) -> bool:
        """Return whether moving takes longer than computing."""
        moving_s = num_bytes / self.copy_bytes_per_s
        return moving_s >= num_flops / self.matmul_flops_per_s


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy, read and multiply, in turn."""
    is_real = device.type == "cuda"
    num_elements = (_COPY_BYTES if is_real else 1 << 20) // 2
    size = _MATMUL_SIZE if is_real else 128
    source = torch.randn(num_elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    words = source.view(torch.int32)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    samples = measure(
        {
            "copy": [partial(target.copy_, source)],
            "read": [partial(torch.sum, words, dtype=torch.int32)],
            "matmul": [partial(torch.matmul, left, right, out=product)],
        },
        device=device,
        rounds=_CEILING_ROUNDS,
    )
    median = {name: Summary.of(seconds).median for name, seconds in samples.items()}
    return Ceilings(
        copy_bytes_per_s=2 * source.nbytes / median["copy"],
        read_bytes_per_s=source.nbytes / median["read"],
        matmul_flops_per_s=2 * size**3 / median["matmul"],
    )
