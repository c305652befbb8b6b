"""Both tiers answer the same questions, and their answers are checked: a router's training data.

The engine is used as the gateway uses it: the same template, tools, stop tokens and speculation, so
that what is learnt is what serving does. A batch is answered by the small tier and then by the
large one, never by both at once, so that each one's seconds are its own.
"""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from outrider.engine.events import (
    EngineEvent,
    EngineInfo,
    Failed,
    Finished,
    PrefillDone,
    TierInfo,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.tool_formats import HERMES
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from outrider.gateway.answering.text.tool_prompt import write_calls
from outrider.gateway.answering.text.tools import plan_tools
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.tools.learning.collect.data import (
    CollectError,
    CollectQuestion,
    LabelFile,
    LabelledRow,
)
from outrider.verifier.params import TIERS, SamplingParams, Tier

_SHOWN_CHARS = 60

JudgeFn = Callable[[str, str | None, str], Awaitable[bool]]
"""A judge: question, what is expected, answer -> whether it is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectPlan:
    """Sampling of the answers. `batch_size`: questions that a tier answers concurrently."""

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectProgress:
    """After a batch: rows in the file, of so many questions; those left out; shares right."""

    num_rows: int
    num_skipped: int
    num_questions: int
    weak_accuracy: float
    strong_accuracy: float


@dataclass(slots=True, kw_only=True)
class TierAnswer:
    """A tier's answer."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Set only if they were requested."""
    hidden_state: tuple[float, ...] | None = None
    """Of the prompt's last token; set only if it was requested."""
    seconds: float = 0.0
    """From submission to the last token."""
    text: str = ""
    """The client's view: with tool calls, without thinking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedQuestion:
    """A question in a tier's tokens. `special_texts`: of tokens that tool calls are written in.

    `reading`: the rules for reading calls, where there may be some.
    """

    request: EngineRequest
    special_texts: Mapping[int, str]
    opens_thinking: bool
    reading: ToolReading | None = None


def pair_of(info: EngineInfo) -> str | None:
    """The fingerprints of the small and the large checkpoint, as router files name them."""
    prints = [info.tiers[tier].fingerprint for tier in TIERS if tier in info.tiers]
    return "-".join(prints) if len(prints) == len(TIERS) and all(prints) else None


class Collector:
    """Asks both tiers and labels what they say."""

    def __init__(
        self,
        engine: EngineClient,
        info: EngineInfo,
        tokenizers: Mapping[Tier, ChatTokenizer],
        plan: CollectPlan,
        ask: JudgeFn | None = None,
    ) -> None:
        """`ask` decides checks of kind judge. Raises CollectError where a tier is not loaded."""
        if any(tier not in info.tiers or tier not in tokenizers for tier in TIERS):
            raise CollectError(
                "collecting compares two models: name both, --small and --large, or neither"
            )
        self.engine = engine
        self._tiers: Mapping[Tier, TierInfo] = info.tiers
        self._tokenizers = tokenizers
        self._plan = plan
        self._ask = ask
        self.pair = pair_of(info)
        self.small_weights = info.tiers["small"].scheme or None

    async def collect(
        self,
        questions: Sequence[CollectQuestion],
        out: LabelFile,
        on_progress: Callable[[CollectProgress], None] = lambda _: None,
    ) -> CollectProgress:
        """Answer and label every question that `out` does not have; returns the last progress.

        Questions that do not fit a model's context are left out. Raises CollectError, EngineError,
        or what the judge raises; rows written until then stay.
        """
        if self._ask is None and any(question.check.kind == "judge" for question in questions):
            raise CollectError(
                "a row is to be checked by a judge: name one with --judge-url and --judge-model"
            )
        missing = out.missing(questions)
        num_skipped = 0
        wanted = {question.digest for question in questions}
        for start in range(0, len(missing), self._plan.batch_size):
            on_progress(_progress(out, wanted, num_skipped))
            batch = missing[start : start + self._plan.batch_size]
            rows = await self._batch(batch)
            out.append(rows)
            num_skipped += len(batch) - len(rows)
        progress = _progress(out, wanted, num_skipped)
        on_progress(progress)
        return progress

    async def _batch(self, questions: Sequence[CollectQuestion]) -> list[LabelledRow]:
        """The rows of those questions that fit both contexts."""
        fitting: list[tuple[CollectQuestion, dict[Tier, TokenizedQuestion]]] = []
        for question in questions:
            tokenized: dict[Tier, TokenizedQuestion] = {}
            for tier in TIERS:
                one = await self.prepare(question, tier)
                if one is not None:
                    tokenized[tier] = one
            if len(tokenized) == len(TIERS):
                fitting.append((question, tokenized))
        answers: dict[Tier, list[TierAnswer]] = {}
        verdicts: dict[Tier, list[bool]] = {}
        for tier in TIERS:
            answers[tier] = await asyncio.gather(
                *(self.answer(tokenized[tier]) for _, tokenized in fitting)
            )
            verdicts[tier] = await asyncio.gather(
                *(
                    self._verdict(question, answer)
                    for (question, _), answer in zip(fitting, answers[tier], strict=True)
                )
            )
        return [
            self._row(
                question,
                tokenized["small"],
                {tier: answers[tier][index] for tier in TIERS},
                {tier: verdicts[tier][index] for tier in TIERS},
            )
            for index, (question, tokenized) in enumerate(fitting)
        ]

    async def prepare(self, question: CollectQuestion, tier: Tier) -> TokenizedQuestion | None:
        """The question as an engine request; None where it does not fit the context.

        Raises CollectError where the model's chat template refuses it.
        """
        tokenizer, plan = self._tokenizers[tier], self._plan
        tools = plan_tools(question.request)
        try:
            prompt = await tokenizer.render_chat(
                question.request.messages, None, tools.tools if tools else ()
            )
        except BadRequestError as error:
            begin = question.prompt[:_SHOWN_CHARS]
            raise CollectError(f"the question that begins {begin!r}: {error}") from error
        room = self._tiers[tier].max_context - len(prompt.token_ids)
        if room < 1:
            return None
        grammar, reading, special_texts = None, None, tokenizer.reasoning.special_texts
        if tools is not None:
            thinking = tokenizer.thinking(prompt)
            grammar = tools.grammar(tokenizer.dialect, tokenizer.reasoning, thinking)
            reading = tools.reading(tokenizer.dialect)
            special_texts |= reading.special_texts
        request = EngineRequest(
            request_id=f"collect-{tier}-{question.digest}",
            prompt_token_ids=prompt.token_ids,
            tier=tier,
            sampling=SamplingParams(
                max_tokens=min(plan.max_tokens, room),
                temperature=plan.temperature,
                seed=(plan.seed + int(question.digest, 16)) % 2**64,
                stop_token_ids=tokenizer.stop_token_ids,
                num_logprobs=0 if tier == "small" else None,
            ),
            # The drafter must not find the prompts that the small tier has just computed.
            cache_salt=f"collect-{tier}",
            return_hidden_state=tier == "small",
            grammar=grammar,
        )
        return TokenizedQuestion(
            request=request,
            special_texts=special_texts,
            opens_thinking=prompt.opens_thinking,
            reading=reading,
        )

    async def answer(self, tokenized: TokenizedQuestion) -> TierAnswer:
        """Return the tier's answer. Raises CollectError or EngineError."""
        answer, tier = TierAnswer(), tokenized.request.tier
        started_s = time.perf_counter()
        # The protocol promises that its iterator can be closed; only generators have a type for it.
        stream = cast(AsyncGenerator[EngineEvent], self.engine.submit(tokenized.request))
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Failed):
                    name = tokenized.request.request_id
                    raise CollectError(f"the {tier} model failed on {name}: {event.message}")
                _take(event, answer)
                if isinstance(event, Finished):
                    answer.seconds = time.perf_counter() - started_s
        answer.text = _text(self._tokenizers[tier], tokenized, answer.token_ids)
        return answer

    async def _verdict(self, question: CollectQuestion, answer: TierAnswer) -> bool:
        check = question.check
        if check.is_right is not None:
            return check.is_right(answer.text)
        assert self._ask is not None
        return await self._ask(question.prompt, check.expected, answer.text)

    def _row(
        self,
        question: CollectQuestion,
        tokenized: TokenizedQuestion,
        answers: Mapping[Tier, TierAnswer],
        verdicts: Mapping[Tier, bool],
    ) -> LabelledRow:
        messages = question.request.messages
        small, large = answers["small"], answers["large"]
        return LabelledRow(
            id=question.digest,
            prompt=question.prompt,
            messages=(
                [message.model_dump(exclude_none=True) for message in messages]
                if len(messages) > 1
                else None
            ),
            weak_correct=int(verdicts["small"]),
            strong_correct=int(verdicts["large"]),
            # Adding 0 makes -0.0 a plain 0.
            weak_logprobs=[round(value, 5) + 0.0 for value in small.logprobs],
            hidden_state=_base64(small.hidden_state),
            prompt_tokens=len(tokenized.request.prompt_token_ids),
            weak_tokens=len(small.token_ids),
            strong_tokens=len(large.token_ids),
            weak_s=round(small.seconds, 4),
            strong_s=round(large.seconds, 4),
            weak_answer=small.text,
            strong_answer=large.text,
            pair=self.pair,
            small_weights=self.small_weights,
            family=question.family,
            difficulty=question.difficulty,
        )


