"""The judge of a small answer: when it decides, by what, and what it says."""

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.estimates import QualityEstimate
from outrider.router.watch import Judgement, UntrainedAnswers, WatchedAnswer, WatchRules
from tests.router.routers import ScriptedStages

TEXT = QualityEstimate(small=0.55)
RULES = WatchRules(threshold=0.5, sure=(0.2, 0.9))


def watch(
    stages: ScriptedStages, told: list[tuple[float, bool]] | None = None, **rules: object
) -> WatchedAnswer:
    values = {name: getattr(RULES, name) for name in RULES.__slots__} | rules
    on_verdict = None if told is None else lambda quality, bad: told.append((quality, bad))
    return WatchedAnswer(stages, WatchRules(**values), TEXT, on_verdict)


@pytest.mark.parametrize(
    ("prompt", "action", "reason"),
    [
        (0.95, "commit", "cascade: small answer kept (0.95 >= 0.50) from the prompt"),
        (0.85, "hold", "cascade: held"),
        (0.25, "hold", "cascade: held"),
        (0.15, "escalate", "cascade: small answer too weak (0.15 < 0.50) from the prompt"),
    ],
)
def test_the_prompt_decides_what_is_sure(prompt: float, action: str, reason: str) -> None:
    judgement = watch(ScriptedStages(prompt=prompt)).on_prompt([0.1])
    assert (judgement.action, judgement.reason) == (action, reason)
    assert judgement.confidence == pytest.approx(prompt)


def test_surely_bad_answers_are_below_the_threshold() -> None:
    """A text that orders prompts badly may have a band on one side of the threshold."""
    odd = watch(ScriptedStages(prompt=0.55), sure=(0.6, 0.7))
    assert odd.on_prompt([0.1]).action == "hold"
    odd = watch(ScriptedStages(prompt=0.45), sure=(0.2, 0.4))
    assert odd.on_prompt([0.1]).action == "hold"


def test_where_the_prompt_is_the_last_stage_it_always_decides() -> None:
    for prompt, action in ((0.51, "commit"), (0.49, "escalate")):
        judged = watch(ScriptedStages(prompt=prompt), last_stage="prompt").on_prompt([0.1])
        assert judged.action == action
    # And if nobody ever tells of the prompt, the text does.
    assert watch(ScriptedStages(), last_stage="prompt").on_tokens([-0.1]).action == "commit"


@pytest.mark.parametrize("hold_back_tokens", [*range(1, 21), 64, 512])
@pytest.mark.parametrize(("final", "action"), [(0.6, "commit"), (0.4, "escalate")])
def test_it_decides_when_the_hold_back_is_full_and_not_before(
    hold_back_tokens: int, final: float, action: str
) -> None:
    stages = ScriptedStages(answers={hold_back_tokens: final})
    judge = watch(stages, hold_back_tokens=hold_back_tokens)
    judge.on_prompt([0.1])
    for _ in range(hold_back_tokens - 1):
        assert judge.on_tokens([-0.5]).action == "hold"
    decided = judge.on_tokens([-0.5])
    assert decided.action == action
    sign, what = (">=", "kept") if action == "commit" else ("<", "too weak")
    ending = f"{hold_back_tokens} token{'s' if hold_back_tokens > 1 else ''}"
    assert decided.reason == (
        f"cascade: small answer {what} ({final:.2f} {sign} 0.50) after {ending}"
    )


def test_a_step_of_many_tokens_overshoots_and_all_of_them_count() -> None:
    stages = ScriptedStages(answers={20: 0.6})
    judge = watch(stages)
    assert judge.on_tokens([-0.5] * 20).action == "commit"
    assert stages.asked == [(20, False)]


@pytest.mark.parametrize(("early", "action"), [(0.95, "commit"), (0.1, "escalate")])
def test_it_decides_early_where_the_tokens_leave_no_doubt(early: float, action: str) -> None:
    judge = watch(ScriptedStages(answers={4: early}))
    actions = [judge.on_tokens([-0.5]).action for _ in range(4)]
    assert actions == ["hold", "hold", "hold", action]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_the_stage_is_asked_when_the_tokens_have_doubled(steps: list[int]) -> None:
    stages = ScriptedStages()
    judge = watch(stages, hold_back_tokens=512)
    for size in steps:
        judge.on_tokens([-0.5] * size)
    counts = [count for count, _ in stages.asked]
    assert all(later >= 2 * count for count, later in pairwise(counts))
    assert set(counts) <= set(accumulate(steps))


