"""The doctor says which GPU is used, or why none is and what to do."""

from dataclasses import replace

import pytest

from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.doctor import doctor
from outrider.gateway.tools.commands.doctor.doctor import examine
from outrider.gateway.tools.commands.doctor.findings import Finding
from outrider.gateway.tools.commands.doctor.gpu_device import (
    GpuState,
    check_device,
    gpu_state,
    is_gpu_wanted,
)

H100 = GpuState(
    built_for="13.0", fault=None, has_card=True, name="NVIDIA H100", capability=(9, 0),
    free_bytes=70 * 2**30, total_bytes=80 * 2**30,
)  # fmt: skip
OF_CPU = GpuState(built_for=None, fault="Torch not compiled with CUDA enabled", has_card=False)
NO_DRIVER = GpuState(
    built_for="13.0", fault="Found no NVIDIA driver on your system", has_card=False
)


def found(state: GpuState, device: str) -> Finding:
    return check_device(state, device, cpu="AVX2")


def test_the_gpu_that_is_used_is_named() -> None:
    assert found(H100, "auto") == found(H100, "cuda")
    assert found(H100, "cuda").detail == "NVIDIA H100, 70.0 of 80.0 GiB free"
    assert found(H100, "cpu").detail == "cpu as configured; NVIDIA H100 stays unused"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_is_too_old_is_refused(device: str) -> None:
    check = found(replace(H100, name="Tesla T4", capability=(7, 5)), device)
    assert check.status == "failed"
    assert check.detail == "Tesla T4 has compute capability 7.5; the kernels need 8.0 or more"
    assert found(replace(H100, capability=(8, 0)), device).status == "ok"
    assert found(replace(H100, capability=(12, 0)), device).status == "ok"


def test_a_torch_without_cuda_is_told_from_a_missing_driver() -> None:
    check = found(OF_CPU, "cuda")
    assert check.status == "failed"
    assert "built for CPUs" in check.detail
    assert "PyPI" in check.advice
    check = found(NO_DRIVER, "cuda")
    assert check.status == "failed"
    assert "Found no NVIDIA driver" in check.detail
    assert "CUDA 13.0" in check.advice
    assert "--gpus all" in check.advice


def test_without_a_gpu_the_cpu_is_fine_unless_there_is_a_card() -> None:
    for state in (OF_CPU, NO_DRIVER):
        assert found(state, "auto") == found(state, "cpu")
        assert found(state, "auto").detail == "cpu, AVX2"
        check = found(replace(state, has_card=True), "auto")
        assert check.status == "warning"
        assert check.advice
        assert found(replace(state, has_card=True), "cpu").status == "ok"


def test_a_gpu_is_wanted_where_it_is_asked_for_or_there() -> None:
    assert is_gpu_wanted(OF_CPU, "cuda")
    assert is_gpu_wanted(H100, "auto")
    assert not is_gpu_wanted(NO_DRIVER, "auto")
    assert not is_gpu_wanted(H100, "cpu")


@pytest.mark.parametrize(("device", "asked"), [("cuda", True), ("cpu", False)])
def test_the_doctor_asks_for_a_compiler_where_a_gpu_is_to_be_used(
    device: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpu_state", lambda: NO_DRIVER)
    flags = {"models.large": "some/model", "engine.device": device}
    names = {
        check.name: check
        for check in examine(load_settings(environ={}, flags=flags))
        if check.name in ("device", "triton", "compiler", "kernel cache")
    }
    assert ("compiler" in names) == ("kernel cache" in names) == asked
    assert names["device"].status == ("failed" if asked else "ok")


def test_the_state_of_this_machine_is_a_gpu_or_a_reason() -> None:
    state = gpu_state()
    if state.fault is None:
        assert 0 < state.free_bytes <= state.total_bytes
    else:
        assert state.fault
        assert "\n" not in state.fault
