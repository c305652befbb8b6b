"""Requests under way end when their key is revoked, expires or is removed."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from outrider.gateway.contract.errors.tree import AuthenticationError
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import ANONYMOUS
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.gateway.hybrid import LOCAL_TEXT
from tests.gateway.tenancy.keys.world import World
from tests.gateway.tenancy.metering.tenants import Open

PROMPT = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": PROMPT},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": PROMPT, "max_tokens": 64},
}


class Watched:
    """A request's end, as the registry would cause it."""

    def __init__(self) -> None:
        self.codes: list[str | None] = []

    def __call__(self, error: AuthenticationError) -> None:
        self.codes.append(error.code)


def revoke(world: World, key_id: str) -> None:
    world.store.revoke(key_id)


def expire(world: World, key_id: str) -> None:
    world.now_s += 61


def remove(world: World, key_id: str) -> None:
    with world.database.write() as connection:
        connection.execute(text(f"DELETE FROM keys WHERE id = '{key_id}'"))
        connection.execute(text("UPDATE key_version SET version = version + 1"))


@pytest.mark.parametrize(
    ("take", "code"),
    [(revoke, "api_key_revoked"), (expire, "api_key_expired"), (remove, "invalid_api_key")],
)
def test_requests_end_with_their_key(
    tmp_path: Path, take: Callable[[World, str], None], code: str
) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a", expires_at=world.now_s + 60)).record
    other = world.store.create(KeyOrder(name="b")).record
    ended, before, neighbour, anonymous = Watched(), Watched(), Watched(), Watched()

    async def work() -> None:
        running = world.authenticator.running
        with running.of_key(key.key_id, before):
            pass
        with (
            running.of_key(key.key_id, ended),
            running.of_key(other.key_id, neighbour),
            running.of_key(ANONYMOUS.key_id, anonymous),
        ):
            await world.keys.refresh()
            assert ended.codes == []
            take(world, key.key_id)
            await world.keys.refresh()
            await world.keys.refresh()
            assert ended.codes == [code]
        with pytest.raises(AuthenticationError), running.of_key(key.key_id, before):
            raise AssertionError("a request of a key that is gone began")
        assert len(running) == 0
        assert before.codes == neighbour.codes == anonymous.codes == []

    world.run(work)


def test_a_key_expires_while_the_database_is_away(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a", expires_at=world.now_s + 60)).record
    ended = Watched()

    def fails() -> int:
        raise OSError("it is away")

    async def work() -> None:
        with world.authenticator.running.of_key(key.key_id, ended):
            world.store.version = fails  # type: ignore[method-assign]
            world.now_s += 61
            with pytest.raises(OSError, match="away"):
                await world.keys.refresh()
            assert ended.codes == ["api_key_expired"]

    world.run(work)


def error_codes(lines: Iterator[str]) -> list[str]:
    """The codes of the errors in the rest of a stream."""
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    found = [event.get("error") or event.get("response", {}).get("error") for event in events]
    return [error.get("code") or error.get("type") for error in found if error]


@pytest.mark.slow
def test_a_revoked_keys_stream_ends_and_is_paid_for_until_then(opened: Open) -> None:
    with opened(limits=LimitSpec(tokens_per_minute=10_000)) as made:
        made.world.says(LOCAL_TEXT, hangs=True)
        store = made.world.context.tenancy.keys.store
        keys = {path: made.new_key(f"key of {path}") for path in (*BODIES, "a whole answer")}
        whole: list[httpx.Response] = []

        def ask(path: str, key: str, **fields: Any) -> Any:
            body = {"model": "small", **BODIES[path], **fields}
            headers = {"authorization": f"Bearer {key}"}
            return {"url": made.world.url + path, "json": body, "headers": headers, "timeout": 20}

        waiting = threading.Thread(
            target=lambda: whole.append(
                httpx.post(**ask("/v1/chat/completions", keys["a whole answer"]))
            )
        )
        waiting.start()
        for path in BODIES:
            with httpx.stream("POST", **ask(path, keys[path], stream=True)) as stream:
                lines = stream.iter_lines()
                for _ in range(8):
                    next(lines)
                store.revoke(keys[path][3:11])
                begun_s = time.monotonic()
                codes = error_codes(lines)
                assert len(codes) == 1, path
                assert codes[0] in ("api_key_revoked", "authentication_error", "server_error")
                assert time.monotonic() - begun_s < 5
        store.revoke(keys["a whole answer"][3:11])
        waiting.join(10)
        rows = made.rows(len(keys))
        made.until(lambda: not made.world.engine.running)
        made.until(lambda: not len(made.world.context.tenancy.keys.authenticator.running))
    assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (401, "api_key_revoked")
    streamed = [row for row in rows if row["key_id"] != keys["a whole answer"][3:11]]
    assert [row["outcome"] for row in streamed] == ["cancelled"] * len(BODIES)
    for row in streamed:
        charged = row["num_prompt_tokens"] + row["num_completion_tokens"]
        assert row["num_charged_tokens"] == charged > row["num_prompt_tokens"]
    (free,) = [row for row in rows if row not in streamed]
    assert free["num_charged_tokens"] == 0
