"""Headers that report limits to a client, as its library obeys them."""

import pytest

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import BudgetError, RateLimitError, StorageError
from outrider.gateway.tenancy.keys.amounts import LimitName
from outrider.gateway.tenancy.limits.headers import duration, ratelimit_headers
from outrider.gateway.tenancy.limits.limiter import LimitState


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0ms"),
        (0, "0ms"),
        (0.0115, "12ms"),
        (0.9991, "1000ms"),
        (1, "1s"),
        (1.2, "2s"),
        (59.5, "1m0s"),
        (360, "6m0s"),
        (3599.1, "1h0m0s"),
        (86_399, "23h59m59s"),
        (2_678_400, "744h0m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def state(name: LimitName, remaining: int, reset_s: float, limit: int = 100) -> LimitState:
    return LimitState(scope="key", name=name, limit=limit, remaining=remaining, reset_s=reset_s)


def test_the_limit_with_the_least_left_is_told() -> None:
    states = [
        state("requests_per_minute", 59, 12.0, 60),
        state("requests_per_day", 7, 3600.0, 1000),
        state("tokens_per_minute", 40, 30.0),
        state("tokens_per_minute", 40, 55.5, 400),
        state("concurrent_requests", 0, 1.0),
        state("usd_per_day", 0, 1.0),
    ]
    for order in (states, states[::-1]):
        assert ratelimit_headers(order) == {
            "x-ratelimit-limit-requests": "1000",
            "x-ratelimit-remaining-requests": "7",
            "x-ratelimit-reset-requests": "1h0m0s",
            "x-ratelimit-limit-tokens": "400",
            "x-ratelimit-remaining-tokens": "40",
            "x-ratelimit-reset-tokens": "56s",
        }
    assert ratelimit_headers([]) == {}
    assert ratelimit_headers(states[-2:]) == {}


def test_a_full_minute_is_worth_a_retry() -> None:
    limits = {"x-ratelimit-remaining-tokens": "0"}
    problem = problem_of(RateLimitError("full", retry_after_s=12.0001, headers=limits))
    assert (problem.status, problem.code) == (429, "rate_limit_exceeded")
    assert problem.headers == {
        "x-ratelimit-remaining-tokens": "0",
        "retry-after": "13",  # never too early
        "retry-after-ms": "12001",
        "x-should-retry": "true",
    }


def test_a_full_day_is_not() -> None:
    problem = problem_of(RateLimitError("full", retry_after_s=3600.0))
    assert problem.headers == {
        "retry-after": "3600",
        "retry-after-ms": "3600000",
        "x-should-retry": "false",
    }


def test_a_budget_that_is_gone_is_not() -> None:
    problem = problem_of(BudgetError("gone", reset_s=20 * 86_400.0, headers={"a": "b"}))
    assert (problem.status, problem.type, problem.code) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert problem.headers == {
        "a": "b",
        "retry-after": "1728000",
        "retry-after-ms": "1728000000",
        "x-should-retry": "false",
    }


def test_a_request_above_the_limit_gets_no_retry_time() -> None:
    assert problem_of(BudgetError("never")).headers == {"x-should-retry": "false"}


def test_other_errors_have_the_headers_they_had() -> None:
    assert problem_of(StorageError("away")).headers["x-should-retry"] == "true"
    assert problem_of(ValueError("ours")).headers == {}
