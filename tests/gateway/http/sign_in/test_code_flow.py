"""People sign in on the pages: the code flow, the session's cookie, and attacks on both."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.tenancy.keys.records import TeamOrder
from tests.gateway.hybrid import CHAT
from tests.gateway.tenancy.metering.tenants import Books, Open, books
from tests.gateway.tenancy.sign_in.issuer import (
    AUDIENCE,
    CLIENT_ID,
    CLIENT_SECRET,
    ScriptedIssuer,
    new_key,
    scripted_issuer,
)

URL = "https://gateway.example"
OWN = {"sec-fetch-site": "same-origin"}
GRANTS = {
    "research": {"claim": "groups", "value": "research", "team": "research"},
    "admins": {"claim": "groups", "value": "admins", "admin": True},
}


HTTP = httpx.Client(verify=False, timeout=20)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    HTTP.close()


@pytest.fixture(scope="module")
def serving() -> Iterator[ScriptedIssuer]:
    with scripted_issuer() as made:
        yield made


@pytest.fixture
def issuer(serving: ScriptedIssuer) -> ScriptedIssuer:
    """The issuer, as it was before another test changed it."""
    serving.reset()
    return serving


class Browser:
    """A browser's cookies, which it sends as their SameSite says."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cookies: dict[str, str] = {}
        self.set: list[str] = []

    def get(self, path: str, site: str = "same-origin", **headers: str) -> httpx.Response:
        return self.send("GET", path, site, headers)

    def send(
        self, method: str, path: str, site: str, headers: dict[str, str], **sent: Any
    ) -> httpx.Response:
        is_foreign = site == "cross-site"
        cookies = {
            name: value
            for name, value in self.cookies.items()
            if not is_foreign or name == "__Host-outrider-login"
        }
        cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
        own = {"cookie": cookie, "sec-fetch-site": site, "sec-fetch-mode": "navigate", **headers}
        response = HTTP.request(method, f"{self.url}{path}", headers=own, **sent)
        for text in response.headers.get_list("set-cookie"):
            self.set.append(text)
            name, _, value = text.partition(";")[0].partition("=")
            if "Max-Age=0" in text:
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        return response

    def log_in(self, landing: str = "/dashboard") -> httpx.Response:
        """Go to the issuer and come back."""
        return self.get(self.callback(landing), site="cross-site")

    def callback(self, landing: str = "/dashboard") -> str:
        """Go to the issuer; return the address that it sends the browser back to."""
        there = self.get(f"/auth/login?next={landing}", site="none")
        assert there.status_code == 303, there.text
        back = HTTP.get(there.headers["location"]).headers["location"]
        assert back.startswith(f"{URL}/auth/callback?")
        return back.removeprefix(URL)

    def session(self, site: str = "same-origin") -> dict[str, Any]:
        found: dict[str, Any] = self.get("/auth/session", site=site).json()
        return found


@contextmanager
def gateway(opened: Open, issuer: ScriptedIssuer, **options: Any) -> Iterator[Books]:
    settings = {
        "url": issuer.url,
        "audience": (AUDIENCE,),
        "grants": GRANTS,
        "client_id": CLIENT_ID,
        "client_secret": CLIENT_SECRET,
        **options,
    }
    session_s = settings.pop("session_s", 28_800)
    sign_in = {"url": URL, "session_s": session_s, "issuers": {"idp": settings}}
    with opened(sign_in=sign_in) as made:
        store = made.world.context.tenancy.keys.store
        assert store is not None
        store.create_team(TeamOrder(name="research"))
        made.until(lambda: store.version() == _version(made))
        yield made


def _version(made: Books) -> int:
    registry = made.world.context.tenancy.keys.registry
    assert registry is not None
    return registry.version


@pytest.fixture(scope="module")
def shared(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
    serving: ScriptedIssuer,
) -> Iterator[Books]:
    opened = partial(books, tokenizer, encode, tmp_path_factory.mktemp("sign-in"))
    with gateway(opened, serving) as made:
        yield made


@pytest.fixture
def made(shared: Books, issuer: ScriptedIssuer) -> Books:
    """A gateway that lets people of the issuer sign in."""
    del issuer  # it is itself again
    return shared


def test_a_person_signs_in_and_out(made: Books, issuer: ScriptedIssuer) -> None:
    browser = Browser(made.world.url)
    before = browser.session()
    assert before["is_signed_in"] is False
    assert before["providers"] == ["idp"]

    landed = browser.log_in()
    assert landed.status_code == 200, landed.text
    assert 'content="0;url=/dashboard"' in landed.text, "our own page leads on, with the cookie"
    login, session, gone = browser.set
    assert login.startswith("__Host-outrider-login=")
    assert login.endswith("Path=/; Secure; HttpOnly; SameSite=Lax")
    assert session.startswith("__Host-outrider=")
    assert session.endswith("Max-Age=28800; Path=/; Secure; HttpOnly; SameSite=Strict")
    assert "Max-Age=0" in gone

    said = browser.session()
    assert said["is_signed_in"]
    assert said["name"] == "idp:ada"
    assert browser.get("/dashboard", site="none", accept="text/html").status_code == 200
    assert browser.get("/v1/models").status_code == 200
    assert browser.get("/admin/keys").status_code == 403
    made.world.says("Hello")
    csrf = {"x-outrider-csrf": said["csrf_token"]}
    chat = browser.send("POST", "/v1/chat/completions", "same-origin", csrf, json=CHAT)
    assert chat.status_code == 200, chat.text
    assert keys_of(browser.get("/v1/usage?by=key"))[0].startswith("jwt-")

    left = browser.send("POST", "/auth/logout", "same-origin", csrf)
    assert left.status_code == 204
    assert browser.session()["is_signed_in"] is False
    assert browser.get("/v1/models").status_code == 401
    assert issuer.asked.count("/token") == 1


