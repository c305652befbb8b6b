"""Requests drawn at random, as no gateway would make them: no step raises, all of them end.

Each engine serves a few of them beside two ordinary requests, whose texts are what they are alone;
tiers are changed, answers kept on their tier and requests aborted at every moment. What the
constructors and `submit` refuse, they refuse by the exceptions that they name.
"""

import math
import random
from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

import pytest

from outrider.engine.core import Engine
from outrider.engine.errors import EngineError
from outrider.engine.events import Failed, Finished, TokensEmitted
from outrider.engine.request import (
    NO_OBJECTIVE,
    EngineRequest,
    GrammarSpec,
    LatencyObjective,
    SpeculationParams,
)
from outrider.gateway.engines.backends.wire import Events, encode
from outrider.verifier.params import SOURCES, TIERS, CascadeParams, SamplingParams
from tests.engines import (
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    texts,
)
from tests.grammars import schema_spec, shipped_compiler

NUM_ENGINES = 3
NUM_STRANGE = 4
MOST_STEPS = 600
GRAMMARS = (
    GrammarSpec(kind="json"),
    schema_spec({"type": "object"}),
    schema_spec({"type": "\ud800"}),
    schema_spec({"enum": ["\ud800"]}),
    schema_spec(False),
    GrammarSpec(kind="regex", text="[a-c]{2,5}"),
    GrammarSpec(kind="regex", text="("),
    GrammarSpec(kind="regex", text="\ud800"),
    GrammarSpec(kind="choice", text='["a", "b"]'),
    GrammarSpec(kind="choice", text='{"a": 1}'),
    GrammarSpec(kind="grammar", text='root ::= "a"'),
    GrammarSpec(kind="grammar", text="root ::= root"),
    GrammarSpec(kind="parts", text="{}"),
)

Drawn = TypeVar("Drawn")


