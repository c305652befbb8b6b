"""Experiments under attack, and in clumsy hands: no request may fail because of one."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import httpx
import pytest
from rich.console import Console

from outrider.engine.errors import EngineError, InfeasibleObjectiveError
from outrider.engine.request import EngineRequest
from outrider.gateway.experiments.controller import ExperimentController
from outrider.gateway.experiments.measures import MeasureWriter
from outrider.gateway.experiments.recent import find_in_ledger
from outrider.gateway.experiments.registry import ExperimentRegistry
from outrider.gateway.experiments.statistics.report_text import print_report
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.http.edge.cors import CorsPolicy
from outrider.gateway.settings.experiments import ExperimentSpec
from outrider.gateway.tenancy.keys.keys import Principal, Scopes
from outrider.router.policy import NO_CONSTRAINTS, Route, RouteConstraintError, RouteConstraints
from tests.gateway.conftest import OpenWorld
from tests.gateway.hybrid import CHAT, TestPolicy, World
from tests.gateway.scripted_client import Script
from tests.gateway.tenancy.metering.tenants import Books

ADMIN = "the-administrators-token"
BOSS = {"authorization": f"Bearer {ADMIN}"}
NUM_TRIES = 16
Open = Callable[..., Any]


class UncalibratedPolicy(TestPolicy):
    """A router that cannot promise a quality."""

    __test__ = False

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        if constraints.min_quality is not None:
            raise RouteConstraintError("the router has no calibration table")
        return super().route(text, constraints)


@pytest.fixture
def opened(opened: OpenWorld, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a gateway with a key and an administrator's token; it looks and stores at once."""
    for kind, name in ((ExperimentRegistry, "refresh_s"), (MeasureWriter, "every_s")):
        monkeypatch.setitem(kind.__init__.__kwdefaults__, name, 0.05)

    @contextmanager
    def opening(**options: Any) -> Iterator[Books]:
        keys = {"refresh_s": 0.02, "admin_token": ADMIN}
        options = {"policy": UncalibratedPolicy(), **options}
        with opened(keys=keys, **options) as made:
            yield made

    return opening


def admin(made: Books, method: str, path: str = "", **wanted: Any) -> httpx.Response:
    """Return what an administrator asks of experiments."""
    body = {"json": wanted} if method in ("POST", "PATCH") else {}
    response = made.world.http.request(method, f"/admin/experiments{path}", headers=BOSS, **body)
    return response


