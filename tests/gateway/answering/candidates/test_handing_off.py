"""Hand-off between local models and an upstream tier of one gateway, over real sockets."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from benchmarks.shared.mock_upstream import MockScript, ToolCall
from benchmarks.shared.toxics import Toxic
from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.errors import CrashSuspectError, EngineDiedError, QueueFullError
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.responses import (
    OutriderReport,
    UpstreamChunk,
    UpstreamCompletion,
    UpstreamReport,
)
from outrider.gateway.contract.schema.routing import RouteReport
from tests.gateway.answers import read_answer
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import CHAT, LOCAL_TEXT, Streamed, TestPolicy, World
from tests.gateway.scripted_client import Script
from tests.gateway.watches import PlannedWatch

Encode = Callable[[str], list[int]]
Make = Callable[..., Any]

CLOUD = MockScript(pieces=("From ", "far ", "away, ", "all ", "is ", "well."))
CLOUD_TEXT = "".join(CLOUD.pieces)
DOWN = (503, "no_tier_available")


@pytest.fixture
def make(open_world: OpenWorld) -> Make:
    """Makes a gateway; a context manager."""

    return partial(open_world, clouds=(CLOUD,))


@contextmanager
def down(world: World) -> Iterator[None]:
    """The upstream tier takes no connections."""
    for cloud in world.clouds:
        cloud.refuse()
    try:
        yield
    finally:
        for cloud in world.clouds:
            cloud.listen()


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def report(response: httpx.Response) -> dict[str, Any]:
    told: dict[str, Any] = response.json()["outrider"]
    model = OutriderReport if told["tier"] in ("small", "large") else UpstreamReport
    read_answer(model, told)
    return told


# ---- an upstream tier by its name ---------------------------------------------------------------


def test_a_named_tier_answers_and_its_bytes_are_passed_on(make: Make) -> None:
    with make() as world:
        for name in ("cloud", "mock-model", "cloud/mock-model"):
            streamed = world.stream(model=name)
            assert streamed.text == CLOUD_TEXT
            assert streamed.is_done
            read_answer(UpstreamReport, streamed.report)
            assert streamed.report["hand_off"] is None
        asked = world.cloud.requests[-1].document
        assert asked["model"] == "mock-model"
        assert "outrider" not in asked
        with httpx.Client() as direct:
            plain = direct.post(f"{world.cloud.url}/chat/completions", json=asked)
        own = [e for e in streamed.raw.split(b"\n\n") if e]
        theirs = [e for e in plain.content.split(b"\n\n") if e]
        # The server was asked for the usage, the client did not ask: that event is missing.
        assert b'"usage":{' in theirs[-2]
        strip = world.cloud.requests[-1].index
        del theirs[-2]
        assert len(own) == len(theirs)
        for mine, other in zip(own[:-2], theirs[:-2], strict=True):
            assert mine.replace(b"mock-2", b"mock-3") == other.replace(b"mock-2", b"mock-3"), strip
        assert own[-1] == theirs[-1] == b"data: [DONE]"
        assert not world.engine.submitted


def test_a_whole_answer_has_the_report_and_is_otherwise_the_servers_own(make: Make) -> None:
    with make() as world:
        response = world.chat(model="cloud")
        assert content(response) == CLOUD_TEXT
        assert response.headers["x-outrider-tier"] == "cloud"
        assert report(response)["usage_source"] == "reported"
        with httpx.Client() as direct:
            plain = direct.post(
                f"{world.cloud.url}/chat/completions",
                json=world.cloud.requests[-1].document,
            )
        body = response.content[: response.content.index(b',"outrider":')] + b"}"
        assert body.replace(b"mock-0", b"") == plain.content.replace(b"mock-1", b"")


def test_usage_is_told_once_where_it_was_asked_for(make: Make) -> None:
    with make() as world:
        for usage in ("as_asked", "never"):
            world.cloud.script = MockScript(pieces=CLOUD.pieces, usage=usage)
            streamed = world.stream(model="cloud", stream_options={"include_usage": True})
            told = [chunk for chunk in streamed.chunks if chunk.get("usage")]
            assert len(told) == 1
            assert told[0]["choices"] == []
            assert told[0]["outrider"] == streamed.report
            source = streamed.report["usage_source"]
            assert source == ("reported" if usage == "as_asked" else "estimated")
            assert streamed.is_done
            assert len(streamed.ids) == 1


def test_completions_and_tool_calls_pass_through(make: Make) -> None:
    call = ToolCall(name="get_weather", arguments='{"city":"Oslo"}')
    with make(clouds=(MockScript(pieces=("Well, ",), tool_calls=(call,)),)) as world:
        client = openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0)
        with client:
            answer = client.chat.completions.create(
                model="cloud",
                messages=[{"role": "user", "content": "Rain?"}],
                tools=[{"type": "function", "function": {"name": "get_weather"}}],
            )
            called = answer.choices[0].message.tool_calls
            assert called is not None
            assert called[0].to_dict()["function"] == {
                "name": "get_weather",
                "arguments": '{"city":"Oslo"}',
            }
            world.cloud.script = CLOUD
            text = client.completions.create(model="cloud", prompt="Once upon a time")
            assert text.choices[0].text == CLOUD_TEXT
            parts = client.completions.create(model="cloud", prompt="Once", stream=True)
            assert "".join(part.choices[0].text for part in parts if part.choices) == CLOUD_TEXT


@pytest.mark.slow
def test_the_servers_refusal_is_passed_on_in_its_own_words(make: Make) -> None:
    with make() as world:
        world.cloud.script = MockScript(toxic=Toxic(kind="status", status=422))
        response = world.chat(model="cloud")
        assert response.status_code == 422
        assert response.json()["error"]["message"]
        assert response.headers["x-outrider-tier"] == "cloud", "whose words these are"
        response = world.chat(outrider={"policy": "prefer_cloud"})  # nobody else is asked then
        assert response.status_code == 422
        assert not world.engine.submitted


def test_names_are_listed_together(make: Make) -> None:
    with make() as world:
        cards = {card["id"]: card for card in world.http.get("/v1/models").json()["data"]}
        assert set(cards) >= {"auto", "small", "large", "cloud", "mock-model"}
        assert cards["mock-model"]["owned_by"] == "cloud"
        assert world.http.get("/v1/models/cloud").json() == cards["cloud"]
        unknown = world.chat(model="nobody")
        assert unknown.status_code == 404
        assert "cloud" in unknown.json()["error"]["message"]
        bad = world.chat(outrider={"tier": "nowhere"})
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "outrider.tier"
        named = world.chat(outrider={"tier": "cloud"})
        assert report(named)["tier"] == "cloud"


# ---- policies -----------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("policy", "answers"),
    [
        ("local_only", "small"),
        ("prefer_local", "small"),
        ("prefer_cloud", "cloud"),
        ("cloud_only", "cloud"),
    ],
)
def test_a_policy_decides_which_tier_answers(make: Make, policy: str, answers: str) -> None:
    with make() as world:
        response = world.chat(outrider={"policy": policy})
        assert content(response) == (CLOUD_TEXT if answers == "cloud" else LOCAL_TEXT)
        told = report(response)
        assert told["tier"] == answers == response.headers["x-outrider-tier"]
        assert told["hand_off"] == ("policy" if answers == "cloud" else None)
        assert not told["degraded"]
        assert len(world.cloud.requests) == (answers == "cloud")


def test_with_the_cloud_down_the_local_answer_is_marked(make: Make) -> None:
    with make() as world, down(world):
        for stream in (False, True):
            asked = {"outrider": {"policy": "prefer_cloud"}}
            if stream:
                streamed = world.stream(**asked)
                told, headers, text = streamed.report, streamed.headers, streamed.text
            else:
                response = world.chat(**asked)
                told, headers, text = report(response), response.headers, content(response)
            assert text == LOCAL_TEXT
            assert told["degraded"] is True
            assert told["hand_off"] == "failure" == headers["x-outrider-hand-off"]
            assert headers["x-outrider-degraded"] == "true"
            assert headers["x-outrider-tier"] == "small"
        assert world.count("outrider_degraded_total") == 2
        only = world.chat(outrider={"policy": "cloud_only"})
        assert only.status_code in (502, 503)


def test_with_the_local_engine_down_the_cloud_answers(make: Make) -> None:
    with make() as world:
        world.engine.is_ready = False
        response = world.chat()
        assert content(response) == CLOUD_TEXT
        assert report(response)["hand_off"] == "failure"
        assert report(response)["reason"] == "the local models are not ready"
        assert not report(response)["degraded"]
        assert world.http.get("/ready").status_code == 200
        assert world.chat(outrider={"policy": "local_only"}).status_code == 503
        world.engine.is_ready = True
        died = Script(refusal=EngineDiedError("it stopped"))
        world.engine.script = lambda _: died
        assert content(world.chat()) == CLOUD_TEXT
        world.engine.script = lambda _: Script(failure=("engine_died", "it stopped"))
        assert content(world.chat()) == CLOUD_TEXT


@pytest.mark.parametrize(
    "script",
    [
        Script(failure=(CrashSuspectError.code, "it stopped twice")),
        Script(refusal=CrashSuspectError(retry_after_s=600.0)),
    ],
)
def test_a_request_that_killed_two_engines_is_not_tried_on_another_tier(
    make: Make, script: Script
) -> None:
    with make() as world:
        world.engine.script = lambda _: script
        response = world.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_died_twice"
        assert response.headers["x-should-retry"] == "false"


def test_while_the_engine_restarts_the_cloud_answers_before_it_is_waited_for(make: Make) -> None:
    with make() as world:
        world.engine.is_ready, world.engine.is_paused = False, True
        response = world.chat()
        assert content(response) == CLOUD_TEXT
        assert report(response)["hand_off"] == "failure"
        assert not report(response)["degraded"]
        assert not world.engine.submitted
        assert content(world.chat(outrider={"policy": "local_only"})) == LOCAL_TEXT
        with down(world):
            assert content(world.chat()) == LOCAL_TEXT


def test_without_any_working_tier_there_is_one_clear_error(make: Make) -> None:
    with make() as world, down(world):
        world.engine.is_ready = False
        for policy in ("prefer_local", "prefer_cloud"):
            response = world.chat(outrider={"policy": policy})
            assert (response.status_code, response.json()["error"]["code"]) == DOWN
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["x-should-retry"] == "true"


def test_a_bad_request_goes_nowhere(make: Make) -> None:
    with make() as world:
        for fields in (
            {"temperature": 5},
            {"outrider": {"policy": "sometimes"}},
            {"outrider": {"policy": "cloud_only", "privacy": "private"}},
            {"outrider": {"privacy": "private"}, "model": "cloud"},
            {"outrider": {"policy": "local_only"}, "model": "cloud"},
            {"outrider": {"deadline_ms": -1}},
            {"messages": []},
        ):
            response = world.chat(**fields)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"]
        assert not world.cloud.requests
        assert not world.engine.submitted


# ---- hand-offs ----------------------------------------------------------------------------------


def on_device(make: Make, policy: TestPolicy, **options: Any) -> Any:
    """A small model here, an upstream tier that plays the large one's part."""
    return make(local=("small",), policy=policy, **options)


