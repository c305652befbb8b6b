"""Reads a report's page as a browser would: what it holds, and that it is whole."""

from html.parser import HTMLParser
from typing import Final

_VOID: Final = {"meta", "link", "br", "img", "hr", "input"}
_LINKS: Final = {"src", "href", "xlink:href", "srcset"}


class ReadPage(HTMLParser):
    """Notes tags, texts and attributes, and checks that elements are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    @property
    def text(self) -> str:
        """All of its words."""
        return " ".join("".join(self.texts).split())

    def assert_alone(self) -> None:
        """It runs nothing and loads nothing."""
        assert not {"script", "img", "iframe", "link"} & set(self.tags)
        names = {name for name, _ in self.attributes}
        assert not names & _LINKS
        assert not {name for name in names if name.startswith("on")}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
