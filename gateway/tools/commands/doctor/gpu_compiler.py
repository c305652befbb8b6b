"""Check what Triton needs to compile for a GPU: torch's own version, a compiler, a folder."""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from outrider.gateway.tools.commands.doctor.findings import Finding

# The kernels of two models take about a tenth of it.
_ENOUGH_BYTES: Final = 2**30
_COMPILE_TIMEOUT_S: Final = 30.0
# What the launcher includes that Triton has compiled.
_PROGRAM: Final = "#include <Python.h>\n#include <stdlib.h>\n"
_INSTALL: Final = "Install gcc, libc6-dev and python3-dev, or name a compiler in CC."


def check_triton(*, is_gpu_wanted: bool) -> Finding:
    """Compare the installed version with the one that torch's CUDA wheel asks for."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return _not_installed(is_gpu_wanted=is_gpu_wanted)
    wanted = triton_of_torch() if is_gpu_wanted else None
    if wanted is None or wanted.specifier.contains(found, prereleases=True):
        return Finding(name="triton", status="ok", detail=f"triton {found}")
    return Finding(
        name="triton",
        status="failed",
        detail=f"triton {found}, but torch {version('torch')} wants {wanted.specifier}",
        advice=f"Run `pip install 'triton{wanted.specifier}'`.",
    )


def triton_of_torch() -> Requirement | None:
    """Return the version of Triton that the installed torch asks for; builds for CPUs ask none."""
    asked = (Requirement(line) for line in requires("torch") or ())
    here = (one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""}))
    return next((one for one in here if one.name == "triton"), None)


def _not_installed(*, is_gpu_wanted: bool) -> Finding:
    if not is_gpu_wanted:
        return Finding(name="triton", status="ok", detail="not installed; only a GPU needs it")
    return Finding(
        name="triton",
        status="warning",
        detail="not installed: the GPU runs the slower torch kernels",
        advice="Install triton (it comes with torch's CUDA builds on Linux).",
    )


def check_compiler(environ: Mapping[str, str]) -> Finding:
    """Have the compiler that Triton would take, $CC, gcc or clang, read what it would compile."""
    path = environ.get("PATH")
    names = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
    compiler = next((found for name in names if (found := shutil.which(name, path=path))), None)
    if compiler is None:
        return Finding(
            name="compiler",
            status="failed",
            detail="no C compiler, which Triton needs when a kernel is first used",
            advice=_INSTALL,
        )
    fault = _compile_fault(compiler, environ)
    if fault is None:
        return Finding(name="compiler", status="ok", detail=f"{compiler}, with Python's headers")
    return Finding(
        name="compiler",
        status="failed",
        detail=f"{compiler} cannot compile Triton's launcher: {fault}",
        advice=_INSTALL,
    )


def _compile_fault(compiler: str, environ: Mapping[str, str]) -> str | None:
    """Return the compiler's first error; None where there is none."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    include = sysconfig.get_paths(scheme=scheme)[
        "include"
    ]  # Triton's own rule, for Debian's Python
    try:
        ended = subprocess.run(
            [compiler, "-x", "c", "-fsyntax-only", f"-I{include}", "-"],
            input=_PROGRAM,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return None
    lines = [line for line in ended.stderr.splitlines() if "error" in line]
    return lines[0].strip() if lines else f"exit status {ended.returncode}"


def check_kernel_cache(environ: Mapping[str, str]) -> Finding:
    """Look at the nearest folder that exists: Triton makes those below it."""
    home = environ.get("TRITON_HOME") or environ.get("HOME") or "~"
    default = Path(home).expanduser() / ".triton" / "cache"
    cache = Path(environ.get("TRITON_CACHE_DIR") or default)
    existing = next(one for one in (cache.absolute(), *cache.absolute().parents) if one.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return Finding(
            name="kernel cache",
            status="failed",
            detail=f"{cache} cannot be written: Triton keeps its compiled kernels there",
            advice="Set TRITON_CACHE_DIR to a folder that this user may write.",
        )
    free = shutil.disk_usage(existing).free
    if free < _ENOUGH_BYTES:
        return Finding(
            name="kernel cache",
            status="failed",
            detail=f"{free / 2**20:.0f} MiB are free for {cache}, of {_ENOUGH_BYTES / 2**20:.0f}",
            advice="Make room, or set TRITON_CACHE_DIR to a folder on another disk.",
        )
    detail = f"{cache}, {free / 2**30:.1f} GiB free"
    return Finding(name="kernel cache", status="ok", detail=detail)
