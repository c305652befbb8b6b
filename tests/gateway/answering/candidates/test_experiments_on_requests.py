"""Experiments from the request's side: arms, what they set, what is counted, what is said of it."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from outrider.engine.errors import QueueFullError
from outrider.gateway.experiments.totals import ArmTotals
from tests.gateway.conftest import OpenWorld
from tests.gateway.hybrid import LOCAL_TEXT
from tests.gateway.scripted_client import Script
from tests.gateway.tenancy.metering.tenants import Books

ADMIN = "the-administrators-token"
BOSS = {"authorization": f"Bearer {ADMIN}"}
ARMS = {
    "control": {"weight": 1.0},
    "wide": {"weight": 1.0, "set": {"max_draft_nodes": 7, "service_tier": "flex"}},
}
DRAFTS = {"name": "drafts", "unit": "user", "layer": "speculation", "arms": ARMS, "start": True}
Open = Callable[..., Any]
USERS = [f"user-{number}" for number in range(40)]


@pytest.fixture
def opened(opened: OpenWorld) -> Open:
    """Opens a gateway with a key, an administrator's token, and some experiments."""

    @contextmanager
    def opening(*experiments: dict[str, Any], **options: Any) -> Iterator[Books]:
        keys = {"refresh_s": 0.02, "admin_token": ADMIN}
        with opened(keys=keys, **options) as made:
            for wanted in experiments:
                response = made.world.http.post("/admin/experiments", json=wanted, headers=BOSS)
                assert response.status_code < 300, response.text
            yield made

    return opening


def arm_of(response: httpx.Response) -> str | None:
    """Return what the answer says of its arm, in its header and in its report."""
    assert response.status_code == 200, response.text
    header = response.headers.get("x-outrider-arm")
    assert response.json()["outrider"]["arm"] == header
    return header


def totals(made: Books, name: str, num_requests: int) -> dict[str, ArmTotals]:
    """Return the totals of the newest version, once so many requests have been counted."""
    experiments = made.world.context.experiments
    version = experiments.store.get(name).version
    found: dict[str, ArmTotals] = {}

    def is_complete() -> bool:
        # The report has written what was counted, in the server's own loop.
        report = made.world.http.get(f"/admin/experiments/{name}/report", headers=BOSS)
        assert report.status_code == 200, report.text
        found.update(experiments.totals.totals(name, version))
        return sum(arm.num_requests for arm in found.values()) >= num_requests

    made.settle()
    made.until(is_complete)
    assert sum(arm.num_requests for arm in found.values()) == num_requests
    return found


@pytest.mark.slow
def test_a_user_stays_in_an_arm_that_applies_its_settings(opened: Open) -> None:
    with opened(DRAFTS) as made:
        world = made.world
        seen = {}
        for user in USERS:
            seen[user] = arm_of(world.chat(user=user))
            request = world.engine.submitted[-1]
            is_wide = seen[user] == "drafts:1/wide"
            assert request.speculation.max_draft_nodes == (7 if is_wide else None)
            assert (request.priority < 0) is is_wide
            assert request.objective.is_batch is is_wide
            assert request.memory_group == seen[user], "arms do not draft from each other"
        assert {user: arm_of(world.chat(user=user)) for user in USERS} == seen
        counted = totals(made, "drafts", 2 * len(USERS))
        rows = made.rows(2 * len(USERS))
    shares = Counter(seen.values())
    assert set(shares) == {"drafts:1/control", "drafts:1/wide"}
    assert min(shares.values()) >= 8
    assert Counter(row["arm"] for row in rows) == {arm: 2 * n for arm, n in shares.items()}
    for arm in ("control", "wide"):
        assert counted[arm].num_requests == 2 * shares[f"drafts:1/{arm}"]
        assert counted[arm].count("attained") == counted[arm].num_requests
        assert counted[arm].metrics["cost_usd"].sum == pytest.approx(
            sum(row["cost_nanos"] for row in rows if row["arm"] == f"drafts:1/{arm}") / 1e9
        )


def test_a_request_with_its_own_setting_takes_no_part(opened: Open) -> None:
    with opened(DRAFTS) as made:
        world = made.world
        for fields in (
            {"outrider": {"max_draft_nodes": 3}},
            {"service_tier": "default"},
        ):
            assert arm_of(world.chat(user="user-1", **fields)) is None
        assert world.engine.submitted[0].speculation.max_draft_nodes == 3
        assert arm_of(world.chat(user="user-1", outrider={"tier": "small"})) is not None


@pytest.mark.slow
def test_the_report_says_why_requests_took_no_part(opened: Open) -> None:
    with opened(DRAFTS) as made:
        world = made.world
        for _ in range(3):
            assert arm_of(world.chat()) is None, "no user"
        assert arm_of(world.chat(user="user-1", service_tier="default")) is None
        totals(made, "drafts", 0)
        report = world.http.get("/admin/experiments/drafts/report", headers=BOSS).json()
        assert report["passed_over"] == {"no-unit": 3, "own-setting": 1}
        assert report["verdict"]["text"].startswith(
            "4 requests came, 0 took part: 3 without a user"
        )
        assert arm_of(world.chat(user="user-2")) is not None
        totals(made, "drafts", 1)


