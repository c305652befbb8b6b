import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.speculation import repeats
from tests.engines import shipped_tokenizer


@given(st.lists(st.integers(0, 50), max_size=80), st.integers(2, 20), st.integers(0, 3))
def test_a_prediction_has_an_edit_in_every_so_many_tokens(
    tokens: list[int], every: int, seed: int
) -> None:
    result = repeats.edited(tokens, every=every, seed=seed)
    pieces, rest = divmod(len(tokens), every)
    inserted, removed = (pieces + 1) // 3, pieces // 3
    assert len(result) == len(tokens) + inserted - removed
    assert list(result[len(result) - rest :]) == tokens[len(tokens) - rest :]
    if pieces and len(set(tokens[:every])) > 1:
        assert list(result) != tokens


def test_edits_closer_than_two_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="every=1"):
        repeats.edited([1, 2, 3], every=1, seed=0)


def test_an_edit_changes_one_item_of_a_task_in_the_conversation() -> None:
    for repeat in repeats.edits(shipped_tokenizer(), number=6, seed=1):
        first, answer, second = (message["content"] for message in repeat.prompt.messages)
        old, new = first.split(), second.split()
        assert len(old) == len(new)
        assert sum(a != b for a, b in zip(old, new, strict=True)) == 1
        assert answer.splitlines()[-1].startswith("Answer: ")
        assert not repeat.prediction_token_ids


def test_a_rewrite_predicts_the_old_answer() -> None:
    tokenizer = shipped_tokenizer()
    edits = repeats.edits(tokenizer, number=4, seed=2)
    for repeat, edit in zip(repeats.rewrites(tokenizer, number=4, seed=2), edits, strict=True):
        assert tokenizer.decode(repeat.prediction_token_ids) == edit.prompt.messages[1]["content"]
        assert repeat.prompt.messages == edit.prompt.messages[2:]


def test_a_quote_asks_for_a_passage_of_the_conversation_in_other_words() -> None:
    for repeat in repeats.quotes(shipped_tokenizer(), number=5, seed=3):
        asked = [m["content"] for m in repeat.prompt.messages if m["role"] == "user"]
        told = [m["content"] for m in repeat.prompt.messages if m["role"] == "assistant"]
        assert len(asked) == 5
        assert len(set(told)) == 4
        assert asked[-1] not in asked[:-1]


def test_known_answers_are_predicted_with_edits() -> None:
    def answer(prompt: object) -> list[int]:
        return list(range(40))

    made = repeats.known_answers(shipped_tokenizer(), answer, number=2, seed=0, every=10)
    for repeat in made:
        kept = set(repeat.prediction_token_ids) & set(range(40))
        assert 35 <= len(kept) <= 40
        assert repeat.prediction_token_ids != tuple(range(40))
