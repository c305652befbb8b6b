"""The checkpoint's own sampling parameters, for requests that set none."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.engine.model.checkpoint_files import sampling_defaults
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.chat_tokenizers import checkpoint_defaults
from tests.gateway.conftest import parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient, Step

OWN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
HI = {"model": "large", "messages": [{"role": "user", "content": "Hi"}]}


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_a_checkpoints_parameters_are_read(tmp_path: Path) -> None:
    folder = write_config(tmp_path, **OWN, do_sample=True, eos_token_id=2, max_length=20)
    assert sampling_defaults(folder) == OWN


def test_wrong_parameters_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_config(tmp_path, temperature="warm", top_p=7, top_k=None, min_p=0.1)
    assert sampling_defaults(folder) == {"min_p": 0.1}
    assert "temperature" in caplog.text
    assert "top_p" in caplog.text


def test_a_checkpoint_without_parameters_has_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


def test_both_tiers_have_the_large_models(tmp_path: Path) -> None:
    for tier, temperature in (("small", 0.2), ("large", 0.8)):
        (tmp_path / tier).mkdir()
        write_config(tmp_path / tier, temperature=temperature)
    both = {tier: str(tmp_path / tier) for tier in ("small", "large")}
    settings = load_settings(environ={})
    assert checkpoint_defaults(settings, both) == {"temperature": 0.8}  # type: ignore[arg-type]
    assert checkpoint_defaults(settings, {"small": both["small"]}) == {"temperature": 0.2}
    assert checkpoint_defaults(settings, {}) == {}
    off = load_settings(environ={}, flags={"models.generation_config": "none"})
    assert checkpoint_defaults(off, both) == {}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]) -> ScriptedClient:
    steps = [Step(token_ids=tuple(encode("Hello there!")))]
    return ScriptedClient(vocab_size=420, script=lambda _: Script(steps=steps))


@pytest.fixture(scope="module")
def http(engine: ScriptedClient, tokenizer: ChatTokenizer) -> Iterator[httpx.Client]:
    parts = parts_over(engine, tokenizer, sampling_defaults=OWN)
    with running(build_app(parts)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 1}, {"temperature": 0, "top_p": 1}),
        ({"top_k": -1, "repetition_penalty": 1}, {"top_k": 0, "repetition_penalty": 1}),
        ({"temperature": None, "min_p": 0}, {"min_p": 0}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_they_hold_where_the_request_sets_none(
    engine: ScriptedClient,
    http: httpx.Client,
    path: str,
    fields: dict[str, Any],
    changed: dict[str, Any],
) -> None:
    engine.submitted.clear()
    body = HI if path.startswith("/v1/chat") else {"model": "large", "prompt": "Hi"}
    assert http.post(path, json={**body, **fields}).status_code == 200
    (request,) = engine.submitted
    assert {name: getattr(request.sampling, name) for name in OWN} == {**OWN, **changed}
