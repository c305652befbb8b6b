from collections.abc import Callable

import pytest

from benchmarks.shared.compare import Comparison, Divergence, combine
from benchmarks.shared.driving import Bench, make_requests
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.turns import Case, Turn, Turns, engine_case
from outrider.engine.request import EngineRequest
from tests.benchmarks.benches import make_bench, make_prompts


def scripted(name: str, calls: list[tuple[str, int]], *, wall_s: float) -> Case:
    def answer(question: int) -> Turn:
        calls.append((name, question))
        return Turn(token_ids=[1] * (question + 1), wall_s=wall_s * (question + 1))

    return answer


def test_every_question_is_asked_of_all_before_the_next_one() -> None:
    calls: list[tuple[str, int]] = []
    cases = {name: scripted(name, calls, wall_s=1.0) for name in ("a", "b", "c")}
    Turns.take(cases, num_questions=2, num_rounds=2, num_warm_up=1)
    assert calls[:3] == [("a", 0), ("b", 0), ("c", 0)]  # the warm-up
    asked = [calls[start : start + 3] for start in range(3, len(calls), 3)]
    assert [{question for _, question in turn} for turn in asked] == [{0}, {1}, {0}, {1}]
    assert all({name for name, _ in turn} == {"a", "b", "c"} for turn in asked)
    assert [turn[0][0] for turn in asked] == ["a", "b", "c", "a"]  # nobody always begins


def test_ratios_are_of_total_rates() -> None:
    calls: list[tuple[str, int]] = []
    cases = {"slow": scripted("slow", calls, wall_s=3.0), "fast": scripted("fast", calls, wall_s=1)}
    turns = Turns.take(cases, num_questions=3, num_rounds=2)
    ratio = turns.ratio("fast", "slow")
    assert ratio is not None
    assert (ratio.estimate, ratio.num_units) == (pytest.approx(3.0), 3)
    assert turns.ratio("fast", "slow", decode=True) is None  # these do not tell
    assert turns.report("slow")["tokens_per_s"] == pytest.approx(1 / 3)


def test_waste_is_counted_per_emitted_token() -> None:
    turn = Turn(
        token_ids=[1] * 10, wall_s=1.0, num_drafted_tokens=20, num_accepted_tokens=8, num_passes=2
    )
    report = Turns(by_case={"a": [[turn], [turn]]}).report("a")
    assert report["wasted_nodes_per_token"] == pytest.approx(1.2)
    assert report["acceptance_rate"] == pytest.approx(0.4)
    assert report["tokens_per_pass"] == pytest.approx(5.0)


def test_no_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="0 questions"):
        Turns.take({"a": scripted("a", [], wall_s=1.0)}, num_questions=0, num_rounds=1)


def test_divergences_keep_their_answers_number() -> None:
    one = Divergence(index=1, position=3, reference_token=5, other_token=6)
    both = combine(
        [
            Comparison(num_answers=2, divergences=(one,)),
            Comparison(num_answers=2, divergences=(one,)),
        ]
    )
    assert (both.num_answers, both.num_equal) == (4, 2)
    assert [divergence.index for divergence in both.divergences] == [1, 3]


def request_maker(
    prompts: list[Prompt], *, speculate: bool, temperature: float
) -> Callable[[int], EngineRequest]:
    def request_for(question: int) -> EngineRequest:
        (request,) = make_requests(
            [prompts[question]],
            tier="large",
            max_tokens=12,
            speculate=speculate,
            temperature=temperature,
            seed=question,
        )
        return request

    return request_for


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_our_engine_as_a_case_gives_equal_answers_and_counts(temperature: float) -> None:
    bench: Bench = make_bench()
    prompts = make_prompts(3)
    cases = {
        name: engine_case(
            bench, request_maker(prompts, speculate=speculate, temperature=temperature)
        )
        for name, speculate in (("plain", False), ("trees", True))
    }
    turns = Turns.take(cases, num_questions=3, num_rounds=2, num_warm_up=0)
    assert turns.compare("trees", "plain", prompts).is_equal
    assert turns.compare("trees", "plain", prompts).num_answers == 6
    plain, trees = turns.report("plain"), turns.report("trees")
    assert plain["num_tokens"] == trees["num_tokens"] == 2 * 3 * 12
    assert plain["tokens_per_pass"] == 1.0
    assert "acceptance_rate" not in plain
    assert trees["verified_nodes_per_token"] > 0
    for turn in turns.all_of("plain"):
        assert 0 < turn.decode_s < turn.wall_s
        assert turn.num_decoded_tokens == 11
