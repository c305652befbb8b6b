"""The administrators' page in Chromium: what it does to keys holds for the API's clients."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.databases import with_tables
from tests.gateway.conftest import running
from tests.gateway.http.edge.gateways import whole_gateway
from tests.gateway.hybrid import World, hybrid
from tests.gateway.waiting import wait_for
from tests.pages.conftest import PHONE, NewPage

MAX_PAGE_BYTES = 80_000
TOKEN = "9f86d081884c7d659a2feaa0c55ad015"
BOSS = {"authorization": f"Bearer {TOKEN}"}
REFUSED = ("status of 4",)
"""Chromium logs answers with such a status as errors."""
SECTIONS = (
    *("keys", "teams", "spend", "experiments", "tiers", "replicas", "models"),
    *("adapters", "prompts"),
)
NOTHING = "\N{EN DASH}"
REPLICA = {
    "object": "replica",
    "name": "one",
    "group": "8c1f",
    "is_up": True,
    "is_draining": False,
    "num_in_flight": 2,
    "num_requests": 7,
    "reason": "",
}
MODEL = {
    "object": "model.on_demand",
    "name": "coder",
    "state": "loaded",
    "memory_bytes": 3 << 30,
    "num_in_flight": 0,
    "num_waiting": 0,
    "idle_s": 12.0,
    "keep_alive_s": 300.0,
    "load_s": 8.5,
    "num_loads": 4,
    "num_evictions": 3,
    "reason": "",
}
ADAPTER = {
    "object": "adapter",
    "name": "legal",
    "path": "/srv/legal",
    "tier": "large",
    "digest": None,
    "max_rank": 8,
    "num_modules": 4,
    "num_bytes": 2_500_000,
    "watched": False,
}
PROMPT = {
    "object": "prompt",
    "name": "rules",
    "tenant": "team-1",
    "tiers": [{"tier": "large", "tokens": 96, "engines": 1, "expires_in_s": 7200.0}],
}


@pytest.fixture(scope="module")
def world(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    """A gateway with prices, two upstream tiers and a ledger."""
    folder = tmp_path_factory.mktemp("admin")
    with hybrid(
        tokenizer,
        encode,
        tier={"price": {"prompt": 2.5, "completion": 10}},
        routing={"prices": {"small": {"prompt": 10, "completion": 40}}},
        charges={"cloud": {"prompt": 3, "completion": 12}},
        database_url=with_tables(folder / "outrider.db"),
        keys={"admin_token": TOKEN, "mode": "required"},
    ) as made:
        yield made


@pytest.fixture
def desk(world: World, new_page: NewPage) -> Page:
    return opened(world, new_page)


def opened(world: World, new_page: NewPage, **options: Any) -> Page:
    """The page, with the admin token entered."""
    page = new_page(f"{world.url}/admin", allows=REFUSED, **options)
    page.fill("#key", TOKEN)
    page.press("#key", "Enter")
    expect(page.locator("#keys-section h2")).to_be_visible()
    return page


def section(page: Page, name: str) -> Locator:
    page.locator(f"#sections a[href='#{name}']").click()
    return page.locator(f"#{name}-section")


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def control(page: Page, label: str) -> Locator:
    return page.locator("#panel").get_by_label(label, exact=True)


def found(page: Page, name: str) -> Locator:
    """The button of a key, of whatever page."""
    page.get_by_role("searchbox").fill(name)
    return button(page, name)


def confirm(page: Page, label: str) -> None:
    page.once("dialog", lambda dialog: dialog.accept())
    button(page, label).click()


def chat(world: World, key: str) -> httpx.Response:
    return world.chat(headers={"authorization": f"Bearer {key}"})


def made(world: World, kind: str = "keys", **fields: Any) -> dict[str, Any]:
    answer = world.http.post(f"/admin/{kind}", json=fields, headers=BOSS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.slow
def test_a_key_is_made_used_limited_refused_rotated_and_revoked(world: World, desk: Page) -> None:
    button(desk, "New key").click()
    control(desk, "name").fill("app")
    control(desk, "tiers").fill("small, cloud")
    control(desk, "USD a day").fill("5.5")
    button(desk, "Create key").click()
    secret = control(desk, "The key app")
    key = secret.input_value()
    assert key.startswith("or-")
    assert key not in desk.content()
    assert chat(world, key).status_code == 200
    button(desk, "Close").click()
    expect(desk.locator("#secret")).to_have_count(0)  # it is shown once

    row = desk.locator("#keys-section tr", has=button(desk, "app"))
    expect(row).to_contain_text("tiers cloud, small")
    expect(row).to_contain_text("$5.5 a day")
    button(desk, "app").click()
    expect(desk.locator(".facts")).to_contain_text("1 requests, $0.0")
    control(desk, "requests a minute").fill("1")
    button(desk, "Save limits").click()
    expect(desk.get_by_text("Saved.")).to_be_visible()
    assert chat(world, key).status_code == 200, "the window begins with the limit"
    assert chat(world, key).status_code == 429
    control(desk, "requests a minute").fill("")
    button(desk, "Save limits").click()
    expect(row).not_to_contain_text("requests a minute")
    assert chat(world, key).status_code == 200

    button(desk, "New secret").click()
    new = secret.input_value()
    assert new != key
    assert (chat(world, key).status_code, chat(world, new).status_code) == (401, 200)
    button(desk, "Close").click()
    button(desk, "app").click()
    confirm(desk, "Revoke app")
    expect(desk.locator(".facts")).to_contain_text("revoked")
    assert chat(world, new).status_code == 401
    expect(row).to_contain_text("revoked")


def test_limits_of_one_tier_and_scopes_are_changed_and_taken_back(world: World, desk: Page) -> None:
    one = made(world, name="scoped", limits={"tokens_per_day": 900})

    def now() -> dict[str, Any]:
        return dict(world.http.get(f"/admin/keys/{one['id']}", headers=BOSS).json())

    found(desk, "scoped").click()
    control(desk, "limits of").select_option("cloud")
    expect(control(desk, "tokens a day")).to_have_value("")
    control(desk, "USD a month").fill("12")
    button(desk, "Save limits").click()
    expect(desk.get_by_text("Saved.")).to_be_visible()
    assert now()["limits"] == {"tokens_per_day": 900, "models": {"cloud": {"usd_per_month": 12}}}
    control(desk, "limits of").select_option("each end user")
    control(desk, "USD in 7 days").fill("3")
    button(desk, "Save limits").click()
    expect(desk.get_by_text("Saved.")).to_be_visible()
    wait_for(lambda: now()["limits"].get("end_user") == {"usd_per_7_days": 3})
    control(desk, "models").fill("auto, cloud")
    control(desk, "may administrate").check()
    control(desk, "answers reveal").select_option("nothing")
    control(desk, "expires").fill("2099-05-06T07:08")
    button(desk, "Save").click()
    expect(desk.get_by_text("Saved.").first).to_be_visible()
    wait_for(lambda: now()["admin"])
    scoped = now()
    assert (scoped["models"], scoped["admin"]) == (["auto", "cloud"], True)
    assert (scoped["reveals"], scoped["name"]) == ("nothing", "scoped")
    assert scoped["expires_at"] > 4_000_000_000
    control(desk, "models").fill("")
    control(desk, "expires").fill("")
    button(desk, "Save").click()
    wait_for(lambda: (now()["models"], now()["expires_at"]) == (None, None))
    expect(desk.locator("#keys-section")).to_contain_text("admin; reveals nothing")


def test_an_error_stands_at_the_field_that_it_names(world: World, desk: Page) -> None:
    button(desk, "New key").click()
    button(desk, "Create key").click()
    name = control(desk, "name")
    expect(name).to_be_focused()
    assert name.get_attribute("aria-invalid") == "true"
    told = (name.get_attribute("aria-describedby") or "").split()[0]
    expect(desk.locator(f"#{told}")).to_have_text("name: this field is required.")
    name.fill("typo")
    control(desk, "team").fill("nobody")
    button(desk, "Create key").click()
    expect(control(desk, "team")).to_be_focused()
    assert name.get_attribute("aria-invalid") is None
    control(desk, "team").fill("")
    control(desk, "tokens a minute").fill("1.5")
    button(desk, "Create key").click()
    expect(control(desk, "tokens a minute")).to_be_focused()
    button(desk, "Close").click()
    listed = world.http.get("/admin/keys?name=typo", headers=BOSS).json()["data"]
    assert listed == []


def test_a_team_is_made_and_its_name_stays_its_own(world: World, desk: Page) -> None:
    made(world, "teams", name="taken")
    teams = section(desk, "teams")
    button(desk, "New team").click()
    control(desk, "name").fill("taken")
    button(desk, "Create team").click()
    expect(desk.get_by_text("Another team has the name 'taken'.")).to_be_visible()
    control(desk, "name").fill("search")
    control(desk, "requests at once").fill("4")
    button(desk, "Create team").click()
    row = teams.locator("tr", has=button(desk, "search"))
    expect(row).to_contain_text("4 requests at once")
    button(desk, "search").click()
    control(desk, "weight").fill("2.5")
    button(desk, "Save").click()
    expect(row).to_contain_text("2.50")


def test_many_keys_come_in_pages_and_are_found(world: World, desk: Page) -> None:
    store = world.context.tenancy.keys.store
    assert store is not None
    for number in range(60):
        store.create(KeyOrder(name=f"many-{number}", scopes=Scopes()))
    rows = desk.locator("#keys-section tbody tr")
    button(desk, "Refresh").first.click()
    expect(rows).to_have_count(50)
    opener = rows.first.get_by_role("button")
    first = opener.inner_text()
    button(desk, "Next").click()
    expect(opener).not_to_have_text(first)
    expect(button(desk, "Next")).to_be_disabled()
    button(desk, "Previous").click()
    expect(opener).to_have_text(first)
    desk.get_by_role("searchbox").fill("MANY-3")
    expect(rows).to_have_count(11)
    desk.get_by_role("searchbox").fill("nothing like it")
    expect(desk.locator("#keys-section .list")).to_have_text("No key is found.")


def test_spend_is_summed_by_key_team_tier_and_day(world: World, desk: Page) -> None:
    made(world, "teams", name="payers")
    key = made(world, name="payer", team="payers")["key"]
    assert chat(world, key).status_code == 200
    told = world.http.get("/v1/usage?by=key", headers=BOSS).json()
    spend = section(desk, "spend")
    by = desk.get_by_label("Sum by")
    row = spend.locator("tr", has_text="payer (")
    expect(row.locator("td").first).to_have_text("1")
    total = float(told["totals"]["charge_usd"])
    shown = spend.locator("tbody tr").last.locator("[data-head=charged]").inner_text()
    assert float(shown.removeprefix("$")) == pytest.approx(total, rel=0.05, abs=0.005)
    by.select_option("team")
    expect(spend.locator("tr", has_text="payers (")).to_be_visible()
    by.select_option("tier")
    expect(spend.locator("th", has_text="small")).to_be_visible()
    days = json.loads(json.dumps(told | {"by": "day"}))
    days["data"] = [
        {**told["data"][0], "group": f"2026-11-{at:02}", "charge_usd": at} for at in range(1, 29)
    ]
    desk.route("**/v1/usage?by=day*", fulfilling(days))
    by.select_option("day")
    chart = spend.locator("#days svg")
    chart.focus()
    chart.press("ArrowLeft")
    expect(spend.locator(".readout")).to_have_text("day 11-28: charged $28.00")


def test_tiers_are_shown_with_health_and_prices(world: World, desk: Page) -> None:
    tiers = section(desk, "tiers")
    cloud = tiers.locator("tr", has_text="cloud")
    expect(cloud).to_contain_text("available")
    expect(cloud.locator("[data-head=prompt]")).to_have_text("$3 (costs $2.5)")
    expect(cloud.locator("[data-head=answer]")).to_have_text("$12 (costs $10)")
    assert "in use" in cloud.inner_text()
    expect(tiers.locator("tr", has_text="large").locator("[data-head=prompt]")).to_have_text(
        NOTHING
    )


def test_an_experiment_is_started_stopped_and_reported(world: World, desk: Page) -> None:
    arms = {"control": {}, "deep": {"set": {"max_draft_nodes": 32}}}
    made(world, "experiments", name="drafts", arms=arms)
    row = section(desk, "experiments").locator("tr", has_text="control 50 %, deep 50 %")
    expect(row).to_contain_text("draft")
    confirm(desk, "Start drafts")
    expect(row).to_contain_text("running")
    button(desk, "drafts").click()
    expect(desk.locator("#panel")).to_contain_text("drafts, version 1, running")
    desk.keyboard.press("Escape")
    expect(button(desk, "drafts")).to_be_focused()
    desk.once("dialog", lambda dialog: dialog.dismiss())
    button(desk, "Stop drafts").click()
    expect(row).to_contain_text("running")
    confirm(desk, "Stop drafts")
    expect(row).to_contain_text("stopped")


def fulfilling(document: object) -> Callable[[Route], None]:
    body = json.dumps(document)
    return lambda route: route.fulfill(body=body, content_type="application/json")


def test_groups_drain_models_and_adapters_unload_and_prompts_are_deleted(desk: Page) -> None:
    asked: list[tuple[str, str, object]] = []
    lists = {"replicas": REPLICA, "models": MODEL, "adapters": ADAPTER, "prompts": PROMPT}
    for name, one in lists.items():
        desk.route(f"**/admin/{name}", fulfilling({"object": "list", "data": [one]}))

    def note(route: Route) -> None:
        request = route.request
        path = request.url.partition("/admin/")[2]
        asked.append((request.method, path, request.post_data_json))
        route.fulfill(body='{"object": "list", "data": []}', content_type="application/json")

    for pattern in ("replicas/drain", "models/coder/unload", "adapters/legal", "prompts/rules*"):
        desk.route(f"**/admin/{pattern}", note)
    engines = section(desk, "replicas")
    expect(engines).to_contain_text("8c1f")
    confirm(desk, "Drain the group 8c1f")
    expect(section(desk, "models")).to_contain_text("3 GiB")
    confirm(desk, "Unload coder")
    expect(section(desk, "adapters")).to_contain_text("2.50 MB")
    confirm(desk, "Unload legal")
    expect(section(desk, "prompts")).to_contain_text("large: 96 tokens")
    confirm(desk, "Delete rules")
    assert asked == [
        ("POST", "replicas/drain", {"group": "8c1f"}),
        ("POST", "models/coder/unload", None),
        ("DELETE", "adapters/legal", None),
        ("DELETE", "prompts/rules?tenant=team-1", None),
    ]


def test_what_the_gateway_refuses_or_lacks_is_said(desk: Page) -> None:
    expect(section(desk, "replicas")).to_contain_text("one engine, and no replicas")
    section(desk, "adapters")
    button(desk, "Load one").click()
    control(desk, "name").fill("no such")
    control(desk, "path").fill("/nowhere")
    button(desk, "Load").click()
    expect(control(desk, "name")).to_be_focused()
    button(desk, "Close").click()
    desk.route("**/admin/tiers", lambda route: route.fulfill(status=400, body="not JSON"))
    expect(section(desk, "tiers").get_by_role("alert")).to_contain_text("status 400")


@pytest.mark.slow
def test_it_asks_for_an_administrators_key_and_forgets_it(world: World, new_page: NewPage) -> None:
    plain = made(world, name="no-admin")["key"]
    programs = world.http.get("/admin")
    assert (programs.status_code, programs.json()["error"]["code"]) == (401, "missing_api_key")
    page = new_page(f"{world.url}/admin", allows=REFUSED)
    assert page.locator("#desk").is_hidden()
    trouble = page.locator("#access [role=alert]")
    for wrong, told in (("or-wrong", "Unknown key"), (plain, "admin scope")):
        page.locator("#key").fill(wrong)
        page.locator("#key").press("Enter")
        expect(trouble).to_contain_text(told)
    page.get_by_label("remember").check()
    page.locator("#key").fill(TOKEN)
    page.locator("#key").press("Enter")
    expect(found(page, "no-admin")).to_be_visible()
    page.reload()
    found(page, "no-admin").click()
    expect(page.locator("#panel")).to_be_visible()
    page.keyboard.press("Escape")
    button(page, "Forget").click()
    expect(page.locator("#access")).to_be_visible()
    assert "no-admin" not in page.content()
    assert TOKEN not in page.evaluate("JSON.stringify(sessionStorage) + document.body.innerHTML")


def test_an_open_gateway_asks_for_a_key_too(tokenizer: ChatTokenizer, new_page: NewPage) -> None:
    with running(whole_gateway(tokenizer).app) as url:
        page = new_page(f"{url}/admin", allows=REFUSED)
        expect(page.locator("#access-why")).to_have_text("Enter an administrator's key.")
        assert page.locator("#desk").is_hidden()


@pytest.mark.slow
def test_the_page_is_small_and_loads_nothing_from_other_servers(world: World) -> None:
    page = world.http.get("/admin", headers=BOSS)
    assert page.status_code == 200
    assert len(page.content) < MAX_PAGE_BYTES
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = page.text.replace("http://www.w3.org", "")
    assert "http://" not in text
    assert "https://" not in text


def test_all_of_it_is_reached_with_the_keyboard(world: World, desk: Page) -> None:
    made(world, name="by-keyboard")
    desk.locator("#sections a").first.focus()
    desk.keyboard.press("Tab")
    desk.keyboard.press("Enter")
    expect(desk.locator("#teams-section")).to_be_visible()
    desk.keyboard.press("Shift+Tab")
    desk.keyboard.press("Enter")
    found(desk, "by-keyboard").focus()
    desk.keyboard.press("Enter")
    expect(control(desk, "name")).to_be_focused()
    desk.keyboard.press("End")
    desk.keyboard.type("s")
    desk.keyboard.press("Enter")
    expect(desk.get_by_text("Saved.")).to_be_visible()
    expect(button(desk, "by-keyboards")).to_be_attached()
    desk.keyboard.press("Escape")
    expect(button(desk, "by-keyboards")).to_be_focused()


@pytest.mark.slow_cases
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_both_schemes(world: World, new_page: NewPage, dark: bool) -> None:
    made(world, name="a-name-that-has-no-place-to-break-" * 3, labels={"owner": "x" * 90})
    page = opened(world, new_page, dark=dark, viewport=PHONE)
    for name in SECTIONS:
        section(page, name).locator(".list > *").first.wait_for()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{name} is wider than the screen"
    section(page, "keys")
    page.get_by_role("searchbox").fill("no-place")
    page.get_by_role("button", name=re.compile("no-place")).first.click()
    inner, outer = page.evaluate(
        "(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])"
        "(document.querySelector('#panel'))"
    )
    assert inner <= outer
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 60) == dark
