"""The page of an experiment's report: its chart fits what decides."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import typer

from outrider.gateway.experiments.statistics.plan import SamplePlan
from outrider.gateway.experiments.statistics.report import Analysis, analyse
from outrider.gateway.settings import extras
from outrider.gateway.tools.commands.experiment_page import experiment_page, write_files
from tests.gateway.experiments.statistics.arms import arm


def decided() -> Analysis:
    rng = np.random.default_rng(1)
    totals = {
        name: arm(name, rng, num_requests=3000, median_s=0.24, error_share=0.002)
        for name in ("control", "new")
    }
    weights = dict.fromkeys(totals, 1.0)
    plan = SamplePlan(name="budget", version=1, control="control", weights=weights)
    return analyse(plan, totals)


def test_the_axis_fits_the_metric_that_decides() -> None:
    """Rare errors have an interval of hundreds per cent; it is cut off at the axis's ends."""
    analysis = decided()
    deciding = analysis.comparisons[0].primary
    assert deciding is not None
    page = experiment_page(analysis)
    found = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    assert found is not None
    drawing = ElementTree.fromstring(found.group())
    width = float(drawing.attrib["viewBox"].split()[2])
    ends = [
        x for path in drawing.iter("path") for x in re.findall(r"[MH]([\d.-]+)", path.get("d", ""))
    ]
    assert all(0 <= float(x) <= width for x in ends)
    most = max(abs(deciding.lift.low), abs(deciding.lift.high))
    assert f"{most:+.1%}" in page
    assert '<div class="table">' in page
    assert "`" not in page


def test_the_picture_is_a_png_and_its_absence_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = analyse(SamplePlan(name="x", version=1, control="a", weights={"a": 1.0, "b": 1.0}), {})
    for name, analysis in (("empty.png", empty), ("report.png", decided())):
        write_files(analysis, tmp_path / name, None)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(extras.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(typer.Exit):
        write_files(empty, tmp_path / "none.png", None)
    assert 'pip install "outrider[bench]"' in capsys.readouterr().err
