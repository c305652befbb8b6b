"""A source of guesses that one file forgets has no name in pages, charts and documents."""

from typing import Final

import pytest

from outrider.engine.trees.origins import ORIGINS
from outrider.verifier.params import SOURCES
from tests.docs.markdown import ROOT

FORMS: Final = {
    "gateway/http/server/static/charts.js": '"{}"',
    "gateway/http/server/static/words.js": "  {}: [",
    "gateway/http/server/static/shared.css": "--{}-line:",
    "docs/concepts.md": "| `{}` |",
    "docs/api.md": '`"{}"`',
}
"""The files that name each source, and how each writes it."""


@pytest.mark.parametrize("path", FORMS)
def test_each_source_has_its_name_there(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    missing = [source for source in SOURCES if FORMS[path].format(source) not in text]
    assert not missing, f"{path} lacks {missing}"


def test_each_source_has_a_rank_among_origins() -> None:
    assert {name for name, _ in ORIGINS} == {*SOURCES, "reused"}
