"""The engine's output: a stream of events for each request.

A stream is: `PrefillDone` once per tier, `TokensEmitted` any number of times, then exactly one of
`Finished` or `Failed`; a resumed answer has no `PrefillDone` for the tokens it begins with.
`TierSwitched` retracts every token emitted so far, unless it says that they
stay. `AnswerHeld` may stand before `Finished`, or before a `TierSwitched`.
"""

from dataclasses import dataclass, field
from typing import Literal

from outrider.engine.request import AdapterRef
from outrider.engine.trace import StepTrace
from outrider.verifier.params import Source, Tier
from outrider.verifier.token_logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """The whole prompt is in the KV cache.

    `hidden_state` is the last prompt token's hidden state after the final norm
    ([hidden_size] floats), given when the request asked for it.
    """

    request_id: str
    tier: Tier
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_s: float
    hidden_state: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensEmitted:
    """Tokens accepted in one step; the first `num_accepted_tokens` of them had been drafted.

    `num_drafted_tokens` counts the nodes that were verified for this sequence in this step.
    `num_predicted_tokens`: of `token_ids`, those that the client's prediction held at this place.
    `num_unratified_tokens`: those that the large model alone would not have chosen (cascade).
    `num_reused_tokens`: those that the retracted answer of the other tier held at this place.
    `logprobs` is empty or as long as `token_ids`. `trace`: for requests that want one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_predicted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_reused_tokens: int = 0
    trace: StepTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHeld:
    """An answer that may escalate has ended; it waits for `keep_on_tier` or `switch_tier`."""

    request_id: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSwitched:
    """The request moved to another tier.

    Tokens emitted before this event are retracted; with `keeps_answer` they stay, and the other
    tier goes on behind them.
    """

    request_id: str
    tier: Tier
    keeps_answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWork:
    """The work of one tier's model for one request, however the request ended.

    `num_prompt_tokens`: the prompt's length if the request ever began on this tier, else 0;
    `num_cached_tokens` of them the prefix cache held when it first began there.
    `num_computed_tokens`: rows of prompts and kept answers that were prefilled, after a pre-emption
    once more. `num_output_tokens` were emitted, `num_discarded_tokens` of them retracted later by a
    change of tier. `num_drafted_tokens`: tree nodes that this tier verified; `num_draft_rows`: rows
    that it computed to guess for the other tier. `num_steps`: passes that emitted.
    `num_queried_tokens` and `num_hit_tokens`: what the prefix cache was asked for and held, at
    every start.

    Summed over all requests, ended or not, they are the counters of `TierStats` and `EngineStats`.
    """

    tier: Tier
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_discarded_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_draft_rows: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """The resources that a request used. Times are seconds; None where it never got so far.

    Tokens are those of the answer that stands, on the tier that wrote it; `work` holds everything
    that was done, by tier. `num_steps` counts target passes that emitted tokens, so
    `mean_emitted_tokens = num_output_tokens / num_steps`.
    """

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_reused_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    work: tuple[TierWork, ...] = ()

    @property
    def mean_emitted_tokens(self) -> float:
        """Tokens per target pass; 0.0 before the first."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """The request ended by an error of ours. `code` is a short stable word, e.g. engine_died.

    `stats`: what is known of the work; where the engine died, that is what was seen of it.
    """

    request_id: str
    code: str
    message: str
    stats: RequestStats | None = None

    @property
    def work(self) -> tuple[TierWork, ...]:
        """Return the known work for the request, by tier."""
        return () if self.stats is None else self.stats.work


Ending = Finished | Failed
EngineEvent = PrefillDone | TokensEmitted | AnswerHeld | TierSwitched | Finished | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Gauges and cumulative counters of one tier. Ratios are in [0, 1].

    `num_prompt_tokens` were to be computed when their sequences started, `num_computed_tokens` have
    been. Of `num_waiting`, the queue holds back `num_held_newcomers` of its own accord: one answer
    more would make others late. `num_newcomer_holds` such waits have ended; all of them have taken
    `newcomer_held_s` so far. The other counters are those of `TierWork`.
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
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_discarded_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_rows: int = 0
    num_held_newcomers: int = 0
    num_newcomer_holds: int = 0
    newcomer_held_s: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks that a live sequence holds."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Prefix-cache counters count tokens; `accepted_per_depth[i]` is depth i + 1.

    `step_forward_s`: the time of steps in the models' passes; `step_host_s`: beside them.
    `num_stretched_steps` with guesses lasted `stretch_plain_steps` plain ones. `num_not_finite`
    answers failed by numbers that are not finite; `is_unfit`: two in a row did.

    `drafted_by_source` and `accepted_by_source` hold the same per source and depth; a node that
    several sources guessed counts for each of them.
    """

    tiers: dict[Tier, TierStats] = field(default_factory=dict)
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_depth: tuple[int, ...] = ()
    drafted_by_source: dict[Source, tuple[int, ...]] = field(default_factory=dict)
    accepted_by_source: dict[Source, tuple[int, ...]] = field(default_factory=dict)
    num_unratified_tokens: int = 0
    step_host_s: float = 0.0
    step_forward_s: float = 0.0
    num_stretched_steps: int = 0
    stretch_plain_steps: float = 0.0
    num_not_finite: int = 0
    is_unfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A LoRA adapter that was read. `digest`: of its content; `num_bytes`: of its weights here."""

    digest: str
    num_bytes: int
    max_rank: int
    num_modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInfo:
    """A loaded tier. `model_id` is the folder's or the hub's name, `path` where it lies.

    `fingerprint`: 16 hexadecimal digits that change with the checkpoint
    (engine/model/fingerprint.py); empty where it is unknown. `scheme`: what its products compute
    with. `deterministic`: an answer's tokens do not depend on other requests, in any precision.
    `numerics`: the fingerprint of its arithmetic (engine/model/numerics.py). `adapter`: where it is
    the tier's model with one, whose name is the `model_id` then.

    Of its prefix cache: `kv_dtype`, as torch names it, `block_size` in tokens (0 where it is not
    known), `num_blocks`, and `checkpoint_tokens`: hits end at kept checkpoints, which lie at
    multiples of so many tokens; 0 where any kept block will do.
    """

    tier: Tier
    model_id: str
    path: str
    max_context: int
    vocab_size: int
    num_parameters: int
    dtype: str
    device: str
    fingerprint: str = ""
    scheme: str = ""
    deterministic: bool = False
    numerics: str = ""
    adapter: AdapterRef | None = None
    kv_dtype: str = ""
    block_size: int = 0
    num_blocks: int = 0
    checkpoint_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The tiers of an engine. `speculation`: whether anything drafts for the large one.

    drafters: the models that do: "small", the kind of a head ("eagle3", "mtp", "peagle", "dflash"),
    or both; none where text alone drafts.
    """

    tiers: dict[Tier, TierInfo]
    speculation: bool
    drafters: tuple[str, ...] = ()
