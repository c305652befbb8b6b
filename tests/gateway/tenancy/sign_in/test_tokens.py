"""Tokens of identity providers as keys: what counts, whom it stands for, and what never counts."""

import asyncio
import base64
import hmac
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from prometheus_client import CollectorRegistry

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import GatewayError, IssuerUnavailableError
from outrider.gateway.settings.sign_in import GrantSettings, IssuerSettings
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.keys.records import TeamOrder
from outrider.gateway.tenancy.sign_in.issuer import Issuer
from outrider.gateway.tenancy.sign_in.issuer_client import IssuerClient, IssuerError
from outrider.gateway.tenancy.sign_in.sign_in import SignIn
from outrider.gateway.tenancy.sign_in.sign_in_metrics import SignInMetrics
from tests.gateway.tenancy.keys.world import World
from tests.gateway.tenancy.sign_in.issuer import (
    AUDIENCE,
    SUBJECT,
    ScriptedIssuer,
    new_key,
    scripted_issuer,
)
from tests.gateway.waiting import HandClock, until

GRANTS = {
    "research": GrantSettings(claim="groups", value="research", team="research"),
    "guests": GrantSettings(claim="realm.roles", value="guest", team="guests", models=("small",)),
    "writers": GrantSettings(claim="scope", value="write", models=("large", "auto")),
    "admins": GrantSettings(claim="groups", value="admins", admin=True),
    "lost": GrantSettings(claim="groups", value="lost", team="nowhere"),
}


@pytest.fixture
def issuer() -> Iterator[ScriptedIssuer]:
    with scripted_issuer() as made:
        yield made


class Door:
    """An authenticator that takes an issuer's tokens."""

    def __init__(self, folder: Path, *issuers: ScriptedIssuer, **options: Any) -> None:
        self.world = World(folder)
        self.team = self.world.store.create_team(
            TeamOrder(name="research", limits=LimitSpec(requests_per_minute=7), weight=2.0)
        )
        self.world.store.create_team(TeamOrder(name="guests"))
        self.clock = HandClock()
        self.late_s = 0.0
        self.peer: str | None = None
        """The address that asks; None: each time another."""
        self._peers = itertools.cycle(range(256))
        metrics = SignInMetrics(self.world.registry)
        bounds = {name: options.pop(name) for name in ("max_known",) if name in options}
        timeout_s = options.pop("timeout_s", 5.0)
        settings = {"audience": (AUDIENCE,), "grants": GRANTS, **options}
        self.issuers = [
            Issuer(
                f"idp{i}",
                IssuerSettings(url=issuer.url, **settings),
                IssuerClient(timeout_s=timeout_s),
                clock=self.clock,
                metrics=metrics,
            )
            for i, issuer in enumerate(issuers)
        ]
        self.sign_in = SignIn(
            self.issuers,
            self.world.keys,
            metrics,
            wall_clock=lambda: time.time() + self.late_s,
            **bounds,
        )
        self.world.authenticator.sign_in = self.sign_in

    def ask(self, token: str) -> Principal:
        peer = self.peer or f"10.0.{next(self._peers)}.1"
        return self.world.authenticator.authenticate(f"Bearer {token}", None, peer)

    async def come(self, token: str) -> Principal:
        """Ask as the dispatcher does: once more after the keys have been read."""
        try:
            return self.ask(token)
        except IssuerUnavailableError as error:
            await error.fetched()
            return self.ask(token)

    async def refusal(self, token: str) -> tuple[int, str | None, str]:
        with pytest.raises(GatewayError) as refused:
            await self.come(token)
        problem = problem_of(refused.value)
        return problem.status, problem.code, problem.message

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        self.world.run(work)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_token_stands_for_its_team(
    tmp_path: Path, issuer: ScriptedIssuer, algorithm: str
) -> None:
    issuer.keys = [new_key("k", algorithm)]
    door = Door(tmp_path, issuer)

    async def work() -> None:
        principal = await door.come(issuer.token())
        assert (principal.team_id, principal.tenant) == (door.team.team_id,) * 2
        assert principal.team_limits == door.team.limits
        assert principal.is_limited
        assert principal.weight == 2.0
        assert principal.end_user == f"idp0:{SUBJECT}"
        assert principal.name == f"idp0:{SUBJECT}"
        assert principal.scopes.models is None
        assert not principal.scopes.is_admin
        again = await door.come(issuer.token(jti="another"))
        assert (again.key_id, again.cache_salt) == (principal.key_id, principal.cache_salt)
        other = await door.come(issuer.token(sub="grace"))
        assert other.key_id != principal.key_id
        assert other.tenant == principal.tenant
        assert other.cache_salt != principal.cache_salt, "a person's prompts are that person's"
        assert door.world.authenticator.gone(principal.key_id) is None

    door.run(work)


