"""A server in the small model's part: watched, escalated, private, and what it cannot tell."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockRequest, MockScript, ToolCall
from benchmarks.shared.toxics import Toxic
from outrider.gateway.contract.schema.responses import UpstreamChunk, UpstreamCompletion
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.gateway.answers import read_answer
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import LOCAL_TEXT, TestPolicy, World
from tests.gateway.watches import PlannedWatch

Encode = Callable[[str], list[int]]
Make = Callable[..., Any]

CLOUD = MockScript(pieces=("From ", "far ", "away."))
DEVICE = MockScript(pieces=("Near ", "by, ", "caf\u00e9 ", "and ", "all."))
CLOUD_TEXT, DEVICE_TEXT = "".join(CLOUD.pieces), "".join(DEVICE.pieces)
PRIVATE = {"outrider": {"privacy": "private"}}


@pytest.fixture
def make(open_world: OpenWorld) -> Make:
    """Makes a gateway: a device's server, a cloud; `watch` judges the device's answers."""

    def made(watch: PlannedWatch | None = None, **options: Any) -> Any:
        policy = TestPolicy(tier="small", watch=None if watch is None else lambda: watch)
        own = {"local": True, **options.pop("device_options", {})}
        local = options.get("local", ())
        defaults = {
            "clouds": (CLOUD,),
            "others": {"device": (options.pop("device", DEVICE), own)},
            "local": local,
            "policy": policy,
            "models": {"small": "none", "large": "x" if local else "none"},
            "handoff": {"small": "device", **options.pop("handoff", {})},
        }
        return open_world(**{**defaults, **options})

    return made


def asked(world: World) -> list[MockRequest]:
    """The requests for answers that the device got, without the probe at the start."""
    return [r for r in world.clouds[-1].requests if r.document["messages"][0]["content"] != PROBE]


PROBE = "Name three colours."


def answer(world: World, is_streamed: bool, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Text and report of one answer; a stream has to be whole, and valid for its schema."""
    if is_streamed:
        stream = world.stream(**fields)
        assert stream.is_done
        assert stream.error is None
        for chunk in stream.chunks:
            UpstreamChunk.model_validate(chunk)
            assert all(not choice.get("logprobs") for choice in chunk["choices"])
        return stream.text, stream.report
    body = world.chat(**fields).json()
    UpstreamCompletion.model_validate(body)
    assert body["choices"][0].get("logprobs") is None
    return body["choices"][0]["message"]["content"], body["outrider"]


both_ways = pytest.mark.parametrize("is_streamed", [True, False])


@pytest.mark.slow_cases
@both_ways
def test_a_good_answer_is_kept(make: Make, is_streamed: bool) -> None:
    watch = PlannedWatch("commit", at=3)
    with make(watch) as world:
        text, report = answer(world, is_streamed)
        assert text == DEVICE_TEXT
        assert report["tier"] == report["route_tier"] == "device"
        assert (report["confidence"], report["hand_off"], report["degraded"]) == (0.5, None, False)
        assert report["held_tokens"] == (3 if is_streamed else 5)
        assert report["reason"].startswith("router: small (0.40 < 0.50); cascade: commit at")
        assert watch.logprobs == [-0.25] * report["held_tokens"]
        assert not world.cloud.requests
        (request,) = asked(world)
        assert request.document["logprobs"] is True
        assert request.document["top_logprobs"] == 1
        decided = 'outrider_cascade_decisions_total{action="commit",tier="device"}'
        assert world.count(decided) == 1


@pytest.mark.slow_cases
@both_ways
def test_a_weak_answer_is_the_clouds(make: Make, is_streamed: bool) -> None:
    with make(PlannedWatch("escalate", at=3)) as world:
        text, report = answer(world, is_streamed)
        assert text == CLOUD_TEXT
        assert (report["tier"], report["route_tier"]) == ("cloud", "device")
        assert (report["hand_off"], report["escalated"]) == ("confidence", True)
        assert report["discarded_tokens"] == (3 if is_streamed else 5)
        escalated = (
            'outrider_upstream_attempts_total{kind="answer",outcome="escalated",tier="device"}'
        )
        wait_for(lambda: world.count(escalated) == 1)
        assert (
            world.count(
                'outrider_handoffs_total{from_tier="device",kind="confidence",to_tier="cloud"}'
            )
            == 1
        )


