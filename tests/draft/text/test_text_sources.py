"""Guesses for sequences: the memory of each sequence, and when it is dropped."""

import random

import pytest

from outrider.draft.text.text_sources import Guess, TextSources
from outrider.engine.cache.block_pool import BlockPool, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import SamplingParams

VOCAB_SIZE = 50_000


def make_sequence(
    prompt: list[int],
    output: list[int] | None = None,
    *,
    request_id: str = "a",
    cache_salt: str = "",
    memory_group: str = "",
    prediction: list[int] | None = None,
) -> Sequence:
    sampling = SamplingParams(max_tokens=10_000)
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        tier="large",
        sampling=sampling,
        cache_salt=cache_salt,
        memory_group=memory_group,
        prediction_token_ids=tuple(prediction or ()),
    )
    return Sequence(
        request=request,
        tier="large",
        view=KVView(BlockPool(num_blocks=1, block_size=16), root=root_hash(cache_salt)),
        noise=SequenceNoise(sampling, "large", vocab_size=8),
        submitted_s=0.0,
        token_ids=[*prompt, *(output or ())],
    )


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def repeated(sources: TextSources, sequence: Sequence, depth: int = 16) -> list[Guess]:
    return sources.guess(sequence, ("suffix",), depth).get("suffix", [])


def predicted(sources: TextSources, sequence: Sequence, depth: int = 16) -> list[Guess]:
    return sources.guess(sequence, ("prediction",), depth).get("prediction", [])


def test_the_prompt_and_the_answer_are_looked_through() -> None:
    prompt, answer = numbers(100, 1), numbers(20, 2)
    sources = TextSources()
    sequence = make_sequence(prompt, [*answer, *prompt[40:50]])
    (guess,) = repeated(sources, sequence)
    assert guess.token_ids == prompt[50:66]
    sequence.token_ids += [*numbers(3, 3), *answer[4:9]]
    assert repeated(sources, sequence, 7)[0].token_ids == answer[9:16]
    sequence.token_ids += numbers(3, 4)
    assert repeated(sources, sequence) == []


def test_guesses_keep_to_the_requested_sources_and_depth() -> None:
    prompt = numbers(100, 1)
    sequence = make_sequence([*prompt, *prompt[10:20]], prediction=numbers(50, 2))
    sources = TextSources(max_depth=12)
    both = sources.guess(sequence, ("model", "suffix", "prediction"), 100)
    assert set(both) == {"suffix", "prediction"}
    assert [len(chains[0].token_ids) for chains in both.values()] == [12, 12]
    assert set(sources.guess(sequence, ("prediction", "grammar"), 5)) == {"prediction"}
    assert sources.guess(sequence, ("model",), 5) == {}
    assert sources.guess(sequence, ("suffix", "prediction"), 0) == {}


def test_step_by_step_is_as_at_once() -> None:
    """What is kept between the steps never changes what is guessed, but for a better match."""
    rng = random.Random(5)
    prompt = [rng.randrange(6) for _ in range(200)]
    stepwise = TextSources()
    sequence = make_sequence(prompt)
    for _ in range(80):
        sequence.token_ids += [rng.randrange(6) for _ in range(rng.randrange(1, 5))]
        found = repeated(stepwise, sequence)
        fresh = repeated(TextSources(), sequence)
        assert bool(found) == bool(fresh)
        if found != fresh:
            assert found[0].edge_probs[0] >= fresh[0].edge_probs[0] * 0.5
            text = sequence.token_ids
            for guess in found:
                chain = [*text[-2:], guess.token_ids[0]]
                assert any(text[i : i + 3] == chain for i in range(len(text) - 2))


# ---- remembered answers ---------------------------------------------------------------------


def test_an_earlier_answer_is_found_from_its_first_token_on() -> None:
    """The same question again: the context that came with the answer leads to its beginning."""
    prompt, answer = numbers(30, 1), numbers(40, 2)
    sources = TextSources()
    sources.remember(make_sequence(prompt, answer))
    again = make_sequence([*numbers(10, 3), *prompt[-8:]], request_id="b")
    assert repeated(sources, again)[0].token_ids == answer[:16]
    again.token_ids += answer[:10]
    assert repeated(sources, again)[0].token_ids == answer[10:26]


def test_an_answer_that_ended_is_not_continued_by_another() -> None:
    sources = TextSources()
    first, second = numbers(20, 1), numbers(20, 2)
    sources.remember(make_sequence([1, 2], first))
    sources.remember(make_sequence([3, 4], second))
    assert repeated(sources, make_sequence([9], first, request_id="b")) == []
    (guess,) = repeated(sources, make_sequence([9], first[:15], request_id="c"))
    assert guess.token_ids == first[15:]


