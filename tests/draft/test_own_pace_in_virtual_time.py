"""No request is slower for guesses, its own or others', in virtual time of recorded machines."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from benchmarks.simulate.processors import Processor
from tests.draft.test_virtual_time import by_processor
from tests.draft.virtual_machine import VirtualMachine

# Streams whose guesses are always right, never, and all between.
_AGREEMENTS = (0.0, 1.0, 0.5, 0.8, 0.9, 0.3, 0.7)
_NUM_TOKENS = 64
# First answers end at lengths that are spread evenly.
_GOLDEN = 0.618034


def closed_loop(
    processor: Processor, *, num_clients: int, num_answers: int, speculates: bool
) -> VirtualMachine:
    """Run clients that ask anew at each answer's end until so many answers have come."""
    machine, random = VirtualMachine(processor, agreement=0.0, speculates=speculates), Random(3)
    for client in range(num_clients):
        share = client * _GOLDEN % 1.0 or 1.0
        machine.submit(max(8, int(share * _NUM_TOKENS)), agreement=random.choice(_AGREEMENTS))
    while len(machine.deliveries) - len(machine.open) < num_answers:
        machine.step()
        while len(machine.open) < num_clients:
            machine.submit(_NUM_TOKENS, agreement=random.choice(_AGREEMENTS))
    return machine


def p99(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99))


def token_times(machine: VirtualMachine) -> list[float]:
    """Return each answer's seconds a token, from its first chunk to its last."""
    found = []
    for name, deliveries in machine.deliveries.items():
        if name not in machine.open:
            first, *others = deliveries
            num_tokens = sum(delivery.num_tokens for delivery in others)
            found.append((deliveries[-1].at_s - first.at_s) / num_tokens)
    return found


def gaps(machine: VirtualMachine) -> list[float]:
    """Return the seconds between any two chunks of an answer."""
    return [
        later.at_s - before.at_s
        for deliveries in machine.deliveries.values()
        for before, later in pairwise(deliveries)
    ]


@pytest.mark.slow
@by_processor("avx2", "avx512")
@pytest.mark.parametrize(("num_clients", "num_answers"), [(1, 12), (4, 24), (16, 48), (64, 128)])
def test_no_request_is_slower_for_guesses_its_own_or_others(
    processor: Processor, num_clients: int, num_answers: int
) -> None:
    """From the first request on, prompts beside it included."""
    with_guesses, plain = (
        closed_loop(
            processor, num_clients=num_clients, num_answers=num_answers, speculates=speculates
        )
        for speculates in (True, False)
    )
    assert p99(token_times(with_guesses)) <= 1.05 * p99(token_times(plain))
    if num_clients >= 3:
        assert p99(gaps(with_guesses)) <= 1.3 * p99(gaps(plain))
