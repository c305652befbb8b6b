"""Authentication: right keys are accepted, wrong ones are not, and guessing does not pay."""

import asyncio
import hmac
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    PermissionDeniedError,
    RateLimitError,
)
from outrider.gateway.tenancy.keys import authenticator
from outrider.gateway.tenancy.keys.authenticator import ADMIN_TOKEN_ID
from outrider.gateway.tenancy.keys.key_parts import open_parts
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal, Scopes, mint_key
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World

HOME = "10.0.0.1"
AWAY = "10.0.0.2"
_random = random.Random(11)


def wrong_key(key_id: str | None = None) -> str:
    """A key that was never made."""
    return mint_key(_random, key_id).text


def within(world: World, work: Callable[[], Any]) -> None:
    async def run() -> None:
        work()

    world.run(run)


def ask(world: World, key: str | None, peer: str = HOME) -> Principal:
    header = None if key is None else f"Bearer {key}"
    return world.authenticator.authenticate(header, None, peer)


def code_of(world: World, key: str | None, peer: str = HOME) -> str | None:
    """The code of the refusal."""
    with pytest.raises((AuthenticationError, RateLimitError)) as refusal:
        ask(world, key, peer)
    problem = problem_of(refusal.value)
    assert problem.status == (429 if isinstance(refusal.value, RateLimitError) else 401)
    return problem.code


def test_a_key_is_taken_in_either_header(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))
    other = "Bearer something-else"

    def work() -> None:
        authenticate = world.authenticator.authenticate
        for headers in (
            (f"Bearer {key.text}", None),
            (f"bearer  {key.text} ", None),
            (f"BEARER {key.text}", ""),
            (None, key.text),
            ("", f" {key.text}"),
            (f"Bearer {key.text}", "unused"),
            (other, key.text),
            ("Basic dXNlcjpwYXNz", key.text),
        ):
            assert authenticate(*headers, HOME).key_id == key.record.key_id
        for headers in ((None, None), ("", ""), ("Bearer ", None), (key.text[3:], None)):
            with pytest.raises(AuthenticationError):
                authenticate(*headers, HOME)

    within(world, work)