def test_requests_too_hard_for_the_small_model_go_upstream(make: Make) -> None:
    with on_device(make, TestPolicy(tier="large")) as world:
        response = world.chat()
        assert content(response) == CLOUD_TEXT
        told = report(response)
        assert (told["hand_off"], told["route_tier"], told["quality"]) == ("quality", "small", 0.4)
        assert "router: large" in told["reason"]
        assert not world.engine.submitted
        with down(world):
            kept = world.chat()
            assert content(kept) == LOCAL_TEXT
            assert report(kept)["degraded"] is True


@pytest.mark.parametrize("stream", [False, True])
def test_a_weak_local_answer_is_handed_over_in_the_hold_back_window(
    make: Make, stream: bool
) -> None:
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=3))
    with on_device(make, policy, tier={"server": "outrider"}) as world:
        response = world.chat(stream=stream)
        if stream:
            streamed = Streamed(response)
            told, text = streamed.report, streamed.text
        else:
            told, text = report(response), content(response)
        assert text == CLOUD_TEXT
        assert told["hand_off"] == "confidence" == response.headers["x-outrider-hand-off"]
        assert told["confidence"] == 0.5
        assert response.headers["x-outrider-confidence"] == "0.5000"
        assert told["held_tokens"] == told["discarded_tokens"] == 3
        assert told["escalated"] is True
        # What the small model wrote is the other one's first draft.
        guess = world.cloud.requests[0].document["prediction"]["content"]
        assert guess
        assert LOCAL_TEXT.startswith(guess)
        assert world.engine.aborted  # the local answer does not go on for nobody


