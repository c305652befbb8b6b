"""Forms that are read as they come."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.form_stream import FormStream
from outrider.gateway.contract.schema.forms import read_form

TYPE = "multipart/form-data; boundary=x"
BODY = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch'
    b'\r\n--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    b"a\r\n--y\r\n-\r--x\n\r\n-\r\n--x--\r\n"
)


def read(body: bytes, size: int) -> list[tuple[str, str | None, bytes]]:
    """The parts of a form that comes in pieces of this size."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def run() -> list[tuple[str, str | None, bytes]]:
        form, found = FormStream(TYPE, pieces()), []
        async for part in form.parts():
            content = b"".join([piece async for piece in form.content()])
            found.append((part.name, part.filename, content))
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 4096])
def test_a_form_is_the_same_in_pieces_of_any_size(size: int) -> None:
    whole = asyncio.run(read_form(TYPE, BODY))
    expected = [(part.name, part.filename, bytes(part.content)) for part in whole]
    assert read(BODY, size) == expected
    assert len(expected) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--y--",
        BODY[:-6],
        BODY[:40],
        BODY.replace(b"\r\n\r\nbatch", b"\r\nbatch"),
        b"--x\r\n" + b"a" * 5000 + b"\r\n\r\n\r\n--x--",
        b"--x\r\nno header\r\n\r\n\r\n--x--",
        b"--xx",
        BODY[:-10].replace(b"--y", b"--x\r\ncontent-disposition: form-data; name=a\r\n\r\n") * 60,
    ],
)
@pytest.mark.parametrize("size", [1, 4096])
def test_a_form_that_is_not_well_formed_is_refused(body: bytes, size: int) -> None:
    with pytest.raises(BadRequestError):
        read(body, size)
