"""Places that may answer, in order: every policy with every kind of model, private or not."""

import itertools
from typing import get_args

import pytest

from outrider.gateway.answering.reading.parsed_request import PlacementConstraints, constraints_of
from outrider.gateway.answering.reading.placement_policy import Named, PlacementPolicy
from outrider.gateway.contract.answers.responder import Place
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.kinds import Policy
from outrider.gateway.settings.tiers import HandoffSettings
from outrider.verifier.params import Tier

BOTH = PlacementPolicy(upstream_tier="cloud")
LOCAL_ONLY = PlacementPolicy()
CLOUD_ONLY = PlacementPolicy(
    policy="cloud_only", upstream_tier="cloud", has_local=False, strong_place="upstream"
)

POLICIES: tuple[Policy | None, ...] = (None, *get_args(Policy))
NAMED: tuple[Named, ...] = get_args(Named)

# What comes of (what the model means, the request's policy), with a model here and a tier there.
PLACES = {
    ("auto", None): ("local", "upstream"),
    ("auto", "local_only"): ("local",),
    ("auto", "prefer_local"): ("local", "upstream"),
    ("auto", "prefer_cloud"): ("upstream", "local"),
    ("auto", "cloud_only"): ("upstream",),
    ("local", None): ("local",),
    ("local", "local_only"): ("local",),
    ("local", "prefer_local"): ("local", "upstream"),
    ("local", "prefer_cloud"): ("upstream", "local"),
    ("local", "cloud_only"): None,
    ("upstream", None): ("upstream",),
    ("upstream", "local_only"): None,
    ("upstream", "prefer_local"): ("local", "upstream"),
    ("upstream", "prefer_cloud"): ("upstream", "local"),
    ("upstream", "cloud_only"): ("upstream",),
}


def constraints(
    rules: PlacementPolicy, named: Named = "auto", **options: object
) -> PlacementConstraints:
    cloud = "other" if named == "upstream" else None
    parsed = OutriderOptions.model_validate(options)
    return constraints_of(parsed, rules, arrival_s=100.0, named=named, upstream_tier=cloud)


def refusal(rules: PlacementPolicy, named: Named = "auto", **options: object) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        constraints(rules, named, **options)
    assert problem_of(caught.value).status == 400
    assert str(caught.value).startswith(f"{caught.value.param}: ")
    return caught.value


@pytest.mark.parametrize(("named", "policy"), list(itertools.product(NAMED, POLICIES)))
def test_places(named: Named, policy: Policy | None) -> None:
    places = PLACES[named, policy]
    if places is None:
        error = refusal(BOTH, named, policy=policy)
        assert error.param == "outrider.policy"
        assert "contradicts the model" in str(error)
        return
    made = constraints(BOTH, named, policy=policy)
    assert made.places == places
    assert not made.is_private
    tier = "other" if named == "upstream" else "cloud"
    assert made.upstream_tier == (tier if "upstream" in places else None)
    assert made.may_hand_off == (places == ("local", "upstream"))


@pytest.mark.slow_cases
@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("default", get_args(Policy))
@pytest.mark.parametrize("strong_place", ["local", "upstream"])
@pytest.mark.parametrize("has_local", [True, False])
@pytest.mark.parametrize("cloud", [None, "cloud"])
def test_private_requests_never_name_the_cloud(
    named: Named,
    policy: Policy | None,
    default: Policy,
    strong_place: Place,
    has_local: bool,
    cloud: str | None,
) -> None:
    rules = PlacementPolicy(
        policy=default, upstream_tier=cloud, has_local=has_local, strong_place=strong_place
    )
    if not has_local or named == "upstream" or policy == "cloud_only":
        assert refusal(rules, named, policy=policy, privacy="private").param == "outrider.privacy"
        return
    if policy == "prefer_cloud" and cloud is None:
        assert refusal(rules, named, policy=policy, privacy="private").param == "outrider.policy"
        return
    made = constraints(rules, named, policy=policy, privacy="private")
    assert made.is_private
    assert made.places == ("local",)
    assert made.upstream_tier is None
    assert made.strong_place == "local"
    assert not made.may_hand_off
    assert made.reason == "private"


@pytest.mark.parametrize(
    ("rules", "named", "policy", "words"),
    [
        (BOTH, "auto", "cloud_only", "cloud_only does not allow"),
        (BOTH, "upstream", None, "the other tier is an upstream server"),
        (BOTH, "upstream", "prefer_local", "the other tier is an upstream server"),
        (CLOUD_ONLY, "auto", None, "no model is loaded"),
    ],
)
def test_private_contradictions(
    rules: PlacementPolicy, named: Named, policy: Policy | None, words: str
) -> None:
    error = refusal(rules, named, policy=policy, privacy="private")
    assert error.param == "outrider.privacy"
    assert words in str(error)


def test_private_overrules_the_configured_policy_only() -> None:
    rules = PlacementPolicy(policy="cloud_only", upstream_tier="cloud", strong_place="upstream")
    assert constraints(rules).places == ("upstream",)
    assert constraints(rules, privacy="private").places == ("local",)
    assert constraints(BOTH, policy="prefer_cloud", privacy="private").places == ("local",)


