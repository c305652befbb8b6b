"""Concurrent requests to an upstream tier never pass a limit in charges, nor streams in cost.

Streams with and without `max_tokens`, whole answers, several choices, clients that leave, servers
that report their usage, report none or report nothing but zeros.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from benchmarks.mock_upstream import MockRequest, MockScript
from gateway.tenants.amounts import NANOS_PER_USD, LimitSpec
from gateway.text.chat import ChatTokenizer
from tests.engines import PAIR_FOLDER, shipped_tokenizer
from tests.gateway.hybrid import CHAT
from tests.gateway.metering.tenants import Books, books

TOKENS: Final = 5_000
USD: Final = 0.5
LIMITS: Final = {
    "tokens_per_minute": LimitSpec(tokens_per_minute=TOKENS),
    "usd_per_day": LimitSpec(usd_per_day=USD),
}
PRICE: Final = {"prompt": 20.0, "completion": 100.0}
REPORTS: Final = (("never", None), ("as_asked", None), ("always", (0, 0)))


def encode(text: str) -> list[int]:
    return shipped_tokenizer().encode(text, add_special_tokens=False)


@contextmanager
def gateway(
    folder: Path,
    limits: LimitSpec,
    seed: int,
) -> Iterator[Books]:
    rng = random.Random(seed)

    def answer(request: MockRequest) -> MockScript:
        usage, claimed = rng.choice(REPORTS)
        long = rng.choice((5, 2500))
        return MockScript(num_pieces=long, usage=usage, reported_usage=claimed)  # type: ignore[arg-type]

    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "small"))
    options: dict[str, Any] = {"limits": limits, "tier": {"price": PRICE}, "clouds": [answer]}
    with books(tokenizer, encode, folder, **options) as made:
        object.__setattr__(made.world.context.limits, "default_max_tokens", None)
        yield made


def ask(made: Books, number: int) -> tuple[int, int]:
    """One request; its status, and the words that its client got."""
    rng = random.Random(number)
    fields: dict[str, Any] = {"model": "cloud", "stream": rng.random() < 0.7}
    if rng.random() < 0.4:
        fields["max_tokens"] = rng.choice((1, 20, 200))
    if rng.random() < 0.3:
        fields["n"] = 2
    num_lines = rng.choice((9, 10_000, 10_000)) if fields["stream"] else 10_000
    url, headers = f"{made.world.url}/v1/chat/completions", made.world.http.headers
    words = 0
    with httpx.stream("POST", url, json={**CHAT, **fields}, headers=headers, timeout=20) as told:
        if told.status_code == 200:
            for _, line in zip(range(num_lines), told.iter_lines(), strict=False):
                words += line.count('"content":" ') if fields["stream"] else 0
    return told.status_code, words


@pytest.mark.parametrize("limit", LIMITS)
def test_no_limit_is_passed_at_an_upstream_tier(tmp_path: Path, limit: str) -> None:
    check(tmp_path, limit, seed=1, num_requests=30)


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seed", range(10))
def test_no_limit_is_passed_at_an_upstream_tier_in_many_rounds(
    tmp_path: Path, limit: str, seed: int
) -> None:
    check(tmp_path, limit, seed=seed, num_requests=300)


@pytest.mark.long
@pytest.mark.xfail(strict=False, reason="whole answers cost more than is charged; cause unknown")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seed", range(10))
def test_whole_answers_do_not_pass_a_limit_in_cost_either(
    tmp_path: Path, limit: str, seed: int
) -> None:
    check(tmp_path, limit, seed=seed, num_requests=300, is_cost_of_all=True)


def check(
    folder: Path, limit: str, *, seed: int, num_requests: int, is_cost_of_all: bool = False
) -> None:
    with gateway(folder, LIMITS[limit], seed) as made:
        numbers = range(1000 * seed, 1000 * seed + num_requests)
        with ThreadPoolExecutor(12) as pool:
            told = list(pool.map(lambda number: ask(made, number), numbers))
        used = made.used(limit)
        num_answered = sum(status == 200 for status, _ in told)
        rows = made.rows(num_answered)
    assert {status for status, _ in told} == {200, 429}
    tokens = sum(row["num_charged_tokens"] for row in rows)
    nanos = sum(row["charge_nanos"] for row in rows)
    # A known hole: a whole answer may cost more than is charged (docs/security.md).
    streams = [row for row in rows if row["is_streamed"] or is_cost_of_all]
    cost_nanos = sum(row["cost_nanos"] for row in streams)
    delivered = sum(words for _, words in told)
    assert used == (tokens if limit == "tokens_per_minute" else nanos)
    assert delivered <= sum(row["num_completion_tokens"] for row in rows)
    if limit == "tokens_per_minute":
        assert 0.5 * TOKENS < tokens <= TOKENS
        written = sum(row["num_prompt_tokens"] + row["num_completion_tokens"] for row in streams)
        assert written <= TOKENS
    else:
        assert 0.5 * USD * NANOS_PER_USD < nanos <= USD * NANOS_PER_USD
        assert cost_nanos <= USD * NANOS_PER_USD
    assert any(row["outcome"] == "limited" for row in rows)
