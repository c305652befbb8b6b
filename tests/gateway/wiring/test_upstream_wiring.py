"""From settings to upstream tiers, and to an absent engine."""

import asyncio
import random
import shutil
import socket
import ssl
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.shared.mock_upstream import MockScript, MockUpstream
from outrider.engine.errors import EngineError, TierUnavailableError
from outrider.engine.events import EngineInfo, EngineStats
from outrider.engine.request import EngineRequest
from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.engines.backends.absent import AbsentEngine
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.upstream.attempts import UpstreamAttempt
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.wiring import build as wiring
from outrider.gateway.wiring.start import check_models, engine_recipe
from outrider.gateway.wiring.upstream import (
    build_mirror,
    build_upstream,
    build_upstreams,
    check_upstreams,
)
from outrider.verifier.params import SamplingParams
from tests.gateway.checks.services import SECRET
from tests.gateway.upstream.raw_server import answering, raw_server, whole

NO_MODELS = {"models.large": "none", "models.small": "none"}


def settings_of(**flags: Any) -> Settings:
    dotted = {key.replace("__", "."): value for key, value in flags.items()}
    return load_settings(environ={}, flags=NO_MODELS | dotted)


def complaint(settings: Settings, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        check_upstreams(settings, environ or {})
    return str(caught.value)


def call(**document: Any) -> UpstreamCall:
    talk = {"messages": [{"role": "user", "content": "Hello there"}]} | document
    return UpstreamCall(
        endpoint="chat", document=talk, model="mock-model", request_id="r", arrival_s=0.0
    )


# No engine.


def test_without_models_there_is_no_engine() -> None:
    settings = settings_of(tiers__cloud__url="http://127.0.0.1:9/v1")
    engine: EngineClient = wiring.build_client(settings)
    assert isinstance(engine, AbsentEngine)
    check_models(settings)
    with pytest.raises(EngineError, match="No model is configured"):
        wiring.build_engine(settings, lambda stage, share: None)


async def test_an_absent_engine_is_ready_and_refuses() -> None:
    engine = AbsentEngine()
    assert not engine.is_ready
    await engine.start()
    assert engine.is_ready
    assert await engine.info() == EngineInfo(tiers={}, speculation=False)
    assert await engine.stats() == EngineStats()
    request = EngineRequest(
        request_id="a",
        tier="large",
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
    )
    events = engine.submit(request)
    with pytest.raises(TierUnavailableError, match="large tier is not loaded"):
        await anext(events)
    await engine.abort("a")
    await engine.keep_on_tier("a")
    await engine.switch_tier("a", "small")
    await engine.close()
    assert not engine.is_ready


def test_the_engine_process_gets_no_upstream_settings() -> None:
    settings = load_settings(
        environ={},
        flags={
            "models.small": "demo",
            "tiers.cloud.url": "http://127.0.0.1:9/v1",
            "tiers.cloud.headers": {"x-key": "hunter2"},
            "handoff.tier": "cloud",
            "mirror.tier": "cloud",
            "checks.guard.url": "https://checks.example/x",
            "checks.guard.secret": SECRET,
            "alerts.url": "https://hooks.example/x",
            "alerts.secret": SECRET,
            "server.port": 5,
        },
    )
    sent = engine_recipe(settings).arguments
    assert "hunter2" not in sent
    read = Settings.model_validate_json(sent)  # which sees secrets as asterisks
    assert (read.server.port, read.checks) == (5, {})


# What is refused at start-up.


def test_a_key_that_is_missing_is_named_with_its_tier() -> None:
    settings = settings_of(tiers__cloud__url="http://a/v1", tiers__cloud__api_key_env="CLOUD_KEY")
    expected = (
        "tiers.cloud.api_key_env = 'CLOUD_KEY': the environment variable CLOUD_KEY is not set; it "
        "is to hold the server's key"
    )
    for environ in ({}, {"CLOUD_KEY": ""}, {"CLOUD_KEY": " \n"}):
        assert complaint(settings, environ) == expected
    with pytest.raises(SettingsError, match="CLOUD_KEY is not set"):
        build_upstreams(settings, {}, lambda attempt: None)
    for key in ("two words", "line\nbreak", "schlüssel"):
        message = complaint(settings, {"CLOUD_KEY": key})
        assert "CLOUD_KEY holds characters that no key has" in message
        assert key not in message
    check_upstreams(settings, {"CLOUD_KEY": "sk-1\n"})


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "10.1.2.3", "localhost", "[::1]:80"])
def test_a_private_address_is_refused_where_it_may_not_be(host: str) -> None:
    url = f"http://{host}/v1"
    check_upstreams(settings_of(tiers__cloud__url=url), {})
    message = complaint(settings_of(tiers__cloud__url=url, allow_private_upstreams=False))
    assert message.startswith("tiers.cloud.url: ")
    assert url in message
    assert "allow_private_upstreams" in message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    settings = settings_of(
        tiers__cloud__url="http://a/v1",
        tiers__cloud__ca_file=str(tmp_path / "no.pem"),
        tiers__cloud__tokenizer=str(tmp_path / "no"),
        mirror__tier="cloud",
        mirror__file=str(tmp_path / "no" / "mirror.jsonl"),
    )
    ca_file, tokenizer, mirror = complaint(settings).splitlines()
    assert ca_file.startswith("tiers.cloud.ca_file = ")
    assert ca_file.endswith("it cannot be read: no such file or directory")
    assert tokenizer.endswith("no such folder")
    assert mirror.startswith("mirror.file = ")
    assert mirror.endswith("name a file in a folder that exists")


