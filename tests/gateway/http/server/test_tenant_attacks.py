"""Attacks of one tenant on another's identity, data and requests, over real sockets."""

import base64
import concurrent.futures
import io
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.engine.errors import QueueFullError
from outrider.gateway.telemetry.logs import TextFormatter
from outrider.gateway.tenancy.keys import authenticator
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder
from tests.gateway.conftest import wait_for
from tests.gateway.hybrid import CHAT, LOCAL_TEXT, TestPolicy
from tests.gateway.scripted_client import Script
from tests.gateway.tenancy.metering.tenants import Books, Open
from tests.gateway.watches import PlannedWatch

ADMIN = Scopes(is_admin=True)
PATHS = {
    "/v1/chat/completions": {"messages": CHAT["messages"]},
    "/v1/completions": {"prompt": "Hello there"},
    "/v1/responses": {"input": "Hello there"},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses/input_tokens": {"input": "Hello there"},
    "/api/chat": {"messages": CHAT["messages"]},
    "/api/generate": {"prompt": "Hello there"},
    "/v1/route": {"messages": CHAT["messages"]},
    "/v1/tokenize": {"prompt": "Hello there"},
}
SQL = ("' OR '1'='1", "x'; DROP TABLE ledger;--", "%", "*", "a' UNION SELECT hash FROM keys--")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def get(made: Books, key: str, path: str) -> httpx.Response:
    return made.world.http.get(path, headers=bearer(key))


def status_of_raw(made: Books, *lines: bytes) -> int:
    """Return what a request with these header lines, byte for byte, is answered."""
    host, _, port = made.world.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        head = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        client.sendall(head + b"".join(line + b"\r\n" for line in lines) + b"\r\n")
        return int(client.recv(4096).split(b" ")[1])


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """Everything that is logged meanwhile, as the gateway writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter("gateway"))
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


# ---- keys ---------------------------------------------------------------------------------------


def test_a_key_counts_in_its_two_headers_only(opened: Open) -> None:
    with opened() as made:
        key, other = made.key, made.new_key("other")
        basic = base64.b64encode(f"{key}:".encode()).decode()
        wide = key.translate({code: code + 0xFEE0 for code in range(0x21, 0x7F)})
        refused: list[dict[str, str | bytes]] = [
            {"cookie": f"authorization=Bearer {key}; x-api-key={key}"},
            {"authorization": f"Basic {basic}"},
            {"authorization": f"Basic {key}"},
            {"authorization": f"Token {key}"},
            {"authorization": f"Bearer {key}x"},
            {"authorization": f"Bearer {key[:-1]}"},
            {"authorization": f"Bearer {key.upper()}"},
            {"authorization": f"Bearer {key[:11]} {key[11:]}"},
            {"authorization": f"Bearer {key},{other}"},
            {"authorization": f"Bearer Bearer {key}"},
            {"authorization": f"Bearer {wide}".encode()},
            {"authorization": "Bearer " + key[:11]},
            {"authorization": "Bearer"},
            {"authorization": "Bearer " + "null"},
            {"authorization": "", "x-api-key": ""},
            {"x-api-key": f"Bearer {key}"},
            {"proxy-authorization": f"Bearer {key}"},
            {"x-forwarded-authorization": f"Bearer {key}"},
        ]
        with httpx.Client(base_url=made.world.url) as stranger:
            for name in ("key", "api_key", "api-key", "token", "access_token", "authorization"):
                response = stranger.get("/v1/models", params={name: key})
                assert response.status_code == 401, name
            for number, headers in enumerate(refused):
                made.world.context.tenancy.keys.authenticator._throttle._buckets.clear()
                response = stranger.get("/v1/models", headers=headers)
                assert response.status_code == 401, (number, headers)
                assert key not in response.text
            for scheme in ("bearer", "BEARER", "Bearer  ", "bEaReR"):
                headers = {"authorization": f"{scheme} {key}"}
                response = stranger.get("/v1/models", headers=headers)
                assert response.status_code == 200, scheme
            assert stranger.get("/v1/models", headers={"x-api-key": key}).status_code == 200


def test_bytes_that_are_no_key(opened: Open) -> None:
    with opened() as made:
        key = made.key.encode()
        for line in (b"Bearer " + key, b" \t bearer \t " + key + b" \t ", b"Bearer " + key + b"\t"):
            assert status_of_raw(made, b"authorization:" + line) == 200, line
        for line in (
            b"authorization: Bearer " + key + b"\0",
            b"authorization: Bearer \0" + key,
            b"authorization: Bearer " + b"\xff" * 54,
            b"authorization: Bearer " + key + b"\xc2\xa0",
            b"authorization: Bearer or-" + b"a" * 2**20,
            b"authorization : Bearer " + key,
        ):
            assert status_of_raw(made, line) in (400, 401, 431), line[:60]
        assert status_of_raw(made, b"authorization: Bearer " + key) == 200


@pytest.mark.slow
def test_of_several_keys_sent_only_the_one_used_pays(opened: Open) -> None:
    """A client that sends two keys has both; the request is one tenant's all the same."""
    with opened() as made:
        other = made.new_key("other")
        ids = {made.key[3:11], other[3:11]}
        body = json.dumps({**CHAT, "model": "small"}).encode()
        sent = [
            [("authorization", f"Bearer {made.key}"), ("x-api-key", other)],
            [("authorization", "Bearer wrong"), ("x-api-key", other)],
        ]
        with httpx.Client(base_url=made.world.url) as client:
            for headers in sent:
                headers.append(("content-type", "application/json"))
                asked = client.post("/v1/chat/completions", content=body, headers=headers)
                assert asked.status_code == 200, headers
            twice = [("authorization", f"Bearer {key}") for key in (made.key, other)]
            refused = client.post("/v1/chat/completions", content=body, headers=twice)
        rows = made.rows(2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "repeated_header")
    assert [row["key_id"] for row in rows] == [made.key[3:11], other[3:11]]
    assert {row["key_id"] for row in rows} == ids