@pytest.mark.parametrize(("whole", "action"), [(0.7, "commit"), (0.3, "escalate")])
def test_a_whole_answer_is_judged_at_its_end_unless_it_is_surely_bad(
    whole: float, action: str
) -> None:
    stages = ScriptedStages(prompt=0.95, whole=whole, answers={64: 0.99})
    judge = watch(stages, is_whole=True)
    assert judge.on_prompt([0.1]).action == "hold"
    for _ in range(100):
        assert judge.on_tokens([-0.5]).action == "hold"
    ended = judge.on_end()
    assert ended.action == action
    assert ended.reason.endswith("all 100 tokens read")
    assert stages.asked[-1] == (100, True)
    bad = watch(ScriptedStages(answers={32: 0.1}), is_whole=True)
    actions = [bad.on_tokens([-0.5]).action for _ in range(32)]
    assert actions == ["hold"] * 31 + ["escalate"]


def test_when_time_is_up_it_decides_by_what_it_knows() -> None:
    judge = watch(ScriptedStages(answers={3: 0.45}))
    judge.on_tokens([-0.5] * 3)
    judged = judge.on_time()
    assert judged.action == "escalate"
    assert judged.reason == (
        "cascade: small answer too weak (0.45 < 0.50) after 3 tokens, time is up"
    )
    assert watch(ScriptedStages()).on_time().action == "commit"  # the text: 0.55


def test_an_answer_without_a_token_is_judged_by_its_prompt() -> None:
    judge = watch(ScriptedStages(prompt=0.4))
    assert judge.on_prompt([0.1]).action == "hold"
    assert judge.on_end().action == "escalate"


def test_a_verdict_stands_and_is_told_once() -> None:
    told: list[tuple[float, bool]] = []
    judge = watch(ScriptedStages(answers={16: 0.6, 1000: 0.0}), told)
    first = judge.on_tokens([-0.5] * 16)
    assert [judge.on_tokens([-9.0]), judge.on_time(), judge.on_end()] == [first] * 3
    assert told == [(pytest.approx(0.6), False)]


def test_in_mid_stream_the_latest_tokens_may_still_fail() -> None:
    class Sliding(ScriptedStages):
        """Good as long as no token is a surprise."""

        def estimate_answer(
            self, prompt_estimate: QualityEstimate, logprobs: object, *, is_whole: bool
        ) -> QualityEstimate:
            assert isinstance(logprobs, list)
            assert len(logprobs) <= 64
            return QualityEstimate(small=0.1 if min(logprobs) < -5 else 0.8)

    judge = watch(Sliding(), goes_on=True)
    assert judge.on_tokens([-0.5] * 16).action == "commit"
    for _ in range(100):
        assert judge.on_tokens([-0.5]).action == "commit"
    actions = [judge.on_tokens([-9.0]).action for _ in range(32)]
    assert "escalate" in actions
    still = watch(Sliding(), goes_on=False)
    still.on_tokens([-0.5] * 16)
    assert {still.on_tokens([-9.0] * 8).action for _ in range(20)} == {"commit"}


ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(ANY_NUMBER, max_size=8),
    st.lists(st.lists(ANY_NUMBER, max_size=6), max_size=8),
    st.sampled_from(["prompt", "answer"]),
    st.booleans(),
)
def test_no_numbers_make_it_fail(
    hidden: list[float], steps: list[list[float]], last_stage: str, is_whole: bool
) -> None:
    class Checking(ScriptedStages):
        def estimate_answer(
            self, prompt_estimate: QualityEstimate, logprobs: object, *, is_whole: bool
        ) -> QualityEstimate:
            assert isinstance(logprobs, list)
            assert all(math.isfinite(value) and value <= 0.0 for value in logprobs)
            return QualityEstimate(small=0.5)

    judge = watch(Checking(), last_stage=last_stage, is_whole=is_whole)
    said: list[Judgement] = [judge.on_prompt(hidden)]
    said += [judge.on_tokens(step) for step in steps]
    said.append(judge.on_end())
    assert said[-1].action != "hold"
    for judgement in said:
        assert 0.0 <= judgement.confidence <= 1.0
        assert judgement.reason.isascii()
        assert "\n" not in judgement.reason


def test_without_a_trained_stage_confident_answers_rank_above_hesitant_ones() -> None:
    stages = UntrainedAnswers(ScriptedStages())
    prompt = QualityEstimate(small=0.64)

    def confidence(logprobs: list[float]) -> float:
        return stages.estimate_answer(prompt, logprobs, is_whole=False).quality

    assert confidence([0.0] * 16) == pytest.approx(0.8)
    assert confidence([-0.1] * 16) > confidence([-0.1] * 12 + [-3.0] * 4)
    # A single surprise among many is no failure: a quantile, not the least one.
    assert confidence([-0.1] * 31 + [-5.0]) == confidence([-0.1] * 32)
