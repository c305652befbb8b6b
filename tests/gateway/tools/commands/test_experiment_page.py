"""The page of an experiment's report: its chart fits what decides."""

import re
from xml.etree import ElementTree

import numpy as np

from outrider.gateway.experiments.statistics.plan import SamplePlan
from outrider.gateway.experiments.statistics.report import analyse
from outrider.gateway.tools.commands.experiment_page import experiment_page
from tests.gateway.experiments.statistics.arms import arm


def test_the_axis_fits_the_metric_that_decides() -> None:
    """Rare errors have an interval of hundreds per cent; it is cut off at the axis's ends."""
    rng = np.random.default_rng(1)
    totals = {
        name: arm(name, rng, num_requests=3000, median_s=0.24, error_share=0.002)
        for name in ("control", "new")
    }
    weights = dict.fromkeys(totals, 1.0)
    plan = SamplePlan(name="budget", version=1, control="control", weights=weights)
    analysis = analyse(plan, totals)
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
