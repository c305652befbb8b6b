import sqlite3
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.routing.bench_served_router import (
    Attempt,
    attempts,
    figures_of,
    read_answer,
    token_cost,
)
from outrider.router.worth import CostRates, PairRates

RATES = PairRates(
    small=CostRates(request=0.0, prompt_token=0.001, answer_token=0.01),
    large=CostRates(request=1.0, prompt_token=0.01, answer_token=0.1),
)


def attempt(kind: str, tier: str, prompt: int = 10, answer: int = 5) -> Attempt:
    return Attempt(kind=kind, tier=tier, num_prompt_tokens=prompt, num_completion_tokens=answer)


def test_an_answer_begun_in_vain_is_paid_twice_and_guesses_belong_to_the_large_model() -> None:
    small, large = attempt("answer", "small"), attempt("escalation", "large")
    assert token_cost([small, large]) == token_cost([small]) + token_cost([large])
    assert token_cost([large, attempt("draft", "small")]) == token_cost([large])


def test_costs_are_shares_of_always_larges() -> None:
    right = np.array([1.0, 1.0, 1.0, 0.0])
    answers = {
        "always large": (right, np.ones(4)),
        "auto, streamed": (np.array([1.0, 1.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0, 0.0])),
    }
    spent = {
        "always large": [attempt("answer", "large")] * 4,
        "auto, streamed": [
            *([attempt("answer", "small")] * 4),
            attempt("escalation", "large"),
        ],
    }
    figures = figures_of(answers, spent, RATES)
    auto = figures["auto, streamed"]
    assert auto.minus_large.estimate == -0.25
    assert (auto.large_share, auto.begun_in_vain) == (0.25, 0.25)
    assert auto.seconds == pytest.approx((4 * 0.06 + 1.6) / (4 * 1.6))
    assert figures["always large"].tokens == figures["always large"].seconds == 1.0


def test_an_answer_is_read_with_and_without_a_stream() -> None:
    headers = {"x-outrider-tier": "small"}
    events = 'data: {"choices":[{"delta":{"content":"4"}}]}\n\ndata: {"choices":[{"delta":{}}]}\n\n'
    streamed = httpx.Response(200, text=events + "data: [DONE]\n\n", headers=headers)
    assert read_answer(streamed, streams=True) == ("4", "small")
    body = {"choices": [{"message": {"content": None}}]}
    assert read_answer(httpx.Response(200, json=body, headers=headers), streams=False)[0] == ""


def test_all_rows_of_the_ledger_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as ledger:
        ledger.execute(
            "create table ledger (row_id, request_id, ended_at, kind, tier, "
            "num_prompt_tokens, num_completion_tokens)"
        )
        ledger.execute("insert into ledger values ('a', 'r', 2.0, 'escalation', 'large', 10, 5)")
        ledger.execute("insert into ledger values ('b', 'r', 1.0, 'answer', 'small', 10, 5)")
    assert [one.kind for one in attempts(path, 1)] == ["answer", "escalation"]
