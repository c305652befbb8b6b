"""Metrics of sign-in."""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

TokenResult = Literal["verified", "refused", "no_team", "pending"]


class SignInMetrics:
    """Counts tokens and looks at issuers, without anything of the tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "outrider_tokens",
            "Tokens that were verified anew, by result; known ones are not counted.",
            ["result"],
            registry=registry,
        )
        for result in get_args(TokenResult):
            self._tokens.labels(result)
        self._known = Gauge(
            "outrider_tokens_known", "Verified tokens in memory.", registry=registry
        )
        self._failures = Counter(
            "outrider_issuer_fetch_failures",
            "Failed readings of an issuer's keys, after which the last known ones stay in use.",
            ["issuer"],
            registry=registry,
        )
        self._keys = Gauge(
            "outrider_issuer_keys", "Keys of an issuer.", ["issuer"], registry=registry
        )

    def checked(self, result: TokenResult) -> None:
        """Count a token."""
        self._tokens.labels(result).inc()

    def report_known(self, num_known: Callable[[], int]) -> None:
        """Ask this for the number of tokens in memory."""
        self._known.set_function(num_known)

    def fetch_failed(self, issuer: str) -> None:
        """Count a reading of keys that failed."""
        self._failures.labels(issuer).inc()

    def has_keys(self, issuer: str, count: int) -> None:
        """Report an issuer's keys."""
        self._keys.labels(issuer).set(count)