def test_requests_need_no_key_until_one_exists(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def work() -> None:
        assert world.authenticator.is_open
        assert ask(world, None) is ANONYMOUS
        assert ask(world, "none") is ANONYMOUS  # what clients send who must send something
        key = await asyncio.to_thread(world.store.create, KeyOrder(name="a"))
        await world.keys.refresh()
        assert not world.authenticator.is_open
        assert code_of(world, None) == "missing_api_key"
        assert code_of(world, wrong_key()) == "invalid_api_key"
        assert ask(world, key.text).name == "a"
        await asyncio.to_thread(world.store.revoke, key.record.key_id)
        await world.keys.refresh()
        assert not world.authenticator.is_open  # the last key is gone, the door stays closed
        assert code_of(world, key.text) == "api_key_revoked"
        assert code_of(world, None) == "missing_api_key"

    world.run(work)


def test_modes(tmp_path: Path) -> None:
    (tmp_path / "off").mkdir()
    required = World(tmp_path, mode="required")
    off = World(tmp_path / "off", mode="off")
    key = off.store.create(KeyOrder(name="a"))

    def refuse_all() -> None:
        assert not required.authenticator.is_open
        assert code_of(required, None) == "missing_api_key"

    def let_all_in() -> None:
        assert off.authenticator.is_open
        assert ask(off, None) is ANONYMOUS
        assert ask(off, wrong_key()) is ANONYMOUS
        assert ask(off, key.text).name == "a"  # and still knows who it is

    within(required, refuse_all)
    within(off, let_all_in)
    assert open_parts().authenticator.authenticate("Bearer none", None, HOME) is ANONYMOUS


def test_a_key_ends_when_it_expires(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a", expires_at=world.now_s + 60))

    def work() -> None:
        world.now_s += 59.9
        assert ask(world, key.text).name == "a"
        world.now_s += 0.1
        assert code_of(world, key.text) == "api_key_expired"
        assert code_of(world, wrong_key(key.record.key_id)) == "invalid_api_key"  # tells no more

    within(world, work)


def test_after_a_rotation_both_secrets_are_taken_for_a_while(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = world.store.create(KeyOrder(name="a"))
    second = world.store.rotate(first.record.key_id, grace_s=60)

    def work() -> None:
        world.now_s += 59.9
        assert ask(world, first.text) is ask(world, second.text)
        world.now_s += 0.1
        assert code_of(world, first.text) == "invalid_api_key"
        assert ask(world, second.text).name == "a"

    within(world, work)


@pytest.mark.parametrize("known", [True, False])
def test_ids_that_exist_take_no_other_way_than_those_that_do_not(
    tmp_path: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))
    lengths: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        lengths.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    class Watched:
        compare_digest = staticmethod(compare)

    def work() -> None:
        monkeypatch.setattr(authenticator, "hmac", Watched)
        assert code_of(world, wrong_key(key.record.key_id if known else None)) == "invalid_api_key"
        assert lengths == [(32, 32), (32, 32)]

    within(world, work)


def test_guessing_is_slowed_down(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))
    fresh = world.store.create(KeyOrder(name="b"))

    def work() -> None:
        assert [code_of(world, wrong_key(), AWAY) for _ in range(5)] == ["invalid_api_key"] * 5
        assert code_of(world, wrong_key(), AWAY) == "too_many_wrong_keys"
        assert ask(world, fresh.text, AWAY).name == "b"
        assert ask(world, key.text, HOME).name == "a"
        world.now_s += 10
        assert code_of(world, wrong_key(), AWAY) == "invalid_api_key"
        assert code_of(world, wrong_key(), AWAY) == "too_many_wrong_keys"
        world.now_s += 10
        assert ask(world, fresh.text, AWAY).name == "b"

    within(world, work)


def test_how_long_to_wait_is_said(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.create(KeyOrder(name="a"))

    def work() -> None:
        for _ in range(5):
            code_of(world, wrong_key())
        with pytest.raises(RateLimitError, match="wait 10 s") as refusal:
            ask(world, wrong_key())
        assert problem_of(refusal.value).headers["retry-after"] == "10"

    within(world, work)


def test_a_key_in_use_is_not_shut_out_by_neighbours_behind_its_proxy(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))

    def work() -> None:
        assert ask(world, key.text).name == "a"
        for _ in range(20):
            with pytest.raises((AuthenticationError, RateLimitError)):
                ask(world, wrong_key())
        assert ask(world, key.text).name == "a"
        # Its id gives no further guesses away: wrong secrets for it are answered as all others.
        assert code_of(world, wrong_key(key.record.key_id)) == "too_many_wrong_keys"
        assert code_of(world, wrong_key()) == "too_many_wrong_keys"

    within(world, work)


def test_a_client_with_an_old_key_is_told_so_for_ever(tmp_path: Path) -> None:
    """Clients repeat after 429, so 401 it must stay; and it uses up no other client's attempts."""
    world = World(tmp_path)
    world.store.create(KeyOrder(name="a"))
    old = wrong_key()

    def work() -> None:
        assert {code_of(world, old) for _ in range(50)} == {"invalid_api_key"}
        for _ in range(4):
            assert code_of(world, wrong_key()) == "invalid_api_key"
        assert code_of(world, wrong_key()) == "too_many_wrong_keys"
        assert code_of(world, old) == "invalid_api_key"

    within(world, work)


def test_the_admin_token_administrates_and_generates_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.create(KeyOrder(name="a"))

    def work() -> None:
        principal = ask(world, ADMIN_TOKEN)
        world.authenticator.require_admin(principal)
        assert principal.key_id == ADMIN_TOKEN_ID
        assert not principal.scopes.allows_model("auto")
        assert not principal.scopes.allows_tier("small")
        assert code_of(world, ADMIN_TOKEN + "x") == "invalid_api_key"

    within(world, work)


def test_without_an_admin_token_none_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path, admin_token=None)
    world.store.create(KeyOrder(name="a"))
    within(world, lambda: code_of(world, ADMIN_TOKEN))


def test_while_no_key_is_required_a_wrong_admin_token_is_anonymous(tmp_path: Path) -> None:
    world = World(tmp_path)

    def work() -> None:
        for n in range(20):
            assert ask(world, f"guess {n}", AWAY) is ANONYMOUS
        assert ask(world, ADMIN_TOKEN, AWAY).scopes.is_admin

    within(world, work)


def test_wrong_keys_keep_no_valid_key_out(tmp_path: Path) -> None:
    """Also just after a restart, when no key has been used yet, and from the guessing address."""
    world = World(tmp_path)
    keys = [world.store.create(KeyOrder(name=f"k{n}")).text for n in range(20)]

    def work() -> None:
        for key in keys:
            for _ in range(20):
                with pytest.raises((AuthenticationError, RateLimitError)):
                    ask(world, wrong_key())
            assert ask(world, key).scopes.models is None
            assert ask(world, ADMIN_TOKEN).scopes.is_admin

    within(world, work)


