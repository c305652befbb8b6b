"""An API request, ready for the engine: what to generate, how to read it, and its watch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.request import EngineRequest, Tier
from gateway.answers.responder import EscalateFn
from gateway.metering.local_work import LocalWork
from gateway.metering.token_allowance import TokenAllowance
from gateway.text.chat import ChatTokenizer
from gateway.text.tool_parser import ToolReading
from router.cascade import CascadePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePlan:
    """One choice to generate. `opens_thinking`: its prompt ends inside a thinking block.

    `escalated`: where the large tier has another tokenizer, the same choice for that one, under
    another `request_id`; None where the sequence itself can move to the large tier.
    """

    request: EngineRequest
    opens_thinking: bool = False
    escalated: EngineRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EscalationTarget:
    """The tier that takes a weak answer over, and how its answer is read (see `Job`).

    With the same tokenizer `tokenizer` and `tools` are the job's own. `opens_thinking`: the prompt
    ends inside a thinking block, as this tier's template writes it.
    """

    model_id: str
    tokenizer: ChatTokenizer
    tier: Tier = "large"
    tools: ToolReading | None = None
    opens_thinking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A choice that ended by itself, for the parts that learn from answers.

    `text` is the content without thinking and calls; `calls` are (name, arguments) in order.
    `confidence` is the watch's last one, None without a watch. `num_retracted_tokens` of the small
    model were not delivered; the large answer had `num_reused_tokens` of them at the same places.
    """

    tier: Tier
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    escalated: bool = False
    confidence: float | None = None
    num_tokens: int = 0
    num_retracted_tokens: int = 0
    num_reused_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An API request, ready for the engine: what to generate and how to read it.

    `tier` and `model_id` are where it begins. `num_prompt_tokens` counts each prompt once. `seed`
    is the one reported. `arrival_s` is on the gateway's clock. `splits_thinking`: thinking is told
    from the answer (chat). `tools`: how calls are told from it, where there may be some.
    `grammar_param`: the field that asked for a grammar. `quality`: how safe the router judged the
    small answer to be. `cascade` (then `escalation` or `take_over` too): the watch of the small
    answers; their requests say `may_escalate` and ask for log-probabilities. `take_over`: weak
    answers go to an upstream tier; there is one choice then. `on_prefill` is called with the
    seconds that a choice queued, `on_answer` once for each choice that ended by itself; they must
    not block. is_bounded: the client has set the answer's length. `credit`: the tokens that its
    tenant has left for it, None where they are not counted. `work` is told what the engine did.
    `service_tier`: the one named in the response, where the request named one; `arm`: the same of
    experiments.

    Raises ValueError for a cascade without a tier to escalate to.
    """

    job_id: str
    created: int
    model_id: str
    tier: Tier
    reason: str
    seed: int | None
    arrival_s: float
    num_prompt_tokens: int
    choices: tuple[ChoicePlan, ...]
    tokenizer: ChatTokenizer
    stops: tuple[str, ...] = ()
    splits_thinking: bool = False
    tools: ToolReading | None = None
    grammar_param: str | None = None
    quality: float | None = None
    cascade: CascadePlan | None = None
    escalation: EscalationTarget | None = None
    take_over: EscalateFn | None = None
    on_prefill: Callable[[float], None] | None = None
    on_answer: Callable[[Answer], None] | None = None
    is_bounded: bool = False
    service_tier: str | None = None
    arm: str = ""
    credit: TokenAllowance | None = None
    work: LocalWork | None = None

    def traced(self) -> "Job":
        """Return the same job with the engine telling where each token came from."""
        return replace(self, choices=tuple(map(_traced, self.choices)))

    def __post_init__(self) -> None:
        if self.cascade is not None and self.escalation is None and self.take_over is None:
            raise ValueError("a job with a cascade needs an escalation target")


def _traced(plan: ChoicePlan) -> ChoicePlan:
    escalated = None if plan.escalated is None else replace(plan.escalated, traces=True)
    return replace(plan, request=replace(plan.request, traces=True), escalated=escalated)
