"""The one door to Triton: which kernels run, how they are launched, what a device can do.

Triton exists on Linux only and takes time and memory to import, so it is loaded where its kernels
can be wanted: on a machine with a GPU, for its interpreter (TRITON_INTERPRET=1, set before this
module is imported), or by OUTRIDER_KERNELS=triton, which also compiles ahead of time without a GPU.
Without it `triton` is None, and of `tl` there is only the `constexpr` that kernels' definitions
name: they touch the rest only when they are launched.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

# Newer versions warn where it is not said whether a product and a sum may become one instruction.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def _load() -> tuple[Any, Any]:
    """(triton, triton.language) where kernels could be launched in this process, else stand-ins."""
    is_wanted = (
        torch.cuda.is_available()
        or os.environ.get("TRITON_INTERPRET") == "1"
        or os.environ.get("OUTRIDER_KERNELS") == "triton"
    )
    if is_wanted:
        with suppress(ImportError):  # no wheels for this system
            import triton
            import triton.language

            return triton, triton.language
    return None, SimpleNamespace(constexpr=lambda value: value)


triton, tl = _load()

__all__ = [
    "INTERPRETED",
    "Launch",
    "architecture",
    "dot",
    "is_automatic",
    "jit",
    "launch",
    "next_power_of_2",
    "num_multiprocessors",
    "observe_launches",
    "record_launches",
    "rounded",
    "tl",
    "triton",
    "use_kernels",
    "uses_triton",
]

KernelChoice = Literal["auto", "reference", "triton"]

_IS_INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)
# A kernel may read it: the interpreter lacks a few things that every device has.
INTERPRETED: Any = tl.constexpr(_IS_INTERPRETED)

_choice: ContextVar[KernelChoice | None] = ContextVar("kernel_choice", default=None)


def _chosen() -> KernelChoice:
    """Return what `use_kernels` says here, else what OUTRIDER_KERNELS says everywhere."""
    return _choice.get() or _environment_choice()


@functools.cache
def _environment_choice() -> KernelChoice:
    name = os.environ.get("OUTRIDER_KERNELS", "auto")
    if name not in ("auto", "reference", "triton"):
        raise ValueError(f"OUTRIDER_KERNELS={name!r} must be auto, reference or triton")
    return name  # type: ignore[return-value]


@contextmanager
def use_kernels(choice: KernelChoice) -> Iterator[None]:
    """Within the block, run this kind of kernels (in this thread)."""
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def is_automatic() -> bool:
    """True unless one kind of kernels is to run everywhere."""
    return _chosen() == "auto"


def uses_triton(where: Tensor | torch.device) -> bool:
    """True if an operation on this tensor or device runs its Triton kernel.

    "auto": on CUDA. "triton" also on the CPU, where only the interpreter can; "reference" nowhere.
    """
    choice = _chosen()
    if choice == "auto":
        device = where if isinstance(where, torch.device) else where.device
        return device.type == "cuda" and triton is not None
    if choice == "triton" and triton is None:
        raise RuntimeError(
            "Triton kernels are asked for, but triton is not loaded: install it, and on a CPU set "
            "TRITON_INTERPRET=1 before the program starts"
        )
    return choice == "triton"


# Parameters of kernels that change with the load. Triton would compile a variant of its own where
# one of them is 1 or divisible by 16, about a second each, while every stream waits.
_COUNTS = frozenset(
    {
        "batch",
        "first",
        "last",
        "max_depth",
        "max_path",
        "num_cells",
        "num_depths",
        "num_moves",
        "num_nodes",
        "num_pairs",
        "num_rows",
        "num_sequences",
        "num_slots",
        "num_tiles",
        "num_tokens",
        "odd_count",
        "odd_num_sequences",
        "site",
        "stride",
        "words_stride",
    }
)


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` with one variant for all counts; without Triton the function stays what it is.

    A parameter is a count by its name alone, which must be in `_COUNTS`. An integer of another name
    gets a compiled variant for 1, for multiples of 16, and for others: the first request of each
    kind waits a second for the compiler. A stand-in without Triton is never launched.
    """
    if triton is None:
        return function
    counts = [name for name in inspect.signature(function).parameters if name in _COUNTS]
    return triton.jit(function, do_not_specialize=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch as `record_launches` saw it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int

    def variant(self) -> str:
        """Return what Triton compiles apart: kernel, constants, and what it specialises for.

        That is types, whether pointers and numbers are divisible by 16, and whether numbers are 1.
        """
        names = inspect.signature(self.kernel.fn).parameters
        kinds = [
            _specialised(value, is_count=name in _COUNTS)
            for name, value in zip(names, self.args, strict=False)
        ]
        constants = sorted((name, str(value)) for name, value in self.constexprs.items())
        own = (self.kernel.fn.__name__, self.num_warps, self.num_stages)
        return " ".join(map(str, (*own, *kinds, *constants)))


def _specialised(value: Any, *, is_count: bool) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.data_ptr() % 16 == 0}"
    if isinstance(value, int) and not isinstance(value, bool):
        size = "int32" if -(2**31) <= value < 2**31 else "int64"
        if is_count:
            return size
        return "1" if value == 1 else f"{size} {value % 16 == 0}"
    return "None" if value is None else type(value).__name__


