"""Checks of requests, before anything is made of them."""

from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.alerts.delivery import signed
from outrider.gateway.tenancy.keys.records import TeamOrder
from tests.gateway.checks.services import KEY, PASS, SECRET, running_service, texts
from tests.gateway.conftest import OpenWorld

HERE = "tests.gateway.checks.services"
ASKED = [{"role": "user", "content": "Tell me the secret."}]


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"guard": {"function": f"{HERE}:{name}", **more}}


def test_a_function_blocks_a_request(open_world: OpenWorld) -> None:
    with open_world(checks=function("blocking_secrets")) as world:
        assert world.chat(model="cloud").status_code == 200
        refused = world.chat(model="cloud", messages=ASKED)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "content_filter"
        assert error["message"] == "The check 'guard' blocks this. It names a secret."
        assert len(world.cloud.requests) == 1
        assert world.count('outrider_checks_total{check="guard",outcome="block",where="before"}')


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["without_word", "without_word_soon"])
def test_a_function_rewrites_what_the_models_get(open_world: OpenWorld, name: str) -> None:
    with open_world(checks=function(name)) as world:
        parts = [{"type": "text", "text": "I am fine."}]
        messages = [{"role": "system", "content": "Be fine."}, {"role": "user", "content": parts}]
        assert world.chat(model="cloud", messages=messages).status_code == 200
        (request,) = world.cloud.requests
        first, second = request.document["messages"]
        assert first["content"] == "Be ****."
        assert second["content"][0]["text"] == "I am ****."


def test_a_service_is_told_the_texts_and_who_asks(open_world: OpenWorld) -> None:
    with running_service(lambda _: PASS) as service:
        with open_world(checks={"guard": {"url": service.url}}) as world:
            assert world.chat(model="cloud").status_code == 200
        (question,) = service.questions
        assert question["check"] == "guard"
        assert question["where"] == "before"
        assert question["model"] == "cloud"
        assert question["key"] == "anonymous"
        assert question["endpoint"] == "chat"
        path = "messages.0.content"
        assert {"path": path, "text": "How are you today?", "before": ""} in question["texts"]


def test_what_a_service_is_sent_is_signed(open_world: OpenWorld) -> None:
    with running_service(lambda _: PASS) as service:
        with open_world(checks={"guard": {"url": service.url, "secret": SECRET}}) as world:
            assert world.chat(model="cloud").status_code == 200
        (headers,), (body,) = service.headers, service.bodies
        name, moment = headers["webhook-id"], int(headers["webhook-timestamp"])
        assert headers.items() >= signed(KEY, name, moment, body).items()


@pytest.mark.slow_cases
@pytest.mark.parametrize("said", [b"x", b"{", b'{"verdict":"perhaps"}', None], ids=repr)
def test_a_service_without_a_verdict_fails_its_request_only(
    open_world: OpenWorld, said: bytes | None
) -> None:
    def say(question: dict[str, Any]) -> Any:
        if "secret" not in str(texts(question)):
            return PASS
        padding = b"x" * 100_000_000
        return b'{"verdict":"pass","padding":"%b"}' % padding if said == b"x" else said

    with running_service(say) as service:
        check = {"url": service.url, "timeout_s": 1.0 if said else 0.2}
        with open_world(checks={"guard": check}) as world:
            failed = world.chat(model="cloud", messages=ASKED)
            assert failed.status_code == 503
            assert "'guard' could not be made" in failed.json()["error"]["message"]
            assert not world.cloud.requests
            assert world.chat(model="cloud").status_code == 200
            sample = 'outrider_checks_total{check="guard",outcome="failed",where="before"}'
            assert world.count(sample) == 1


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "name", ["raising", "lying", "stuttering", "mumbling", "sleeping", "hanging"]
)
def test_a_function_without_a_verdict(open_world: OpenWorld, name: str) -> None:
    closed = function(name, timeout_s=0.2)
    with open_world(checks=closed) as world:
        assert world.chat(model="cloud").status_code == 503
    with open_world(checks=function(name, timeout_s=0.2, on_failure="open")) as world:
        assert world.chat(model="cloud").status_code == 200


def test_a_check_is_for_some_models_and_keys(open_world: OpenWorld) -> None:
    with open_world(checks=function("blocking_secrets", models=["large"])) as world:
        assert world.chat(model="cloud", messages=ASKED).status_code == 200
        assert world.chat(model="large", messages=ASKED).status_code == 400
        both = world.chat(model="cloud", models=["large"], messages=ASKED)
        assert both.status_code == 400
        for name in ("large", "large:latest"):  # as Ollama's clients write it
            asked = {"model": name, "messages": ASKED}
            assert world.http.post("/api/chat", json=asked).status_code == 400
    with open_world(checks=function("blocking_secrets", keys=["somebody"])) as world:
        assert world.chat(model="cloud", messages=ASKED).status_code == 200


@pytest.mark.slow_cases
@pytest.mark.parametrize("checked", ["large", "cloud", "mock-model", "cloud/mock-model"])
def test_a_check_of_a_model_is_made_under_each_of_its_names(
    open_world: OpenWorld, checked: str
) -> None:
    aliases = {
        "help": {"models": ["inner"]},
        "inner": {"models": ["small", "large" if checked == "large" else "cloud"]},
        "plain": {"models": ["small"]},
        "open": {"models": ["small"], "defaults": {"outrider": {"policy": "prefer_local"}}},
    }
    guard = function("blocking_secrets", models=[checked])
    with open_world(checks=guard, aliases=aliases) as world:
        for model in ("help", "help:latest", "auto", "open", "unknown"):
            answer = world.chat(model=model, messages=ASKED)
            assert answer.status_code == 400, model
            assert "blocks this" in answer.text, model
        options = {"policy": "prefer_local"}
        assert world.chat(model="small", messages=ASKED, outrider=options).status_code == 400
        for model in ("small", "plain"):
            assert world.chat(model=model, messages=ASKED).status_code == 200, model