class Strange:
    """Draws requests; most fields are ordinary, some are at or beyond their end."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size

    def sometimes(self, draw: Callable[[], Drawn], else_: Drawn, chance: float = 0.2) -> Drawn:
        return draw() if self.rng.random() < chance else else_

    def valid(self, make: Callable[[], Drawn]) -> Drawn:
        """The first that its constructor takes."""
        while True:
            try:
                return make()
            except ValueError:
                continue

    def number(self) -> float:
        ends = (0.0, -0.0, 1.0, 2.0, -2.0, 1e-6, 1.1e-6, 5e-324, 1e-320, 1e308, 100.0, 1e6)
        return self.rng.choice((*ends, math.inf, -math.inf, math.nan, *(self.rng.random(),) * 6))

    def count(self) -> int:
        ends = (0, 1, 2, -1, 255, 256, 2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, 10**400)
        return self.rng.choice((*ends, *(self.rng.randrange(1, 40),) * 9))

    def token(self) -> int:
        ends = (0, self.vocab_size - 1, self.vocab_size, -1, 2**31 - 1, 2**40)
        return self.rng.choice((*ends, *(self.rng.randrange(self.vocab_size),) * 20))

    def sampling(self) -> SamplingParams:
        choice, sometimes = self.rng.choice, self.sometimes
        return SamplingParams(
            max_tokens=sometimes(self.count, self.rng.randrange(1, 20)),
            temperature=sometimes(self.number, choice((0.0, 0.8))),
            top_k=sometimes(self.count, 0),
            top_p=sometimes(self.number, 1.0),
            min_p=sometimes(self.number, 0.0),
            seed=sometimes(self.count, 1),
            choice_index=sometimes(self.count, 0),
            stop_token_ids=sometimes(lambda: self.tokens(choice((1, 3, 256))), ()),
            num_logprobs=sometimes(self.count, None),
            presence_penalty=sometimes(self.number, 0.0),
            frequency_penalty=sometimes(self.number, 0.0),
            repetition_penalty=sometimes(self.number, 1.0),
            logit_bias=sometimes(
                lambda: tuple((t, self.number()) for t in self.tokens(choice((1, 3)))), ()
            ),
            min_tokens=sometimes(self.count, 0),
        )

    def tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.token() for _ in range(length))

    def plain_tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.vocab_size) for _ in range(length))

    def speculation(self) -> SpeculationParams:
        return SpeculationParams(
            enabled=self.rng.random() < 0.8,
            max_draft_nodes=self.sometimes(self.count, None),
            max_draft_depth=self.sometimes(self.count, None),
            sources=self.sometimes(lambda: tuple(self.rng.sample(SOURCES, 2)), None),
            inter_token_s=self.sometimes(self.number, None),
        )

    def objective(self) -> LatencyObjective:
        return LatencyObjective(
            ttft_s=self.sometimes(self.number, None, 0.5),
            inter_token_s=self.sometimes(self.number, None, 0.5),
            is_batch=self.rng.random() < 0.3,
            refuses=self.rng.random() < 0.2,
            is_assumed=self.rng.random() < 0.2,
        )

    def request(self, number: int) -> EngineRequest:
        rng, sometimes, valid = self.rng, self.sometimes, self.valid
        length = rng.choice((0, 1, 2, 15, 16, 17, 40, 200))
        return EngineRequest(
            request_id=f"strange {number}",
            prompt_token_ids=sometimes(lambda: self.tokens(length), self.plain_tokens(length), 0.1),
            tier=rng.choice(TIERS),
            sampling=valid(self.sampling),
            speculation=valid(self.speculation),
            group_id=sometimes(lambda: "group", None),
            cache_salt=rng.choice(("", "salt")),
            arrival_s=sometimes(self.number, None, 0.1),
            return_hidden_state=rng.random() < 0.2,
            prediction_token_ids=sometimes(
                lambda: self.plain_tokens(rng.choice((1, 50, 100_000))), ()
            ),
            grammar=sometimes(lambda: rng.choice(GRAMMARS), None, 0.3),
            cascade=sometimes(lambda: valid(self.cascade), None),
            may_escalate=rng.random() < 0.3,
            tenant=rng.choice(("", "tenant")),
            weight=sometimes(self.number, 1.0, 0.1),
            priority=rng.choice((-1, 0, 1)),
            objective=sometimes(lambda: valid(self.objective), NO_OBJECTIVE),
            traces=rng.random() < 0.2,
        )

    def cascade(self) -> CascadeParams:
        return CascadeParams(
            alpha=self.number(), rule="opt" if self.rng.random() < 0.5 else "token_specific"
        )


def ordinary() -> list[EngineRequest]:
    prompts = heldout_prompts(2)
    return [
        make_request("greedy", prompts[0], max_tokens=16),
        make_request("sampled", prompts[1], max_tokens=16, temperature=0.8, seed=3),
    ]


@cache
def alone() -> dict[str, list[int]]:
    return texts(serve(make_engine(shipped_pair()), ordinary()))


def command(engine: Engine, rng: random.Random, request_id: str) -> None:
    """Send a random command, as a gateway may at any time."""
    try:
        match rng.randrange(4):
            case 0:
                engine.abort(request_id)
            case 1:
                engine.keep_on_tier(request_id)
            case _:
                keeps_answer = rng.random() < 0.5
                engine.switch_tier(request_id, rng.choice(TIERS), keeps_answer=keeps_answer)
    except EngineError:
        engine.keep_on_tier(request_id)


class Run:
    """An engine with ordinary requests in it, and the strange ones that it was given."""

    def __init__(self, seed: int) -> None:
        compiler = shipped_compiler()
        self.engine = make_engine(
            shipped_pair(),
            on_device=seed % 2 == 1,
            large_blocks=80,
            small_blocks=80,
            grammars={"large": compiler, "small": compiler},
        )
        strange = Strange(seed, self.engine._runners["large"].vocab_size)
        self.rng = strange.rng
        self.waiting = [
            strange.valid(partial(strange.request, number)) for number in range(NUM_STRANGE)
        ]
        self.live: set[str] = set()
        self.told: dict[str, list[int]] = {name: [] for name in alone()}
        self.num_taken = 0
        for request in ordinary():
            self.engine.submit(request)

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.live or self.engine.has_work)

    def step(self) -> None:
        if self.waiting and self.rng.random() < 0.5:
            self.submit(self.waiting.pop())
        if self.live and self.rng.random() < 0.2:
            command(self.engine, self.rng, self.rng.choice(sorted(self.live)))
        if not self.engine.has_work:
            for request_id in self.live:  # held answers wait for a word
                self.engine.keep_on_tier(request_id)
        events = self.engine.step()
        encode(Events.pack(events))
        for event in events:
            if isinstance(event, Finished | Failed):
                self.live.discard(event.request_id)
            elif isinstance(event, TokensEmitted) and event.request_id in self.told:
                self.told[event.request_id] += event.token_ids

    def submit(self, request: EngineRequest) -> None:
        try:
            self.engine.submit(request)
        except EngineError:
            return
        self.live.add(request.request_id)
        self.num_taken += 1


def serve_strange(seed: int) -> int:
    """Returns how many strange requests were taken in."""
    run = Run(seed)
    for _ in range(MOST_STEPS):
        if run.is_over:
            break
        run.step()
    assert run.is_over, "a request does not end"
    assert_idle(run.engine)
    assert run.told == alone()
    return run.num_taken


@pytest.mark.filterwarnings("error")
def test_no_request_makes_a_step_raise_or_changes_its_neighbours() -> None:
    assert sum(serve_strange(seed) for seed in range(NUM_ENGINES)) >= NUM_ENGINES


@pytest.mark.long
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("block", range(20))
def test_no_request_of_many(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        serve_strange(seed)
