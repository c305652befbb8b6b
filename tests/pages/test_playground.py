"""The playground in Chromium: a chat streams, its colours are the API's, two are compared."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page

from outrider.engine.trace import StepTrace, TraceNode
from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import running
from tests.gateway.http.edge.gateways import Whole, keyed_gateway, whole_gateway
from tests.gateway.scripted_client import Script, Step
from tests.pages.conftest import PHONE, NewPage

ORIGINS = ("target", "model", "suffix", "prediction", "grammar", "reused", "small")


@dataclass(frozen=True)
class Running:
    url: str
    whole: Whole


@pytest.fixture(scope="module")
def gateway(tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]) -> Iterator[Running]:
    whole = whole_gateway(tokenizer)
    ids = tuple(encode("The quick brown fox"))
    nodes = (
        TraceNode(token_id=ids[0], parent=-1, is_accepted=True),
        TraceNode(token_id=ids[1], parent=0, sources=("model",), is_accepted=True),
        TraceNode(token_id=ids[2], parent=0, sources=("suffix", "model")),
    )
    steps = [
        Step(token_ids=(ids[place % len(ids)],), trace=StepTrace(origins=(origin,)))
        for place, origin in enumerate(ORIGINS)
    ]
    guessed = Step(
        token_ids=ids[1:3],
        num_drafted=2,
        num_accepted=1,
        trace=StepTrace(origins=("model", "target"), nodes=nodes),
    )
    whole.engine.script = lambda _: Script(steps=[*steps, guessed])
    with running(whole.app) as url:
        yield Running(url, whole)


def ask(page: Page, text: str, *, count: int = 1) -> None:
    page.locator("#state.ready").wait_for()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator(f"article:not(.running) >> nth={count - 1}").wait_for()


def coloured(page: Page) -> list[list[str]]:
    """The last answer's tokens and the classes that colour them."""
    pairs: list[list[str]] = page.evaluate(
        "[...[...document.querySelectorAll('.text')].at(-1).querySelectorAll('.t')]"
        ".map((token) => [token.textContent, token.className.split(' ')[1]])"
    )
    return pairs


def traced(url: str, text: str) -> list[dict[str, Any]]:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], "stream": True}
    headers = {"x-outrider-trace": "1"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20)
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    chunks = [json.loads(line).get("outrider", {}) for line in lines]
    return [chunk for chunk in chunks if "tokens" in chunk]


@pytest.mark.slow_cases
@pytest.mark.parametrize("dark", [False, True])
def test_colours_are_those_of_the_api(gateway: Running, new_page: NewPage, dark: bool) -> None:
    page = new_page(f"{gateway.url}/playground", dark=dark)
    ask(page, "hi")
    expected = [
        [text, origin]
        for chunk in traced(gateway.url, "hi")
        for (text, _), origin in zip(chunk["tokens"], chunk["origins"], strict=True)
    ]
    assert {origin for _, origin in expected} == set(ORIGINS)
    assert coloured(page) == expected
    paints = page.evaluate(
        "[...document.querySelectorAll('.text .t')].map((t) => [t.className.split(' ')[1],"
        " getComputedStyle(t).backgroundColor])"
    )
    by_origin = dict(map(tuple, paints))
    assert len(set(by_origin.values())) == len(ORIGINS), "every origin has a colour of its own"


def test_the_tree_of_a_step_is_shown_to_mouse_and_keys(gateway: Running, new_page: NewPage) -> None:
    page = new_page(gateway.url)
    ask(page, "hi")
    page.locator(".text .t").last.hover()
    page.locator("#tree g").first.wait_for()
    assert page.locator("#tree g").count() == 4, "the root, two guesses, the target's own"
    assert page.locator("#tree g.wrong").count() == 1
    assert "2 tokens were drafted, 1 accepted" in page.inner_text("#tree-said")
    page.keyboard.press("Escape")
    assert page.locator("#tree").is_hidden()
    page.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    assert "no token was drafted" in page.inner_text("#tree-said")


def test_a_chat_has_several_turns(gateway: Running, new_page: NewPage) -> None:
    page = new_page(gateway.url)
    ask(page, "hi")
    ask(page, "and now?", count=2)
    (before, now) = gateway.whole.engine.submitted[-2:]
    assert len(now.prompt_token_ids) > 2 * len(before.prompt_token_ids)
    assert page.locator("#setup").get_attribute("open") is None, "folded after the first message"
    assert page.inner_text("#setup-said") == "auto, speculation on"
    page.click("#new")
    assert page.locator("article").count() == 0
    assert page.locator("#setup").get_attribute("open") is not None


