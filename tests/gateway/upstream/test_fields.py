"""Issue 15, hole 9: servers are sent the fields that are known for their kind, and no others."""

from contextlib import suppress
from typing import Any, Final

import pytest
from pydantic import ValidationError

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.kinds import ServerKind
from outrider.gateway.settings.server_traits import TRAITS
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.upstream.fields import FieldFilter
from tests.gateway.conftest import OpenWorld
from tests.gateway.hybrid import LOCAL_TEXT

PLAIN: Final = {"model": "cloud", "messages": [{"role": "user", "content": "Hi"}]}
REFUSED: Final[dict[str, Any]] = {
    "service_tier": "flex",
    "store": True,
    "kv_transfer_params": {"do_remote_decode": True},
    "priority": -5,
    "cache_salt": "another tenant's",
    "extra_key": "another tenant's",
    "web_search_options": {},
    "extra_body": {"x": 1},
    "mm_processor_kwargs": {"max_pixels": 1},
    "bad_words": ["no"],
    "vllm_xargs": {"x": 1},
    "rid": "taken",
    "session_params": {"id": "other"},
    "lora_path": "/models/secret",
    "custom_logit_processor": "code",
    "return_hidden_states": True,
    "n_predict": 100_000,
    "use_beam_search": True,
    "truncate_prompt_tokens": 10,
    "speed": "fast",
    "mcp_servers": [{"url": "http://inside"}],
    "a_field_of_tomorrow": 1,
}
LEFT_OUT: Final[dict[str, Any]] = {
    "user": "alice@example.com",
    "metadata": {"customer": "7"},
    "safety_identifier": "alice",
    "prompt_cache_key": "shared",
    "prompt_cache_retention": "24h",
    "store": False,
    "lora_path": None,
}


def filter_of(server: ServerKind = "openai", **settings: Any) -> FieldFilter:
    return FieldFilter("cloud", UpstreamSettings(url=("http://a/v1",), server=server, **settings))


@pytest.mark.parametrize("server", TRAITS)
def test_a_billing_line_is_for_anthropic_alone(server: ServerKind) -> None:
    sent = filter_of(server).outgoing({"model": "m", "anthropic_billing": "x"})
    assert ("anthropic_billing" in sent) is (server == "anthropic")


@pytest.mark.parametrize("server", TRAITS)
def test_what_another_kind_of_server_is_sent_is_never_left_out(server: ServerKind) -> None:
    tolerant = filter_of(server, unknown_fields="ignore")
    for name in ("structured_outputs", "guided_json", "grammar", "min_p", "audio", "suffix"):
        with suppress(BadRequestError):
            assert name in tolerant.outgoing({name: {"a": 1}})
    for name in ("max_cost_usd", "privacy"):
        with pytest.raises(BadRequestError):
            tolerant.outgoing({name: 1})
    assert tolerant.outgoing({"a_field_of_tomorrow": 1}) == {}
    assert tolerant.ignored({"a_field_of_tomorrow": 1}) == ("a_field_of_tomorrow",)


@pytest.mark.parametrize("server", TRAITS)
def test_unknown_fields_are_refused_and_labels_left_out(server: ServerKind) -> None:
    fields = filter_of(server)
    for name, value in REFUSED.items():
        if (server, name) == ("outrider", "service_tier"):
            continue
        if name == "cache_salt" and server in ("vllm", "sglang", "outrider"):
            continue
        with pytest.raises(BadRequestError, match=f"{name}.*allow_fields") as refused:
            fields.outgoing({**PLAIN, name: value})
        assert refused.value.param == name
    assert fields.outgoing({**PLAIN, **LEFT_OUT}) == PLAIN
    if server != "outrider":
        assert fields.outgoing({**PLAIN, "service_tier": "default"}) == PLAIN


def test_the_operator_allows_and_forces_fields() -> None:
    fields = filter_of(
        allow_fields="user,service_tier", force_fields={"store": False, "service_tier": "flex"}
    )
    sent = fields.outgoing({**PLAIN, "user": "u", "service_tier": "priority", "store": True})
    assert sent == {**PLAIN, "user": "u", "service_tier": "flex", "store": False}
    for wrong in ({"allow_fields": "cache_salt"}, {"force_fields": {"n": 3}}):
        with pytest.raises(ValidationError, match="the gateway sets"):
            filter_of(**wrong)


@pytest.mark.parametrize(
    "variables",
    [
        {"chat_template": "{{ 1 }}"},
        {"tools": []},
        {"a": [1]},
        {"a": {"b": 1}},
        {"a": "x" * 65},
        {str(number): 1 for number in range(17)},
        "text",
    ],
)
def test_templates_are_sent_switches_only(variables: object) -> None:
    with pytest.raises(BadRequestError, match="chat_template_kwargs"):
        filter_of("vllm").outgoing({**PLAIN, "chat_template_kwargs": variables})
    kept = {**PLAIN, "chat_template_kwargs": {"enable_thinking": False, "effort": "low"}}
    assert filter_of("vllm").outgoing(kept) == kept


def test_a_salt_is_another_for_each_tenant_tier_and_salt_of_a_request() -> None:
    one, other = "a" * 32, "b" * 32
    salts = [
        FieldFilter(tier, UpstreamSettings(url=("http://a/v1",), server=server)).outgoing(
            {**PLAIN, "cache_salt": own}, cache_salt=salt
        )["cache_salt"]
        for tier, server, salt, own in [
            ("cloud", "vllm", one, None),
            ("cloud", "vllm", other, None),
            ("cloud", "vllm", one, "own"),
            ("cloud", "vllm", "", "own"),
            ("far", "sglang", one, ""),
            ("near", "outrider", one, ""),
        ]
    ]
    assert len({*salts, one, other}) == 8
    assert all(len(salt) == 64 for salt in salts)
    assert filter_of("openai").outgoing(PLAIN, cache_salt=one) == PLAIN


def test_requests_keep_their_tenants_apart_and_their_fields_at_home(opened: OpenWorld) -> None:
    with opened(tier={"server": "vllm", "unknown_fields": "refuse"}) as made:
        world = made.world
        other = {"authorization": f"Bearer {made.new_key('other')}"}
        refused = world.chat(model="cloud", priority=-5)
        local = world.chat(service_tier="priority")
        assert not world.cloud.requests
        for headers in (None, None, other):
            answer = world.chat(model="cloud", user="alice", n=1.0, headers=headers)
            assert answer.status_code == 200
        sent = [request.document for request in world.cloud.requests]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert local.json()["choices"][0]["message"]["content"] == LOCAL_TEXT
    assert sent[0]["cache_salt"] == sent[1]["cache_salt"] != sent[2]["cache_salt"]
    assert "tester" not in str(sent)
    assert "alice" not in str(sent)
    assert type(sent[0]["n"]) is int
