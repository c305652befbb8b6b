"""The doctor finds what would stop Triton from compiling on a GPU, and says what to do."""

import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.gateway.tools.commands.doctor import gpu_compiler
from outrider.gateway.tools.commands.doctor.gpu_compiler import (
    check_compiler,
    check_kernel_cache,
    check_triton,
    triton_of_torch,
)

TORCH_2_11 = 'triton==3.6.0; platform_system == "Linux"'
TORCH_2_14 = 'triton~=3.8.0; platform_system == "Linux" and python_version < "3.20"'


def install(monkeypatch: pytest.MonkeyPatch, *, triton: str, wanted: str | None) -> None:
    """Let the packages' metadata say this, as torch's wheels do."""
    versions = {"torch": "2.11.0", "triton": triton}
    asked = ["filelock", 'extra-one>1; extra == "one"', *([wanted] if wanted else [])]
    monkeypatch.setattr(gpu_compiler, "version", versions.__getitem__)
    monkeypatch.setattr(gpu_compiler, "requires", lambda _: asked)


def compiler(folder: Path, *lines: str) -> dict[str, str]:
    """A machine whose gcc is a shell script of these lines."""
    gcc = folder / "gcc"
    gcc.write_text("\n".join(("#!/bin/sh", *lines)))
    gcc.chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin"}


# ---- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_gpu_wanted", "status"), [(False, "ok"), (True, "warning")])
def test_triton_is_missed_only_by_a_gpu(
    is_gpu_wanted: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gpu_compiler, "version", missing)
    assert check_triton(is_gpu_wanted=is_gpu_wanted).status == status


@pytest.mark.parametrize(
    ("wanted", "triton", "fits"),
    [
        (TORCH_2_11, "3.6.0", True),
        (TORCH_2_11, "3.9.0", False),
        (TORCH_2_14, "3.8.1", True),
        (TORCH_2_14, "3.9.0", False),
        ('triton==3.6.0; platform_system == "Windows"', "3.9.0", True),
        (None, "3.9.0", True),  # a build for CPUs
    ],
)
def test_a_triton_that_torch_was_not_built_with_is_named(
    wanted: str | None, triton: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, triton=triton, wanted=wanted)
    found = check_triton(is_gpu_wanted=True)
    assert found.status == ("ok" if fits else "failed")
    if not fits:
        pin = wanted.partition(";")[0].removeprefix("triton") if wanted else ""
        assert found.detail == f"triton {triton}, but torch 2.11.0 wants {pin}"
        assert f"pip install 'triton{pin}'" in found.advice
    assert check_triton(is_gpu_wanted=False).status == "ok"


# ---- the compiler -------------------------------------------------------------------------------


def test_a_compiler_that_finds_pythons_headers_is_fine(tmp_path: Path) -> None:
    script = ("test \"$1 $2 $3\" = '-x c -fsyntax-only'", "grep -q Python.h")
    found = check_compiler(compiler(tmp_path, *script))
    assert found.status == "ok"
    assert str(tmp_path / "gcc") in found.detail


def test_missing_headers_are_named(tmp_path: Path) -> None:
    script = ("echo '<stdin>:1:10: fatal error: Python.h: No such file' >&2", "exit 1")
    found = check_compiler(compiler(tmp_path, *script))
    assert found.status == "failed"
    assert "Python.h: No such file" in found.detail
    assert "python3-dev" in found.advice


def test_a_compiler_that_ends_without_a_word_is_told(tmp_path: Path) -> None:
    assert "exit status 3" in check_compiler(compiler(tmp_path, "exit 3")).detail


def test_a_missing_compiler_is_named() -> None:
    for environ in ({"PATH": "/nowhere"}, {"PATH": "/bin:/usr/bin", "CC": "no-such-compiler"}):
        found = check_compiler(environ)
        assert found.status == "failed"
        assert "no C compiler" in found.detail
        assert "gcc" in found.advice


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_machines_own_compiler_is_asked_the_real_question() -> None:
    found = check_compiler({"PATH": "/usr/bin:/bin"})
    assert found.status == "ok" or "Python.h" in found.detail


# ---- the folder ---------------------------------------------------------------------------------


def test_the_folder_is_tritons_own_unless_it_is_named(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert f"{tmp_path}/.triton/cache" in check_kernel_cache(environ).detail
    environ["TRITON_HOME"] = str(tmp_path / "other")
    assert f"{tmp_path}/other/.triton/cache" in check_kernel_cache(environ).detail
    environ["TRITON_CACHE_DIR"] = str(tmp_path / "kernels")
    found = check_kernel_cache(environ)
    assert (found.status, found.detail.partition(",")[0]) == ("ok", f"{tmp_path}/kernels")


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = check_kernel_cache({"TRITON_CACHE_DIR": str(tmp_path / "file" / "cache")})
    assert found.status == "failed"
    assert "TRITON_CACHE_DIR" in found.advice


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=5 * 2**20)
    monkeypatch.setattr(gpu_compiler.shutil, "disk_usage", lambda _: usage)
    found = check_kernel_cache({"TRITON_CACHE_DIR": str(tmp_path)})
    assert found.status == "failed"
    assert found.detail.startswith("5 MiB are free")
    assert "Make room" in found.advice


# ---- this machine -------------------------------------------------------------------------------


def test_this_machines_triton_is_what_its_torch_asks_for() -> None:
    asked = triton_of_torch()
    assert asked is None or check_triton(is_gpu_wanted=True).status != "failed"