def test_tenants_never_see_each_other() -> None:
    sources = TextSources()
    answer = numbers(60, 1)
    sources.remember(make_sequence([1], answer, cache_salt="alice"))
    for salt in ("", "bob", "alice "):
        stranger = make_sequence([2], answer[:20], request_id=salt, cache_salt=salt)
        assert repeated(sources, stranger) == []
    own = make_sequence([2], answer[:20], request_id="b", cache_salt="alice")
    assert repeated(sources, own)[0].token_ids == answer[20:36]


def test_arms_of_an_experiment_never_see_each_other() -> None:
    sources = TextSources()
    answer = numbers(60, 1)
    sources.remember(make_sequence([1], answer, cache_salt="alice", memory_group="a"))
    for group in ("", "b"):
        other = make_sequence(
            [2], answer[:20], request_id=group, cache_salt="alice", memory_group=group
        )
        assert repeated(sources, other) == []
    own = make_sequence([2], answer[:20], request_id="own", cache_salt="alice", memory_group="a")
    assert repeated(sources, own)[0].token_ids == answer[20:36]


def test_many_groups_of_one_tenant_cost_another_nothing() -> None:
    sources = TextSources(max_tenants=4)
    answer = numbers(60, 1)
    sources.remember(make_sequence([1], answer, cache_salt="bob"))
    for number in range(20):
        sources.remember(
            make_sequence([1], answer, cache_salt="alice", memory_group=f"arm-{number}")
        )
    assert repeated(sources, make_sequence([2], answer[:20], request_id="b", cache_salt="bob"))
    assert sources.num_remembered_tokens < 5 * 80


def test_running_sequences_do_not_see_each_other() -> None:
    sources = TextSources()
    text = numbers(60, 1)
    assert repeated(sources, make_sequence(text, request_id="a")) == []
    assert repeated(sources, make_sequence([7], text[:20], request_id="b")) == []


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    sources = TextSources(max_remembered_tokens=1000)
    answers = [numbers(90, seed) for seed in range(40)]
    for answer in answers:
        sources.remember(make_sequence([5] * 20, answer))
        assert sources.num_remembered_tokens <= 1000

    def is_known(answer: list[int]) -> bool:
        return bool(repeated(sources, make_sequence([1], answer[:30], request_id=str(answer[0]))))

    known = [is_known(answer) for answer in answers]
    assert known == sorted(known)
    assert 5 <= sum(known) <= 10


def test_of_an_answer_that_is_too_long_the_end_is_kept() -> None:
    sources = TextSources(max_remembered_tokens=200)
    answer = numbers(500, 1)
    sources.remember(make_sequence([1], answer))
    assert sources.num_remembered_tokens == 100
    assert repeated(sources, make_sequence([2], answer[450:470]))[0].token_ids == answer[470:486]


@pytest.mark.parametrize("max_remembered_tokens", [0, 1, 3])
def test_no_room_for_anything(max_remembered_tokens: int) -> None:
    sources = TextSources(max_remembered_tokens=max_remembered_tokens)
    answer = numbers(30, 1)
    sources.remember(make_sequence([1], answer))
    sources.remember(make_sequence([1]))  # no answer at all
    assert sources.num_remembered_tokens <= max_remembered_tokens
    assert repeated(sources, make_sequence([2], answer[:20])) == []


def test_the_tenant_that_was_idle_longest_is_forgotten() -> None:
    sources = TextSources(max_tenants=2)
    answers = {salt: numbers(40, seed) for seed, salt in enumerate("abc")}

    def is_known(salt: str) -> bool:
        probe = make_sequence([1], answers[salt][:20], request_id=salt, cache_salt=salt)
        return bool(repeated(sources, probe))

    for salt in "ab":
        sources.remember(make_sequence([1], answers[salt], cache_salt=salt))
    assert is_known("a")  # and so it is not the idlest
    sources.remember(make_sequence([1], answers["c"], cache_salt="c"))
    assert [is_known(salt) for salt in "abc"] == [True, False, True]


# ---- predictions ----------------------------------------------------------------------------


def test_the_clients_prediction_before_the_first_token_and_after() -> None:
    prediction = numbers(50, 1)
    sequence = make_sequence([1, 2], prediction=prediction)
    sources = TextSources()
    assert predicted(sources, sequence)[0].token_ids == prediction[:16]
    sequence.token_ids += prediction[:20]
    assert predicted(sources, sequence, 4)[0].token_ids == prediction[20:24]
    assert predicted(sources, make_sequence([1, 2], request_id="b")) == []


