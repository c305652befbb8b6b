"""What a client pays for: the written policy (docs/ledger.md), as code."""

from typing import Final

from gateway.ledger.row import LedgerRow, Outcome, RowKind

SERVING: Final[tuple[RowKind, ...]] = ("answer", "escalation", "retry", "hedge", "continuation")
"""Attempts at what the client asked for. Others make answers faster, or us wiser."""
DELIVERED: Final[tuple[Outcome, ...]] = ("answered", "cancelled", "limited")
"""Ways to end with what the client got as its answer, or as the answer's beginning."""


def is_charged(kind: RowKind, outcome: Outcome) -> bool:
    """Whether the client pays for such an attempt: for its prompt and for what it delivered.

    He pays for answers, whole or as far as he or his limit let them come. He does not pay for
    failures and refusals, for attempts that another one overtook, for what the large model
    replaced, for drafts, probes and copies.
    """
    return kind in SERVING and outcome in DELIVERED


def num_payable_tokens(row: LedgerRow) -> int:
    """Of this attempt: prompt and completion tokens that the client pays for."""
    if not is_charged(row.kind, row.outcome):
        return 0
    return row.num_prompt_tokens + row.num_completion_tokens - row.num_discarded_tokens