def test_grants_add_up(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)

    async def work() -> None:
        guest = await door.come(issuer.token(groups=None, realm={"roles": ["guest", 7]}))
        assert guest.scopes.models == {"small"}
        both = await door.come(
            issuer.token(
                groups=["research", "admins"], scope="read write", realm={"roles": "guest"}
            )
        )
        assert both.team_id == door.team.team_id, "the first team in the settings"
        assert both.scopes.models == {"small", "large", "auto"}
        assert both.scopes.is_admin
        lone = await door.come(issuer.token(groups=["admins"]))
        assert lone.scopes.is_admin
        assert lone.scopes.models == frozenset(), "without a team it generates nothing"

    door.run(work)


def test_a_claim_without_a_team_is_named(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)

    async def work() -> None:
        for groups in (None, [], "Research", ["research "], "x research", {"research": 1}, 7):
            status, code, message = await door.refusal(issuer.token(groups=groups))
            assert (status, code) == (403, "no_team")
            assert "groups" in message
            assert "realm.roles" in message
        _, code, message = await door.refusal(issuer.token(groups=["lost"]))
        assert code == "no_team"
        assert "'nowhere'" in message

    door.run(work)


def test_a_team_that_does_not_exist_is_told_at_the_start(
    tmp_path: Path, issuer: ScriptedIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(tmp_path, issuer)

    async def work() -> None:
        await door.sign_in.start()
        await door.sign_in.close()

    door.run(work)
    assert "that there is not issuer=idp0 grant=lost team=nowhere" in caplog.text
    assert "research" not in caplog.text


def test_times_and_audience(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)
    now_s = time.time()

    async def work() -> None:
        await door.come(issuer.token(exp=now_s - 30))  # within the skew
        await door.come(issuer.token(nbf=now_s + 30))
        await door.come(issuer.token(aud=["other", AUDIENCE]))
        wrong: dict[str, dict[str, Any]] = {
            "token_expired": {"exp": now_s - 90},
            "invalid_token": {"nbf": now_s + 90},
        }
        for code, claims in wrong.items():
            assert (await door.refusal(issuer.token(**claims)))[:2] == (401, code)
        for claims in (
            {"aud": "other"},
            {"aud": None},
            {"aud": []},
            {"exp": None},
            {"exp": "soon"},
            {"exp": float("nan")},
            {"exp": float("inf")},
            {"exp": 10**400},
            {"nbf": float("inf")},
            {"iat": now_s + 90},
            {"iss": None},
            {"iss": f"{issuer.url}/"},
            {"sub": None},
            {"sub": ""},
            {"sub": "a\nb"},
            {"sub": "x" * 256},
        ):
            status, code, _ = await door.refusal(issuer.token(**claims))
            assert status == 401, claims
            assert code == "invalid_token", claims

    door.run(work)


def _segment(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_confused_and_forged_signatures(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)
    claims = jwt.decode(issuer.token(), options={"verify_signature": False})

    async def work() -> None:
        good = issuer.token()
        await door.come(good)
        head, payload, signature = good.split(".")
        public = issuer.keys[0].private.public_key()
        pem = public.public_bytes(*_PEM)
        for alg in ("none", "None", "NONE", "", "HS256", "RS256 ", "PS256", None, ["RS256"], 5):
            header = {"typ": "JWT", "kid": "k1", "alg": alg}
            signed = f"{_segment(header)}.{payload}"
            # A public key as HMAC's secret: what a reader does who believes the header.
            mac = _segment(hmac.digest(pem, signed.encode(), "sha256"))
            for end in ("", mac, signature):
                assert (await door.refusal(f"{signed}.{end}"))[0] == 401, (alg, end)
        swapped = _segment({**claims, "groups": ["admins"]})
        assert (await door.refusal(f"{head}.{swapped}.{signature}"))[0] == 401
        stranger = new_key("k1", index=1)
        attacker = "http://127.0.0.1:9/keys"
        for header in (
            {},
            {"jku": attacker},
            {"x5u": attacker},
            {"jwk": stranger.jwk},
            {"x5c": ["MIIB"]},
            {"kid": "../../../dev/null"},
            {"kid": "' UNION SELECT 'x"},
            {"kid": ""},
            {"kid": "k" * 5000},
            {"crit": ["exp"], "exp": 1},
            {"b64": False, "crit": ["b64"]},
        ):
            token = jwt.encode(claims, stranger.private, "RS256", headers={"kid": "k1", **header})
            assert (await door.refusal(token))[0] == 401, header
        assert set(issuer.asked) <= {"/keys", "/.well-known/openid-configuration"}

    door.run(work)


def test_what_is_no_token_is_a_401(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)
    nested = _segment(b'{"iss":' + b"[" * 5000)

    async def work() -> None:
        for token in (
            "eyJ",
            "eyJ..",
            "eyJ.eyJ.eyJ",
            "eyJ\udcff.a.b",
            f"{_segment({'alg': 'RS256'})}.{nested}.",
            f"{_segment(b'{' + b'[' * 5000)}.{nested}.",
            f"{_segment([1])}.{_segment([1])}.",
            f"{_segment({'alg': 'RS256'})}.{_segment(['iss'])}.x",
            f"{_segment({'alg': 'RS256', 'kid': 7})}.{_segment({'iss': 7})}.x",
            "eyJ" + "." * 6000,
        ):
            assert (await door.refusal(token))[0] in (401, 429), token[:40]

    door.run(work)


def test_an_oversized_token_is_refused_unread(
    tmp_path: Path, issuer: ScriptedIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(tmp_path, issuer)

    async def work() -> None:
        await door.come(issuer.token())
        token = issuer.token(padding="x" * 6200)
        assert len(token) > 8192
        monkeypatch.setattr(jwt, "decode_complete", None)
        assert (await door.refusal(token))[:2] == (401, "invalid_token")

    door.run(work)


def test_another_issuers_key_of_the_same_id(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    with scripted_issuer() as other:
        other.keys = [new_key("k1", index=1)]
        door = Door(tmp_path, issuer, other)

        async def work() -> None:
            await door.come(issuer.token())
            theirs = await door.come(other.token())
            assert theirs.name == f"idp1:{SUBJECT}"
            assert theirs.key_id != (await door.come(issuer.token())).key_id
            assert (await door.refusal(other.token(iss=issuer.url)))[0] == 401
            assert (await door.refusal(other.token(iss="https://idp.example")))[0] == 401

        door.run(work)


def test_known_tokens_are_not_verified_again(
    tmp_path: Path, issuer: ScriptedIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(tmp_path, issuer, max_known=3)

    async def work() -> None:
        token = issuer.token()
        first = await door.come(token)
        assert door.ask(token) is first
        assert door.world.count("outrider_tokens_total", result="verified") == 1
        door.late_s = 700  # past its end, so it is verified anew
        door.ask(token)
        assert door.world.count("outrider_tokens_total", result="verified") == 2
        door.late_s = 0
        for number in range(5):
            await door.come(issuer.token(jti=str(number)))
        assert door.ask(token) is not first, "the first that was verified made room"

    door.run(work)


def test_a_change_of_the_team_counts_at_once(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)

    async def work() -> None:
        token = issuer.token()
        await door.come(token)
        limits = LimitSpec(requests_per_minute=1)
        await asyncio.to_thread(door.world.store.update_team, "research", {"limits": limits})
        await door.world.keys.refresh()
        assert door.ask(token).team_limits == limits

    door.run(work)


def test_keys_rotate_and_withdrawn_ones_end(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)

    async def work() -> None:
        old = issuer.token()
        await door.come(old)
        issuer.keys = [new_key("k2", index=1)]
        fresh = issuer.token()
        asked = len(issuer.asked)
        assert (await door.refusal(fresh))[0] == 401, "not read again so soon"
        assert len(issuer.asked) == asked
        door.clock.now_s += 11
        assert (await door.come(fresh)).name == f"idp0:{SUBJECT}"
        assert (await door.refusal(old))[0] == 401
        asked = len(issuer.asked)
        for number in range(20):  # of unknown keys, as anybody can send
            await door.refusal(issuer.token(new_key(f"made-up-{number}")))
        assert len(issuer.asked) == asked

    door.run(work)


def test_known_keys_go_on_while_the_issuer_hangs(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer, timeout_s=0.05)

    async def work() -> None:
        await door.come(issuer.token())
        issuer.answers["/keys"] = issuer.hang
        door.clock.now_s += 11
        with pytest.raises(IssuerUnavailableError):
            door.ask(issuer.token(new_key("new", index=1)))
        assert door.ask(issuer.token(jti="2")).name == f"idp0:{SUBJECT}"
        await until(lambda: door.world.count(FAILURES, issuer="idp0") == 1)
        assert (await door.refusal(issuer.token(new_key("new", index=1))))[0] == 401

    door.run(work)


FAILURES = "outrider_issuer_fetch_failures_total"


def _big() -> tuple[int, dict[str, str], bytes]:
    return 200, {}, b" " * 100_000_000


def _json(value: Any) -> Callable[[], tuple[int, dict[str, str], bytes]]:
    return lambda: (200, {}, json.dumps(value).encode())


_MANY = {"keys": [new_key(f"k{i}").jwk for i in range(101)]}
_PEM = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    "answer",
    [
        _big,
        _json(_MANY),
        _json({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "k1"}]}),
        _json({"keys": {}}),
        _json([]),
        lambda: (200, {}, b"[" * 100_000),
        lambda: (200, {"content-encoding": "gzip"}, b"\x1f\x8b" + bytes(100)),
        lambda: (500, {}, b"{}"),
    ],
)
def test_a_broken_key_set_changes_nothing(
    tmp_path: Path, issuer: ScriptedIssuer, answer: Callable[[], Any]
) -> None:
    issuer.answers["/keys"] = answer
    door = Door(tmp_path, issuer)

    async def work() -> None:
        assert (await door.refusal(issuer.token()))[:2] == (503, "issuer_unavailable")
        assert door.world.count(FAILURES, issuer="idp0") == 1
        del issuer.answers["/keys"]
        door.clock.now_s += 11
        await door.come(issuer.token())
        issuer.answers["/keys"] = answer
        door.clock.now_s += 11
        assert (await door.refusal(issuer.token(new_key("new"))))[0] == 401
        await door.come(issuer.token(jti="2"))

    door.run(work)


@pytest.mark.parametrize(
    "configured",
    [
        {"issuer": "https://idp.example"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": "http://10.0.0.1/keys"},
        {"jwks_uri": "gopher://127.0.0.1/"},
        {"jwks_uri": "https://user:secret@idp.example/keys"},
        {"jwks_uri": None},
        {"jwks_uri": ["https://idp.example/keys"]},
    ],
)
def test_a_configuration_cannot_lead_elsewhere(
    tmp_path: Path, issuer: ScriptedIssuer, configured: dict[str, Any]
) -> None:
    issuer.configured = configured
    door = Door(tmp_path, issuer)

    async def work() -> None:
        assert (await door.refusal(issuer.token()))[0] == 503
        assert issuer.asked == ["/.well-known/openid-configuration"]

    door.run(work)


class FarIssuer(IssuerClient):
    """An issuer elsewhere, whose configuration points to this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def ask(self, url: str, form: object = None, **headers: str) -> Any:
        self.asked.append(url)
        return {"issuer": "https://idp.example", "jwks_uri": "http://127.0.0.1:8000/admin/keys"}


def test_an_issuer_elsewhere_has_this_machine_asked_nothing() -> None:
    registry, client = CollectorRegistry(), FarIssuer()

    async def main() -> None:
        issuer = Issuer(
            "far",
            IssuerSettings(url="https://idp.example", audience=(AUDIENCE,), grants=GRANTS),
            client,
            clock=HandClock(),
            metrics=SignInMetrics(registry),
        )
        with pytest.raises(IssuerUnavailableError) as unavailable:
            issuer.find("k1", "RS256")
        await unavailable.value.fetched()

    asyncio.run(main())
    assert client.asked == ["https://idp.example/.well-known/openid-configuration"]
    assert registry.get_sample_value(FAILURES, {"issuer": "far"}) == 1


def test_no_redirect_is_followed(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    moved = json.dumps({"keys": [key.jwk for key in issuer.keys]}).encode()
    issuer.answers["/keys"] = lambda: (302, {"location": f"{issuer.url}/moved"}, b"")
    issuer.answers["/moved"] = lambda: (200, {}, moved)
    door = Door(tmp_path, issuer)

    async def work() -> None:
        assert (await door.refusal(issuer.token()))[0] == 503
        assert "/moved" not in issuer.asked

    door.run(work)


def test_a_private_issuer_is_not_asked_where_none_may_be(issuer: ScriptedIssuer) -> None:
    async def main() -> None:
        with pytest.raises(IssuerError):
            await IssuerClient(allow_private=False).ask(f"{issuer.url}/keys")

    asyncio.run(main())
    assert issuer.asked == []


def test_whoever_comes_first_finds_where_to_sign_in(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer, client_id="pages")

    async def work() -> None:
        found = await door.issuers[0].ready_endpoints()
        assert found.authorize == f"{issuer.url}/authorize?realm=tests"

    door.run(work)


def test_unfit_keys_are_left_out(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    weak = {**new_key("weak").jwk, "n": _segment(b"\xc1" + bytes(62) + b"\x01")}
    whole = new_key("private")
    private = {
        **jwt.get_algorithm_by_name("RS256").to_jwk(whole.private, as_dict=True),
        "kid": "private",
    }
    private.pop("key_ops", None)
    unfit = [
        weak,
        private,
        new_key("enc", use="enc").jwk,
        new_key("other", alg="RS512").jwk,
        new_key("sign", key_ops=["sign"]).jwk,
        {**new_key("curve", "ES256").jwk, "crv": "P-384"},
        {"kty": "RSA", "kid": "broken", "n": 7, "e": "AQAB"},
        7,
    ]
    issuer.answers["/keys"] = _json({"keys": [*unfit, issuer.keys[0].jwk]})
    door = Door(tmp_path, issuer)

    async def work() -> None:
        await door.come(issuer.token())
        for kid in ("private", "enc", "other", "sign", "broken"):
            assert (await door.refusal(issuer.token(new_key(kid))))[0] in (401, 429), kid
        nameless = new_key(None)
        await door.come(issuer.token(nameless))  # one key fits, so it needs no name

    door.run(work)


def test_refusals_are_counted_and_throttled(tmp_path: Path, issuer: ScriptedIssuer) -> None:
    door = Door(tmp_path, issuer)

    async def work() -> None:
        door.peer = "10.0.0.1"
        good = issuer.token()
        await door.come(good)
        codes = [(await door.refusal(f"eyJ{number}.a.b"))[1] for number in range(7)]
        assert codes == ["invalid_token"] * 5 + ["too_many_wrong_keys"] * 2
        assert door.ask(good).name == f"idp0:{SUBJECT}"
        expired = [issuer.token(exp=time.time() - 100 - n) for n in range(3)]
        assert {(await door.refusal(token))[1] for token in expired} == {"token_expired"}
        assert door.world.count("outrider_auth_failures_total", reason="token") == 5
        assert door.world.count("outrider_tokens_total", result="refused") == 10

    door.run(work)
