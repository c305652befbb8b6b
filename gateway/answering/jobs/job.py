"""A job: an API request, ready for the engine. Its engine requests, how to read them, the watch."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from outrider.engine.request import (
    EngineRequest,
)
from outrider.gateway.answering.jobs.extras import (
    NO_EXTRAS,
    Extras,
)
from outrider.gateway.answering.jobs.receipt_terms import ReceiptTerms
from outrider.gateway.answering.jobs.second_looks import SecondLooks
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.tool_parser import ToolReading
from outrider.gateway.contract.answers.responder import StrongTier
from outrider.gateway.contract.schema.kinds import Endpoint, ReasoningField
from outrider.gateway.contract.schema.responses import ReportedServiceTier
from outrider.gateway.tenancy.metering.local_work import LocalWork
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance
from outrider.router.watch import WatchPlan
from outrider.verifier.params import Tier


class ChoicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One choice to generate."""

    request: EngineRequest
    opens_thinking: bool = False
    """Its prompt ends inside a thinking block."""
    prompt_text: str = ""
    """The text that it begins with, where it echoes its prompt."""
    escalated: EngineRequest | None = None
    """Where the large tier has another tokenizer, the same choice for that one, under another
    `request_id`. None where the sequence itself can move to the large tier."""


class EscalationTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The tier that takes a weak answer over, and how its answer is read (see `Job`)."""

    model_id: str
    tokenizer: ChatTokenizer
    """The job's own where it is the same."""
    tier: Tier = "large"
    tools: ToolReading | None = None
    """The job's own where the tokenizer is."""
    opens_thinking: bool = False
    """The prompt ends inside a thinking block, as this tier's template writes it."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that ended by itself, for the parts that learn from answers."""

    tier: Tier
    text: str
    """Content without thinking and calls."""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments), in order."""
    escalated: bool = False
    confidence: float | None = None
    """The watch's last one; None without a watch."""
    num_tokens: int = 0
    num_retracted_tokens: int = 0
    """Tokens of the small model that were not delivered."""
    num_reused_tokens: int = 0
    """Those of them that the large answer had at the same places."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """An API request, ready for the engine: what to generate and how to read it."""

    job_id: str
    created: int
    """Seconds since 1970, for the response."""
    model_id: str
    """The checkpoint that it begins on."""
    tier: Tier
    """The tier that it begins on."""
    reason: str
    """Why that tier, in one line."""
    seed: int | None
    """The one that is reported."""
    arrival_s: float
    """On the gateway's clock."""
    num_prompt_tokens: int
    """Each prompt counts once, however many choices it has."""
    choices: tuple[ChoicePlan, ...]
    tokenizer: ChatTokenizer
    endpoint: Endpoint = "chat"
    """Gives the response its form."""
    num_top_logprobs: int | None = None
    """Alternatives to write beside each token; None: no log-probabilities at all."""
    extras: Extras = NO_EXTRAS
    receipt: ReceiptTerms | None = None
    """What a receipt says beside the tokens, where the request asked for one."""
    stops: tuple[str, ...] = ()
    continues_text: bool = False
    """The answer goes on with the prompt's own text, so no thinking begins it."""
    tools: ToolReading | None = None
    """The rules for reading calls, where there may be some."""
    reasoning_field: ReasoningField = "reasoning_content"
    names_functions: bool = False
    """Its tools are `functions`, so a call is written as `function_call`."""
    grammar_param: str | None = None
    """The field that brought a grammar."""
    schema: AnswerSchema | None = None
    """The JSON schema that a whole answer has to conform to."""
    second_looks: SecondLooks | None = None
    """Has the large model judge the small one's answer, though it may be kept."""
    quality: float | None = None
    """The predicted quality of the small answer; None if the router did not judge."""
    watch: WatchPlan | None = None
    """The watch of the small answers. Their requests say `may_escalate` and have log-probabilities.

    With it goes one of `escalation` and `strong_tier`."""
    escalation: EscalationTarget | None = None
    strong_tier: StrongTier | None = None
    """An upstream tier in the large model's part; there is one choice then."""
    on_prefill: Callable[[float], None] | None = None
    """Called with the seconds that a choice queued; must not block."""
    on_answer: Callable[[Answer], None] | None = None
    """Called once for each choice that ended by itself; must not block."""
    is_bounded: bool = False
    """The client has set the answer's length."""
    service_tier: ReportedServiceTier | None = None
    """The one named in the response, where the request named one."""
    arm: str = ""
    """The arms of experiments, as text."""
    allowance: TokenAllowance | None = None
    """The tokens that its tenant has left for it; None where they are not counted."""
    work: LocalWork | None = None
    """Receives the engine's account of what it did."""

    def traced(self) -> "Job":
        """Return the same job with the engine telling where each token came from."""
        return msgspec.structs.replace(self, choices=tuple(map(_traced, self.choices)))


def _traced(plan: ChoicePlan) -> ChoicePlan:
    escalated = None if plan.escalated is None else replace(plan.escalated, traces=True)
    request = replace(plan.request, traces=True)
    return msgspec.structs.replace(plan, request=request, escalated=escalated)
