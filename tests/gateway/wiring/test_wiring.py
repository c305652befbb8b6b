"""From settings to an engine of the right size, with or without a drafter."""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.core import Engine
from outrider.engine.errors import EngineError
from outrider.engine.events import Finished, TokensEmitted
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends import spawning
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.engines.backends.wire import WorkerSpec
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring import build as wiring
from outrider.gateway.wiring import engine as engine_wiring
from outrider.gateway.wiring import start
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.router.label_free import LabelFreePolicy
from outrider.router.policy import RoutePolicy, TrainedPolicy, WatchOptions
from outrider.router.preference import PreferringPolicy
from outrider.verifier.params import SamplingParams, Tier
from tests.models import save_hf_model
from tests.router.routers import scorer_that_says, table

CONTEXT = 256


def test_the_engine_s_process_is_told_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []

    def popen(*_: object, env: dict[str, str], **__: object) -> object:
        told.append(env)
        raise OSError("far enough")

    variables = {
        "OUTRIDER_KEYS__ADMIN_TOKEN": "a-secret",
        "OUTRIDER_DATABASE_URL": "postgresql://me:a-secret@db/x",
        "CLOUD_KEY": "a-secret",
        "OUTRIDER_CPU": "avx2",
        "OUTRIDER_KERNELS": "auto",
        "HF_HOME": "/models",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(spawning.subprocess, "Popen", popen)
    flags = {"tiers.cloud.url": "https://cloud.example/v1", "tiers.cloud.api_key_env": "CLOUD_KEY"}
    spec = WorkerSpec(builder="", arguments="", endpoint="", scratch_dir="")
    settings = load_settings(flags=flags, environ={})
    with pytest.raises(OSError, match="far enough"):
        spawning.spawn(spec, start.engine_environment(settings, os.environ))
    assert not any("a-secret" in value for value in told[0].values())
    assert (told[0]["OUTRIDER_CPU"], told[0]["OUTRIDER_KERNELS"]) == ("avx2", "auto")
    assert told[0]["HF_HOME"] == "/models"
    assert told[0]["GOMP_SPINCOUNT"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> dict[str, str]:
    folders = {}
    for seed, tier in enumerate(("large", "small")):
        folder = tmp_path_factory.mktemp(tier)
        save_hf_model("llama2", folder, seed=seed, vocab_size=420)
        shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
        folders[f"models.{tier}"] = str(folder)
    return folders


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def build(flags: dict[str, Any], **more: Any) -> Engine:
    quick = {"speculation.adaptive": False, "engine.device": "cpu", "engine.dtype": "float32"}
    more = {key.replace("__", "."): value for key, value in more.items()}
    return wiring.build_engine(load_settings(environ={}, flags=quick | flags | more), no_progress)


def answer(engine: Engine, tier: Tier = "large") -> tuple[list[int], Finished]:
    sampling = SamplingParams(max_tokens=20)
    engine.submit(
        EngineRequest(
            request_id="r",
            prompt_token_ids=(5, 6, 7),
            tier=tier,
            sampling=sampling,
        )
    )
    token_ids: list[int] = []
    while True:
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                token_ids += event.token_ids
            if isinstance(event, Finished):
                return token_ids, event


def test_a_pair_drafts_and_says_the_same_as_without(pair: dict[str, str]) -> None:
    stages: list[str] = []
    flags = {**pair, "speculation.adaptive": False, "engine.device": "cpu"}
    engine = wiring.build_engine(
        load_settings(environ={}, flags=flags), lambda stage, fraction: stages.append(stage)
    )
    assert engine.info().speculation
    assert set(stages) == {"loading the large model", "loading the small model"}
    drafted = answer(engine)
    assert drafted[1].stats.num_drafted_tokens > 0
    plain = build(pair, speculation__enabled=False)
    assert not plain.info().speculation
    assert answer(plain)[0] == drafted[0]


@pytest.mark.slow
def test_adaptive_trees_time_the_models(pair: dict[str, str]) -> None:
    stages: list[str] = []
    wiring.build_engine(
        load_settings(environ={}, flags=pair), lambda stage, fraction: stages.append(stage)
    )
    assert {"timing the large model", "timing the small model"} <= set(stages)


@pytest.mark.slow
def test_what_drafting_learns_is_kept_beside_pass_times(
    pair: dict[str, str], tmp_path: Path
) -> None:
    flags = pair | {"engine.cache_folder": str(tmp_path)}
    settings = load_settings(environ={}, flags=flags)
    engine = wiring.build_engine(settings, no_progress, engine_wiring.saved_times(settings))
    del engine
    gc.collect()
    names = sorted(path.name.rsplit("-", 1)[0] for path in tmp_path.iterdir())
    assert names == ["lessons", "pass-times", "pass-times"]


def test_one_tier_alone(pair: dict[str, str]) -> None:
    engine = build({"models.small": pair["models.small"]})
    assert set(engine.info().tiers) == {"small"}
    assert not engine.info().speculation
    assert len(answer(engine, "small")[0]) > 0


@pytest.fixture
def mismatched(pair: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The pair with two tokens swapped in the small model's vocabulary."""
    other = tmp_path / "other"
    shutil.copytree(pair["models.small"], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    return {**pair, "models.small": str(other)}


def test_a_drafter_with_another_tokenizer_is_refused_with_two_ways_out(
    mismatched: dict[str, str],
) -> None:
    wanted = r"(?s)tokenizers differ .*has the id .*--no-speculation.*--allow-vocab-mismatch"
    with pytest.raises(EngineError, match=wanted):
        build(mismatched)
    settings = load_settings(environ={}, flags=mismatched)
    with pytest.raises(EngineError, match=wanted):  # before the engine has loaded anything
        wiring.build_parts(settings, wiring.build_client(settings))


def test_without_speculation_two_tokenizers_are_served(mismatched: dict[str, str]) -> None:
    engine = build(mismatched, speculation__enabled=False)
    assert not engine.info().speculation
    settings = load_settings(environ={}, flags={**mismatched, "speculation.enabled": False})
    parts = wiring.build_parts(settings, wiring.build_client(settings))
    assert len({tokenizer.fingerprint for tokenizer in parts.tokenizers.values()}) == 2


@pytest.mark.slow
def test_a_mapped_drafter_drafts_and_says_the_same(mismatched: dict[str, str]) -> None:
    engine = build(mismatched, speculation__allow_vocab_mismatch=True)
    assert engine.info().speculation
    drafted = answer(engine)
    assert drafted[1].stats.num_drafted_tokens > 0
    assert answer(build(mismatched, speculation__enabled=False))[0] == drafted[0]


def test_a_turned_round_vocabulary_costs_no_guess(pair: dict[str, str], tmp_path: Path) -> None:
    """The large model drafts for itself, once with its vocabulary turned round."""
    turned = tmp_path / "turned"
    shutil.copytree(pair["models.large"], turned)
    weights = load_file(turned / "model.safetensors")
    size = len(weights["model.embed_tokens.weight"])
    tokenizer = json.loads((turned / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    known = sorted(tokenizer["model"]["vocab"].values())
    plain = [token_id for token_id in known if token_id not in special]
    new_id = list(range(size))
    for token_id, other in zip(plain, reversed(plain), strict=True):
        new_id[token_id] = other
    for name, token_id in tokenizer["model"]["vocab"].items():
        tokenizer["model"]["vocab"][name] = new_id[token_id]
    (turned / "tokenizer.json").write_text(json.dumps(tokenizer))
    order = torch.tensor(new_id).argsort()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][order].contiguous()
    save_file(weights, turned / "model.safetensors", metadata={"format": "pt"})
    both = {"speculation.allow_vocab_mismatch": True, "models.large": pair["models.large"]}
    told = answer(build({**both, "models.small": str(turned)}))
    own = answer(build({**both, "models.small": pair["models.large"]}))
    assert own[1].stats.num_accepted_tokens > 5
    assert told[0] == own[0]
    assert told[1].stats.num_accepted_tokens == own[1].stats.num_accepted_tokens


def test_the_limits_reach_the_engine(pair: dict[str, str]) -> None:
    engine = build(pair, engine__max_context=64, engine__num_blocks=40, engine__num_threads=1)
    info = engine.info().tiers["large"]
    assert info.max_context == 64
    assert info.dtype == "float32"
    assert engine.stats().tiers["large"].num_blocks == 40
    assert engine.stats().tiers["small"].num_blocks == 40
    assert torch.get_num_threads() == 1


def test_the_cache_is_what_is_useful_or_what_was_given(pair: dict[str, str]) -> None:
    blocks_per_answer = CONTEXT // 16
    useful = build(pair, engine__max_sequences=3).stats().tiers["large"].num_blocks
    assert useful == 3 * blocks_per_answer
    # Per tier: 3 layers, keys and values, 16 tokens, 4 heads of 16, float32.
    bytes_per_block = 2 * (3 * 2 * 16 * 4 * 16 * 4)
    gib = 10.5 * bytes_per_block / 2**30
    tiers = build(pair, engine__kv_cache_gib=gib, engine__small_kv_ratio=1.0).stats().tiers
    assert (tiers["large"].num_blocks, tiers["small"].num_blocks) == (10, 10)
    tiers = build(pair, engine__kv_cache_gib=gib, engine__small_kv_ratio=0.5).stats().tiers
    assert (tiers["large"].num_blocks, tiers["small"].num_blocks) == (10, 10)  # no full answer fits


def test_a_cache_too_small_is_refused_with_the_numbers(pair: dict[str, str]) -> None:
    with pytest.raises(EngineError, match="less than two blocks"):
        build(pair, engine__kv_cache_gib=1e-6)
    with pytest.raises(EngineError, match=r"engine\.max_context=256 needs 16 KV blocks"):
        build(pair, engine__kv_cache_gib=3e-4, engine__max_context=CONTEXT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(pair: dict[str, str]) -> None:
    with pytest.raises(EngineError, match="--device cpu"):
        build({**pair, "engine.device": "cuda"})


def test_small_models_get_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_wiring, "usable_physical_cores", lambda: 8)
    assert engine_wiring.default_num_threads(13 * 2**20) == 1
    assert engine_wiring.default_num_threads(40 * 2**20) == 2
    assert engine_wiring.default_num_threads(800 * 2**20) == 8


def test_openmp_is_told_before_torch_is_loaded() -> None:
    settings = load_settings(environ={}, flags={"engine.num_threads": 3})
    environment = start.engine_environment(settings, {})
    assert environment["OMP_NUM_THREADS"] == "3"
    spin_count = environment["GOMP_SPINCOUNT"]
    assert spin_count is not None
    assert int(spin_count) < 300_000


def test_the_engine_lives_where_the_settings_say() -> None:
    settings = load_settings(environ={}, flags={"engine.process": False})
    assert isinstance(wiring.build_client(settings), InProcessEngineClient)
    assert isinstance(wiring.build_client(load_settings(environ={})), ProcessEngineClient)


def decider(parts: GatewayParts) -> RoutePolicy:
    """What decides where a request prefers nothing."""
    assert isinstance(parts.router, PreferringPolicy)
    return parts.router.policy


def test_a_context_has_a_tokenizer_for_each_tier_and_a_policy(pair: dict[str, str]) -> None:
    settings = load_settings(
        environ={}, flags={**pair, "limits.max_body_bytes": 5, "limits.default_max_tokens": 7}
    )
    parts = wiring.build_parts(settings, wiring.build_client(settings))
    assert set(parts.tokenizers) == {"large", "small"}
    assert isinstance(decider(parts), LabelFreePolicy)
    assert parts.limits.max_body_bytes == 5
    assert parts.limits.default_max_tokens == 7


def test_a_router_that_is_none_is_refused(pair: dict[str, str], tmp_path: Path) -> None:
    settings = load_settings(environ={}, flags={**pair, "models.router": str(tmp_path)})
    with pytest.raises(EngineError, match="router"):
        wiring.build_parts(settings, wiring.build_client(settings))


@pytest.fixture
def router_for(pair: dict[str, str], tmp_path: Path) -> Callable[[str | None], dict[str, str]]:
    def made(trained_for: str | None) -> dict[str, str]:
        scorer_that_says(0.45, table(), pair=trained_for).save(tmp_path / "router")
        return {**pair, "models.router": str(tmp_path / "router")}

    return made


def test_a_router_belongs_to_its_pair(
    pair: dict[str, str],
    router_for: Callable[[str | None], dict[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def parts(trained_for: str | None, **more: Any) -> GatewayParts:
        flags = router_for(trained_for) | {key.replace("__", "."): v for key, v in more.items()}
        settings = load_settings(environ={}, flags=flags)
        return wiring.build_parts(settings, wiring.build_client(settings))

    small, large = (
        checkpoint_fingerprint(Path(pair[f"models.{tier}"])) for tier in ("small", "large")
    )
    assert parts(f"{small}-{large}").routing.pair == f"{small}-{large}"
    assert parts(None).routing.pair is None
    with pytest.raises(EngineError, match=r"another pair of models .*force_router"):
        parts(f"{large}-{small}")
    forced = parts(f"{large}-{small}", routing__force_router=True)
    assert isinstance(decider(forced), TrainedPolicy)
    assert forced.routing.pair is None
    assert "force_router" in caplog.text


def test_routing_settings_reach_the_policy(
    router_for: Callable[[str | None], dict[str, str]],
) -> None:
    wanted = {
        "routing.strong_share": 0.2,
        "routing.hold_back_tokens": 5,
        "routing.hold_back_ms": 80,
        "routing.mid_stream": True,
        "routing.sticky": False,
        "routing.prefer": "price",
        "routing.prices.small.prompt": 0.5,
        "routing.prices.large.prompt": 2,
        "routing.prices.large.cached_prompt": 1,
    }
    settings = load_settings(environ={}, flags=router_for(None) | wanted)
    parts = wiring.build_parts(settings, wiring.build_client(settings))
    policy = decider(parts)
    assert isinstance(policy, TrainedPolicy)
    assert policy.current_setting().strong_share == pytest.approx(0.2)
    assert policy.watch == WatchOptions(hold_back_tokens=5, hold_back_s=0.08, mid_stream=True)
    routing = parts.routing
    assert not routing.is_sticky
    assert routing.prefer == "price"
    assert routing.guard is not None
    assert routing.prices is not None
    assert routing.prices["small"].cached_prompt == 0.5
    assert routing.prices["large"].cached_prompt == 1.0


def test_a_target_that_the_router_cannot_meet_is_refused(
    pair: dict[str, str], tmp_path: Path
) -> None:
    scorer_that_says(0.45).save(tmp_path / "router")
    flags = {**pair, "models.router": str(tmp_path / "router"), "routing.quality": 0.9}
    settings = load_settings(environ={}, flags=flags)
    with pytest.raises(EngineError, match=r"routing\.quality needs a router with a calibration"):
        wiring.build_parts(settings, wiring.build_client(settings))


def test_a_folder_without_a_tokenizer_is_refused(pair: dict[str, str], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(Path(pair["models.large"]) / "config.json", bare)
    settings = load_settings(environ={}, flags={"models.large": str(bare)})
    with pytest.raises(EngineError, match="bare"):
        wiring.build_parts(settings, wiring.build_client(settings))
