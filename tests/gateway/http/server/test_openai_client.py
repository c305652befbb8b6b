"""The official openai client against a real server on a real socket."""

from collections.abc import Iterable
from typing import Any

import openai
import pytest

from outrider.engine.errors import QueueFullError
from tests.gateway.conftest import Server, wait_for
from tests.gateway.scripted_client import Script

HELLO = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "Please tell me about the lazy dog and the fox."}]


def drain(stream: Iterable[Any], into: list[Any]) -> None:
    """Like `into.extend(stream)`, but keeps what came before an exception."""
    for item in stream:
        into.append(item)  # noqa: PERF402


def test_whole_answer(server: Server, client: openai.OpenAI) -> None:
    server.says(
        "Hello there, how are you?",
        group=3,
        num_cached_tokens=4,
        num_restored_tokens=1,
        num_pulled_tokens=2,
    )
    answer = client.chat.completions.create(model="auto", messages=HELLO)
    (choice,) = answer.choices
    assert choice.message.content == "Hello there, how are you?"
    assert choice.finish_reason == "stop"
    (request,) = server.engine.submitted
    num_tokens = len(server.encode("Hello there, how are you?"))
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    outrider = answer.outrider
    assert outrider["cached_tokens_by_level"] == {"device": 1, "disk": 1, "peer": 2}
    assert outrider["tier"] == "small"
    assert outrider["reason"] == "router: short (5 <= 20)"
    assert outrider["accepted_tokens"] < outrider["drafted_tokens"]
    assert outrider["mean_emitted_tokens"] > 2
    assert 0 < outrider["ttft_s"] < 5
    assert outrider["queue_s"] == 0.25
    assert outrider["seed"] == request.sampling.seed  # drawn, since temperature defaults to 1
    assert request.sampling.temperature == 1.0


