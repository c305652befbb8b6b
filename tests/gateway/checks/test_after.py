"""Checks of answers, whole and in windows of a stream."""

import json
import time
from typing import Any, cast

import pytest

from benchmarks.shared.mock_upstream import MockScript, ToolCall
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.verifier.params import Tier
from tests.gateway.checks.services import BLOCK, PASS, running_service, texts, without_word
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import LOCAL_TEXT, Streamed, World
from tests.gateway.scripted_client import Script, Step

HERE = "tests.gateway.checks.services"
CHANGED = LOCAL_TEXT.replace("fine", "****")


def checks(name: str, where: str, **more: Any) -> dict[str, Any]:
    return {"guard": {"function": f"{HERE}:{name}", "where": where, **more}}


def reasons(streamed: Streamed) -> list[str]:
    choices = [choice for chunk in streamed.chunks for choice in chunk.get("choices", ())]
    return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]


@pytest.mark.slow_cases
@pytest.mark.parametrize("where", ["after", "stream"])
def test_a_whole_answer_is_rewritten_without_its_tokens(open_world: OpenWorld, where: str) -> None:
    with open_world(checks=checks("without_word", where)) as world:
        answer = world.chat(model="large", logprobs=True).json()
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == CHANGED
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"] is None


@pytest.mark.slow_cases
@pytest.mark.parametrize("where", ["after", "stream"])
def test_a_whole_answer_is_blocked(open_world: OpenWorld, where: str) -> None:
    with open_world(checks=checks("blocking", where)) as world:
        answer = world.chat(model="large", logprobs=True)
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == ""
        assert choice["finish_reason"] == "content_filter"
        assert "fine" not in answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("model", ["large", "cloud"])
@pytest.mark.parametrize(("where", "hold_back"), [("stream", 0), ("stream", 8), ("after", 0)])
def test_a_stream_that_passes_is_the_same(
    open_world: OpenWorld, model: str, where: str, hold_back: int
) -> None:
    with running_service(lambda _: PASS) as service:
        check = {"url": service.url, "where": where, "hold_back": hold_back}
        with open_world(checks={"guard": check}) as world:
            streamed = world.stream(model=model, stream_options={"include_usage": True})
            assert streamed.is_done
            assert reasons(streamed) == ["stop"]
            assert streamed.chunks[-1]["usage"]["completion_tokens"] > 0
            if model == "large":
                assert streamed.text == LOCAL_TEXT
        told = [each["before"] + each["text"] for q in service.questions for each in q["texts"]]
        assert streamed.text in told
        assert len(service.questions) == 1 or where == "stream"


def test_a_stream_is_rewritten_where_a_window_holds_it(open_world: OpenWorld) -> None:
    for name in ("without_word", "without_word_soon"):
        with open_world(checks=checks(name, "stream", hold_back=8)) as world:
            streamed = world.stream(model="large", logprobs=True)
            assert streamed.text == CHANGED
            choices = [choice for chunk in streamed.chunks for choice in chunk["choices"]]
            assert all(
                choice["logprobs"] is None for choice in choices if "*" in json.dumps(choice)
            )
            assert reasons(streamed) == ["stop"]
            assert streamed.roles == ["assistant"]


def test_a_check_is_told_what_was_sent_and_not_what_was_rewritten(open_world: OpenWorld) -> None:
    with running_service(without_word) as service:
        guards = checks("blocking", "stream")
        rewriting = {"first": {"url": service.url, "where": "stream", "hold_back": 8}}
        with open_world(checks={**rewriting, **guards}) as world:
            world.says("I am fine, and so is everybody else whom I know.")
            streamed = world.stream(model="large")
            assert reasons(streamed) == ["stop"]
            assert "****" in streamed.text


