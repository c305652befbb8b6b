from dataclasses import replace

import numpy as np
import pytest

from outrider.router.dataset import LabelledPrompts
from outrider.router.estimator import TrainedRouter
from outrider.router.evaluation import apgr
from outrider.router.stages import seen_logprobs, stage_rows
from tests.router.conftest import labelled_answers


def test_rows_are_what_serving_says(
    trained_stages: TrainedRouter, answered_data: LabelledPrompts
) -> None:
    scorer, data = trained_stages.scorer, answered_data
    assert data.hidden is not None
    assert data.logprobs is not None
    rows = stage_rows(scorer, data, hold_back_tokens=4)
    assert rows.stages == ("text", "prompt", "answer")
    assert rows.answer is not None
    for index in (0, 17, 399):
        text = scorer.estimate(data.prompts[index])
        prompt = scorer.estimate_prompt(text, data.hidden[index].tolist())
        tokens = data.logprobs[index].tolist()
        answer = scorer.estimate_answer(prompt, tokens[:4], is_whole=len(tokens) < 4)
        found = (rows.text[index], rows.prompt[index], rows.answer[index])
        assert found == pytest.approx([1.0 - stage.gain for stage in (text, prompt, answer)])
    assert np.array_equal(rows.weak, data.weak)
    assert (rows.weak_s, rows.num_strong_tokens) == (data.weak_s, data.num_strong_tokens)
    assert rows.hold_back_tokens == 4


@pytest.mark.slow
def test_later_stages_know_more(trained_stages: TrainedRouter) -> None:
    fresh = labelled_answers(1500, seed=9)
    assert fresh.strong is not None
    rows = stage_rows(trained_stages.scorer, fresh)
    areas = [apgr(1.0 - rows.quality(stage), fresh.weak, fresh.strong) for stage in rows.stages]
    assert areas == sorted(areas)
    assert areas[1] > areas[0] + 0.02
    assert areas[2] > areas[1] + 0.02


def test_data_without_more_than_text_have_the_text_stage_only(
    trained_stages: TrainedRouter, answered_data: LabelledPrompts
) -> None:
    bare = replace(answered_data, hidden=None, logprobs=None, strong=None)
    rows = stage_rows(trained_stages.scorer, bare)
    assert rows.stages == ("text",)
    assert rows.strong.tolist() == [1.0] * len(bare.prompts)
    other_size = replace(answered_data, hidden=np.ones((400, 3)))
    assert stage_rows(trained_stages.scorer, other_size).stages == ("text", "answer")


def test_a_watch_reports_the_tokens_it_has_seen() -> None:
    answer = np.arange(5.0)
    for hold_back, length, is_whole in (
        (1, 1, False),
        (5, 5, False),
        (6, 5, True),
        (None, 5, True),
    ):
        seen, knows_end = seen_logprobs(answer, hold_back)
        assert (len(seen), knows_end) == (length, is_whole)
    with pytest.raises(ValueError, match="hold_back_tokens=0"):
        seen_logprobs(answer, 0)


@pytest.mark.slow
def test_whole_answers_are_seen_with_no_hold_back(
    trained_stages: TrainedRouter, answered_data: LabelledPrompts
) -> None:
    whole = stage_rows(trained_stages.scorer, answered_data, hold_back_tokens=None)
    long = stage_rows(trained_stages.scorer, answered_data, hold_back_tokens=1000)
    assert whole.answer is not None
    assert long.answer is not None
    assert np.array_equal(whole.answer, long.answer)
    assert whole.hold_back_tokens == 39
