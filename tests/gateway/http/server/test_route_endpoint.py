"""POST /v1/route and the router's gauges, over HTTP."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.wiring.application import build_app
from outrider.router.costs import TokenPrices
from outrider.router.dial import Dial
from outrider.router.guard import RouteGuard
from outrider.router.policy import TrainedPolicy, WatchOptions, own_setting
from tests.gateway.answers import read_answer
from tests.gateway.conftest import parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.router.routers import scorer_that_says, seconds_worth, table

CHAT = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}


@dataclass(frozen=True)
class Routed:
    http: httpx.Client
    engine: ScriptedClient

    def ask(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/route", json=body)

    def report(self, **body: Any) -> RouteReport:
        response = self.ask(**body)
        assert response.status_code == 200, response.text
        return read_answer(RouteReport, response.json())


@pytest.fixture(scope="module")
def routed(tokenizer: ChatTokenizer) -> Iterator[Routed]:
    """A gateway whose router is always in doubt."""
    scorer = replace(scorer_that_says(0.5, table()), worth=seconds_worth(reference=1e9))
    setting = own_setting(scorer)
    watch = WatchOptions(hold_back_tokens=8, hold_back_s=0.1)
    assert scorer.calibration is not None
    guard = RouteGuard(current_setting=lambda: setting, deciles=scorer.calibration.quality_deciles)
    engine = ScriptedClient(vocab_size=420, script=lambda _: Script(steps=[Step(token_ids=(70,))]))
    parts = parts_over(
        engine,
        tokenizer,
        router=TrainedPolicy(
            scorer=scorer,
            current_setting=lambda: setting,
            dial=Dial(scorer.calibration),
            watch=watch,
        ),
        limits=GatewayLimits(default_max_tokens=32, max_body_bytes=400_000),
        routing=RoutingParts(
            prices={
                "small": TokenPrices(prompt=1.0, cached_prompt=1.0, completion=1.0),
                "large": TokenPrices(prompt=5.0, cached_prompt=5.0, completion=5.0),
            },
            watch=watch,
            guard=guard,
        ),
    )
    with running(build_app(parts)) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield Routed(http, engine)


def test_a_chat_is_explained_and_not_answered(routed: Routed) -> None:
    report = routed.report(**CHAT, stream=True)
    assert (report.object, report.model, report.tier) == ("route", "auto", "small")
    assert report.reason == "router: small model begins under watch (0.50 < 0.70)"
    assert report.quality == pytest.approx(0.5)
    assert (report.threshold, report.stage) == (0.5, "answer")
    assert report.band == pytest.approx((0.3, 0.7))
    assert report.cascade is not None
    assert report.cascade.hold_back_tokens == 8
    assert report.cascade.hold_back_ms == pytest.approx(100.0)
    assert not report.cascade.judges_whole
    assert report.cost_usd is not None
    (other,) = report.alternatives
    assert (other.tier, other.model_id) == ("large", "test/large-model")
    assert other.cost_usd == pytest.approx(5 * report.cost_usd)
    assert routed.engine.submitted == []


def test_expected_costs_of_small_cascade_and_large_are_told(routed: Routed) -> None:
    (costs,) = routed.report(**CHAT).costs or ()
    assert costs.unit == "second"
    assert 0.0 < costs.small < costs.large < costs.cascade
    assert routed.report(model="large", prompt="x").costs is None


def test_the_same_decision_as_the_request_itself(routed: Routed) -> None:
    report = routed.report(**CHAT, max_tokens=3)
    assert report.cascade is not None
    assert report.cascade.judges_whole
    assert report.cascade.hold_back_ms is None
    answered = routed.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3}).json()
    assert answered["outrider"]["reason"].startswith(report.reason)
    assert answered["usage"]["prompt_tokens"] == report.prompt_tokens
    routed.engine.submitted.clear()


def test_a_completion_is_explained_too(routed: Routed) -> None:
    report = routed.report(model="auto", prompt=["Hello there", "Hi"], max_tokens=5)
    assert report.tier == "small"
    ids = routed.report(model="auto", prompt=[70, 300], max_tokens=5)
    assert ids.prompt_tokens == 2
    named = routed.report(model="large", prompt="x")
    assert (named.reason, named.quality, named.alternatives) == ("requested", None, [])


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "gpt"} | {"messages": CHAT["messages"]}, 404, "model"),
        ({"model": "auto"}, 400, "messages"),
        ({"model": "auto", "messages": CHAT["messages"], "prompt": "x"}, 400, "prompt"),
        ({"model": "auto", "prompt": ""}, 400, "prompt"),
        ({"model": "auto", "prompt": [999]}, 400, "prompt"),
        ({**CHAT, "max_tokns": 5}, 400, "max_tokns"),
        ({**CHAT, "outrider": {"tier": "tiny"}}, 400, "outrider.tier"),
        ({**CHAT, "outrider": {"max_cost_usd": 1e-9}}, 400, "outrider.max_cost_usd"),
        ({**CHAT, "max_tokens": 10_000}, 400, None),
        (
            {
                "model": "auto",
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ],
            },
            400,
            "messages.0.content.0.type",
        ),
    ],
)
def test_route_refuses_requests_that_the_endpoints_refuse(
    routed: Routed, body: dict[str, Any], status: int, param: str | None
) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    if "messages" in body:
        path = "/v1/chat/completions"
    refused, real = routed.ask(**body), routed.http.post(path, json=body)
    assert (refused.status_code, real.status_code) == (status, status)
    assert refused.json() == real.json()
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"model": "auto", "prompt": "\\ud800"}',
    ],
)
def test_invalid_requests_are_refused(routed: Routed, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = routed.http.post("/v1/route", content=body, headers=headers)
    assert response.status_code == 400
    assert routed.http.post("/v1/route", content=b"{}").status_code == 415


def test_a_very_long_prompt_is_too_long_and_nothing_else(routed: Routed) -> None:
    text = "why " * 25_000
    error = routed.ask(model="auto", messages=[{"role": "user", "content": text}])
    assert error.status_code == 400
    assert error.json()["error"]["code"] == "context_length_exceeded"


def test_the_guards_numbers_are_gauges(routed: Routed) -> None:
    for _ in range(2):
        routed.http.post("/v1/chat/completions", json={**CHAT, "outrider": {"min_quality": 0.7}})
        routed.http.post("/v1/chat/completions", json={**CHAT, "model": "small"})
    routed.engine.submitted.clear()
    text = routed.http.get("/metrics").text
    assert "outrider_router_expected_share 0.5" in text
    assert "outrider_router_threshold 0.5" in text
    assert "outrider_router_drifting 0.0" in text
    assert "outrider_router_outcomes " in text


def test_the_document_describes_it(routed: Routed) -> None:
    document = routed.http.get("/openapi.json").json()
    operation = document["paths"]["/v1/route"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert [ref["$ref"].rpartition("/")[2] for ref in body] == ["ChatRequest", "CompletionRequest"]
    assert "RouteReport" in document["components"]["schemas"]
