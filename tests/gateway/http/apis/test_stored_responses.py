"""Stored responses and the conversations that go on with them, through OpenAI's own client."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.shared.mock_script import MockScript
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.gateway.conftest import OpenWorld, real_gateway, wait_for
from tests.gateway.http.apis.response_events import read_events, read_response
from tests.gateway.hybrid import World

UNKNOWN = "resp_" + "0" * 48
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}


@dataclass(frozen=True)
class Storing:
    """A gateway that stores responses, and OpenAI's client of it."""

    world: World
    client: openai.OpenAI

    def create(self, text: Any, **fields: Any) -> Any:
        """One response of the large model."""
        return self.client.responses.create(**{"model": "large", "input": text, **fields})

    def prompt(self, tokenizer: ChatTokenizer) -> str:
        """What the local model has read last."""
        return tokenizer.decode(self.world.engine.submitted[-1].prompt_token_ids)

    def refusal(self, text: str = "More", **fields: Any) -> openai.APIStatusError:
        """The error that a request gets."""
        with pytest.raises(openai.APIStatusError) as caught:
            self.create(text, **fields)
        return caught.value


@contextmanager
def storing(open_world: OpenWorld, **options: Any) -> Iterator[Storing]:
    settings = {"store": True, **options.pop("responses", {})}
    with (
        open_world(responses=settings, **options) as world,
        openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Storing(world, client)


@pytest.fixture
def stored(open_world: OpenWorld) -> Iterator[Storing]:
    with storing(open_world) as made:
        yield made


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


# ---- going on ------------------------------------------------------------------------------------


def test_a_conversation_goes_on_without_its_instructions(
    stored: Storing, tokenizer: ChatTokenizer
) -> None:
    stored.world.says("Hello there!", "I am fine.", "Thank you.")
    first = stored.create("Hello", instructions="Be short.")
    assert first.store is True
    assert first.previous_response_id is None
    second = stored.create("How are you?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.id != first.id
    stored.create([{"role": "user", "content": "Fine"}], previous_response_id=second.id)
    assert stored.prompt(tokenizer) == (
        "user\nHello\nassistant\nHello there!\n"
        "user\nHow are you?\nassistant\nI am fine.\nuser\nFine\nassistant\n"
    )


def test_two_conversations_go_on_with_one_response(
    stored: Storing, tokenizer: ChatTokenizer
) -> None:
    first = stored.create("Hello")
    for text in ("Left", "Right"):
        stored.create(text, previous_response_id=first.id)
        prompt = stored.prompt(tokenizer)
        assert prompt.count("user\n") == 2
        assert prompt.endswith(f"user\n{text}\nassistant\n")


def test_a_streamed_response_is_found_as_soon_as_it_ends(stored: Storing) -> None:
    for event in stored.create("Hello", stream=True):
        if event.type == "response.completed":
            found = stored.client.responses.retrieve(event.response.id)
            assert found.output_text == event.response.output_text != ""
            assert found.store is True
            return
    raise AssertionError("it was not completed")


def test_items_of_stored_responses_stand_for_themselves(
    stored: Storing, tokenizer: ChatTokenizer
) -> None:
    stored.world.says("Hello there!", "I am fine.")
    first, second = stored.create("Hello"), stored.create("Ho")
    names = [{"type": "item_reference", "id": each.output[0].id} for each in (first, second)]
    asked = {"role": "user", "content": "Hello"}
    third = stored.create([asked, names[0], asked, names[1], asked])
    told = stored.prompt(tokenizer)
    assert told == (
        "user\nHello\nassistant\nHello there!\nuser\nHello\nassistant\nI am fine.\n"
        "user\nHello\nassistant\n"
    )
    stored.create("More", previous_response_id=third.id)
    assert stored.prompt(tokenizer).startswith(told), "they are stored as items"
    again = [asked, names[0], asked]
    counted = stored.client.responses.input_tokens.count(model="large", input=again)
    assert counted.input_tokens > 0


@pytest.mark.parametrize("tail", ["0" * 48 + "_0", "", "x", "_", "0" * 400])
def test_an_item_that_is_not_there_is_named(stored: Storing, tail: str) -> None:
    first = stored.create("Hello", safety_identifier="ann")
    mine = first.output[0].id
    for item_id, user in ((f"msg_{tail}", None), (mine, "bob"), (mine[:-1] + "9", "ann")):
        error = stored.refusal(
            [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item_id}],
            safety_identifier=user,
        )
        assert (error.status_code, error_of(error.response)["param"]) == (400, "input.1")


def test_results_of_tools_go_on_with_the_call(stored: Storing, tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    stored.world.engine.max_context = 2048
    stored.world.says(f"I add. {call}", "Done.")
    first = stored.create("Add", tools=[ADD])
    _, called = first.output
    output = {"type": "function_call_output", "call_id": called.call_id, "output": "2"}
    second = stored.create([output], previous_response_id=first.id, tools=[ADD])
    assert second.output_text == "Done."
    assert "<tool_response>\n2\n</tool_response>" in stored.prompt(tokenizer)
    wrong = {**output, "call_id": "call_of_another"}
    refused = stored.refusal([wrong], previous_response_id=first.id, tools=[ADD])
    assert refused.param == "input.0.call_id"  # as the client counts its items


def test_a_cut_response_is_stored_and_one_that_fails_is_not(
    stored: Storing, tokenizer: ChatTokenizer
) -> None:
    stored.world.says("Hello there", finish_reason="length")
    cut = stored.create("Hello")
    assert cut.status == "incomplete"
    assert stored.client.responses.retrieve(cut.id).status == "incomplete"
    stored.world.says("Hello there", failure=("engine_died", "It stopped."))
    failed = list(stored.create("Hello", stream=True))[-1]
    assert failed.type == "response.failed"
    with pytest.raises(openai.NotFoundError):
        stored.client.responses.retrieve(failed.response.id)


def test_a_cut_call_cannot_go_on(stored: Storing) -> None:
    stored.world.engine.max_context = 2048
    stored.world.says('<tool_call>\n{"name": "add", "arguments": {"x"', finish_reason="length")
    cut = stored.create("Add", tools=[ADD])
    assert cut.output[-1].type == "function_call"
    refused = stored.refusal(previous_response_id=cut.id)
    assert (refused.status_code, refused.param) == (400, "previous_response_id")


def test_who_leaves_before_the_end_has_nothing_stored(stored: Storing) -> None:
    stored.world.says("Hello there", hangs=True)
    stream = stored.create("Hello", stream=True)
    response_id = next(iter(stream)).response.id
    stream.close()
    wait_for(lambda: not stored.world.engine.running)
    with pytest.raises(openai.NotFoundError):
        stored.client.responses.retrieve(response_id)


def test_input_tokens_count_the_stored_conversation(stored: Storing) -> None:
    first = stored.create("Hello")
    counted = stored.client.responses.input_tokens.count(
        model="large", input="More", previous_response_id=first.id
    )
    second = stored.create("More", previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens


@pytest.mark.slow
def test_the_prefix_cache_holds_the_conversation() -> None:
    with (
        real_gateway(**{"responses.store": True}) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        ask = {"model": "large", "max_output_tokens": 24, "temperature": 0}
        first = client.responses.create(input="Once upon a time, " * 12, **ask)
        second = client.responses.create(input="Go on.", previous_response_id=first.id, **ask)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 2


# ---- asking for them -----------------------------------------------------------------------------


def test_a_response_is_retrieved_as_it_was(stored: Storing) -> None:
    body = {"model": "large", "input": "Hello", "metadata": {"a": "b"}, "top_logprobs": 1}
    made = stored.world.http.post("/v1/responses", json=body)
    read = read_response(made.content)
    found = stored.world.http.get(f"/v1/responses/{read['id']}")
    assert found.content == made.content
    assert stored.client.responses.retrieve(read["id"]).metadata == {"a": "b"}
    streamed = stored.world.http.get(f"/v1/responses/{read['id']}?stream=true")
    assert streamed.status_code == 400
    assert error_of(streamed)["param"] == "stream"


def test_a_deleted_response_is_unknown(stored: Storing) -> None:
    first = stored.create("Hello")
    second = stored.create("More", previous_response_id=first.id)
    deleted = stored.world.http.delete(f"/v1/responses/{first.id}")
    assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        stored.client.responses.delete(first.id)
    assert stored.refusal(previous_response_id=first.id).code == "previous_response_not_found"
    stored.create("More", previous_response_id=second.id)  # which holds what it goes on with


def test_input_items_come_in_pages(stored: Storing) -> None:
    stored.world.says("Hello there!", "I am fine.")
    first = stored.create("Hello")
    given = {"role": "user", "content": "How are you?", "id": "msg_mine"}
    second = stored.create([given], previous_response_id=first.id)
    listed = stored.client.responses.input_items
    items = list(listed.list(second.id, limit=1))
    assert [item.content[0].text for item in items] == ["How are you?", "Hello there!", "Hello"]
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[0].id == "msg_mine"
    assert items[1].id == first.output[0].id
    assert len({item.id for item in items}) == 3
    earliest = listed.list(second.id, order="asc", limit=2)
    assert [item.content[0].text for item in earliest.data] == ["Hello", "Hello there!"]
    assert earliest.has_more
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        page = stored.world.http.get(f"/v1/responses/{second.id}/input_items?{query}")
        assert (page.status_code, error_of(page)["param"]) == (400, param)


# ---- what is not stored --------------------------------------------------------------------------


def test_what_shall_not_be_stored_is_not(stored: Storing) -> None:
    private = {"extra_body": {"outrider": {"privacy": "private"}}}
    for fields in ({"store": False}, private, {**private, "store": True}):
        response = stored.create("Hello", **fields)
        assert response.store is False
        with pytest.raises(openai.NotFoundError):
            stored.client.responses.retrieve(response.id)
        events = list(stored.create("Hello", stream=True, **fields))
        assert {event.response.store for event in (events[0], events[-1])} == {False}
    body = {"input": "x", "store": True, "outrider": {"privacy": "private"}}
    answer = stored.world.http.post("/v1/responses", json=body)
    assert answer.headers["x-outrider-ignored-fields"] == "store"
    assert (
        "x-outrider-ignored-fields"
        not in stored.world.http.post("/v1/responses", json={"input": "x", "store": True}).headers
    )


def test_an_alias_may_make_a_request_private(open_world: OpenWorld) -> None:
    quiet = {"models": ["large"], "defaults": {"outrider": {"privacy": "private"}}}
    with storing(open_world, aliases={"quiet": quiet}) as stored:
        response = stored.create("Hello", model="quiet")
        assert response.store is False
        with pytest.raises(openai.NotFoundError):
            stored.client.responses.retrieve(response.id)


def test_without_the_setting_nothing_is_stored(open_world: OpenWorld) -> None:
    with storing(open_world, responses={"store": False}) as stored:
        made = stored.world.http.post("/v1/responses", json={"input": "Hello", "store": True})
        assert made.json()["store"] is False
        assert made.headers["x-outrider-ignored-fields"] == "store"
        refused = stored.refusal(previous_response_id=made.json()["id"])
        assert refused.param == "previous_response_id"
        assert "responses.store = true" in refused.message
        found = stored.world.http.get(f"/v1/responses/{made.json()['id']}")
        assert found.status_code == 404
        assert "responses.store = true" in error_of(found)["message"]
        paths = stored.world.http.get("/openapi.json").json()["paths"]
        assert "/v1/responses/{response_id}" not in paths


# ---- whose they are ------------------------------------------------------------------------------


@pytest.mark.parametrize("response_id", [UNKNOWN, "resp_1", "x", "é" * 53, "resp_" + "a" * 400])
def test_ids_that_are_not_ours_are_unknown(stored: Storing, response_id: str) -> None:
    refused = stored.refusal(previous_response_id=response_id)
    assert refused.status_code == 400
    if len(response_id) < 100:
        assert refused.code == "previous_response_not_found"
        assert response_id in refused.message
    assert refused.param == "previous_response_id"
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        answer = stored.world.http.request(method, f"/v1/responses/{response_id}{path}")
        assert answer.status_code == 404


Key = Callable[..., dict[str, str]]


@pytest.fixture
def keyed(open_world: OpenWorld, tmp_path: Path) -> Iterator[tuple[Storing, Key]]:
    """A gateway with keys, and a function that makes one."""
    options = {"database_url": f"sqlite:///{tmp_path}/keys.db", "keys": {"refresh_s": 0.02}}
    with storing(open_world, **options) as stored:
        http, store = stored.world.http, stored.world.context.tenancy.keys.store
        assert store is not None

        def key(name: str) -> dict[str, str]:
            mine = {"authorization": f"Bearer {store.create(KeyOrder(name=name)).text}"}
            wait_for(lambda: http.get("/v1/models").status_code == 401)
            wait_for(lambda: http.get("/v1/models", headers=mine).status_code == 200)
            return mine

        yield stored, key


@pytest.mark.slow
def test_another_s_response_is_as_an_unknown_one(keyed: tuple[Storing, Key]) -> None:
    stored, key = keyed
    http, one, two = stored.world.http, key("a"), key("b")
    made = http.post("/v1/responses", json={"input": "Hello"}, headers=one).json()["id"]

    def said(response_id: str, headers: dict[str, str]) -> list[tuple[int, str]]:
        """What the doors say of an id, without the id."""
        more = {"input": "More", "previous_response_id": response_id}
        path = f"/v1/responses/{response_id}"
        answers = (
            http.post("/v1/responses", json=more, headers=headers),
            http.get(path, headers=headers),
            http.get(f"{path}/input_items", headers=headers),
            http.delete(path, headers=headers),
        )
        return [(each.status_code, each.text.replace(response_id, "ID")) for each in answers]

    assert said(made, two) == said(UNKNOWN, two)
    assert [status for status, _ in said(made, two)] == [400, 404, 404, 404]
    assert [status for status, _ in said(made, one)] == [200, 200, 200, 200]


def test_an_end_user_goes_on_only_with_an_own_response(stored: Storing) -> None:
    first = stored.create("Hello", safety_identifier="ann")
    for fields in ({}, {"safety_identifier": "bob"}, {"user": "bob"}):
        refused = stored.refusal(previous_response_id=first.id, **fields)
        assert refused.code == "previous_response_not_found"
        assert refused.message == stored.refusal(
            previous_response_id=UNKNOWN, **fields
        ).message.replace(UNKNOWN, first.id)
    stored.create("More", previous_response_id=first.id, user="ann")
    theirs = stored.create("Hello")
    assert stored.refusal(previous_response_id=theirs.id, user="ann").status_code == 400
    retrieve = stored.client.responses.retrieve
    assert retrieve(first.id).id == first.id  # the key's owner has all users' responses
    assert retrieve(first.id, extra_query={"user": "ann"}).id == first.id
    for method in ("GET", "DELETE"):
        path = f"/v1/responses/{first.id}?safety_identifier=bob"
        assert stored.world.http.request(method, path).status_code == 404


# ---- upstream tiers ------------------------------------------------------------------------------


def test_an_upstream_tier_gets_the_whole_conversation_and_no_id(open_world: OpenWorld) -> None:
    with storing(open_world, clouds=(MockScript(pieces=("Hi ", "there")),)) as stored:
        first = stored.create("Hello")  # answered here
        second = stored.create("More", model="cloud", previous_response_id=first.id)
        stream = stored.create("On", model="cloud", previous_response_id=second.id, stream=True)
        assert stored.client.responses.retrieve(list(stream)[-1].response.id)
        asked = [request.document for request in stored.world.cloud.requests]
    roles = ["user", "assistant", "user"]
    assert [[each["role"] for each in one["messages"]] for one in asked] == [
        roles,
        [*roles, "assistant", "user"],
    ]
    assert asked[1]["messages"][3]["content"] == "Hi there"
    assert "resp_" not in json.dumps(asked)
    assert not any({"store", "previous_response_id"} & set(one) for one in asked)


def test_a_private_request_keeps_a_stored_conversation_here(open_world: OpenWorld) -> None:
    with storing(open_world) as stored:
        first = stored.create("Hello", model="cloud")
        num_asked = len(stored.world.cloud.requests)
        private = {"outrider": {"privacy": "private"}}
        stored.create("More", model="auto", previous_response_id=first.id, extra_body=private)
        assert len(stored.world.cloud.requests) == num_asked
        refused = stored.refusal(model="cloud", previous_response_id=first.id, extra_body=private)
        assert refused.status_code == 400


# ---- bounds --------------------------------------------------------------------------------------


def limited(open_world: OpenWorld, **responses: Any) -> AbstractContextManager[Storing]:
    return storing(open_world, responses=responses, clouds=(MockScript(pieces=("Hi",)),))


def test_a_conversation_has_the_bounds_of_a_request(open_world: OpenWorld) -> None:
    with limited(open_world) as stored:
        largest = stored.world.context.limits.max_body_bytes
        text = "x" * (largest // 3)
        fields: dict[str, Any] = {"model": "cloud"}
        for _ in range(2):
            fields["previous_response_id"] = stored.create(text, **fields).id
        refused = stored.refusal(text, **fields)
        assert (refused.status_code, refused.code) == (400, "conversation_too_long")
        assert refused.param == "previous_response_id"
        assert "limits.max_body_bytes" in refused.message
        stored.create("short", **fields)


@pytest.mark.slow
def test_a_conversation_of_thousands_of_turns_ends_at_a_bound(open_world: OpenWorld) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with limited(open_world) as stored:
        fields: dict[str, Any] = {"model": "cloud"}
        for num_turns in (2_000, 2_000, 900):
            response = stored.create(turn * num_turns, **fields)
            fields["previous_response_id"] = response.id
        assert len(stored.world.cloud.requests[-1].document["messages"]) > 9_000
        refused = stored.refusal(turn * 1_000, **fields)
        assert (refused.status_code, refused.code) == (400, "conversation_too_long")
        assert "limits.max_json_objects" in refused.message


def test_stored_texts_stay_within_the_bound(open_world: OpenWorld) -> None:
    with limited(open_world, max_bytes=3 * 2**20) as stored:
        ids = [stored.create("x" * 2**20, model="cloud").id for _ in range(6)]
        found = [stored.world.http.get(f"/v1/responses/{each}").status_code == 200 for each in ids]
        assert found == [False] * 4 + [True] * 2


def test_a_response_without_room_says_that_it_is_not_stored(open_world: OpenWorld) -> None:
    with limited(open_world, max_bytes_per_tenant=2_000) as stored:
        assert stored.create("Hello", model="cloud").store is False
        body = {"model": "cloud", "input": "x" * 2_000, "stream": True}
        events = read_events(stored.world.http.post("/v1/responses", json=body).content)
        assert events[-1]["response"]["store"] is False


def test_a_small_request_for_a_long_conversation_counts_as_a_long_one(
    open_world: OpenWorld,
) -> None:
    bounds = {"max_bytes_in_flight_per_key": 9 * 2**20, "max_bytes_in_flight": 9 * 2**20}
    script = MockScript(pieces=("Hi",) * 6, gap_s=0.1)
    with storing(open_world, http=bounds, clouds=(script,)) as stored:
        first = stored.create("x" * (5 * 2**20), model="cloud")
        more = {"model": "cloud", "previous_response_id": first.id}
        stream = stored.create("More", stream=True, **more)
        next(iter(stream))
        refused = stored.refusal(**more)
        assert (refused.status_code, refused.code) == (429, "too_many_bytes_in_flight")
        stream.close()


def test_workers_share_stored_responses_through_redis() -> None:
    body = {"responses": {"store": True}, "server": {"workers": 2}}
    with pytest.raises(ValueError, match="redis_url"):
        Settings.model_validate(body)
    Settings.model_validate({**body, "redis_url": "redis://127.0.0.1:1/0"})
    with pytest.raises(ValueError, match="less than or equal"):
        Settings.model_validate({"responses": {"ttl_s": 40 * 86_400}})