def test_guessing_keys_is_throttled_and_shuts_out_no_valid_key(opened: Open) -> None:
    with opened() as made, logged() as log:
        fresh = made.new_key("fresh")
        store = made.world.context.tenancy.keys.store
        assert store is not None
        unseen = store.create(KeyOrder(name="unseen")).text
        made.until(lambda: len(made.world.context.tenancy.keys.registry or ()) == 3)
        guesses = [f"or-{made.key[3:11]}{number:043d}" for number in range(40)]
        told = [get(made, guess, "/v1/models") for guess in guesses]
        statuses = [response.status_code for response in told]
        assert statuses[:20] == [401] * 20
        assert statuses[20:] == [429] * 20
        assert all(int(response.headers["retry-after"]) >= 1 for response in told[20:])
        assert told[-1].json()["error"]["code"] == "too_many_wrong_keys"
        # Valid keys are accepted from there, also those that were never used before.
        assert get(made, fresh, "/v1/models").status_code == 200
        assert get(made, unseen, "/v1/models").status_code == 200
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=made.world.url, transport=elsewhere) as neighbour:
            headers = bearer(unseen) | {"x-forwarded-for": "127.0.0.1"}
            assert neighbour.get("/v1/models", headers=headers).status_code == 200
        # Headers that anybody can write give no fresh address.
        forged = bearer("or-zzzzzzzz" + "x" * 43) | {
            "x-forwarded-for": "9.9.9.9",
            "x-real-ip": "::1",
        }
        assert made.world.http.get("/v1/models", headers=forged).status_code == 429
    assert not any(guess in log.getvalue() for guess in guesses)
    told_of = [line for line in log.getvalue().splitlines() if "key was not accepted" in line]
    assert len(told_of) == 20, told_of


