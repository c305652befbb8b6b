"""One choice's stream of text from the engine's events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from outrider.engine.errors import CrashSuspectError, EngineDiedError, InvalidAdapterError
from outrider.engine.events import (
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.jobs.job import Answer, Job
from outrider.gateway.answering.streaming.choice import Choice
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.contract.errors.tree import (
    AdapterUnavailableError,
    BadRequestError,
    EngineLostError,
    EngineLostTwiceError,
    GatewayError,
    GenerationError,
    RequestFailedError,
)
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.tenancy.metering.token_allowance import within_allowance
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WatchUsage:
    """The result of watching one choice; `confidence` and `reason` are None without a watch."""

    num_held_tokens: int = 0
    """Tokens that waited for the decision."""
    num_retracted_tokens: int = 0
    """Tokens of the small model that were given up for the large tier's answer."""
    escalated: bool = False
    confidence: float | None = None
    reason: str | None = None


class ChoiceStream:
    """One choice that no watch holds back (see `WatchedStream`). Use `steps` once."""

    def __init__(
        self,
        index: int,
        job: Job,
        engine: EngineClient,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        plan = job.choices[index]
        self.choice = Choice(index, job, opens_thinking=plan.opens_thinking)
        self.tier: Tier = job.tier
        self.watch = WatchUsage()
        self.left_out: tuple[str, ...] = ()
        """Keywords of lenient schemas that the grammar leaves out, as `place#pointer`."""
        self.is_degraded = False
        """True if an upstream tier should have answered, and could not."""
        self._job = job
        self._request = plan.request
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._last_token_s: float | None = None
        self._readers: list[EventReader] = []
        self._record = _AnswerRecord() if job.on_answer or job.schema else None

    async def steps(self) -> AsyncGenerator[Sequence[Delta]]:
        """Yield the text as it may be sent, that of one step together. Closing this aborts what
        still runs.

        Raises the engine's refusal, EngineLostError or GenerationError (also for an answer that
        does not conform to its schema), and AnswerEscalated where an upstream tier answers in its
        place.
        """
        try:
            ready = await self._begin()
            while self.choice.finish_reason is None:
                if ready:
                    yield ready
                    if self._record is not None:
                        self._record.add(ready)
                ready = await self._next_deltas()
        finally:
            await self._close()
        # Only now: after a stop string the sequence is aborted before the client is waited for.
        if self._record is not None:
            self._record.add(ready)
            self._check_form(self._record, ready)
            self._report_answer(self._record)
        if ready:
            yield ready

    @property
    def written(self) -> tuple[tuple[Tier, int], ...]:
        """The number of tokens, of the choice as it stands, that each tier has written."""
        return ((self.tier, self.choice.usage.num_tokens),)

    async def _begin(self) -> list[Delta]:
        """Open the engine's stream; return the deltas that may be sent at once."""
        self._reader = self._open(self._request)
        return []

    def _open(self, request: EngineRequest) -> "EventReader":
        """Return the reader of a request's events, which `_close` closes."""
        job = self._job
        on_end = None
        if job.work is not None:
            on_end = job.work.follow(request.request_id, request.arrival_s)
        # The protocol promises that its iterator can be closed; only generators have a type for it.
        stream = cast(AsyncGenerator[EngineEvent], self._engine.submit(request, on_end))
        if job.allowance is not None:
            stream = within_allowance(stream, job.allowance, request.tier)
        self._readers.append(reader := EventReader(stream))
        return reader

    async def _close(self) -> None:
        """Close what was opened, the last one first, whatever becomes of it."""
        if self._readers:
            reader = self._readers.pop()
            try:
                await reader.aclose()
            finally:
                await self._close()

    async def _next_deltas(self) -> list[Delta]:
        """Return the deltas of the next event, which may be sent at once."""
        return self._answer_with(await self._reader.next())

    def _answer_with(self, event: EngineEvent) -> list[Delta]:
        """Receive an event as `_receive` does, for text that is sent at once."""
        if isinstance(event, TokensEmitted):
            self._observe(len(event.token_ids))
            return self._add_tokens(event)
        return self._receive(event)

    def _receive(self, event: EngineEvent) -> list[Delta]:
        """Return the deltas of an event. Raises GatewayError where it is an error of ours."""
        choice = self.choice
        match event:
            case TokensEmitted():
                return self._add_tokens(event)
            case PrefillDone():
                return self._note_prefill(event)
            case Finished(finish_reason="stop" | "length" as reason):
                return choice.end(reason) if choice.finish_reason is None else []
            case Failed():
                raise _failure(event, self._job)
            case TierSwitched():
                # The switch was not requested, so text may be out that cannot be taken back.
                raise GenerationError("The answer moved to another tier.", code="tier_switched")
            case _:
                raise GenerationError("The engine aborted the request.", code="aborted")

    def _note_prefill(self, event: PrefillDone) -> list[Delta]:
        """Note the cost of the prompt; return what is said of it."""
        self.left_out = event.left_out
        usage = self.choice.usage
        usage.queue_s = event.queue_s if usage.queue_s is None else usage.queue_s
        usage.num_cached_tokens = event.num_cached_tokens
        usage.num_restored_tokens = event.num_restored_tokens
        usage.num_pulled_tokens = event.num_pulled_tokens
        if self._job.on_prefill is not None:
            self._job.on_prefill(event.queue_s)
        self.choice.numerics = event.numerics
        return self.choice.begin(event) if self._job.extras.has_prompt else []

    def _add_tokens(self, event: TokensEmitted) -> list[Delta]:
        return self.choice.add_tokens(event)

    def _observe(self, num_tokens: int) -> None:
        """Record the time of the first token that the client may have, then the gap per token."""
        now_s = self._clock()
        metrics = self._metrics.of_tier(self.tier)
        usage = self.choice.usage
        if usage.first_token_s is None:
            usage.first_token_s = now_s
            metrics.time_to_first_token.observe(now_s - self._job.arrival_s)
        elif num_tokens and self._last_token_s is not None:
            metrics.inter_token_latency.observe((now_s - self._last_token_s) / num_tokens)
        self._last_token_s = usage.last_token_s = now_s

    def _check_form(self, record: "_AnswerRecord", last: Sequence[Delta]) -> None:
        """Raise GenerationError for an answer that ends by itself and does not conform."""
        schema, is_cut = self._job.schema, any(delta.stop is not None for delta in last)
        if schema is None or is_cut or self.choice.finish_reason == "length":
            return
        verdict = schema.enforced(self.left_out).verdict("".join(record.text), record.whole_calls)
        self._metrics.structured_answers.labels(verdict).inc()
        if verdict == "differs":
            param = self._job.grammar_param
            logger.error("answer does not conform job_id=%s param=%s", self._job.job_id, param)
            raise GenerationError(
                f"The answer does not conform to the schema in {param}, which is a fault of the "
                "server; try again, or simplify the schema.",
                code="schema_mismatch",
            )

    def _report_answer(self, record: "_AnswerRecord") -> None:
        """Report the whole answer."""
        if self._job.on_answer is None:
            return
        usage = self.choice.usage
        self._job.on_answer(
            Answer(
                tier=self.tier,
                text="".join(record.text),
                calls=record.whole_calls,
                escalated=self.watch.escalated,
                confidence=self.watch.confidence,
                num_tokens=usage.num_tokens,
                num_retracted_tokens=self.watch.num_retracted_tokens,
                num_reused_tokens=usage.num_reused_tokens,
            )
        )


class _AnswerRecord:
    """Rebuilds an answer's content and calls from its deltas."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: list[tuple[str, list[str]]] = []

    @property
    def whole_calls(self) -> tuple[tuple[str, str], ...]:
        """(name, arguments) in order."""
        return tuple((name, "".join(parts)) for name, parts in self.calls)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            match delta.kind:
                case "content":
                    self.text.append(delta.text)
                case "call":
                    self.calls.append((delta.text, []))
                case "arguments":
                    self.calls[-1][1].append(delta.text)


def _failure(event: Failed, job: Job) -> GatewayError:
    """Return the error that the client gets for an answer that failed."""
    match event.code:
        case EngineDiedError.code:
            return EngineLostError(event.message, code=event.code)
        case CrashSuspectError.code:
            return EngineLostTwiceError(event.message, code=event.code)
        case InvalidAdapterError.code:
            return AdapterUnavailableError(event.message, code="adapter_unavailable")
        case "request_failed":
            return RequestFailedError(event.message, code=event.code)
        case "invalid_grammar":
            param = job.grammar_param
            message = f"{param or 'grammar'}: {event.message.rstrip('.')}."
            return BadRequestError(message, param=param, code=event.code)
        case _:
            return GenerationError(event.message, code=event.code)


class EventReader:
    """Reads one request's events. Closing it closes the stream, which aborts what still runs.

    Cancelling `anext` of a generator ends the generator; so a read that runs out of time goes on
    in a task, and the next read waits for it.
    """

    def __init__(self, stream: AsyncGenerator[EngineEvent]) -> None:
        self._stream = stream
        self._pending: asyncio.Task[EngineEvent | None] | None = None

    async def next(self) -> EngineEvent:
        """Return the next event.

        Raises the engine's refusal, and EngineLostError where the stream ends: its reader should
        have stopped at the last event.
        """
        if self._pending is not None:
            await asyncio.wait((self._pending,))
            return self._take(self._pending)
        try:
            return await anext(self._stream)  # for each token: no detour
        except StopAsyncIteration:
            raise _broken_off() from None

    async def next_within(self, timeout_s: float | None) -> EngineEvent | None:
        """Return the next event; None if it did not come in time (a limit of None is none)."""
        if timeout_s is None:
            return await self.next()
        if self._pending is None:
            self._pending = asyncio.create_task(self._pull())
        await asyncio.wait((self._pending,), timeout=timeout_s)
        return self._take(self._pending) if self._pending.done() else None

    async def aclose(self) -> None:
        """Close the stream; a second time does nothing."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.cancel()
            await asyncio.wait((pending,))
            if not pending.cancelled():
                pending.exception()  # retrieved: nothing reads any more
        await self._stream.aclose()

    async def _pull(self) -> EngineEvent | None:
        return await anext(self._stream, None)

    def _take(self, pending: "asyncio.Task[EngineEvent | None]") -> EngineEvent:
        self._pending = None
        event = pending.result()
        if event is None:
            raise _broken_off()
        return event


def _broken_off() -> EngineLostError:
    return EngineLostError("The engine's answer broke off.", code="engine_died")