def test_an_administrator_uses_admin_by_session_and_by_token(
    made: Books, issuer: ScriptedIssuer
) -> None:
    issuer.claims["groups"] = ["admins"]
    browser = Browser(made.world.url)
    browser.log_in("/admin")
    assert browser.get("/admin/keys").status_code == 200
    forged = browser.send("POST", "/admin/teams", "same-origin", {}, json={"name": "evil"})
    assert forged.status_code == 403
    assert forged.json()["error"]["code"] == "csrf_token_required"
    wrong = {"x-outrider-csrf": "0" * 32}
    assert browser.send("POST", "/admin/teams", "same-origin", wrong, json={}).status_code == 403
    csrf = {"x-outrider-csrf": browser.session()["csrf_token"]}
    right = browser.send("POST", "/admin/teams", "same-origin", csrf, json={"name": "good"})
    assert right.status_code in (200, 201), right.text
    bearer = {"authorization": f"Bearer {issuer.token()}"}
    assert HTTP.get(f"{made.world.url}/admin/keys", headers=bearer).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", ""])
def test_the_cookie_counts_for_our_own_pages_only(made: Books, site: str) -> None:
    browser = Browser(made.world.url)
    browser.log_in()
    cookie = {"cookie": f"__Host-outrider={browser.cookies['__Host-outrider']}"}
    csrf = {"x-outrider-csrf": browser.session()["csrf_token"]}
    headers = {**cookie, **csrf, **({"sec-fetch-site": site} if site else {})}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
        response = HTTP.request(method, f"{made.world.url}{path}", headers=headers)
        assert response.status_code == 401
    said = HTTP.get(f"{made.world.url}/auth/session", headers=headers).json()
    assert said["csrf_token"] is None


def test_a_key_goes_before_the_cookie(made: Books) -> None:
    browser = Browser(made.world.url)
    browser.log_in()
    wrong = browser.get("/v1/models", authorization="Bearer wrong")
    assert wrong.status_code == 401, "who sends a key means that key"


def test_changed_and_foreign_cookies_are_nobodys(made: Books) -> None:
    browser = Browser(made.world.url)
    browser.log_in()
    good = browser.cookies["__Host-outrider"]
    text, _, signature = good.partition(".")
    login = Browser(made.world.url)
    login.get("/auth/login", site="none")
    for value in (
        "",
        ".",
        text,
        f"{text}.",
        f"{text}.{'0' * len(signature)}",
        f"{text}A.{signature}",
        f"A{good}",
        "x" * 8000,
        "\xe9.\xe9",
        login.cookies["__Host-outrider-login"],
    ):
        headers = {**OWN, "cookie": f"a=b; __Host-outrider={value}".encode("latin-1")}
        response = HTTP.get(f"{made.world.url}/v1/models", headers=headers)
        assert response.status_code == 401, value
    headers = {**OWN, "cookie": f"__host-outrider={good}; outrider={good}"}
    assert HTTP.get(f"{made.world.url}/v1/models", headers=headers).status_code == 401


def test_an_answer_counts_once_and_where_it_began(made: Books, issuer: ScriptedIssuer) -> None:
    browser = Browser(made.world.url)
    back = browser.callback()
    kept = browser.cookies["__Host-outrider-login"]
    victim = Browser(made.world.url)
    assert victim.get(back, site="cross-site").status_code == 401, "another's sign-in"
    victim.get("/auth/login", site="none")
    assert victim.get(back, site="cross-site").status_code == 401, "another state"
    assert browser.get(back, site="cross-site").status_code == 200
    browser.cookies["__Host-outrider-login"] = kept
    assert browser.get(back, site="cross-site").status_code == 401, "a replay"
    assert issuer.asked.count("/token") == 2
    assert "__Host-outrider" not in victim.cookies


@pytest.mark.parametrize(
    "landing",
    [
        "https://evil.example/",
        "//evil.example",
        "/\\evil.example",
        "javascript:alert(1)",
        '/dashboard"><script>',
        "/auth/logout",
        "",
    ],
)
def test_a_sign_in_lands_on_our_own_pages_only(made: Books, landing: str) -> None:
    browser = Browser(made.world.url)
    there = browser.get(f"/auth/login?{urlencode({'next': landing})}")
    back = HTTP.get(there.headers["location"]).headers["location"].removeprefix(URL)
    landed = browser.get(back, site="cross-site")
    assert re.findall(r"url=([^\"]*)", landed.text) == ["/"]


