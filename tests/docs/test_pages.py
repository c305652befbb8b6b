"""Links lead somewhere, generated pages are current, commands exist, README fits on a page."""

import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from benchmarks.count_tree import PRODUCT
from docs.generate.cli_page import commands
from docs.generate.pages import DOCS
from docs.generate.pages import PAGES as GENERATED
from tests.docs.markdown import PAGES, ROOT, anchors, code_lines, links, name_of, quoted

README: Final = ROOT / "README.md"
MAX_WORDS: Final = 750
COMMANDS: Final = commands()
PYTHON_FILE: Final = re.compile(r"[\w./-]*\w\.py")
FOLDERS: Final = (*PRODUCT, "benchmarks", "docs", "examples", "tests", ".ci")
PYTHON_FILES: Final = [f"/{file.name}" for file in ROOT.glob("*.py")] + [
    f"/{file.relative_to(ROOT).as_posix()}"
    for folder in FOLDERS
    for file in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_files_in_backticks_exist(page: Path) -> None:
    """A path may leave out the folders that its text has named; a file's own name must exist.

    Commands are not checked: they may be about the reader's files.
    """
    paths = [text for text in quoted(page) if PYTHON_FILE.fullmatch(text)]
    missing = [
        path for path in paths if not any(known.endswith(f"/{path}") for known in PYTHON_FILES)
    ]
    assert not missing


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == GENERATED[name](), f"docs/{name} is out of date: run make docs"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_flags_exist(page: Path) -> None:
    for line in code_lines(page):
        if line.strip().removeprefix("$ ").startswith("outrider "):
            _check(line.strip().removeprefix("$ "))


def test_readme_is_at_most_a_page() -> None:
    """Counts words of text, tables and code; addresses, tags and punctuation alone are none."""
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"\]\([^)]*\)|<[^>]+>|https?://\S+", " ", text)
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert {page.resolve() for page in DOCS.glob("*.md")} - {index} <= listed


def _check(line: str) -> None:
    """Fail for a command or a flag that does not exist."""
    words = shlex.split(line, comments=True)[1:]
    for separator in ("&&", "|", ">"):
        words = words[: words.index(separator)] if separator in words else words
    path = next((path for path in COMMANDS if tuple(words[: len(path)]) == path), None)
    assert path is not None, f"no such command: {line}"
    params = COMMANDS[path].params
    flags = {flag for one in params for flag in (*one.opts, *one.secondary_opts)}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= flags | {"--help"}, f"no such flag: {used - flags} in {line}"