def test_an_earlier_answer_of_the_other_tier() -> None:
    proposal = numbers(50, 1)
    sequence = make_sequence([1, 2])
    sequence.proposal_token_ids = proposal
    sources = TextSources()
    assert predicted(sources, sequence)[0].token_ids == proposal[:16]
    named = make_sequence([1, 2], request_id="b", prediction=[8, 9])
    named.proposal_token_ids = proposal
    assert predicted(sources, named)[0].token_ids == [8, 9]


def test_who_asks_twice_hears_the_same() -> None:
    """A second look at the same text adds nothing to the guesses of the first."""
    prompt = numbers(40, 1)
    sequence = make_sequence(prompt, prompt[3:12], prediction=[8, 9])
    sequence.proposal_token_ids = [*prompt[3:12], 5, 6, 7]
    sources, asked = TextSources(), ("suffix", "prediction")
    first = {source: [*chains] for source, chains in sources.guess(sequence, asked, 16).items()}
    assert len(first["suffix"]) == 2
    assert sources.guess(sequence, asked, 16) == first


# ---- what is kept for a sequence ------------------------------------------------------------


def test_a_retracted_answer_is_forgotten() -> None:
    """Shorter, or as long again but another one, or on another tier."""
    prompt, prediction = numbers(40, 1), numbers(40, 2)
    sources = TextSources()
    asked = ("suffix", "prediction")
    sequence = make_sequence(prompt, prediction[:10], prediction=prediction)
    sources.guess(sequence, asked, 16)
    for output in ([], prediction[:3], [*prompt[5:15]], [*prediction[:9], 7]):
        sequence.token_ids[len(prompt) :] = output
        found = sources.guess(sequence, asked, 16)
        assert found == TextSources().guess(sequence, asked, 16)


def test_another_tiers_answer_is_another_text() -> None:
    """Even if the two ended alike before anybody asked again."""
    sources = TextSources()
    asked = ("suffix", "prediction")
    sequence = make_sequence(numbers(40, 1), [5, 6, 7, 8])
    assert sources.guess(sequence, asked, 16) == {}
    sequence.restart_on("small", sequence.noise)
    sequence.token_ids += [5, 1, 7, 8, 9]
    assert sources.guess(sequence, asked, 16) == {}
    sequence.restart_on("large", sequence.noise)
    sequence.token_ids += [5, 1, 7, 8]
    found = sources.guess(sequence, asked, 16)
    assert found == TextSources().guess(sequence, asked, 16)
    assert found["prediction"][0].token_ids == [9]


def test_an_answer_retracted_and_made_up_for_before_anybody_asked() -> None:
    """As long as the old one and ending alike, so that only the change of tier tells."""
    sources = TextSources()
    sequence = make_sequence(numbers(40, 1), [1, 2, 8, 1, 2, 8])
    assert repeated(sources, sequence, 2)[0].token_ids == [1, 2]
    sequence.restart_on("small", sequence.noise)
    sequence.restart_on("large", sequence.noise)
    sequence.token_ids += [3, 8, 1, 4, 5, 8, 1]
    assert repeated(sources, sequence, 2)[0].token_ids == [4, 5]


def test_release_lets_go_of_everything() -> None:
    sources = TextSources()
    prompt = numbers(40, 1)
    sequence = make_sequence([*prompt, *prompt[:10]])
    before = sources.guess(sequence, ("suffix",), 16)
    sources.release(sequence)
    assert not sources._states
    sources.release(sequence)
    assert sources.guess(sequence, ("suffix",), 16) == before


def test_a_long_copy_survives_a_phrase_that_is_everywhere() -> None:
    """Of 40 places with the same ten tokens, the one that has been followed so far."""
    phrase = numbers(10, 1)
    blocks = [[*phrase, *numbers(3, 100 + number)] for number in range(40)]
    sequence = make_sequence([token for block in blocks for token in block])
    sources = TextSources()
    sequence.token_ids += blocks[4]
    repeated(sources, sequence)
    sequence.token_ids += phrase
    assert repeated(sources, sequence)[0].token_ids[:3] == blocks[5][10:]


@pytest.mark.parametrize(
    "wrong",
    [{"max_depth": 257}, {"max_branches": 0}, {"max_tenants": 0}, {"max_remembered_tokens": -1}],
)
def test_limits_are_checked(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        TextSources(**wrong)
