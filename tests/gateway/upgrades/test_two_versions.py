"""Two versions run at once, as in a rolling upgrade: real processes of this and of earlier commits.

docs/operate.md says what holds. Recorded messages and each migration by itself are tested in
tests/gateway/engines/backends/test_wire_versions.py and tests/gateway/storage.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import func, select

from benchmarks.shared.mock_upstream import MockScript, mock_in_thread
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import ledger
from tests.engines import PAIR_FOLDER
from tests.gateway.upgrades.versions import (
    BEFORE,
    LONG_BEFORE,
    Version,
    earlier_version,
    this_version,
)
from tests.gateway.waiting import wait_for

pytestmark = pytest.mark.slow

TOKEN: Final = "0123456789abcdef0123456789abcdef"
BOSS: Final = {"authorization": f"Bearer {TOKEN}"}
MODELS: Final = ("--large", str(PAIR_FOLDER / "small"), "--small", "none")
REQUESTS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7, "n": 2},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2, "service_tier": "flex"},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {"temperature": 0, "prediction": {"type": "content", "content": "ones: 8+7+0=15"}},
)


@pytest.fixture
def now(tmp_path: Path) -> Version:
    return this_version(tmp_path / "now")


@pytest.fixture
def key(now: Version) -> str:
    place = now.folder / "fleet.key"
    with now.command("engine", "keygen", str(place)) as process:
        assert process.wait() == 0, now.said()
    return str(place)


@pytest.fixture
def engine_now(tmp_path: Path, key: str) -> Iterator[str]:
    with this_version(tmp_path / "engine").running(*engine(key)) as address:
        yield address


def engine(key: str) -> tuple[str, ...]:
    own = ("engine", "--listen", "tcp://127.0.0.1:0", "--key", key, "--device", "cpu")
    return (*own, "--set", "engine.num_blocks=64", "--set", "engine.num_threads=1", *MODELS)


def gateway(address: str, key: str) -> tuple[str, ...]:
    engines = ("--engines", address, "--engine-key", key, *MODELS)
    return ("serve", "--port", "0", "--set", "database_url=none", *engines)


def answers(url: str) -> list[list[tuple[str, object]]]:
    """Texts and log-probabilities of answers to each kind of request."""
    found = []
    for fields in REQUESTS:
        messages = [{"role": "user", "content": "What is 48 + 37?"}]
        body = {"model": "large", "messages": messages, "max_tokens": 12, **fields}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        found.append([(each["message"]["content"], tokens(each)) for each in choices])
    return found


def tokens(choice: dict[str, Any]) -> list[str] | None:
    logprobs = choice.get("logprobs")
    return logprobs and [each["token"] for each in logprobs["content"]]


def test_engines_and_gateways_of_one_protocol_answer_alike(
    tmp_path: Path, now: Version, key: str, engine_now: str
) -> None:
    before = earlier_version(BEFORE, tmp_path / "before")
    with now.running(*gateway(engine_now, key)) as url:
        expected = answers(url)
    with before.running(*gateway(engine_now, key)) as url:
        assert answers(url) == expected
    with (
        before.running(*engine(key)) as address,
        now.running(*gateway(address, key)) as url,
    ):
        assert answers(url) == expected


def test_engines_and_gateways_of_two_protocols_name_both(
    tmp_path: Path, now: Version, key: str, engine_now: str
) -> None:
    before = earlier_version(LONG_BEFORE, tmp_path / "before")
    said = before.refusal(*gateway(engine_now, key))
    assert "speaks version 3 of the protocol, the gateway version 2" in said
    with before.running(*engine(key)) as address:
        said = now.refusal(*gateway(address, key))
    assert "speaks version 2 of the protocol, the gateway version 3" in said


def create(url: str, **fields: object) -> dict[str, Any]:
    """Make a key."""
    answer = httpx.post(f"{url}/admin/keys", headers=BOSS, json={"name": "k", **fields})
    assert answer.status_code in (200, 201), answer.text
    key: dict[str, Any] = answer.json()
    return key


def status(url: str, key: dict[str, Any]) -> int:
    """The status of a request with a key."""
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "cloud", "messages": messages, "max_tokens": 5, "user": "alice"}
    headers = {"authorization": f"Bearer {key['key']}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    return answer.status_code


def num_rows(database: Database) -> int:
    """The attempts that both have booked."""
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(ledger)).scalar_one()


def test_gateways_of_two_versions_go_on_with_one_database(tmp_path: Path, now: Version) -> None:
    before = earlier_version(BEFORE, tmp_path / "before")
    with ExitStack() as stack:
        cloud = stack.enter_context(mock_in_thread(MockScript()))
        settings = {
            "database_url": f"sqlite:///{tmp_path / 'both.db'}",
            "keys.admin_token": TOKEN,
            "keys.mode": "required",
            "allow_private_upstreams": "true",
        }
        serve = ["serve", "--port", "0", "--tier", f"cloud={cloud.url}"]
        serve += ["--large", "none", "--small", "none"]
        serve += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        with before.running(*serve) as old:
            first = create(old)
            assert status(old, first) == 200
            new = stack.enter_context(now.running(*serve))  # it brings the tables up to date
            keys = [first, create(old), create(new, limits={"requests_per_minute": 60})]
            for url in (old, new):
                for key in keys:
                    wait_for(lambda url=url, key=key: status(url, key) == 200)
            # What the old one does not know of closes it, and nothing else.
            weekly = create(new, limits={"usd_per_week": 5})
            assert status(new, weekly) == 200
            for asked, other in ((old, new), (new, old)):
                gone = keys.pop()
                path = f"/admin/keys/{gone['id']}"
                assert httpx.delete(asked + path, headers=BOSS).status_code == 200
                wait_for(lambda url=other, key=gone: status(url, key) == 401)
            assert status(old, weekly) == 401
            assert status(old, first) == 200
        assert "supports versions up to 0004" in before.refusal(*serve)
        database = Database(settings["database_url"])
        stack.callback(database.close)
        wait_for(lambda: num_rows(database) == len(cloud.requests))