@pytest.mark.parametrize(
    "fault",
    [
        lambda issuer: issuer.changed.update(nonce="another"),
        lambda issuer: issuer.changed.update(aud="another"),
        lambda issuer: issuer.changed.update(azp="another"),
        lambda issuer: issuer.changed.update(iss="https://idp.example"),
        lambda issuer: issuer.changed.update(exp=1),
        lambda issuer: issuer.changed.update(sub=None),
        lambda issuer: issuer.keys.insert(0, new_key("k1", index=1)),
        lambda issuer: issuer.answers.update({"/token": lambda: (200, {}, b'{"id_token": 7}')}),
        lambda issuer: issuer.answers.update({"/token": lambda: (200, {}, b"[]")}),
        lambda issuer: issuer.answers.update(
            {"/token": lambda: (307, {"location": "file:///etc/passwd"}, b"")}
        ),
    ],
)
def test_an_answer_that_is_not_for_this_sign_in(
    made: Books, issuer: ScriptedIssuer, fault: Callable[[ScriptedIssuer], None]
) -> None:
    browser = Browser(made.world.url)
    browser.get("/auth/session")
    fault(issuer)
    refused = browser.log_in()
    assert refused.status_code == 401, refused.text
    assert refused.headers["content-type"].startswith("text/html")
    assert "__Host-outrider" not in browser.cookies


def test_a_person_without_a_team_is_told_the_claim(made: Books, issuer: ScriptedIssuer) -> None:
    issuer.claims["groups"] = ["<b>others</b>"]
    browser = Browser(made.world.url)
    refused = browser.log_in()
    assert refused.status_code == 403
    assert "groups" in refused.text
    assert "__Host-outrider" not in browser.cookies


def test_mixed_up_and_unwilling_issuers(made: Books, issuer: ScriptedIssuer) -> None:
    browser = Browser(made.world.url)
    state = parse_qs(urlsplit(browser.callback()).query)["state"][0]
    for query in ("code=x&iss=https://evil.example", "error=access_denied", "error=%3Cb%3E", ""):
        refused = browser.get(f"/auth/callback?state={state}&{query}", site="cross-site")
        assert refused.status_code == 401
        assert "<b>" not in refused.text
        state = parse_qs(urlsplit(browser.callback()).query)["state"][0]
    assert "/token" not in issuer.asked, "no code goes anywhere"


def test_a_session_ends(opened: Open, issuer: ScriptedIssuer) -> None:
    with gateway(opened, issuer, session_s=1e-6) as made:
        browser = Browser(made.world.url)
        assert browser.log_in().status_code == 200
        kept = re.findall("__Host-outrider=([^;]+)", browser.set[1])[0]
        headers = {**OWN, "cookie": f"__Host-outrider={kept}"}
        assert HTTP.get(f"{made.world.url}/v1/models", headers=headers).status_code == 401


def test_more_grants_than_a_cookie_holds_are_told(opened: Open, issuer: ScriptedIssuer) -> None:
    with gateway(
        opened, issuer, grants={f"group-{i:03}": {"team": "research"} for i in range(300)}
    ) as made:
        refused = Browser(made.world.url).log_in()
        assert refused.status_code == 403
        assert "300 grants" in refused.text


def test_a_client_whose_secret_goes_in_the_form(opened: Open, issuer: ScriptedIssuer) -> None:
    issuer.configured["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
    with gateway(opened, issuer) as made:
        assert Browser(made.world.url).log_in().status_code == 200


def test_without_a_client_nobody_signs_in_on_the_pages(
    opened: Open, issuer: ScriptedIssuer
) -> None:
    with gateway(opened, issuer, client_id=None) as made:
        browser = Browser(made.world.url)
        assert browser.session() == {
            "is_signed_in": False,
            "name": None,
            "csrf_token": None,
            "providers": [],
        }
        assert browser.get("/auth/login").status_code == 404
        assert browser.get("/auth/callback").status_code == 404


def test_a_token_answers_over_http_like_a_key(made: Books, issuer: ScriptedIssuer) -> None:
    made.world.says("Hello")
    url = f"{made.world.url}/v1/chat/completions"
    headers = {"authorization": f"Bearer {issuer.token()}"}
    answer = HTTP.post(url, json=CHAT, headers=headers)
    assert answer.status_code == 200, answer.text
    usage = HTTP.get(f"{made.world.url}/v1/usage?by=key", headers=headers)
    assert keys_of(usage)[0].startswith("jwt-"), "a person sees what is that person's"
    issuer.keys = [new_key("k2", index=1)]  # not read yet
    refused = HTTP.post(url, json=CHAT, headers={"authorization": f"Bearer {issuer.token()}"})
    assert refused.status_code == 401


def keys_of(usage: httpx.Response) -> list[str]:
    """The keys of a usage report."""
    return [group["group"] for group in usage.json()["data"]]