@pytest.mark.slow_cases
@both_ways
def test_if_no_other_can_take_over_the_answer_is_kept(make: Make, is_streamed: bool) -> None:
    with make(PlannedWatch("escalate", at=2)) as world:
        world.cloud.refuse()
        text, report = answer(world, is_streamed)
        assert text == DEVICE_TEXT
        assert (report["tier"], report["degraded"], report["hand_off"]) == (
            "device",
            True,
            "failure",
        )
        assert "no other tier could take it, small answer kept" in report["reason"]


def test_the_large_model_here_takes_over(make: Make) -> None:
    """No cloud is in it: the engine's large model writes what the server is too weak for."""
    with make(
        PlannedWatch("escalate", at=1), local=("large",), handoff={"strong": "local"}
    ) as world:
        stream = world.stream()
        assert stream.text == LOCAL_TEXT
        assert stream.report["tier"] == "large"
        assert stream.report["hand_off"] == "confidence"
        assert not world.cloud.requests


def test_a_second_look_is_no_decision_of_the_router(make: Make) -> None:
    watch = PlannedWatch("commit", at=1)
    with make(watch, local=("large",), handoff={"strong": "local"}) as world:
        world.policy.is_explored = True
        assert world.chat().json()["choices"][0]["message"]["content"] == DEVICE_TEXT
        wait_for(lambda: bool(world.engine.submitted))
        assert not any('tier="large"' in decision for decision in world.decisions())


def test_the_router_sends_hard_prompts_past_the_server(make: Make) -> None:
    with make() as world:
        world.policy.tier = "large"
        stream = world.stream()
        assert stream.text == CLOUD_TEXT
        assert stream.report["hand_off"] == "quality"
        assert not asked(world)


@pytest.mark.slow_cases
@pytest.mark.parametrize("policy", [None, "local_only", "prefer_local"])
def test_private_requests_stay_on_the_device(make: Make, policy: str | None) -> None:
    with make(PlannedWatch("escalate", at=1)) as world:
        options = PRIVATE["outrider"] | ({"policy": policy} if policy else {})
        stream = world.stream(outrider=options)
        assert stream.text == DEVICE_TEXT
        assert (stream.report["tier"], stream.report["reason"]) == ("device", "private")
        named = world.chat(model="device", **PRIVATE)
        assert named.json()["outrider"]["tier"] == "device"
        assert not world.cloud.requests
        refused = world.chat(model="cloud", **PRIVATE)
        assert refused.status_code == 400
        assert "tiers.cloud.local" in refused.json()["error"]["message"]


def test_a_server_that_is_not_local_gets_no_private_request(make: Make) -> None:
    with make(device_options={"local": False}) as world:
        refused = world.chat(**PRIVATE)
        assert refused.status_code == 400
        assert "no tier is marked as local" in refused.json()["error"]["message"]
        assert world.chat().json()["outrider"]["tier"] == "device"


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("logprobs", "complaint"),
    [
        ("other", "they are for other tokens than the text"),
        ("odd", "there are none"),
        ("none", "there are none"),
    ],
)
@both_ways
def test_log_probabilities_that_cannot_be_used(
    make: Make, logprobs: Any, complaint: str, is_streamed: bool
) -> None:
    """Found in an answer, though the operator says that there are some."""
    watch = PlannedWatch("commit", at=1)
    script = MockScript(pieces=DEVICE.pieces, logprobs=logprobs)
    with make(watch, device=script, device_options={"logprobs": "on"}) as world:
        text, report = answer(world, is_streamed)
        assert text == DEVICE_TEXT
        assert watch.logprobs == []
        assert report["reason"].endswith(f"log-probabilities not used: {complaint}")
        assert world.count('outrider_cascade_untrusted_total{tier="device"}') == 1


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (DEVICE, ""),
        (MockScript(pieces=DEVICE.pieces, logprobs="none"), "it sends none"),
        (MockScript(pieces=DEVICE.pieces, logprobs="other"), "other tokens"),
        (MockScript(pieces=DEVICE.pieces, logprob=0.0), "all are 0"),
        (MockScript(toxic=Toxic(kind="status", status=400)), "it refuses the request for them"),
    ],
)
def test_what_the_server_tells_is_known_from_the_start(
    make: Make, script: MockScript, words: str
) -> None:
    with make(PlannedWatch("commit", at=1), device=script) as world:
        small = world.context.upstream.small
        assert small is not None
        wait_for(lambda: small.tells_logprobs is not None)
        assert small.tells_logprobs is (words == "")
        assert words in small.complaint
        assert words in small.summary
        if script.toxic is None:
            world.stream()
            assert ("logprobs" in asked(world)[0].document) is (words == "")


