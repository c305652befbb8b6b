"""The example of three tiers, run as its page says."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.shared.record import ROOT
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.learning.routers.commands import app
from outrider.gateway.wiring.aliases import alias_policies
from outrider.router.tier_policy import TierWish

FOLDER = ROOT / "examples/tiers"


@pytest.mark.slow
def test_the_example_learns_who_knows_what(tmp_path: Path) -> None:
    labels, router = tmp_path / "labels.csv", tmp_path / "router"
    subprocess.run([sys.executable, str(FOLDER / "make_labels.py"), str(labels)], check=True)
    words = ["train", "--data", str(labels), "--out", str(router)]
    trained = CliRunner().invoke(app, [*words, "--tiers", "small=1,large=4,cloud=40"])
    assert trained.exit_code == 0, trained.output
    settings = load_settings(
        config_file=FOLDER / "outrider.toml",
        flags={
            "models.large": "demo",
            "models.small": "demo",
            "aliases.best.router": str(router),
        },
    )
    policy = alias_policies(settings)["best"]
    sums = [f"What is {number} + {number}?" for number in (4, 4321, 654321)]
    assert [policy.route(each, TierWish()).order[0] for each in sums] == ["small", "large", "cloud"]