def test_stream(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello there, how are you?", group=2)
    with client.chat.completions.create(
        model="auto",
        messages=LONG,
        stream=True,
        seed=7,
        stream_options={"include_usage": True},
    ) as stream:
        assert stream.response.headers["x-outrider-tier"] == "large"
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content  # the first event already has text
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there, how are you?"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(server.encode(text))
    assert chunks[-1].outrider["tier"] == "large"
    assert chunks[-1].outrider["seed"] == 7
    assert all(getattr(chunk, "outrider", None) is None for chunk in chunks[:-1])


def test_stream_without_usage_ends_with_the_report(server: Server, client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="small", messages=HELLO, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].outrider["reason"] == "requested"
    assert chunks[-1].usage is None


def test_choices_are_told_apart(server: Server, client: openai.OpenAI) -> None:
    words = ["Hello", "there", "fox"]
    scripts = []
    for word in words:
        server.says(word * 3)
        scripts.append(server.engine.script)
    server.engine.script = lambda request: scripts[request.sampling.choice_index](request)
    answer = client.chat.completions.create(model="large", messages=HELLO, n=3, seed=5)
    assert [choice.message.content for choice in answer.choices] == [word * 3 for word in words]
    assert {request.group_id for request in server.engine.submitted} != {None}
    assert len({request.group_id for request in server.engine.submitted}) == 1
    assert len({request.request_id for request in server.engine.submitted}) == 3
    prompt = server.engine.submitted[0].prompt_token_ids
    assert answer.usage.prompt_tokens == len(prompt)

    stream = client.chat.completions.create(model="large", messages=HELLO, n=3, stream=True)
    texts = ["", "", ""]
    order = []
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
    assert texts == [word * 3 for word in words]
    assert order[:3] != [0, 0, 0]  # interleaved, not one after the other


def test_completions(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="large", prompt="Once upon a time", max_tokens=5)
    assert answer.choices[0].text == "Hello there!"
    (request,) = server.engine.submitted
    assert list(request.prompt_token_ids) == server.encode("Once upon a time")
    assert request.sampling.max_tokens == 5


@pytest.mark.parametrize("prompt", [["Hello", "the fox"], [[5, 6, 7], [8, 9]]])
def test_several_prompts(server: Server, client: openai.OpenAI, prompt: list) -> None:
    answer = client.completions.create(model="large", prompt=prompt, n=2, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    sent = [request.prompt_token_ids for request in server.engine.submitted]
    wanted = [tuple(server.encode(p)) if isinstance(p, str) else tuple(p) for p in prompt]
    assert sorted(sent) == sorted([wanted[0], wanted[0], wanted[1], wanted[1]])
    assert answer.usage.prompt_tokens == sum(map(len, wanted))


def test_token_ids_as_prompt(server: Server, client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="auto", prompt=[5, 6, 7], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there!"
    assert server.engine.submitted[0].prompt_token_ids == (5, 6, 7)


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert {"auto", "small", "large"} <= set(names)
    card = client.models.retrieve("large")
    assert card.outrider[0]["model_id"] == "test/large-model"
    assert client.models.retrieve("test/small-model").outrider[0]["tier"] == "small"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_have_the_right_class(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"

    with pytest.raises(openai.BadRequestError) as spoken:
        client.chat.completions.create(
            model="auto",
            messages=HELLO,
            modalities=["text", "audio"],
        )
    assert spoken.value.param == "modalities"
    assert "not supported" in spoken.value.message

    with pytest.raises(openai.BadRequestError) as context:
        client.chat.completions.create(model="auto", messages=HELLO, max_tokens=255)
    assert context.value.code == "context_length_exceeded"
    assert "255" in context.value.message
    assert "256" in context.value.message

    refusal = QueueFullError(num_waiting=512, retry_after_s=3.0)
    server.engine.script = lambda _: Script(refusal=refusal)
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="auto", messages=HELLO, stream=True)
    headers = full.value.response.headers
    assert headers["retry-after"] == "3"
    assert headers["retry-after-ms"] == "3000"
    assert headers["x-should-retry"] == "true"

    server.engine.is_ready = False
    with pytest.raises(openai.InternalServerError) as loading:
        client.chat.completions.create(model="auto", messages=HELLO)
    assert loading.value.status_code == 503
    assert loading.value.response.headers["retry-after"] == "1"


def test_the_client_retries_a_full_queue(server: Server, client: openai.OpenAI) -> None:
    patient = client.with_options(max_retries=2)
    refusal = QueueFullError(num_waiting=512, retry_after_s=0.01)
    normal = server.engine.script
    server.engine.script = lambda request: (
        Script(refusal=refusal) if len(server.engine.submitted) < 3 else normal(request)
    )
    answer = patient.chat.completions.create(model="auto", messages=HELLO)
    assert answer.choices[0].message.content == "Hello there!"
    assert len(server.engine.submitted) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_engine_dies_before_the_first_token(
    server: Server, client: openai.OpenAI, stream: bool
) -> None:
    server.engine.script = lambda _: Script(failure=("engine_died", "The engine stopped."))
    with pytest.raises(openai.InternalServerError) as died:
        client.chat.completions.create(model="auto", messages=HELLO, stream=stream)
    assert died.value.status_code == 503
    assert died.value.code == "engine_died"


@pytest.mark.parametrize("how", [{"failure": ("engine_died", "It stopped.")}, {"breaks_off": True}])
def test_engine_dies_midway(server: Server, client: openai.OpenAI, how: dict) -> None:
    server.says("Hello there", **how)
    stream = client.chat.completions.create(model="auto", messages=HELLO, stream=True)
    chunks = []
    with pytest.raises(openai.APIError) as died:
        drain(stream, chunks)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hello there"
    assert {chunk.choices[0].finish_reason for chunk in chunks} == {None}
    assert died.value.code == "engine_died"


def test_leaving_a_stream_aborts(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello there", hangs=True)
    stream = client.chat.completions.create(model="auto", messages=HELLO, n=2, stream=True)
    next(stream)
    assert len(server.engine.running) == 2
    stream.close()
    wait_for(lambda: len(server.engine.aborted) == 2)
    assert not server.engine.running


def test_leaving_while_waiting_for_the_first_token_aborts(
    server: Server, client: openai.OpenAI
) -> None:
    server.engine.script = lambda _: Script(hangs=True)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(
            model="auto", messages=HELLO, stream=True
        )
    wait_for(lambda: len(server.engine.aborted) == 1)


def test_leaving_a_whole_answer_aborts(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello there", hangs=True)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="auto", messages=HELLO)
    wait_for(lambda: len(server.engine.aborted) == 1)


def test_a_stop_string_aborts_the_sequence(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello there STOP and more of it", hangs=True)  # it would never end by itself
    stream = client.chat.completions.create(
        model="auto", messages=HELLO, stop=["STOP", "###"], stream=True
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello there "
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len(server.engine.aborted) == 1


def test_thinking_is_kept_apart(server: Server, client: openai.OpenAI) -> None:
    server.says("<think>\nthe fox</think>\n\nHello", group=2)
    answer = client.chat.completions.create(model="auto", messages=HELLO)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.reasoning_content == "the fox"
    num_thinking = answer.usage.completion_tokens_details.reasoning_tokens
    assert abs(num_thinking - len(server.encode("the fox"))) <= 1

    server.says("the fox</think>\n\nHello")
    stream = client.chat.completions.create(
        model="auto",
        messages=HELLO,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "the fox"
    assert "".join(d.content or "" for d in deltas) == "Hello"


def test_logprobs(server: Server, client: openai.OpenAI) -> None:
    top_ids = tuple(server.encode("ab"))
    server.says("Hello 漢", top_ids=top_ids)
    answer = client.chat.completions.create(
        model="auto", messages=HELLO, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode() == "Hello 漢"
    assert {entry.logprob for entry in entries} == {-0.25}
    assert [top.token for top in entries[0].top_logprobs] == ["a", "b"]

    stream = client.chat.completions.create(
        model="auto", messages=HELLO, logprobs=True, stream=True, stop=["zzz"]
    )
    streamed = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in entries]
    assert streamed[0].top_logprobs == []

    old = client.completions.create(model="large", prompt="x", logprobs=1).choices[0].logprobs
    assert old.top_logprobs[0] == {"a": -0.5, "Hell": -0.25}, "the token itself is among them"
    assert old.token_logprobs == [-0.25] * len(old.tokens)
    assert old.text_offset[:2] == [0, len(old.tokens[0])]
