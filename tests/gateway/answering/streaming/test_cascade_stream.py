"""Small answers watched, held, kept and given up: the gateway on the shipped pair's engine."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider import draft
from outrider.engine.request import GrammarSpec
from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.text.chat import ChatTokenizer, Prompt
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.wiring.build import build_client
from outrider.router.watch import Action
from outrider.verifier.params import SamplingParams
from tests.gateway.watches import Outcome, PlannedWatch, unwatched, watched_job

QUESTION = "What is 17 + 48, and how do you get there?"
POSITIONS = [None, *range(21)]


@pytest.fixture(scope="module")
def pair() -> ChatTokenizer:
    return ChatTokenizer.load(Path(draft.__file__).parent / "pair" / "large")


@asynccontextmanager
async def running_engine() -> AsyncIterator[EngineClient]:
    settings = load_settings(
        flags={
            "engine.process": False,
            "engine.dtype": "float32",
            "engine.device": "cpu",
            "engine.num_threads": 1,
            "engine.num_blocks": 600,
            "speculation.adaptive": False,
        },
        environ={},
        config_file=None,
    )
    client = build_client(settings)
    await client.start()
    try:
        yield client
        await _until_idle(client)
    finally:
        await client.close()


async def _until_idle(client: EngineClient) -> None:
    """Nothing runs, waits or holds a block: also not what was held, settled or given up."""
    for _ in range(200):
        stats = await client.stats()
        held = [
            (tier.num_running, tier.num_waiting, tier.num_used_blocks)
            for tier in stats.tiers.values()
        ]
        if not any(map(any, held)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"something is held: {held}")


async def render(tokenizer: ChatTokenizer) -> Prompt:
    body = {"model": "auto", "messages": [{"role": "user", "content": QUESTION}]}
    return await tokenizer.render_chat(ChatRequest.model_validate(body).messages)


def job_for(
    tokenizer: ChatTokenizer,
    prompt: Prompt,
    watches: Sequence[PlannedWatch],
    *,
    name: str,
    sampling: SamplingParams,
    grammar: GrammarSpec | None = None,
    **fields: Any,
) -> Job:
    """One choice for each watch; `name` keeps the requests of several jobs apart."""
    job = watched_job(tokenizer, watches, **fields)
    plans = tuple(
        msgspec.structs.replace(
            plan,
            request=replace(
                plan.request,
                request_id=f"{name}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(sampling, choice_index=index),
                grammar=grammar,
            ),
        )
        for index, plan in enumerate(job.choices)
    )
    return msgspec.structs.replace(job, choices=plans)


async def collect(client: EngineClient, job: Job) -> Outcome:
    generation = Generation(client, job, GatewayMetrics())
    deltas = [delta async for step in generation.steps() for delta in step]
    return Outcome(generation, deltas, [])


def sampling_of(tokenizer: ChatTokenizer, temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=0.95 if temperature else 1.0,
        seed=7,
        stop_token_ids=tokenizer.stop_token_ids,
        num_logprobs=0,
    )


def same(outcome: Outcome, expected: Outcome, index: int = 0) -> bool:
    """Text, end and tokens: log-probabilities name each token of the answer."""
    return (
        outcome.content(index) == expected.content(index)
        and outcome.ends(index) == expected.ends(index)
        and outcome.logprobs(index) == expected.logprobs(index)
        and outcome.generation.choices[index].usage.num_tokens
        == expected.generation.choices[index].usage.num_tokens
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["text", "stop", "grammar"])
async def test_every_position(pair: ChatTokenizer, temperature: float, kind: str) -> None:
    """Whenever it is decided, the client gets exactly what the chosen tier says by itself."""

    async with running_engine() as client:
        prompt = await render(pair)
        grammar = None
        if kind == "grammar":
            schema = {
                "type": "object",
                "properties": {"sum": {"type": "integer"}, "why": {"type": "string"}},
                "required": ["sum", "why"],
                "additionalProperties": False,
            }
            grammar = GrammarSpec(kind="json_schema", text=json.dumps(schema))

        def job(name: str, watch: PlannedWatch, stops: tuple[str, ...] = ()) -> Job:
            sampling = sampling_of(pair, temperature, 28)
            return job_for(
                pair, prompt, [watch], name=name, sampling=sampling, grammar=grammar, stops=stops
            )

        plain = {
            tier: await collect(client, unwatched(job(f"plain-{tier}", PlannedWatch()), tier))
            for tier in ("small", "large")
        }
        stops: tuple[str, ...] = ()
        if kind == "stop":  # in the middle of each answer, over the ends of tokens
            stops = tuple(text[len(text) // 2 :][:5] for o in plain.values() if (text := o.text()))
            plain = {
                tier: await collect(
                    client, unwatched(job(f"cut-{tier}", PlannedWatch(), stops), tier)
                )
                for tier in ("small", "large")
            }
        assert plain["small"].text()
        assert plain["large"].text()
        actions: tuple[Action, ...] = ("commit", "escalate")
        # With a grammar each step costs more, and it is the engine that has to get it right.
        cases = list(product(actions, POSITIONS[:: 4 if kind == "grammar" else 1]))
        outcomes = await asyncio.gather(
            *(
                collect(client, job(f"{action}-{at}", PlannedWatch(action, at), stops))
                for action, at in cases
            )
        )
        for (action, at), outcome in zip(cases, outcomes, strict=True):
            expected = plain["large" if action == "escalate" else "small"]
            assert same(outcome, expected), (action, at, outcome.text(), expected.text())
            watch = outcome.generation.watches[0]
            assert watch.escalated == (action == "escalate")
            num_reused = outcome.generation.choices[0].usage.num_reused_tokens
            assert num_reused <= watch.num_retracted_tokens


@pytest.mark.slow
async def test_choices_decide_alone_and_share_the_prompt(pair: ChatTokenizer) -> None:
    async with running_engine() as client:
        prompt = await render(pair)
        sampling = sampling_of(pair, 0.8, 28)
        watches = [
            PlannedWatch("commit", 3),
            PlannedWatch("escalate", 16),
            PlannedWatch("escalate"),
            PlannedWatch("commit"),
        ]
        job = job_for(pair, prompt, watches, name="several", sampling=sampling)
        outcome = await collect(client, job)
        for index, watch in enumerate(watches):
            tier = "large" if watch.action == "escalate" else "small"
            plain = unwatched(job_for(pair, prompt, watches, name=tier, sampling=sampling), tier)
            assert same(outcome, await collect(client, plain), index), index
            assert watch.hidden_state is not None  # the probe's, of each choice
            assert watch.logprobs
            assert max(watch.logprobs) <= 0.0
        assert outcome.generation.tier == "large"


async def test_the_large_model_continues_behind_the_sent_text(pair: ChatTokenizer) -> None:
    """In mid-stream: what is there stays, and it is one answer of at most max_tokens."""

    async with running_engine() as client:
        prompt = await render(pair)
        sampling = sampling_of(pair, 0.0, 40)
        plain = await collect(
            client,
            unwatched(
                job_for(pair, prompt, [PlannedWatch()], name="plain", sampling=sampling), "small"
            ),
        )
        for at in (4, 9):
            watch = PlannedWatch("commit", at=2, continue_at=at)
            job = job_for(
                pair, prompt, [watch], name=f"on-{at}", sampling=sampling, mid_stream=True
            )
            outcome = await collect(client, job)
            kept = pair.decode(plain.logprobs()[:at])
            assert outcome.text().startswith(kept)
            assert len(outcome.ends()) == 1
            usage = outcome.generation.choices[0].usage
            assert at < usage.num_tokens <= 40
            assert outcome.generation.tier == "large"
            assert pair.decode(outcome.logprobs()) == outcome.text()


@pytest.mark.slow
async def test_whoever_leaves_whenever_nothing_stays_held(pair: ChatTokenizer) -> None:
    """Before the first token, among held ones, while an answer moves, in mid-stream, or never."""

    async with running_engine() as client:
        prompt = await render(pair)
        rng = random.Random(5)

        async def one(number: int) -> None:
            action: Action = rng.choice(("commit", "escalate"))
            watches = [
                PlannedWatch(action, rng.choice((0, 1, 4, 16, None)), rng.choice((None, 20)))
                for _ in range(rng.choice((1, 1, 3)))
            ]
            job = job_for(
                pair,
                prompt,
                watches,
                name=f"leaves-{number}",
                sampling=sampling_of(pair, rng.choice((0.0, 0.8)), 28),
                mid_stream=True,
                hold_back_s=rng.choice((None, 0.0, 0.05)),
            )
            patience_s = rng.choice((0.0, 0.02, 0.3, 60.0))
            with contextlib.suppress(TimeoutError):
                outcome = await asyncio.wait_for(collect(client, job), patience_s)
                assert all(len(outcome.ends(index)) == 1 for index in range(len(watches)))

        await asyncio.gather(*map(one, range(60)))