def test_a_server_that_is_down_at_the_start_is_asked_again(make: Make) -> None:
    fails = iter([True])
    broken = MockScript(toxic=Toxic(kind="status", status=503))
    with make(device=lambda _: broken if next(fails, False) else DEVICE) as world:
        small = world.context.upstream.small
        assert small is not None
        wait_for(lambda: small.tells_logprobs is True)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        (("the same ",) * 12, "it repeats itself"),
        (("I ", "don\u2019t ", "know ", "that."), "it says that it cannot answer"),
        ((" ", " "), "it is empty"),
    ],
)
def test_text_that_shows_its_own_fault(make: Make, pieces: tuple[str, ...], fault: str) -> None:
    """Whatever its log-probabilities; here there are none."""
    script = MockScript(pieces=pieces, logprobs="none")
    with make(PlannedWatch("commit"), device=script) as world:
        stream = world.stream()
        assert stream.text == CLOUD_TEXT
        assert fault in stream.report["reason"]


def test_held_text_goes_when_time_is_up(make: Make) -> None:
    """The hold has a limit; what came until then decides."""
    script = MockScript(pieces=DEVICE.pieces, gap_s=0.2)
    watch = PlannedWatch("commit")
    with make(watch, device=script) as world:
        world.policy.hold_back_s = 0.05
        stream = world.stream()
        assert stream.text == DEVICE_TEXT
        assert watch.asked[-1] == "time"
        assert 1 <= stream.report["held_tokens"] < len(DEVICE.pieces)


def test_log_probabilities_that_the_client_asks_for_are_shown(make: Make) -> None:
    with make(PlannedWatch("commit", at=2)) as world:
        stream = world.stream(logprobs=True, top_logprobs=3)
        told = [
            entry["token"]
            for chunk in stream.chunks
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {}).get("content", ())
        ]
        assert "".join(told) == DEVICE_TEXT
        assert asked(world)[0].document["top_logprobs"] == 3


def test_calls_of_tools_are_judged_without_their_text(make: Make) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    script = MockScript(
        pieces=(), num_pieces=0, tool_calls=(ToolCall(name="look", arguments='{"a": 1}'),)
    )
    with make(PlannedWatch("commit"), device=script) as world:
        stream = world.stream(tools=tools)
        assert stream.report["tier"] == "device"
        assert any(c["delta"].get("tool_calls") for x in stream.chunks for c in x["choices"])


def test_several_answers_are_not_watched(make: Make) -> None:
    watch = PlannedWatch("escalate", at=1)
    with make(watch) as world:
        body = world.chat(n=2).json()
        assert body["outrider"]["tier"] == "device"
        assert len(body["choices"]) == 2
        assert watch.asked == []


def test_a_refusal_of_the_small_server_is_not_the_last_word(make: Make) -> None:
    """Its context may be too short for what the cloud can read."""
    with make(device=lambda r: MockScript(toxic=Toxic(kind="status", status=400))) as world:
        stream = world.stream()
        assert stream.text == CLOUD_TEXT
        assert stream.report["hand_off"] == "capability"


