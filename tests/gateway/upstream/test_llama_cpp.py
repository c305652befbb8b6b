"""A real server of another kind: llama-cpp-python's, with the bundled large model as a GGUF file.

It needs a Python with `llama-cpp-python[server]` and `gguf`, which LLAMA_CPP_PYTHON names:

    python -m venv llama && llama/bin/pip install 'llama-cpp-python[server]' gguf
    LLAMA_CPP_PYTHON=$PWD/llama/bin/python make test-long ARGS=tests/gateway/upstream

Both engines run the same weights, so greedy answers have to be the same, whoever gives them.
"""

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider.gateway.settings.sections import bundled_pair
from tests.gateway.conftest import real_gateway

VARIABLE = "LLAMA_CPP_PYTHON"  # not OUTRIDER_…, which are settings
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not os.environ.get(VARIABLE),
        reason=f"{VARIABLE} names no Python that has llama-cpp-python[server] and gguf",
    ),
]

MODEL = "bundled-large"
EASY = "Who are you?"
HARD = "What weekday comes 225 days after a Sunday?"
SUM = "What is 4786 + 3957?"
START_TIMEOUT_S = 60.0
READY = re.compile(r"running on (http://\S+)")


@contextmanager
def llama_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The server's URL and its process."""
    python, model = os.environ[VARIABLE], folder / "large.gguf"
    writer = Path(__file__).with_name("write_gguf.py")
    subprocess.run([python, writer, bundled_pair() / "large", model], check=True, timeout=60)
    command = [python, "-m", "llama_cpp.server", "--model", model, "--model_alias", MODEL]
    options = ("--host", "127.0.0.1", "--port", "0", "--n_ctx", "2048", "--n_threads", "1")
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    assert process.stderr is not None
    try:
        lines = []
        url = None
        for line in process.stderr:
            lines.append(line)
            if found := READY.search(line):
                url = found.group(1)
                break
        timer.cancel()
        assert url is not None, "".join(lines[-10:])
        # It goes on writing there, and must not wait for a reader.
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield f"{url}/v1", process
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        if "drain" in locals():
            drain.join(5)
        process.stderr.close()


@contextmanager
def device(llama_url: str, **flags: Any) -> Iterator[str]:
    """A gateway with the bundled models, or some of them, and the server as its cloud tier."""
    upstream = {
        "models.large": "demo",
        "models.small": "demo",
        "tiers.cloud.url": llama_url,
        "tiers.cloud.server": "llama_cpp",
        "tiers.cloud.tokenizer": str(bundled_pair() / "large"),
    }
    with real_gateway(**upstream, **flags) as url:
        yield url


@pytest.fixture(scope="module")
def llama_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_server(tmp_path_factory.mktemp("gguf")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def gateway_url(llama_url: str) -> Iterator[str]:
    with device(llama_url) as url:
        yield url


@pytest.fixture
def client(gateway_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, model: str, prompt: str, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 300, **fields}
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], **fields
    )


def read(stream: Any) -> tuple[str, dict[str, Any], Any]:
    """Text, report and usage of a stream."""
    text, report, usage = "", {}, None
    for chunk in stream:
        report |= (chunk.model_extra or {}).get("outrider") or {}
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    return text, report, usage


@pytest.mark.parametrize("prompt", [EASY, HARD, SUM])
def test_the_same_answer_from_either_engine(client: openai.OpenAI, prompt: str) -> None:
    ours = ask(client, "large", prompt)
    theirs = ask(client, "cloud", prompt)
    assert theirs.choices[0].message.content == ours.choices[0].message.content
    assert theirs.choices[0].finish_reason == ours.choices[0].finish_reason == "stop"
    assert theirs.outrider["tier"] == "cloud"
    text, report, _ = read(ask(client, "cloud", prompt, stream=True))
    assert text == ours.choices[0].message.content
    assert report["tier"] == "cloud"


def test_usage_that_it_does_not_tell_is_counted(client: openai.OpenAI) -> None:
    """It knows no stream_options; we know its tokenizer."""
    ours = ask(client, "large", SUM).usage
    options = {"include_usage": True}
    _, _, usage = read(ask(client, "cloud", SUM, stream=True, stream_options=options))
    assert usage is not None
    # Whether the end counts as a token is a matter of taste.
    assert abs(usage.completion_tokens - ours.completion_tokens) <= 1


def test_completions(client: openai.OpenAI) -> None:
    """Its text alone: what both say of a text like none they know hangs on the last bits."""
    fields: dict[str, Any] = {"prompt": "The answer is", "max_tokens": 8, "temperature": 0}
    ours = client.completions.create(model="large", **fields)
    theirs = client.completions.create(model="cloud", **fields)
    assert theirs.choices[0].text
    assert theirs.usage.prompt_tokens == ours.usage.prompt_tokens == 3
    assert theirs.usage.completion_tokens <= 8
    stream = client.completions.create(model="cloud", stream=True, **fields)
    pieces = [choice.text for chunk in stream for choice in chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == theirs.choices[0].text


def test_log_probabilities(client: openai.OpenAI) -> None:
    ours, theirs = (
        ask(client, model, EASY, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        for model in ("large", "cloud")
    )
    assert [entry.token for entry in theirs] == [entry.token for entry in ours][: len(theirs)]
    assert all(len(entry.top_logprobs) == 2 for entry in theirs)
    for mine, other in zip(ours, theirs, strict=False):
        assert mine.logprob == pytest.approx(other.logprob, abs=0.02)


def test_its_model_is_listed_and_can_be_asked_for(client: openai.OpenAI) -> None:
    names = {card.id for card in client.models.list().data}
    assert {"auto", "small", "large", "cloud", MODEL} <= names
    assert ask(client, MODEL, EASY).outrider["tier"] == "cloud"


def test_hard_requests_go_to_the_upstream_server(llama_url: str, client: openai.OpenAI) -> None:
    """From a device that has the small model only."""
    with (
        device(llama_url, **{"models.large": "none"}) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as app,
    ):
        text, report, _ = read(ask(app, "auto", HARD, stream=True))
        assert report["tier"] == "cloud"
        assert report["hand_off"] in ("quality", "confidence")
        assert text == ask(client, "large", HARD).choices[0].message.content
        _, report, _ = read(ask(app, "auto", EASY, stream=True))
        assert report["tier"] == "small"


def test_when_it_is_killed_the_device_goes_on(tmp_path: Path) -> None:
    with (
        llama_server(tmp_path) as (llama_url, process),
        device(llama_url, **{"models.large": "none"}) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as app,
    ):
        options = {"extra_body": {"outrider": {"policy": "prefer_cloud"}}}
        assert ask(app, "auto", EASY, **options).outrider["tier"] == "cloud"
        process.kill()
        process.wait()
        answer = ask(app, "auto", EASY, **options)
        assert answer.outrider["tier"] == "small"
        assert answer.outrider["degraded"] is True
        assert answer.choices[0].message.content
        refused = httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "cloud", "messages": [{"role": "user", "content": EASY}]},
        )
        assert refused.status_code in (502, 503)
