"""A Python for ARM64 with torch, for the emulator: Debian's and the package index's own files.

Nothing is installed on this machine: apt has a folder of its own, and packages are only unpacked.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
# The newest torch whose wheel for ARM64 needs no CUDA.
_TORCH: Final = "torch==2.10.0"
# What an engine imports, and what torch does; torch's own list has packages for Linux on x86.
_PACKAGES: Final = (
    *("numpy", "safetensors", "tokenizers", "transformers>=5,<6", "gguf", "psutil"),
    *("msgspec", "pydantic", "pydantic-settings", "packaging", "jinja2", "tqdm"),
    *("filelock", "fsspec", "networkx", "sympy", "typing-extensions"),
)
_PLATFORMS: Final = ("manylinux_2_28_aarch64", "manylinux2014_aarch64", "any")


class UnavailableError(Exception):
    """Nothing here brings a Python for ARM64."""


def prepare(folder: Path) -> None:
    """Unpack it into a folder, once. Raises UnavailableError with a sentence."""
    if (folder / "ready").exists():
        return
    for name in ("apt/lists/partial", "apt/archives/partial", "site"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "apt" / "status").touch()
    apt = [
        "apt-get",
        *("-o", f"Dir::State={folder}/apt", "-o", f"Dir::State::status={folder}/apt/status"),
        *("-o", f"Dir::Cache={folder}/apt", "-o", "APT::Sandbox::User=root"),
        *("-o", "APT::Architecture=arm64", "-o", "APT::Architectures::=arm64"),
    ]
    _run([*apt, "update"], "apt lists no packages for arm64")
    wanted = ("install", "--yes", "--download-only", "--no-install-recommends")
    packages = (f"python{_VERSION}", "libstdc++6", "libgomp1")
    _run([*apt, *wanted, *packages], f"apt has no Python {_VERSION} for arm64")
    for package in sorted((folder / "apt" / "archives").glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(folder / "root")], "a package cannot be unpacked")
    pip = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:"),
        *("--target", str(folder / "site"), "--python-version", _VERSION),
        *(f"--platform={name}" for name in _PLATFORMS),
    ]
    _run([*pip, *_PACKAGES], "the package index has no packages for ARM64")
    _run([*pip, "--no-deps", _TORCH], f"the package index has no {_TORCH} for ARM64")
    (folder / "ready").touch()


def command(folder: Path, emulator: Sequence[str]) -> list[str]:
    """Return the command that runs that Python."""
    return [*emulator, "-L", f"{folder}/root", f"{folder}/root/usr/bin/python{_VERSION}"]


def environment(folder: Path, source: Path) -> dict[str, str]:
    """Return variables for that Python; `source`: the folder that has the product's package."""
    return {
        **os.environ,
        "PYTHONHOME": f"{folder}/root/usr",
        "PYTHONPATH": f"{source}{os.pathsep}{folder}/site",
    }


def _run(command: Sequence[str], otherwise: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=1200)
    except (OSError, subprocess.SubprocessError):
        raise UnavailableError(otherwise) from None
