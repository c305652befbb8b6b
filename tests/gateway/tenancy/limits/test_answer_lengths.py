"""Tokens reserved for an answer without a maximum length."""

import random
import threading

from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.tenancy.limits.answer_lengths import AnswerLengths


def test_nothing_is_known_at_first() -> None:
    lengths = AnswerLengths(default_tokens=300)
    assert lengths.expected("large", "chat", at_most=4000) == 300
    assert lengths.expected("large", "chat", at_most=100) == 100
    assert lengths.expected("large", "chat", at_most=0) == 1
    for _ in range(19):
        lengths.learn("large", "chat", 10)
    assert lengths.expected("large", "chat", at_most=4000) == 300
    lengths.learn("large", "chat", 10)
    assert lengths.expected("large", "chat", at_most=4000) == 10
    assert lengths.expected("large", "completion", at_most=4000) == 300
    assert lengths.expected("small", "chat", at_most=4000) == 300


@given(st.lists(st.integers(0, 5000), min_size=20, max_size=700))
def test_it_is_the_95th_percentile_of_the_last_512(answers: list[int]) -> None:
    lengths = AnswerLengths()
    for num_tokens in answers:
        lengths.learn("large", "chat", num_tokens)
    expected = lengths.expected("large", "chat", at_most=10_000)
    recent = answers[-512:]
    assert sum(n <= expected for n in recent) >= 0.95 * len(recent)
    assert expected <= 1 or sum(n < expected for n in recent) < 0.95 * len(recent)


def test_answers_that_were_cut_do_not_shorten_the_next_ones() -> None:
    """Reserved, cut at that, learnt, reserved less: it must not go down like that."""
    rng = random.Random(0)
    lengths = AnswerLengths()
    for _ in range(3000):
        wanted = rng.randint(1, 1000)
        given_tokens = lengths.expected("large", "chat", at_most=10_000)
        lengths.learn("large", "chat", min(wanted, given_tokens), was_cut=wanted > given_tokens)
    assert lengths.expected("large", "chat", at_most=10_000) > 800


def test_names_without_end_do_not_fill_the_memory() -> None:
    lengths = AnswerLengths()
    for i in range(5000):
        lengths.learn(f"tier{i}", "chat", 5)
    assert lengths.num_kinds <= 1024


def test_threads_do_not_disturb_each_other() -> None:
    lengths = AnswerLengths()

    def learn() -> None:
        for i in range(2000):
            lengths.learn("large", "chat", i % 100)
            lengths.expected("large", "chat", at_most=1000)

    threads = [threading.Thread(target=learn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(512):
        lengths.learn("large", "chat", 7)
    assert lengths.expected("large", "chat", at_most=1000) == 7