def test_a_file_without_certificates(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    settings = settings_of(tiers__cloud__url="https://a/v1", tiers__cloud__ca_file=str(file))
    assert complaint(settings).endswith("it has no certificates in PEM format")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_a_certificate_is_trusted_where_it_is_named(tmp_path: Path) -> None:
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out ca.pem"
    )
    subprocess.run(make.split(), check=True, capture_output=True, cwd=tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")

    models = whole(b'{"data": [{"id": "behind-tls"}]}')
    async with raw_server(answering(models), tls=tls) as server:
        listed: list[tuple[str, ...]] = []
        for ca_file in (str(tmp_path / "ca.pem"), None):
            settings = settings_of(tiers__cloud__url=server.url, tiers__cloud__ca_file=ca_file)
            tier = build_upstreams(settings, {}, lambda attempt: None)["cloud"]
            await tier.start()
            listed.append(await tier.models())
            await tier.close()
        assert listed == [("behind-tls",), ()]


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    settings = settings_of(tiers__cloud__url="http://a/v1", tiers__cloud__tokenizer=str(tmp_path))
    with pytest.raises(SettingsError, match=r"tiers\.cloud\.tokenizer = .*: it cannot be loaded"):
        build_upstreams(settings, {}, lambda attempt: None)


# What works.


def test_tiers_keep_their_order() -> None:
    flags = {f"tiers.{name}.url": "http://a/v1" for name in ("zoo", "ant", "mid")}
    settings = load_settings(environ={}, flags=flags)
    assert list(build_upstreams(settings, {}, lambda attempt: None)) == ["zoo", "ant", "mid"]


def test_a_tier_is_wired_to_its_servers(tokenizer_folder: Path) -> None:
    attempts: list[UpstreamAttempt] = []

    async def main() -> None:
        script = MockScript(pieces=("Hello", " there"), reported_usage=(99, 77))
        async with MockUpstream(script, api_key="sk-1") as mock:
            settings = settings_of(
                tiers__cloud__url=mock.url,
                tiers__cloud__api_key_env="CLOUD_KEY",
                tiers__cloud__headers={"x-team": "blue"},
                tiers__cloud__tokenizer=str(tokenizer_folder),
                tiers__cloud__price__completion=1_000_000,
            )
            tiers = build_upstreams(
                settings, {"CLOUD_KEY": "sk-1"}, attempts.append, rng=random.Random(1)
            )
            tier = tiers["cloud"]
            await tier.start()
            try:
                assert await tier.models() == ("mock-model",)
                answer = tier.answer(call())
                whole = await answer.whole()
                await answer.aclose()
            finally:
                await tier.close()
            assert whole.texts == ("Hello there",)
            (request,) = mock.requests
            assert request.headers["authorization"] == "Bearer sk-1"
            assert request.headers["x-team"] == "blue"

    asyncio.run(main())
    (attempt,) = attempts
    assert attempt.outcome == "answered"
    assert attempt.usage is not None
    assert attempt.usage.is_corrected, "the server's lie is noticed by the tokenizer"
    assert attempt.usage.num_prompt_tokens < 99
    assert attempt.usage.num_completion_tokens < 77
    assert attempt.cost_usd == attempt.usage.num_completion_tokens


async def test_private_addresses_are_refused_also_behind_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MockUpstream() as mock:
        address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", mock.port))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [address])
        settings = settings_of(
            tiers__cloud__url=f"http://cloud.example:{mock.port}/v1",
            tiers__cloud__max_retries=0,
            allow_private_upstreams=False,
        )
        tier = build_upstreams(settings, {}, lambda attempt: None)["cloud"]
        await tier.start()
        try:
            async with aclosing(tier.answer(call())) as answer:
                with pytest.raises(UpstreamError, match="private address"):
                    await answer.whole()
        finally:
            await tier.close()
        assert mock.num_requests == 0


@pytest.fixture
def metrics() -> UpstreamMetrics:
    return UpstreamMetrics(CollectorRegistry())


def test_a_mirror_is_there_where_there_is_a_share(metrics: UpstreamMetrics) -> None:
    off = settings_of(tiers__cloud__url="http://a/v1", mirror__tier="cloud")
    tiers = build_upstreams(off, {}, lambda attempt: None)
    assert build_mirror(off, tiers, metrics) is None
    on = settings_of(tiers__cloud__url="http://a/v1", mirror__tier="cloud", mirror__share=0.5)
    assert build_mirror(on, tiers, metrics) is not None


def test_all_parts_of_the_cloud_are_wired(metrics: UpstreamMetrics) -> None:
    settings = load_settings(
        environ={},
        flags={
            "tiers.first.url": "http://a/v1",
            "tiers.second.url": "http://b/v1",
            "handoff.tier": "second",
            "mirror.tier": "first",
            "mirror.share": 1,
        },
    )
    cloud = build_upstream(settings, {}, ("small", "large"), metrics)
    assert list(cloud.tiers) == ["first", "second"]
    assert cloud.rules.upstream_tier == "second"
    assert cloud.rules.policy == "prefer_local"
    assert cloud.mirror is not None
    registry = CollectorRegistry()
    metrics.register(registry)
    labels = {"tier": "second", "replica": "b:80", "state": "closed"}
    assert registry.get_sample_value("outrider_upstream_breaker_state", labels) == 1


def test_without_tiers_there_is_no_cloud(metrics: UpstreamMetrics) -> None:
    cloud = build_upstream(load_settings(environ={}), {}, ("small", "large"), metrics)
    assert not cloud.tiers
    assert cloud.mirror is None
    assert cloud.rules.policy == "local_only" or cloud.rules.upstream_tier is None
