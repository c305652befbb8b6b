"""Batches of requests, greedy and sampled, of many lengths."""

from collections.abc import Iterable

from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.verifier.params import Tier
from tests.engines import make_request, random_prompt

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
    """Twelve requests with options of many kinds."""
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


def long_requests(
    lengths: Iterable[int], *, max_tokens: int = 40, tier: Tier = "large"
) -> list[EngineRequest]:
    """Two of each length, the second one longer by a few tokens, so that prefixes are found.

    Those with an odd length are sampled.
    """
    return [
        make_request(
            f"{length}-{more}",
            random_prompt(220, seed=length)[: length + 9 * more],
            max_tokens=max_tokens,
            tier=tier,
            temperature=0.8 * (length % 2),
            seed=length,
        )
        for length in lengths
        for more in (0, 1)
    ]
