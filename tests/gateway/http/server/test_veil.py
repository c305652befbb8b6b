"""What clients see of costs and suppliers: `reveals` of a key, or of the alias that it names."""

import json
from typing import Any

import anthropic
import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript, Toxic
from outrider.gateway.contract.schema.errors import ErrorEvent
from outrider.gateway.tenancy.keys.keys import Scopes
from tests.gateway.answers import read_answer
from tests.gateway.conftest import OpenWorld
from tests.gateway.hostile import hostile, piece, streamed
from tests.gateway.hybrid import CHAT, Streamed
from tests.gateway.tenancy.metering.tenants import Books

HIDDEN = ("tier", "reason", "route_tier", "cost_usd")
SCOPED = Scopes(models=frozenset({"assistant", "gpt"}))
ALIASES = {"assistant": {"models": ("cloud",)}, "gpt": {"models": ("cloud",), "reveals": "tiers"}}
TIER = {"price": {"prompt": 1.0, "completion": 2.0}}


@pytest.fixture
def opened(opened: OpenWorld) -> Any:
    """Opens a gateway whose alias `assistant` stands for an upstream tier with a price."""

    def made(**options: Any) -> Any:
        options = {"tier": {**TIER, **options.pop("tier", {})}, "aliases": ALIASES, **options}
        return opened(**options)

    return made


def ask(made: Books, key: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return made.world.chat(headers=headers, **{"model": "assistant", **fields})


def told(made: Books, key: str, **fields: Any) -> tuple[str, dict[str, Any], httpx.Headers]:
    """Model, report and headers of one answer; a stream and a whole one agree."""
    whole, stream = ask(made, key, **fields), Streamed(ask(made, key, stream=True, **fields))
    document = whole.json()
    (model,) = {chunk["model"] for chunk in stream.chunks}
    assert document["model"] == model
    report = stream.report
    assert [report[name] for name in HIDDEN] == [document["outrider"][name] for name in HIDDEN]
    assert stream.is_done
    assert stream.text == document["choices"][0]["message"]["content"]
    return model, report, whole.headers


def test_a_scoped_key_of_an_alias_sees_the_alias_alone(opened: Any) -> None:
    """It saw the operator's cost, the tier and the server's model."""
    with opened() as made:
        key = made.new_key("customer", scopes=SCOPED)
        model, report, headers = told(made, key)
        assert model == "assistant"
        assert [report[name] for name in HIDDEN] == [None] * 4
        assert not {"x-outrider-tier", "x-outrider-reason"} & set(headers)
        headers = {"authorization": f"Bearer {key}"}
        (card, gpt) = made.world.http.get("/v1/models", headers=headers).json()["data"]
        assert (card["id"], card["outrider"], card["tier"]) == ("assistant", [], None)
        assert card["owned_by"] == "outrider"
        assert card["pricing"] is not None
        assert gpt["tier"] == "cloud", "its alias reveals tiers"
        route = made.world.http.post(
            "/v1/route", json={**CHAT, "model": "assistant"}, headers=headers
        ).json()
        names = ("tier", "model_id", "reason", "cost_usd", "alternatives")
        assert [route[name] for name in names] == [None, None, None, None, []]
        assert route["model"] == "assistant"
        made.world.cloud.script = MockScript(toxic=Toxic(kind="status", status=422))
        refused = ask(made, key)
        assert refused.status_code == 422
        assert "x-outrider-tier" not in refused.headers


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("scopes", "model", "sees"),
    [
        (Scopes(), "assistant", "tiers"),
        (Scopes(is_admin=True), "assistant", "costs"),
        (Scopes(reveals="costs"), "assistant", "costs"),
        (Scopes(reveals="nothing"), "gpt", "nothing"),
        (SCOPED, "gpt", "tiers"),
    ],
)
def test_costs_are_for_admins_and_the_key_or_the_alias_decides(
    opened: Any, scopes: Scopes, model: str, sees: str
) -> None:
    with opened() as made:
        name, report, headers = told(made, made.new_key("x", scopes=scopes), model=model)
        has_tiers = sees != "nothing"
        assert name == ("mock-model" if has_tiers else model)
        assert (report["tier"] == "cloud") is ("x-outrider-tier" in headers) is has_tiers
        assert (report["cost_usd"] is not None) is (sees == "costs")


@pytest.mark.slow
def test_a_suppliers_own_fields_and_costs_are_hidden(opened: Any) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cost": 0.25}
    more = {"model": "vendor/model-1", "provider": "Vendor", "system_fingerprint": "fp"}
    answer = streamed(
        b": VENDOR PROCESSING\n\n",
        piece("Far ", **more),
        piece("away.", finish="stop", **more),
        piece(None, usage=usage, **more),
    )
    with hostile(answer) as far, opened(tier={"url": far.url}) as made:
        for scopes, words in ((SCOPED, (b"endor", b"0.25", b"fp")), (Scopes(), (b"0.25",))):
            raw = ask(made, made.new_key("x", scopes=scopes), stream=True).content
            assert b"Far " in raw
            assert raw.endswith(b"data: [DONE]\n\n")
            for word in words:
                assert word not in raw


