"""Markdown in Chromium: what is built of it, what is not, and that no character of it is lost."""

import random
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page

from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import running
from tests.gateway.http.edge.gateways import whole_gateway
from tests.gateway.scripted_client import Script, Step
from tests.pages.conftest import NewPage

TEXT = """# Title
Some **bold**, *slanted*, ~~gone~~ and `code` text.
2*3*4 = 24, snake_case_name, \\*literal\\*.

- one
- two with [a link](https://example.com/x)
  1. inner
> quoted *words*

| a | b |
|---|---|
| 1 | `2` |

```python
print("*not bold*")  # <b>
```
---
The end."""

_DRAW = """([source, pieces]) => {
  const target = document.createElement("div");
  const made = new Markdown(target, (from, to) => [made.source.slice(from, to)]);
  for (const length of pieces) made.update(source.slice(0, length));
  made.update(source);
  return [target.textContent, [...target.querySelectorAll("*")].map((node) => node.tagName)];
}"""


@pytest.fixture(scope="module")
def url(tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]) -> Iterator[str]:
    """A gateway whose models answer with Markdown."""
    whole = whole_gateway(tokenizer)
    steps = [Step(token_ids=(token,)) for token in encode(TEXT)]
    whole.engine.script = lambda _: Script(steps=steps)
    with running(whole.app) as url:
        yield url


def draw(page: Page, source: str, pieces: list[int]) -> tuple[str, list[str]]:
    """Draw a source that grows to these lengths; returns its text and tags."""
    text, tags = page.evaluate(_DRAW, [source, pieces])
    return text, tags


def test_an_answer_is_formatted_and_keeps_its_tokens(url: str, new_page: NewPage) -> None:
    page = new_page(url)
    page.locator("#state.ready").wait_for()
    page.fill("#prompt", "hi")
    page.press("#prompt", "Enter")
    page.locator("article:not(.running)").wait_for()
    text = page.locator(".text")
    assert text.evaluate("(node) => node.textContent") == TEXT
    for tag, words in {
        "h3": "Title",
        "strong": "bold",
        "em >> nth=0": "slanted",
        "s": "gone",
        "p code": "code",
        "ul li >> nth=1": "two with a link",
        "ol li": "inner",
        "blockquote": "quoted words",
        "td >> nth=0": "1",
        "pre": 'print("*not bold*")  # <b>',
    }.items():
        assert text.locator(tag).inner_text().strip() == words
    assert "2*3*4 = 24, snake_case_name, *literal*." in text.inner_text()
    link = text.locator("a")
    assert link.get_attribute("href") == "https://example.com/x"
    assert "noopener" in (link.get_attribute("rel") or "")
    assert page.evaluate(
        "[...document.querySelectorAll('.text .t')].every((token) => token.token !== undefined)"
    )
    text.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".t.at").count() >= 1


def test_no_markup_comes_from_a_text(url: str, new_page: NewPage) -> None:
    page = new_page(url)
    evil = (
        "<script>x</script> <img src=x onerror=y> [a](javascript:alert(1)) [b](data:text/html,x) "
        "![c](https://evil.invalid/x.png) [d](//evil.invalid) [e](JAVASCRIPT:1) "
        '[f](https://a/" onmouseover="x)\n```<b>\n</pre><i>\n'
    )
    text, tags = draw(page, evil, list(range(len(evil))))
    assert text == evil
    assert not {"SCRIPT", "IMG", "B", "I"} & set(tags)
    assert tags.count("A") == 1, "the picture is a link; no other address is one"


def test_every_text_keeps_its_characters_however_it_arrives(url: str, new_page: NewPage) -> None:
    """Random texts of Markdown's own signs lose nothing, whole or in pieces."""
    page = new_page(url)
    rng = random.Random(7)
    signs = ["*", "**", "_", "`", "```", "# ", "- ", "1. ", "> ", "|", "---", "|-|-|", "a", "word"]
    signs += ["[x](https://a.b)", "~~", "\\", "é", "😀", "~~~py"]
    signs += ["\n", "\n\n", " ", "  ", "\n- ", "\n> ", "\n|-|-|\n", "\n```\n"]
    for _ in range(60):
        source = "".join(rng.choices(signs, k=rng.randint(1, 60)))
        whole = draw(page, source, [])
        assert whole[0] == source
        pieces = sorted(rng.choices(range(len(source) + 1), k=8))
        assert draw(page, source, pieces) == whole, "arriving in pieces changes nothing"


@pytest.mark.slow
def test_a_text_made_to_be_slow_is_drawn_at_once(url: str, new_page: NewPage) -> None:
    page = new_page(url)
    for piece in ("*a ", "`" + "a", "[", "**_~~", "| ", "> ", "(", "\\"):
        source = piece * 5_000
        assert draw(page, source, [])[0] == source
