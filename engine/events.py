"""The engine's output: a stream of events for each request.

A stream is: `PrefillDone` once per tier, `TokensEmitted` any number of times, then exactly one of
`Finished` or `Failed`; a resumed answer has no `PrefillDone` for the tokens it begins with.
`TierSwitched` retracts every token emitted so far, unless it says that they
stay. `AnswerHeld` may stand before `Finished`, or before a `TierSwitched`.
"""

from dataclasses import dataclass, field
from typing import Literal

from outrider.engine.config import EngineRole
from outrider.engine.request import AdapterRef
from outrider.engine.trace import StepTrace
from outrider.verifier.params import Source, Tier, record
from outrider.verifier.token_logprobs import Judgement, PromptLogprobs, TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]


@record(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """The whole prompt is in the KV cache."""

    request_id: str
    tier: Tier
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    num_restored_tokens: int = 0
    """Those of the cached tokens that were read from a disk."""
    num_pulled_tokens: int = 0
    """Those of the cached tokens that came from another engine for it."""
    hidden_state: tuple[float, ...] | None = None
    """The last prompt token's, after the final norm, [hidden_size] floats; given when the request
    asked for it."""
    numerics: str = ""
    """The arithmetic behind the answer: the models', their caches', their adapters'."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """One for each prompt token but the first; empty unless the request asks for them."""
    judgements: tuple[Judgement, ...] = ()
    """Of the prompt's end by each hypothesis; empty unless the request asks for them."""
    left_out: tuple[str, ...] = ()
    """Keywords of lenient schemas that the grammar leaves out, as `place#pointer`."""


@record(frozen=True, slots=True, kw_only=True)
class TokensEmitted:
    """Tokens accepted in one step."""

    request_id: str
    token_ids: tuple[int, ...]
    num_drafted_tokens: int = 0
    """Nodes that were verified for this sequence in this step."""
    num_accepted_tokens: int = 0
    """This many of the first `token_ids` had been drafted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Empty, or one for each of `token_ids`."""
    num_predicted_tokens: int = 0
    """Those of `token_ids` that the client's prediction held at this place."""
    num_unratified_tokens: int = 0
    """Those that the large model alone would not have chosen (cascade)."""
    num_reused_tokens: int = 0
    """Those that the retracted answer of the other tier held at this place."""
    trace: StepTrace | None = None
    """Only for requests that ask for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHeld:
    """An answer that may escalate has ended; it waits for `keep_on_tier` or `switch_tier`."""

    request_id: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSwitched:
    """The request moved to another tier."""

    request_id: str
    tier: Tier
    keeps_answer: bool = False
    """False: tokens emitted before this event are retracted. True: they stay, and the other tier
    goes on behind them."""


@record(frozen=True, slots=True, kw_only=True)
class TierWork:
    """The work of one tier's model for one request, however the request ended.

    Summed over all requests, ended or not, these are the counters of `TierStats` and `EngineStats`.
    """

    tier: Tier
    num_prompt_tokens: int = 0
    """The prompt's length; 0 if the request never began on this tier."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request first began here."""
    num_computed_tokens: int = 0
    """Rows of prompts and kept answers that were prefilled, again after each pre-emption."""
    num_output_tokens: int = 0
    """Tokens emitted, those that were retracted later among them."""
    num_discarded_tokens: int = 0
    """Emitted tokens that a change of tier retracted."""
    num_drafted_tokens: int = 0
    """Tree nodes that this tier verified."""
    num_accepted_tokens: int = 0
    """Those of `num_drafted_tokens` that the tier accepted."""
    num_unratified_tokens: int = 0
    """Emitted tokens that the large model alone would not have chosen (cascade)."""
    num_draft_rows: int = 0
    """Rows that this tier computed to guess for the other tier."""
    num_steps: int = 0
    """Passes that emitted."""
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    """Tokens that the prefix cache was asked for, at every start."""
    num_hit_tokens: int = 0
    """Tokens that the prefix cache held, at every start."""


@record(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """The resources that a request used.

    Token counts are those of the answer that stands, on the tier that wrote it. Times are seconds;
    None where the request never got so far.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_reused_tokens: int = 0
    num_steps: int = 0
    """Target passes that emitted tokens; `mean_emitted_tokens = num_output_tokens / num_steps`."""
    num_preemptions: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    work: tuple[TierWork, ...] = ()
    """Everything that was done, by tier."""

    @property
    def mean_emitted_tokens(self) -> float:
        """Tokens per target pass; 0.0 before the first."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0


@record(frozen=True, slots=True, kw_only=True)
class Finished:
    """The request ended by itself or was aborted; its blocks are free."""

    request_id: str
    tier: Tier
    finish_reason: FinishReason
    stats: RequestStats

    @property
    def work(self) -> tuple[TierWork, ...]:
        """Return the work for the request, by tier."""
        return self.stats.work


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ended by an error of ours."""

    request_id: str
    code: str
    """A short stable word, such as engine_died."""
    message: str
    stats: RequestStats | None = None
    """The known work. If the engine died: the part that was reported before."""

    @property
    def work(self) -> tuple[TierWork, ...]:
        """Return the known work for the request, by tier."""
        return () if self.stats is None else self.stats.work


Ending = Finished | Failed
EngineEvent = PrefillDone | TokensEmitted | AnswerHeld | TierSwitched | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Gauges and cumulative counters of one tier. Ratios are in [0, 1].

    Counters without a line of their own are those of `TierWork`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_adapters: int = 0
    adapter_bytes: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Tokens that were left to compute when their sequences started."""
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    """Those of `num_prompt_tokens` that have been computed."""
    num_discarded_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_rows: int = 0
    num_held_newcomers: int = 0
    """Those of `num_waiting` that the queue holds back: one answer more would make others late."""
    num_newcomer_holds: int = 0
    """Such waits that have ended."""
    newcomer_held_s: float = 0.0
    """The time that all such waits took together so far."""

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks that a live sequence holds."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Gauges (the first two and the last) and counters of the folder that keys and values go to."""

    num_extents: int = 0
    """Of this engine's models."""
    num_bytes: int = 0
    """Of all files in the folder."""
    num_restored_tokens: int = 0
    saved_s: float = 0.0
    """Seconds of computing that restored tokens saved, less what reading them took."""
    num_written_bytes: int = 0
    num_read_bytes: int = 0
    num_dropped: int = 0
    """Extents that were not written: evicted before, or no room in memory or in the budget."""
    num_failed: int = 0
    """Extents that the disk did not take or give."""
    num_damaged: int = 0
    """Extents that were not what had been written, and were computed again."""
    bytes_per_s: float = 0.0
    """How fast an extent was read of late; 0 before any was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    """Counters of the keys and values that engines send each other, and a gauge."""

    num_pulled_tokens: int = 0
    """Prompt tokens that came from other engines."""
    num_pulled_bytes: int = 0
    num_sent_bytes: int = 0
    num_late: int = 0
    """Requests whose blocks had not come when computing them would have been over."""
    num_failed: int = 0
    """Requests whose source could not be reached, had nothing, or refused."""
    num_damaged: int = 0
    """Requests that got something else than they had asked for."""
    bytes_per_s: float = 0.0
    """How fast blocks came of late; 0 before any did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinInfo:
    """A prompt that an engine keeps."""

    name: str
    tenant: str
    tier: Tier
    num_tokens: int
    """Those that later requests find: whole blocks."""
    left_s: float
    """Until it is kept no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Prefix-cache counters count tokens."""

    tiers: dict[Tier, TierStats] = field(default_factory=dict)
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_depth: tuple[int, ...] = ()
    """Entry i is depth i + 1."""
    drafted_by_source: dict[Source, tuple[int, ...]] = field(default_factory=dict)
    """Nodes by source and depth. A node that several sources guessed counts for each."""
    accepted_by_source: dict[Source, tuple[int, ...]] = field(default_factory=dict)
    """The same of accepted nodes."""
    num_unratified_tokens: int = 0
    step_host_s: float = 0.0
    """Time of steps beside the models' passes."""
    step_forward_s: float = 0.0
    """Time of steps in the models' passes."""
    num_stretched_steps: int = 0
    """Steps with guesses."""
    stretch_plain_steps: float = 0.0
    """Plain steps that would have taken as long as the stretched ones did."""
    num_not_finite: int = 0
    """Answers that failed by numbers that are not finite."""
    is_unfit: bool = False
    """Two answers in a row failed so."""
    store: StoreStats = StoreStats()
    peers: PeerStats = PeerStats()
    pins: list[PinInfo] = field(default_factory=list)
    """The prompts that are kept by name; those of several engines one behind the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A LoRA adapter that was read."""

    digest: str
    """The digest of its content."""
    num_bytes: int
    """The size of its weights, as they are held here."""
    max_rank: int
    num_modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInfo:
    """A loaded tier. The last six fields describe its prefix cache."""

    tier: Tier
    model_id: str
    """The folder's or the hub's name; with an adapter, the adapter's name."""
    path: str
    """The folder of the checkpoint."""
    max_context: int
    vocab_size: int
    num_parameters: int
    dtype: str
    device: str
    created: int = 0
    """Seconds since 1970 when its weights were written; 0 where it is unknown."""
    fingerprint: str = ""
    """16 hexadecimal digits that change with the checkpoint (engine/model/fingerprint.py). Empty
    where it is unknown."""
    scheme: str = ""
    """The type that its products compute with."""
    deterministic: bool = False
    """An answer's tokens do not depend on other requests, in any precision."""
    numerics: str = ""
    """The fingerprint of its arithmetic (engine/model/numerics.py)."""
    adapter: AdapterRef | None = None
    """Set where this is the tier's model with an adapter."""
    kv_dtype: str = ""
    """As torch names it."""
    block_size: int = 0
    """Tokens; 0 where it is not known."""
    num_blocks: int = 0
    checkpoint_tokens: int = 0
    """Hits end at kept checkpoints, at multiples of this many tokens. 0: at any kept block."""
    kv_fingerprint: str = ""
    """Of its keys and values: engines with the same one may send each other theirs. Empty where
    they cannot be sent."""
    kv_token_bytes: float = 0.0
    """Bytes that a token's keys and values take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The tiers of an engine."""

    tiers: dict[Tier, TierInfo]
    speculation: bool
    """True if anything drafts for the large tier."""
    drafters: tuple[str, ...] = ()
    """The models that draft: "small", the kind of a head ("eagle3", "mtp", "peagle", "dflash"), or
    both. None where text alone drafts."""
    role: EngineRole = "both"
