"""The Messages API on both sides: an upstream tier gets what the client sent."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from outrider.engine.errors import QueueFullError
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
)
from outrider.gateway.http.apis.api import ANYONE
from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal, Scopes
from outrider.gateway.wiring.answering import build_jobs, build_tokenizing
from tests.gateway.conftest import OpenWorld, Server
from tests.gateway.hybrid import World
from tests.gateway.scripted_client import Script

HELLO: dict[str, Any] = {
    "model": "cloud",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Hello"}],
}
ALIASES = {
    "quick": AliasSettings(
        models=("small", "cloud"), defaults={"chat_template_kwargs": {"enable_thinking": True}}
    ),
    "usual": AliasSettings(models=("large", "quick"), weights=(1.0, 9.0)),
    "far": AliasSettings(models=("cloud", "small")),
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.fixture
def near(open_world: OpenWorld, server: Server) -> Iterator[World]:
    """A gateway whose upstream tier is another gateway, asked by its Messages API."""
    tier = {"url": f"{server.url}/v1", "server": "anthropic", "model": "large"}
    with open_world(clouds=(), tier=tier) as world:
        yield world


@pytest.fixture
def claude(near: World) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=near.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_of_an_upstream_tier(
    server: Server, claude: anthropic.Anthropic, is_streamed: bool
) -> None:
    server.says("Let me see.</think>\nHello there. STOP", num_cached_tokens=3)
    fields: dict[str, Any] = {
        **HELLO,
        "system": "Be kind.",
        "stop_sequences": ["STOP"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "extra_body": {"temperature": 0.0, "top_k": 3},
    }
    if is_streamed:
        with claude.messages.stream(**fields) as stream:
            message: Any = stream.get_final_message()
    else:
        message = claude.messages.create(**fields)
    thought, text = message.content
    assert (thought.thinking, text.text) == ("Let me see.", "Hello there. ")
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    (request,) = server.engine.submitted
    assert message.usage.input_tokens == len(request.prompt_token_ids) - 3
    assert message.usage.cache_read_input_tokens == 3
    if not is_streamed:  # the client forgets what it does not know of events
        assert message.outrider["tier"] == "cloud"
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 3)


def test_errors_of_an_upstream_server_have_the_clients_format(
    server: Server, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(
            **{**HELLO, "messages": [{"role": "user", "content": [IMAGE]}]}  # the other has no eyes
        )
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert "image" in body["error"]["message"]
    server.engine.script = lambda _: Script(
        refusal=QueueFullError(num_waiting=1, retry_after_s=1.0)
    )
    with pytest.raises(anthropic.RateLimitError) as busy:
        claude.messages.create(**HELLO)
    told: Any = busy.value.body
    assert told["error"]["type"] == "rate_limit_error"


def test_images_go_to_a_tier_that_supports_them(near: World, claude: anthropic.Anthropic) -> None:
    asked = {**HELLO, "model": "auto", "messages": [{"role": "user", "content": [IMAGE]}]}
    with pytest.raises(anthropic.BadRequestError):  # by the server, which was asked
        claude.messages.create(**asked)
    assert not near.engine.submitted


# ---- tokens -------------------------------------------------------------------------------


def counted(world: World, principal: Principal = ANONYMOUS, **fields: Any) -> dict[str, Any]:
    tokenizing = build_tokenizing(
        world.context, build_jobs(world.context), ChainBook(aliases=ALIASES)
    )
    given = {"prompt": "Hello", **fields}
    body = json.dumps({name: value for name, value in given.items() if value}).encode()
    answer = asyncio.run(tokenizing.tokenize(body, replace(ANYONE, principal=principal)))
    document: dict[str, Any] = json.loads(bytes(answer.body))
    return document


def test_tokens_of_upstream_servers_cannot_be_counted(near: World) -> None:
    for model in ("cloud", "cloud/opus"):
        with pytest.raises(BadRequestError) as refused:
            counted(near, model=model)
        assert (refused.value.param, refused.value.code) == ("model", "tokenizer_unknown")
    with pytest.raises(ModelNotFoundError):
        counted(near, model="gpt-9")


def test_aliases_count_as_the_model_that_answers_first(near: World) -> None:
    assert counted(near, model="quick")["tier"] == "small"
    assert counted(near, model="usual")["tier"] == "small"
    scoped = Principal(key_id="k", name="k", tenant="k", scopes=Scopes(models=frozenset({"quick"})))
    assert counted(near, scoped, model="quick")["tier"] == "small"
    with pytest.raises(BadRequestError) as refused:
        counted(near, model="far")
    assert refused.value.code == "tokenizer_unknown"
    with pytest.raises(ModelNotFoundError, match="quick"):
        counted(near, model="gpt-9")


def test_an_aliass_defaults_are_part_of_the_prompt(near: World) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    plain = counted(near, model="small", messages=messages, prompt=None)["count"]
    thinking = counted(near, model="quick", messages=messages, prompt=None)["count"]
    assert thinking > plain
    tokenizing = build_tokenizing(
        near.context, build_jobs(near.context), ChainBook(aliases=ALIASES)
    )
    body = json.dumps({"model": "quick", "messages": messages}).encode()
    answer = asyncio.run(tokenizing.count_tokens(body, ANYONE))
    assert json.loads(bytes(answer.body)) == {"input_tokens": thinking}


def test_keys_count_tokens_of_permitted_tiers_only(near: World) -> None:
    def key(**scopes: Any) -> Principal:
        return Principal(key_id="k", name="k", tenant="k", scopes=Scopes(**scopes))

    assert counted(near)["tier"] == "large"
    assert counted(near, key(tiers=frozenset({"small"})))["tier"] == "small"
    assert counted(near, key(models=frozenset({"small"})), model="small")["tier"] == "small"
    with pytest.raises(PermissionDeniedError):
        counted(near, key(models=frozenset({"small"})))
    with pytest.raises(PermissionDeniedError):
        counted(near, key(tiers=frozenset({"small"})), model="large")
    with pytest.raises(PermissionDeniedError):
        counted(near, key(tiers=frozenset()))