def test_an_error_in_mid_stream_and_the_messages_api_hide_as_much(opened: Any) -> None:
    broken = MockScript(num_pieces=20, toxic=Toxic(kind="reset", after_events=5))
    with opened(clouds=(broken,)) as made:
        key = made.new_key("customer", scopes=SCOPED)
        stream = Streamed(ask(made, key, stream=True))
        assert stream.error is not None
        assert read_answer(ErrorEvent, stream.chunks[-1]).outrider.tier is None
        made.world.cloud.script = MockScript()
        client = anthropic.Anthropic(base_url=made.world.url, auth_token=key, max_retries=0)
        with client:
            message = client.messages.create(
                model="assistant", max_tokens=20, messages=[{"role": "user", "content": "Hi"}]
            )
        assert message.model == "assistant"
        assert "cloud" not in json.dumps(message.to_dict())


def test_embeddings_hide_the_servers_model(opened: Any) -> None:
    body = (
        b'{"object": "list", "data": [], "model": "vendor-embedder", "usage": {"total_tokens": 3}}'
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    tier = {"endpoints": ["embeddings"]}
    with hostile(head % len(body) + body) as far, opened(tier={"url": far.url, **tier}) as made:
        headers = {"authorization": f"Bearer {made.new_key('x', scopes=SCOPED)}"}
        asked = {"model": "assistant", "input": "Hello"}
        answer = made.world.http.post("/v1/embeddings", json=asked, headers=headers)
        assert answer.json()["model"] == "assistant"
        assert "x-outrider-tier" not in answer.headers


@pytest.mark.slow_cases
@pytest.mark.parametrize("by_key", [True, False])
def test_errors_name_no_tier(opened: Any, by_key: bool) -> None:
    """ "The cloud tier answered with status 500.": before and within a stream, of each API."""
    aliases = {"assistant": {"models": ("cloud",), "reveals": "nothing"}}
    messages = [{"role": "user", "content": "Hi"}]
    with opened(aliases=aliases, tier={"max_retries": 0}) as made:
        scopes = Scopes(reveals="nothing" if by_key else None)
        headers = {"authorization": f"Bearer {made.new_key('x', scopes=scopes)}"}
        toxics = (
            Toxic(kind="reset", after_events=5),
            Toxic(kind="status", status=500),
            Toxic(kind="status", status=429),
        )
        for toxic in toxics:
            made.world.cloud.script = MockScript(num_pieces=20, toxic=toxic)
            for path in ("chat/completions", "responses", "messages"):
                asked = {"model": "assistant", "max_tokens": 50, "stream": True}
                asked |= {"input": "Hi"} if path == "responses" else {"messages": messages}
                if path == "responses":
                    del asked["max_tokens"]
                told = made.world.http.post(f"/v1/{path}", json=asked, headers=headers)
                assert "error" in told.text
                assert "cloud" not in told.text, told.text


def test_refusals_of_tiers_name_none(opened: Any) -> None:
    tiers = frozenset({"small"})
    with opened() as made:
        key = made.new_key("x", scopes=Scopes(models=frozenset({"assistant"}), tiers=tiers))
        answer = ask(made, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tier_not_allowed")
        assert "cloud" not in answer.text
        headers = {"authorization": f"Bearer {key}"}
        asked = {"model": "assistant", "input": "Hi"}
        answer = made.world.http.post("/v1/embeddings", json=asked, headers=headers)
        assert answer.status_code == 400
        assert "cloud" not in answer.text


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("scopes", "asked", "told"),
    [
        (Scopes(models=frozenset({"assistant", "gone"})), {"model": "gone"}, "assistant."),
        (Scopes(tiers=frozenset({"small"})), {"model": "gone"}, "small"),
        (Scopes(tiers=frozenset({"small"})), {"outrider": {"tier": "gone"}}, "small."),
        (Scopes(reveals="nothing"), {"outrider": {"tier": "gone"}}, "unknown tier 'gone'."),
        (Scopes(reveals="nothing"), {"outrider": {"tier": "'; available: a;\"b"}}, "available: a"),
        (Scopes(reveals="nothing"), {"model": "small", "outrider": {"tier": "large"}}, "upstream"),
    ],
)
def test_errors_list_only_names_that_the_key_may_know(
    opened: Any, scopes: Scopes, asked: dict[str, Any], told: str
) -> None:
    with opened() as made:
        key = made.new_key("x", scopes=scopes)
        answer = ask(made, key, **{"model": "auto", **asked})
        assert answer.status_code in (400, 404)
        message = answer.json()["error"]["message"]
        assert told in message
        assert "cloud" not in message
        if "model" in asked and scopes.reveals is None:
            headers = {"authorization": f"Bearer {key}"}
            listed = made.world.http.get("/v1/models", headers=headers).json()["data"]
            names = message.partition("available: ")[2].rstrip(".").split(", ")
            assert names == [card["id"] for card in listed]
            lost = made.world.http.get("/v1/models/gone", headers=headers)
            assert "cloud" not in lost.text
            tokens = made.world.http.post(
                "/v1/tokenize", json={"model": "gone", "prompt": "x"}, headers=headers
            )
            assert (tokens.status_code, "cloud" in tokens.text) == (404, False)
