"""The doctor finds what would stop Triton from compiling on a GPU, and says what to do."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from gateway.tools.doctor import gpu_compiler
from gateway.tools.doctor.findings import Finding
from gateway.tools.doctor.gpu_compiler import check_triton


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine where all is well: versions that fit, a compiler, a home that can be written."""
    compiler = tmp_path / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    install(monkeypatch, triton="3.6.0", wanted="3.6.0")
    return {"PATH": str(compiler.parent), "HOME": str(tmp_path)}


def install(monkeypatch: pytest.MonkeyPatch, *, triton: str, wanted: str) -> None:
    """Let the packages' metadata say this, as torch's CUDA wheels do."""
    pin = f'triton=={wanted}; platform_system == "Linux"'
    versions = {"torch": "2.11.0", "triton": triton}
    monkeypatch.setattr(gpu_compiler, "version", versions.__getitem__)
    monkeypatch.setattr(gpu_compiler, "requires", lambda _: ["filelock", pin])


def found(environ: dict[str, str], *, has_gpu: bool = True) -> Finding:
    return check_triton(has_gpu=has_gpu, environ=environ)


@pytest.mark.parametrize(("has_gpu", "status"), [(False, "ok"), (True, "warning")])
def test_triton_is_missed_only_by_a_gpu(
    has_gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gpu_compiler, "version", missing)
    assert found({}, has_gpu=has_gpu).status == status


def test_a_machine_with_all_that_triton_needs_is_fine(environ: dict[str, str]) -> None:
    check = found(environ)
    assert check.status == "ok"
    assert environ["PATH"] in check.detail
    assert f"{environ['HOME']}/.triton/cache" in check.detail


def test_a_triton_that_torch_was_not_built_with_is_named(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, triton="3.9.0", wanted="3.6.0")
    check = found(environ)
    assert check.status == "failed"
    assert check.detail == "triton 3.9.0, but torch 2.11.0 wants 3.6.0"
    assert "triton==3.6.0" in check.advice


def test_a_missing_compiler_is_named(environ: dict[str, str]) -> None:
    check = found({**environ, "PATH": "/nowhere"})
    assert check.status == "failed"
    assert "C compiler" in check.detail
    assert "gcc" in check.advice


def test_a_cache_that_cannot_be_made_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = found({**environ, "TRITON_CACHE_DIR": str(tmp_path / "file" / "cache")})
    assert check.status == "failed"
    assert "TRITON_CACHE_DIR" in check.advice


def test_without_a_gpu_nothing_is_asked_of_triton(environ: dict[str, str]) -> None:
    assert found({**environ, "PATH": "/nowhere"}, has_gpu=False).status == "ok"
