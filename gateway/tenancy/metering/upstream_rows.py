"""The ledger's row of an attempt at an upstream server."""

from outrider.gateway.tenancy.ledger.row import LedgerRow, RowKind
from outrider.gateway.tenancy.metering.rows import Entry, Template, Tokens
from outrider.gateway.upstream.attempts import Attempt
from outrider.gateway.upstream.upstream_usage import UpstreamUsage


def upstream_entry(
    attempt: Attempt,
    template: Template,
    *,
    is_delivered: bool,
    was_handed_over: bool,
    arrival_s: float,
) -> Entry:
    """Return the row of an upstream attempt.

    is_delivered: the client got its text, or left while it was sent. was_handed_over: a local
    answer had been given up for it.
    """
    usage = attempt.usage or UpstreamUsage(source="estimated")
    kind: RowKind = attempt.kind
    if kind == "answer" and was_handed_over:
        kind = "escalation"
    # The prompt of a continuation contains text that was already charged as an answer.
    has_prompt = attempt.kind != "continuation"
    charged = Tokens()
    num_discarded = usage.num_completion_tokens
    if is_delivered:
        # Text that a continuation repeats was charged with the attempt that broke off.
        num_discarded = min(attempt.num_repeated_tokens, usage.num_completion_tokens)
        charged = Tokens(
            num_prompt=usage.num_prompt_tokens if has_prompt else 0,
            num_cached=min(usage.num_cached_tokens, usage.num_prompt_tokens) if has_prompt else 0,
            num_completion=usage.num_completion_tokens - num_discarded,
            units=usage.units,
        )
    first_s = attempt.first_token_s
    row: LedgerRow = template(
        kind=kind,
        outcome=attempt.outcome,
        tier=attempt.tier,
        model=attempt.model,
        replica=attempt.replica,
        failure=attempt.failure or "",
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=min(usage.num_cached_tokens, usage.num_prompt_tokens),
        num_completion_tokens=usage.num_completion_tokens,
        num_reasoning_tokens=usage.num_reasoning_tokens,
        num_discarded_tokens=num_discarded,
        usage_source=usage.source,
        ttft_s=None if first_s is None else first_s - arrival_s,
        duration_s=attempt.ended_s - attempt.started_s,
    )
    return Entry(row=row, charged=charged, units=usage.units)
