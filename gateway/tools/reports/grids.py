"""A table for a terminal and for a page, written once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Texts in rows below a head; the first column's are words. Nothing in them is markup."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kinds: Sequence[str] = ()  # a class of each row on a page
    name: str = ""  # a class of the table on a page

    def html(self) -> str:
        """Return the table as HTML, its texts escaped."""
        cells = "".join(f'<th scope="col">{escape(one)}</th>' for one in self.head)
        rows = zip(self.rows, self._kinds, strict=True)
        body = "\n".join(_row(row, kind) for row, kind in rows)
        kind = f" {self.name}" if self.name else ""
        return (
            f'<div class="table{kind}"><table><thead><tr>{cells}</tr></thead>\n'
            f"<tbody>{body}</tbody></table></div>"
        )

    @property
    def _kinds(self) -> Sequence[str]:
        return self.kinds or [""] * len(self.rows)

    def terminal(self, title: str = "", without: Collection[str] = ()) -> Table:
        """Return the table for a terminal, where there may be no room for all columns."""
        is_open = not self.name
        table = Table(
            title=Text(title) if title else None,
            title_justify="left",
            box=None if is_open else SIMPLE_HEAD,
            header_style="dim" if is_open else "table.header",
            pad_edge=not is_open,
        )
        are_words = self.name == "conditions"
        shown = [place for place, name in enumerate(self.head) if name not in without]
        for place in shown:
            table.add_column(
                Text(self.head[place]),
                justify="left" if place == 0 or are_words else "right",
                overflow="fold" if are_words else "ellipsis",
            )
        for row, kind in zip(self.rows, self._kinds, strict=True):
            style = "bold green" if kind == "chosen" else None
            table.add_row(*(Text(row[place]) for place in shown), style=style)
        return table


def _row(cells: Sequence[str], kind: str) -> str:
    start = f'<tr class="{kind}">' if kind else "<tr>"
    return start + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
