"""Findings of the doctor, and the machine's cores and memory under it."""

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.shared.mock_upstream import mock_in_thread
from outrider.gateway.cli import app
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.doctor import doctor
from outrider.gateway.tools.commands.doctor.doctor import examine
from outrider.gateway.tools.commands.doctor.findings import Finding
from outrider.gateway.tools.commands.doctor.storage import STORAGE_CHECKS
from outrider.gateway.wiring.hardware import available_memory_bytes, usable_physical_cores
from outrider.kernels.cpu import product_library
from tests.models import save_hf_model

runner = CliRunner()


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer_folder: Path) -> Path:
    folder = tmp_path / "model"
    save_hf_model("llama2", folder, vocab_size=420)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def checks(**flags: Any) -> dict[str, Finding]:
    dotted = {key.replace("__", "."): value for key, value in flags.items()}
    return {check.name: check for check in examine(load_settings(environ={}, flags=dotted))}


def test_all_is_well_with_a_good_checkpoint(checkpoint: Path, free_port: int) -> None:
    found = checks(models__large=str(checkpoint), server__port=free_port)
    assert {check.name for check in found.values() if check.status == "failed"} == set()
    assert "LlamaForCausalLM" in found["large model"].detail
    assert "small model" not in found
    assert found["torch"].status == "ok"


def test_the_large_model_must_fit_to_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.gateway.wiring.tensor_parallel.usable_physical_cores", lambda: 4)
    flags = {"engine__device": "cpu"}
    assert "tensor parallel" not in checks(**flags)
    fits = checks(**flags, engine__tensor_parallel=2)["tensor parallel"]
    assert (fits.status, fits.detail) == ("ok", "2 CPU processes share the large model")
    for count, words in ((3, "divide all of it: 1, 2, 4"), (8, "has 4 CPU cores")):
        found = checks(**flags, engine__tensor_parallel=count)["tensor parallel"]
        assert found.status == "failed"
        assert words in found.detail