@pytest.mark.slow_cases
@pytest.mark.parametrize("model", ["large", "cloud"])
@pytest.mark.parametrize("where", ["after", "stream"])
def test_a_blocked_stream_ends_with_content_filter(
    open_world: OpenWorld, model: str, where: str
) -> None:
    def say(question: dict[str, Any]) -> dict[str, Any]:
        (asked,) = question["texts"]
        return BLOCK if len(asked["before"] + asked["text"]) > 10 else PASS

    with running_service(say) as service:
        check = {"url": service.url, "where": where}
        script = MockScript(num_pieces=50, gap_s=0.02)
        with open_world(checks={"guard": check}, clouds=(script,)) as world:
            streamed = world.stream(model=model, stream_options={"include_usage": True})
            assert streamed.is_done
            assert reasons(streamed) == ["content_filter"]
            assert len(streamed.text) <= 10
            assert streamed.text == "" or where == "stream"
            usage = streamed.chunks[-1]["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            if where == "stream":
                wait_for(lambda: not world.engine.running)


def test_what_is_held_back_is_not_checked_again_before_more_comes(open_world: OpenWorld) -> None:
    with running_service(lambda _: PASS) as service:
        check = {"url": service.url, "where": "stream", "hold_back": 4}
        script = MockScript(num_pieces=3, gap_s=0.1)
        with open_world(checks={"guard": check}, clouds=(script,)) as world:
            assert world.stream(model="cloud").is_done
    assert len(service.questions) <= 5


@pytest.mark.slow
def test_a_stream_goes_on_where_more_is_to_be_held_back_than_is_read_ahead(
    open_world: OpenWorld,
) -> None:
    with running_service(lambda _: PASS) as service:
        check = {"url": service.url, "where": "stream", "hold_back": 1_000_000}
        script = MockScript(num_pieces=2500, gap_s=0.0)
        with open_world(checks={"guard": check}, clouds=(script,)) as world:
            assert world.stream(model="cloud", max_tokens=4000).is_done
        assert len(service.questions) <= 4


def test_each_choice_of_a_blocked_stream_ends(open_world: OpenWorld) -> None:
    with open_world(checks=checks("blocking", "after")) as world:
        streamed = world.stream(model="large", n=2)
        ended = {
            choice["index"]: choice["finish_reason"]
            for chunk in streamed.chunks
            for choice in chunk["choices"]
        }
        assert ended == {0: "content_filter", 1: "content_filter"}


def test_a_check_of_a_stream_that_fails_ends_it_with_an_error(open_world: OpenWorld) -> None:
    with open_world(checks=checks("hanging", "stream", timeout_s=0.2)) as world:
        answer = world.chat(model="large", stream=True)
        assert "could not be made" in answer.text
        assert "fine" not in answer.text
        assert "[DONE]" not in answer.text
        assert world.http.get("/health").status_code == 200
    with open_world(
        checks=checks("raising", "stream", on_failure="open"), cache={"store": "memory"}
    ) as world:
        for _ in range(2):
            asked = {"outrider": {"cache": "on"}, "temperature": 0}
            streamed = world.stream(model="large", **asked)
            assert streamed.text == LOCAL_TEXT
            assert streamed.headers["x-outrider-cache"] == "miss"


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("path", "asked", "end"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}, ""),
        ("/v1/responses", {"input": "Hi"}, "content_filter"),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}, ""),
        ("/v1/completions", {"prompt": "Hi"}, "content_filter"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_withholds_a_blocked_answer(
    open_world: OpenWorld, path: str, asked: dict[str, Any], end: str, stream: bool
) -> None:
    with open_world(checks=checks("blocking", "after")) as world:
        answer = world.http.post(path, json={"model": "large", "stream": stream, **asked})
        assert answer.status_code == 200, answer.text
        assert "fine" not in answer.text
        assert end in answer.text
        assert "error" not in answer.text or path == "/v1/responses", answer.text


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
def test_caches_keep_what_was_checked(open_world: OpenWorld, stream: bool) -> None:
    options = {"checks": checks("without_word", "stream", hold_back=8)}
    with open_world(cache={"store": "memory"}, **options) as world:
        asked = {"outrider": {"cache": "on"}, "temperature": 0, "stream": stream}
        first, second = (world.chat(model="large", **asked) for _ in range(2))
        assert second.headers["x-outrider-cache"] == "hit"
        assert second.content == first.content
        assert "fine" not in second.text
        one = {"headers": {"idempotency-key": "one"}, "stream": stream}
        assert world.chat(model="large", **one).text.count("fine") == 0
        again = world.chat(model="large", **one)
        assert again.headers["idempotent-replayed"] == "true"
        assert "fine" not in again.text
    with open_world(responses={"store": True}, **options) as world:
        told = world.http.post("/v1/responses", json={"model": "large", "input": "Hi"}).json()
        stored = world.http.get(f"/v1/responses/{told['id']}")
        assert "****" in stored.text
        assert "fine" not in stored.text


def test_a_key_without_checks_and_one_with_them_share_no_answer(open_world: OpenWorld) -> None:
    guard = checks("without_word", "after", models=["first"])
    aliases = {name: {"models": ["large"]} for name in ("first", "second")}
    with open_world(checks=guard, aliases=aliases, cache={"store": "memory"}) as world:
        asked = {"outrider": {"cache": "on"}, "temperature": 0}
        assert "fine" in world.chat(model="second", **asked).text
        assert "fine" not in world.chat(model="first", **asked).text
        assert "fine" in world.chat(model="second", **asked).text


@pytest.mark.slow_cases
@pytest.mark.parametrize(("where", "stream"), [("after", True), ("stream", True), ("after", False)])
def test_an_answer_is_checked_where_its_tier_is_named(
    open_world: OpenWorld, where: str, stream: bool
) -> None:
    guard = checks("without_word", where, models=["small"], hold_back=8)
    with open_world(checks=guard) as world:
        for tier, text in (("large", LOCAL_TEXT), ("small", CHANGED)):
            world.policy.tier = cast(Tier, tier)
            if stream:
                assert world.stream(model="auto").text == text
            else:
                answer = world.chat(model="auto").json()
                assert answer["choices"][0]["message"]["content"] == text


@pytest.mark.slow_cases
@pytest.mark.parametrize("where", ["after", "stream"])
def test_an_answer_that_another_tier_continues_is_checked_from_there(
    open_world: OpenWorld, where: str
) -> None:
    guard = checks("without_word", where, models=["small"], hold_back=8)
    aliases = {"both": {"models": ["large", "small"]}}
    with open_world(checks=guard, aliases=aliases) as world:
        begun, rest = (
            [Step(token_ids=(token,)) for token in world.encode(text)]
            for text in ("fine ", "is fine")
        )
        first = Script(steps=begun, failure=("engine_died", "gone"))
        world.engine.script = lambda request: (
            first if request.tier == "large" else Script(steps=rest)
        )
        streamed = world.stream(model="both", max_tokens=20)
        assert streamed.text.endswith(" is ****")


def test_a_trace_does_not_tell_what_is_checked(open_world: OpenWorld) -> None:
    with open_world(checks=checks("without_word", "stream", hold_back=8)) as world:
        answer = world.stream(model="large", headers={"x-outrider-trace": "1"})
        assert b'"tokens":[' not in answer.raw


def test_a_slow_check_makes_larger_windows(open_world: OpenWorld) -> None:
    """Each takes as long as several events: the stream is not a check slower with each event."""

    def say(question: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.1)
        return PASS

    with running_service(say) as service:
        check = {"url": service.url, "where": "stream"}
        script = MockScript(num_pieces=60, gap_s=0.01)
        with open_world(checks={"guard": check}, clouds=(script,)) as world:
            assert world.stream(model="cloud").is_done
        assert 2 <= len(service.questions) < 30
        assert len(texts(service.questions[1])[0]) > len(texts(service.questions[0])[0])


def test_a_client_that_leaves_ends_the_work(open_world: OpenWorld) -> None:
    def left(world: World) -> None:
        asked = {"model": "cloud", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
        with world.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            next(answer.iter_bytes())

    script = MockScript(num_pieces=500, gap_s=0.02)
    guard = checks("without_word_soon", "stream")
    with open_world(checks=guard, clouds=(script,)) as world:
        left(world)
        wait_for(lambda: [each.outcome for each in world.cloud.requests] == ["client_left"])


def test_calls_of_tools_are_checked_too(open_world: OpenWorld) -> None:
    script = MockScript(tool_calls=(ToolCall(name="say", arguments='{"text":"I am fine."}'),))
    with open_world(checks=checks("without_word", "stream", window=30), clouds=(script,)) as world:
        asked = {"model": "cloud", "tools": [{"type": "function", "function": {"name": "say"}}]}
        whole = world.chat(**asked).json()["choices"][0]["message"]["tool_calls"][0]["function"]
        assert whole == {"name": "say", "arguments": '{"text":"I am ****."}'}
        streamed = world.stream(**asked)
        pieces = [
            call["function"].get("arguments", "")
            for chunk in streamed.chunks
            for choice in chunk["choices"]
            for call in choice["delta"].get("tool_calls") or ()
        ]
        assert "".join(pieces) == '{"text":"I am ****."}'


def test_a_blocked_stream_is_paid_for_and_reserves_nothing(opened: OpenWorld) -> None:
    limits = LimitSpec(tokens_per_minute=1000)
    guard = checks("blocking", "stream")
    with opened(limits=limits, checks=guard) as books:
        streamed = books.world.stream(model="large")
        assert reasons(streamed) == ["content_filter"]
        (row,) = books.rows(1)
        assert 0 < row["num_completion_tokens"] <= 20
        used = row["num_charged_tokens"]
        assert books.used("tokens_per_minute") == used