def _take(event: EngineEvent, answer: TierAnswer) -> None:
    if isinstance(event, PrefillDone):
        answer.hidden_state = event.hidden_state
    elif isinstance(event, TokensEmitted):
        answer.token_ids += event.token_ids
        answer.logprobs += [entry.logprob for entry in event.logprobs]


def _text(tokenizer: ChatTokenizer, tokenized: TokenizedQuestion, token_ids: Sequence[int]) -> str:
    """The answer as a client would read it, calls included, thinking left out."""
    detokenizer = tokenizer.detokenizer()
    splitter = tokenizer.splitter(opens_thinking=tokenized.opens_thinking)
    pieces: list[str] = []
    for token_id in token_ids:
        if token_id in tokenizer.stop_token_ids:
            continue
        special_text = tokenized.special_texts.get(token_id)
        text = (
            detokenizer.push(token_id)
            if special_text is None
            else detokenizer.flush() + special_text
        )
        pieces += [part for kind, part in splitter.push(text) if kind == "content"]
    for rest in (splitter.push(detokenizer.flush()), splitter.flush()):
        pieces += [part for kind, part in rest if kind == "content"]
    text = "".join(pieces)
    return text if tokenized.reading is None else _in_hermes(text, tokenized.reading)


def _in_hermes(text: str, reading: ToolReading) -> str:
    """The answer with its calls written the hermes way, as checks read them."""
    if reading.format.name == HERMES.name:
        return text
    parser = ToolParser(reading)
    content: list[str] = []
    calls: list[dict[str, str]] = []
    for piece in [*parser.push(text), *parser.flush()]:
        match piece.kind:
            case "content":
                content.append(piece.text)
            case "call":
                calls.append({"name": piece.text, "arguments": ""})
            case "arguments":
                calls[-1]["arguments"] += piece.text
    return "".join([*content, write_calls(calls, HERMES)])


def _base64(hidden_state: Sequence[float] | None) -> str | None:
    if hidden_state is None:
        return None
    return base64.b64encode(np.asarray(hidden_state, dtype="<f4").tobytes()).decode("ascii")


def _progress(out: LabelFile, wanted: set[str], num_skipped: int) -> CollectProgress:
    labels = [both for digest, both in out.labels.items() if digest in wanted]
    number = max(len(labels), 1)
    return CollectProgress(
        num_rows=len(labels),
        num_skipped=num_skipped,
        num_questions=len(wanted),
        weak_accuracy=sum(weak for weak, _ in labels) / number,
        strong_accuracy=sum(strong for _, strong in labels) / number,
    )