def test_when_the_server_breaks_off_the_cloud_goes_on(make: Make) -> None:
    script = MockScript(pieces=DEVICE.pieces, toxic=Toxic(kind="reset", after_events=3))
    with make(PlannedWatch("commit", at=1), tier={"server": "vllm"}) as world:
        world.clouds[-1].script = script  # not of the probe at the start, which would be repeated
        stream = world.stream()
        assert stream.text.startswith("".join(DEVICE.pieces[:2]))
        assert stream.report["tier"] == "cloud"
        assert stream.error is None


def test_when_the_cloud_that_took_over_breaks_off_the_server_goes_on(make: Make) -> None:
    broken = MockScript(pieces=CLOUD.pieces, toxic=Toxic(kind="reset", after_events=2))
    device = {"server": "llama_cpp", "continues": True}
    options = {"clouds": (broken,), "device_options": device}
    with make(PlannedWatch("escalate", at=1), **options) as world:
        stream = world.stream()
        assert stream.text == "".join(CLOUD.pieces[:2]) + DEVICE_TEXT
        assert stream.report["tier"] == "device"
        assert stream.is_done
        assert asked(world)[-1].document["continue_final_message"] is True
        assert len(asked(world)) == 2


def test_a_client_that_leaves_while_text_is_held_leaves_nothing_running(make: Make) -> None:
    script = MockScript(pieces=DEVICE.pieces, gap_s=5.0)
    with make(PlannedWatch("commit")) as world:
        world.clouds[-1].script = script  # not of the probe at the start

        def leave() -> None:
            try:
                world.http.post(
                    "/v1/chat/completions",
                    json={
                        "model": "auto",
                        "messages": [{"role": "user", "content": "Hi"}],
                        "stream": True,
                    },
                    timeout=0.3,
                )
            except Exception:  # noqa: BLE001 - that is the point
                return

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(10)
        tier = world.context.upstream.tiers["device"]
        deadline_s = time.monotonic() + 10
        while any(replica.in_flight for replica in tier.replicas.replicas):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_the_route_is_told_without_an_answer(make: Make) -> None:
    with make(PlannedWatch("commit")) as world:
        body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
        report = world.http.post("/v1/route", json=body).json()
        read_answer(RouteReport, report)
        assert (report["tier"], report["quality"]) == ("device", 0.4)
        assert report["cascade"]["hold_back_tokens"] == 16
        assert not asked(world)


def test_the_route_of_a_key_without_the_local_models_ends_upstream(
    make: Make, tmp_path: Path
) -> None:
    database = {"database_url": f"sqlite:///{tmp_path}/keys.db", "keys": {"refresh_s": 0.02}}
    with make(local=("large",), **database) as world:
        scopes = Scopes(tiers=frozenset({"device", "cloud"}))
        key = world.context.tenancy.keys.store.create(KeyOrder(name="k", scopes=scopes))
        mine = {"authorization": f"Bearer {key.text}"}
        wait_for(lambda: world.http.get("/v1/models").status_code == 401)
        world.policy.tier = "large"
        body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
        report = world.http.post("/v1/route", json=body, headers=mine)
        assert report.status_code == 200, report.text
        assert report.json()["tier"] == world.chat(headers=mine).json()["outrider"]["tier"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"handoff.small": "devise"}, "unknown upstream tier; did you mean device?"),
        ({"handoff.small": "device", "handoff.tier": "device"}, "name two tiers"),
        ({"handoff.small": "device", "models.small": "x"}, "a small model is loaded here as well"),
        ({"handoff.small": "device"}, "nothing can take over"),
    ],
)
def test_settings_that_contradict_each_other(flags: dict[str, Any], words: str) -> None:
    base = {"models.large": "none", "models.small": "none", "tiers.device.url": "http://a/v1"}
    with pytest.raises(SettingsError) as error:
        load_settings(environ={}, flags={**base, **flags})
    assert words in str(error.value)