def test_two_answers_side_by_side(gateway: Running, new_page: NewPage) -> None:
    page = new_page(gateway.url)
    page.locator("#state.ready").wait_for()
    page.locator(".side >> nth=0").locator("[data-needs=drafts]").wait_for()
    page.click("#two")
    ask(page, "compare", count=2)
    page.locator(".verdict").wait_for()
    said = page.inner_text(".verdict")
    assert "Both gave the same answer." in said
    assert "times as fast" not in said, "one run is no measurement"
    drafting = [request.speculation.enabled for request in gateway.whole.engine.submitted[-2:]]
    assert drafting == [True, False]
    assert page.locator("[data-live=ttft]").all_inner_texts()[1].endswith("ms")


@pytest.mark.slow
def test_speeds_are_compared_over_several_new_questions(
    gateway: Running, new_page: NewPage
) -> None:
    page = new_page(gateway.url)
    page.locator("#state.ready").wait_for()
    page.click("#two")
    ask(page, "compare", count=2)
    page.click(".verdict button")
    page.locator(".verdict").nth(4).wait_for()
    prompts = page.locator(".prompt").all_inner_texts()
    assert len(set(prompts)) == len(prompts) == 5
    # The scripted engine writes at once: there is no speed to compare, so none is claimed.
    told = page.locator(".verdict").last.inner_text()
    assert re.search(r"to say: machines are noisy|times as fast", told)


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_formatted", [True, False])
def test_a_long_answer_is_laid_out_in_parts(
    gateway: Running, new_page: NewPage, encode: Callable[[str], list[int]], is_formatted: bool
) -> None:
    """The split does not show: the text is the same, also when it is copied."""
    lines = [f"line {number} of the fox\n" for number in range(40)]
    steps = [Step(token_ids=(token,)) for line in lines for token in encode(line)]
    before = gateway.whole.engine.script
    gateway.whole.engine.script = lambda _: Script(steps=steps)
    page = new_page(gateway.url, permissions=["clipboard-read", "clipboard-write"])
    page.locator("#options summary").click()
    page.set_checked("#markdown", is_formatted)
    ask(page, "long")
    gateway.whole.engine.script = before
    assert page.locator(".text .part").count() > 2
    assert page.locator(".text .t").count() == len(steps)
    assert page.evaluate("document.querySelector('.text').textContent") == "".join(lines)
    heights = page.evaluate(
        "[document.querySelector('.text').getBoundingClientRect().height,"
        " parseFloat(getComputedStyle(document.querySelector('.text')).lineHeight)]"
    )
    assert round(heights[0] / heights[1]) == len(lines), "no line is lost or added"
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.text'))")
    page.keyboard.press("Control+c")
    assert page.evaluate("navigator.clipboard.readText()") == "".join(lines)


def test_the_column_is_in_the_middle_and_the_legend_names_what_occurred(
    gateway: Running, new_page: NewPage
) -> None:
    page = new_page(gateway.url, viewport={"width": 1280, "height": 900})
    legend = page.locator("#legend li:visible")
    assert legend.count() == 0
    ask(page, "legend")
    drawn = page.evaluate(
        "[...new Set([...document.querySelectorAll('.text .t')].map((t) => t.classList[1]))]"
    )
    assert sorted(
        legend.locator("span").evaluate_all("(all) => all.map((one) => one.className)")
    ) == sorted(drawn)
    box = page.locator("main").bounding_box()
    assert box is not None
    assert abs(2 * box["x"] + box["width"] - 1280) <= 1
    page.click("#new")
    assert legend.count() == 0


def test_a_phone_needs_no_sideways_scrolling(gateway: Running, new_page: NewPage) -> None:
    page = new_page(gateway.url, viewport=PHONE)
    page.click("#two")
    ask(page, "narrow", count=2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_key_is_asked_for(tokenizer: ChatTokenizer, tmp_path: Path, new_page: NewPage) -> None:
    with ExitStack() as stack:
        whole = stack.enter_context(keyed_gateway(tokenizer, tmp_path))
        key = whole.new_key("reader")
        url = stack.enter_context(running(whole.app))
        page = new_page(url, allows=("401",))
        page.fill("#key", "or-wrong")
        page.click("#enter")
        page.locator("#access .error").wait_for()
        page.fill("#key", key)
        page.click("#enter")
        page.locator("#composer").wait_for()
        ask(page, "hello")
        assert page.locator(".text .t").count() > 0
        page.goto("about:blank")


@pytest.mark.slow
def test_it_is_small() -> None:
    page = Path(__file__).parents[2] / "gateway" / "http" / "server" / "static" / "index.html"
    assert page.stat().st_size < 150_000
