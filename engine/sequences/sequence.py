"""One sequence on its way through the engine."""

import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.engine.cache.kv_view import KVView
from outrider.engine.events import FinishReason, RequestStats, TokensEmitted
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.work_counts import WorkCounts
from outrider.verifier.params import TIERS, CascadeParams, SamplingParams, Tier
from outrider.verifier.token_logprobs import PromptLogprobs

if TYPE_CHECKING:  # they load torch, which the queue does without
    from outrider.engine.grammar.grammar import GrammarState
    from outrider.kernels.layers.lora import LoraWeights
    from outrider.verifier.logit_rules import LogitRule
    from outrider.verifier.noise import SequenceNoise
    from outrider.verifier.text_judge import TextJudge

_arrival_numbers = itertools.count()

# (token id, chance) of the likeliest tokens at one place, the one that was written among them.
Rivals = list[tuple[int, float]]


class SequenceStatus(enum.Enum):
    """The stages of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A request's tokens and its hold on a KV cache.

    While it decodes, every token but the last is computed: `view.num_computed_tokens ==
    len(token_ids) - 1`. A prefill computes the last one too, and its logits choose the next. A
    cascade also needs the small model's logits, so it leaves the last token to a decode. A held
    sequence has ended and computes nothing; its view may be taken away.
    """

    request: EngineRequest
    tier: Tier
    view: KVView
    noise: "SequenceNoise"
    submitted_s: float
    token_ids: list[int]
    rules: "list[LogitRule]" = field(default_factory=list)
    """Changes of the logits before a token is chosen: penalties, biases, a grammar, a budget."""
    grammar: "GrammarState | None" = None
    """One of the rules, where the answer must conform to a grammar."""
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    proposal_token_ids: list[int] = field(default_factory=list)
    """An earlier answer, offered as a draft: what a switch from the other tier leaves behind."""
    proposal_rivals: list[Rivals] = field(default_factory=list)
    """That tier's likeliest tokens at each of the proposal's places, if they were kept."""
    rivals: list[Rivals] = field(default_factory=list)
    """The same of the answer that is being written, for the large tier."""
    large_noise: "SequenceNoise | None" = None
    """The large tier's own noise, by which `rivals` are found."""
    held_reason: FinishReason | None = None
    """Why a watched answer ended that waits for `keep_on_tier` or a change of tier."""
    stays_on_tier: bool = False
    failure: Exception | None = None
    """What broke while its rules, its grammar or its guesses were followed. Nothing is emitted
    then."""
    prefill_was_reported: bool = False
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Those of the prompt that this tier has computed so far; a pre-emption does not lose them."""
    judge: "TextJudge | None" = None
    """Judges the prompt's end, where the request is a verification."""
    was_restored: bool = False
    """Whether what a disk has of its texts was asked for, since it last held blocks."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int | None = None
    """Those in the prefix cache when it first started on its tier."""
    num_restored_tokens: int = 0
    """Those of its tier's that were read from a disk for it."""
    num_pulled_tokens: int = 0
    """Those of its tier's that came from another engine for it."""
    num_resumed_tokens: int = 0
    """Tokens of the answer that came from another engine."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_reused_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    work: dict[Tier, WorkCounts] = field(default_factory=dict)
    """Counts of every tier that worked for it, whether the work was kept or not."""
    adapters: "dict[Tier, LoraWeights]" = field(default_factory=dict)
    """Its adapters, from when they are there until it ends."""
    arrival_number: int = field(default_factory=lambda: next(_arrival_numbers))
    # The request's own, which every step asks for many times.
    request_id: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    """The parameters by which the request's tokens are chosen."""
    num_prompt_tokens: int = field(init=False)
    """Tokens that came with the request."""

    def __post_init__(self) -> None:
        """Take what every step asks for from the request."""
        self.request_id, self.sampling = self.request.request_id, self.request.sampling
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens emitted so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Count how many tokens were emitted."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_own_tokens(self) -> int:
        """Count how many tokens of the answer this engine has emitted."""
        return self.num_output_tokens - self.num_resumed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Count how many tokens may still be emitted."""
        return self.sampling.max_tokens - len(self.token_ids) + self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 while decoding."""
        return len(self.token_ids) - self.view.num_computed_tokens

    @property
    def cascade(self) -> CascadeParams | None:
        """The request's cascade; None on the small tier."""
        return self.request.cascade if self.tier == "large" else None

    @property
    def is_watched(self) -> bool:
        """True if this small answer may still change its tier."""
        return self.request.may_escalate and self.tier == "small" and not self.stays_on_tier

    @property
    def wants_tree(self) -> bool:
        """True if the drafter is asked; for a cascade also where nothing may be drafted."""
        return self.request.speculation.enabled or self.cascade is not None

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that are prefilled before decoding begins, or begins again."""
        return self.num_uncomputed_tokens - (self.cascade is not None)

    @property
    def num_given_tokens(self) -> int:
        """Tokens of the prompt in front of those that are judged; all where none are."""
        verification = self.request.verification
        return self.num_prompt_tokens - (0 if verification is None else verification.num_tokens)

    @property
    def num_scored_rows(self) -> int:
        """Rows from the text's first on whose scores are known, or not wanted.

        A score is a log-probability of the token behind the row, or its judgement.
        """
        if self.judge is None:
            return len(self.prompt_logprobs)
        return self.num_given_tokens - 1 + self.judge.num_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Tokens of the prompt whose scores are wanted, and not known yet.

        Rows that give one choose no token of the answer, so the prompt's last token waits for a
        pass of its own.
        """
        is_wanted = self.sampling.num_prompt_logprobs is not None or self.judge is not None
        if not is_wanted or self.prefill_was_reported:
            return 0
        return self.num_prompt_tokens - 1 - self.num_scored_rows

    @property
    def cacheable_token_ids(self) -> list[int]:
        """The tokens whose prefix may be taken from the cache, which has no scores."""
        if not self.num_unscored_tokens:
            return self.token_ids
        return self.token_ids[: self.num_scored_rows + 1]

    @property
    def is_decoding(self) -> bool:
        """True if only the last token is uncomputed and an answer has begun, or may begin so."""
        num_tokens = len(self.token_ids)  # asked for every sequence of every step
        if num_tokens - self.view.num_computed_tokens != 1:
            return False
        return num_tokens > self.num_prompt_tokens or self.cascade is not None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the answer: the request's, and its grammar's."""
        own = self.sampling.stop_token_ids
        return own if self.grammar is None else own + self.grammar.stop_token_ids

    @property
    def arrival_s(self) -> float:
        """Time at which the request reached the gateway (monotonic clock, seconds)."""
        arrival_s = self.request.arrival_s
        return self.submitted_s if arrival_s is None else arrival_s

    @property
    def queue_s(self) -> float | None:
        """Time from arrival until the first tokens were scheduled."""
        if self.first_scheduled_s is None:
            return None
        return max(self.first_scheduled_s - self.arrival_s, 0.0)

    def work_on(self, tier: Tier) -> WorkCounts:
        """The counts of a tier's work for this request."""
        counts = self.work.get(tier)
        if counts is None:
            counts = self.work[tier] = WorkCounts()
        return counts

    def restart_on(self, tier: Tier, noise: "SequenceNoise") -> None:
        """Retract the answer and begin another tier's own, which is counted from zero.

        The large tier gets the retracted one as a proposal.
        """
        is_up = tier == "large"
        self.proposal_token_ids = self.output_token_ids if is_up else []
        self.proposal_rivals = self.rivals if is_up else []
        del self.token_ids[self.num_prompt_tokens :]
        self.continue_on(tier, noise)
        self.prompt_logprobs = []
        self.first_token_s = None
        self.num_resumed_tokens = 0
        self.num_drafted_tokens = self.num_accepted_tokens = self.num_steps = 0
        self.num_unratified_tokens = self.num_reused_tokens = 0

    def continue_on(self, tier: Tier, noise: "SequenceNoise") -> None:
        """Leave the rest of the answer to another tier."""
        self.tier, self.noise = tier, noise
        self.rivals = []
        self.held_reason = None
        self.prefill_was_reported = False
        self.num_cached_tokens = None

    def count(self, event: TokensEmitted) -> None:
        """Add what one step emitted."""
        self.num_steps += 1
        self.num_drafted_tokens += event.num_drafted_tokens
        self.num_accepted_tokens += event.num_accepted_tokens
        self.num_unratified_tokens += event.num_unratified_tokens
        self.num_reused_tokens += event.num_reused_tokens

    def stats(self) -> RequestStats:
        """Return what the request has used until now."""
        first_token_s = self.first_token_s
        return RequestStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_output_tokens=self.num_output_tokens,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_unratified_tokens=self.num_unratified_tokens,
            num_reused_tokens=self.num_reused_tokens,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            queue_s=self.queue_s,
            ttft_s=None if first_token_s is None else max(first_token_s - self.arrival_s, 0.0),
            work=tuple(
                self.work[tier].of_tier(tier, num_prompt_tokens=self.num_prompt_tokens)
                for tier in TIERS
                if tier in self.work
            ),
        )
