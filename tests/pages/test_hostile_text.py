"""Hostile names, answers, errors and addresses on all pages: text stays text.

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


KEY = {
    **{"object": "key", "id": "abcdefgh", "prefix": "or-abcdefgh", "name": "k", "team": "t"},
    **{"status": "active", "admin": True, "metrics": True, "reveals": "tiers", "models": ["m"]},
    **{"tiers": ["s"], "limits": {"usd_per_day": 1, "models": {"b": {"usd_per_day": 2}}}},
    **{"weight": 1.0, "labels": {"owner": "o"}, "created_at": 1, "expires_at": None},
    **{"revoked_at": None, "old_secret_until": None, "key": "or-secret"},
}
TEAM = {"object": "team", "id": "t", "name": "n", "limits": {}, "weight": 1.0, "labels": {}}
PRICE = {"currency": "USD", "prompt": "1", "input_cache_read": "1", "completion": "1"}
SERVER = {"name": "v", "breaker": "open", "is_ejected": False, "num_in_flight": 0}
ADMIN_DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "keys": [KEY],
    "teams": [{**TEAM, "created_at": 1}],
    "tiers": [
        {"object": "tier", "name": "r", "is_local": False, "model": "m", "is_available": False}
        | {"reason": "w", "ttft_p50_ms": 1, "servers": [SERVER], "pricing": PRICE, "cost": PRICE}
    ],
    "replicas": [
        {"object": "replica", "name": "e", "group": "g", "is_up": False, "is_draining": False}
        | {"num_in_flight": 1, "num_requests": 1, "reason": "w"}
    ],
    "adapters": [
        {"object": "adapter", "name": "a", "path": "p", "tier": "large", "digest": None}
        | {"max_rank": 1, "num_modules": 1, "num_bytes": 1, "watched": True}
    ],
    "prompts": [
        {"object": "prompt", "name": "p", "tenant": "t"}
        | {"tiers": [{"tier": "l", "tokens": 1, "engines": 1, "expires_in_s": 1}]}
    ],
    "experiments": [
        {"object": "experiment", "name": "x", "version": 1, "state": "running", "share": 1.0}
        | {"source": "api", "metric": "ttft", "started_at": 1}
        | {"arms": [{"name": "y", "share": 1.0, "stopped": {"reason": "z", "at": 1}}]}
    ],
}


def test_names_on_the_admin_page_are_text(gateway: tuple[str, Whole], watched: Page) -> None:
    url, _ = gateway
    for name, data in ADMIN_DOCUMENTS.items():
        document = hostile({"object": "list", "data": data, "has_more": False}, keep=("object",))
        watched.route(f"**/admin/{name}*", fulfilling(document))
    sums = dict.fromkeys(
        ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "charge_nanos"), 1
    )
    sums |= {"cost_usd": 1, "charge_usd": 1}
    usage = {"data": [{**sums, "group": "g", "name": "u"}], "totals": sums, "has_more": True}
    usage |= {"savings": {"tier": "v", "always_usd": 1, "saved_usd": -1}}
    watched.route("**/v1/usage*", fulfilling(hostile(usage)))
    watched.goto(f"{url}/admin?x={quote(EVIL)}#{quote(EVIL)}")
    for name in ("teams", "spend", "tiers", "replicas", "adapters", "prompts", "experiments"):
        watched.goto(f"{url}/admin#{name}")
        expect(watched.locator(f"#{name}-section .list")).to_contain_text(EVIL)
    watched.goto(f"{url}/admin#keys")
    keys = watched.locator("#keys-section .list")
    expect(keys).to_contain_text(f"k{EVIL}")
    keys.get_by_role("button").first.click()
    expect(watched.locator("#panel h2")).to_have_text(f"k{EVIL}")
    expect(watched.locator("#panel .facts")).to_contain_text(EVIL)
    error = {"error": {"message": EVIL, "type": EVIL, "param": "name", "code": EVIL}}
    watched.route(
        "**/admin/keys/abcd*",
        lambda route: route.fulfill(
            status=400, body=json.dumps(error), content_type="application/json"
        ),
    )
    watched.locator("#panel").get_by_role("button", name="Save", exact=True).click()
    expect(watched.locator("#panel form").first).to_contain_text(EVIL)


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
@pytest.mark.parametrize("path", ["/", "/dashboard", "/admin"])
def test_only_the_pages_own_scripts_are_named(gateway: tuple[str, Whole], path: str) -> None:
    policy = httpx.get(gateway[0] + path).headers["content-security-policy"]
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert scripts.count("'sha256-") == 1
    assert "unsafe" not in scripts