@pytest.mark.parametrize("stream", [False, True])
def test_a_weak_local_answer_is_kept_where_the_cloud_cannot_take_it(
    make: Make, stream: bool
) -> None:
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=3))
    with on_device(make, policy) as world, down(world):
        response = world.chat(stream=stream)
        if stream:
            streamed = Streamed(response)
            told, text = streamed.report, streamed.text
        else:
            told, text = report(response), content(response)
        assert text == LOCAL_TEXT
        assert told["degraded"] is True
        assert told["hand_off"] == "failure"
        assert told["escalated"] is False
        assert response.headers["x-outrider-degraded"] == "true"


def test_several_choices_are_not_watched_for_the_cloud(make: Make) -> None:
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=1))
    with on_device(make, policy) as world:
        response = world.chat(n=2)
        assert [c["message"]["content"] for c in response.json()["choices"]] == [LOCAL_TEXT] * 2


def test_requests_beyond_the_local_models_go_upstream(make: Make) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    with make() as world:
        response = world.chat(messages=messages)
        assert content(response) == CLOUD_TEXT
        assert report(response)["hand_off"] == "capability"
        assert "images" in response.headers["x-outrider-reason"]
        assert world.cloud.requests[0].document["messages"] == messages
        long = [{"role": "user", "content": "word " * 400}]
        response = world.chat(messages=long)
        assert report(response)["hand_off"] == "capability"
        assert "too long" in response.headers["x-outrider-reason"]
        for options in ({"privacy": "private"}, {"policy": "local_only"}):
            assert world.chat(messages=messages, outrider=options).status_code == 400
            assert world.chat(messages=long, outrider=options).status_code == 400
        assert len(world.cloud.requests) == 2
    with make(tier={"supports": "tools"}) as world:
        assert world.chat(messages=messages).status_code == 400


