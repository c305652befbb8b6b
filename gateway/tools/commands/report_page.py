"""Reports as one HTML page without anything outside of it, dark where the reader's screen is."""

from importlib.resources import files
from string import Template


def filled_page(template: str, **parts: str) -> str:
    """Fill a page's template with its parts, which are HTML, and with the style of all reports.

    `template`: a file below `gateway/tools`, such as `measuring/bench/bench_report.html`.
    """
    tools = files("outrider.gateway.tools")
    style = tools.joinpath("commands/report.css").read_text(encoding="utf-8")
    page = tools.joinpath(template).read_text(encoding="utf-8")
    return Template(page).substitute(style=style.rstrip(), **parts)
