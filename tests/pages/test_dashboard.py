"""The dashboard in a browser: it shows what the API says, in the key's scope, by mouse and key."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from outrider.engine.events import EngineStats, StoreStats, TierStats
from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import running
from tests.gateway.http.edge.gateways import ADMIN_TOKEN, keyed_gateway, whole_gateway
from tests.pages.conftest import PHONE, NewPage

HELLO = [{"role": "user", "content": "Hi"}]
MAX_PAGE_BYTES = 60_000
NOTHING = "\N{EN DASH}"
STATS = EngineStats(
    tiers={
        "small": TierStats(num_running=1, num_blocks=10, num_used_blocks=3),
        "large": TierStats(
            num_running=2,
            num_waiting=4,
            num_held_newcomers=1,
            num_newcomer_holds=3,
            newcomer_held_s=1.0,
            num_blocks=10,
            num_used_blocks=5,
            prefix_cache_queries=1000,
            prefix_cache_hits=600,
        ),
    },
    store=StoreStats(
        num_restored_tokens=200, saved_s=12.5, num_read_bytes=3_000_000, num_written_bytes=2 * 10**9
    ),
    num_steps=100,
    step_host_s=0.2,
    step_forward_s=0.6,
    num_drafts=10,
    num_draft_tokens=60,
    num_accepted_tokens=15,
    accepted_per_depth=(10, 5),
    drafted_by_source={"model": (20, 20), "suffix": (10, 10)},
    accepted_by_source={"model": (5, 4), "suffix": (5, 1)},
)


@dataclass(frozen=True)
class Site:
    """A running gateway; `keys` where it wants some."""

    url: str
    keys: tuple[str, ...] = ()

    def chat(self, text: str = "Hi", key: str = "", **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=20)


@pytest.fixture(scope="module")
def site(tokenizer: ChatTokenizer) -> Iterator[Site]:
    """An open gateway that has answered three requests by the small model, one by the large."""
    whole = whole_gateway(tokenizer)
    whole.engine.current = STATS
    with running(whole.app) as url:
        made = Site(url)
        for text in ("Hi", "Hello", "This prompt is longer than twenty characters."):
            assert made.chat(text).status_code == 200
        assert made.chat("Hi", outrider={"slo": {"class": "batch"}}).status_code == 200
        yield made


@pytest.fixture(scope="module")
def keyed(tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with keyed_gateway(tokenizer, tmp_path_factory.mktemp("dashboard")) as whole:
        whole.engine.current = STATS
        keys = (whole.new_key("mine"), whole.new_key("other"))
        with running(whole.app) as url:
            yield Site(url, keys)


def tile(page: Page, name: str) -> str:
    found = page.locator("#tiles div, #more div", has=page.get_by_text(name, exact=True))
    return found.locator("dd").inner_text()


def test_it_shows_what_the_api_says(site: Site, new_page: NewPage) -> None:
    page = new_page(f"{site.url}/dashboard")
    expect(page.locator("#state")).to_have_text("live")
    told = httpx.get(f"{site.url}/v1/dashboard").json()
    assert told["requests"]["num_answered"] == 4
    assert {tier["name"]: tier["num"] for tier in told["tiers"]} == {"small": 3, "large": 1}
    shares = page.locator("#tiers li").all_inner_texts()
    assert shares == ["small: 75 %, 3 answers", "large: 25 %, 1 answer"]
    rows = page.locator("#classes tbody tr").all_inner_texts()
    classes = {row.split("\t")[0].strip(): row for row in rows}
    assert list(classes) == [one["name"] for one in told["classes"]]
    for one in told["classes"]:
        cells = [cell.strip() for cell in classes[one["name"]].split("\t")]
        assert cells[3] == str(one["num"])
        met = NOTHING if one["attainment"] is None else f"{one['attainment'] * 100:.0f} %"
        assert cells[4] == met
    assert "≤ 1000 ms" in classes["short-chat"]
    assert not page.locator("#more").is_visible()
    page.locator("#inside summary").click()
    assert (tile(page, "running").strip(), tile(page, "waiting").strip()) == ("3", "4")
    assert tile(page, "held back by the queue") == "1"
    assert tile(page, "mean time held back, large model") == "250 ms", "three ended, one waits"
    assert tile(page, "a step of the engine") == "8 ms"
    assert tile(page, "of it beside the models' passes") == "2 ms"
    assert tile(page, "the loop held by a prompt p99").endswith(" ms")
    assert tile(page, "prompts found in memory") == "40 %"
    assert tile(page, "prompts found on the disk") == "20 %"
    assert tile(page, "computing that the disk saved") == "12.5 s"
    assert tile(page, "keys and values read from the disk") == "3 MB"
    assert tile(page, "written to the disk") == "2 GB"
    assert tile(page, "failed or refused") == "0 of 4"
    assert page.locator("#tiles div").count() == 6
    assert tile(page, "cost").strip() == "set prices", "no tier has a price"
    expect(page.locator("#prices")).to_contain_text("routing.prices")
    assert page.locator("#cost").is_hidden()
    for name in ("ttft", "inter-token", "e2e", "rate", "tokens", "queue", "kv", "depth"):
        chart = page.locator(f"#{name} svg")
        assert chart.get_attribute("role") == "img"
        title = page.locator(f"#{name} h2").inner_text().split(",")[0]
        assert (chart.get_attribute("aria-label") or "").startswith(title)
    assert "model: 25 %, 20 %; suffix: 50 %, 10 %" in (
        page.locator("#depth svg").get_attribute("aria-label") or ""
    )
    assert page.locator("#depth .bar").count() == 4
    expect(page.locator("#experiments")).to_contain_text("There is no experiment.")


def test_a_client_with_a_clock_at_the_head_of_its_prompts_is_named(
    tokenizer: ChatTokenizer, new_page: NewPage
) -> None:
    whole = whole_gateway(tokenizer, max_context=2048)
    whole.engine.current = STATS
    rules = "Be kind to everybody, and answer as briefly as you can. " * 30
    with running(whole.app) as url:
        site = Site(url)
        private = {"outrider": {"privacy": "private"}}
        for fields in (private, {}):
            for minute in range(4):
                head = f"It is {minute} minutes past nine. ".ljust(90, ".")
                messages = [{"role": "system", "content": head + rules}, *HELLO]
                assert site.chat(messages=messages, **fields).status_code == 200
        page = new_page(f"{url}/dashboard")
        row = page.locator("#heads tbody tr")
        expect(row).to_have_count(1)
        (told,) = httpx.get(f"{url}/v1/dashboard").json()["changing_heads"]
        assert (told["num_requests"], told["num_changed"]) == (4, 3), "private ones are not counted"
        assert told["num_repeated_tokens"] > 0
        client, prompts, *_ = (cell.strip() for cell in row.inner_text().split("\t"))
        assert client.startswith("anonymous, python-httpx/")
        assert prompts == "3 of 4"
        assert "Be kind" not in page.content()


def test_charts_are_read_with_the_keyboard(site: Site, new_page: NewPage) -> None:
    page = new_page(f"{site.url}/dashboard")
    chart = page.locator("#queue svg")
    chart.focus()
    chart.press("ArrowLeft")
    readout = page.locator("#queue .readout")
    expect(readout).to_have_text(
        re.compile(r"^\S+ s ago: small running 1, small waiting 0, large running 2")
    )
    assert page.locator("#spoken").inner_text() == readout.inner_text()
    chart.press("Escape")
    expect(readout).to_have_text("")
    chart.hover()
    expect(readout).to_have_text(re.compile("s ago"))


def test_a_new_request_appears_by_itself_unless_paused(site: Site, new_page: NewPage) -> None:
    page = new_page(f"{site.url}/dashboard")
    count = re.compile(r"^0 of (\d+)$")
    failed = page.locator("#tiles div", has=page.get_by_text("failed or refused", exact=True))
    expect(failed.locator("dd")).to_have_text(count)
    before = count.match(tile(page, "failed or refused"))
    assert before is not None
    site.chat("Hi")
    expect(failed.locator("dd")).to_have_text(f"0 of {int(before[1]) + 1}")
    pause = page.get_by_role("button", name="Pause")
    pause.focus()
    pause.press("Enter")
    expect(page.locator("#state")).to_have_text("paused")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    resume = page.get_by_role("button", name="Go on")
    assert resume.get_attribute("aria-pressed") == "true"
    resume.click()
    expect(page.locator("#state")).to_have_text("live")
    assert [url for url in asked if url.endswith("/v1/dashboard")], "it asks again at once"


def test_charts_have_a_past_when_the_page_is_opened(site: Site, new_page: NewPage) -> None:
    """The engine is sampled in the background; counts have whole numbers on their axis."""
    deadline_s = time.monotonic() + 30
    while len(httpx.get(f"{site.url}/v1/dashboard").json()["engine"]["history"]["age_s"]) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    page = new_page(f"{site.url}/dashboard")
    page.locator("#queue .curve").first.wait_for(state="attached")
    ticks = page.locator("#queue svg text").all_text_contents()[:3]
    assert all(re.fullmatch(r"\d+", tick) for tick in ticks), ticks
    assert page.locator("#queue .area").count() >= 4, "a band for each tier's running and waiting"


def test_a_tier_has_the_same_colour_on_both_pages(site: Site, new_page: NewPage) -> None:
    page = new_page(f"{site.url}/dashboard")
    page.locator("#tiers li").first.wait_for()
    shown = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#tiers li')].map((item) =>"
        " [item.textContent.split(':')[0], getComputedStyle(item, '::before').backgroundColor]))"
    )
    page.goto(f"{site.url}/playground")
    page.locator("#state.ready").wait_for()
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    page.locator("article:not(.running)").wait_for()
    name = page.locator(".route em").inner_text()
    colour = page.evaluate(
        "getComputedStyle(document.querySelector('.route em'), '::before').backgroundColor"
    )
    assert shown[name] == colour
    assert len(set(shown.values())) == len(shown)


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_both_schemes(site: Site, new_page: NewPage, dark: bool) -> None:
    page = new_page(f"{site.url}/dashboard", dark=dark, viewport=PHONE)
    expect(page.locator("#state")).to_have_text("live")
    page.locator("#experiments").wait_for()
    columns = page.evaluate(
        "[...document.querySelectorAll('#charts figure:not(.wide):not([hidden])')].slice(0, 2)"
        ".map((figure) => figure.getBoundingClientRect().top)"
    )
    assert columns[0] == columns[1], "two charts a row"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"], "nothing is wider than the screen"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", ground)[0])
    assert (red < 60) == dark


@pytest.mark.slow
def test_without_a_key_it_asks_for_one_and_shows_what_the_key_may_see(
    keyed: Site, new_page: NewPage
) -> None:
    mine, other = keyed.keys
    assert keyed.chat("Hi", key=mine).status_code == 200
    for _ in range(2):
        assert keyed.chat("Hi", key=other).status_code == 200
    page = new_page(f"{keyed.url}/dashboard", allows=("401",))
    assert page.locator("#board").is_hidden()
    expect(page.locator("#key")).to_be_focused()
    page.locator("#key").fill("or-wrong")
    page.locator("#key").press("Enter")
    expect(page.locator("#access [role=alert]")).to_contain_text("Unknown key")
    page.locator("#key").fill(mine)
    page.locator("#key").press("Enter")
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#scope")).to_be_visible()
    assert tile(page, "failed or refused") == "0 of 1"
    assert tile(page, "charged").startswith("$")
    assert page.locator("#queue, #experiments").count() == 0
    assert mine not in page.content()
    page.get_by_role("button", name="Forget").click()
    expect(page.locator("#access")).to_be_visible()
    assert page.locator("#board").is_hidden()
    page.locator("#key").fill(ADMIN_TOKEN)
    page.locator("#key").press("Enter")
    expect(page.locator("#queue")).to_be_visible()
    assert page.locator("#scope").is_hidden()
    assert tile(page, "failed or refused") == "0 of 3"


def test_it_says_when_the_gateway_is_away(site: Site, new_page: NewPage) -> None:
    page = new_page(f"{site.url}/dashboard", allows=("ERR_",))
    expect(page.locator("#state")).to_have_text("live")
    page.route("**/v1/dashboard", lambda route: route.abort())
    page.evaluate("look()")
    expect(page.locator("#state")).to_have_text("no connection")
    assert page.locator("#tiles div").count() > 0, "what was known stays"
    page.unroute("**/v1/dashboard")
    page.evaluate("look()")  # instead of waiting for the next time
    expect(page.locator("#state")).to_have_text("live")


@pytest.mark.slow
def test_the_page_is_small_and_loads_nothing_from_other_servers(site: Site) -> None:
    page = httpx.get(f"{site.url}/dashboard")
    assert len(page.content) < MAX_PAGE_BYTES
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text
