"""/admin/experiments over HTTP."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from outrider.gateway.contract.errors.http import handle_exception
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.errors import ErrorResponse
from outrider.gateway.experiments.admin import ExperimentApi
from outrider.gateway.experiments.admin_schema import (
    ExperimentAnalysis,
    ExperimentDetail,
    ExperimentList,
    ExperimentReport,
)
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.tenancy.keys.admin_handlers import AdminRoute
from outrider.gateway.tenancy.keys.keys import ANONYMOUS
from tests.gateway.answers import read_answer
from tests.gateway.experiments.making import SECRET, spec, user
from tests.gateway.http.edge.reading import read_small_body
from tests.gateway.route_fuzzing import document_of, fuzz_routes
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World

BOSS = {"authorization": f"Bearer {ADMIN_TOKEN}"}
ARMS = {"control": {}, "deep": {"set": {"max_draft_nodes": 32}}}


class Lab:
    """Experiments on a database, and their endpoints."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.experiments = Experiments(
            self.world.database, secret=SECRET, wall_clock=self.world.clock
        )

    def app(self) -> Starlette:
        """The routes and nothing else."""
        authenticator = self.world.authenticator
        api = ExperimentApi(authenticator, self.experiments, read_small_body)

        def endpoint(route: AdminRoute) -> Callable[[Request], Awaitable[Response]]:
            handler = api.endpoint(route)

            async def answer(request: Request) -> Response:
                header = request.headers.get("authorization")
                principal = authenticator.authenticate(header, None, "10.0.0.1")
                response = await handler(request, principal)
                response.headers["x-request-id"] = "1"
                return response

            return answer

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            await authenticator.start()
            await self.experiments.start()
            yield
            await self.experiments.close()
            await authenticator.close()
            self.world.database.close()

        return Starlette(
            routes=[
                Route(route.path, endpoint(route), methods=[route.method])
                for route in ExperimentApi.routes()
            ],
            exception_handlers={GatewayError: self._refuse},
            lifespan=lifespan,
        )

    @staticmethod
    async def _refuse(request: Request, error: Exception) -> Response:
        response = await handle_exception(request, error)
        response.headers["x-request-id"] = "1"
        return response


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def http(lab: Lab) -> Iterator[TestClient]:
    with TestClient(lab.app(), headers=BOSS) as client:
        yield client


def made(http: TestClient, **fields: Any) -> dict[str, Any]:
    answer = http.post("/admin/experiments", json={"name": "drafts", "arms": ARMS} | fields)
    assert answer.status_code == 200, answer.text
    read_answer(ExperimentReport, answer.content)
    result: dict[str, Any] = answer.json()
    return result


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    read_answer(ErrorResponse, answer.content)
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_life_without_a_restart(http: TestClient, lab: Lab) -> None:
    report = made(http, share=0.5, slo={"ttft_ms": 100})
    assert (report["state"], report["version"], report["share"]) == ("draft", 1, 0.5)
    assert report["arms"][1] == {
        "name": "deep",
        "share": 0.5,
        "set": {"max_draft_nodes": 32, "slo": {"ttft_ms": 100.0}},
        "is_control": False,
        "stopped": None,
    }
    assigner = lab.experiments.assigner
    assert not any(assigner.assign(user(i)) for i in range(100))
    assert http.post("/admin/experiments/drafts/start").json()["state"] == "running"
    before = {i for i in range(100) if assigner.assign(user(i)) is not None}
    assert 20 < len(before) < 80
    assert http.patch("/admin/experiments/drafts", json={"share": 1.0}).json()["version"] == 1
    assert all(assigner.assign(user(i)) for i in range(100))
    edited = http.patch("/admin/experiments/drafts", json={"metric": "ttft", "slo": None}).json()
    assert (edited["version"], edited["state"], edited["metric"]) == (2, "running", "ttft")
    assert "slo" not in edited["definition"]
    detail = http.get("/admin/experiments/drafts").json()
    read_answer(ExperimentDetail, detail)
    assert [version["definition"].get("metric") for version in detail["versions"]] == [None, "ttft"]
    kinds = [event["kind"] for event in detail["events"]]
    assert kinds == ["edited", "ramped", "started", "created"]
    assert "Stop it first" in error_of(http.delete("/admin/experiments/drafts"), 409)["message"]
    assert http.post("/admin/experiments/drafts/stop").json()["state"] == "stopped"
    assert not any(assigner.assign(user(i)) for i in range(100))
    assert http.delete("/admin/experiments/drafts").json()["deleted"] is True
    listed = http.get("/admin/experiments").json()
    read_answer(ExperimentList, listed)
    assert listed["data"] == []


