"""`--tiers` and `--accuracy`: names, costs, what the settings know, and what is refused."""

from pathlib import Path

import pytest

from outrider.gateway.tools.learning.routers.tier_flags import tier_terms
from outrider.router.dataset import RouterDataError
from outrider.router.tier_labels import TierTerms


def test_costs_are_named_or_come_from_the_settings(tmp_path: Path) -> None:
    config = tmp_path / "outrider.toml"
    config.write_text(
        '[tiers.mini]\nurl = "http://x/v1"\nprice = {prompt = 1.0, completion = 4.0}\n'
        '[tiers.free]\nurl = "http://y/v1"\n'
    )
    found = tier_terms("mini, free, org/big=2.5", "org/big=0.9", config)
    assert found == [
        TierTerms(name="mini", usual_cost=pytest.approx(0.001)),
        TierTerms(name="free"),
        TierTerms(name="org/big", cost=2.5, accuracy=0.9),
    ]


@pytest.mark.parametrize(
    ("tiers", "accuracies", "said"),
    [
        ("a=1,a=2", "", "a is named twice"),
        ("a=1,b=dear", "", "'dear' of b is not a number"),
        ("a=1,b=2", "c=0.5", "c is none of --tiers"),
        ("a=1,b=2", "b", "must be between 0 and 1"),
        ("a=1,b=2", "b=1.5", "must be between 0 and 1"),
    ],
)
def test_flags_that_say_nothing(tiers: str, accuracies: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "outrider.toml").write_text("")
    with pytest.raises(RouterDataError, match=said):
        tier_terms(tiers, accuracies, tmp_path / "outrider.toml")
