"""Read the repository's Markdown: files, headings, links, code."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = tuple(
    sorted(
        path
        for pattern in (
            "*.md",
            "docs/**/*.md",
            "examples/**/*.md",
            "benchmarks/*.md",
            "draft/**/*.md",
        )
        for path in ROOT.glob(pattern)
    )
)
_FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    """Return the page's path inside the repository."""
    return page.relative_to(ROOT).as_posix()


@cache
def prose(page: Path) -> str:
    """Return the page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[str]:
    """Give the targets of links and pictures that are files or headings of this repository."""
    text = re.sub(r"`[^`\n]+`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r'(?:src|href)="([^"]+)"', text
    ):
        if not re.match(r"[a-z]+:", target):
            yield target


def quoted(page: Path) -> list[str]:
    """Return what stands in backticks on one line of the page's prose."""
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the names of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in plain)


def code_lines(page: Path) -> Iterator[str]:
    """Give the lines in blocks of code; a line that ends in a backslash has the next one in it."""
    for block in _FENCE.findall(page.read_text(encoding="utf-8")):
        yield from block.replace("\\\n", " ").splitlines()[1:-1]
