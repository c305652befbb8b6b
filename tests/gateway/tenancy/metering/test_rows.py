"""Which tier's row has what, where two tiers worked on one answer."""

from collections.abc import Mapping
from typing import Any

from outrider.engine.events import TierWork
from outrider.gateway.tenancy.ledger.row import LedgerRow, RowOutcome
from outrider.gateway.tenancy.metering.rows import Entry, LocalAnswer, Tokens, local_entries
from outrider.verifier.params import Tier


def entries(
    outcome: RowOutcome, tier: Tier, written: Mapping[Tier, int], *works: TierWork
) -> list[Entry]:
    """Return the ledger's entries of an answer that the small model began."""
    answer = LocalAnswer(
        tier=tier,
        first_tier="small",
        outcome=outcome,
        models={"small": "s", "large": "l"},
        num_prompt=10,
        written=written,
    )

    def template(**fields: Any) -> LedgerRow:
        return LedgerRow(row_id="1", request_id="r", ended_at=0.0, **fields)

    return list(local_entries(answer, {work.tier: work for work in works}, template))


def work(tier: Tier, num_output: int, **counts: int) -> TierWork:
    return TierWork(tier=tier, num_computed_tokens=10, num_output_tokens=num_output, **counts)


def test_each_tier_is_paid_for_the_choices_that_it_wrote() -> None:
    small, large = entries(
        "answered", "large", {"small": 7, "large": 20}, work("small", 12), work("large", 20)
    )
    assert (small.row.tier, small.row.kind, small.row.outcome) == ("small", "answer", "answered")
    assert (small.row.num_completion_tokens, small.row.num_discarded_tokens) == (12, 5)
    assert small.charged == Tokens(num_completion=7)
    assert (large.row.tier, large.row.kind, large.row.outcome) == (
        "large",
        "escalation",
        "answered",
    )
    assert (large.row.num_completion_tokens, large.row.num_discarded_tokens) == (20, 0)
    assert large.charged == Tokens(num_prompt=10, num_completion=20)


def test_a_choice_is_paid_for_before_the_engine_has_told_of_it() -> None:
    small, large = entries("answered", "large", {"small": 7, "large": 20}, work("large", 20))
    assert small.charged == Tokens(num_completion=7)
    assert large.charged == Tokens(num_prompt=10, num_completion=20)


def test_a_client_that_leaves_before_a_hand_over_does_not_pay_for_it() -> None:
    large, small = entries(
        "cancelled",
        "small",
        {"small": 4},
        work("small", 6, num_discarded_tokens=6),
        work("large", 3),
    )
    assert (large.row.tier, large.row.kind, large.row.outcome) == (
        "large",
        "escalation",
        "cancelled",
    )
    assert (large.row.num_completion_tokens, large.row.num_discarded_tokens) == (3, 3)
    assert large.charged == Tokens()
    assert (small.row.tier, small.row.num_completion_tokens) == ("small", 6)
    assert small.charged == Tokens(num_prompt=10, num_completion=6)


def test_whoever_only_guessed_has_no_row_of_an_answer() -> None:
    guesses = TierWork(tier="small", num_draft_rows=30)
    answer = LocalAnswer(
        tier="large",
        first_tier="large",
        outcome="answered",
        models={},
        num_prompt=10,
        written={"large": 5},
    )

    def template(**fields: Any) -> LedgerRow:
        return LedgerRow(row_id="1", request_id="r", ended_at=0.0, **fields)

    works = {"small": guesses, "large": work("large", 5, num_drafted_tokens=40)}
    large, draft = local_entries(answer, works, template)
    assert (large.row.tier, large.row.kind) == ("large", "answer")
    assert (draft.row.tier, draft.row.kind) == ("small", "draft")
    assert (draft.row.num_computed_tokens, draft.row.num_drafted_tokens) == (30, 40)
    assert draft.charged == Tokens()
