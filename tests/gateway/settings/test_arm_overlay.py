"""Overlays: what an arm may set, and that a request's own words win."""

import pytest

from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.settings.arm_overlay import (
    NO_OVERLAY,
    OPTION_FIELDS,
    Overlay,
    contradictions,
    related_fields,
)


def test_every_field_of_a_request_was_thought_of() -> None:
    promises = {
        "privacy",
        "deadline_ms",
        "max_cost_usd",
        "fit_context",
        "cache",
        "receipt",
        "retention_s",
        "judge",
    }
    assert {*OPTION_FIELDS, *promises} == set(OutriderOptions.model_fields)


def test_the_requests_own_words_win() -> None:
    overlay = Overlay.of({"max_draft_nodes": 4, "tier": "small", "service_tier": "flex"})
    own = OutriderOptions(tier="large", privacy="private")
    merged = overlay.merge(own)
    assert merged == OutriderOptions(tier="large", privacy="private", max_draft_nodes=4)
    assert overlay.merge(None) == OutriderOptions(tier="small", max_draft_nodes=4)
    assert overlay.merge_service_tier(None) == "flex"
    assert overlay.merge_service_tier("priority") == "priority"
    assert NO_OVERLAY.merge(own) is own
    assert NO_OVERLAY.merge(None) is None


def test_zero_and_off_are_settings_too() -> None:
    overlay = Overlay.of({"max_draft_nodes": 0, "threshold": 0.0, "speculation": "off"})
    assert overlay.fields == {"max_draft_nodes", "threshold", "speculation"}
    merged = overlay.merge(OutriderOptions(max_draft_nodes=7))
    assert merged == OutriderOptions(max_draft_nodes=7, threshold=0.0, speculation="off")


def test_two_overlays_hold_together() -> None:
    above = Overlay.of({"max_draft_nodes": 4, "service_tier": "flex"})
    below = Overlay.of({"max_draft_nodes": 8, "slo": {"class": "batch"}})
    assert above.over(below).document() == {
        "max_draft_nodes": 4,
        "slo": {"class": "batch"},
        "service_tier": "flex",
    }
    assert below.over(above).document()["max_draft_nodes"] == 8


def test_a_document_comes_back_as_it_was() -> None:
    document = {
        "quality": {"cascade": 0.5, "rule": "opt"},
        "sources": ["model", "suffix"],
        "slo": {"class": "batch", "ttft_ms": 10.0},
        "service_tier": "priority",
    }
    assert Overlay.of(document).document() == document
    assert Overlay.of(Overlay.of(document).document()) == Overlay.of(document)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"max_draft_node": 3}, "did you mean max_draft_nodes"),
        ({"thresold": 0.5}, "did you mean threshold"),
        ({"privacy": "private"}, "privacy is for the request alone"),
        ({"deadline_ms": 5}, "deadline_ms is for the request alone"),
        ({"max_draft_nodes": -1}, "max_draft_nodes: .* greater than or equal to 0"),
        ({"max_draft_nodes": "4"}, "max_draft_nodes: .* valid integer"),
        ({"quality": {"cascade": 4.0}}, "cascade: .* less than or equal to 1"),
        ({"slo": {"ttft": 4.0}}, "slo.ttft"),
        ({"service_tier": "fast"}, "service_tier"),
    ],
)
def test_invalid_arm_settings_are_refused_with_a_message(
    document: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Overlay.of(document)


def test_contradicting_arm_settings_are_refused() -> None:
    assert contradictions(frozenset({"tier"}), frozenset({"threshold"})) == {"tier", "threshold"}
    assert contradictions(frozenset({"tier"}), frozenset({"sources"})) == frozenset()
    assert contradictions(frozenset({"slo"}), frozenset({"slo"})) == {"slo"}
    assert "speculation" in related_fields({"max_draft_nodes"})
    assert related_fields({"service_tier"}) == {"service_tier"}


def test_sampling_fields_and_the_model_stand_beside_the_options() -> None:
    overlay = Overlay.of({"model": "small", "temperature": 0.25, "top_k": 7})
    assert overlay.model == "small"
    assert overlay.sampling == {"temperature": 0.25, "top_k": 7}
    assert overlay.merge(None) is None
    assert contradictions(frozenset({"model"}), frozenset({"tier"})) == {"model", "tier"}
    with pytest.raises(ValueError, match="less than or equal to 2"):
        Overlay.of({"temperature": 3})
    with pytest.raises(ValueError, match="seed is not a setting"):
        Overlay.of({"seed": 3})
