"""Write the generated pages of docs/: `make docs`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from docs.generate.cli_page import cli_page
from docs.generate.settings_page import settings_page

DOCS: Final = Path(__file__).parents[1]
PAGES: Final[Mapping[str, Callable[[], str]]] = {"settings.md": settings_page, "cli.md": cli_page}
"""File names under docs/, and the functions that return their text."""


def main() -> None:
    """Write all generated pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
