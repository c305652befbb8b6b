"""What is taken out of requests that go to tiers elsewhere."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.checks.redaction import redaction
from tests.gateway.checks.services import running_service
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import World

CARD = "4111 1111 1111 1111"
TEXT = f"Mail ann@example.com, pay {CARD}, use sk-abcdefghijklmnop1234!"
REDACTED = "Mail [email], pay [card], use [secret]!"
REDACT = {"private": {"redact": ["email", "card", "key"]}}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "text",
    [
        "token = secrets.token_hex(), password: hunter2",  # code, and no form of a key
        "1700000000000 is a moment in milliseconds",
        "+49 30 1234567",  # not asked for
    ],
)
def test_other_texts_go_as_they_are(open_world: OpenWorld, text: str) -> None:
    with open_world(checks=REDACT) as world:
        world.chat(model="cloud", messages=[{"role": "user", "content": text}])
        assert text in str(world.cloud.requests[0].document)


def ask_chat(world: World, model: str) -> None:
    tool = {"name": "pay", "arguments": f'{{"card":"{CARD}"}}'}
    call = {"id": "call_1", "type": "function", "function": tool}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": TEXT},
    ]
    assert world.chat(model=model, messages=messages).status_code == 200


def ask_completion(world: World, model: str) -> None:
    asked = {"model": model, "prompt": TEXT}
    assert world.http.post("/v1/completions", json=asked).status_code == 200


def ask_messages(world: World, model: str) -> None:
    asked = {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": TEXT}]}
    assert world.http.post("/v1/messages", json=asked).status_code == 200


@pytest.mark.slow_cases
@pytest.mark.parametrize("ask", [ask_chat, ask_completion, ask_messages])
def test_a_tier_elsewhere_gets_nothing_private(
    open_world: OpenWorld, ask: Callable[[World, str], None]
) -> None:
    with open_world(checks=REDACT) as world:
        ask(world, "cloud")
        sent = str(world.cloud.requests[0].document)
        assert REDACTED in sent
        for private in ("ann@example.com", CARD, "sk-abcdef"):
            assert private not in sent


def test_a_copy_to_another_tier_is_redacted_too(open_world: OpenWorld) -> None:
    mirror = {"tier": "shadow", "share": 1.0}
    with open_world(checks=REDACT, mirror=mirror, mirrored=MockScript()) as world:
        ask_chat(world, "cloud")
        wait_for(lambda: len(world.clouds[1].requests) == 1)
        assert REDACTED in str(world.clouds[1].requests[0].document)


def test_embeddings_are_redacted(open_world: OpenWorld) -> None:
    answer = {"object": "list", "data": []}
    with running_service(lambda _: answer) as far:
        tier = {"endpoints": ["embeddings"], "url": far.url.removesuffix("/check"), "model": "m"}
        with open_world(checks=REDACT, tiers={"media": tier}) as world:
            asked = {"model": "media", "input": [TEXT]}
            assert world.http.post("/v1/embeddings", json=asked).status_code == 200
            assert far.questions[-1]["input"] == [REDACTED]
            asked["input"] = [1, 2, 3]
            assert world.http.post("/v1/embeddings", json=asked).status_code == 400


def test_models_of_this_machine_see_the_text(
    open_world: OpenWorld, encode: Callable[[str], list[int]]
) -> None:
    with open_world(checks=REDACT) as world:
        world.chat(model="large", messages=[{"role": "user", "content": TEXT}])
        prompt = list(world.engine.submitted[-1].prompt_token_ids)
        ids = encode(f"\n{TEXT}")
        assert any(prompt[i : i + len(ids)] == ids for i in range(len(prompt)))
    with open_world(checks=REDACT, tier={"local": True}) as world:
        ask_chat(world, "cloud")
        assert TEXT in str(world.cloud.requests[0].document)


def test_slow_redaction_leaves_threads_to_others() -> None:
    is_over, working = threading.Event(), threading.Semaphore(0)
    num_working = 0

    def slow(text: str) -> str:
        nonlocal num_working
        num_working += 1
        working.release()
        is_over.wait()
        return f"[{text}]"

    async def run() -> list[bytes]:
        redact = redaction(slow, is_slow=True)
        tasks = [asyncio.create_task(redact(b'{"input":"a"}')) for _ in range(20)]
        for _ in range(4):
            assert await asyncio.to_thread(working.acquire, timeout=60)
        assert num_working == 4
        is_over.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [b'{"input":"[a]"}'] * 20
