"""Arms that name a model or an alias, from the request's side."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from outrider.gateway.tenancy.keys.keys import Scopes
from tests.gateway.conftest import OpenWorld
from tests.gateway.tenancy.metering.tenants import Books

ADMIN = "the-administrators-token"
BOSS = {"authorization": f"Bearer {ADMIN}"}
HERE_THERE = {"here": {"set": {"model": "small"}}, "there": {"set": {"model": "cloud"}}}
PLACES = {"name": "places", "unit": "request", "arms": HERE_THERE, "control": "here", "start": True}
ALIASES = {"fast": {"models": ["small"]}, "good": {"models": ["cloud", "large"]}}
Open = Callable[..., Any]


@pytest.fixture
def opened(opened: OpenWorld) -> Open:
    @contextmanager
    def opening(wanted: dict[str, Any], **options: Any) -> Iterator[Books]:
        keys = {"refresh_s": 0.02, "admin_token": ADMIN}
        with opened(keys=keys, **options) as made:
            response = made.world.http.post("/admin/experiments", json=wanted, headers=BOSS)
            assert response.status_code < 300, response.text
            yield made

    return opening


def served(response: httpx.Response) -> tuple[str | None, str]:
    """Return an answer's arm, and the tier that gave it."""
    assert response.status_code == 200, response.text
    return response.headers.get("x-outrider-arm"), response.headers["x-outrider-tier"]


@pytest.mark.slow
def test_arms_name_models_for_requests_that_leave_the_choice(opened: Open) -> None:
    with opened(PLACES) as made:
        told = Counter(served(made.world.chat()) for _ in range(24))
        assert set(told) == {("places:1/here", "small"), ("places:1/there", "cloud")}
        assert made.world.engine.submitted[-1].memory_group == "places:1/here"
        assert served(made.world.chat(model="large")) == (None, "large"), "its own choice"
        assert served(made.world.chat(outrider={"tier": "small"})) == (None, "small")


@pytest.mark.slow
def test_arms_name_aliases_in_place_of_an_alias(opened: Open) -> None:
    arms = {"fast": {"set": {"model": "fast"}}, "good": {"set": {"model": "good"}}}
    wanted = {**PLACES, "arms": arms, "control": "fast", "eligible": {"models": ["my-app"]}}
    aliases = {**ALIASES, "my-app": {"models": ["large"]}}
    with opened(wanted, aliases=aliases) as made:
        told = Counter(served(made.world.chat(model="my-app")) for _ in range(24))
        assert set(told) == {("places:1/fast", "small"), ("places:1/good", "cloud")}
        assert served(made.world.chat(model="fast")) == (None, "small"), "not eligible"
        made.world.cloud.refuse()
        after = {served(made.world.chat(model="my-app")) for _ in range(12)}
        assert ("places:1/good", "large") in after, "the arm's chain goes on"


def test_an_arm_that_cannot_be_served_leaves_the_request_as_it_was(opened: Open) -> None:
    wanted = {**PLACES, "eligible": {"models": ["my-app", "auto"]}}
    with opened(wanted, aliases={"my-app": {"models": ["large"]}}) as made:
        image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
        messages = [{"role": "user", "content": image}]
        told = {served(made.world.chat(messages=messages)) for _ in range(12)}
        assert told == {("places:1/there", "cloud"), (None, "cloud")}, "no local model sees it"
        left = 'outrider_experiment_left_out_total{arm="here",experiment="places"}'
        assert made.world.count(left) > 0
        assert served(made.world.chat(model="my-app"))[0] is not None


@pytest.mark.slow
def test_keys_that_may_not_name_every_arms_model_take_no_part(opened: Open) -> None:
    narrow = Scopes(models=frozenset({"auto", "small"}))
    with opened(PLACES, scopes=narrow) as made:
        answers = [made.world.chat() for _ in range(12)]
        assert {answer.status_code for answer in answers} == {200}
        assert not any("x-outrider-arm" in answer.headers for answer in answers)
        forced = made.world.chat(headers={"x-outrider-arm": "places/there"})
        assert forced.status_code == 403, forced.text


def test_a_forced_arm_sets_its_model(opened: Open) -> None:
    with opened(PLACES) as made:
        forced = made.world.chat(headers={"x-outrider-arm": "places/there"})
        assert served(forced) == ("forced:places:1/there", "cloud")


def test_an_unknown_model_is_refused_at_the_start(opened: Open) -> None:
    arms = {"here": {}, "there": {"set": {"model": "nowhere"}}}
    with opened({**PLACES, "name": "other"}) as made:
        wanted = {**PLACES, "arms": arms, "layer": "second"}
        refused = made.world.http.post("/admin/experiments", json=wanted, headers=BOSS)
        assert refused.status_code == 409, refused.text
        assert "nowhere" in refused.json()["error"]["message"]
