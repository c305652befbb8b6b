"""Metrics of sign-in."""

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

TokenResult = Literal["verified", "refused", "no_team", "pending"]


class SignInMetrics:
    """Counts tokens and readings of keys, without anything of the tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Counter(
            "outrider_tokens",
            "Tokens that were verified anew, by result; known ones are not counted.",
            ["result"],
            registry=registry,
        )
        for result in get_args(TokenResult):
            self.tokens.labels(result)
        self.failures = Counter(
            "outrider_issuer_fetch_failures",
            "Failed readings of an issuer's keys, after which the last known ones stay in use.",
            ["issuer"],
            registry=registry,
        )