def test_an_unknown_id_takes_the_way_of_a_wrong_secret(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as made:
        store = made.world.context.tenancy.keys.store
        assert store is not None
        gone = store.create(KeyOrder(name="gone"))
        store.revoke(gone.record.key_id)
        registry = made.world.context.tenancy.keys.registry
        assert registry is not None
        made.until(lambda: registry.find(gone.record.key_id) is not None)
        compared: list[tuple[int, int]] = []

        def compare_digest(one: bytes, other: bytes) -> bool:
            compared.append((len(one), len(other)))
            return one == other

        fake = SimpleNamespace(compare_digest=compare_digest)
        monkeypatch.setattr(authenticator, "hmac", fake)
        ways, words = [], []
        for key in ("or-zzzzzzzz" + "0" * 43, made.key[:-1] + "_", made.key[:11] + "0" * 43):
            compared.clear()
            response = get(made, key, "/v1/models")
            assert response.status_code == 401
            words.append(response.json()["error"] | {"param": None})
            ways.append(list(compared))
    assert ways[0] == ways[2] == [(32, 32), (32, 32)]
    assert ways[1] == []  # what has no key's form has no secret either
    assert words[0] == words[1] == words[2]  # and nobody learns which ids there are


def test_rotated_and_revoked_keys_end_at_once(opened: Open) -> None:
    with opened(scopes=ADMIN) as made:
        http = made.world.http

        def new(**fields: Any) -> tuple[str, str]:
            told = http.post("/admin/keys", json={"name": "k", **fields}).json()
            return told["id"], told["key"]

        key_id, key = new()
        assert get(made, key, "/v1/models").status_code == 200
        rotated = http.post(f"/admin/keys/{key_id}/rotate", json={}).json()["key"]
        assert get(made, key, "/v1/models").status_code == 401
        kept = http.post(f"/admin/keys/{key_id}/rotate", json={"grace_s": 60}).json()["key"]
        assert get(made, rotated, "/v1/models").status_code == 200
        assert get(made, kept, "/v1/models").status_code == 200
        assert http.delete(f"/admin/keys/{key_id}").status_code == 200
        for dead in (key, rotated, kept):
            response = get(made, dead, "/v1/models")
            assert response.status_code == 401
        assert response.json()["error"]["code"] == "api_key_revoked"
        assert http.post(f"/admin/keys/{key_id}/rotate", json={"grace_s": 60}).status_code == 409
        key_id, key = new(expires_at=int(time.time()) + 1000)
        assert get(made, key, "/v1/models").status_code == 200
        expiry = {"expires_at": int(time.time()) - 1}
        assert http.patch(f"/admin/keys/{key_id}", json=expiry).status_code == 200
        late = get(made, key, "/v1/models")
    assert (late.status_code, late.json()["error"]["code"]) == (401, "api_key_expired")


def test_no_key_can_make_itself_an_administrator(opened: Open) -> None:
    with opened() as made:
        http, own = made.world.http, made.key[3:11]
        for method, path, body in (
            ("GET", "/admin/keys", None),
            ("POST", "/admin/keys", {"name": "x", "admin": True}),
            ("GET", f"/admin/keys/{own}", None),
            ("PATCH", f"/admin/keys/{own}", {"admin": True}),
            ("PATCH", f"/admin/keys/{own}", {"limits": {}}),
            ("POST", f"/admin/keys/{own}/rotate", {}),
            ("DELETE", f"/admin/keys/{own}", None),
            ("GET", "/admin/teams", None),
            ("POST", "/admin/teams", {"name": "x"}),
        ):
            response = http.request(method, path, json=body)
            assert response.status_code == 403, (method, path)
            assert response.json()["error"]["code"] == "admin_only"
        for path in ("//admin/keys", "/ADMIN/keys", "/admin/../admin/keys", "/admin/keys/"):
            assert http.get(path).status_code in (307, 403, 404), path
        assert len(made.world.context.tenancy.keys.store.load().keys) == 1


# ---- others' things -----------------------------------------------------------------------------


@pytest.mark.slow
def test_no_key_reads_the_usage_of_another_tenant(opened: Open) -> None:
    with opened() as made:
        store = made.world.context.tenancy.keys.store
        team = store.create_team(TeamOrder(name="reds"))
        other = made.new_key("other", team_id=team.team_id)
        admin = made.new_key("admin", scopes=ADMIN)
        assert made.world.chat(model="small").status_code == 200
        for _ in range(3):
            assert made.world.chat(model="large", headers=bearer(other)).status_code == 200
        own, its = made.key[3:11], other[3:11]
        made.rows(4)

        def ask(*parameters: tuple[str, str]) -> httpx.Response:
            return made.world.http.get("/v1/usage", params=parameters)

        for by in ("key", "team", "tier", "model", "day"):
            report = ask(("by", by)).json()
            assert report["totals"]["requests"] == 1, by
            assert its not in str(report)
            assert team.team_id not in str(report)
            assert report["totals"]["cost_usd"] is None
        for word in (its, "other", *SQL, own + "\0", own.upper(), f"{own},{its}"):
            response = ask(("key", word))
            assert response.status_code in (400, 403), word
        assert ask(("key", own), ("key", its)).status_code == 403
        assert ask(("key", its), ("key", own)).json()["totals"]["requests"] == 1
        for name in ("team", "tier", "model"):
            for word in (team.team_id, "reds", *SQL):
                report = ask((name, word)).json()
                assert report["totals"]["requests"] == 0, (name, word)
        for name, word in (
            ("since", "0; DROP TABLE ledger"),
            ("by", "key_id FROM keys--"),
            ("limit", "1 OR 1=1"),
            ("limit", "-1"),
            ("key_id", its),
            ("KEY", its),
        ):
            assert ask((name, word)).status_code == 400, (name, word)
        everything = get(made, admin, "/v1/usage?by=key").json()
    assert {group["group"]: group["requests"] for group in everything["data"]} == {own: 1, its: 3}


@pytest.mark.slow
def test_an_idempotent_answer_is_its_owners(opened: Open) -> None:
    with opened() as made:
        team = made.world.context.tenancy.keys.store.create_team(TeamOrder(name="reds"))
        keys = [made.key, *(made.new_key(f"k{n}", team_id=team.team_id) for n in range(2))]
        once = {"idempotency-key": "the-same"}
        first = [made.world.chat(headers=bearer(key) | once) for key in keys]
        again = [made.world.chat(headers=bearer(key) | once) for key in keys]
        stolen = made.world.chat(headers=bearer(keys[1]) | once, user="somebody else")
        rows = made.rows(3)
    assert len({response.json()["id"] for response in first}) == 3
    assert not any("idempotent-replayed" in response.headers for response in first)
    assert [r.json()["id"] for r in again] == [r.json()["id"] for r in first]
    assert all(response.headers["idempotent-replayed"] == "true" for response in again)
    assert stolen.status_code == 422
    assert {row["key_id"] for row in rows} == {key[3:11] for key in keys}


@pytest.mark.slow
def test_no_tenant_takes_the_place_of_another(opened: Open) -> None:
    with opened(limits=LimitSpec(concurrent_requests=1)) as made:
        other = made.new_key("other", LimitSpec(concurrent_requests=1))
        made.world.says(LOCAL_TEXT, hangs=True)
        body = {**CHAT, "model": "small", "stream": True}
        url = f"{made.world.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=bearer(made.key)) as mine:
            lines = mine.iter_lines()  # held: a stream that nobody reads is closed
            next(lines)
            assert made.world.chat().status_code == 429
            with httpx.stream("POST", url, json=body, headers=bearer(other)) as its:
                assert its.status_code == 200
        made.settle()
        made.world.says(LOCAL_TEXT)
        assert made.world.chat().status_code == 200


# ---- scopes -------------------------------------------------------------------------------------

ODD_NAMES = (
    "large", "LARGE", "Large", "large ", " large", "ｌａｒｇｅ", "large\u200b", "lаrge",  # noqa: RUF001
    "test/large-model", "TEST/LARGE-MODEL", "cloud", "Cloud", "cloud/mock-model", "cloud/large",
    "cloud/small", "cloud/auto", "cloud//small", "shadow", "shadow/mock-model", "mock-model",
    "small/large", "auto/large", "none", "*", "small,large",
)  # fmt: skip


@pytest.mark.slow
def test_a_scope_is_evaded_by_no_name(opened: Open) -> None:
    scopes = Scopes(models=frozenset({"auto", "small"}), tiers=frozenset({"small"}))
    with opened(scopes=scopes, mirrored=MockScript(), mirror={"tier": "shadow", "share": 1}) as it:
        world = it.world
        for path, body in PATHS.items():
            assert world.http.post(path, json={"model": "small", **body}).status_code == 200, path
        num_asked = len(world.engine.submitted)
        for name in ODD_NAMES:
            for path, body in PATHS.items():
                response = world.http.post(path, json={"model": name, **body})
                assert response.status_code in (403, 404), (path, name, response.text)
            assert world.http.get(f"/v1/models/{name}").status_code in (403, 404), name
            for model in ("auto", "small"):
                asked = {"model": model, "outrider": {"tier": name}}
                response = world.chat(**asked)
                assert response.status_code in (400, 403), (model, name)
                response = world.http.post("/v1/route", json={**CHAT, **asked})
                assert response.status_code in (400, 403), (model, name)
        assert len(world.engine.submitted) == num_asked
        assert [card["id"] for card in world.http.get("/v1/models").json()["data"]] == [
            "auto",
            "small",
        ]
        wait_for(lambda: not world.context.upstream.mirror._copies)
        assert not any(cloud.requests for cloud in world.clouds)
        it.rows(6)  # six of the endpoints above write answers


def test_a_key_is_told_of_the_tiers_that_it_may_use(opened: Open) -> None:
    """The list of models showed the servers, prices and capabilities of all tiers to every key."""
    with opened(scopes=Scopes(tiers=frozenset({"small"}))) as made:
        http = made.world.http
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["auto", "small", "test/small-model"]
        for card in cards:
            assert [tier["tier"] for tier in card["outrider"]] == ["small"], card
            assert card["tier"] == "small"
            assert http.get(f"/v1/models/{card['id']}").json() == card
        for name in ("large", "test/large-model", "cloud", "cloud/mock-model", "mock-model"):
            response = http.get(f"/v1/models/{name}")
            assert response.status_code == 403, name
            assert response.json()["error"]["code"] == "tier_not_allowed"


@pytest.mark.slow
def test_no_answer_comes_from_a_forbidden_tier(opened: Open) -> None:
    """However it would get there: by the router, a weak answer, a full queue, a policy."""
    scopes = Scopes(tiers=frozenset({"small"}))
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=1))
    with opened(scopes=scopes, policy=policy) as made:
        world = made.world
        for path in list(PATHS)[:4]:
            body = {"model": "auto", **PATHS[path]}
            world.says(LOCAL_TEXT)
            for tier in ("small", "large"):
                policy.tier = tier
                assert world.http.post(path, json=body).status_code == 200, (path, tier)
            for wish, status in (("prefer_cloud", 200), ("cloud_only", 403)):
                asked = world.http.post(path, json={**body, "outrider": {"policy": wish}})
                assert asked.status_code == status, (path, asked.text)
            refusal = QueueFullError(num_waiting=9, retry_after_s=1)
            world.engine.script = lambda _, full=refusal: Script(refusal=full)
            full = world.http.post(path, json=body)
            assert full.status_code == 429, full.text
        tiers = {request.tier for request in world.engine.submitted}
        assert (tiers, world.engine.switched) == ({"small"}, [])
        assert not world.cloud.requests


