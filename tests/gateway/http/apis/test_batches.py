"""Files and batches through OpenAI's own client."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from outrider.gateway.storage import tables
from tests.gateway.conftest import OpenWorld
from tests.gateway.http.apis.batch_desk import CHAT, SAYS, OwnDesk, file_of, line, open_desk
from tests.gateway.tenancy.sign_in.issuer import AUDIENCE, scripted_issuer


@pytest.fixture
def desk(opened: OpenWorld) -> Iterator[OwnDesk]:
    with open_desk(opened) as made:
        yield made


# ---- the whole round -----------------------------------------------------------------------------


def test_a_batch_goes_from_its_file_to_its_answers(desk: OwnDesk) -> None:
    begun = desk.begin(line(1), line(2), line(3), metadata={"job": "nightly"})
    assert begun.status == "validating"
    assert begun.expires_at == begun.created_at + 86_400
    batch = desk.over(begun)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 3, 0)
    assert (batch.model, batch.metadata, batch.errors) == ("large", {"job": "nightly"}, None)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.error_file_id is None
    results = desk.read(batch.output_file_id)
    assert [each["custom_id"] for each in results] == ["q1", "q2", "q3"]
    for each in results:
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        body = each["response"]["body"]
        assert body["choices"][0]["message"]["content"] == SAYS
    tokens = sum(each["response"]["body"]["usage"]["total_tokens"] for each in results)
    assert batch.usage.total_tokens == tokens
    assert [each.id for each in desk.client.batches.list(limit=1)] == [batch.id]
    output = desk.client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_each_request_is_charged_once_and_at_half_the_price(desk: OwnDesk) -> None:
    whole = desk.world.chat(model="large", messages=line(1)["body"]["messages"])
    assert whole.status_code == 200
    (usual,) = desk.books.rows(1)
    batch = desk.over(desk.begin(line(1), line(2)))
    ids = [each["id"] for each in desk.read(batch.output_file_id)]
    rows = desk.ledger()
    assert sorted(row["client_request_id"] for row in rows) == sorted(ids)
    for row in rows:
        assert row["charge_nanos"] * 2 == row["cost_nanos"] > 0
        assert row["price_version"] != usual["price_version"]
    with desk.books.database.read() as connection:
        known = set(connection.execute(select(tables.price_versions.c.version)).scalars())
    assert {row["price_version"] for row in rows} <= known


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "large", "prompt": "Once"}),
        ("/v1/responses", {"model": "large", "input": "Hello"}),
    ],
)
def test_every_endpoint_answers_in_its_own_words(
    desk: OwnDesk, endpoint: Any, body: dict[str, Any]
) -> None:
    asked = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    wrong = {**asked, "custom_id": "b", "body": {**body, "temperature": 9}}
    batch = desk.over(desk.begin(asked, wrong, endpoint=endpoint))
    (result,) = desk.read(batch.output_file_id)
    names = {"/v1/completions": "text_completion", "/v1/responses": "response"}
    assert result["response"]["body"]["object"] == names[endpoint]
    (refused,) = desk.read(batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("b", 400)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)


def test_requests_wait_for_what_others_leave(desk: OwnDesk) -> None:
    own = {"slo": {"class": "short-chat", "ttft_ms": 5}}
    lines = (line(1), line(2, outrider=own, service_tier="priority"), line(3, outrider=None))
    desk.over(desk.begin(*lines))
    asked = desk.world.engine.submitted
    assert len(asked) == 3
    assert all(request.objective.is_yielding for request in asked)


# ---- broken files --------------------------------------------------------------------------------


def test_broken_lines_are_named_by_their_numbers(desk: OwnDesk) -> None:
    batch = desk.over(
        desk.begin(
            line(1),
            "no JSON",
            "",
            line(1),
            {**line(2), "url": "/v1/completions"},
            line(3, stream=True),
            {"custom_id": "q9", "method": "POST", "url": CHAT},
            json.dumps(line(10, outrider={"tag": "?"})).replace("?", "\udcff"),
        )
    )
    assert batch.status == "failed"
    told = [(each.line, each.code) for each in batch.errors.data]
    assert told == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_url"),
        (6, "unsupported_parameter"),
        (7, "missing_required_parameter"),
        (8, "invalid_json_line"),
    ]
    assert batch.error_file_id is None
    assert not desk.world.engine.submitted


def test_a_models_name_is_told_within_bounds(desk: OwnDesk) -> None:
    batch = desk.over(desk.begin(line(1, model="a\0b" + "x" * 100_000)))
    assert batch.status == "completed", "its request is refused, as any other would be"
    assert batch.request_counts.failed == 1
    assert batch.model.startswith("a?bx")
    assert len(batch.model) == 256


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ((), "empty_file"),
        ((line(1), line(2), line(3)), "too_many_requests"),
        (("", "", "", line(1)), "too_many_requests"),
    ],
)
def test_a_file_has_some_requests_but_not_too_many(
    desk: OwnDesk,
    monkeypatch: pytest.MonkeyPatch,
    lines: tuple[dict[str, Any] | str, ...],
    code: str,
) -> None:
    monkeypatch.setattr("outrider.gateway.http.apis.batches.input.MAX_LINES", 2)
    batch = desk.over(desk.begin(*lines))
    assert (batch.status, batch.errors.data[-1].code) == ("failed", code)


def test_a_file_is_read_no_further_than_a_hundred_faults(desk: OwnDesk) -> None:
    batch = desk.over(desk.begin(*["x"] * 300))
    assert [each.line for each in batch.errors.data] == list(range(1, 101))


def test_a_file_may_begin_with_a_byte_order_mark(desk: OwnDesk) -> None:
    batch = desk.over(desk.begin("\ufeff" + json.dumps(line(1))))
    assert batch.request_counts.completed == 1


def test_a_file_that_is_too_large_is_refused_before_it_is_read(opened: OpenWorld) -> None:
    with open_desk(opened, batches={"max_file_bytes": 10_000}) as desk:
        with pytest.raises(openai.APIStatusError) as caught:
            desk.client.files.create(file=("f", b"x" * 100_000), purpose="batch")
        assert caught.value.status_code == 413
        host, port = desk.world.url.removeprefix("http://").split(":")
        asked = (
            f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {desk.key}\r\n"
            "content-type: multipart/form-data; boundary=x\r\ncontent-length: 1073741824\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(asked.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
        assert not list(desk.client.files.list())


def test_an_upload_says_what_is_wrong_with_it(desk: OwnDesk) -> None:
    for purpose in ("fine-tune", "batch_output"):
        with pytest.raises(openai.BadRequestError) as caught:
            desk.client.files.create(file=("f", b"{}"), purpose=purpose)  # type: ignore[arg-type]
        assert caught.value.param == "purpose"
    url, headers = f"{desk.world.url}/v1/files", {"authorization": f"Bearer {desk.key}"}
    for form in ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, {"content": b"--x--"}):
        content = {"content-type": "multipart/form-data; boundary=x"} if "content" in form else {}
        answer = httpx.post(url, headers={**headers, **content}, **form)  # type: ignore[arg-type]
        assert answer.status_code == 400, answer.text
    assert not list(desk.client.files.list())


def test_a_tenants_files_have_a_bound(opened: OpenWorld) -> None:
    with open_desk(opened, batches={"max_bytes_per_tenant": 3 * 4096 + 1000}) as desk:
        kept = [desk.client.files.create(file=(n, b""), purpose="batch").id for n in "abc"]
        for begin in (
            lambda: desk.client.files.create(file=("d", b"x"), purpose="batch"),
            lambda: desk.client.files.create(file=("d", b"x" * 2000), purpose="batch"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                begin()
            assert caught.value.code == "storage_full"
        desk.client.files.delete(kept[0])
        batch = desk.over(desk.begin(line(1)))
        with pytest.raises(openai.BadRequestError) as caught:
            desk.client.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            )
        assert caught.value.code == "storage_full", "the results fill it"


def test_a_disk_that_takes_nothing_is_told(desk: OwnDesk) -> None:
    store = desk.world.context.batches
    assert store is not None
    shutil.rmtree(store.folder)
    with pytest.raises(openai.InternalServerError) as caught:
        desk.upload(line(1))
    assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
    assert str(store.folder) not in caught.value.response.text
    store.make_folder()
    assert desk.upload(line(1)).status == "processed"


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_is_kept_for_its_owner_alone(desk: OwnDesk, tmp_path: Path) -> None:
    content = file_of(line(1)) * 5000
    file = desk.client.files.create(
        file=("in put.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in put.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert desk.client.files.content(file.id).content == content
    (path,) = (each for each in tmp_path.rglob(file.id))
    assert path.stat().st_mode & 0o777 == 0o600
    assert desk.client.files.delete(file.id).deleted
    assert not path.exists()
    with pytest.raises(openai.NotFoundError):
        desk.client.files.retrieve(file.id)


def test_files_come_in_pages(desk: OwnDesk) -> None:
    ids = [desk.client.files.create(file=(n, b"{}"), purpose="batch").id for n in "abc"]
    pages = desk.client.files.list(limit=2, order="asc")
    assert [each.id for each in pages.data] == ids[:2]
    assert pages.has_more
    assert [each.id for each in pages] == ids, "the client asks for all pages"
    assert [each.id for each in desk.client.files.list(limit=2)] == ids[::-1]
    assert not list(desk.client.files.list(purpose="batch_output"))


def test_a_file_that_a_batch_needs_stays(opened: OpenWorld) -> None:
    with open_desk(opened) as desk:
        desk.world.says(SAYS, gap_s=0.2)
        batch = desk.begin(line(1))
        with pytest.raises(openai.ConflictError):
            desk.client.files.delete(batch.input_file_id)


@pytest.mark.parametrize(
    "name", ["file-%00", "file-%F0%9F%98%80", "%2e%2e%2foutrider.db", "x" * 999]
)
def test_an_id_that_is_none_is_not_found(desk: OwnDesk, name: str) -> None:
    headers = {"authorization": f"Bearer {desk.key}"}
    for path in (f"files/{name}", f"files/{name}/content", f"batches/{name}"):
        answer = httpx.get(f"{desk.world.url}/v1/{path}", headers=headers)
        assert answer.status_code == 404, answer.text


def test_another_tenant_finds_nothing(desk: OwnDesk) -> None:
    batch = desk.over(desk.begin(line(1)))
    other = desk.other().client
    for ask in (
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.output_file_id),
        lambda: other.files.delete(batch.output_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert not list(other.files.list())
    assert not list(other.batches.list())
    assert desk.read(batch.output_file_id)


def test_a_token_that_expires_has_no_batches(opened: OpenWorld) -> None:
    with scripted_issuer() as issuer:
        grants = {"staff": {"claim": "groups", "value": "staff", "admin": True}}
        sign_in = {"idp": {"url": issuer.url, "audience": (AUDIENCE,), "grants": grants}}
        with open_desk(opened, sign_in={"issuers": sign_in}) as desk:
            headers = {"authorization": f"Bearer {issuer.token(groups=['staff'])}"}
            for method, path in (("GET", "files"), ("POST", "files"), ("POST", "batches")):
                answer = httpx.request(method, f"{desk.world.url}/v1/{path}", headers=headers)
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "key_needed"


def test_without_the_setting_there_are_none(opened: OpenWorld) -> None:
    with opened(clouds=()) as books:
        with (
            OwnDesk(books) as desk,
            pytest.raises(openai.NotFoundError, match=r"batches\.enabled"),
        ):
            desk.begin(line(1))
        assert "/v1/batches" not in books.world.http.get("/openapi.json").json()["paths"]