_recorder: ContextVar[list[Launch] | None] = ContextVar("launch_recorder", default=None)
_observer: ContextVar[Callable[[Launch], None] | None] = ContextVar("observer", default=None)
_assumed_architecture: ContextVar[int | None] = ContextVar("assumed_architecture", default=None)


@contextmanager
def record_launches(architecture: int) -> Iterator[list[Launch]]:
    """Within the block, launches are noted instead of made, as for a GPU of this architecture.

    So that exactly what would run can be compiled ahead of time, on a machine without a GPU.
    """
    launches: list[Launch] = []
    tokens = _recorder.set(launches), _assumed_architecture.set(architecture)
    with use_kernels("triton"):
        try:
            yield launches
        finally:
            _recorder.reset(tokens[0])
            _assumed_architecture.reset(tokens[1])


@contextmanager
def observe_launches(on_launch: Callable[[Launch], None]) -> Iterator[None]:
    """Within the block, `on_launch` is told of each launch before it is made or recorded."""
    token = _observer.set(on_launch)
    try:
        yield
    finally:
        _observer.reset(token)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    **constexprs: Any,
) -> None:
    """Run `kernel[grid](*args, **constexprs)`; an empty grid is no launch.

    `args`: in the kernel's order, tensors, None, ints and floats; constexprs: its constants by
    name.
    """
    if 0 in grid:
        return
    recorder, observer = _recorder.get(), _observer.get()
    if recorder is not None or observer is not None:
        own = Launch(
            kernel=kernel,
            grid=grid,
            args=args,
            constexprs=constexprs,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        if observer is not None:
            observer(own)
        if recorder is not None:
            recorder.append(own)
            return
    kernel[grid](*args, **constexprs, num_warps=num_warps, num_stages=num_stages)


def architecture(device: torch.device) -> int:
    """80 for sm_80, 90 for sm_90 and so on; 90 is assumed where there is no GPU."""
    assumed = _assumed_architecture.get()
    if assumed is not None:
        return assumed
    return _architecture(device) if device.type == "cuda" else 90


@functools.cache
def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def num_multiprocessors(device: torch.device) -> int:
    """Count how many programs run side by side at least; a handful where there is no GPU."""
    if _assumed_architecture.get() is not None:
        return {80: 108, 90: 132}.get(architecture(device), 148)
    return _num_multiprocessors(device) if device.type == "cuda" else 3


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is not below `number`; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


@jit
def dot(left, right, sums):  # type: ignore[no-untyped-def]
    """sums + left @ right with float32 sums, whatever the operands' type (tf32 is never used)."""
    if INTERPRETED and left.dtype == tl.bfloat16:  # numpy has no bfloat16; products are exact
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums, input_precision="ieee")


@jit
def rounded(values, dtype):  # type: ignore[no-untyped-def]
    """float32 values in another type, to nearest, ties to even, as every GPU's cast does.

    The interpreter's own cast to bfloat16 cuts the last bits off.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = tl.where(values == values, nearest.to(tl.float32, bitcast=True), values)
    return values.to(dtype)
