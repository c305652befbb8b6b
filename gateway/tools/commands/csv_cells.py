"""Cells of CSV files that spreadsheets may open."""


def tame(cell: object) -> object:
    """Return a cell that no spreadsheet runs: names are the clients' own, and may be formulas."""
    is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{cell}" if is_formula else cell
