"""Fixtures: the library built for ARM, and the product running on it in an emulator."""

import ctypes
import gc
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.kernels.cpu import product_library
from outrider.kernels.cpu.huge_pages import HugePageMemory
from outrider.kernels.cpu.product_library import library_path, product_support
from tests.kernels.cpu.building import build
from tests.kernels.cpu.emulated.emulated_library import EmulatedLibrary

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
SYSTEM = "/usr/aarch64-linux-gnu"


@pytest.fixture(scope="session")
def arm_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that setup.py builds with a compiler for ARM; caller.cpp's program beside it."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"kernels for ARM need {' and '.join(missing)} here")
    folder = tmp_path_factory.mktemp("arm")
    result = build(folder, {"CC": COMPILER, "CXX": COMPILER, "LDCXXSHARED": f"{COMPILER} -shared"})
    assert result.returncode == 0, result.stderr
    source = Path(__file__).parent / "caller.cpp"
    subprocess.run([COMPILER, "-O1", str(source), "-o", str(folder / "caller"), "-ldl"], check=True)
    built = library_path(folder / "kernels" / "cpu")
    assert built is not None
    return built


@pytest.fixture
def on_processor(
    arm_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Has the product run the library of ARM on a processor that the emulator knows by name."""
    load = ctypes.CDLL

    def choose(processor: str) -> None:
        caller = arm_library.parents[2] / "caller"
        command = [EMULATOR, "-cpu", processor, "-L", SYSTEM, str(caller), str(arm_library)]

        def loaded(path: str, *others: Any) -> Any:
            is_ours = path == str(arm_library)
            return EmulatedLibrary(command) if is_ours else load(path, *others)

        monkeypatch.setattr(ctypes, "CDLL", loaded)
        monkeypatch.setattr(product_library, "library_path", lambda _folder: arm_library)
        monkeypatch.setattr(
            HugePageMemory, "take", lambda _memory, size: torch.empty(size, dtype=torch.uint8)
        )
        product_support.cache_clear()

    gc.freeze()  # what is older than the test is none of its memory: calls need not look there
    yield choose
    gc.unfreeze()
    monkeypatch.undo()
    product_support.cache_clear()
