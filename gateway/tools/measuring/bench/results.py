"""Results of a benchmark run: a row for each request, their summary, and the conditions.

A file is one JSON document. Times of a row are seconds since the run's clock was started;
durations are milliseconds. Rows can be summarised again: `summary.summarize`.
"""

import math
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

SCHEMA_VERSION: Final = 1
KIND: Final = "outrider.bench"

LoopKind = Literal["open", "closed"]
TokenSource = Literal["usage", "chunks"]
"""Source of an answer's token count: the server, or our count of events with text."""

ErrorKind = Literal[
    "unreachable",  # no connection
    "timeout",  # not a whole answer in time
    "stall",  # nothing came for too long
    "rate_limited",  # 429
    "refused",  # another 4xx
    "server_error",  # 5xx, or an error in the midst of the stream
    "broken",  # the connection ended before the answer did
    "garbage",  # not what an OpenAI-compatible server sends
    "empty",  # a whole answer without a token
    "unfinished",  # the run was over
]


class ResultError(Exception):
    """A file is not a result of a run; the message says why."""


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies that a request must meet, milliseconds; None: no objective."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None
    """Bounds the mean gap of an answer (TPOT), as in AdaServe and as `--goodput tpot` of vLLM's
    benchmark."""
    e2e_ms: float | None = None
    """The whole answer."""

    @property
    def are_any(self) -> bool:
        """True if at least one objective is set."""
        return (self.ttft_ms, self.inter_token_ms, self.e2e_ms) != (None, None, None)


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Seconds are since the run's clock was started."""

    index: int
    scheduled_s: float
    """When it was due; in a closed loop, when it was sent. Latencies count from here: a request
    that had to wait for its sender has waited (coordinated omission)."""
    sent_s: float | None = None
    """When it went out; None where it never did."""
    first_s: float | None = None
    """Arrival of the first event that had a token."""
    last_s: float | None = None
    """Arrival of the last event that had a token."""
    ended_s: float
    """End of the answer, or the failure."""
    gaps_ms: list[float] = []
    """Between one event with tokens and the next; an event may have several tokens."""
    category: str = ""
    is_warm_up: bool = False
    arm: str = ""
    """Of a paired run, which side."""
    error: ErrorKind | None = None
    status: int | None = None
    message: str = ""
    request_id: str = ""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_completion_tokens: int = 0
    token_source: TokenSource = "usage"
    planned_prompt_tokens: int | None = None
    """What the workload wanted; None where it did not say."""
    planned_completion_tokens: int | None = None
    """As `planned_prompt_tokens`."""
    finish_reason: str | None = None
    num_drafted_tokens: int | None = None
    """This and the following come from the `outrider` report; None without one."""
    num_accepted_tokens: int | None = None
    mean_emitted_tokens: float | None = None
    tier: str | None = None
    reason: str | None = None
    is_escalated: bool | None = None
    server_ttft_ms: float | None = None
    server_queue_ms: float | None = None
    cost_usd: float | None = None

    @property
    def is_success(self) -> bool:
        """True if the answer is complete."""
        return self.error is None

    @property
    def lateness_ms(self) -> float | None:
        """Time between the request's due time and its sending; None if it was not sent."""
        return None if self.sent_s is None else 1e3 * (self.sent_s - self.scheduled_s)

    @property
    def ttft_ms(self) -> float | None:
        """From when it was due to the first token."""
        return None if self.first_s is None else 1e3 * (self.first_s - self.scheduled_s)

    @property
    def sent_ttft_ms(self) -> float | None:
        """From when it was sent to the first token."""
        if self.first_s is None or self.sent_s is None:
            return None
        return 1e3 * (self.first_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of a token behind the first; None for answers of one token."""
        if self.first_s is None or self.last_s is None or self.num_completion_tokens < 2:
            return None
        return 1e3 * (self.last_s - self.first_s) / (self.num_completion_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        """From when it was due to its end."""
        return 1e3 * (self.ended_s - self.scheduled_s)

    @property
    def sent_e2e_ms(self) -> float | None:
        """From when it was sent to its end."""
        return None if self.sent_s is None else 1e3 * (self.ended_s - self.sent_s)

    def attains(self, objectives: Objectives) -> bool:
        """Return whether the answer is complete and meets all objectives.

        An answer of one token meets any `inter_token_ms`.
        """
        return (
            self.is_success
            and _is_within(self.ttft_ms, objectives.ttft_ms)
            and _is_within(self.tpot_ms, objectives.inter_token_ms)
            and _is_within(self.e2e_ms, objectives.e2e_ms)
        )


def _is_within(value: float | None, bound: float | None) -> bool:
    return bound is None or value is None or value <= bound


class IntervalEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its 95 % interval; a bound is None where the samples are too few for one."""

    value: float
    low: float | None = None
    high: float | None = None


class Quantities(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution, all in the samples' unit. Quantiles: linear between the nearest ranks."""

    num_samples: int
    mean: IntervalEstimate
    p50: IntervalEstimate
    p90: IntervalEstimate
    p95: IntervalEstimate
    p99: IntervalEstimate
    minimum: float
    maximum: float


class DraftAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance of drafted tokens, over the requests whose report has it."""

    num_requests: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    mean_emitted_tokens: float

    @property
    def share(self) -> float | None:
        """Accepted of drafted; None where nothing was drafted."""
        if self.num_drafted_tokens == 0:
            return None
        return self.num_accepted_tokens / self.num_drafted_tokens


class CategorySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one category. Latencies are of those with a whole answer."""

    name: str
    num_requests: int
    num_failed: int
    ttft_ms: Quantities | None = None
    tpot_ms: Quantities | None = None
    e2e_ms: Quantities | None = None
    attainment: IntervalEstimate | None = None
    acceptance: DraftAcceptance | None = None
    num_completion_tokens: int = 0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Punctuality of an open loop.

    `num_held`: requests that were due while as many as allowed were in flight, so that they waited
    here; their wait is part of the latencies.
    """

    lateness_ms: Quantities | None = None
    num_held: int = 0
    most_in_flight: int = 0
    max_in_flight: int | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """USD. `source`: "reported" (each answer's own), "server" (its price list) or "given"."""

    total_usd: float
    usd_per_million_completion_tokens: float | None
    usd_per_million_tokens: float | None
    source: Literal["reported", "server", "given"]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the rows without warm-up. Latencies are of complete answers."""

    num_requests: int
    num_completed: int
    errors: dict[str, int]
    duration_s: float
    """From the first due to the last end."""
    offered_per_s: float | None
    completed_per_s: float
    prompt_tokens_per_s: float | None
    completion_tokens_per_s: float
    num_prompt_tokens: int | None
    num_completion_tokens: int
    token_source: Literal["usage", "chunks", "mixed"]
    ttft_ms: Quantities | None
    """Counted from when a request was due."""
    itl_ms: Quantities | None
    """All gaps between events of all answers."""
    tpot_ms: Quantities | None
    """One mean gap a token for each answer."""
    e2e_ms: Quantities | None
    """Counted from when a request was due."""
    sent_ttft_ms: Quantities | None
    """Counted from when a request was sent."""
    sent_e2e_ms: Quantities | None
    """As `sent_ttft_ms`."""
    attainment: IntervalEstimate | None
    """Of all requests, with failed ones as missed."""
    goodput_per_s: float | None
    """As `attainment`."""
    schedule: Schedule
    cost: Cost | None
    acceptance: DraftAcceptance | None
    categories: list[CategorySummary]
    tiers: dict[str, int]

    @property
    def num_failed(self) -> int:
        """Requests without a whole answer."""
        return self.num_requests - self.num_completed


class SearchStep(msgspec.Struct, frozen=True, kw_only=True):
    """One rate that was tried, in the order of trying."""

    rate_per_s: float
    is_enough: bool
    summary: Summary


class SearchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which enough requests meet their objectives."""

    target_attainment: float
    best_rate_per_s: float | None
    """None where not even the lowest rate was enough."""
    is_bounded: bool
    """Whether a higher rate that is too much was found as well; if not, the target may take
    more."""
    steps: list[SearchStep]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a run. Times: ISO 8601, UTC."""

    url: str
    """Without user and password."""
    model: str
    started_at: str
    ended_at: str
    loop: LoopKind
    workload: dict[str, Any]
    """What was asked: kind, name, numbers, what was mended or clipped."""
    settings: dict[str, Any]
    """The load as told: loop, rate_per_s, concurrency, duration_s, seed, timeouts…"""
    request_fields: dict[str, Any]
    """What each request's body had beside its prompt."""
    versions: dict[str, str]
    """Of outrider, python, aiohttp."""
    machine: str
    served_by: str | None = None
    device: str | None = None
    commit: str | None = None
    arm: str = ""
    notes: list[str] = []
    """What a reader has to know, in words."""


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. With a search, `rows` and `summary` are those of the best rate (of the lowest,
    where none was enough)."""

    schema_version: int = SCHEMA_VERSION
    kind: str = KIND
    meta: Meta
    objectives: Objectives
    summary: Summary
    rows: list[RequestRow]
    search: SearchReport | None = None

    @property
    def measured(self) -> list[RequestRow]:
        """The rows without the warm-up."""
        return [row for row in self.rows if not row.is_warm_up]


def write_result(result: BenchResult, path: Path) -> None:
    """Write a file that `read_result` reads. Raises ResultError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror}") from error


def read_result(path: Path) -> BenchResult:
    """Read a file of `write_result`. Raises ResultError, in words."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    try:
        result = msgspec.json.decode(data, type=BenchResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultError(
            f"{path} is not a result of `outrider bench --json` ({error}); run it again to make one"
        ) from error
    if result.kind != KIND:
        raise ResultError(f"{path} holds a {result.kind!r}, not a {KIND!r}")
    if result.schema_version != SCHEMA_VERSION:
        raise ResultError(
            f"{path} has version {result.schema_version} of the format; this one reads "
            f"{SCHEMA_VERSION}: run the benchmark again"
        )
    return result


def rounded(value: float, digits: int = 6) -> float:
    """To so many significant digits, so that files are no longer than they are exact."""
    if value == 0.0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))
