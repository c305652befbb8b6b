"""Requests whose predictions are right, wrong here and there, or of something else."""

import random
from dataclasses import replace

from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.verifier.params import Source
from tests.engines import (
    make_request,
    random_prompt,
    tiny_pair,
)
from tests.laws.same_answers import plainly


def with_prediction(request: EngineRequest, prediction: list[int]) -> EngineRequest:
    return replace(request, prediction_token_ids=tuple(prediction))


def requests_with_predictions(sources: tuple[Source, ...] | None) -> list[EngineRequest]:
    """Predictions that are right, wrong here and there, and of something else."""
    rng = random.Random(3)
    plain = [
        make_request(
            f"r{number}",
            random_prompt(12 + 9 * number, seed=number),
            max_tokens=40,
            temperature=(0.0, 0.8, 1.3)[number % 3],
            seed=number,
            speculation=SpeculationParams(sources=sources),
        )
        for number in range(6)
    ]
    right = plainly(tiny_pair(), plain)
    wanted = []
    for number, request in enumerate(plain):
        prediction = list(right[request.request_id])
        if number % 3 == 1:
            for place in range(4, len(prediction), 9):
                prediction[place] = rng.randrange(3, 131)
            del prediction[20:23]
        elif number % 3 == 2:
            prediction = list(random_prompt(30, seed=90 + number))
        wanted.append(with_prediction(request, prediction))
    return wanted