def test_a_mirror_gets_no_request_that_its_tier_may_not_answer(opened: Open) -> None:
    sections = {"mirrored": MockScript(), "mirror": {"tier": "shadow", "share": 1}}
    with opened(scopes=Scopes(tiers=frozenset({"small", "cloud"})), **sections) as made:
        free = made.new_key("free")
        shadow = made.world.clouds[-1]
        for model in ("small", "cloud"):
            assert made.world.chat(model=model).status_code == 200
        assert made.world.chat(model="small", headers=bearer(free)).status_code == 200
        made.until(lambda: len(shadow.requests) == 1)
        rows = made.rows(4)
    (copied,) = [row for row in rows if row["kind"] == "mirror"]
    assert (copied["key_id"], copied["charge_nanos"]) == (free[3:11], 0)


# ---- words --------------------------------------------------------------------------------------


def test_words_stay_words(opened: Open) -> None:
    evil = "Robert'); DROP TABLE keys;-- ERROR key=%s {0} <script>"
    with opened(scopes=ADMIN) as made, logged() as log:
        http = made.world.http
        for bad in ("a\nb", "a\rlevel=ERROR", "\0", "", "x" * 129, "tab\t", "\x1b[2J"):
            for fields in ({"name": bad}, {"name": "x", "labels": {bad: "v"}}):
                assert http.post("/admin/keys", json=fields).status_code == 400, fields
        labels = {"owner'; --": evil}
        told = http.post("/admin/keys", json={"name": evil, "labels": labels}).json()
        listed = http.get("/admin/keys").json()["data"]
        assert {key["name"]: key["labels"] for key in listed} == {"tester": {}, evil: labels}
        headers = bearer(told["key"])
        model = "cloud/m'; DROP TABLE ledger;--\nERROR gateway level=ERROR key=stolen\u2028x"
        asked = http.post("/v1/chat/completions", json={**CHAT, "model": model}, headers=headers)
        assert asked.status_code == 200
        for wrong in ("no\nsuch", evil):
            assert made.world.chat(model=wrong, headers=headers).status_code == 404
        (row,) = made.rows(1)
        report = http.get("/v1/usage", params={"by": "key"}).json()
        by_model = http.get("/v1/usage", params={"by": "model"}).json()
        assert made.world.cloud.requests[0].document["model"] == model.removeprefix("cloud/")
    one_line = model.removeprefix("cloud/").replace("\n", "?").replace("\u2028", "?")
    assert row["model"] == one_line
    assert [group["name"] for group in report["data"]] == [evil]
    assert [group["group"] for group in by_model["data"]] == [row["model"]]
    lines = log.getvalue().splitlines()
    assert lines
    assert all(" gateway " in line for line in lines), lines
    assert not any(line.startswith("ERROR") for line in lines)