@pytest.mark.slow
def test_a_forced_arm_is_served_and_not_counted(opened: Open) -> None:
    with opened(DRAFTS) as made:
        world = made.world
        forced = arm_of(world.chat(headers={"x-outrider-arm": "drafts/wide"}))
        assert forced == "forced:drafts:1/wide"
        assert world.engine.submitted[-1].speculation.max_draft_nodes == 7
        refused = world.chat(headers={"x-outrider-arm": "drafts/narrow"})
        assert refused.status_code == 400
        assert "wide" in refused.json()["error"]["message"]
        totals(made, "drafts", 0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_apis_take_part_in_experiments(opened: Open, path: str) -> None:
    body: dict[str, Any] = {"model": "auto", "input": "Hi"}
    if path == "/v1/messages":
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": "auto", "messages": messages, "max_tokens": 9}
    by_key = {**DRAFTS, "unit": "key"}
    with opened(by_key) as made:
        response = made.world.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-outrider-arm"].startswith("drafts:1/")
        totals(made, "drafts", 1)


@pytest.mark.slow
def test_an_arm_may_send_requests_to_an_upstream_tier(opened: Open) -> None:
    policies = {
        "here": {"set": {"policy": "local_only"}},
        "there": {"set": {"policy": "cloud_only"}},
    }
    wanted = {"name": "places", "unit": "request", "arms": policies, "control": "here"}
    with opened({**wanted, "start": True}) as made:
        told = [made.world.chat() for _ in range(24)]
        counted = totals(made, "places", 24)
    by_arm = {arm_of(response): response.headers["x-outrider-tier"] for response in told}
    assert by_arm == {"places:1/here": "small", "places:1/there": "cloud"}
    assert counted["there"].count("attained") > 0


def test_an_arm_may_set_how_tokens_are_drawn(opened: Open) -> None:
    arms = {"control": {}, "cold": {"set": {"temperature": 0.125, "top_p": 0.5}}}
    wanted = {"name": "draws", "unit": "request", "arms": arms, "start": True}
    with opened(wanted) as made:
        world = made.world
        told = []
        for policy in ["local_only", "cloud_only"] * 12:
            arm = arm_of(world.chat(outrider={"policy": policy}))
            told.append((policy, arm))
            sampling = world.engine.submitted[-1].sampling
            if policy == "local_only":
                assert (sampling.temperature == 0.125) is (arm == "draws:1/cold")
                assert (sampling.top_p == 0.5) is (arm == "draws:1/cold")
        sent = [json.loads(request.body) for request in world.cloud.requests]
        expected = [arm for policy, arm in told if policy == "cloud_only"]
        assert [one.get("temperature") == 0.125 for one in sent[-12:]] == [
            arm == "draws:1/cold" for arm in expected
        ]
        assert arm_of(world.chat(temperature=1.0)) is None, "the request's own word"
        assert arm_of(world.chat(max_tokens=9)) is not None


@pytest.mark.slow
def test_experiments_of_two_layers_cross(opened: Open) -> None:
    watching = {
        "name": "watching", "unit": "user", "layer": "routing", "start": True,
        "arms": {"control": {}, "short": {"set": {"hold_back_tokens": 2}}},
    }  # fmt: skip
    with opened(DRAFTS, watching) as made:
        told = Counter(arm_of(made.world.chat(user=user)) for user in USERS)
        assert len(told) == 4
        assert all("," in (arm or "") for arm in told)
        other = {**watching, "name": "third", "layer": "x"}
        clash = made.world.http.post("/admin/experiments", json=other, headers=BOSS)
        assert clash.status_code == 409
        assert "hold_back_tokens" in clash.json()["error"]["message"]


@pytest.mark.slow
def test_feedback_finds_its_arm(opened: Open) -> None:
    with opened(DRAFTS) as made:
        world = made.world
        answers = {user: world.chat(user=user) for user in USERS[:6]}
        totals(made, "drafts", 6)
        for response in answers.values():
            said = {"request_id": response.json()["id"], "success": True}
            assert world.http.post("/v1/feedback", json=said).status_code == 200
        unknown = {"request_id": "chatcmpl-unknown", "success": True}
        assert world.http.post("/v1/feedback", json=unknown).status_code == 404
        foreign = {"authorization": f"Bearer {made.new_key('another')}"}
        mine = {"request_id": answers[USERS[0]].json()["id"], "success": False}
        refused = world.http.post("/v1/feedback", json=mine, headers=foreign)
        assert refused.status_code == 404
        counted = totals(made, "drafts", 6)
    given = [one.values for found in counted.values() for one in found.feedback]
    assert (sum(one.n for one in given), sum(one.sum for one in given)) == (6, 6)


@pytest.mark.slow
def test_a_refused_request_counts_and_a_wrong_one_does_not(opened: Open) -> None:
    local = {"policy": "local_only"}
    with opened({**DRAFTS, "unit": "key"}) as made:
        world = made.world
        assert world.chat(temperature=9).status_code == 400
        assert world.chat(max_tokens=10**6, outrider=local).status_code == 400
        refusal = QueueFullError(num_waiting=3, retry_after_s=1.0)
        world.engine.script = lambda _: Script(refusal=refusal)
        assert world.chat(outrider=local).status_code == 429
        world.says(LOCAL_TEXT)
        assert world.chat().status_code == 200
        counted = totals(made, "drafts", 2)
    (arm,) = [arm for arm in counted.values() if arm.num_requests]
    assert (arm.count("refused"), arm.count("attained")) == (1, 1)


@pytest.mark.slow
def test_the_dashboard_shows_the_requests(opened: Open) -> None:
    with opened(DRAFTS) as made:
        for user in USERS[:5]:
            made.world.chat(user=user)
        made.settle()
        shown = made.world.http.get("/v1/dashboard", headers=BOSS).json()
        refused = made.world.http.get("/v1/dashboard", headers={"authorization": "Bearer x"})
    assert refused.status_code == 401
    assert "drafts" in str(shown)
