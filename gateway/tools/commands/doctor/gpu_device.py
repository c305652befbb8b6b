"""Check the GPU itself: torch's build, the driver, the generation of the card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.gateway.tools.commands.doctor.findings import Finding

_GIB: Final = 2**30
# Ampere: the first with products of bfloat16, and what the kernels are compiled for at least.
_LEAST_CAPABILITY: Final = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of this machine's GPU, as torch has it."""

    built_for: str | None
    """Version of CUDA that torch was built for; None for a build for CPUs."""
    fault: str | None
    """Why torch can use no GPU; None if it can."""
    has_card: bool
    """True if the machine has a GPU, by its driver's files."""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    """The compute capability of the GPU, (9, 0) for an H100."""
    free_bytes: int = 0
    total_bytes: int = 0


def gpu_state() -> GpuState:
    """Ask torch for the GPU that it would use; this starts CUDA in this process."""
    import torch

    built_for, has_card = torch.version.cuda, Path("/proc/driver/nvidia/version").exists()
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info()
        return GpuState(
            built_for=built_for,
            fault=None,
            has_card=True,
            name=torch.cuda.get_device_name(),
            capability=torch.cuda.get_device_capability(),
            free_bytes=free,
            total_bytes=total,
        )
    except (RuntimeError, AssertionError) as error:  # no build for CUDA, no driver, an old one
        fault = str(error).partition(". ")[0].partition("\n")[0]
        return GpuState(built_for=built_for, fault=fault, has_card=has_card)


def is_gpu_wanted(state: GpuState, device: str) -> bool:
    """Return whether an engine with this `engine.device` runs on the GPU, or is to."""
    return device == "cuda" or (device == "auto" and state.fault is None)


def check_device(state: GpuState, device: str, *, cpu: str) -> Finding:
    """Say what the engine runs on, or why it cannot. `cpu`: the processor's vector extension."""
    if state.fault is not None:
        if device == "cuda":
            return _without_gpu(state)
        if state.has_card and device == "auto":
            return Finding(
                name="device",
                status="warning",
                detail=f"cpu, {cpu}; the machine's GPU stays unused: {_reason(state)}",
                advice=_remedy(state),
            )
        return Finding(name="device", status="ok", detail=f"cpu, {cpu}")
    if device == "cpu":
        detail = f"cpu as configured; {state.name} stays unused"
        return Finding(name="device", status="ok", detail=detail)
    if state.capability < _LEAST_CAPABILITY:
        own, least = ("{}.{}".format(*pair) for pair in (state.capability, _LEAST_CAPABILITY))
        return Finding(
            name="device",
            status="failed",
            detail=f"{state.name} has compute capability {own}; the kernels need {least} or more",
            advice="Use a newer GPU (CUDA_VISIBLE_DEVICES chooses one), or --device cpu.",
        )
    free, total = state.free_bytes / _GIB, state.total_bytes / _GIB
    detail = f"{state.name}, {free:.1f} of {total:.1f} GiB free"
    return Finding(name="device", status="ok", detail=detail)


def _without_gpu(state: GpuState) -> Finding:
    return Finding(
        name="device",
        status="failed",
        detail=f"engine.device is cuda, but {_reason(state)}",
        advice=f"{_remedy(state)} Or use --device cpu.",
    )


def _reason(state: GpuState) -> str:
    if state.built_for is None:
        return "this torch is built for CPUs"
    return f"torch finds no usable GPU: {state.fault}"


def _remedy(state: GpuState) -> str:
    if state.built_for is None:
        return "Install torch from PyPI, whose Linux wheels have CUDA (docs/deploy.md)."
    return (
        f"Install NVIDIA's driver, one that runs CUDA {state.built_for}; start a container with "
        "--gpus all; see that CUDA_VISIBLE_DEVICES names a GPU."
    )
