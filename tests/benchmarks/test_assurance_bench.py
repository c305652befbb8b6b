import numpy as np

from benchmarks.routing.bench_assurance import Asked, Kept, broken_shares, drawn, is_met
from outrider.router.calibration import StageRows


def rows(num_prompts: int) -> StageRows:
    rng = np.random.default_rng(0)
    text = rng.random(num_prompts)
    return StageRows(
        text=text,
        prompt=text,
        answer=None,
        weak=(rng.random(num_prompts) < text).astype(np.float64),
        strong=np.ones(num_prompts),
    )


def test_prompts_are_drawn_whole() -> None:
    made = drawn(rows(50), np.random.default_rng(1), 200)
    assert len(made.text) == len(made.weak) == 200
    assert np.array_equal(made.text, made.prompt)
    assert set(zip(made.text.tolist(), made.weak.tolist(), strict=True)) <= set(
        zip(rows(50).text.tolist(), rows(50).weak.tolist(), strict=True)
    )


def test_broken_draws_are_counted() -> None:
    shares = broken_shares(rows(400), (0.0, 0.7, 1.0), draws=4, count=200, seed=0)
    assert (shares[0.0], shares[1.0]) == (0.0, 0.0)  # always kept: nothing, and the large model
    assert 0.0 <= shares[0.7] <= 1.0


def test_a_quality_has_to_be_kept_and_as_often_as_it_says() -> None:
    kept = Kept(quality=0.95, strong_share=0.5)
    good = Asked(quality=0.95, assured=kept, calibrated=kept, broken=0.1)
    assert is_met(good)
    assert not is_met(Asked(quality=0.96, assured=kept, calibrated=kept, broken=0.0))
    assert not is_met(Asked(quality=0.95, assured=kept, calibrated=kept, broken=0.2))
