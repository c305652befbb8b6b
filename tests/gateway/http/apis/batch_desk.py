"""A tenant of a gateway that takes batches."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import openai
from sqlalchemy import select

from outrider.gateway.storage import tables
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import World
from tests.gateway.tenancy.metering.tenants import Books

CHAT = "/v1/chat/completions"
OVER = {"completed", "failed", "expired", "cancelled"}
SAYS = "Hello there, I am fine."


def line(number: int, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A request of a batch."""
    said = {"model": "large", "messages": [{"role": "user", "content": f"Question {number}"}]}
    return {"custom_id": f"q{number}", "method": "POST", "url": url, "body": {**said, **body}}


def file_of(*lines: dict[str, Any] | str) -> bytes:
    """A file of these lines; texts stand as they are, with surrogates for bytes that are none."""
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    return "".join(f"{text}\n" for text in texts).encode(errors="surrogateescape")


class Desk:
    """A tenant's client of a gateway that takes batches."""

    def __init__(self, world: World, key: str) -> None:
        self.world = world
        self.key = key
        self.client = openai.OpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0)

    @property
    def tenant(self) -> str:
        """The id of its key."""
        return self.key[3:11]

    def __enter__(self) -> Self:
        """Be ready."""
        return self

    def __exit__(self, *error: object) -> None:
        """Hang up."""
        self.client.close()

    def upload(self, *lines: dict[str, Any] | str) -> Any:
        return self.client.files.create(file=("in.jsonl", file_of(*lines)), purpose="batch")

    def begin(self, *lines: dict[str, Any] | str, endpoint: Any = CHAT, **fields: Any) -> Any:
        file = self.upload(*lines)
        return self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
        )

    def over(self, batch: Any) -> Any:
        """The batch, once it is over."""
        wait_for(lambda: self.client.batches.retrieve(batch.id).status in OVER)
        return self.client.batches.retrieve(batch.id)

    def read(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a result file."""
        assert file_id is not None
        return [json.loads(text) for text in self.client.files.content(file_id).text.splitlines()]

    def ledger(self) -> list[dict[str, Any]]:
        """The rows of batches' requests."""
        database = self.world.context.tenancy.database
        assert database is not None
        with database.read() as connection:
            rows = connection.execute(select(tables.ledger)).mappings()
            return [dict(row) for row in rows if row["client_request_id"].startswith("batch_req_")]


class OwnDesk(Desk):
    """The client with the key of `books`."""

    def __init__(self, books: Books) -> None:
        super().__init__(books.world, books.key)
        self.books = books
        self._others: list[Desk] = []

    def other(self) -> Desk:
        """Another tenant, until this one leaves."""
        self._others.append(made := Desk(self.world, self.books.new_key("other")))
        return made

    def __exit__(self, *error: object) -> None:
        """Hang up, with the others."""
        for each in self._others:
            each.client.close()
        super().__exit__(*error)


@contextmanager
def open_desk(opened: OpenWorld, **options: Any) -> Iterator[OwnDesk]:
    batches = {"enabled": True, **options.pop("batches", {})}
    with opened(batches=batches, clouds=(), **options) as books, OwnDesk(books) as desk:
        yield desk
