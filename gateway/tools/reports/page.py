"""The page of all reports: one HTML file without script, font or picture from outside of it.

It is dark where the reader's screen is, can be mailed, and opens anywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from outrider.gateway.tools.reports.charts import AnyChart
from outrider.gateway.tools.reports.svg import drawing

LATENCY_TERMS: Final[Mapping[str, str]] = {
    "Time to first token (TTFT)": "From when a request was due to the first event of its answer "
    "that had a token. In an open loop requests are due at times of their own, whatever the server "
    "does: when the sender is late or must hold one back, that wait counts (coordinated omission).",
    "ITL, TPOT": "ITL is one gap between two events of an answer. TPOT is the time from the first "
    "token to the last over the number of tokens behind the first: the mean of one answer.",
    "Attainment, goodput": "The share of all requests that met every objective, and how many of "
    "them a second. A failed request has missed.",
    "Intervals": "95 %. They say how far chance in this run goes; another day, another machine or "
    "other prompts are not in them. A bound that is missing had too few samples.",
}


class ReportError(OSError):
    """A report cannot be written; the message says why."""


def page(
    *, title: str, subtitle: str, lead: str, body: str, terms: Mapping[str, str] = LATENCY_TERMS
) -> str:
    """Return the page; all but the body is escaped here. `terms`: how to read what."""
    entries = (f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in terms.items())
    return Template(_own("report.html")).substitute(
        style=style(),
        title=escape(title),
        subtitle=escape(subtitle),
        lead=escape(lead),
        body=body,
        terms="\n".join(entries),
    )


def figure(chart: AnyChart, title: str, text: str) -> str:
    """Return a chart with its caption."""
    caption = f"<figcaption><b>{escape(title)}</b> {escape(text)}</figcaption>"
    return f"<figure>{drawing(chart)}{caption}</figure>"


def figures(drawn: Iterable[str]) -> str:
    """Return figures side by side."""
    return "\n".join(('<div class="plots">', *drawn, "</div>"))


def cards(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return the figures that matter most: a name, the figure, and what stands beside it."""
    items = (
        f"<li><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(beside)}</span></li>"
        for name, value, beside in entries
    )
    return f'<ul class="figures">{"".join(items)}</ul>'


def notes(texts: Sequence[str]) -> list[str]:
    """Return each note as a paragraph."""
    return [f'<p class="note">Note: {escape(text)}</p>' for text in texts]


def folded(title: str, html: str) -> str:
    """Return a part that is opened by a click."""
    return f"<details><summary>{escape(title)}</summary>\n{html}</details>"


def write_page(html: str, path: Path) -> None:
    """Write a page. Raises ReportError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error


def style() -> str:
    """Return the style sheet of pages and drawings."""
    return _own("report.css").rstrip()


def _own(name: str) -> str:
    return files("outrider.gateway.tools.reports").joinpath(name).read_text(encoding="utf-8")
