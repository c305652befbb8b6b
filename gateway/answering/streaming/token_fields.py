"""The fields of an answer that name tokens: log-probabilities, their alternatives, and ids."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.streaming.delta import Delta, PromptTokens
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    DifferenceReport,
    JudgementReport,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from outrider.verifier.token_logprobs import Judgement, TokenLogprobs

PromptLogprobList = list[dict[str, PromptLogprob] | None]


class TokenFields:
    """Writes these fields for one job's answers."""

    def __init__(self, job: Job) -> None:
        self._tokenizer = job.tokenizer
        self._num_top = job.num_top_logprobs
        self._extras = job.extras
        self._offsets: defaultdict[int, int] = defaultdict(int)

    # ---- the answer's tokens ------------------------------------------------------------------

    def of_chat(self, deltas: Iterable[Delta]) -> ChatLogprobs:
        """Return a chat's log-probabilities."""
        content = [
            self._entry(entry, delta.tokenizer or self._tokenizer)
            for delta in deltas
            for entry in delta.logprobs
        ]
        return ChatLogprobs(content=content, refusal=None)

    def _entry(self, entry: TokenLogprobs, tokenizer: ChatTokenizer) -> TokenLogprob:
        top = [
            TopLogprob(*self._described(*pair, tokenizer))
            for pair in islice(entry.top, self._num_top)
        ]
        return TokenLogprob(*self._described(entry.token_id, entry.logprob, tokenizer), top)

    def _described(
        self, token_id: int, logprob: float, tokenizer: ChatTokenizer
    ) -> tuple[str, float, list[int]]:
        """Return a token's name, log-probability and bytes."""
        own_bytes = list(tokenizer.token_bytes(token_id))
        return self._name(token_id, tokenizer), finite(logprob), own_bytes

    def of_completion(self, index: int, deltas: Iterable[Delta]) -> CompletionLogprobs:
        """Return a completion's log-probabilities, with those of an echoed prompt."""
        lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for delta in deltas:
            tokenizer = delta.tokenizer or self._tokenizer
            if delta.prompt is not None and self._extras.echoes:
                self._add_prompt(lists, delta.prompt, tokenizer)
                self._offsets[index] = len(delta.text)
            for entry in delta.logprobs:
                self._add(lists, entry, tokenizer)
                lists.text_offset.append(self._offsets[index])
                self._offsets[index] += len(text_of(entry.token_id, tokenizer))
        return lists

    def _add_prompt(
        self, lists: CompletionLogprobs, prompt: PromptTokens, tokenizer: ChatTokenizer
    ) -> None:
        """Add an echoed prompt; nothing stands before its first token, which so has no score."""
        lists.tokens.append(self._name(prompt.token_ids[0], tokenizer))
        lists.token_logprobs.append(None)
        lists.top_logprobs.append(None)
        for entry in prompt.logprobs:
            self._add(lists, entry, tokenizer)
        lists.text_offset += _offsets(prompt.token_ids, tokenizer)

    def _add(
        self, lists: CompletionLogprobs, entry: TokenLogprobs, tokenizer: ChatTokenizer
    ) -> None:
        """Add a token; as at OpenAI it is beside the likeliest where it is none of them."""
        name, logprob = self._name(entry.token_id, tokenizer), finite(entry.logprob)
        lists.tokens.append(name)
        lists.token_logprobs.append(logprob)
        tops: dict[str, float] = {}
        for token_id, value in islice(entry.top, self._num_top):
            tops.setdefault(self._name(token_id, tokenizer), finite(value))
        if self._num_top:
            tops.setdefault(name, logprob)
        lists.top_logprobs.append(tops)

    def _name(self, token_id: int, tokenizer: ChatTokenizer) -> str:
        if self._extras.names_ids:
            return f"token_id:{token_id}"
        return text_of(token_id, tokenizer)

    # ---- vLLM's fields --------------------------------------------------------------------------

    def prompt_logprobs(self, deltas: Iterable[Delta]) -> PromptLogprobList | None:
        """Return `prompt_logprobs`; None where it was not asked for."""
        num_top = self._extras.num_prompt_logprobs
        delta = _with_prompt(deltas)
        if num_top is None or delta is None or delta.prompt is None:
            return None
        tokenizer = delta.tokenizer or self._tokenizer
        found: PromptLogprobList = [None]
        for entry in delta.prompt.logprobs:
            tokens = {entry.token_id: (entry.logprob, entry.rank)}
            for rank, (token_id, value) in enumerate(islice(entry.top, num_top), start=1):
                tokens.setdefault(token_id, (value, rank))
            found.append(
                {
                    str(token_id): PromptLogprob(finite(value), rank, text_of(token_id, tokenizer))
                    for token_id, (value, rank) in tokens.items()
                }
            )
        return found

    def prompt_token_ids(self, deltas: Iterable[Delta]) -> list[int] | None:
        """Return `prompt_token_ids`; None where they were not asked for."""
        delta = _with_prompt(deltas)
        if not self._extras.has_token_ids or delta is None or delta.prompt is None:
            return None
        return list(delta.prompt.token_ids)

    def token_ids(self, deltas: Iterable[Delta]) -> list[int] | None:
        """Return `token_ids`; None where they were not asked for."""
        if not self._extras.has_token_ids:
            return None
        return [token_id for delta in deltas for token_id in delta.token_ids]

    def judgements(self, deltas: Iterable[Delta]) -> list[JudgementReport] | None:
        """Return the judgements of an answer; None where they were not asked for."""
        delta = _with_prompt(deltas)
        if not self._extras.has_judgements or delta is None or delta.prompt is None:
            return None
        tokenizer = delta.tokenizer or self._tokenizer
        return [_judgement(found, tokenizer) for found in delta.prompt.judgements]

    def chunk_fields(
        self, delta: Delta, encode: Callable[[object], bytes], *, of_prompt: bool
    ) -> bytes:
        """Write a chunk's fields: those of its prompt, or those of its answer."""
        fields: dict[str, object] = {}
        if not of_prompt:
            fields = {
                "token_ids": self.token_ids([delta]),
                "judgements": self.judgements([delta]),
            }
        elif delta.prompt is not None:
            fields = {
                "prompt_logprobs": self.prompt_logprobs([delta]),
                "prompt_token_ids": self.prompt_token_ids([delta]),
            }
        known = ((name, value) for name, value in fields.items() if value is not None)
        return b"".join(b',"' + name.encode() + b'":' + encode(value) for name, value in known)


def _judgement(found: Judgement, tokenizer: ChatTokenizer) -> JudgementReport:
    return JudgementReport(
        num_tokens=found.num_tokens,
        num_matching=found.num_same,
        total_gap=found.total_gap,
        differences=[
            DifferenceReport(
                index=each.index,
                token_id=each.token_id,
                token=text_of(each.token_id, tokenizer),
                chosen_id=max(each.chosen_id, -1),
                chosen=text_of(each.chosen_id, tokenizer) if each.chosen_id >= 0 else "",
                gap=each.gap,
            )
            for each in found.differences
        ],
    )


def _with_prompt(deltas: Iterable[Delta]) -> Delta | None:
    return next((delta for delta in deltas if delta.prompt is not None), None)


def _offsets(token_ids: Sequence[int], tokenizer: ChatTokenizer) -> list[int]:
    """Return where each token's text begins in the text of all."""
    detokenizer = tokenizer.detokenizer()
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(end)
        end += len(detokenizer.push(token_id))
    return offsets


def text_of(token_id: int, tokenizer: ChatTokenizer) -> str:
    """Return a token's own text."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON lacks, by -9999 as OpenAI does."""
    return max(logprob, -9999.0)
