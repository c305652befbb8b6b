"""CSV that spreadsheets open (RFC 4180), and in which no cell is a formula."""

import csv
import io
from collections.abc import Iterable
from typing import Final

BYTE_ORDER_MARK: Final = "\ufeff"
"""Stands at the beginning, so that spreadsheets read UTF-8."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What a cell begins with that spreadsheets run; the last are the wide forms of the first."""


def csv_line(cells: Iterable[object]) -> str:
    """Return a line with its end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(map(tame, cells))
    return text.getvalue()


def tame(cell: object) -> object:
    """Return the cell; a text that a spreadsheet would run begins with an apostrophe."""
    is_formula = isinstance(cell, str) and cell.startswith(_FORMULA)
    return f"'{cell}" if is_formula else cell
