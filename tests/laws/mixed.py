"""One mixed batch of requests, greedy and sampled, and the right answers to it."""

from dataclasses import replace
from functools import cache

from outrider.engine.request import EngineRequest, SpeculationParams
from tests.engines import Answer, Pair, make_engine, make_request, random_prompt, serve, texts

SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.95},
)
LENGTHS = (1, 9, 15, 16, 17, 31, 32, 33, 48, 70, 95, 130)


def mixed_requests(*, speculation: SpeculationParams | bool = True) -> list[EngineRequest]:
    return [
        make_request(
            f"r{number}",
            random_prompt(length, seed=number),
            max_tokens=12 + 3 * (number % 8),
            speculation=speculation,
            seed=1000 + number,
            choice_index=number % 3,
            **SAMPLINGS[number % len(SAMPLINGS)],
        )
        for number, length in enumerate(LENGTHS)
    ]


def plainly(pair: Pair, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Each request alone, decoded token by token, nothing shared."""
    return {
        request.request_id: [*_plain(pair, replace(request, request_id="plain", **_OF_DRAFTS))]
        for request in requests
    }


# What only a drafter reads: the plain answer to a request is computed once for all of its values.
_OF_DRAFTS = {"speculation": SpeculationParams(enabled=False), "prediction_token_ids": ()}


@cache
def _plain(pair: Pair, request: EngineRequest) -> tuple[int, ...]:
    engine = make_engine(pair, speculates=False, prefix_caching=False)
    (tokens,) = texts(serve(engine, [request])).values()
    return tuple(tokens)


def total(answers: dict[str, Answer], name: str) -> int:
    return sum(getattr(answer.stats, name) for answer in answers.values())
