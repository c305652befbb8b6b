"""Concurrent requests to an upstream tier never pass a limit, in charges and in cost.

Streams with and without `max_tokens`, whole answers, several choices, clients that leave, servers
that report their usage, report none or report nothing but zeros. A server that ignores
`max_tokens` and `max_completion_tokens` cannot raise a charge; what it writes beyond them is cost.
"""

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from benchmarks.shared.mock_script import UsageReport
from benchmarks.shared.mock_upstream import MockRequest, MockScript
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD, LimitSpec
from tests.engines import PAIR_FOLDER, shipped_tokenizer
from tests.gateway.hybrid import CHAT
from tests.gateway.tenancy.metering.tenants import Books, books

TOKENS: Final = 5_000
USD: Final = 0.5
# Of a day: on a busy machine the requests take longer than a minute, and a minute's limit renews.
LIMITS: Final = {
    "tokens_per_day": LimitSpec(tokens_per_day=TOKENS),
    "usd_per_day": LimitSpec(usd_per_day=USD),
}
PRICE: Final = {"prompt": 20.0, "completion": 100.0}
TOKENS_PER_PIECE: Final = 3
"""At least as many as the shipped tokenizer makes of one piece of the mock's text."""
MANY_PIECES: Final = 2500
"""More tokens than the limit has room for."""
MANY_LINES: Final = 10_000
NUM_ENDLESS: Final = 3
ENDLESS: Final = ["never written"]
"""Marks streams without a bound, whose answers only a limit can end."""
REPORTS: Final[tuple[tuple[UsageReport, tuple[int, int] | None], ...]] = (
    ("never", None),
    ("as_asked", None),
    ("always", (0, 0)),
)


def encode(text: str) -> list[int]:
    return shipped_tokenizer().encode(text, add_special_tokens=False)


@contextmanager
def gateway(
    folder: Path,
    limits: LimitSpec,
    seed: int,
    *,
    is_obedient: bool,
) -> Iterator[Books]:
    rng = random.Random(seed)

    def answer(request: MockRequest) -> MockScript:
        usage, claimed = rng.choice(REPORTS)
        num_pieces = rng.choice((5, MANY_PIECES))
        if request.document.get("stop") == ENDLESS:
            num_pieces = MANY_PIECES
        if is_obedient:
            num_pieces = min(num_pieces, most_pieces(request.document))
        return MockScript(num_pieces=num_pieces, usage=usage, reported_usage=claimed)

    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "small"))
    options: dict[str, Any] = {"limits": limits, "tier": {"price": PRICE}, "clouds": [answer]}
    with books(tokenizer, encode, folder, **options) as made:
        object.__setattr__(made.world.context.limits, "default_max_tokens", None)
        yield made


def most_pieces(document: Mapping[str, Any]) -> int:
    """Return how much a server may write that keeps to the bound on the tokens of an answer."""
    bound = document.get("max_completion_tokens", document.get("max_tokens", 10_000))
    return int(bound) // TOKENS_PER_PIECE


def ask(made: Books, number: int) -> tuple[int, int]:
    """One request; its status, and the words that its client got."""
    if number % 1000 < NUM_ENDLESS:
        return read(made, {"model": "cloud", "stream": True, "stop": ENDLESS}, MANY_LINES)
    rng = random.Random(number)
    fields: dict[str, Any] = {"model": "cloud", "stream": rng.random() < 0.7}
    if rng.random() < 0.4:
        fields["max_tokens"] = rng.choice((1, 20, 200))
    if rng.random() < 0.3:
        fields["n"] = 2
    num_lines = rng.choice((9, MANY_LINES, MANY_LINES)) if fields["stream"] else MANY_LINES
    return read(made, fields, num_lines)


def read(made: Books, fields: dict[str, Any], num_lines: int) -> tuple[int, int]:
    """Ask and read up to so many lines; the status, and the words that the client got."""
    url, headers = f"{made.world.url}/v1/chat/completions", made.world.http.headers
    words = 0
    with httpx.stream("POST", url, json={**CHAT, **fields}, headers=headers, timeout=20) as told:
        if told.status_code == 200:
            for _, line in zip(range(num_lines), told.iter_lines(), strict=False):
                words += line.count('"content":" ') if fields["stream"] else 0
    return told.status_code, words


@pytest.mark.parametrize(
    ("limit", "is_obedient"),
    [
        pytest.param("tokens_per_day", True, marks=pytest.mark.slow),
        ("tokens_per_day", False),
        ("usd_per_day", True),
        pytest.param("usd_per_day", False, marks=pytest.mark.slow),
    ],
)
def test_no_limit_is_passed_at_an_upstream_tier(
    tmp_path: Path, limit: str, is_obedient: bool
) -> None:
    check(tmp_path, limit, seed=1, num_requests=30, is_obedient=is_obedient)


@pytest.mark.long
@pytest.mark.parametrize("is_obedient", [True, False])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seed", range(10))
def test_no_limit_is_passed_at_an_upstream_tier_in_many_rounds(
    tmp_path: Path, limit: str, seed: int, is_obedient: bool
) -> None:
    check(tmp_path, limit, seed=seed, num_requests=300, is_obedient=is_obedient)


def check(folder: Path, limit: str, *, seed: int, num_requests: int, is_obedient: bool) -> None:
    with gateway(folder, LIMITS[limit], seed, is_obedient=is_obedient) as made:
        numbers = range(1000 * seed, 1000 * seed + num_requests)
        with ThreadPoolExecutor(12) as pool:
            told = list(pool.map(lambda number: ask(made, number), numbers))
        used = made.used(limit)
        num_answered = sum(status == 200 for status, _ in told)
        rows = made.rows(num_answered)
    assert {status for status, _ in told} == {200, 429}
    tokens = sum(row["num_charged_tokens"] for row in rows)
    nanos = sum(row["charge_nanos"] for row in rows)
    cost_nanos = sum(row["cost_nanos"] for row in rows)
    delivered = sum(words for _, words in told)
    assert used == (tokens if limit == "tokens_per_day" else nanos)
    assert delivered <= sum(row["num_completion_tokens"] for row in rows)
    if limit == "tokens_per_day":
        assert 0.5 * TOKENS < tokens <= TOKENS
        written = sum(row["num_prompt_tokens"] + row["num_completion_tokens"] for row in rows)
        assert not is_obedient or written <= TOKENS
    else:
        assert 0.5 * USD * NANOS_PER_USD < nanos <= USD * NANOS_PER_USD
        assert not is_obedient or cost_nanos <= USD * NANOS_PER_USD
    assert any(row["outcome"] == "limited" for row in rows)
