"""`outrider.quality`: lossless or a cascade, from the request to the report."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx
import pytest

from outrider.engine.events import EngineInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.reading.parsed_request import RequestContext
from outrider.gateway.answering.streaming.generation import Job
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.responses import ChatCompletion
from outrider.gateway.wiring.answering import build_jobs
from outrider.verifier.params import CascadeParams
from tests.gateway.answers import read_answer
from tests.gateway.conftest import Server, parts_over
from tests.gateway.scripted_client import Script, ScriptedClient, Step

CASCADE = {"cascade": 0.25}


def post(http: httpx.Client, quality: object, **fields: object) -> httpx.Response:
    chat = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
    body = {**chat, **fields, "outrider": {"quality": quality}}
    return http.post("/v1/chat/completions", json=body)


def submitted(server: Server) -> EngineRequest:
    (request,) = server.engine.submitted
    server.engine.submitted.clear()
    return request


@pytest.mark.parametrize("quality", [None, "lossless"])
def test_lossless_is_the_default(server: Server, http: httpx.Client, quality: object) -> None:
    answer = post(http, quality).json()
    request = submitted(server)
    assert request.cascade is None
    assert request.tier == "small"  # as the router says
    assert answer["outrider"]["unratified_tokens"] == 0


@pytest.mark.parametrize(
    ("quality", "expected"),
    [
        (CASCADE, CascadeParams(alpha=0.25, rule="opt")),
        ({"cascade": 0, "rule": "token_specific"}, CascadeParams(alpha=0, rule="token_specific")),
        ({"cascade": 1.0, "rule": "opt"}, CascadeParams(alpha=1.0)),
        ({"cascade": 0.5, "rule": None}, CascadeParams(alpha=0.5)),
    ],
)
def test_cascades(
    server: Server, http: httpx.Client, quality: object, expected: CascadeParams
) -> None:
    for model, reason in (("auto", "cascade"), ("large", "requested")):
        answer = post(http, quality, model=model, n=2)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outrider"]["reason"] == reason
        assert answer.json()["outrider"]["tier"] == "large"  # whatever the router thinks
        assert [request.cascade for request in server.engine.submitted] == [expected] * 2
        assert {request.tier for request in server.engine.submitted} == {"large"}
        server.engine.submitted.clear()


def test_unratified_tokens_are_reported(server: Server, http: httpx.Client) -> None:
    ids = tuple(server.encode("Hello there, how are you?"))
    steps = [
        Step(token_ids=ids[:4], num_drafted=5, num_accepted=4, num_unratified=2),
        Step(token_ids=ids[4:], num_unratified=1),
    ]
    server.engine.script = lambda _: Script(steps=steps)
    answer = read_answer(ChatCompletion, post(http, CASCADE).json())
    assert answer.outrider.unratified_tokens == 3
    both = read_answer(ChatCompletion, post(http, CASCADE, n=2).json())
    assert both.outrider.unratified_tokens == 6


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("quality", "param"),
    [
        ("best", "outrider.quality"),
        ({"cascade": 1.5}, "outrider.quality.cascade"),
        ({"cascade": -0.1}, "outrider.quality.cascade"),
        ({"cascade": "0.1"}, "outrider.quality.cascade"),
        ({}, "outrider.quality.cascade"),
        ({"cascade": 0.1, "rule": "chow"}, "outrider.quality.rule"),
        ({"cascade": 0.1, "beta": 1}, "outrider.quality.beta"),
    ],
)
def test_invalid_qualities_are_refused(
    server: Server, http: httpx.Client, quality: object, param: str
) -> None:
    response = post(http, quality)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not server.engine.submitted


def test_the_small_model_alone_is_no_cascade(server: Server, http: httpx.Client) -> None:
    response = post(http, CASCADE, model="small")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "outrider.quality"
    assert "auto or large" in error["message"]
    assert not server.engine.submitted


@dataclass
class OtherInfo(ScriptedClient):
    """An engine that says something else about itself."""

    change: Callable[[EngineInfo], EngineInfo] = lambda info: info

    async def info(self) -> EngineInfo:
        return self.change(await super().info())


def job_of(tokenizer: ChatTokenizer, change: Callable[[EngineInfo], EngineInfo]) -> Job:
    """The job of a request for a cascade, where the engine's information is changed."""
    engine = OtherInfo(vocab_size=420, script=lambda _: Script(), change=change)
    parts = parts_over(engine, tokenizer)
    body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
    request = ChatRequest.model_validate({**body, "outrider": {"quality": CASCADE}})
    context = RequestContext(arrival_s=0.0, request_id="r")
    return asyncio.run(build_jobs(parts).build(request, context)).job


@pytest.mark.parametrize("drafters", [(), ("eagle3",)])
def test_without_a_small_model_that_drafts_there_is_no_cascade(
    tokenizer: ChatTokenizer, drafters: tuple[str, ...]
) -> None:
    with pytest.raises(BadRequestError, match="small model that drafts") as caught:
        job_of(tokenizer, lambda info: replace(info, drafters=drafters))
    assert caught.value.param == "outrider.quality"


def test_the_small_model_has_to_follow(tokenizer: ChatTokenizer) -> None:
    """Its context bounds the answer where it is the shorter one."""

    def shorten(info: EngineInfo) -> EngineInfo:
        return replace(
            info, tiers=info.tiers | {"small": replace(info.tiers["small"], max_context=100)}
        )

    (choice,) = job_of(tokenizer, shorten).choices
    request = choice.request
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == 100
    (choice,) = job_of(tokenizer, lambda info: info).choices
    assert len(request.prompt_token_ids) + choice.request.sampling.max_tokens == 256
