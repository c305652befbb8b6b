"""The answer of GET /v1/dashboard."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Milliseconds = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
PerSecond = Annotated[float, Field(ge=0)]
_Usd = Annotated[float, Field(description="USD.")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantiles(_Model):
    """Quantiles of one latency, over the requests that had it, in ms; null where none had."""

    num: int
    p50: Milliseconds | None
    p95: Milliseconds | None
    p99: Milliseconds | None


class QuantileSeries(_Model):
    """The same for each cell of time."""

    p50: list[Milliseconds | None]
    p95: list[Milliseconds | None]
    p99: list[Milliseconds | None]


class Latencies(_Model):
    """From arrival to the first token, the mean between an answer's tokens, arrival to end."""

    ttft_ms: Quantiles
    inter_token_ms: Quantiles
    e2e_ms: Quantiles


class RequestFigures(_Model):
    """Requests that ended in the window, and their rates.

    `cost_usd_per_s` is the gateway's cost of the tokens; for keys that may see only their own
    requests, their charge.
    """

    num: int
    num_answered: int
    num_failed: int
    num_refused: int
    num_cancelled: int
    per_s: PerSecond
    tokens_per_s: PerSecond
    goodput: PerSecond
    cost_usd_per_s: _Usd


class TierFigures(_Model):
    """A tier's share of the answers."""

    name: str
    num: int
    share: _Share


class ClassFigures(_Model):
    """A class of requests: how many met all their objectives. `goodput`: such requests per second.

    `ttft_ms` and `inter_token_ms` are the class's own objectives, null for none; requests may have
    brought others.
    """

    name: str
    num: int
    num_attained: int
    attainment: _Share | None
    goodput: PerSecond
    ttft_ms: Milliseconds | None
    inter_token_ms: Milliseconds | None


class Series(_Model):
    """Rates over the window, in cells of `cell_s` seconds, the oldest first.

    `age_s`: how long ago each cell ended; it is negative for the current one.
    """

    cell_s: float
    age_s: list[float]
    ttft_ms: QuantileSeries
    inter_token_ms: QuantileSeries
    e2e_ms: QuantileSeries
    requests_per_s: list[PerSecond]
    goodput: list[PerSecond]
    tokens_per_s: list[PerSecond]
    cost_usd_per_s: list[_Usd]


class EngineTier(_Model):
    """A local model now. `tokens_per_s` and `prefix_hit_share`: since the oldest moment kept.

    `num_held` of `num_waiting` are held back by the queue, because with one answer more others
    would miss their objectives; `held_mean_ms`: the mean of such waits since then.
    """

    name: str
    num_running: int
    num_waiting: int
    num_held: int
    held_mean_ms: Milliseconds | None
    kv_cache_usage: _Share
    num_preemptions: int
    prefix_hit_share: _Share | None
    tokens_per_s: PerSecond | None


class SourceFigures(_Model):
    """Nodes of one source of guesses: how many were verified and accepted, in all and by depth.

    `by_depth` holds the accepted share of those at each depth, from 1 on; null where none was
    verified.
    """

    name: str
    num_drafted: int
    num_accepted: int
    by_depth: list[_Share | None]


class Acceptance(_Model):
    """Acceptance of drafts. `tokens_per_step`: emitted by a verifying pass, its own one included.

    `stretch`: how many steps without guesses one with them lasts; null where none was compared.

    `accepted_by_depth`: the share of trees whose accepted path got to each depth, from 1 on.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens_per_step: float | None
    stretch: Annotated[float, Field(ge=0)] | None
    accepted_by_depth: list[_Share]
    sources: list[SourceFigures]


class EngineHistory(_Model):
    """Samples of the engine, one in five seconds and when the dashboard was read: seconds ago,
    and each tier's gauges then."""

    age_s: list[float]
    num_running: dict[str, list[int]]
    num_waiting: dict[str, list[int]]
    kv_cache_usage: dict[str, list[_Share]]


class KvFolderFigures(_Model):
    """Keys and values on a disk, since the engine began; the shares since the oldest moment kept.

    Of all prompt tokens `memory_share` were found in memory, and `disk_share` came from the disk.
    `saved_s`: computing that those saved, less the wait for them.
    """

    memory_share: _Share | None
    disk_share: _Share | None
    num_restored_tokens: int
    saved_s: Annotated[float, Field(ge=0)]
    num_read_bytes: int
    num_written_bytes: int
    num_bytes: int


class EngineFigures(_Model):
    """The local models. `over_s`: time span of `acceptance` and rates; null: since the start.

    `step_ms` is the mean time of a step in that span, `host_ms` of it is spent beside the models'
    passes; null without steps. `kv_folder` is null where nothing was written to a folder or read.
    """

    over_s: float | None
    step_ms: Milliseconds | None
    host_ms: Milliseconds | None
    tiers: list[EngineTier]
    acceptance: Acceptance
    kv_folder: KvFolderFigures | None
    history: EngineHistory


class GatewayFigures(_Model):
    """The gateway's own process, over the last five minutes or since it began.

    The loop's lag is the delay that every stream waits for; null before the first measurement.
    `stages_p99_ms`: for how long single stages of a request hold the loop (route: the router's
    decision, prompt: rendering and tokens), of the last 4,096 each.
    `cpu_ms_per_request`: its processor time by the requests that ended; null without any.
    """

    loop_lag_p50_ms: Milliseconds | None
    loop_lag_p99_ms: Milliseconds | None
    stages_p99_ms: dict[str, Milliseconds]
    cpu_ms_per_request: Milliseconds | None


class ReplicaFigures(_Model):
    """An engine replica of the gateway's pool. `reason`: why it takes no new requests.

    Answers go on only at replicas of the same `group`.
    """

    name: str
    group: str
    is_up: bool
    is_draining: bool
    num_in_flight: int
    num_requests: int
    reason: str


class ChangingHead(_Model):
    """A client most of whose prompts differ within the first 64 tokens, and hardly behind them.

    A clock at the head of a system prompt does so. What follows, `num_repeated_tokens` in all of
    `num_changed` prompts, is never found in the prefix cache. `agent` is the first word of its user
    agent.
    """

    key_id: str
    agent: str
    num_requests: int
    num_changed: int
    num_repeated_tokens: int
    num_prompt_tokens: int


class Dashboard(_Model):
    """The figures of the page at /dashboard.

    `scope`: all requests, or those of the key's own team. `window_s`: the time span of the figures
    of requests; less where the gateway is young or very busy. `engine`, `gateway` and
    `experiments` are null for keys that may see only their own requests, and where there are none;
    so are `replicas`, where the gateway has one engine.
    """

    object: Literal["dashboard"] = "dashboard"
    at: float
    scope: Literal["all", "own"]
    window_s: float
    requests: RequestFigures
    latency: Latencies
    tiers: list[TierFigures]
    classes: list[ClassFigures]
    series: Series
    engine: EngineFigures | None
    gateway: GatewayFigures | None
    replicas: list[ReplicaFigures] | None
    experiments: list[dict[str, JsonValue]] | None
    changing_heads: list[ChangingHead]


DASHBOARD_MODELS: tuple[type, ...] = (Dashboard,)
"""Models for the components of the OpenAPI document."""
