"""Special functions of scipy, imported when one is first called.

The import takes 0.3 s, and a gateway without experiments calls none of them.
"""

from typing import Any


def betaln(a: Any, b: Any) -> Any:
    """Return the logarithm of the beta function."""
    from scipy import special

    return special.betaln(a, b)


def chdtrc(freedom: Any, x: Any) -> Any:
    """Return the chance that a chi-square variable exceeds `x`."""
    from scipy import special

    return special.chdtrc(freedom, x)


def gammaln(x: Any) -> Any:
    """Return the logarithm of the gamma function."""
    from scipy import special

    return special.gammaln(x)


def ndtr(x: Any) -> Any:
    """Return the normal distribution's cumulative probability."""
    from scipy import special

    return special.ndtr(x)


def stdtrit(freedom: Any, probability: Any) -> Any:
    """Return the quantile of Student's t."""
    from scipy import special

    return special.stdtrit(freedom, probability)
