"""Check what Triton needs to compile for a GPU: torch's own version, a compiler, a folder."""

import os
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from gateway.tools.doctor.findings import Finding

_PIN = re.compile(r"triton\s*==\s*([\w.+]+)")


def check_triton(*, has_gpu: bool, environ: Mapping[str, str]) -> Finding:
    """Report the first thing that stops kernels from being compiled; without a GPU none is."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return _not_installed(has_gpu)
    if not has_gpu:
        return Finding(name="triton", status="ok", detail=f"triton {found}")
    return _misfit(found) or _no_compiler(environ) or _no_cache(environ) or _ready(found, environ)


def _not_installed(has_gpu: bool) -> Finding:
    if not has_gpu:
        return Finding(name="triton", status="ok", detail="not installed; only a GPU needs it")
    return Finding(
        name="triton",
        status="warning",
        detail="not installed: the GPU runs the slower torch kernels",
        advice="Install triton (it comes with torch's CUDA builds on Linux).",
    )


def _misfit(found: str) -> Finding | None:
    """Compare the installed version with the one that torch's CUDA wheel pins."""
    pins = [pin[1] for one in requires("torch") or () if (pin := _PIN.match(one))]
    if not pins or pins[0] == found:
        return None
    return Finding(
        name="triton",
        status="failed",
        detail=f"triton {found}, but torch {version('torch')} wants {pins[0]}",
        advice=f"Run `pip install triton=={pins[0]}`.",
    )


def _compiler(environ: Mapping[str, str]) -> str | None:
    """Find the compiler that Triton would: $CC, else gcc, else clang."""
    path = environ.get("PATH")
    names = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _no_compiler(environ: Mapping[str, str]) -> Finding | None:
    if _compiler(environ) is not None:
        return None
    return Finding(
        name="triton",
        status="failed",
        detail="no C compiler, which Triton needs when a kernel is first used",
        advice="Install gcc and libc6-dev, or name a compiler in CC.",
    )


def _cache(environ: Mapping[str, str]) -> Path:
    home = environ.get("TRITON_HOME") or environ.get("HOME") or "~"
    default = Path(home).expanduser() / ".triton" / "cache"
    return Path(environ.get("TRITON_CACHE_DIR") or default)


def _no_cache(environ: Mapping[str, str]) -> Finding | None:
    """Look at the nearest folder that exists: Triton makes those below it."""
    cache = _cache(environ)
    existing = next(one for one in (cache.absolute(), *cache.absolute().parents) if one.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return Finding(
        name="triton",
        status="failed",
        detail=f"{cache} cannot be written: Triton keeps its compiled kernels there",
        advice="Set TRITON_CACHE_DIR to a folder that this user may write.",
    )


def _ready(found: str, environ: Mapping[str, str]) -> Finding:
    detail = f"triton {found}, compiler {_compiler(environ)}, kernels kept in {_cache(environ)}"
    return Finding(name="triton", status="ok", detail=detail)
