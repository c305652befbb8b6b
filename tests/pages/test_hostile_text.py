"""Hostile names, answers, errors and addresses on both pages: text stays text.

No script runs but the page's own, and nothing is asked of another origin. `new_page` also fails a
test in which the page's policy had to stop something: the policy is the second line of defence.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import running
from tests.gateway.http.edge.gateways import Whole, whole_gateway
from tests.gateway.scripted_client import Script, Step
from tests.pages.conftest import NewPage

EVIL = (
    '</script><script>document.title="hit"</script>'
    '<img src="//evil.invalid/x" onerror="document.title=\'hit\'">'
    "<style>@import '//evil.invalid/y'</style>"
    "\" onmouseover=\"document.title='hit'\" x='javascript:document.title=1' {{7*7}} ${7*7}"
)


@pytest.fixture(scope="module")
def gateway(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[tuple[str, Whole]]:
    """An open gateway whose models answer with hostile text."""
    whole = whole_gateway(tokenizer)
    steps = [Step(token_ids=(token,)) for token in encode(EVIL)]
    whole.engine.script = lambda _: Script(steps=steps)
    with running(whole.app) as url:
        yield url, whole


@pytest.fixture
def watched(gateway: tuple[str, Whole], new_page: NewPage) -> Iterator[Page]:
    """A page whose requests and markup are checked when the test is over."""
    url, _ = gateway
    page = new_page(url, allows=("400 (Bad Request)",))
    hosts: set[str] = set()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    yield page
    assert hosts <= {urlsplit(url).netloc, ""}  # data: has none
    assert page.title() != "hit"
    found = page.evaluate(
        "[document.scripts.length, document.querySelectorAll("
        "'img, iframe, object, embed, [onerror], [onmouseover], [href^=javascript]').length]"
    )
    assert found == [1, 0]


def hostile(value: Any, *, keep: tuple[str, ...] = ()) -> Any:
    """The document with hostile text in every text of it, but in fields of `keep`."""
    if isinstance(value, dict):
        return {
            name: inner if name in keep else hostile(inner, keep=keep)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [hostile(item, keep=keep) for item in value]
    return value + EVIL if isinstance(value, str) else value


def fulfilling(document: object) -> Callable[[Route], None]:
    body = json.dumps(document)
    return lambda route: route.fulfill(body=body, content_type="application/json")


def test_an_answer_a_prompt_and_a_query_are_text(gateway: tuple[str, Whole], watched: Page) -> None:
    url, _ = gateway
    watched.goto(f"{url}/playground?prompt={quote(EVIL)}&x={quote(EVIL)}#{quote(EVIL)}")
    watched.locator("#state.ready").wait_for()
    assert watched.input_value("#prompt") == EVIL, "filled in, not sent"
    assert watched.locator("article").count() == 0
    watched.press("#prompt", "Enter")
    watched.locator("article:not(.running)").wait_for()
    expect(watched.locator(".text")).to_have_text(EVIL)


def test_names_of_models_and_an_error_are_text(gateway: tuple[str, Whole], watched: Page) -> None:
    url, _ = gateway
    models = httpx.get(f"{url}/v1/models").json()
    watched.route("**/v1/models", fulfilling(hostile(models, keep=("object",))))
    error = {"error": {"message": EVIL, "type": EVIL, "param": EVIL, "code": EVIL}}
    watched.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=400, body=json.dumps(error), content_type="application/json"
        ),
    )
    watched.goto(f"{url}/playground")
    watched.locator("#state.ready").wait_for()
    watched.fill("#prompt", "Hello")
    watched.press("#prompt", "Enter")
    expect(watched.locator("main")).to_contain_text("onerror")


def test_names_on_the_dashboard_are_text(gateway: tuple[str, Whole], watched: Page) -> None:
    url, _ = gateway
    body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).status_code == 200
    document = httpx.get(f"{url}/v1/dashboard").json()
    arm = {"arm": "b", "stopped": "slow", "weight": 0.5, "requests": 3, "quantiles": {}}
    document["experiments"] = [
        {
            "experiment": "e",
            "version": 1,
            "state": "running",
            "metric": "m",
            "control": "a",
            "comparisons": [],
            "arms": [arm],
            "verdict": {"text": "wait"},
        }
    ]
    made = hostile(document, keep=("object", "scope"))
    watched.route("**/v1/dashboard", fulfilling(made))
    watched.goto(f"{url}/dashboard?x={quote(EVIL)}#{quote(EVIL)}")
    expect(watched.locator("#state")).to_have_text("live")
    for name in ("e", "b", "m", "slow", "wait"):
        expect(watched.locator("#experiments")).to_contain_text(f"{name}{EVIL}")
    expect(watched.locator("#board")).to_contain_text(f"small{EVIL}")


def test_markup_that_comes_from_data_could_not_run(
    gateway: tuple[str, Whole], new_page: NewPage
) -> None:
    """What would be if a page made markup of text: the policy stops it."""
    url, _ = gateway
    stopped = ("Content Security Policy", "TrustedHTML", "Trusted Type", "requires 'Trusted")
    page = new_page(f"{url}/playground", allows=stopped)
    page.locator("#state.ready").wait_for()
    attempt = """() => {
      const script = document.createElement("script");
      try { script.textContent = 'document.title = "hit"'; } catch {}
      document.body.append(script);
      try { document.body.innerHTML += '<img src=x onerror="document.title=1">'; }
      catch (error) { return error.name; }
    }"""
    assert page.evaluate(attempt) == "TypeError"
    assert page.title() not in ("hit", "1")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_only_the_pages_own_scripts_are_named(gateway: tuple[str, Whole], path: str) -> None:
    policy = httpx.get(gateway[0] + path).headers["content-security-policy"]
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert scripts.count("'sha256-") == 1
    assert "unsafe" not in scripts