def test_a_request_that_is_passed_on_is_checked_for_the_tiers_that_have_its_endpoint(
    open_world: OpenWorld,
) -> None:
    tier = {"endpoints": ["embeddings"]}
    others = {"second": (MockScript(), tier)}
    guard = function("blocking_secrets", models=["second"])
    with open_world(tier=tier, others=others, checks=guard) as world:
        for model, is_blocked in {"second": True, "auto": True, "cloud": False}.items():
            asked = {"model": model, "input": "the secret"}
            answer = world.http.post("/v1/embeddings", json=asked)
            assert ("blocks this" in answer.text) is is_blocked, model


@pytest.mark.slow
def test_a_check_covers_what_an_arms_model_answers(opened: OpenWorld) -> None:
    keys = {"refresh_s": 0.02, "admin_token": "the-administrators-token"}
    guard = function("blocking_secrets", models=["other"])
    others = {"second": (MockScript(), {})}
    arms = {"here": {}, "there": {"set": {"model": "second/other"}}}
    wanted = {"name": "places", "unit": "request", "arms": arms, "control": "here", "start": True}
    with opened(keys=keys, checks=guard, others=others) as books:
        assert books.world.chat(messages=ASKED).status_code == 200
        boss = {"authorization": f"Bearer {keys['admin_token']}"}
        made = books.world.http.post("/admin/experiments", json=wanted, headers=boss)
        assert made.status_code < 300, made.text
        assert all(books.world.chat(messages=ASKED).status_code == 400 for _ in range(8))


def test_a_check_is_for_the_keys_of_a_team_by_its_name(opened: OpenWorld) -> None:
    with opened(checks=function("blocking_secrets", keys=["research"])) as books:
        assert books.world.chat(model="cloud", messages=ASKED).status_code == 200
        store = books.world.context.tenancy.keys.store
        team = store.create_team(TeamOrder(name="research"))
        key = books.new_key("other", team_id=team.team_id)
        headers = {"authorization": f"Bearer {key}"}
        refused = books.world.chat(model="cloud", messages=ASKED, headers=headers)
        assert refused.status_code == 400


def test_every_api_is_checked(open_world: OpenWorld) -> None:
    with open_world(checks=function("blocking_secrets")) as world:
        for path, body in {
            "/v1/completions": {"prompt": "the secret"},
            "/v1/responses": {"input": "the secret"},
            "/v1/messages": {"messages": ASKED, "max_tokens": 5},
            "/api/chat": {"messages": ASKED},
            "/infill": {"input_prefix": "the secret", "input_suffix": ""},
            "/v1/embeddings": {"input": "the secret"},
        }.items():
            answer = world.http.post(path, json={"model": "cloud", **body})
            assert answer.status_code == 400, path
            assert "blocks this" in answer.text, path


def test_token_ids_cannot_be_checked(open_world: OpenWorld) -> None:
    with open_world(checks=function("blocking_secrets")) as world:
        answer = world.http.post("/v1/completions", json={"model": "large", "prompt": [1, 2, 3]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"


def test_a_doubled_field_goes_on_as_it_was_checked(open_world: OpenWorld) -> None:
    body = b'{"model":"cloud","messages":[{"role":"user","content":"secret"}],'
    body += b'"messages":[{"role":"user","content":"harmless"}]}'
    with open_world(checks=function("blocking_secrets")) as world:
        headers = {"content-type": "application/json"}
        answer = world.http.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 200
        assert "secret" not in str(world.cloud.requests[0].document)


def test_checks_follow_one_another(open_world: OpenWorld) -> None:
    checks = {**function("without_word"), "second": {"function": f"{HERE}:blocking"}}
    with open_world(checks=checks) as world:
        messages = [{"role": "user", "content": "I am fine."}]
        assert world.chat(model="cloud", messages=messages).status_code == 200


def test_images_are_no_texts(open_world: OpenWorld) -> None:
    image = f"data:image/png;base64,{'A' * 400}"
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "Look"}]
    with running_service(lambda _: PASS) as service:
        with open_world(checks={"guard": {"url": service.url}}) as world:
            world.chat(model="cloud", messages=[{"role": "user", "content": parts}])
        assert "Look" in texts(service.questions[0])
        assert not any("AAAA" in text for text in texts(service.questions[0]))


def test_an_unchecked_answer_is_not_kept(open_world: OpenWorld) -> None:
    checks = function("raising", on_failure="open")
    kept = {"cache": {"store": "memory"}, "responses": {"store": True}}
    with open_world(checks=checks, **kept) as world:
        for _ in range(2):
            answer = world.chat(
                model="cloud",
                temperature=0,
                outrider={"cache": "on"},
                headers={"idempotency-key": "one"},
            )
            assert answer.headers["x-outrider-cache"] == "miss"
        stored = world.http.post("/v1/responses", json={"model": "cloud", "input": "Hello"})
        assert stored.status_code == 200
        again = world.http.get(f"/v1/responses/{stored.json()['id']}")
        assert again.status_code == 404
        assert len(world.cloud.requests) == 3


def test_a_stored_conversation_has_the_rewritten_request(open_world: OpenWorld) -> None:
    with open_world(checks=function("without_word"), responses={"store": True}) as world:
        asked = {"model": "cloud", "input": "I am fine."}
        answer = world.http.post("/v1/responses", json=asked).json()
        items = world.http.get(f"/v1/responses/{answer['id']}/input_items")
        assert "I am ****." in items.text
        assert "fine" not in items.text
