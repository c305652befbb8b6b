"""Forms: read in every way that clients write them, and written in one that every server reads."""

import asyncio
import tracemalloc
from collections.abc import Sequence
from email import message_from_bytes
from email.message import Message
from typing import Any

import aiohttp
import httpx
import pytest
from starlette.requests import Request

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.forms import (
    FormPart,
    header_parameters,
    read_form,
    write_form,
)
from outrider.gateway.http.edge.bodies import BodyBudget, read_form_body

TYPE = "multipart/form-data; boundary=x"


def read(body: bytes, content_type: str = TYPE) -> tuple[FormPart, ...]:
    return asyncio.run(read_form(content_type, body))


def part(head: str, content: bytes = b"value") -> bytes:
    return b"--x\r\n" + head.encode("utf-8", "surrogateescape") + b"\r\n\r\n" + content + b"\r\n"


def one(head: str) -> FormPart:
    (found,) = read(part(head) + b"--x--")
    return found


def as_servers_read(parts: Sequence[FormPart]) -> list[Message]:
    """The written form, read by Python's reader of mail."""
    content_type, body = write_form(parts)
    message = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    assert not message.defects
    payload = message.get_payload()
    assert isinstance(payload, list)
    return [each for each in payload if isinstance(each, Message)]


def facts(parts: Sequence[FormPart]) -> list[tuple[str, str | None, str, bytes]]:
    return [(p.name, p.filename, p.content_type, bytes(p.content)) for p in parts]


SOUND = bytes(range(256)) * 9 + b"\r\n--x-like\r\n--\r\n"


def test_forms_of_clients_are_read_and_written_as_they_were() -> None:
    files = {"file": ('a "b"\\c ä.wav', SOUND, "audio/wav"), "image[]": ("b.png", b"", "image/png")}
    request = httpx.Request("POST", "http://a", data={"model": "m"}, files=files)
    first = read(request.read(), request.headers["content-type"])
    assert [(p.name, bytes(p.content)) for p in first] == [
        ("model", b"m"),
        ("file", SOUND),
        ("image[]", b""),
    ]
    content_type, body = write_form(first)
    again = read(body, content_type)
    assert facts(again) == facts(first)
    assert [each.get_param("name", header="content-disposition") for each in as_servers_read(first)]
    assert write_form(first)[0] != content_type  # no client knows the next boundary


def test_a_form_of_aiohttp_is_read() -> None:
    async def written() -> tuple[str, bytes]:
        form = aiohttp.FormData()
        form.add_field("model", "m")
        form.add_field("file", SOUND, filename="ä.wav", content_type="audio/wav")
        payload = form()
        return payload.headers["content-type"], await payload.as_bytes()

    content_type, body = asyncio.run(written())
    found = read(body, content_type)
    assert [(p.name, bytes(p.content)) for p in found] == [("model", b"m"), ("file", SOUND)]
    assert found[1].filename == "%C3%A4.wav"  # as aiohttp writes it


@pytest.mark.parametrize(
    ("head", "name", "filename"),
    [
        ("Content-Disposition: form-data; name=model", "model", None),
        ('CONTENT-DISPOSITION:form-data ; NAME = "model"', "model", None),
        ('content-disposition: form-data; filename="name=model"; name="f"', "f", "name=model"),
        ('content-disposition: form-data; name="f"; filename="a\\"; name=\\"model"', "f", None),
        ("content-disposition: form-data; name=f; filename*=utf-8''%C3%A4%0D.wav", "f", "ä_.wav"),
        ('content-disposition: form-data; name=f; filename="\udcff.wav"', "f", "\ufffd.wav"),
        ("Content-Length: 5\r\ncontent-disposition: form-data; name=f;", "f", None),
        ("Content-Transfer-Encoding: BINARY\r\ncontent-disposition: form-data; name=f", "f", None),
    ],
)
def test_heads_that_are_understood(head: str, name: str, filename: str | None) -> None:
    found = one(head)
    assert found.name == name
    if filename is not None:
        assert found.filename == filename
    (seen,) = as_servers_read([found])
    assert seen.get_params(header="content-disposition", unquote=True)[1] == ("name", name)  # type: ignore[index]
    assert b'name="model' not in write_form([found])[1].partition(b'name="')[2]


