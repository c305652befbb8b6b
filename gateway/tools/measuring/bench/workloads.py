"""Workloads: prompts, traces and synthetic requests with their due times, as encoded bodies.

Everything is made before the first request goes out, so that sending costs little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from outrider.gateway.tools.measuring.bench.arrivals import (
    ArrivalKind,
    LengthDistribution,
    arrival_times,
)
from outrider.gateway.tools.measuring.bench.fields import merge_fields
from outrider.gateway.tools.measuring.bench.filler import Filler, TokenRatio
from outrider.gateway.tools.measuring.bench.prompts import BenchPrompt, fresh_prompts, load_prompts
from outrider.gateway.tools.measuring.bench.traces import (
    Trace,
    TraceRow,
    WorkloadError,
    close_gaps,
    load_trace,
)

WorkloadKind = Literal["prompts", "trace", "synthetic"]

# Of a trace's requests so many fit the context whole; the few longer ones are clipped.
_FITTING_SHARE: Final = 0.99
# Texts have not exactly as many tokens as wanted.
_SPARE_SHARE: Final = 0.06
_SPARE_TOKENS: Final = 8
_MOST_REQUESTS: Final = 1_000_000
_MOST_SEED: Final = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """A workload's source and shape."""

    kind: WorkloadKind = "prompts"
    path: Path | None = None
    """Of the prompts or the trace; prompts without one are built in."""
    categories: tuple[str, ...] = ()
    max_tokens: int | None = None
    """Of each answer; of a trace's, at most."""
    context_tokens: int | None = None
    """Lengths are scaled into it; None asks the target."""
    length_scale: float | None = None
    """Replaces the scale that makes the trace fit."""
    keeps_lengths: bool = True
    """Request answers of exactly the trace's length (`ignore_eos`), if the target supports it."""
    num_users: int | None = None
    """Each request has a `user`, one of so many, drawn at random; None for no user."""
    max_gap_s: float | None = None
    skips_bad: bool = False
    arrivals: ArrivalKind = "poisson"
    burstiness_cv: float = 2.0
    prompt_lengths: LengthDistribution = field(
        default_factory=lambda: LengthDistribution(low=128, high=128)
    )
    answer_lengths: LengthDistribution = field(
        default_factory=lambda: LengthDistribution(low=64, high=64)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request. `at_s`: when it is due, seconds since the first."""

    at_s: float
    body: bytes
    category: str = ""
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Part of a workload. At least one of `duration_s` and `num_requests` is given."""

    rate_per_s: float | None
    """None is a trace's own; others need one in an open loop."""
    duration_s: float | None
    num_requests: int | None

    def count(self, native_per_s: float | None = None) -> int:
        """Return the number of requests, assuming that they come at an even pace."""
        rate = self.rate_per_s or native_per_s
        bounds = [] if self.num_requests is None else [self.num_requests]
        if self.duration_s is not None and rate is not None:
            bounds.append(round(rate * self.duration_s))
        return min(max(1, min(bounds, default=_MOST_REQUESTS)), _MOST_REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Facts about the target that a workload needs.

    `takes_ignore_eos`: the target knows the field. `body`: fields added to every request's body.
    `wants_seeds`: each prompt of a file goes with a seed of its own.
    """

    body: Mapping[str, Any]
    ratio: TokenRatio
    context_tokens: int | None = None
    takes_ignore_eos: bool = False
    wants_seeds: bool = False


class Workload:
    """Loaded once; `requests` makes as many as wanted, at any rate."""

    def __init__(self, settings: WorkloadSettings, *, seed: int) -> None:
        """Read the files. Raises WorkloadError."""
        self.settings = settings
        self._seed = seed
        self.notes: list[str] = []
        self._trace: Trace | None = None
        self.name = "synthetic"
        if settings.kind == "trace":
            if settings.path is None:
                raise WorkloadError("a trace needs a file")
            trace = load_trace(settings.path, skips_bad=settings.skips_bad)
            if settings.max_gap_s is not None:
                trace = close_gaps(trace, settings.max_gap_s)
            self._trace = trace
            self.name = trace.name
            self.notes += trace.notes
        elif settings.kind == "prompts":
            self._prompts: Sequence[BenchPrompt] | None = None
            self.name = "fresh tasks"
            if settings.path is not None:
                prompts = load_prompts(
                    settings.path, skips_bad=settings.skips_bad, categories=settings.categories
                )
                self._prompts = prompts.prompts
                self.name = prompts.name
                self.notes += prompts.notes

    @property
    def num_prompts(self) -> int | None:
        """The number of different prompts; None if every request has its own text."""
        if self.settings.kind != "prompts" or self._prompts is None:
            return None
        return len(self._prompts)

    @property
    def has_lengths(self) -> bool:
        """True if texts are generated to a length in tokens."""
        return self.settings.kind != "prompts"

    def requests(self, extent: Extent, facts: TargetFacts, *, salt: str) -> list[PlannedRequest]:
        """The first requests, in the order of their times.

        `salt`: part of the name of every text that is made, so that another run finds none of its
        prompts in a cache. Raises WorkloadError.
        """
        planned = self._planned(extent, facts, salt)
        if facts.wants_seeds:
            rng = np.random.default_rng((self._seed, _MOST_SEED))
            planned = [
                replace(one, body=_with_field(one.body, "seed", int(rng.integers(_MOST_SEED))))
                for one in planned
            ]
        num_users = self.settings.num_users
        if num_users is None:
            return planned
        rng = np.random.default_rng((self._seed, num_users))
        return [
            replace(one, body=_with_field(one.body, "user", f"user-{rng.integers(num_users)}"))
            for one in planned
        ]

    def _planned(self, extent: Extent, facts: TargetFacts, salt: str) -> list[PlannedRequest]:
        if self._trace is not None:
            return self._replay(self._trace, extent, facts, salt)
        count = extent.count()
        rng = np.random.default_rng(self._seed)
        settings = self.settings
        pattern = arrival_times(count, kind=settings.arrivals, cv=settings.burstiness_cv, rng=rng)
        times = [time / (extent.rate_per_s or 1.0) for time in pattern]
        if settings.kind == "synthetic":
            rows = [
                TraceRow(at_s=time, num_prompt_tokens=prompt, num_completion_tokens=answer)
                for time, prompt, answer in zip(
                    times,
                    settings.prompt_lengths.draw(count, rng),
                    settings.answer_lengths.draw(count, rng),
                    strict=True,
                )
            ]
            return self._rendered(Trace(name="synthetic", rows=rows), facts, salt)
        if self._prompts is None:
            prompts = fresh_prompts(count, seed=self._seed, salt=salt)
        else:
            prompts = _shuffled(self._prompts, count, rng)
        return self._asked(times, prompts, facts)

    def _asked(
        self, times: Sequence[float], prompts: Sequence[BenchPrompt], facts: TargetFacts
    ) -> list[PlannedRequest]:
        planned = []
        for at_s, prompt in zip(times, prompts, strict=True):
            fields: dict[str, Any] = {"messages": prompt.messages}
            if self.settings.max_tokens is not None:
                fields["max_tokens"] = self.settings.max_tokens
            planned.append(
                PlannedRequest(at_s=at_s, body=_body(fields, facts), category=prompt.category)
            )
        return planned

    def _replay(
        self, trace: Trace, extent: Extent, facts: TargetFacts, salt: str
    ) -> list[PlannedRequest]:
        """The trace's first requests. With a rate, their times are stretched to it."""
        rows = list(trace.rows)
        if extent.rate_per_s is None:
            if extent.duration_s is not None:
                rows = [row for row in rows if row.at_s < extent.duration_s]
            rows = rows[: extent.num_requests]
        else:
            count = extent.count()
            if count > len(rows):
                self._note(f"the trace has {len(rows)} requests, not the {count} wanted: it ended")
            rows = rows[:count]
            span_s = rows[-1].at_s
            wanted_s = (len(rows) - 1) / extent.rate_per_s
            if span_s == 0.0 and len(rows) > 1:
                raise WorkloadError(
                    f"{trace.name}: its first {len(rows)} requests arrive at the same moment, so "
                    "their rate cannot be scaled; use more of them (--num-requests, --duration)"
                )
            stretch = wanted_s / span_s if span_s else 1.0
            rows = [replace(row, at_s=row.at_s * stretch) for row in rows]
        return self._rendered(replace(trace, rows=rows), facts, salt)

    def _rendered(self, trace: Trace, facts: TargetFacts, salt: str) -> list[PlannedRequest]:
        """Texts for lengths. Equal block ids give equal texts."""
        settings = self.settings
        context = settings.context_tokens or facts.context_tokens
        scale = settings.length_scale or _fitting_scale(trace.rows, context)
        if scale != 1.0:
            self._note(f"lengths were scaled by {scale:.4g}")
        writer = _PromptWriter(
            filler=Filler(self._seed),
            salt=salt,
            ratio=facts.ratio,
            block_tokens=trace.block_tokens * scale,
        )
        if settings.keeps_lengths and not facts.takes_ignore_eos:
            self._note("the target does not know ignore_eos: answers may be shorter than wanted")
        planned = []
        num_clipped = 0
        for index, row in enumerate(trace.rows):
            prompt, answer, is_clipped = _fitted(row, scale, context, settings.max_tokens)
            num_clipped += is_clipped
            fields: dict[str, Any] = {
                "messages": [{"role": "user", "content": writer.text(index, row, prompt)}],
                "max_tokens": answer,
            }
            if settings.keeps_lengths and facts.takes_ignore_eos:
                fields["ignore_eos"] = True
            planned.append(
                PlannedRequest(
                    at_s=row.at_s,
                    body=_body(fields, facts),
                    num_prompt_tokens=prompt,
                    num_completion_tokens=answer,
                )
            )
        if num_clipped:
            self._note(f"{num_clipped} of {len(planned)} requests did not fit and were clipped")
        return planned

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _with_field(body: bytes, name: str, value: str | int) -> bytes:
    """Return the request with a field, unless it has one of that name."""
    document: dict[str, Any] = msgspec.json.decode(body)
    return msgspec.json.encode({name: value, **document})


def _shuffled(
    prompts: Sequence[BenchPrompt], count: int, rng: np.random.Generator
) -> list[BenchPrompt]:
    """Return every prompt once in an order of chance, then again in another."""
    order: list[int] = []
    while len(order) < count:
        order += [int(i) for i in rng.permutation(len(prompts))]
    return [prompts[index] for index in order[:count]]


def _body(fields: Mapping[str, Any], facts: TargetFacts) -> bytes:
    """Return a request's body; the fields that the user set override the workload's."""
    return msgspec.json.encode(merge_fields(fields, facts.body))


def _fitting_scale(rows: Sequence[TraceRow], context: int | None) -> float:
    """At most 1: nearly all requests fit the context then."""
    if context is None or not rows:
        return 1.0
    totals = [row.num_prompt_tokens + row.num_completion_tokens for row in rows]
    longest = float(np.quantile(totals, _FITTING_SHARE))
    return min(1.0, _usable(context) / longest)


def _usable(context: int) -> float:
    usable = context * (1.0 - _SPARE_SHARE) - _SPARE_TOKENS
    if usable < 2.0:
        raise WorkloadError(f"a context of {context} tokens holds no prompt and answer")
    return usable


def _fitted(
    row: TraceRow, scale: float, context: int | None, max_tokens: int | None
) -> tuple[int, int, bool]:
    """Tokens of the prompt and of the answer, and whether anything had to be cut off."""
    prompt = max(1, round(row.num_prompt_tokens * scale))
    answer = max(1, round(row.num_completion_tokens * scale))
    wanted = (prompt, answer)
    if max_tokens is not None:
        answer = min(answer, max_tokens)
    if context is not None:
        usable = int(_usable(context))
        answer = min(answer, usable - 1)
        prompt = min(prompt, usable - answer)
    return prompt, answer, (prompt, answer) != wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _PromptWriter:
    filler: Filler
    salt: str
    ratio: TokenRatio
    block_tokens: float

    def text(self, index: int, row: TraceRow, num_tokens: int) -> str:
        """About so many tokens, the chat's frame included."""
        count = max(1, self.ratio.num_words(num_tokens - self.ratio.num_fixed))
        per_block = max(1, self.ratio.num_words(self.block_tokens))
        words: list[str] = []
        for block_id in row.block_ids:
            if len(words) >= count:
                break
            wanted = min(per_block, count - len(words))
            words += self.filler.words(f"{self.salt}/block/{block_id}", wanted)
        if len(words) < count:
            words += self.filler.words(f"{self.salt}/own/{index}", count - len(words))
        return " ".join(words)