def test_token_ids_stay_with_the_models_that_know_them(make: Make) -> None:
    with on_device(make, TestPolicy(tier="large")) as world:
        kept = world.chat(logit_bias={"70": 1.0})
        assert content(kept) == LOCAL_TEXT
        assert not world.cloud.requests


def test_a_full_queue_hands_over(make: Make) -> None:
    with make() as world:
        full = Script(refusal=QueueFullError(num_waiting=9, retry_after_s=3.0))
        world.engine.script = lambda _: full
        response = world.chat()
        assert content(response) == CLOUD_TEXT
        assert report(response)["hand_off"] == "load"
        refused = world.chat(outrider={"policy": "local_only"})
        assert refused.status_code == 429


@contextmanager
def one_waits(world: World) -> Iterator[None]:
    """A request that no model begins with, for a while."""
    world.says(LOCAL_TEXT)
    assert content(world.chat()) == LOCAL_TEXT
    world.says(LOCAL_TEXT, prefill_s=1.2)
    waiting = threading.Thread(target=lambda: world.chat(outrider={"policy": "local_only"}))
    num_before = len(world.engine.submitted)
    waiting.start()
    wait_for(lambda: len(world.engine.submitted) > num_before)
    world.says(LOCAL_TEXT)
    since_s = time.monotonic()
    wait_for(lambda: time.monotonic() - since_s > 0.25)
    try:
        yield
    finally:
        waiting.join()


def test_a_queue_that_is_too_long_hands_over(make: Make) -> None:
    with make(handoff={"max_queue_ms": 100}) as world, one_waits(world):
        response = world.chat()
        assert content(response) == CLOUD_TEXT
        assert report(response)["hand_off"] == "load"
        assert "s of queue" in response.headers["x-outrider-reason"]
        assert content(world.chat(outrider={"policy": "local_only"})) == LOCAL_TEXT
        with down(world):  # a long queue is better than nothing
            kept = world.chat()
            assert content(kept) == LOCAL_TEXT
            assert report(kept)["degraded"] is True


@pytest.mark.slow
def test_a_queue_that_the_deadline_does_not_allow_hands_over(make: Make) -> None:
    with make() as world, one_waits(world):
        response = world.chat(outrider={"deadline_ms": 150})
        assert content(response) == CLOUD_TEXT
        assert report(response)["hand_off"] == "load"
        assert content(world.chat()) == LOCAL_TEXT  # no deadline, no hurry


# ---- deadlines ----------------------------------------------------------------------------------


