"""/admin/keys and /admin/teams over HTTP."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from outrider.gateway.contract.errors.http import handle_exception
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.errors import ErrorResponse
from outrider.gateway.settings.keys import KeySettings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage.database import DatabaseError
from outrider.gateway.tenancy.keys.admin import AdminApi
from outrider.gateway.tenancy.keys.admin_handlers import AdminRoute
from outrider.gateway.tenancy.keys.admin_schema import (
    KeyReport,
    NewKeyReport,
    TeamReport,
)
from outrider.gateway.tenancy.keys.key_parts import build_key_parts
from outrider.gateway.tenancy.keys.key_store import KeyStore
from outrider.gateway.tenancy.keys.keys import Scopes, id_in
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.gateway.answers import read_answer
from tests.gateway.http.edge.reading import read_small_body
from tests.gateway.route_fuzzing import document_of, fuzz_routes
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World

BOSS = {"authorization": f"Bearer {ADMIN_TOKEN}"}


async def refuse(request: Request, error: Exception) -> Response:
    response = await handle_exception(request, error)
    response.headers["x-request-id"] = "1"
    return response


def app_of(world: World, api: AdminApi | None = None) -> Starlette:
    """The routes and nothing else."""
    api = api or AdminApi(world.parts, read_small_body, wall_clock=world.clock)

    def endpoint(route: AdminRoute) -> Callable[[Request], Awaitable[Response]]:
        handler = api.endpoint(route)

        async def answer(request: Request) -> Response:
            headers = request.headers
            principal = world.authenticator.authenticate(
                headers.get("authorization"), headers.get("x-api-key"), "10.0.0.1"
            )
            response = await handler(request, principal)
            response.headers["x-request-id"] = "1"
            return response

        return answer

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await world.authenticator.start()
        yield
        await world.authenticator.close()
        world.database.close()

    routes = [
        Route(route.path, endpoint(route), methods=[route.method]) for route in AdminApi.routes()
    ]
    return Starlette(
        routes=routes,
        exception_handlers={GatewayError: refuse},
        lifespan=lifespan,
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def http(world: World) -> Iterator[TestClient]:
    with TestClient(app_of(world), headers=BOSS) as client:
        yield client


def made(http: TestClient, **fields: Any) -> dict[str, Any]:
    answer = http.post("/admin/keys", json={"name": "a"} | fields)
    assert answer.status_code == 200, answer.text
    read_answer(NewKeyReport, answer.content)
    assert answer.headers["cache-control"] == "no-store"
    result: dict[str, Any] = answer.json()
    return result


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    read_answer(ErrorResponse, answer.content)
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_key_is_made_shown_once_and_works_at_once(http: TestClient, world: World) -> None:
    limits = {"tokens_per_minute": 5, "models": {"large": {"usd_per_day": 0.5}}}
    scopes = {"models": ["auto"], "tiers": [], "admin": False}
    team = http.post("/admin/teams", json={"name": "t"}).json()
    key = made(http, limits=limits, team="t", labels={"a": "b"}, expires_at=2_000_000, **scopes)
    assert id_in(key["key"]) == key["id"]
    assert (key["limits"], key["team"], key["expires_at"]) == (limits, team["id"], 2_000_000)
    assert {name: key[name] for name in scopes} == scopes
    principal = world.authenticator.authenticate(f"Bearer {key['key']}", None, None)
    assert principal.limits.models["large"].usd_per_day == 0.5
    assert principal.scopes == Scopes(models=frozenset({"auto"}), tiers=frozenset())
    shown = http.get(f"/admin/keys/{key['id']}")
    assert shown.json() == {name: value for name, value in key.items() if name != "key"}
    read_answer(KeyReport, shown.content)


def test_an_update_changes_only_the_named_fields(http: TestClient, world: World) -> None:
    key = made(http, limits={"tokens_per_day": 5}, models=["auto"], admin=True, labels={"a": "b"})
    path = f"/admin/keys/{key['id']}"
    before = http.get(path).json()
    assert http.patch(path, json={}).json() == before
    assert http.patch(path, json={"name": "new"}).json() == before | {"name": "new"}
    team = http.post("/admin/teams", json={"name": "t"}).json()
    changes = {
        "models": None,
        "tiers": ["small"],
        "admin": False,
        "limits": {"requests_per_day": 1, "tokens_per_day": None},
        "weight": 2.0,
        "labels": None,
        "expires_at": 2_000_000,
        "team": team["id"],
    }
    after = http.patch(path, json=changes).json()
    merged = {"limits": {"requests_per_day": 1}, "labels": {}}
    assert after == before | {"name": "new"} | changes | merged
    assert http.patch(path, json={"team": None, "expires_at": None}).json()["team"] is None
    principal = world.authenticator.authenticate(f"Bearer {key['key']}", None, None)
    assert principal.limits.requests_per_day == 1
    assert not principal.scopes.is_admin


def test_what_a_key_prefers_is_kept_and_changed(http: TestClient) -> None:
    key = made(http, prefer="price")
    path = f"/admin/keys/{key['id']}"
    assert key["prefer"] == http.get(path).json()["prefer"] == "price"
    assert http.patch(path, json={"name": "b"}).json()["prefer"] == "price"
    assert http.patch(path, json={"prefer": "quality"}).json()["prefer"] == "quality"
    assert http.patch(path, json={"prefer": None}).json()["prefer"] is None
    refused = http.patch(path, json={"prefer": "speed"})
    assert error_of(refused, 400)["param"] == "prefer"


def test_revocation_and_rotation_hold_at_once(http: TestClient, world: World) -> None:
    key = made(http)
    path = f"/admin/keys/{key['id']}"
    authenticate = world.authenticator.authenticate
    rotated = http.post(f"{path}/rotate", json={"grace_s": 60}).json()
    assert rotated["old_secret_until"] == int(world.now_s) + 60
    assert authenticate(None, key["key"], None) is authenticate(None, rotated["key"], None)
    again = http.post(f"{path}/rotate", json={}).json()
    for old in (key, rotated):
        with pytest.raises(GatewayError):
            authenticate(None, old["key"], None)
    assert authenticate(None, again["key"], None).key_id == key["id"]
    assert http.delete(path).json()["status"] == "revoked"
    assert http.delete(path).json()["status"] == "revoked"
    with pytest.raises(GatewayError):
        authenticate(None, again["key"], None)
    assert "revoked" in error_of(http.post(f"{path}/rotate", json={}), 409)["message"]


def test_teams(http: TestClient, world: World) -> None:
    team = http.post("/admin/teams", json={"name": "t", "limits": {"tokens_per_day": 3}}).json()
    read_answer(TeamReport, team)
    key = made(http, team=team["id"])
    assert (
        http.get("/admin/teams/t").json() == http.get(f"/admin/teams/{team['id']}").json() == team
    )
    changed = http.patch("/admin/teams/t", json={"limits": {"tokens_per_day": 9}, "name": "u"})
    assert changed.json() == team | {"limits": {"tokens_per_day": 9}, "name": "u"}
    principal = world.authenticator.authenticate(None, key["key"], None)
    assert principal.team_limits.tokens_per_day == 9
    assert http.get("/admin/teams").json() == {"object": "list", "data": [changed.json()]}
    error = error_of(http.post("/admin/teams", json={"name": "u"}), 409)
    assert error["param"] == "name"
    error_of(http.get("/admin/teams/t"), 404)
    assert (
        error_of(http.post("/admin/keys", json={"name": "a", "team": "t"}), 404)["param"] == "team"
    )


def test_pages(http: TestClient) -> None:
    ids = sorted(made(http)["id"] for _ in range(3))
    first = http.get("/admin/keys", params={"limit": 2}).json()
    assert ([key["id"] for key in first["data"]], first["has_more"]) == (ids[:2], True)
    rest = http.get("/admin/keys", params={"limit": 2, "after": ids[1]}).json()
    assert ([key["id"] for key in rest["data"]], rest["has_more"]) == (ids[2:], False)
    for limit in ("0", "1001", "-1", "x", "1.5", "", "9" * 5000, "\u0663"):
        assert error_of(http.get("/admin/keys", params={"limit": limit}), 400)["param"] == "limit"


def test_keys_are_found_by_a_part_of_their_name_and_by_their_id(http: TestClient) -> None:
    ids = {
        name: http.post("/admin/keys", json={"name": name}).json()["id"]
        for name in ("Web shop", "web_shop", "100%", "batch")
    }

    def named(**query: str) -> list[str]:
        found = http.get("/admin/keys", params=query).json()
        return sorted(key["name"] for key in found["data"])

    assert named(name="WEB") == ["Web shop", "web_shop"]
    assert named(name="b_s") == ["web_shop"], "no character stands for others"
    assert named(name="%") == ["100%"]
    assert named(name=ids["batch"]) == named(name=f"or-{ids['batch']}") == ["batch"]
    assert named(name="web", after=max(ids["Web shop"], ids["web_shop"])) == []
    for wrong in ("x" * 257, "a\0", "a\nb"):
        refused = http.get("/admin/keys", params={"name": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")


def test_only_administrators(http: TestClient, world: World) -> None:
    plain = made(http)["key"]
    admin = made(http, admin=True)["key"]
    for route in AdminApi.routes():
        path = route.path.format(key_id="abcdefgh", team="t")
        for key, status in ((None, 401), ("or-" + "x" * 51, 401), (plain, 403)):
            headers = {"authorization": "" if key is None else f"Bearer {key}"}
            answer = http.request(route.method, path, headers=headers, json={})
            error_of(answer, status)
    assert http.get("/admin/keys", headers={"authorization": f"Bearer {admin}"}).status_code == 200


def test_no_request_administrates_while_no_key_is_required(world: World) -> None:
    with TestClient(app_of(world)) as client:
        assert world.authenticator.is_open
        error_of(client.get("/admin/keys"), 401)
        assert client.get("/admin/keys", headers=BOSS).json()["data"] == []


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"name": ""}', "name"),
        (b'{"name": "a\\u0000b"}', "name"),
        (b'{"name": "a\\nlevel=INFO"}', "name"),
        (b'{"name": "\\ud800"}', None),
        (b'{"name": 5}', "name"),
        (b"{}", "name"),
        (b'{"name": "a", "colour": "red"}', "colour"),
        (b'{"name": "a", "limits": {"tokens_per_minute": -1}}', "limits.tokens_per_minute"),
        (b'{"name": "a", "limits": {"tokens_per_minute": 1.5}}', "limits.tokens_per_minute"),
        (b'{"name": "a", "limits": {"tokens_per_minute": 1e300}}', "limits.tokens_per_minute"),
        (b'{"name": "a", "limits": {"usd_per_day": NaN}}', "limits.usd_per_day"),
        (b'{"name": "a", "limits": {"models": {"l": {"models": {}}}}}', "limits.models.l.models"),
        (b'{"name": "a", "labels": {"a\\n": "b"}}', "labels.a\n"),
        (b'{"name": "a", "labels": {"a": "b\\r"}}', "labels.a"),
        (b'{"name": "a", "weight": 0}', "weight"),
        (b'{"name": "a", "expires_at": 1e30}', "expires_at"),
        (b'{"name": "a", "admin": "yes"}', "admin"),
    ],
)
def test_malformed_bodies_are_named(http: TestClient, body: bytes, param: str | None) -> None:
    headers = {"content-type": "application/json"}
    answer = http.post("/admin/keys", content=body, headers=headers)
    error = error_of(answer, 400)
    if param is not None and "\n" not in param:
        assert error["param"] == param
    assert http.get("/admin/keys").json()["data"] == []


def test_labels_are_only_words(http: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    evil = {"'; DROP TABLE keys; --": "%(key_id)s {0} ${jndi:x} \u2028 level=INFO"}
    with caplog.at_level(logging.DEBUG):
        key = made(http, labels=evil, name="x' OR '1'='1")
        assert http.get(f"/admin/keys/{key['id']}").json()["labels"] == evil
        error_of(http.get("/admin/keys/x' OR '1'='1"), 404)
        error_of(http.get("/admin/teams/x' OR '1'='1"), 404)
    assert f"key created id={key['id']} by=admin-token" in caplog.text
    assert "DROP" not in caplog.text
    assert "OR '1'" not in caplog.text
    assert key["key"] not in caplog.text


@pytest.mark.parametrize("key_id", ["abcdefgh", "ABCDEFGH", "a", "a" * 5000, "%00", "..%2f", "ü"])
def test_unknown_keys_are_not_found(http: TestClient, key_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("PATCH", ""), ("POST", "/rotate")):
        answer = http.request(method, f"/admin/keys/{key_id}{path}", json={})
        assert answer.status_code == 404


def test_a_database_that_is_away(http: TestClient, world: World) -> None:
    key = made(http)

    def away(*_: object, **__: object) -> None:
        raise DatabaseError("postgresql://secret-host/x: it is away")

    for method in ("page", "get", "create", "revoke"):
        setattr(world.store, method, away)
    for answer in (
        http.get("/admin/keys"),
        http.post("/admin/keys", json={"name": "a"}),
        http.get(f"/admin/keys/{key['id']}"),
        http.delete(f"/admin/keys/{key['id']}"),
    ):
        error = error_of(answer, 503)
        assert error["code"] == "storage_unavailable"
        assert "secret-host" not in answer.text
        assert answer.headers["retry-after"] == "1"
    # Whoever has a key is not concerned.
    assert world.authenticator.authenticate(None, key["key"], None).key_id == key["id"]


def test_a_change_holds_though_it_could_not_be_read_again(http: TestClient, world: World) -> None:
    def away() -> int:
        raise DatabaseError("it is away")

    there, world.store.version = world.store.version, away  # type: ignore[method-assign]
    key = made(http)
    world.store.version = there  # type: ignore[method-assign]
    assert made(http)["id"] != key["id"]
    assert world.authenticator.authenticate(None, key["key"], None).key_id == key["id"]


@pytest.mark.parametrize("kind", ["keys", "teams"])
def test_a_limit_of_an_unknown_tier_is_refused(world: World, kind: str) -> None:
    api = AdminApi(world.parts, read_small_body, upstream_tiers=("cloud",))
    bad, good = ({"models": {tier: {"tokens_per_day": 5}}} for tier in ("lagre", "cloud"))
    with TestClient(app_of(world, api), headers=BOSS) as http:
        made = http.post(f"/admin/{kind}", json={"name": "a", "limits": good}).json()
        path = f"/admin/{kind}/{made['id']}"
        for refused in (
            http.post(f"/admin/{kind}", json={"name": "b", "limits": bad}),
            http.patch(path, json={"limits": bad}),
        ):
            error = error_of(refused, 400)
            assert error["param"] == "limits.models"
            assert "unknown tier 'lagre'; available: small, large, cloud" in error["message"]
        assert http.get(path).json()["limits"] == good
        gone = {"models": {"lagre": None}}  # of a tier that was there once
        assert http.patch(path, json={"limits": gone}).status_code == 200


def test_without_a_database_there_is_nothing_to_administrate(world: World) -> None:
    keys = KeySettings(admin_token=SecretStr(ADMIN_TOKEN))
    parts = build_key_parts(Settings(database_url="none", keys=keys), None)
    api = AdminApi(parts, read_small_body)
    world.authenticator = parts.authenticator
    with TestClient(app_of(world, api), headers=BOSS) as client:
        assert error_of(client.get("/admin/keys"), 404)["code"] == "no_database"


@pytest.mark.long
def test_the_description_is_true(world: World) -> None:
    """schemathesis finds no 5xx and nothing that is not described."""
    assert isinstance(world.store, KeyStore)
    key = world.store.create(KeyOrder(name="known")).record
    found = fuzz_routes(
        app_of(world),
        document_of(AdminApi.routes()),
        headers=BOSS,
        known={"key_id": [key.key_id, "zzzzzzzz", "x"]},
        # Starlette's; each of these routes knows its own method only.
        is_excused=lambda check: check == "allow_header_conformance",
    )
    world.database.close()
    assert found.failures == []
    assert found.statuses.count(200) > 50
    assert found.statuses.count(400) > 50
    assert not any(status >= 500 for status in found.statuses)
