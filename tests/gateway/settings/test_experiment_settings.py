"""Valid and invalid settings of an experiment."""

import pytest
from pydantic import ValidationError

from outrider.gateway.settings.experiments import ExperimentSettings, ExperimentSpec
from tests.gateway.experiments.making import spec


def test_the_control_is_named_or_called_so_or_the_first() -> None:
    assert spec({"a": {}, "control": {}}).control_arm == "control"
    assert spec({"b": {}, "a": {}}).control_arm == "b"
    assert spec({"b": {}, "control": {}}, control="b").control_arm == "b"


def test_an_arms_own_objectives_override_those_of_all_arms() -> None:
    made = spec({"a": {}, "b": {"set": {"slo": {"ttft_ms": 5.0}}}}, slo={"ttft_ms": 9.0})
    assert made.overlay("a").document() == {"slo": {"ttft_ms": 9.0}}
    assert made.overlay("b").document() == {"slo": {"ttft_ms": 5.0}}
    assert made.about == {"slo"}
    assert spec(slo={"ttft_ms": 9.0}).about == {"max_draft_nodes"}
    assert spec(slo={"ttft_ms": 9.0}).sets == {"max_draft_nodes", "slo"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"arms": {"a": {}}}, "at least 2"),
        ({"arms": {"a": {"weight": 0.5}, "b": {"weight": 0.4}}}, r"add up to 0\.9, not to 1"),
        ({"arms": {"a": {"weight": 0.5}, "b": {"weight": 0.6}}}, r"add up to 1\.1, not to 1"),
        ({"arms": {"a": {"weight": 0}, "b": {}}}, r"arms\.a\.weight"),
        ({"arms": {"a": {"weight": -1}, "b": {}}}, r"arms\.a\.weight"),
        ({"arms": {"a": {"weight": 5000}, "b": {}}}, r"arms\.b\.weight = 1 is less than 0\.1 %"),
        ({"arms": {"A": {}, "b": {}}}, "pattern"),
        (
            {"arms": {"a": {}, "b": {}}, "control": "c"},
            "control = 'c' is not an arm; available: a, b",
        ),
        ({"arms": {"a": {}, "b": {"set": {"max_drafts": 2}}}}, "is not a setting"),
        (
            {"arms": {"a": {}, "b": {"set": {"tier": "small", "threshold": 0.1}}}},
            "arms.b sets threshold and tier, which exclude each other",
        ),
        ({"arms": {"a": {}, "b": {}}, "allocation": {"min_share": 0.5}, "alpha": 0.9}, "alpha"),
        ({"arms": {"a": {}, "b": {}, "c": {}}, "allocation": {"min_share": 0.4}}, "min_share"),
        ({"arms": {"a": {}, "b": {}}, "eligible": {"headers": {"cookie": "x"}}}, "secret"),
        ({"arms": {"a": {}, "b": {}}, "unit": "planet"}, "unit"),
        ({"arms": {"a": {}, "b": {}}, "wieght": 1}, "wieght"),
    ],
)
def test_meaningless_experiments_are_refused_with_a_message(
    fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        ExperimentSpec.model_validate(fields)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.333, 0.667), (1, 1), (90, 10), (1, 0.25)])
def test_weights_are_shares_of_one_or_parts(weights: tuple[float, float]) -> None:
    one, two = weights
    assert spec({"a": {"weight": one}, "b": {"weight": two}}).arms["b"].weight == two


def test_settings_take_the_same_words_and_texts_from_variables() -> None:
    settings = ExperimentSettings.model_validate(
        {"arms": {"a": {}, "b": {}}, "share": "0.5", "state": "running"}
    )
    assert (settings.share, settings.state) == (0.5, "running")
    assert settings.spec() == spec({"a": {}, "b": {}})