def test_a_deadline_ends_an_answer_that_does_not_come(make: Make) -> None:
    with make() as world:
        world.engine.script = lambda _: Script(hangs=True)
        late = world.chat(outrider={"policy": "local_only", "deadline_ms": 120})
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"
        world.cloud.script = MockScript(first_token_delay_s=30.0)
        late = world.chat(outrider={"policy": "cloud_only", "deadline_ms": 120})
        assert late.status_code == 504
        world.cloud.settled()
        assert world.cloud.requests[-1].outcome == "client_left"


def test_a_deadline_in_mid_answer_ends_the_stream_with_an_error(make: Make) -> None:
    with make() as world:
        world.says(LOCAL_TEXT, hangs=True)
        streamed = world.stream(outrider={"policy": "local_only", "deadline_ms": 300})
        assert streamed.error is not None
        assert streamed.error["code"] == "deadline_exceeded"
        assert not streamed.is_done
        world.cloud.script = MockScript(
            pieces=CLOUD.pieces, toxic=Toxic(kind="stall", after_events=2)
        )
        streamed = world.stream(outrider={"policy": "cloud_only", "deadline_ms": 300})
        assert streamed.error is not None
        assert streamed.error["code"] == "deadline_exceeded"
        assert streamed.text == "From far "


def test_the_first_tier_leaves_time_for_the_fallback(make: Make) -> None:
    with make() as world:
        assert content(world.chat()) == LOCAL_TEXT  # now it is known how long that takes
        world.cloud.script = MockScript(first_token_delay_s=30.0)
        response = world.chat(outrider={"policy": "prefer_cloud", "deadline_ms": 1000})
        assert content(response) == LOCAL_TEXT
        assert report(response)["degraded"] is True


# ---- privacy ------------------------------------------------------------------------------------


def test_private_requests_have_a_prefix_cache_of_their_own(make: Make) -> None:
    """News of a prefix cache may be published; those of this part are not."""
    with make() as world:
        world.chat()
        world.chat(outrider={"privacy": "private"})
        open_, private = world.engine.submitted
        assert private.cache_salt == PRIVATE_SALT + open_.cache_salt


@pytest.mark.slow
def test_private_requests_never_leave_the_machine(make: Make) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    weak = TestPolicy(watch=lambda: PlannedWatch("escalate", at=2))
    worlds = (
        {"policy": TestPolicy(tier="large"), "local": ("small",)},
        {"policy": weak, "local": ("small",)},
        {"handoff": {"policy": "prefer_cloud"}},
        {"handoff": {"max_queue_ms": 1e-3}},
        {"mirrored": CLOUD, "mirror": {"tier": "shadow", "share": 1.0}},
        {"handoff": {"continue_on_failure": True}},
    )
    broken: tuple[Script, ...] = (
        Script(refusal=QueueFullError(num_waiting=1, retry_after_s=1.0)),
        Script(refusal=EngineDiedError("gone")),
        Script(failure=("engine_died", "gone")),
        Script(hangs=True),
    )
    for options in worlds:
        with make(**options) as world:
            private = {"outrider": {"privacy": "private", "deadline_ms": 200}}
            for stream in (False, True):
                world.chat(stream=stream, **private)
                world.chat(
                    stream=stream, messages=[{"role": "user", "content": [image]}], **private
                )
                world.chat(
                    stream=stream, messages=[{"role": "user", "content": "x " * 900}], **private
                )
                world.chat(stream=stream, model="cloud", **private)
                for script in broken:
                    world.engine.script = lambda _, script=script: script
                    world.chat(stream=stream, **private)
                world.says(LOCAL_TEXT, failure=("boom", "in mid-answer"))
                world.chat(stream=stream, **private)
                world.says(LOCAL_TEXT)
            for cloud in world.clouds:
                assert not cloud.requests, options


# ---- failures in mid-answer ---------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_broken_stream_ends_with_an_error_behind_its_text(make: Make, after: int) -> None:
    toxic = Toxic(kind="reset", after_events=after)
    with make(clouds=(MockScript(pieces=CLOUD.pieces, toxic=toxic),)) as world:
        streamed = world.stream(outrider={"policy": "prefer_cloud"})
        assert streamed.text == "".join(CLOUD.pieces[:after])
        assert streamed.error is not None
        assert streamed.report["tier"] == "cloud"
        assert streamed.report["completion_tokens"] > 0
        assert not streamed.is_done