@pytest.mark.parametrize(
    "head",
    [
        "",
        "content-disposition: form-data",
        "content-disposition: attachment; name=a",
        'content-disposition: form-data; name="a',
        "content-disposition: form-data; name=a; name=model",
        "content-disposition: form-data; name=a; NAME=model",
        "content-disposition: form-data; name=a model",
        "content-disposition: form-data; name=a\r\ncontent-disposition: form-data; name=model",
        "content-disposition: form-data; name=a\r\nContent-Disposition : form-data; name=model",
        "content-disposition: form-data; name=a;\r\n name=model",
        "content-disposition: form-data; name=a\ncontent-disposition: form-data; name=model",
        "content-disposition: form-data; name=a\rb",
        'content-disposition: form-data; name="a\0"',
        'content-disposition: form-data; name=""',
        'content-disposition: form-data; name=" model"',
        'content-disposition: form-data; name="mod%65l"',
        'content-disposition: form-data; name="mod\u0435l"',
        f"content-disposition: form-data; name={'a' * 129}",
        "content-disposition: form-data; name=a\r\ncontent-type: multipart/mixed; boundary=y",
        "content-disposition: form-data; name=a\r\ncontent-transfer-encoding: base64",
        "content-disposition: form-data; name=a\r\nx: " + "y" * 5000,
        ": a\r\ncontent-disposition: form-data; name=a",
    ],
)
def test_heads_that_two_servers_could_read_differently_are_refused(head: str) -> None:
    with pytest.raises(BadRequestError):
        one(head)


NAMED = "content-disposition: form-data; name=a"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b"--x--",
        part(NAMED),
        part(NAMED) + b"--x",
        part(NAMED) + b"--x\n--x--",
        b"preamble\r\n" + part(NAMED) + b"--x--",
        part(NAMED)[2:] + b"--x--",
        part(NAMED).replace(b"\r\n", b"\n") + b"--x--",
        part(NAMED).replace(b"--x\r\n", b"--x \r\n") + b"--x--",
        part(NAMED) * 65 + b"--x--",
        b"--x\r\n" + b"\r\n" * 100,
    ],
)
def test_bodies_that_are_no_form(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        read(body)


def test_the_most_parts_and_what_follows_the_last() -> None:
    assert len(read(part(NAMED) * 64 + b"--x--\r\nepilogue")) == 64


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "multipart/form-data",
        "multipart/mixed; boundary=x",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=x; boundary=y",
        "multipart/form-data; boundary=x y",
        'multipart/form-data; boundary="x\u00e4"',
        "multipart/form-data; boundary=" + "x" * 71,
        "multipart/form-data boundary=x",
        "multipart/form-data;;boundary=x",
    ],
)
def test_content_types_that_are_no_forms(content_type: str) -> None:
    with pytest.raises(BadRequestError, match="content-type"):
        read(part(NAMED) + b"--x--", content_type)


@pytest.mark.parametrize(
    "content_type",
    [
        "Multipart/Form-Data;Boundary=x",
        'multipart/form-data; charset=utf-8; boundary="x"',
        f"{TYPE};",
    ],
)
def test_content_types_that_are(content_type: str) -> None:
    assert [p.name for p in read(part(NAMED) + b"--x--", content_type)] == ["a"]


def test_a_boundary_may_stand_across_two_searches(monkeypatch: Any) -> None:
    """Long contents are searched piece by piece, with other requests' turns between."""
    monkeypatch.setattr("outrider.gateway.contract.schema.forms._SEARCHED_BYTES", 8)
    for length in range(40):
        content = b"\r" * length
        assert bytes(read(part(NAMED, content) + b"--x--")[0].content) == content


def test_parameters() -> None:
    assert header_parameters(' Form-Data ; A="b\\"\\c" ; c=d ;') == (
        "form-data",
        {"a": 'b"c', "c": "d"},
    )
    assert header_parameters("") == ("", {})


def test_a_form_is_held_twice_at_most() -> None:
    """As it came, and as it is written: a body in pieces is copied, its parts are not."""
    body = part(NAMED, bytes(2**20) * 8) + b"--x--"

    async def main() -> None:
        pieces = [body[start : start + 2**16] for start in range(0, len(body), 2**16)]
        messages = [{"type": "http.request", "body": b, "more_body": True} for b in pieces]
        messages.append({"type": "http.request", "body": b"", "more_body": False})
        messages.reverse()

        async def receive() -> Any:
            return messages.pop()

        scope = {"type": "http", "headers": [(b"content-type", TYPE.encode())]}
        budget = BodyBudget(max_bytes=2**30, max_bytes_per_owner=2**30)
        with budget.hold("a") as held:
            request = Request(scope, receive)
            tracemalloc.start()
            read = await read_form_body(request, limit_bytes=2**30, held=held)
            write_form(await read_form(TYPE, read))

    try:
        asyncio.run(main())
        assert tracemalloc.get_traced_memory()[1] < 2.5 * len(body)
    finally:
        tracemalloc.stop()
