"""Ledger rows of attempts: one for each, with its usage and its charge."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from outrider.engine.events import TierWork
from outrider.gateway.contract.schema.kinds import Units
from outrider.gateway.tenancy.ledger.row import LedgerRow, RowKind, RowOutcome
from outrider.gateway.upstream.attempts import UpstreamAttempt
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.verifier.params import Tier, record

_NOTHING: Final = TierWork(tier="small")
Template = Callable[..., LedgerRow]
"""Makes a row with the fields that all rows of the request share."""


@record(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens that the client pays for, and the images or the sound."""

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    units: Units | None = None


_NO_TOKENS: Final = Tokens()


@dataclass(slots=True, kw_only=True)
class Entry:
    """A row in the making. `charged`: the tokens that the client pays for, of this attempt."""

    row: LedgerRow
    charged: Tokens = _NO_TOKENS
    units: Units | None = None
    """Images made, or sound worked on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedUsage:
    """An answer of the response cache: the tier that gave it first, and its tokens then."""

    tier: str
    model: str
    num_prompt: int
    num_completion: int
    is_charged: bool


def cached_entry(usage: CachedUsage, template: Template, *, duration_s: float) -> Entry:
    """Return the row of an answer from the cache."""
    row = template(
        kind="cached",
        outcome="answered",
        tier=usage.tier,
        model=usage.model,
        num_prompt_tokens=usage.num_prompt,
        num_completion_tokens=usage.num_completion,
        ttft_s=duration_s,
        duration_s=duration_s,
    )
    charged = Tokens(num_prompt=usage.num_prompt, num_completion=usage.num_completion)
    return Entry(row=row, charged=charged if usage.is_charged else Tokens())


class LocalAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The description of one finished local answer, given by its generation."""

    tier: Tier
    """Answered in the end."""
    first_tier: Tier
    """Began."""
    outcome: RowOutcome
    models: Mapping[Tier, str]
    num_prompt: int
    """In the client's usage."""
    num_cached: int = 0
    written: Mapping[Tier, int]
    """In the client's usage, by the tier that wrote them: of several choices each may have some."""
    num_reasoning: int = 0
    num_held: int = 0
    """Tokens that waited for a decision."""
    was_probed: bool = False
    """The router read its hidden state."""
    was_given_up: bool = False
    """An upstream tier answered instead."""
    is_delivered_in_part: bool = False
    """It broke off, and another responder continued it."""
    is_continuation: bool = False
    """It continues one that broke off, whose text is in its prompt and was charged there."""
    is_bounded: bool = False
    """The client had set `max_tokens`."""
    tokens_by_choice: tuple[int, ...] = ()
    is_degraded: bool = False
    hand_off: str = ""
    failure: str = ""
    queue_s: float | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0


def local_entries(
    answer: LocalAnswer, works: Mapping[Tier, TierWork], template: Template
) -> Iterator[Entry]:
    """Return a row for each tier that worked on an answer, and one for its drafts."""
    drafted = _drafted(answer, works)
    for tier in _writers(answer, works):
        work = works.get(tier)
        is_last = tier == answer.tier and not answer.was_given_up
        num_written = answer.written.get(tier, 0)
        if work is None and not is_last and not num_written:
            continue
        work = work or _NOTHING
        num_prompt = answer.num_prompt
        kind: RowKind = "continuation" if answer.is_continuation else "answer"
        if tier != answer.first_tier:
            kind = "escalation"
        if not is_last and answer.was_probed and work.num_output_tokens == 0:
            kind = "probe"
        num_output = max(work.num_output_tokens, num_written)
        charged = _charged(answer, num_written, num_output, is_last=is_last)
        is_given_up = tier == answer.first_tier and not is_last and not charged.num_completion
        yield Entry(
            row=template(
                kind=kind,
                outcome="escalated" if is_given_up else answer.outcome,
                tier=tier,
                model=answer.models.get(tier, ""),
                hand_off=answer.hand_off if is_last else "",
                failure=answer.failure if is_last else "",
                num_prompt_tokens=num_prompt,
                num_cached_tokens=min(work.num_cached_tokens, num_prompt),
                num_computed_tokens=work.num_computed_tokens,
                num_completion_tokens=num_output,
                num_reasoning_tokens=answer.num_reasoning if is_last else 0,
                num_held_tokens=answer.num_held if tier == answer.first_tier else 0,
                num_discarded_tokens=max(num_output - charged.num_completion, 0),
                queue_s=answer.queue_s,
                ttft_s=answer.ttft_s if is_last else None,
                duration_s=answer.duration_s,
                is_degraded=answer.is_degraded and is_last,
            ),
            charged=charged,
        )
    if drafted is not None:
        yield Entry(row=template(**drafted))


def _writers(answer: LocalAnswer, works: Mapping[Tier, TierWork]) -> Iterator[Tier]:
    """Return the tiers that read the prompt, the one that answered last.

    A client may have left before the gateway knew that another tier went on.
    """
    known = (answer.first_tier, *works, answer.tier)
    for tier in sorted(dict.fromkeys(known), key=lambda tier: (tier == answer.tier, tier)):
        work = works.get(tier, _NOTHING)
        is_named = tier in (answer.first_tier, answer.tier)
        if is_named or work.num_computed_tokens or work.num_output_tokens:
            yield tier


def _charged(answer: LocalAnswer, num_written: int, num_output: int, *, is_last: bool) -> Tokens:
    """Return a tier's part of the answer that the client received before the end."""
    if answer.was_given_up:
        return Tokens()
    match answer.outcome:
        case "answered" | "limited":
            pass
        case "failed" if answer.is_delivered_in_part:
            pass
        case "cancelled" if is_last:
            num_written = num_output
        case "cancelled":
            pass
        case _:
            return Tokens()
    if not is_last or answer.is_continuation:
        return Tokens(num_completion=num_written)
    return Tokens(
        num_prompt=answer.num_prompt, num_cached=answer.num_cached, num_completion=num_written
    )


def _drafted(answer: LocalAnswer, works: Mapping[Tier, TierWork]) -> dict[str, object] | None:
    """Return the row of an answer's drafts; None where there were none."""
    num_drafted = sum(work.num_drafted_tokens for work in works.values())
    num_rows = sum(work.num_draft_rows for work in works.values())
    if not num_drafted and not num_rows:
        return None
    guesser = next((tier for tier, work in works.items() if work.num_draft_rows), answer.tier)
    return {
        "kind": "draft",
        "outcome": "answered" if answer.outcome == "limited" else answer.outcome,
        "tier": guesser,
        "model": answer.models.get(guesser, ""),
        "num_computed_tokens": num_rows,
        "num_drafted_tokens": num_drafted,
        "num_accepted_tokens": sum(work.num_accepted_tokens for work in works.values()),
        "duration_s": answer.duration_s,
    }


def upstream_entry(
    attempt: UpstreamAttempt,
    template: Template,
    *,
    is_delivered: bool,
    was_handed_over: bool,
    arrival_s: float,
) -> Entry:
    """Return the row of an upstream attempt.

    `is_delivered`: the client got its text, or left while it was sent. `was_handed_over`: a local
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
