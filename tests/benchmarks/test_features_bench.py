"""What a stage brings: judged on new prompts, paired with the text, drawn."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.routing.bench_features import bootstrap, figures_of, judged, resampled, show
from benchmarks.routing.features_plot import draw
from tests.benchmarks.routed_rows import ROWS
from tests.router.encoder.encoders import labels_near


def test_later_stages_gain_over_the_text_by_the_same_prompts() -> None:
    figures = figures_of(ROWS, 60, ROWS)
    assert list(figures) == ["text", "prompt", "answer, 16 tokens", "answer, whole"]
    text, prompt, answer, _ = figures.values()
    assert (text.gain.low, text.gain.value, text.gain.high) == (0.0, 0.0, 0.0)
    assert 0.0 < prompt.gain.low < prompt.gain.value < answer.gain.value
    assert answer.apgr.value - text.apgr.value == pytest.approx(answer.gain.value)
    again = bootstrap(1.0 - ROWS.prompt, ROWS, 60)
    assert (again == bootstrap(1.0 - ROWS.prompt, ROWS, 60)).all()  # so that stages are paired


@pytest.mark.slow
def test_an_encoder_that_tells_is_kept_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Arguments:
        parts, resamples = 1, 20

    gold, dev = labels_near(200, seed=1), labels_near(200, seed=2)
    arguments: Any = Arguments()
    found = judged(gold, dev, arguments.resamples) | {"resampled": resampled(gold, dev, arguments)}
    assert found["kept"] == ["encoder"]
    assert found["stages"]["prompt"].gain.low > 0.0
    assert found["resampled"]["kept"] == [["encoder"]]
    results = {"encoder": None, "data": {"world": found}}
    show(results)
    assert "prompt, resampled" in capsys.readouterr().out
    draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
