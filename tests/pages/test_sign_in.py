"""Sign-in in a browser: from another site and back, a request that changes something, and out."""

import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from playwright.sync_api import expect

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.tenancy.keys.records import TeamOrder
from tests.gateway.tenancy.metering.tenants import Books, books
from tests.gateway.tenancy.sign_in.issuer import (
    AUDIENCE,
    CLIENT_ID,
    CLIENT_SECRET,
    ScriptedIssuer,
    scripted_issuer,
)
from tests.pages.conftest import NewPage


@pytest.fixture(scope="module")
def issuer() -> Iterator[ScriptedIssuer]:
    with scripted_issuer() as made:
        yield made


@pytest.fixture(scope="module")
def made(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
    issuer: ScriptedIssuer,
) -> Iterator[Books]:
    # Another site for a browser than the gateway's 127.0.0.1.
    issuer.configured["authorization_endpoint"] = (
        f"{issuer.url.replace('127.0.0.1', 'localhost')}/authorize"
    )
    idp = {
        "url": issuer.url,
        "audience": (AUDIENCE,),
        "client_id": CLIENT_ID,
        "client_secret": CLIENT_SECRET,
        "grants": {
            "all": {"team": "research"},
            "operators": {"claim": "groups", "value": "operators", "admin": True},
        },
    }
    sign_in = {"url": "https://gateway.example", "issuers": {"idp": idp}}
    opened = partial(books, tokenizer, encode, tmp_path_factory.mktemp("sign-in"))
    with opened(sign_in=sign_in) as gateway:
        store = gateway.world.context.tenancy.keys.store
        registry = gateway.world.context.tenancy.keys.registry
        assert store is not None
        assert registry is not None
        store.create_team(TeamOrder(name="research"))
        gateway.until(lambda: registry.team("research") is not None)
        issuer.gateway = f"{gateway.world.url}/auth/callback"
        yield gateway


@pytest.mark.slow
def test_a_person_signs_in_chats_and_signs_out(made: Books, new_page: NewPage) -> None:
    made.world.says("Hello there")
    page = new_page(f"{made.world.url}/playground", allows=("401", "404", "400"))
    page.get_by_role("link", name="Sign in with idp").click()
    page.wait_for_url(f"{made.world.url}/playground")
    expect(page.locator("#holder")).to_contain_text("signed in as idp:ada")
    expect(page.locator("#access")).to_be_hidden()
    assert page.evaluate("document.cookie") == "", "no script reads the cookie"
    page.fill("#prompt", "Hi")
    page.click("#send")
    expect(page.locator("article .text").first).to_contain_text("Hello there")
    page.goto(f"{made.world.url}/dashboard")
    expect(page.locator("#holder")).to_contain_text("signed in as idp:ada")
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#access")).to_be_visible()
    expect(page.locator("#access-why")).to_have_text("You have signed out.")
    page.reload()
    expect(page.locator("#access")).to_be_visible()
    expect(page.locator("#holder")).to_be_hidden()


@pytest.mark.slow
def test_a_link_from_another_site_finds_who_signed_in(
    made: Books, issuer: ScriptedIssuer, new_page: NewPage
) -> None:
    page = new_page(f"{made.world.url}/dashboard", allows=("401", "404", "400"))
    page.get_by_role("link", name="Sign in with idp").click()
    expect(page.locator("#holder")).to_contain_text("signed in as idp:ada")
    link = f'<a href="{made.world.url}/dashboard">there</a>'.encode()
    issuer.answers["/elsewhere"] = lambda: (200, {"content-type": "text/html"}, link)
    page.goto(f"{issuer.url.replace('127.0.0.1', 'localhost')}/elsewhere")
    with page.expect_response(f"{made.world.url}/dashboard") as arrival:
        page.get_by_role("link").click()
    assert arrival.value.status == 401, "the link brought no cookie"
    expect(page.locator("#holder")).to_contain_text("signed in as idp:ada")
    expect(page.locator("#access")).to_be_hidden()


@pytest.mark.slow
def test_an_administrator_makes_a_key_without_one(
    made: Books, issuer: ScriptedIssuer, new_page: NewPage
) -> None:
    issuer.claims["groups"] = ["operators"]
    page = new_page(f"{made.world.url}/admin", allows=("401", "404", "400"))
    page.get_by_role("link", name="Sign in with idp").click()
    page.wait_for_url(f"{made.world.url}/admin")
    expect(page.locator("#holder")).to_contain_text("signed in as idp:ada")
    page.get_by_role("button", name="New key").click()
    page.get_by_label("name", exact=True).fill("made-by-ada")
    page.get_by_role("button", name="Create key").click()
    expect(page.locator("#secret")).to_have_value(re.compile("^or-"))
