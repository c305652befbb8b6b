"""A prediction is followed through edits: what an edit costs, and what is offered on the way."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.text.prediction import PredictionCursor


def numbers(count: int, seed: int = 1, vocab_size: int = 300) -> list[int]:
    """Text in which tokens come back, as they do in a real one."""
    rng = random.Random(seed)
    return [min(int(rng.paretovariate(0.6)), vocab_size) for _ in range(count)]


def count_right(prediction: list[int], answer: list[int], step: int = 1) -> int:
    """Tokens of the answer that were a first guess when their turn came."""
    cursor = PredictionCursor(prediction)
    right, text = 0, [-5, -6]  # a prompt's end
    for at in range(0, len(answer), step):
        firsts = {guess.token_ids[0] for guess in cursor.guesses(8)}
        right += step if answer[at] in firsts else 0
        text += answer[at : at + step]
        cursor.advance(text, len(answer[at : at + step]))
    return right


def edited(kind: str, size: int) -> tuple[list[int], list[int]]:
    """200 predicted tokens and the answer: `size` tokens in the middle come out differently."""
    prediction = numbers(200)
    other = numbers(size, seed=99)
    start, end = 90, 90 + size
    match kind:
        case "replace":
            return prediction, [*prediction[:start], *other, *prediction[end:]]
        case "insert":
            return prediction, [*prediction[:start], *other, *prediction[start:]]
        case _:
            return prediction, [*prediction[:start], *prediction[end:]]


def test_a_prediction_that_is_right_is_offered_whole() -> None:
    prediction = numbers(200)
    assert count_right(prediction, prediction) == 200
    (guess,) = PredictionCursor(prediction).guesses(64)
    assert guess.token_ids == prediction[:64]
    assert guess.edge_probs == sorted(guess.edge_probs)
    assert guess.edge_probs[0] > 0.8


@pytest.mark.parametrize("kind", ["replace", "insert", "delete"])
@pytest.mark.parametrize("size", [1, 3, 10, 40])
def test_an_edit_costs_itself_and_a_few_tokens(kind: str, size: int) -> None:
    prediction, answer = edited(kind, size)
    new = 0 if kind == "delete" else size
    lost = len(answer) - count_right(prediction, answer) - new
    assert lost <= 4


def test_edits_in_many_places() -> None:
    """Every 25 tokens something else: at least 80 % of what stayed is still offered."""
    rng = random.Random(3)
    prediction = numbers(500, vocab_size=2000)
    answer: list[int] = []
    num_new = 0
    for at in range(0, 500, 25):
        match rng.choice(["replace", "insert", "delete"]):
            case "replace":
                answer += [*numbers(4, seed=at + 50), *prediction[at + 4 : at + 25]]
                num_new += 4
            case "insert":
                answer += [*numbers(3, seed=at + 50), *prediction[at : at + 25]]
                num_new += 3
            case _:
                answer += prediction[at + 3 : at + 25]
    assert count_right(prediction, answer) >= 0.8 * (len(answer) - num_new)


def test_confidence_falls_with_a_mismatch_and_comes_back() -> None:
    prediction = list(range(100, 200))
    cursor = PredictionCursor(prediction)
    text = prediction[:50]
    cursor.advance(text, 50)
    (before,) = cursor.guesses(1)
    text = [*text, 7]
    cursor.advance(text, 1)
    assert not cursor.is_aligned
    lost = cursor.guesses(4)
    assert {guess.token_ids[0] for guess in lost} == {150, 151}  # inserted, replaced
    assert sum(guess.edge_probs[0] for guess in lost) <= 1.0
    assert max(guess.edge_probs[0] for guess in lost) < 0.5
    text += [151, 152]
    cursor.advance(text, 2)
    assert cursor.is_aligned
    (after,) = cursor.guesses(4)
    assert after.token_ids == [153, 154, 155, 156]
    assert lost[0].edge_probs[0] < after.edge_probs[0] < before.edge_probs[0]
    text += prediction[53:90]
    cursor.advance(text, 37)
    assert cursor.guesses(1)[0].edge_probs[0] > after.edge_probs[0]


def test_a_deleted_token_is_seen_at_once() -> None:
    cursor = PredictionCursor(list(range(100, 130)))
    text = [100, 101, 102, 110]
    cursor.advance(text, 4)
    assert [111, 112] in [guess.token_ids[:2] for guess in cursor.guesses(4)]


def test_of_several_places_the_next_one_ahead() -> None:
    """The phrase stands before and behind the mismatch; as in a diff the text goes forward."""
    phrase = [1, 2, 3]
    prediction = [*phrase, 10, 11, 12, 13, *phrase, 20, 21, *phrase, 30]
    cursor = PredictionCursor(prediction)
    text = [*prediction[:6], 99, *phrase]
    cursor.advance(text, len(text))
    assert cursor.guesses(2)[0].token_ids == [20, 21]


def test_a_coincidence_does_not_move_the_place() -> None:
    """Two tokens of an insertion happen to stand ahead; afterwards the text is where it was."""
    prediction = [*range(100, 140), 1, 2, *range(140, 180)]
    cursor = PredictionCursor(prediction)
    text = [*prediction[:20], 1, 2]
    cursor.advance(text, len(text))
    assert cursor.guesses(1)[0].token_ids == [140]
    text += [7]
    cursor.advance(text, 1)
    assert prediction[20] in [guess.token_ids[0] for guess in cursor.guesses(1)]


def test_used_up_predictions_are_not_offered() -> None:
    cursor = PredictionCursor([1, 2, 3])
    cursor.advance([1, 2, 3], 3)
    assert cursor.guesses(4) == []
    cursor.advance([1, 2, 3, 4], 1)
    assert cursor.guesses(4) == []
    assert PredictionCursor([1, 2]).guesses(0) == []


@given(
    prediction=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    answer=st.lists(st.integers(0, 4), max_size=40),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_steps_of_any_size_and_guesses_from_the_prediction(
    prediction: list[int], answer: list[int], sizes: list[int]
) -> None:
    """How many tokens a step emits changes nothing; every chain is a piece of the prediction."""
    singly, stepwise = PredictionCursor(prediction), PredictionCursor(prediction)
    at, number = 0, 0
    while at < len(answer):
        end = min(at + sizes[number % len(sizes)], len(answer))
        stepwise.advance(answer[:end], end - at)
        for position in range(at, end):
            singly.advance(answer[: position + 1], 1)
        at, number = end, number + 1
        found = stepwise.guesses(6)
        assert found == singly.guesses(6)
        for guess in found:
            size = len(guess.token_ids)
            assert any(
                prediction[start : start + size] == guess.token_ids
                for start in range(len(prediction))
            )
            assert len(guess.edge_probs) == size
            assert all(0.0 < edge_prob < 1.0 for edge_prob in guess.edge_probs)
        assert sum(guess.edge_probs[0] for guess in found) <= 1.0
