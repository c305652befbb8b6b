"""fleet.toml is read, or refused with the place and the reason."""

import tomllib
from pathlib import Path

import pytest

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.wiring.ray.plan import EXAMPLE, EnginePlan, parse_plan, read_plan


def test_the_example_is_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(EXAMPLE)
    plan = read_plan(file)
    assert plan.key == tmp_path / "fleet.key"
    engine = plan.engines["chat"]
    assert (engine.min_replicas, engine.max_replicas, engine.num_gpus) == (1, 4, 1)
    flags = engine.flags()
    assert flags[:4] == ["--large", "Qwen/Qwen3-8B", "--small", "Qwen/Qwen3-0.6B"]
    assert "engine.dtype=bfloat16" in flags


def test_a_tier_that_is_not_named_is_none() -> None:
    plan = EnginePlan(small="s", settings={"engine.deterministic": True})
    assert plan.flags()[:4] == ["--large", "none", "--small", "s"]
    assert plan.tiers == ("small",)
    assert "engine.deterministic=true" in plan.flags()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "engines: Field required"),
        ("[engines.a]", "engines.a: it names no model"),
        ("[engines.a]\nlarge='l'\nmin_replicas=3", "min_replicas = 3 is above max_replicas = 1"),
        ("[engines.a]\nlarge='l'\nmin_replicas=-1", "min_replicas: Input should be greater"),
        ("[engines.a]\nlarge='l'\nmin_replicas=0\nmax_replicas=0", "max_replicas: Input should"),
        ("[engines.a]\nlarge='l'\nreplicas=3", "engines.a.replicas: Extra inputs"),
        ("[engines.directory]\nlarge='l'", "is not directory"),
        ("[engines.a]\nlarge='l'\nfirst_token_s=0", "engines.a.first_token_s"),
    ],
)
def test_mistakes_are_told_with_their_place(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_plan(tomllib.loads(text), "fleet.toml")


def test_a_file_that_is_not_there_is_shown_how_to_write(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"\[engines.chat\]"):
        read_plan(tmp_path / "fleet.toml")
