"""The playground as a chat: stop, retry, edit, a system prompt, and the request as code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.tools.demo.process import GatewayProcess
from tests.gateway.conftest import running
from tests.gateway.http.edge.gateways import Whole, keyed_gateway, whole_gateway
from tests.gateway.scripted_client import Script, Step
from tests.pages.conftest import PHONE, NewPage

CLIPBOARD = ["clipboard-read", "clipboard-write"]
EXAMPLES = Path(__file__).parents[2] / "examples" / "chat"


@pytest.fixture(scope="module")
def gateway(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[tuple[str, Whole]]:
    """A gateway whose answers to long questions never end."""
    whole = whole_gateway(tokenizer)
    steps = [Step(token_ids=(token,)) for token in encode("The quick brown fox")]

    def script(request: EngineRequest) -> Script:
        return Script(steps=steps, hangs="forever" in request_text(tokenizer, request))

    whole.engine.script = script
    with running(whole.app) as url:
        yield url, whole


def request_text(tokenizer: ChatTokenizer, request: EngineRequest) -> str:
    return tokenizer.decode(request.prompt_token_ids)


def send(page: Page, text: str) -> None:
    page.locator("#state.ready").wait_for()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def prompts(page: Page) -> list[str]:
    return page.locator(".prompt").all_inner_texts()


def test_stop_retry_and_edit(gateway: tuple[str, Whole], new_page: NewPage) -> None:
    url, whole = gateway
    page = new_page(url)
    send(page, "hi")
    page.locator("article:not(.running)").wait_for()
    send(page, "write forever")
    page.locator("article.running .text .t").first.wait_for()
    page.click("#send")
    expect(page.locator("article .error").last).to_have_text("Stopped.")
    expect(page.locator("#send")).to_have_text("Send")
    num_before = len(whole.engine.submitted)
    page.locator(".retry").last.click()
    page.locator("article.running .text .t").first.wait_for()
    page.click("#send")
    assert len(whole.engine.submitted) == num_before + 1
    assert prompts(page) == ["hi", "write forever"]
    expect(page.locator("article.running")).to_have_count(0)
    page.locator(".edit").first.click()
    expect(page.locator("#editing")).to_be_visible()
    assert page.input_value("#prompt") == "hi"
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).to_be_hidden()
    assert prompts(page) == ["hi", "write forever"], "nothing is lost until it is sent"
    page.locator(".edit").first.click()
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    page.locator("article:not(.running)").wait_for()
    assert prompts(page) == ["hello"]
    assert page.locator("article").count() == 1


@pytest.mark.slow
def test_a_system_prompt_is_sent_and_the_request_is_copied(
    gateway: tuple[str, Whole], new_page: NewPage, tokenizer: ChatTokenizer
) -> None:
    url, whole = gateway
    page = new_page(url, permissions=CLIPBOARD)
    page.locator("#options summary").click()
    page.fill("#system", 'Answer like a fox\'s "friend".')
    send(page, "it's $HOME `id` \\ \n?")
    page.locator("article:not(.running)").wait_for()
    sent = request_text(tokenizer, whole.engine.submitted[-1])
    assert "friend" in sent
    page.click("[data-copy=curl]")
    expect(page.locator("[data-copy=curl]")).to_have_text("Copied")
    command = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
    answer = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert answer == page.locator(".text").evaluate("(node) => node.textContent")
    assert request_text(tokenizer, whole.engine.submitted[-1]) == sent, "the very same request"
    page.click("[data-copy=python]")
    expect(page.locator("[data-copy=python]")).to_have_text("Copied")
    program = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode().removesuffix("\n") == answer
    assert request_text(tokenizer, whole.engine.submitted[-1]) == sent


def test_a_copied_request_holds_no_key(
    tokenizer: ChatTokenizer, tmp_path: Path, new_page: NewPage
) -> None:
    with ExitStack() as stack:
        whole = stack.enter_context(keyed_gateway(tokenizer, tmp_path))
        key = whole.new_key("reader")
        url = stack.enter_context(running(whole.app))
        page = new_page(url, allows=("401",), permissions=CLIPBOARD)
        page.fill("#key", key)
        page.click("#enter")
        send(page, "hi")
        page.locator("article:not(.running)").wait_for()
        for language in ("curl", "python"):
            page.click(f"[data-copy={language}]")
            expect(page.locator(f"[data-copy={language}]")).to_have_text("Copied")
            copied = page.evaluate("navigator.clipboard.readText()")
            assert key not in copied
            assert "OUTRIDER_KEY" in copied
        page.goto("about:blank")


@pytest.mark.parametrize("is_wide", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_tree_never_covers_the_token(
    gateway: tuple[str, Whole], new_page: NewPage, is_wide: bool
) -> None:
    url, _ = gateway
    page = new_page(url, viewport={"width": 1400, "height": 800} if is_wide else PHONE)
    for number in range(3):
        send(page, f"hi {number}")
        page.locator(f"article:not(.running) >> nth={number}").wait_for()
    token = page.locator(".text .t").last
    token.hover()
    page.locator("#tree").wait_for()
    covered = """() => {
      const at = [...document.querySelectorAll('.text .t')].at(-1).getBoundingClientRect();
      const tree = document.getElementById('tree').getBoundingClientRect();
      return at.right > tree.left && at.left < tree.right
        && at.bottom > tree.top && at.top < tree.bottom;
    }"""
    assert not page.evaluate(covered)


@pytest.mark.slow
def test_the_example_of_a_chat_front_end_runs() -> None:
    """Aliases, a tool call in a stream, stop and retry, and the page, with the bundled pair."""
    arguments = ["--config", str(EXAMPLES / "gateway.toml"), "--log-level", "ERROR"]
    arguments += ["--set", "speculation.adaptive=false"]  # else passes are timed for many seconds
    with GatewayProcess(arguments) as gateway:
        environment = {**os.environ, "OUTRIDER_URL": gateway.start()}
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "front_end.py")],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert said["after the tool"].strip() == "It is 8:15 in Vienna."
    assert "85" in done.stdout
    assert said["done"] == ""
