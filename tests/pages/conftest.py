"""Chromium for the tests of the pages, with an ear for what goes wrong on them.

Debian's package `chromium`, or what OUTRIDER_CHROMIUM names. Where there is none the tests are
skipped; with TEST_SERVICES=required they fail.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from tests.gateway.conftest import encode, tokenizer, tokenizer_folder  # noqa: F401 - fixtures

WIDE = {"width": 1180, "height": 820}
PHONE = {"width": 375, "height": 720}
_TIMEOUT_MS = 60_000
_NAMES = ("chromium", "chromium-browser", "google-chrome")

NewPage = Callable[..., Page]


# Of a module, not of the session: while playwright runs, its event loop is the thread's, and
# tests elsewhere want one of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    path = os.environ.get("OUTRIDER_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), "")
    if not path:
        message = "no chromium (Debian: apt-get install chromium)"
        if os.environ.get("TEST_SERVICES") == "required":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    """Opens a page: `new_page(url, dark=False, viewport=WIDE, allows=())`.

    Fails the test on an error in a page's console, or one that no script caught, unless its text
    holds one of `allows`: Chromium logs every answer with an error status as an error.
    """
    contexts: list[BrowserContext] = []
    troubles: list[str] = []

    def open_page(
        url: str,
        *,
        dark: bool = False,
        viewport: dict[str, int] = WIDE,
        allows: tuple[str, ...] = (),
        **options: Any,
    ) -> Page:
        def note(text: str) -> None:
            if not any(allowed in text for allowed in allows):
                troubles.append(text)

        def hear(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                note(message.text)

        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(_TIMEOUT_MS)
        page.on("console", hear)
        page.on("pageerror", lambda error: note(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