@pytest.mark.parametrize("policy", ["prefer_cloud", "cloud_only"])
def test_upstream_policies_are_refused_without_an_upstream_tier(policy: Policy) -> None:
    for named in ("auto", "local"):
        if (named, policy) == ("local", "cloud_only"):
            continue
        error = refusal(LOCAL_ONLY, named, policy=policy)
        assert error.param == "outrider.policy"
        assert "no upstream tier" in str(error)
    for policy in ("local_only", "prefer_local"):
        assert constraints(LOCAL_ONLY, policy=policy).places == ("local",)
    assert constraints(LOCAL_ONLY, privacy="private").places == ("local",)


@pytest.mark.parametrize("policy", ["prefer_local", "local_only"])
def test_without_a_local_model(policy: Policy) -> None:
    error = refusal(CLOUD_ONLY, policy=policy)
    assert error.param == "outrider.policy"
    assert "no model is loaded" in str(error)
    assert constraints(CLOUD_ONLY).places == ("upstream",)
    for named in ("auto", "upstream"):
        assert constraints(CLOUD_ONLY, named, policy="prefer_cloud").places == ("upstream",)


@pytest.mark.parametrize("default", get_args(Policy))
def test_the_configured_policy_is_for_auto(default: Policy) -> None:
    rules = PlacementPolicy(policy=default, upstream_tier="cloud")
    assert constraints(rules).places == PLACES["auto", default]
    assert constraints(rules).policy == default
    assert constraints(rules, "local").places == ("local",)
    assert constraints(rules, "upstream").places == ("upstream",)


@pytest.mark.parametrize(
    ("named", "options", "reason"),
    [
        ("auto", {}, "policy: prefer_local"),
        ("auto", {"policy": "prefer_cloud"}, "policy: prefer_cloud"),
        ("local", {}, "requested"),
        ("upstream", {}, "requested"),
        ("upstream", {"policy": "prefer_local"}, "policy: prefer_local"),
        ("local", {"privacy": "private"}, "private"),
    ],
)
def test_reasons(named: Named, options: dict[str, str], reason: str) -> None:
    assert constraints(BOTH, named, **options).reason == reason


def test_the_deadline_is_the_requests_own_else_the_configured_one() -> None:
    assert constraints(BOTH).deadline_s is None
    assert constraints(BOTH, deadline_ms=250).deadline_s == 100.25
    rules = PlacementPolicy(deadline_s=2.0)
    assert constraints(rules).deadline_s == 102.0
    assert constraints(rules, deadline_ms=60_000).deadline_s == 160.0


def test_the_strong_place_is_one_of_the_places() -> None:
    rules = PlacementPolicy(upstream_tier="cloud", strong_place="upstream")
    assert constraints(rules).strong_place == "upstream"
    assert constraints(rules, policy="prefer_cloud").strong_place == "upstream"
    assert constraints(rules, policy="local_only").strong_place == "local"
    assert constraints(rules, "local", policy="prefer_local").strong_place == "local"  # it is named
    assert constraints(BOTH, policy="cloud_only").strong_place == "upstream"
    assert constraints(BOTH, policy="prefer_cloud").strong_place == "local"


# ---- from the settings -------------------------------------------------------------------------


def test_rules_of_the_settings() -> None:
    made = PlacementPolicy.of(HandoffSettings(), tiers=["cloud", "other"], local=["small", "large"])
    assert made == PlacementPolicy(
        policy="prefer_local", upstream_tier="cloud", has_local=True, strong_place="local"
    )
    made = PlacementPolicy.of(HandoffSettings(), tiers=["cloud"], local=["small"])
    assert (made.policy, made.strong_place) == ("prefer_local", "upstream")
    made = PlacementPolicy.of(HandoffSettings(), tiers=[], local=["small"])
    assert (made.upstream_tier, made.strong_place) == (None, "local")
    made = PlacementPolicy.of(HandoffSettings(), tiers=["cloud"], local=[])
    assert made == CLOUD_ONLY
    settings = HandoffSettings(
        tier="other", policy="prefer_cloud", strong="cloud", max_queue_ms=500, deadline_ms=2_000,
        continue_on_failure=True,
    )  # fmt: skip
    made = PlacementPolicy.of(settings, tiers=["cloud", "other"], local=["small", "large"])
    assert made == PlacementPolicy(
        policy="prefer_cloud", upstream_tier="other", strong_place="upstream", max_queue_s=0.5,
        deadline_s=2.0, continue_on_failure=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "tiers", "local", "words"),
    [
        ({"tier": "clod"}, ["cloud"], ["small"], "handoff.tier: unknown tier 'clod'"),
        ({"tier": "cloud"}, [], ["small"], "handoff.tier"),
        ({"policy": "prefer_cloud"}, [], ["small"], "handoff.policy: prefer_cloud"),
        ({"policy": "cloud_only"}, [], ["small"], "handoff.policy: cloud_only"),
        ({"policy": "local_only"}, ["cloud"], [], "handoff.policy: local_only"),
        ({"policy": "prefer_local"}, ["cloud"], [], "no model is loaded"),
        ({"strong": "cloud"}, [], ["small"], "handoff.strong: cloud"),
        ({"strong": "local"}, ["cloud"], [], "handoff.strong: local"),
        ({}, [], [], "no upstream tier"),
    ],
)
def test_settings_that_cannot_be_met(
    settings: dict[str, str], tiers: list[str], local: list[Tier], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PlacementPolicy.of(HandoffSettings.model_validate(settings), tiers=tiers, local=local)
