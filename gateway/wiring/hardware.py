"""Cores and memory of this machine, as far as this process may use them."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CPU_DIR = Path("/sys/devices/system/cpu")
_CGROUP_DIR = Path("/sys/fs/cgroup")
# NVIDIA's driver, also in WSL and on Jetson; AMD's, whose builds of torch say "cuda" as well.
_GPU_DEVICES = ("nvidiactl", "nvidia0", "dxg", "nvhost-ctrl", "nvmap", "kfd")
_GPU_LIBRARIES = ("libcuda.so.1", "libamdhip64.so")


def usable_physical_cores(cpu_dir: Path = _CPU_DIR, cgroup_dir: Path = _CGROUP_DIR) -> int:
    """Return the number of physical cores that this process may run on; at least 1.

    Two hyperthreads share one core's multipliers, so a thread for each gains nothing in a matrix
    product. A container's CPU quota counts too: threads over it are only put to sleep. On Apple
    silicon only the performance cores count, because a step waits for the slowest thread.
    """
    if sys.platform == "darwin":
        return _performance_cores() or int(psutil.cpu_count(logical=False) or 1)
    usable = os.sched_getaffinity(0)
    cores = {_siblings(cpu_dir, cpu) for cpu in usable}
    quota = _cpu_quota(cgroup_dir)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def available_memory_bytes(cgroup_dir: Path = _CGROUP_DIR) -> int:
    """Return the memory usable without swapping: the machine's, or less in a container."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup_dir / "memory.max").read_text())
        used = int((cgroup_dir / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return available
    return max(0, min(available, limit - used))


def may_have_gpu(dev_dir: Path = Path("/dev"), libraries: Sequence[str] = _GPU_LIBRARIES) -> bool:
    """Return False where no GPU's driver is installed. Without torch, in under a millisecond.

    True where that cannot be told, as outside Linux.
    """
    if sys.platform != "linux" or any((dev_dir / name).exists() for name in _GPU_DEVICES):
        return True
    for name in libraries:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def _siblings(cpu_dir: Path, cpu: int) -> str:
    """Return the logical CPUs that share a core with `cpu`; itself where the kernel hides them."""
    try:
        return (cpu_dir / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_quota(cgroup_dir: Path) -> float | None:
    """Return the CPUs' worth of time that the container may use, None without a limit."""
    try:
        quota, period = (cgroup_dir / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _performance_cores() -> int | None:
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "hw.perflevel0.physicalcpu"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        return int(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
