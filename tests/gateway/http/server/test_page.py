"""The page: it loads nothing from other servers, and asks for a key where one is required."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser

import httpx
import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import running
from tests.gateway.http.edge.gateways import keyed_gateway

BROWSER = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}


class Outline(HTMLParser):
    """The elements that have an id, and the ids that labels name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.by_id: dict[str, dict[str, str | None]] = {}
        self.labelled: set[str | None] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if (name := attributes.get("id")) is not None:
            assert name not in self.by_id, f"the id {name} is there twice"
            self.by_id[name] = {**attributes, "tag": tag}
        if tag == "label":
            self.labelled.add(attributes.get("for"))


@dataclass(frozen=True)
class Keyed:
    """The address of a gateway that requires keys, and a key of it."""

    url: str
    key: str


@pytest.fixture(scope="module")
def keyed(tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    with keyed_gateway(tokenizer, tmp_path_factory.mktemp("page")) as whole:
        key = whole.new_key("reader")
        with running(whole.app) as url:
            yield Keyed(url, key)


def test_the_page_loads_nothing_from_other_servers(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text
    assert "/v1/chat/completions" in page.text
    assert 'ask("/v1/models")' in page.text, "its names are those of the gateway"


def test_a_browser_without_a_key_gets_the_page_that_asks_for_one(keyed: Keyed) -> None:
    key = {"authorization": f"Bearer {keyed.key}"}
    with httpx.Client(base_url=keyed.url, timeout=20) as http:
        shut = http.get("/", headers=BROWSER)
        assert shut.status_code == 401
        assert shut.headers["www-authenticate"] == "Bearer"
        assert shut.headers["content-type"].startswith("text/html")
        assert shut.headers["cache-control"] == "no-store"
        assert shut.headers["x-request-id"]
        opened = http.get("/", headers={**BROWSER, **key})
        assert opened.status_code == 200
        assert shut.content == opened.content, "it holds nothing that a key would protect"
        policy = shut.headers["content-security-policy"]
        assert policy == opened.headers["content-security-policy"]
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("method", "path", "accept"),
    [
        ("GET", "/", "*/*"),
        ("GET", "/", "application/json"),
        ("POST", "/", BROWSER["accept"]),
        ("GET", "/v1/models", BROWSER["accept"]),
        ("GET", "/openapi.json", BROWSER["accept"]),
        ("GET", "/metrics", BROWSER["accept"]),
        ("GET", "/index.html", BROWSER["accept"]),
    ],
)
def test_everything_else_is_refused_in_json(
    keyed: Keyed, method: str, path: str, accept: str
) -> None:
    response = httpx.request(method, f"{keyed.url}{path}", headers={"accept": accept}, timeout=20)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "missing_api_key"


def test_the_key_is_asked_for_with_care(http: httpx.Client) -> None:
    """A password field with a label; a key is kept nowhere but in the tab, and only if told to."""
    text = http.get("/").text
    outline = Outline(text)
    field = outline.by_id["key"]
    assert (field["type"], field["autocomplete"]) == ("password", "off")
    assert "key" in outline.labelled
    assert field["aria-describedby"] in outline.by_id
    assert outline.by_id["remember"]["type"] == "checkbox"
    assert "checked" not in outline.by_id["remember"]
    for name in ("localStorage", "document.cookie", "indexedDB", "innerHTML", "eval("):
        assert name not in text
    stores = re.findall(r"sessionStorage\.setItem\(.*", text)
    assert len(stores) == 1, "one place keeps it"
    assert 'if (byId("remember").checked) keepKey(key)' in text
    asked = re.findall(r'fetch\(("[^"]*"|\w+)', text)
    assert asked.count('"/ready"') == 1, "which wants no key"
    assert sorted(set(asked)) == ['"/ready"', "path"], "all else is asked with the key"


def test_every_element_the_script_looks_up_exists(http: httpx.Client) -> None:
    text = http.get("/").text
    outline = Outline(text)
    wanted = set(re.findall(r'byId\("([^"]+)"\)', text))
    assert len(wanted) > 15
    assert wanted <= set(outline.by_id)