def test_a_report(http: TestClient) -> None:
    made(http, start=True)
    report = http.get("/admin/experiments/drafts/report").json()
    ExperimentAnalysis.model_validate(report)
    assert [arm["arm"] for arm in report["arms"]] == ["control", "deep"]
    assert http.get("/admin/experiments/drafts/report?version=1").json()["version"] == 1
    gone = error_of(http.get("/admin/experiments/drafts/report?version=2"), 404)
    assert "no version 2" in gone["message"]
    for wrong in ("0", "x", "-1", "9" * 30, "1.5"):
        error = error_of(http.get(f"/admin/experiments/drafts/report?version={wrong}"), 400)
        assert error["param"] == "version"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"name": "x", "arms": {"a": {}}}', "arms"),
        ('{"name": "x", "arms": {"a": {}, "a": {}, "b": {}}}', "a: this field occurs twice"),
        ('{"name": "X", "arms": {"a": {}, "b": {}}}', "name"),
        ('{"arms": {"a": {}, "b": {}}}', "name: this field is required"),
        ('{"name": "x", "arms": {"a": {}, "b": {"set": {"tire": "small"}}}}', "did you mean tier"),
        (
            '{"name": "x", "arms": {"a": {"weight": 0.5}, "b": {"weight": 0.2}}}',
            "add up to 0.7, not to 1",
        ),
        ('{"name": "x", "arms": {"a": {}, "b": {}}, "share": 1.5}', "share"),
        ('{"name": "x", "arms": {"a": {}, "b": {}}, "salary": 1}', "salary"),
        ("{", "not valid JSON"),
    ],
)
def test_malformed_bodies_are_named(http: TestClient, body: str, says: str) -> None:
    answer = http.post(
        "/admin/experiments", content=body, headers={"content-type": "application/json"}
    )
    assert says in error_of(answer, 400)["message"]
    assert http.get("/admin/experiments").json()["data"] == []


def test_an_edit_is_checked_as_a_whole_and_a_conflict_changes_nothing(http: TestClient) -> None:
    made(http, share=0.5, start=True)
    before = http.get("/admin/experiments/drafts").json()
    error = error_of(http.patch("/admin/experiments/drafts", json={"control": "none"}), 400)
    assert "is not an arm; available: control, deep" in error["message"]
    taken = {"name": "other", "arms": ARMS, "share": 0.6, "start": True}
    error = error_of(http.post("/admin/experiments", json=taken), 409)
    assert "0.5 of the layer 'default' is free beside 'drafts'" in error["message"]
    error = error_of(http.post("/admin/experiments", json=taken | {"name": "drafts"}), 409)
    assert error["param"] == "name"
    assert http.get("/admin/experiments").json()["data"] == [
        {name: before[name] for name in before if name not in {"versions", "events"}}
    ]


def test_only_administrators_reach_existing_experiments(http: TestClient) -> None:
    made(http)
    for route in ExperimentApi.routes():
        path = route.path.replace("{experiment}", "drafts")
        answer = http.request(route.method, path, json={}, headers={"authorization": ""})
        assert answer.status_code == 401, route
        if "{experiment}" in route.path:
            missing = route.path.replace("{experiment}", "nobody")
            assert (
                "No experiment"
                in error_of(http.request(route.method, missing, json={"share": 1.0}), 404)[
                    "message"
                ]
            )
    assert ANONYMOUS.scopes.is_admin is False
    assert len(http.get("/admin/experiments").json()["data"]) == 1


@pytest.mark.long
def test_the_description_is_true(lab: Lab) -> None:
    """schemathesis finds no 5xx and nothing that is not described."""
    lab.experiments.store.create("known", spec())
    found = fuzz_routes(
        lab.app(),
        document_of(ExperimentApi.routes()),
        headers=BOSS,
        known={"experiment": ["known", "nobody"]},
        # Starlette's; each of these routes knows its own method only. And no schema can say that
        # weights add up, or that the control is one of the arms.
        is_excused=lambda check: check in {"allow_header_conformance", "positive_data_acceptance"},
    )
    lab.world.database.close()
    assert found.failures == []
    assert {200, 400, 404} <= set(found.statuses)
