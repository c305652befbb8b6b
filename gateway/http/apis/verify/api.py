"""POST /v1/verify as a surface over chat and completions, whose model judges the answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import msgspec

from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.tool_parser import ToolReading
from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.receipts import Receipt
from outrider.gateway.http.apis.api import ANYONE, Caller, TranslatedRequest
from outrider.gateway.http.apis.reading import read_body
from outrider.gateway.http.apis.verify.claim import Claim, claim_of, judged_by
from outrider.gateway.http.apis.verify.given import (
    GivenAnswer,
    opens,
    read_answer,
    read_receipt,
    receipt_choice,
)
from outrider.gateway.http.apis.verify.schema import VerifyRequest
from outrider.gateway.http.apis.verify.writer import VerifyWriter, notes_of
from outrider.gateway.http.apis.verify.written_answer import read_tokens, spellings, tool_reading
from outrider.gateway.receipts.signing_keys import SigningKeys

_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
_CHARS_PER_TOKEN: Final = 4
_MOST_MARK_TOKENS: Final = 32
"""No spelling of the marks around thinking takes more; a text that is farther off was edited."""
_PASSED_ON: Final = (
    *("messages", *_TOOLS),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "regex", "ebnf", "json_schema", "grammar", "chat_template_kwargs"),
    *("reasoning_effort", "thinking_token_budget", "continue_final_message"),
    *("add_generation_prompt", "prompt", "suffix", "input_extra"),
)
"""The fields of a request that decide its prompt, and what its answer may say."""
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyApi:
    """/v1/verify. Keeps nothing between requests."""

    jobs: JobBuilder
    keys: SigningKeys
    wall_clock: Callable[[], float]
    ignores_unknown: bool = False
    name: ClassVar[str] = "verify"

    async def read(self, body: bytes, caller: Caller = ANYONE) -> TranslatedRequest:
        """Translate a request into the judgement of its answer. Raises BadRequestError."""
        read = await read_body(VerifyRequest, body, ignores_unknown=self.ignores_unknown)
        request = read.request
        answer = read_answer(request.answer, request.index)
        receipt = read_receipt(answer, self.keys)
        claim = claim_of(answer, receipt, request.request, self.jobs.sampling_defaults)
        claim = judged_by(claim, request.model)
        token_ids = answer.token_ids or await self._retokenised(answer, receipt, claim, caller)
        retokenised = answer.token_ids is None
        tokenizer = self._tokenizer(claim)
        is_edited = (
            tokenizer is not None
            and not retokenised
            and not await self._is_of_tokens(answer, token_ids, tokenizer, request.request, caller)
        )
        named = claim.variants(request.hypotheses or [])
        fields = _prompt_fields(answer, claim, request.request)
        return TranslatedRequest(
            chat_body=_encode(
                {
                    **fields,
                    "model": claim.model,
                    "max_tokens": 0,
                    "temperature": 0,
                    "return_token_ids": True,
                    "outrider": {
                        "policy": "local_only",
                        **_privacy(request.request),
                        "judge": {
                            "token_ids": token_ids,
                            "hypotheses": [hypothesis for _, hypothesis in named],
                        },
                    },
                }
            ),
            writer=VerifyWriter(
                index=request.index,
                token_ids=token_ids,
                names=tuple(name for name, _ in named),
                receipt=receipt,
                retokenised=retokenised,
                notes=notes_of(receipt, retokenised, self.wall_clock(), is_edited=is_edited),
                is_edited=is_edited,
            ),
            ignored=read.ignored,
            endpoint="chat" if "messages" in fields else "completion",
        )

    def problem_body(self, problem: Problem) -> bytes:
        """The JSON of an error."""
        return problem.body()

    async def _is_of_tokens(
        self,
        answer: GivenAnswer,
        token_ids: tuple[int, ...],
        tokenizer: ChatTokenizer,
        request: Mapping[str, Any] | None,
        caller: Caller,
    ) -> bool:
        """Return whether text, thinking and calls are what the tokens are read as.

        Raises BadRequestError.
        """
        reading = await self._tool_reading(request, tokenizer)
        info = await self.jobs.models.engine_info()
        most = max((tier.max_context for tier in info.tiers.values()), default=0)
        # The model refuses what is longer than its context.
        has_more = reading is not None or tokenizer.may_think or bool(answer.thinking)
        if answer.message is None or not has_more or len(token_ids) > most:
            return answer.is_text_of(token_ids, tokenizer.decode)
        work = self.jobs.prompt_work(caller.principal.tenant)
        readings = await work.run(
            len(token_ids) * _CHARS_PER_TOKEN,
            partial(read_tokens, token_ids, tokenizer, reading, answer.prompt_token_ids),
        )
        return any(read.agrees_with(answer) for read in readings)

    async def _tool_reading(
        self, request: Mapping[str, Any] | None, tokenizer: ChatTokenizer
    ) -> ToolReading | None:
        """Return how a request's calls are read; None without tools. Raises BadRequestError."""
        fields = {name: request[name] for name in _TOOLS if request and request.get(name)}
        if not fields:
            return None
        body = _encode({"messages": [{"role": "user", "content": ""}], **fields})
        read = await read_body(ChatRequest, body, ignores_unknown=self.ignores_unknown)
        return tool_reading(read.request, tokenizer)

    def _tokenizer(self, claim: Claim) -> ChatTokenizer | None:
        """Return the tokenizer of the model that judges; None where no model is loaded."""
        known = dict(self.jobs.tokenizers)
        tier = claim.hypothesis["tier"]
        return known[tier] if tier in known else next(iter(known.values()), None)

    async def _retokenised(
        self, answer: GivenAnswer, receipt: Receipt | None, claim: Claim, caller: Caller
    ) -> tuple[int, ...]:
        """Return the tokens of an answer's text, with the one that ended it where that is known."""
        tokenizer = self._tokenizer(claim)
        if tokenizer is None:
            raise BadRequestError("answer: no model is loaded here to verify it.", param="answer")
        work = self.jobs.prompt_work(caller.principal.tenant)
        likeliest: tuple[int, ...] = ()
        for text in spellings(answer, tokenizer.reasoning.format):
            ids = await tokenizer.encode_answer(text, len(text.encode()), work)
            likeliest = likeliest or ids
            if receipt is None:
                break
            for end in ((), *((stop,) for stop in tokenizer.stop_token_ids)):
                if opens(receipt, answer.index, "answer", (*ids, *end)):
                    return (*ids, *end)
            _, choice = receipt_choice(receipt, answer.index)
            if abs(len(ids) - choice.answer.num_tokens) > _MOST_MARK_TOKENS:
                break
        return likeliest


def _prompt_fields(
    answer: GivenAnswer, claim: Claim, request: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields that name the prompt. Raises BadRequestError where nothing does."""
    prompt = answer.prompt_token_ids
    if prompt is not None and (claim.needs_request is None or request is None):
        if claim.needs_request is not None:
            raise BadRequestError(
                f"request: needed, since the answer was written under its {claim.needs_request}.",
                param="request",
            )
        return {"prompt": prompt}
    if request is None:
        raise BadRequestError(
            "request: needed, since the answer has no prompt_token_ids.", param="request"
        )
    return {name: request[name] for name in _PASSED_ON if request.get(name) is not None}


def _privacy(request: Mapping[str, Any] | None) -> dict[str, str]:
    options = None if request is None else request.get("outrider")
    is_private = isinstance(options, dict) and options.get("privacy") == "private"
    return {"privacy": "private"} if is_private else {}
