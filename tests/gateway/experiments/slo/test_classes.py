"""Which latency a request is to have: its own words, its class's, and what is refused."""

import tomllib
from typing import Any

import pytest

from outrider.engine.errors import InfeasibleObjectiveError
from outrider.engine.request import NO_OBJECTIVE
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.experiments.slo.classes import ResolvedObjective, SloClasses
from outrider.gateway.settings.slo import SloSettings
from outrider.gateway.settings.toml_text import to_toml


def options(**slo: Any) -> OutriderOptions:
    return OutriderOptions.model_validate({"slo": slo})


CLASSES = SloClasses(
    SloSettings.model_validate(
        {
            "classes": {"voice": {"ttft_ms": 200, "inter_token_ms": 30}, "free": {}},
            "long_context_tokens": 100,
        }
    )
)


def latencies(resolved: ResolvedObjective) -> tuple[float | None, float | None]:
    return resolved.objective.ttft_s, resolved.objective.inter_token_s


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "short-chat"),
        ({"num_prompt_tokens": 99}, "short-chat"),
        ({"num_prompt_tokens": 100}, "long-context"),
        ({"has_tools": True, "num_prompt_tokens": 100}, "tool-calling"),
        ({"service_tier": "flex", "has_tools": True, "num_prompt_tokens": 100}, "batch"),
        ({"service_tier": "priority"}, "short-chat"),
    ],
)
def test_a_request_without_a_class_gets_the_one_that_fits(asked: dict[str, Any], name: str) -> None:
    resolved = CLASSES.resolve(None, **asked)
    assert resolved.class_name == name
    assert not resolved.objective.refuses
    assert resolved.objective.is_batch == (name == "batch")


def test_an_own_class_wins_over_what_the_request_looks_like() -> None:
    resolved = CLASSES.resolve(options(**{"class": "voice"}), has_tools=True, service_tier="flex")
    assert (resolved.class_name, *latencies(resolved)) == ("voice", 0.2, 0.03)
    assert not resolved.objective.is_batch
    assert not resolved.objective.refuses, "the objective is the class's, not the request's"


def test_own_latencies_win_one_by_one_over_the_class() -> None:
    resolved = CLASSES.resolve(options(**{"class": "voice"}, inter_token_ms=55))
    assert latencies(resolved) == (0.2, 0.055)
    resolved = CLASSES.resolve(options(ttft_ms=70))
    assert (resolved.class_name, *latencies(resolved)) == (
        "short-chat",
        0.07,
        0.1,
    )
    assert resolved.objective.refuses


def test_what_neither_request_nor_settings_say_is_assumed() -> None:
    assert CLASSES.resolve(None).objective.is_assumed
    assert CLASSES.resolve(None, has_tools=True).objective.is_assumed
    assert not CLASSES.resolve(None, service_tier="flex").objective.is_assumed
    assert not CLASSES.resolve(options(ttft_ms=70)).objective.is_assumed
    assert not CLASSES.resolve(options(**{"class": "short-chat"})).objective.is_assumed
    own = SloClasses(SloSettings.model_validate({"classes": {"short-chat": {"ttft_ms": 300}}}))
    assert not own.resolve(None).objective.is_assumed
    assert own.resolve(None, has_tools=True).objective.is_assumed


def test_a_class_without_objectives_asks_the_engine_for_nothing() -> None:
    assert CLASSES.resolve(options(**{"class": "free"})).objective is NO_OBJECTIVE
    idle = CLASSES.resolve(options(**{"class": "idle"})).objective
    assert (idle.is_batch, idle.is_yielding) == (True, True)
    batch = CLASSES.resolve(options(**{"class": "batch"})).objective
    assert (batch.is_batch, batch.is_yielding) == (True, False)
    assert batch.ttft_s is None


@pytest.mark.parametrize(("rule", "own", "others"), [("all", True, True), ("never", False, False)])
def test_the_refusal_rule_decides_which_requests_may_be_refused(
    rule: str, own: bool, others: bool
) -> None:
    classes = SloClasses(SloSettings.model_validate({"refuse": rule}))
    assert classes.resolve(options(ttft_ms=5)).objective.refuses is own
    assert classes.resolve(None).objective.refuses is others
    assert not classes.resolve(options(**{"class": "batch"})).objective.refuses, (
        "it has no such objective"
    )


def test_an_unknown_class_is_refused_naming_those_there_are() -> None:
    with pytest.raises(BadRequestError) as refused:
        CLASSES.resolve(options(**{"class": "short-chats"}))
    assert refused.value.param == "outrider.slo.class"
    assert "did you mean short-chat?" in str(refused.value)
    for name in ("short-chat", "long-context", "tool-calling", "batch", "voice", "free"):
        assert name in str(refused.value)
    with pytest.raises(BadRequestError):
        CLASSES.check(options(**{"class": ""}))


def test_changing_a_standard_class_leaves_the_others_as_they_are() -> None:
    settings = SloSettings.model_validate({"classes": {"short_chat": {"ttft_ms": 300}}})
    changed = settings.classes["short-chat"]
    assert (changed.ttft_ms, changed.inter_token_ms) == (300, 100)
    assert settings.classes["batch"].is_batch
    names = {"short-chat", "long-context", "tool-calling", "batch", "idle"}
    assert set(settings.classes) == names
    assert SloSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("classes", "what"),
    [
        ({"Voice": {}}, "'Voice' is not a class name"),
        ({"voice": {"ttft_ms": -1}}, "greater than or equal to 0"),
        ({"voice": {"ttft": 1}}, "Extra inputs"),
        ({"voice": 7}, "valid dictionary"),
        ({f"c{i}": {} for i in range(40)}, "45 classes are too many; define at most 32"),
    ],
)
def test_classes_that_cannot_be_are_refused(classes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        SloSettings.model_validate({"classes": classes})


def test_the_settings_are_written_and_read_alike() -> None:
    settings = SloSettings.model_validate({"classes": {"voice": {"ttft_ms": 200}}, "refuse": "all"})
    assert SloSettings.model_validate(tomllib.loads(to_toml(settings))) == settings


def test_an_infeasible_request_is_told_when_to_retry() -> None:
    told = problem_of(
        InfeasibleObjectiveError(ttft_s=0.1, predicted_wait_s=2.4, retry_after_s=2.3004)
    )
    assert (told.status, told.type, told.code) == (429, "rate_limit_error", "infeasible_objective")
    assert told.headers["retry-after"] == "3"
    assert told.headers["retry-after-ms"] == "2301"
    assert told.headers["x-should-retry"] == "true"


def test_a_never_feasible_request_is_told_not_to_retry() -> None:
    told = problem_of(
        InfeasibleObjectiveError(ttft_s=0.001, predicted_wait_s=0.4, retry_after_s=None)
    )
    assert told.status == 429
    assert "retry-after" not in told.headers
    assert told.headers["x-should-retry"] == "false"