@pytest.mark.slow
def test_a_request_id_is_the_clients_word_and_not_our_key(opened: Open) -> None:
    with opened() as made, logged() as log:
        other = made.new_key("other")
        same = {"x-request-id": "req-1"}
        for key in (made.key, other, made.key):
            response = made.world.chat(model="small", headers=bearer(key) | same)
            assert response.headers["x-request-id"] == "req-1"
        rows = made.rows(3)
        for evil in ("a'; DROP TABLE ledger;--", "a b", "x" * 129, "é", "a\tlevel=ERROR", "{}"):
            headers = {"x-request-id": evil.encode()}
            response = made.world.chat(model="small", headers=headers)
            assert response.status_code == 200
            assert response.headers["x-request-id"].startswith("req-"), evil
        rows = made.rows(9)
    assert [row["client_request_id"] for row in rows[:3]] == ["req-1"] * 3
    assert len({row["request_id"] for row in rows}) == 9
    assert not any("DROP" in str(row) for row in rows)
    assert "DROP" not in log.getvalue()


@pytest.mark.slow
def test_many_at_once_are_told_apart(opened: Open) -> None:
    """Every answer is its own key's in the books, whatever else runs."""
    with opened() as made:
        keys = [made.new_key(f"k{number}") for number in range(4)]

        def ask(number: int) -> tuple[str, int]:
            key = keys[number % 4]
            text = "Hello " * (1 + number % 4)
            messages = [{"role": "user", "content": text}]
            asked = {**CHAT, "model": "small", "messages": messages}
            response = made.world.http.post(
                "/v1/chat/completions", json=asked, headers=bearer(key) | {"x-request-id": "same"}
            )
            return key[3:11], response.json()["usage"]["total_tokens"]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            told = list(pool.map(ask, range(80)))
        rows = made.rows(80)
    assert sorted((row["key_id"], row["num_charged_tokens"]) for row in rows) == sorted(told)