@pytest.mark.parametrize("after", [1, 3, 5])
def test_the_local_models_go_on_behind_the_cloud_where_that_is_allowed(
    make: Make, after: int, tokenizer: ChatTokenizer
) -> None:
    toxic = Toxic(kind="reset", after_events=after)
    with make(
        clouds=(MockScript(pieces=CLOUD.pieces, toxic=toxic),),
        handoff={"continue_on_failure": True, "policy": "prefer_cloud"},
    ) as world:
        world.says(" And so on.")
        streamed = world.stream(max_tokens=40)
        begun = "".join(CLOUD.pieces[:after])
        assert streamed.text == begun + " And so on."
        assert streamed.is_done
        assert streamed.roles == ["assistant"]
        assert len(streamed.ids) == 1
        assert streamed.report["degraded"] is True
        prompt = tokenizer.decode(world.engine.submitted[0].prompt_token_ids)
        assert prompt.endswith(begun.strip()) or prompt.endswith(begun)
        assert world.engine.submitted[0].sampling.max_tokens < 40


@pytest.mark.parametrize("handoff", [{}, {"continue_on_failure": True}])
def test_the_local_models_go_on_where_the_cloud_took_over_and_was_cut(
    make: Make, handoff: dict[str, Any]
) -> None:
    """The cloud's failure counted as the local models', which then had failed already."""
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=3))
    broken = MockScript(pieces=CLOUD.pieces, toxic=Toxic(kind="reset", after_events=3))
    with on_device(make, policy, clouds=(broken,), handoff=handoff) as world:
        world.says(LOCAL_TEXT, " And so on.")
        streamed = world.stream(max_tokens=40)
        assert streamed.text == "".join(CLOUD.pieces[:3]) + " And so on."
        assert streamed.is_done
        assert len(streamed.ids) == 1
        assert streamed.headers["x-outrider-hand-off"] == "confidence"
        assert (streamed.report["tier"], streamed.report["degraded"]) == ("small", True)
        assert len(world.cloud.requests) == 1, "the tier that broke off was asked again"


def test_the_cloud_goes_on_behind_the_local_models_where_that_is_allowed(make: Make) -> None:
    with make(tier={"server": "vllm"}, handoff={"continue_on_failure": True}) as world:
        world.says("Well then. ", failure=("engine_died", "gone"))
        streamed = world.stream(model="auto")
        assert streamed.text == "Well then. " + CLOUD_TEXT
        assert streamed.is_done
        assert streamed.roles == ["assistant"]
        assert len(streamed.ids) == 1
        asked = world.cloud.requests[0].document
        assert asked["messages"][-1] == {"role": "assistant", "content": "Well then. "}
        assert asked["continue_final_message"] is True
        with down(world):
            broken = world.stream()
            assert broken.text == "Well then. "
            assert broken.error is not None


# ---- gateways in a ring, costs, mirrors ---------------------------------------------------------


def test_a_ring_of_gateways_is_told(make: Make) -> None:
    with make() as world:
        own = world.context.upstream.gateway_id
        for hops in (own, f"abc, {own}", ",".join("abcdefgh")):
            response = world.chat(headers={"x-outrider-hops": hops})
            assert response.status_code == 508
            assert response.json()["error"]["code"] == "loop_detected"
        assert content(world.chat(model="cloud", headers={"x-outrider-hops": "abc"})) == CLOUD_TEXT
        assert world.cloud.requests[0].headers["x-outrider-hops"] == f"abc, {own}"


@pytest.mark.slow
def test_max_cost_holds_for_upstream_tiers(make: Make) -> None:
    price = {"prompt": 100.0, "completion": 1000.0}
    with make(tier={"price": price}) as world:
        dear = {"outrider": {"max_cost_usd": 1e-6, "policy": "cloud_only"}}
        response = world.chat(**dear)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "outrider.max_cost_usd"
        assert not world.cloud.requests
        response = world.chat(outrider={"max_cost_usd": 5.0, "policy": "cloud_only"}, max_tokens=9)
        told = report(response)
        used = response.json()["usage"]
        spent = (100 * used["prompt_tokens"] + 1000 * used["completion_tokens"]) / 1e6
        assert told["cost_usd"] == pytest.approx(spent, rel=1e-3)
    with make() as world:
        response = world.chat(outrider={"max_cost_usd": 5.0, "policy": "cloud_only"})
        assert "the price of the cloud tier is unknown" in response.json()["error"]["message"]
    with make(tier={"price": {"prompt": 0.0}}) as world:  # said to be free
        assert content(world.chat(outrider={"max_cost_usd": 1e-9}, model="cloud")) == CLOUD_TEXT


