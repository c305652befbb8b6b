"""Turns a choice's events into text: detokenising, thinking, tool calls, stops, logprobs."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import groupby

import msgspec

from outrider.engine.events import PrefillDone, TokensEmitted
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.jobs.job import EscalationTarget, Job
from outrider.gateway.answering.streaming.choice_usage import ChoiceUsage
from outrider.gateway.answering.streaming.delta import (
    AnswerKind,
    ApiFinishReason,
    Delta,
    Piece,
    PromptTokens,
)
from outrider.gateway.answering.streaming.trace import DRAFTED, OWN, ChoiceTrace, Mark
from outrider.gateway.answering.text.reasoning_formats import TextKind
from outrider.gateway.answering.text.stopping import StopMatcher
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolPiece
from outrider.verifier.token_logprobs import TokenLogprobs

_Pieces = list[tuple[AnswerKind, str, Mark]]


class _HeldPiece:
    """Text that may still turn out to be the beginning of a stop string."""

    __slots__ = ("mark", "text")

    def __init__(self, text: str, mark: Mark) -> None:
        self.text = text
        self.mark = mark


class Choice:
    """One choice's text so far; takes engine events and returns deltas.

    `target`: the tier whose answer is read, where it is not the one that the job began on.
    """

    def __init__(
        self,
        index: int,
        job: Job,
        *,
        opens_thinking: bool = False,
        target: EscalationTarget | None = None,
    ) -> None:
        plan = job.choices[index]
        request = plan.request
        reader = job if target is None else target
        self.usage = ChoiceUsage(num_prediction_tokens=len(request.prediction_token_ids))
        self.finish_reason: ApiFinishReason | None = None
        self._stop: str | None = None
        self._index = index
        self._request_id = request.request_id
        if target is not None and plan.escalated is not None:
            request = plan.escalated  # its tokens are the other tokenizer's
        sampling = request.sampling
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._tokenizer = None if reader.tokenizer is job.tokenizer else reader.tokenizer
        self.numerics = ""
        self._prompt_ids, self._prompt_text = request.prompt_token_ids, plan.prompt_text
        self._reports_end = job.endpoint == "completion"
        self._unsent_ids: list[int] | None = [] if job.extras.has_token_ids else None
        self._trace = ChoiceTrace(reader.tokenizer) if request.traces else None
        self._last_mark = OWN
        # The answer's tokens in front of its thinking, and up to the last one of it.
        self._first_thought = self._last_thought = 0
        self._most_thinking = (
            sampling.max_tokens if sampling.thinking is None else sampling.thinking.max_tokens
        )
        self._read_as(reader, job, request, opens_thinking=opens_thinking)
        self._held: deque[_HeldPiece] = deque()
        self._num_content = 0
        self._num_released = 0
        self._num_calls = 0
        # The answer is the content and the text of calls. The tool parser holds back all behind
        # `_num_parsed`; in front of that, content may wait for a stop string's end.
        self._num_answer = 0
        self._num_parsed = 0
        # With the position in the answer at which each token's text begins and ends.
        self._logprobs: deque[tuple[int, int, TokenLogprobs]] = deque()

    def _read_as(
        self,
        reader: Job | EscalationTarget,
        job: Job,
        request: EngineRequest,
        *,
        opens_thinking: bool,
    ) -> None:
        """Set what turns tokens into text, thinking and calls, and finds stop strings."""
        tokenizer, continues = reader.tokenizer, job.continues_text
        self._detokenizer = tokenizer.detokenizer(request.prompt_token_ids if continues else ())
        self._splitter = None if continues else tokenizer.splitter(opens_thinking=opens_thinking)
        self._tools = tools = reader.tools
        self._parser = ToolParser(tools) if tools else None
        self._special_texts = {
            **(tokenizer.reasoning.special_texts if self._splitter else {}),
            **(tools.special_texts if tools else {}),
        }
        self._stops = StopMatcher(job.stops) if job.stops else None
        self._marks = self._stop_token_ids | self._special_texts.keys()
        # Nothing but the text itself is told of this answer's tokens, unless they have marks.
        has_more = self._trace is not None or self._unsent_ids is not None
        self._is_plain = not has_more and self._parser is None and self._stops is None

    @property
    def _num_out(self) -> int:
        """Characters of the answer that are released, or were part of what is released."""
        return self._num_parsed - (self._num_content - self._num_released)

    def begin(self, event: PrefillDone) -> list[Delta]:
        """Return what is said of the prompt, once its model has read it."""
        prompt = PromptTokens(
            token_ids=self._prompt_ids,
            logprobs=event.prompt_logprobs,
            judgements=event.judgements,
        )
        return [
            Delta(
                index=self._index,
                kind="prompt",
                text=self._prompt_text,
                prompt=prompt,
                tokenizer=self._tokenizer,
            )
        ]

    def add_tokens(self, event: TokensEmitted) -> list[Delta]:
        """Return the text of one step's tokens. After a stop string, `finish_reason` is set."""
        usage = self.usage
        usage.num_steps += 1
        usage.num_drafted_tokens += event.num_drafted_tokens
        num_before = usage.num_tokens
        if self._trace is not None and event.trace is not None:
            self._trace.note(event.trace)
        if self._is_plain and not event.logprobs and self._are_plain(event.token_ids):
            return self._plain_deltas(event)
        out: _Pieces = []
        for position, token_id in enumerate(event.token_ids):
            drafted = position < event.num_accepted_tokens
            usage.num_tokens += 1
            usage.num_accepted_tokens += drafted
            begin = self._num_answer
            if token_id in self._stop_token_ids:
                # The token that ends an answer has no text, whatever its name. In completions it
                # has its log-probability: harnesses count on one entry for each token.
                if event.logprobs and self._reports_end:
                    self._logprobs.append((begin, begin, event.logprobs[position]))
                continue
            self._last_mark = mark = self._mark(event, position, was_drafted=drafted)
            is_answer = self._add_text(self._text(token_id), mark, out)
            if event.logprobs and is_answer:
                entry = event.logprobs[position]
                self._logprobs.append((begin, self._num_answer, entry))
            if self.finish_reason is not None:
                break
        # A stop string may have cut the step's tokens short.
        num_read = usage.num_tokens - num_before
        if self._unsent_ids is not None:
            self._unsent_ids += event.token_ids[:num_read]
        usage.num_predicted_tokens += min(event.num_predicted_tokens, num_read)
        usage.num_unratified_tokens += min(event.num_unratified_tokens, num_read)
        usage.num_reused_tokens += min(event.num_reused_tokens, num_read)
        return self._deltas(out)

    def _are_plain(self, token_ids: Sequence[int]) -> bool:
        """Return whether tokens are content, and none has a meaning of its own, or may have."""
        if self._splitter is not None:
            if not self._splitter.is_through:
                return False
            self._splitter = None  # all text from here on is content
        return bool(token_ids) and self._marks.isdisjoint(token_ids)

    def _plain_deltas(self, event: TokensEmitted) -> list[Delta]:
        """Return the text of all tokens of a step at once, as every token of most answers can be.

        Nothing counts its characters: no part of it waits, for a stop string or with a token's
        log-probability.
        """
        usage, token_ids, num_drafted = self.usage, event.token_ids, event.num_accepted_tokens
        usage.num_tokens += len(token_ids)
        usage.num_predicted_tokens += event.num_predicted_tokens
        usage.num_unratified_tokens += event.num_unratified_tokens
        usage.num_reused_tokens += event.num_reused_tokens
        pieces: tuple[Piece, ...] = ()
        if num_drafted:
            usage.num_accepted_tokens += min(num_drafted, len(token_ids))
            drafted, token_ids = token_ids[:num_drafted], token_ids[num_drafted:]
            if text := self._detokenizer.push_all(drafted):
                pieces = ((text, True),)
        self._last_mark = OWN if token_ids else DRAFTED
        if own := self._detokenizer.push_all(token_ids):
            pieces += ((own, False),)
        if not pieces:
            return []
        text = pieces[0][0] if len(pieces) == 1 else text + own
        return [Delta(index=self._index, text=text, pieces=pieces, tokenizer=self._tokenizer)]

    def end(self, finish_reason: ApiFinishReason) -> list[Delta]:
        """Release the held text: the engine is done."""
        out: _Pieces = []
        mark = OWN if self._trace is None else replace(self._last_mark, was_drafted=False)
        self._add_text(self._detokenizer.flush(), mark, out)
        if self._splitter and self.finish_reason is None:
            pieces = self._splitter.flush()
            self._add_pieces(pieces, mark, out)
            if any(kind == "reasoning" for kind, _ in pieces):
                self._count_thinking()
        if self._parser and self.finish_reason is None:
            self._add_tool_pieces(self._parser, self._parser.flush(), mark, out)
        if self.finish_reason is None:
            self._release(self._num_content, out)
            self._finish(finish_reason)
        return self._deltas(out)

    def _mark(self, event: TokensEmitted, position: int, *, was_drafted: bool) -> Mark:
        """Mark where a token of a step came from."""
        if self._trace is None or event.trace is None:
            return DRAFTED if was_drafted else OWN
        return self._trace.mark(event.trace, position, was_drafted=was_drafted)

    def _finish(self, reason: ApiFinishReason) -> None:
        """Set the reason; calls that the model chose have one of their own, as at OpenAI."""
        if reason == "stop" and self._tools and not self._tools.is_named and self._num_calls:
            reason = "tool_calls"
        self.finish_reason = reason

    def _text(self, token_id: int) -> str:
        """The text that a token completes; detokenizers leave special tokens out."""
        special_text = self._special_texts.get(token_id)
        if special_text is not None:
            return self._detokenizer.flush() + special_text
        return self._detokenizer.push(token_id)

    def _add_text(self, text: str, mark: Mark, out: _Pieces) -> bool:
        """Add text; return whether its token is of the answer, not of the thinking before it."""
        splitter = self._splitter
        if splitter is None:
            if text:
                self._add_answer(text, mark, out)
            return True
        was_thinking = splitter.is_thinking
        pieces = splitter.push(text)
        self._add_pieces(pieces, mark, out)
        if splitter.is_thinking and not was_thinking:
            # The tag itself may have been several tokens, which looked like an answer until now.
            self._logprobs.clear()
            self._first_thought = self.usage.num_tokens
        if not (splitter.is_thinking or was_thinking):
            return True
        self._last_thought = self.usage.num_tokens - (not splitter.is_thinking)
        if any(kind == "reasoning" for kind, _ in pieces):
            self._count_thinking()
        return False

    def _count_thinking(self) -> None:
        """Count the tokens of thinking up to the last one, without those of the marks around it.

        A token may hold the end of a thought and a part of the mark: the engine's count is right.
        """
        num_tokens = self._last_thought - self._first_thought
        self.usage.num_reasoning_tokens = min(num_tokens, self._most_thinking)

    def _add_pieces(
        self,
        pieces: Iterable[tuple[TextKind, str]],
        mark: Mark,
        out: _Pieces,
    ) -> None:
        for kind, text in pieces:
            if kind == "reasoning":
                out.append((kind, text, mark))
            elif self.finish_reason is None:
                self._add_answer(text, mark, out)

    def _add_answer(self, text: str, mark: Mark, out: _Pieces) -> None:
        """Add content and, where there are tools, calls."""
        self._num_answer += len(text)
        if self._parser is None:
            self._num_parsed = self._num_answer
            self._add_content(text, mark, out)
        else:
            self._add_tool_pieces(self._parser, self._parser.push(text), mark, out)

    def _add_tool_pieces(
        self,
        parser: ToolParser,
        pieces: Iterable[ToolPiece],
        mark: Mark,
        out: _Pieces,
    ) -> None:
        """Add parsed pieces. Stop strings are looked for in content only; none spans a call."""
        for piece in pieces:
            self._num_parsed = piece.end
            if piece.kind == "content":
                self._add_content(piece.text, mark, out)
                if self.finish_reason is not None:
                    return
                continue
            if piece.kind == "call":
                self._num_calls += 1
                self._release(self._num_content, out)
                if self._stops is not None:
                    self._stops.interrupt()
            out.append((piece.kind, piece.text, mark))
        self._num_parsed = parser.num_decided

    def _add_content(self, text: str, mark: Mark, out: _Pieces) -> None:
        """Release the text that cannot belong to a stop string; cut at a stop string."""
        self._num_content += len(text)
        is_too_short = self.usage.num_tokens <= self._min_tokens
        if self._stops is not None and is_too_short:
            self._stops.skip(text)
        if self._stops is None or is_too_short:
            self._num_released = self._num_content
            out.append(("content", text, mark))
            return
        self._held.append(_HeldPiece(text, mark))
        cut = self._stops.push(text)
        if cut is None:
            self._release(self._num_content - self._stops.num_held, out)
        else:
            self._release(cut, out)
            self._stop = self._stops.found
            self._finish("stop")

    def _release(self, end: int, out: _Pieces) -> None:
        """Move held content up to position `end` out, piece by piece."""
        while self._held and self._num_released < end:
            piece = self._held[0]
            text = piece.text[: end - self._num_released]
            out.append(("content", text, piece.mark))
            self._num_released += len(text)
            piece.text = piece.text[len(text) :]
            if not piece.text:
                self._held.popleft()

    def _deltas(self, out: _Pieces) -> list[Delta]:
        """Make the deltas of these pieces, then the finish."""
        deltas: list[Delta] = []
        if self._is_plain and len(out) == 1:  # one piece of text: by far the most steps
            ((kind, text, mark),) = out
            deltas.append(
                Delta(
                    index=self._index,
                    kind=kind,
                    text=text,
                    pieces=((text, mark.was_drafted),),
                    logprobs=self._released_logprobs() if kind != "reasoning" else (),
                    tokenizer=self._tokenizer,
                )
            )
        elif out:
            deltas = self._delta_of_each_run(out)
        if self.finish_reason is not None:
            deltas.append(
                Delta(
                    index=self._index,
                    logprobs=self._last_logprobs(),
                    tokenizer=self._tokenizer,
                    finish_reason=self.finish_reason,
                    stop=self._stop,
                )
            )
        if deltas and self._unsent_ids:
            ids, self._unsent_ids = tuple(self._unsent_ids), []
            deltas[0] = msgspec.structs.replace(deltas[0], token_ids=ids)
        return deltas

    def _delta_of_each_run(self, out: _Pieces) -> list[Delta]:
        """Make one delta for each run of thinking, content or arguments."""
        deltas: list[Delta] = []
        call_index = self._num_calls - sum([kind == "call" for kind, _, _ in out]) - 1
        for kind, run in groupby(out, key=lambda item: item[0]):
            texts, marks = [], []
            for _, text, mark in run:
                texts.append(text)
                marks.append(mark)
            call_index += kind == "call"
            deltas.append(
                Delta(
                    index=self._index,
                    kind=kind,
                    call_index=max(call_index, 0),
                    call_id=self._call_id(call_index) if kind == "call" else "",
                    text="".join(texts),
                    pieces=tuple(
                        (text, mark.was_drafted) for text, mark in zip(texts, marks, strict=True)
                    ),
                    logprobs=self._released_logprobs() if kind != "reasoning" else (),
                    tokenizer=self._tokenizer,
                    trace=None if self._trace is None else self._trace.of_pieces(marks),
                )
            )
        return deltas

    def _call_id(self, call_index: int) -> str:
        """A unique id, the same on every call."""
        source = f"{self._request_id}/{call_index}".encode()
        return f"call_{sha256(source).hexdigest()[:24]}"

    def _released_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Take the log-probabilities of the tokens whose whole text is out."""
        done = []
        while self._logprobs and self._logprobs[0][1] <= self._num_out:
            done.append(self._logprobs.popleft()[2])
        return tuple(done)

    def _last_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return those of the tokens that are left, without tokens behind a stop string's cut."""
        return tuple(
            entry
            for begin, _, entry in self._logprobs
            if begin < self._num_out or begin == self._num_answer
        )