@pytest.mark.parametrize("is_built", [True, False])
def test_one_line_says_whether_products_were_built(
    is_built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_built:
        support = product_library.product_support()
        if support.library is None:
            pytest.skip(support.detail)
        assert doctor._products(load_settings(environ={}, flags={})).status == "ok"
        return
    monkeypatch.setattr(product_library.platform, "machine", lambda: "x86_64")
    missing = product_library.product_support(tmp_path)
    monkeypatch.setattr(product_library, "product_support", lambda: missing)
    check = doctor._products(load_settings(environ={}, flags={"engine.device": "cpu"}))
    assert check.status == "warning"
    assert "not built" in check.detail
    assert "g++" in check.advice


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    check = checks(models__large=str(tmp_path / "nothing"))["large model"]
    assert check.status == "failed"
    assert "is not a folder" in check.detail
    assert "--large" in check.advice


def test_a_hub_id_is_not_looked_up() -> None:
    check = checks(models__large="someone/some-model")["large model"]
    assert check.status == "ok"
    assert "hub" in check.detail


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "ok", "awq weights, "),
        ({"quant_method": "bitsandbytes"}, "failed", "quantised (bitsandbytes)"),
    ],
)
def test_a_quantised_checkpoint_is_named(
    options: dict[str, object], status: str, words: str, checkpoint: Path
) -> None:
    plain = doctor._loaded_bytes(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = options
    (checkpoint / "config.json").write_text(json.dumps(config))
    check = checks(models__large=str(checkpoint))["large model"]
    assert check.status == status
    assert words in check.detail
    assert doctor._loaded_bytes(checkpoint) == pytest.approx(plain, rel=0.05)


def test_a_checkpoint_without_weights(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    check = checks(models__large=str(checkpoint))["large model"]
    assert check.status == "failed"
    assert "no *.safetensors" in check.detail


def test_a_checkpoint_without_a_tokenizer(checkpoint: Path) -> None:
    for file in checkpoint.glob("token*"):
        file.unlink()
    assert checks(models__large=str(checkpoint))["large model"].status == "failed"


def test_a_port_in_use() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        check = checks(server__port=holder.getsockname()[1])["port"]
    assert check.status == "failed"
    assert "already in use" in check.detail


def test_more_threads_than_cores() -> None:
    check = checks(engine__num_threads=usable_physical_cores() + 1)["threads"]
    assert check.status == "warning"
    assert "engine.num_threads" in check.advice


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 2**20)
    assert checks(engine__device="cpu")["memory"].status == "failed"


def test_a_check_that_raises_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("no libtorch")

    monkeypatch.setattr(doctor, "_torch", broken)
    assert checks()["torch"].status == "failed"
    assert "no libtorch" in checks()["torch"].detail


def test_the_command_prints_and_exits(checkpoint: Path, free_port: int, tmp_path: Path) -> None:
    arguments = ["doctor", "--large", str(checkpoint), "--port", str(free_port)]
    good = runner.invoke(app, arguments)
    assert good.exit_code == 0, good.output
    assert "✓ torch" in good.output
    bad = runner.invoke(app, [*arguments, "--large", str(tmp_path / "nothing")])
    assert bad.exit_code == 1
    assert "✗ large model" in bad.output
    document = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert document["ok"] is True
    assert {"name", "status", "detail", "advice"} == set(document["checks"][0])


def test_the_command_takes_settings_and_its_own_flags_win(free_port: int) -> None:
    arguments = ["doctor", "--large", "none", "--small", "none", "--port", str(free_port)]
    with mock_in_thread(models=("big-1",)) as mock:
        arguments += ["--tier", f"gpu={mock.url}", "--set", "tiers.gpu.model=big-9"]
        result = runner.invoke(app, [*arguments, "--set", "server.port=1"])
    assert result.exit_code == 0, result.output
    assert "does not list big-9" in result.output
    assert f"127.0.0.1:{free_port} is free" in result.output


# Tiers elsewhere.

NO_MODELS = {"models__large": "none", "models__small": "none"}


def test_a_tier_that_answers() -> None:
    with mock_in_thread(models=("big-1", "big-2")) as mock:
        found = checks(tiers__cloud__url=mock.url, tiers__cloud__model="big-2", **NO_MODELS)
        check = found["cloud tier"]
        assert check == Finding(
            name="cloud tier", status="ok", detail=f"{mock.url} answers with big-2"
        )
        assert "router" not in found
        assert not {"large model", "small model", "torch", "memory"} & found.keys()
        assert "no local models" in found["models"].detail
        check = checks(tiers__cloud__url=mock.url, **NO_MODELS)["cloud tier"]
        assert check.detail == f"{mock.url} answers with big-1", "the first one that it lists"
        assert mock.requests == [], "nothing is generated"


def test_a_model_that_the_server_does_not_list() -> None:
    with mock_in_thread(models=[f"m{number}" for number in range(9)]) as mock:
        check = checks(tiers__cloud__url=mock.url, tiers__cloud__model="big")["cloud tier"]
    assert check.status == "warning"
    assert check.detail == f"{mock.url} answers, but does not list big"
    assert "Listed are m0, m1, m2, m3, m4, ...; name one" in check.advice
    with mock_in_thread(models=()) as mock:
        check = checks(tiers__cloud__url=mock.url)["cloud tier"]
        assert check.status == "warning"
        assert "tiers.cloud.model" in check.advice
        check = checks(tiers__cloud__url=mock.url, tiers__cloud__model="big")["cloud tier"]
        assert check.status == "ok"


def test_a_server_that_is_not_there(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}/v1"
    check = checks(tiers__cloud__url=url, models__small="demo")["cloud tier"]
    assert check.status == "warning", "the models of this machine answer"
    assert check.detail.startswith(f"{url}: ")
    assert "tiers.cloud.url" in check.advice
    assert checks(tiers__cloud__url=url, **NO_MODELS)["cloud tier"].status == "failed"
    with mock_in_thread() as mock:
        both = f"{url},{mock.url}"
        check = checks(tiers__cloud__url=both, **NO_MODELS)["cloud tier"]
    assert check.status == "warning", "one of two replicas is enough to begin"
    assert f"; {mock.url} answers with mock-model" in check.detail


@pytest.fixture
def guarded() -> Iterator[str]:
    """A server that tells its models only at /v1, and only with the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 404 if self.path != "/v1/models" else 401
            if status == 401 and self.headers["authorization"] == "Bearer sk-right":
                status = 200
            body = b'{"data": [{"id": "guarded-model"}]}' if status == 200 else b"{}"
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_key_that_the_server_does_not_take(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = {"tiers__cloud__url": guarded}
    check = checks(**url, **NO_MODELS)["cloud tier"]
    assert check.status == "failed"
    assert "status 401" in check.detail
    assert "tiers.cloud.api_key_env" in check.advice
    key = {"tiers__cloud__api_key_env": "CLOUD_KEY"}
    monkeypatch.setenv("CLOUD_KEY", "sk-wrong")
    check = checks(**url, **key, models__small="demo")["cloud tier"]
    assert check.status == "warning", "the models of this machine answer"
    assert "Put a key that it takes into CLOUD_KEY." in check.advice
    assert "sk-wrong" not in check.detail + check.advice
    monkeypatch.setenv("CLOUD_KEY", "sk-right")
    check = checks(**url, **key)["cloud tier"]
    assert check.status == "ok"
    assert check.detail == f"{guarded} answers with guarded-model"
    monkeypatch.delenv("CLOUD_KEY")
    check = checks(**url, **key)["cloud tier"]
    assert check.status == "failed", "the gateway would not start"
    assert "CLOUD_KEY is not set" in check.detail


def test_a_wrong_path(guarded: str) -> None:
    url = guarded.removesuffix("/v1")
    check = checks(tiers__cloud__url=url)["cloud tier"]
    assert check.status == "warning"
    assert f"{url}/models answers with status 404" in check.detail
    assert "/v1" in check.advice


# The machine.


def fake_cpus(folder: Path, siblings: list[str]) -> Path:
    for cpu, text in enumerate(siblings):
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
    return folder


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


@pytest.mark.usefixtures("four_cpus")
def test_hyperthreads_share_a_core(tmp_path: Path) -> None:
    cpus = fake_cpus(tmp_path / "cpu", ["0,2", "1,3", "0,2", "1,3"])
    assert usable_physical_cores(cpus, tmp_path) == 2


@pytest.mark.usefixtures("four_cpus")
def test_a_containers_quota_counts(tmp_path: Path) -> None:
    cpus = fake_cpus(tmp_path / "cpu", ["0", "1", "2", "3"])
    assert usable_physical_cores(cpus, tmp_path) == 4
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    assert usable_physical_cores(cpus, tmp_path) == 3
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_physical_cores(cpus, tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_physical_cores(cpus, tmp_path) == 4


@pytest.mark.usefixtures("four_cpus")
def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    assert usable_physical_cores(tmp_path / "cpu", tmp_path) == 4


def test_a_containers_memory_limit_counts(tmp_path: Path) -> None:
    machine = available_memory_bytes(tmp_path)
    assert machine > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory_bytes(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 600_000


def test_tokenizers_that_differ_are_told(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))

    pair = {"models__large": str(checkpoint), "models__small": str(other)}
    found = checks(**pair)["tokenizers"]
    assert found.status == "failed"
    assert "has the id" in found.detail
    assert "--allow-vocab-mismatch" in found.advice
    assert checks(**pair, speculation__enabled=False)["tokenizers"].status == "ok"
    mapped = checks(**pair, speculation__allow_vocab_mismatch=True)["tokenizers"]
    assert mapped.status == "warning"
    same = {"models__large": str(checkpoint), "models__small": str(checkpoint)}
    assert "share one vocabulary" in checks(**same)["tokenizers"].detail
    assert "tokenizers" not in checks(models__large=str(checkpoint))


def test_database_disk_and_keys_are_looked_at(tmp_path: Path) -> None:
    def found(**options: Any) -> dict[str, Finding]:
        flags = {
            "models.large": "none",
            "models.small": "none",
            "tiers.a.url": "http://127.0.0.1:9",
        }
        settings = load_settings(environ={}, flags=flags | options)
        checks = [STORAGE_CHECKS[name](settings) for name in ("database", "keys")]
        return {check.name: check for check in checks}

    url = {"database_url": f"sqlite:///{tmp_path}/o.db"}
    fresh = found(**url)
    assert fresh["database"].status == "ok"
    assert "only this machine" in fresh["keys"].detail
    wanted = found(**url, **{"keys.mode": "required"})["keys"]
    assert (wanted.status, "outrider keys create" in wanted.advice) == ("warning", True)
    is_open = found(**url, **{"keys.mode": "off", "server.host": "0.0.0.0"})["keys"]
    assert is_open.status == "warning"
    file = tmp_path / "file"
    file.touch()
    settings = load_settings(environ={}, flags={"database_url": f"sqlite:///{file}/o.db"})
    assert STORAGE_CHECKS["database"](settings).status == "failed"
