"""Building the compiled products with the ordinary build, and doing without them."""

import shutil
from pathlib import Path

import pytest
import torch

from outrider.kernels.cpu import product_library
from outrider.kernels.cpu.panel_linear import PanelLinear, can_use_panels
from outrider.kernels.cpu.product_library import (
    InstructionSet,
    library_path,
    product_support,
)
from tests.kernels.cpu.building import build
from tests.kernels.cpu.instruction_sets import each_instruction_set

HAS_COMPILER = shutil.which("g++") is not None or shutil.which("c++") is not None


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
def test_the_installation_has_built_a_library() -> None:
    """Other tests are skipped without it."""
    assert library_path(Path(product_library.__file__).parent) is not None


@pytest.mark.long
@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
def test_the_ordinary_build_makes_a_library_that_loads(tmp_path: Path) -> None:
    result = build(tmp_path, {})
    assert result.returncode == 0, result.stderr
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {"kernels", "build"}
    support = product_support(tmp_path / "kernels" / "cpu")
    assert support.library is not None, support.detail
    assert support.instruction_set is not InstructionSet.NONE


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["/no/such/compiler", shutil.which("false") or "false"])
def test_without_a_compiler_that_works_the_build_goes_on(tmp_path: Path, compiler: str) -> None:
    result = build(tmp_path, {"CC": compiler, "CXX": compiler})
    assert result.returncode == 0, result.stderr
    assert library_path(tmp_path / "kernels" / "cpu") is None


def test_a_library_that_is_something_else_is_not_used(tmp_path: Path) -> None:
    suffix = product_library.EXTENSION_SUFFIXES[0]
    (tmp_path / f"_products{suffix}").write_bytes(b"no library")
    support = product_support(tmp_path)
    assert support.library is None
    assert "do not load" in support.detail


def test_a_library_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library_path(Path(product_library.__file__).parent)
    if built is None:
        pytest.skip("the library was not built")
    shutil.copy(built, tmp_path)
    monkeypatch.setattr(product_library, "_VERSION", 0)
    support = product_support(tmp_path)
    assert support.library is None
    assert "install again" in support.detail


def test_without_the_library_panels_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = product_support(tmp_path)
    for module in ("panel_linear", "product_library"):
        monkeypatch.setattr(f"outrider.kernels.cpu.{module}.product_support", lambda: missing)
    weight = torch.zeros((8, 16), dtype=torch.bfloat16)
    assert not can_use_panels(weight)
    with pytest.raises(RuntimeError, match="compiled products"):
        PanelLinear(weight)


@each_instruction_set
def test_a_variable_holds_the_kernels_to_an_instruction_set(
    instruction_set: InstructionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library_path(Path(product_library.__file__).parent)
    if built is None:
        pytest.skip("the library was not built")
    shutil.copy(built, tmp_path)
    word = instruction_set.name.lower().replace("_", "-")
    monkeypatch.setenv("OUTRIDER_CPU", word)
    support = product_support(tmp_path)
    assert support.library is not None
    assert support.instruction_set is instruction_set is max(support.library.instruction_sets)
    has_avx512 = instruction_set is InstructionSet.AVX512
    assert has_avx512 or not support.library.has_matrix_tiles
    assert instruction_set.name in support.detail  # doctor shows it, the numerics' digest has it


def test_another_instruction_set_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library_path(Path(product_library.__file__).parent)
    if built is None:
        pytest.skip("the library was not built")
    shutil.copy(built, tmp_path)
    monkeypatch.setenv("OUTRIDER_CPU", "sse9")
    with pytest.raises(ValueError, match=r"OUTRIDER_CPU='sse9' must be one of auto, avx2"):
        product_support(tmp_path)
