"""Settings of models on demand: what contradicts them, and the processes that follow."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.wiring import on_demand
from outrider.gateway.wiring.on_demand import needs_of
from outrider.gateway.wiring.upstream import build_upstream, check_upstreams
from tests.engines import PAIR_FOLDER

SMALL = str(PAIR_FOLDER / "small")


def loaded(tmp_path: Path, text: str, **flags: Any) -> Settings:
    file = tmp_path / "outrider.toml"
    file.write_text(text)
    return load_settings(config_file=file, flags=flags, environ={})


def complaint(tmp_path: Path, text: str, **flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        check_upstreams(loaded(tmp_path, text, **flags), {})
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "may_have_gpu", lambda: False)


def table(**fields: Any) -> str:
    lines = [
        f"{name} = {json.dumps(value)}" for name, value in {"checkpoint": SMALL, **fields}.items()
    ]
    return "\n".join(["[tiers.coder.on_demand]", *lines, ""])


def test_a_model_is_a_tier_of_this_device_that_needs_no_address(tmp_path: Path) -> None:
    settings = loaded(tmp_path, table())
    tier = settings.tiers["coder"]
    assert (tier.server, tier.local, tier.supports) == ("outrider", True, ("tools",))
    assert not settings.models.is_any
    check_upstreams(settings, {})


def test_a_process_gets_its_model_and_no_secret_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "ours")
    monkeypatch.setenv("CLOUD_KEY", "ours too")
    text = (
        'database_url = "sqlite:///x.db"\n[keys]\nadmin_token = "0123456789abcdef0123"\n'
        "[engine]\nmax_sequences = 99\n"
        '[tiers.cloud]\nurl = "https://cloud.example/v1"\napi_key_env = "CLOUD_KEY"\n'
        "[tiers.coder]\nmax_context = 512\n"
    ) + table(kv_cache_gib=0.5, max_sequences=3, quantize="int8", keep_alive_s="forever")
    settings = loaded(tmp_path, text)
    needs = needs_of(settings, "coder", settings.models_on_demand["coder"])
    child = Settings.model_validate_json(needs.recipe.settings)
    assert child.models.resolved() == {"large": SMALL, "small": None}
    assert (child.models.quantize, child.engine.kv_cache_gib) == ("int8", 0.5)
    assert (child.engine.max_sequences, child.engine.max_context) == (3, 512)
    assert list(child.aliases) == ["coder"]
    assert (child.tiers, child.database_url, child.keys.admin_token) == ({}, "none", None)
    environment = needs.recipe.environment
    assert environment["OUTRIDER_API_KEY"] is environment["CLOUD_KEY"] is None
    assert needs.recipe.key not in repr(needs)
    assert needs.keep_alive_s is None


def test_memory_is_the_files_the_cache_and_the_processes(tmp_path: Path) -> None:
    settings = loaded(tmp_path, table(kv_cache_gib=0.5))
    needs = needs_of(settings, "coder", settings.models_on_demand["coder"])
    weights = (PAIR_FOLDER / "small" / "model.safetensors").stat().st_size
    assert needs.memory_bytes == pytest.approx(1.1 * weights + 1.25 * 2**30, abs=2)
    settings = loaded(tmp_path, table(memory_gib=3))
    assert needs_of(settings, "coder", settings.models_on_demand["coder"]).memory_bytes == 3 << 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            table() + '[tiers.coder]\nurl = "https://a.example/v1"\n',
            "url is for a server elsewhere",
        ),
        (table(checkpoint="./typo", memory_gib=1), "checkpoint = './typo': no such folder"),
        (table(memory_gib=1e300), "less than or equal to 1048576"),
        (table(checkpoint="Some/Model"), "'Some/Model' is no folder or file here"),
        (table() + "[on_demand]\nmemory_gib = 1\n", "it takes about 1.75 GiB"),
        (
            table(memory_gib=5) + "[on_demand]\nmemory_gib = 4\n",
            "more than on_demand.memory_gib, 4",
        ),
        (table() + "[server]\nworkers = 2\n", "belong to one process; use 1"),
        (table() + '[engine]\ndevice = "cuda"\n', "name the GPU's memory"),
        (table(lora="nothing"), "write it as name=folder"),
        (table(revision="main"), "tiers.coder.on_demand: models.large_revision"),
        (table(checkpoint="none", memory_gib=1), "tiers.coder.on_demand: models"),
        ("[tiers.coder.on_demand]\nkeep_alive_s = 3\n", "tiers.coder.url is missing"),
    ],
)
def test_what_cannot_work_is_told_before_the_start(tmp_path: Path, text: str, said: str) -> None:
    assert said in complaint(tmp_path, text)


def test_a_gpus_memory_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "may_have_gpu", lambda: True)
    assert "on_demand.memory_gib is missing" in complaint(tmp_path, table())
    check_upstreams(loaded(tmp_path, table() + "[on_demand]\nmemory_gib = 4\n"), {})
    check_upstreams(loaded(tmp_path, table() + '[engine]\ndevice = "cpu"\n'), {})


def test_a_server_elsewhere_takes_hand_offs_before_a_model_on_demand(tmp_path: Path) -> None:
    settings = loaded(tmp_path, table() + '[tiers.far]\nurl = "https://far.example/v1"\n')
    parts = build_upstream(settings, {}, ("large",), UpstreamMetrics(CollectorRegistry()))
    assert list(parts.tiers) == ["coder", "far"]
    assert parts.rules.upstream_tier == "far"