def test_a_mirror_gets_copies_and_delays_no_answer(make: Make) -> None:
    with make(
        mirrored=MockScript(pieces=("Second ", "opinion."), first_token_delay_s=0.05),
        mirror={"tier": "shadow", "share": 1.0},
    ) as world:
        shadow = world.clouds[-1]
        assert content(world.chat()) == LOCAL_TEXT
        assert world.stream(model="cloud").text == CLOUD_TEXT
        wait_for(lambda: len(shadow.requests) == 2)
        wait_for(lambda: all(request.outcome == "answered" for request in shadow.requests))
        assert [r.document["messages"] for r in shadow.requests] == [CHAT["messages"]] * 2
        assert len(world.cloud.requests) == 1


# ---- leaving, asking where it would go ----------------------------------------------------------


def test_a_client_that_leaves_ends_the_upstream_request(make: Make) -> None:
    with make(clouds=(MockScript(pieces=CLOUD.pieces, gap_s=0.1),)) as world:
        with world.http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "model": "cloud", "stream": True}
        ) as response:
            for _ in response.iter_bytes():
                break
        world.cloud.settled()
        assert world.cloud.requests[0].outcome == "client_left"


def test_where_it_would_go(make: Make) -> None:
    def ask(world: World, **fields: Any) -> dict[str, Any]:
        told: dict[str, Any] = world.http.post("/v1/route", json={**CHAT, **fields}).json()
        read_answer(RouteReport, told)
        return told

    with on_device(make, TestPolicy(tier="large")) as world:
        told = ask(world)
        assert (told["tier"], told["quality"]) == ("cloud", 0.4)
        assert ask(world, outrider={"policy": "local_only"})["tier"] == "small"
        assert ask(world, model="cloud")["reason"] == "requested"
        assert not world.cloud.requests
        assert not world.engine.submitted


def test_a_tier_that_was_named_is_replaced_only_where_the_request_says_so(make: Make) -> None:
    with make() as world, down(world):
        assert world.chat(model="cloud").status_code in (502, 503)
        for fields in ({"model": "cloud"}, {"outrider": {"tier": "cloud"}}):
            options = {**fields.get("outrider", {}), "policy": "prefer_cloud"}  # type: ignore[dict-item]
            response = world.chat(**{**fields, "outrider": options})
            assert content(response) == LOCAL_TEXT
            assert report(response)["degraded"] is True


@pytest.mark.slow
def test_no_model_here_at_all(make: Make) -> None:
    with make(local=()) as world:
        assert content(world.chat()) == CLOUD_TEXT
        assert report(world.chat())["hand_off"] is None
        assert world.http.get("/ready").status_code == 200
        private = world.chat(outrider={"privacy": "private"})
        assert private.status_code == 400
        assert json.loads(private.content)["error"]["param"] == "outrider.privacy"
        assert world.http.get("/openapi.json").status_code == 200


@pytest.mark.slow
def test_the_openapi_document_describes_upstream_answers(make: Make) -> None:
    with make() as world:
        document = world.http.get("/openapi.json").json()
        assert world.http.get("/openapi.json").json() == document, "asking changes nothing"
        UpstreamCompletion.model_validate(world.chat(model="cloud").json())
        for chunk in world.stream(model="cloud").chunks:
            UpstreamChunk.model_validate(chunk)
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert "UpstreamCompletion" in json.dumps(content["application/json"])
        assert "UpstreamChunk" in json.dumps(content["text/event-stream"])
    assert {"UpstreamCompletion", "UpstreamChunk"} <= document["components"]["schemas"].keys()


def test_a_gateway_without_any_working_tier_is_not_ready(make: Make) -> None:
    with make(local=()) as world, down(world):
        while world.chat().status_code != 503:  # until the breaker knows
            pass
        ready = world.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["error"]["code"] == "no_tier_available"
        assert int(ready.headers["retry-after"]) >= 1