def running(name: str, arm: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """An experiment of single requests whose arm "on" sets something."""
    arms = {"control": {}, "on": {"set": arm}}
    return {"name": name, "unit": "request", "arms": arms, "start": True, **fields}


def run(made: Books, name: str, arm: dict[str, Any], **fields: Any) -> None:
    """Make it through the API. It must be taken."""
    response = admin(made, "POST", **running(name, arm, **fields))
    assert response.status_code < 300, response.text


def run_unchecked(made: Books, name: str, arm: dict[str, Any]) -> None:
    """As `outrider experiment` does, which cannot ask a gateway what it can serve."""
    experiments = made.world.context.experiments
    wanted = running(name, arm)
    spec = ExperimentSpec.model_validate({key: wanted[key] for key in ("unit", "arms")})
    experiments.store.create(name, spec)
    experiments.store.start(name)
    made.until(lambda: runs(made, name))


def runs(made: Books, name: str) -> bool:
    """Return whether the gateway knows that it runs."""
    record = made.world.context.experiments.registry.experiments.get(name)
    return record is not None and record.is_running


def counted(made: Books, name: str, num_requests: int) -> dict[str, ArmTotals]:
    """Return what was counted of the newest version, when it is so much."""
    experiments = made.world.context.experiments
    found: dict[str, ArmTotals] = {}

    def is_complete() -> bool:
        version = experiments.store.get(name).version
        found.update(experiments.totals.totals(name, version))
        return sum(arm.num_requests for arm in found.values()) >= num_requests

    made.settle()
    made.until(is_complete)
    assert sum(arm.num_requests for arm in found.values()) == num_requests
    return found


IMPOSSIBLE: list[dict[str, Any]] = [
    {"tier": "huge"},
    {"min_quality": 0.9},
    {"slo": {"class": "no-such-class"}},
]


@pytest.mark.slow
def test_an_arm_that_cannot_be_served_is_refused_and_fails_no_request(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with opened() as made:
        world = made.world
        for number, arm in enumerate(IMPOSSIBLE):
            refused = admin(made, "POST", **running("impossible", arm))
            assert refused.status_code == 409, (arm, refused.text)
            assert "'on' cannot be served here" in refused.json()["error"]["message"]
            assert admin(made, "GET", "/impossible").status_code == 404
            name = f"broken-{number}"
            run_unchecked(made, name, arm)
            told = [world.chat() for _ in range(NUM_TRIES)]
            told += [world.chat(stream=True) for _ in range(NUM_TRIES)]
            assert {response.status_code for response in told} == {200}, (arm, told)
            seen = Counter(response.headers.get("x-outrider-arm") for response in told)
            assert set(seen) == {None, f"{name}:1/control"}, arm
            assert json.loads(told[0].content)["outrider"]["arm"] == told[0].headers.get(
                "x-outrider-arm"
            )
            totals = counted(made, name, seen[f"{name}:1/control"])
            assert set(totals) == {"control"}
            labels = f'arm="on",experiment="{name}"'
            sample = f"outrider_experiment_left_out_total{{{labels}}}"
            assert world.count(sample) == seen[None]
            where = {"json": {**CHAT}}
            assert {world.http.post("/v1/route", **where).status_code for _ in range(8)} == {200}
            assert world.count(sample) == seen[None]
            assert admin(made, "POST", f"/{name}/stop").status_code == 200
    assert "request left out of an experiment" in caplog.text


def test_a_request_that_contradicts_its_arm_is_left_out(opened: Open) -> None:
    with opened() as made:
        run(made, "places", {"policy": "cloud_only"})
        for _ in range(NUM_TRIES):
            private = made.world.chat(outrider={"privacy": "private"})
            assert private.status_code == 200, private.text
            assert "x-outrider-arm" not in private.headers
        wrong = {made.world.chat(temperature=9).status_code for _ in range(NUM_TRIES)}
        assert wrong == {400}
        assert counted(made, "places", 0) == {}


def test_keys_that_may_not_use_an_arms_tier_take_no_part(opened: Open) -> None:
    with opened() as made:
        run(made, "tiers", {"tier": "large"}, layer="a")
        narrow = made.new_key("narrow", scopes=Scopes(tiers=frozenset({"small"})))
        headers = {"authorization": f"Bearer {narrow}"}
        told = [made.world.chat(headers=headers) for _ in range(NUM_TRIES)]
        assert {response.status_code for response in told} == {200}
        # Nor are they the control's, or the arms would not be of the same keys.
        assert {response.headers.get("x-outrider-arm") for response in told} == {None}
        mine = Counter(made.world.chat().headers["x-outrider-arm"] for _ in range(NUM_TRIES))
        assert set(mine) == {"tiers:1/control", "tiers:1/on"}
        forced = made.world.chat(headers={**headers, "x-outrider-arm": "tiers/on"})
        assert forced.status_code == 403
        counted(made, "tiers", NUM_TRIES)


def test_an_arms_objective_refuses_no_request(opened: Open) -> None:
    with opened() as made:
        run(made, "hurry", {"slo": {"ttft_ms": 50}})
        for _ in range(NUM_TRIES):
            made.world.chat(outrider={"policy": "local_only"})
        objectives = {request.objective for request in made.world.engine.submitted}
        assert {one.ttft_s for one in objectives} >= {0.05}
        assert not any(one.refuses for one in objectives)
        made.world.chat(outrider={"policy": "local_only", "slo": {"ttft_ms": 50}})
        assert made.world.engine.submitted[-1].objective.refuses


BAD_ARMS = ["x" * 8000, "drafts/on,drafts/on", "drafts/ON", "'; drop table", "drafts/", "\xe9"]


def test_forcing_an_unknown_arm_is_refused_in_few_words(opened: Open) -> None:
    with opened() as made:
        run(made, "drafts", {"max_draft_nodes": 7})
        for wanted in BAD_ARMS:
            refused = made.world.chat(headers={"x-outrider-arm": wanted.encode("latin-1")})
            assert refused.status_code == 400
            assert len(refused.content) < 1000
            assert "drafts/on" in refused.json()["error"]["message"]


def test_other_tenants_experiments_can_neither_be_seen_nor_forced(opened: Open) -> None:
    with opened() as made:
        run(made, "secret", {"max_draft_nodes": 7}, eligible={"keys": ["kk000000"]})
        for wanted in ("secret/on", "secret/off"):
            refused = made.world.chat(headers={"x-outrider-arm": wanted})
            assert refused.status_code == 400
            assert "available: none" in refused.json()["error"]["message"]
        boss = made.new_key("boss", scopes=Scopes(is_admin=True))
        headers = {"authorization": f"Bearer {boss}", "x-outrider-arm": "secret/on"}
        seen = made.world.chat(headers=headers)
        assert seen.status_code == 200, seen.text
        assert seen.headers["x-outrider-arm"] == "forced:secret:1/on"


def give(made: Books, **said: Any) -> httpx.Response:
    """Feedback."""
    return made.world.http.post("/v1/feedback", json=said)


@pytest.mark.slow
def test_feedback_finds_streamed_answers_and_other_apis(opened: Open) -> None:
    with opened() as made:
        world = made.world
        run(made, "drafts", {"max_draft_nodes": 7})
        ids = [world.stream().chunks[0]["id"]]
        body = {"model": "auto", "input": "Hi"}
        ids.append(world.http.post("/v1/responses", json=body).json()["id"])
        with world.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        ids.append(json.loads(lines[0].removeprefix("data: "))["response"]["id"])
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": "auto", "messages": messages, "max_tokens": 9}
        ids.append(world.http.post("/v1/messages", json=body).json()["id"])
        with world.http.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        ids.append(json.loads(lines[0].removeprefix("data: "))["message"]["id"])
        ids.append(world.chat(headers={"x-request-id": "my-own-id"}).json()["id"])
        assert len(set(ids)) == 6
        for known_as in (*ids, "my-own-id"):
            for score in (0.0, 1.0, 1.0):  # again and again: the last word counts
                told = give(made, request_id=known_as, score=score)
                assert told.status_code == 200, (known_as, told.text)
        totals = counted(made, "drafts", 6)
    given = [one.values for arm in totals.values() for one in arm.feedback]
    assert (sum(one.n for one in given), sum(one.sum for one in given)) == (6, 6)


BAD_FEEDBACK = [
    b'{"request_id": "%s", "score": NaN}',
    b'{"request_id": "%s", "score": Infinity}',
    b'{"request_id": "%s", "score": 1e400}',
    b'{"request_id": "%s", "score": 1e12}',
    b'{"request_id": "%s", "score": "9"}',
    b'{"request_id": "%s", "score": true}',
    b'{"request_id": "%s", "success": 1}',
    b'{"request_id": "%s", "score": 1, "success": true}',
    b'{"request_id": "%s", "label": "two\\nlines"}',
    b'{"request_id": "%s", "label": "\\u0000"}',
    b'{"request_id": "%s", "label": "\\u202e"}',
    b'{"request_id": "%s", "label": "\\u009b31m"}',
    b'{"request_id": "%s", "label": "\\ud800"}',
    b'{"request_id": "%s", "label": "x", "name": "a b"}',
    b'{"request_id": "%s"}',
    b'{"request_id": "%s", "label": "x", "arm": "on"}',
    b"[1]",
    b'"%s"',
]


def test_bad_feedback_is_refused_in_words(opened: Open) -> None:
    with opened() as made:
        world = made.world
        known_as = world.chat().json()["id"].encode()
        made.settle()
        for text in BAD_FEEDBACK:
            body = text.replace(b"%s", known_as)
            headers = {"content-type": "application/json"}
            told = world.http.post("/v1/feedback", content=body, headers=headers)
            assert told.status_code == 400, (text, told.text)
            assert told.json()["error"]["message"], text
        for unknown in ("x" * 256, "chatcmpl-\n", "%", "' or 1=1 --"):
            assert give(made, request_id=unknown, score=1).status_code == 404, unknown
        names = [give(made, request_id=known_as.decode(), score=1, name=f"n{n}") for n in range(20)]
        assert Counter(one.status_code for one in names) == {200: 16, 400: 4}


def test_labels_are_words_and_not_markup_in_reports(opened: Open) -> None:
    with opened() as made:
        run(made, "drafts", {"max_draft_nodes": 7})
        for label in ("[/]", "[red]bad[/red]", "[link=http://x.example]y[/link]"):
            known_as = made.world.chat().json()["id"]
            assert give(made, request_id=known_as, label=label).status_code == 200
        counted(made, "drafts", 3)
        analysis = made.world.context.experiments._reporter.report("drafts")
    shown = StringIO()
    print_report(analysis, Console(file=shown, width=400))
    for text in ("[/]: 1", "[red]bad[/red]: 1", "[link=http://x.example]y[/link]: 1"):
        assert text in shown.getvalue()


@pytest.mark.slow
def test_a_bad_arm_is_stopped_automatically_and_reported(
    opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setitem(ExperimentController.__init__.__kwdefaults__, "every_s", 0.05)
    with opened(handoff={"policy": "local_only"}) as made:
        world, experiments = made.world, made.world.context.experiments
        run(
            made, "risky", {"max_draft_nodes": 7},
            guardrails={"error_share": 0.2}, eligible={"endpoints": ["chat"]},
        )  # fmt: skip
        works = world.engine.script

        def fails(request: EngineRequest) -> Script:
            is_bad = request.speculation.max_draft_nodes == 7
            return Script(refusal=EngineError("it breaks")) if is_bad else works(request)

        world.engine.script = fails
        for _ in range(200):
            assert world.chat().status_code in (200, 500)
            if experiments.registry.experiments["risky"].current.stopped_arms:
                break
        made.until(lambda: bool(experiments.store.get("risky").current.stopped_arms))
        made.until(lambda: not experiments.registry.experiments["risky"].is_running)
        assert {world.chat().status_code for _ in range(NUM_TRIES)} == {200}
        (shown,) = admin(made, "GET").json()["data"]
        assert shown["state"] == "stopped"
        assert "error_share is above 0.2" in json.dumps(shown)
        report = admin(made, "GET", "/risky/report").json()
        assert "error_share" in json.dumps(report)
        events = admin(made, "GET", "/risky").json()
        assert "arm_stopped" in json.dumps(events)
        assert world.count('outrider_experiment_guardrail_trips_total{guardrail="error_share"}') > 0
    assert "experiment arm stopped experiment=risky version=1 arm=on" in caplog.text


@pytest.mark.slow
def test_two_gateways_on_one_database_count_as_one(
    open_world: OpenWorld, opened: Open, database_url: str
) -> None:
    with opened(database_url=database_url) as made:
        shared = {"database_url": database_url, "keys": {"refresh_s": 0.02}}
        run(made, "drafts", {"max_draft_nodes": 7}, unit="user")
        with open_world(**shared, policy=UncalibratedPolicy()) as second:
            second.http.headers["authorization"] = f"Bearer {made.key}"
            made.until(lambda: second.http.get("/v1/models").status_code == 200)

            def arms(world: World) -> dict[str, str | None]:
                told = {f"u{n}": world.chat(user=f"u{n}") for n in range(12)}
                assert {response.status_code for response in told.values()} == {200}
                return {user: r.headers.get("x-outrider-arm") for user, r in told.items()}

            before = arms(made.world)
            assert set(before.values()) == {"drafts:1/control", "drafts:1/on"}
            assert arms(second) == before
            edited = {"arms": {"control": {}, "on": {"set": {"max_draft_nodes": 9}}}}
            assert admin(made, "PATCH", "/drafts", **edited).json()["version"] == 2
            registry = second.context.experiments.registry
            made.until(lambda: registry.experiments["drafts"].version == 2)
            after = arms(second)
            assert {u: a and a.replace(":2/", ":1/") for u, a in after.items()} == before
            assert admin(made, "POST", "/drafts/stop").status_code == 200
            made.until(lambda: not registry.experiments["drafts"].is_running)
            assert set(arms(second).values()) == {None}
        # The second one has gone, and written what it had; the first one's are read with it.
        new = counted(made, "drafts", 12)
        old = made.world.context.experiments.totals.totals("drafts", 1)
    shares = Counter(before.values())
    for name in ("control", "on"):
        num_users = shares[f"drafts:1/{name}"]
        assert (old[name].num_requests, new[name].num_requests) == (2 * num_users, num_users)


@pytest.mark.slow
def test_many_layers_are_named_whole_in_the_ledger(opened: Open) -> None:
    """Words that are cut would name arms without a request."""
    with opened() as made:
        names = [f"an-experiment-layer-{n:02}" for n in range(30)]
        store = made.world.context.experiments.store
        for name in names:
            arms: dict[str, Any] = {"a-very-long-name": {}, "another-long-nam": {}}
            spec = ExperimentSpec.model_validate({"arms": arms, "unit": "request", "layer": name})
            store.create(name, spec)
            store.start(name)
        made.until(lambda: runs(made, names[-1]))
        response = made.world.chat()
        label = response.headers["x-outrider-arm"]
        (row,) = made.rows(1)
        known = find_in_ledger(
            made.database, _principal(made), response.headers["x-request-id"], since_s=0.0
        )
    told = label.split(",")
    assert len(told) == 30
    kept = row["arm"].split(",")
    assert kept == told[: len(kept)]
    assert len(kept) >= 20
    assert known is not None
    assert {arm.arm for arm in known.arms} <= {"a-very-long-name", "another-long-nam"}


def _principal(made: Books) -> Principal:
    store = made.world.context.tenancy.keys.store
    assert store is not None
    (record,) = [one for one in store.load().keys if one.name == "tester"]
    return Principal(key_id=record.key_id, name="tester", tenant="tester")


def test_ramping_up_moves_no_unit(opened: Open) -> None:
    with opened() as made:
        run(made, "drafts", {"max_draft_nodes": 7}, unit="user", share=0.2)
        users = [f"user-{n}" for n in range(30)]
        seen: dict[str, str | None] = {}
        sizes = []
        for share in (0.2, 0.6, 1.0):
            assert admin(made, "PATCH", "/drafts", share=share).json()["version"] == 1
            arms = {u: made.world.chat(user=u).headers.get("x-outrider-arm") for u in users}
            assert all(arms[user] == arm for user, arm in seen.items() if arm is not None)
            seen = arms
            sizes.append(sum(arm is not None for arm in arms.values()))
    assert sizes[0] < sizes[1] < sizes[2] == len(users)


def test_one_tenants_dashboard_says_nothing_of_others(opened: Open) -> None:
    with opened() as made:
        run(made, "secret-thing", {"max_draft_nodes": 7})
        for _ in range(5):
            made.world.chat()
        made.settle()
        other = {"authorization": f"Bearer {made.new_key('other')}"}
        mine = made.world.http.get("/v1/dashboard").json()
        theirs = made.world.http.get("/v1/dashboard", headers=other).json()
        everything = made.world.http.get("/v1/dashboard", headers=BOSS).json()
    assert (mine["scope"], theirs["scope"], everything["scope"]) == ("own", "own", "all")
    assert "secret-thing" not in json.dumps([mine, theirs])
    assert (mine["engine"], theirs["engine"]) == (None, None)
    assert [one["requests"]["num"] for one in (mine, theirs)] == [5, 0], mine["requests"]


BAD_SLO: list[Any] = [
    {"ttft_ms": 0}, {"ttft_ms": -1}, {"ttft_ms": "100"}, {"ttft_ms": 1e12}, {"inter_token_ms": 0},
    {"class": "nope"}, {"class": ""}, {"class": 7}, {"ttft": 5}, {}, [], "short-chat", True,
]  # fmt: skip


def test_bad_objectives_are_refused_in_words(opened: Open) -> None:
    with opened() as made:
        for slo in BAD_SLO:
            told = made.world.chat(outrider={"slo": slo})
            if slo == {}:
                assert told.status_code == 200
                continue
            assert told.status_code == 400, (slo, told.text)
            assert told.json()["error"]["param"].startswith("outrider.slo"), (slo, told.text)
        for number in ("NaN", "Infinity", "1e999"):
            body = json.dumps(CHAT)[:-1] + f', "outrider": {{"slo": {{"ttft_ms": {number}}}}}}}'
            headers = {"content-type": "application/json"}
            told = made.world.http.post("/v1/chat/completions", content=body, headers=headers)
            assert told.status_code == 400, (number, told.text)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_objective_that_cannot_be_met_is_refused_with_the_wait(
    opened: Open, is_streamed: bool
) -> None:
    with opened(handoff={"policy": "local_only"}) as made:
        run(made, "drafts", {"max_draft_nodes": 7})
        for retry_after_s in (2.25, None):
            refusal = InfeasibleObjectiveError(
                ttft_s=0.05, predicted_wait_s=2.3, retry_after_s=retry_after_s
            )
            made.world.engine.script = lambda _, error=refusal: Script(refusal=error)
            told = made.world.chat(stream=is_streamed, outrider={"slo": {"ttft_ms": 50}})
            assert told.status_code == 429, told.text
            assert told.json()["error"]["code"] == "infeasible_objective"
            waits = {"retry-after": "3", "retry-after-ms": "2250", "x-should-retry": "true"}
            if retry_after_s is None:
                waits = {"x-should-retry": "false"}
            names = ("retry-after", "retry-after-ms", "x-should-retry")
            assert {n: told.headers[n] for n in names if n in told.headers} == waits
        totals = counted(made, "drafts", 2)
    assert sum(arm.count("refused") for arm in totals.values()) == 2


def test_pages_of_other_sites_may_force_an_arm() -> None:
    policy = CorsPolicy(("https://lab.example",))
    wanted = b"authorization,content-type,x-outrider-arm"
    headers = [
        (b"origin", b"https://lab.example"),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", wanted),
    ]
    told = policy.judge({"type": "http", "method": "OPTIONS", "headers": headers})
    assert dict(told.headers)[b"access-control-allow-headers"] == wanted
    assert told.refusal is None


def test_conversations_that_are_none_are_no_conversation(opened: Open) -> None:
    with opened() as made:
        run(made, "drafts", {"max_draft_nodes": 7}, unit="conversation")
        for messages in (5, None, "hi", {"a": 1}, [5], [{"role": "user"}], []):
            body = {"model": "auto", "messages": messages}
            told = made.world.http.post("/v1/chat/completions", json=body)
            assert told.status_code == 400, (messages, told.text)