def test_one_right_use_of_the_admin_token_lifts_no_throttle(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))

    def work() -> None:
        ask(world, ADMIN_TOKEN)
        ask(world, key.text)
        told = [code_of(world, f"admin-token-guess-{n}") for n in range(50)]
        assert told == ["invalid_api_key"] * 5 + ["too_many_wrong_keys"] * 45
        assert code_of(world, wrong_key(key.record.key_id)) == "too_many_wrong_keys"
        assert ask(world, ADMIN_TOKEN).key_id == ADMIN_TOKEN_ID

    within(world, work)


def test_a_revoked_key_is_told_so_however_many_wrong_keys_come(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))
    world.store.revoke(key.record.key_id)

    def work() -> None:
        for _ in range(20):
            with pytest.raises((AuthenticationError, RateLimitError)):
                ask(world, wrong_key())
            assert code_of(world, key.text) == "api_key_revoked"

    within(world, work)


def test_thousands_of_wrong_keys_are_few_lines_and_little_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))
    guard = world.authenticator._throttle

    def work() -> None:
        for n in range(3000):
            with pytest.raises((AuthenticationError, RateLimitError)):
                ask(world, f"{n}" + "x" * 2000, f"10.{n % 200}.{n // 200}.1")
        assert ask(world, key.text, "10.1.1.1").name == "a"
        assert len(guard) <= 4096
        assert len(caplog.records) <= 1100

    with caplog.at_level(logging.INFO):
        within(world, work)


def test_a_credential_that_is_too_long_is_not_its_beginning(tmp_path: Path) -> None:
    longest = "t0ken-" + "x" * 506
    world = World(tmp_path, admin_token=longest)
    world.store.create(KeyOrder(name="a"))

    def work() -> None:
        assert ask(world, longest).scopes.is_admin
        for more in ("x", "x" * 5000):
            assert code_of(world, longest + more) == "invalid_api_key"

    within(world, work)


def test_only_admin_keys_administrate(tmp_path: Path) -> None:
    world = World(tmp_path)
    admin = world.store.create(KeyOrder(name="a", scopes=Scopes(is_admin=True)))
    plain = world.store.create(KeyOrder(name="b"))

    def work() -> None:
        require = world.authenticator.require_admin
        require(ask(world, admin.text))
        with pytest.raises(PermissionDeniedError):
            require(ask(world, plain.text))
        with pytest.raises(AuthenticationError):
            require(ANONYMOUS)

    within(world, work)


def test_no_key_is_logged_or_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a"))
    sent = [
        wrong_key(key.record.key_id),
        wrong_key(),
        "sk-of-another-house\r\nlevel=INFO",
        "x" * 9999,
    ]
    said: list[str] = []

    def work() -> None:
        for text in sent:
            with pytest.raises(AuthenticationError) as refusal:
                ask(world, text)
            said.append(str(refusal.value))

    with caplog.at_level(logging.DEBUG):
        within(world, work)
    heard = caplog.text + "".join(said)
    assert caplog.text.count("key was not accepted") == 4
    assert f"key_id={key.record.key_id} peer={HOME}" in heard
    assert "another-house" not in heard
    assert "xxxx" not in heard
    assert all(text[11:] not in heard for text in sent[:2])


def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    world = World(tmp_path)
    key = world.store.create(KeyOrder(name="a", expires_at=world.now_s))

    def work() -> None:
        code_of(world, None)
        code_of(world, key.text)
        code_of(world, "sk-x")
        for _ in range(4):
            code_of(world, wrong_key())
        reasons = ("missing", "expired", "malformed", "unknown", "throttled", "revoked")
        counts = [world.count("outrider_auth_failures_total", reason=r) for r in reasons]
        assert counts == [1, 1, 1, 3, 1, 0]
        assert world.count("outrider_keys") == 1

    within(world, work)


def test_a_refusal_says_how_to_ask() -> None:
    problem = problem_of(AuthenticationError("no"))
    assert problem.headers["www-authenticate"] == "Bearer"
    assert problem.status == 401


def test_a_key_of_the_settings_is_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = "a-key-of-these-settings"
    world = World(tmp_path, api_key=chosen)
    compared: list[bytes] = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr(authenticator.hmac, "compare_digest", compare_digest)

    def check() -> None:
        assert not world.authenticator.is_open
        principal = ask(world, chosen)
        assert principal.key_id == "api-key"
        assert not principal.scopes.is_admin
        assert world.authenticator.authenticate(None, chosen, HOME) is principal
        assert world.authenticator.gone(principal.key_id) is None
        assert ask(world, ADMIN_TOKEN).key_id == ADMIN_TOKEN_ID
        assert code_of(world, None) == "missing_api_key"
        assert code_of(world, chosen[:-1]) == "invalid_api_key"

    within(world, check)
    assert len(compared) == 4 * 2  # each credential with both secrets, whichever is right
