"""Figures for people."""


def figure_text(value: float) -> str:
    """Four digits, no exponent for what people count."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
