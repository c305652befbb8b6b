"""Search for the tree limits with the most tokens per second on this machine and this traffic.

The limits are tried one after the other (depth, nodes, branching, frontier), each over a few values
while the others stay at the best found so far: the whole grid would take hours and says little
more, because the limits hardly interact once the trees are sized by the cost of passes. All values
of a limit and plain decoding run in turn, round by round, on the real engine. They are compared
within a round, so a machine that slows down slows all of them. A limit is moved only where that
gains more than one percent: less is noise.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final, Literal

from outrider.draft.config import DraftConfig
from outrider.draft.training.own_answers import render_prompts
from outrider.draft.training.prompt_file import PromptDataError, PromptRow
from outrider.engine.core import Engine
from outrider.engine.errors import EngineError
from outrider.engine.events import EngineStats, Failed, Finished, TokensEmitted
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.verifier.params import SamplingParams, Tier

Limit = Literal["max_draft_depth", "max_draft_nodes", "max_branching", "max_frontier"]

DEFAULT_GRID: Final[Mapping[Limit, tuple[int, ...]]] = {
    "max_draft_depth": (4, 8, 12, 16),
    "max_draft_nodes": (4, 8, 16, 32, 64),
    "max_branching": (1, 2, 3, 4),
    "max_frontier": (1, 2, 4, 8),
}
_WORTH_MOVING = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """A tree's limits. Hashable: what is measured is looked up by it."""

    max_draft_depth: int = DraftConfig().max_draft_depth
    max_draft_nodes: int = DraftConfig().max_draft_nodes
    max_branching: int = DraftConfig().max_branching
    max_frontier: int = DraftConfig().max_frontier
    adaptive: bool = True
    """Sized by what passes cost, up to the limits; else always full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests to tune for: prompts, sampling of answers, and the number in flight."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    concurrency: int = 1


def sample_traffic(
    rows: Sequence[PromptRow],
    tokenizer: Any,
    sampling: SamplingParams,
    *,
    max_context: int,
    concurrency: int = 1,
) -> Traffic:
    """The prompts that leave room for an answer. Raises PromptDataError when none does."""
    room = max_context - sampling.max_tokens
    rendered = render_prompts(rows, tokenizer)
    fitting = tuple(prompt for prompt in rendered if 0 < len(prompt) <= room)
    if not fitting:
        raise PromptDataError(
            f"no prompt leaves room for {sampling.max_tokens} tokens in a context of "
            f"{max_context}; lower --max-tokens or give shorter prompts"
        )
    return Traffic(prompts=fitting, sampling=sampling, concurrency=concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One run of the traffic. Counts and seconds are totals."""

    num_tokens: int
    elapsed_s: float
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_depth: tuple[int, ...]
    """Entry i: drafts of which a path of i + 1 tokens was accepted."""
    pass_s: Mapping[Tier, float]
    """The mean of a pass."""

    @property
    def tokens_per_s(self) -> float:
        """Rate over the whole run, prompts included."""
        return self.num_tokens / self.elapsed_s

    @property
    def mean_nodes(self) -> float:
        """Drafted tokens of a tree."""
        return self.num_draft_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted of drafted tokens."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def path_acceptance(self) -> list[float]:
        """Share of drafts with an accepted path of at least this length, by depth."""
        return [count / max(self.num_drafts, 1) for count in self.accepted_per_depth]

    @property
    def level_acceptance(self) -> list[float]:
        """Share of drafts accepted at a depth among those accepted one level above, by depth."""
        above = [self.num_drafts, *self.accepted_per_depth]
        return [
            count / before for count, before in zip(self.accepted_per_depth, above, strict=False)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A choice with its runs; ratios are to plain decoding in the same round."""

    limit: Limit
    choice: DraftLimits
    runs: tuple[RunFigures, ...]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median over the rounds."""
        return median(self.ratios)


@dataclass(slots=True, kw_only=True)
class TuneReport:
    """All that was tried, in order, and the best of it."""

    best: DraftLimits
    gain: float = 1.0
    """The best choice's rate over plain decoding's. At 1 or below drafting does not pay here."""
    plain_runs: list[RunFigures] = field(default_factory=list)
    """Plain decoding, once a round and limit."""
    tried: list[Tried] = field(default_factory=list)

    @property
    def plain_tokens_per_s(self) -> float:
        """Plain decoding's median rate. Ratios times it are rates at one pace of the machine."""
        return median(run.tokens_per_s for run in self.plain_runs)

    def of_limit(self, limit: Limit, *, adaptive: bool) -> list[Tried]:
        """Return the runs that were tried for one limit, ascending."""
        found = [t for t in self.tried if t.limit == limit and t.choice.adaptive == adaptive]
        return sorted(found, key=lambda tried: int(getattr(tried.choice, limit)))


class Tuner:
    """Runs traffic on engines that share loaded models.

    `build`: an engine with these limits on the runners. `on_run`: told (done, total, label) of each
    run, where the total is what is planned so far.
    """

    def __init__(
        self,
        *,
        build: Callable[[DraftLimits], Engine],
        runners: Mapping[Tier, ModelRunner],
        traffic: Traffic,
        rounds: int = 3,
        on_run: Callable[[int, int, str], None] = lambda done, total, label: None,
    ) -> None:
        """Raises ValueError for no prompts or no rounds."""
        if not traffic.prompts:
            raise ValueError("there is no prompt to measure with")
        if rounds < 1:
            raise ValueError(f"rounds={rounds} must be at least 1")
        self._build = build
        self._runners = runners
        self._traffic = traffic
        self._rounds = rounds
        self._on_run = on_run
        self._engines: dict[DraftLimits, Engine] = {}
        self._num_runs = 0

    def tune(
        self,
        grid: Mapping[Limit, Sequence[int]] = DEFAULT_GRID,
        *,
        start: DraftLimits | None = None,
    ) -> TuneReport:
        """Try the values of each limit in turn. Raises EngineError when a request fails.

        `start`: the limits in use. With the nodes, trees that are always full are tried beside
        adaptive ones, to show what sizing them gains; they are not chosen.
        """
        report = TuneReport(best=start or DraftLimits())
        cases = [self._choices(report.best, limit, values) for limit, values in grid.items()]
        total = sum((len(choices) + 1) * (self._rounds + 1) for choices in cases)
        for limit, values in grid.items():
            tried = self._try(report, limit, self._choices(report.best, limit, values), total)
            report.tried += tried
            report.best, report.gain = _best(tried, report.best)
        return report

    def _choices(self, best: DraftLimits, limit: Limit, values: Sequence[int]) -> list[DraftLimits]:
        """The present best first, then what else there is to try."""
        modes = (best.adaptive, not best.adaptive) if limit == "max_draft_nodes" else (None,)
        found = [best]
        for mode in modes:
            base = best if mode is None else replace(best, adaptive=mode)
            for value in values:
                fields = {limit: value}
                found.append(replace(base, **fields))  # type: ignore[arg-type]
        return list(dict.fromkeys(found))

    def _try(
        self, report: TuneReport, limit: Limit, choices: Sequence[DraftLimits], total: int
    ) -> list[Tried]:
        """Plain decoding and all choices, round by round; the first round warms up."""
        cases: list[DraftLimits | None] = [None, *choices]
        runs: dict[DraftLimits | None, list[RunFigures]] = {case: [] for case in cases}
        for turn in range(self._rounds + 1):
            for case in cases:
                figures = self._run(case, report.best)
                if turn:
                    runs[case].append(figures)
                self._on_run(self._num_runs, total, f"{limit}, round {turn} of {self._rounds}")
        plain = runs[None]
        report.plain_runs += plain
        return [
            Tried(
                limit=limit,
                choice=choice,
                runs=tuple(runs[choice]),
                ratios=tuple(
                    run.tokens_per_s / other.tokens_per_s
                    for run, other in zip(runs[choice], plain, strict=True)
                ),
            )
            for choice in choices
        ]

    def _run(self, choice: DraftLimits | None, best: DraftLimits) -> RunFigures:
        """The traffic once; without a choice, by the present best's engine without drafting."""
        key = choice or best
        if key not in self._engines:
            self._engines[key] = self._build(key)
        self._num_runs += 1
        # A salt of its own: no run finds what another one left in the prefix caches.
        return run_traffic(
            self._engines[key],
            self._runners,
            self._traffic,
            salt=f"tune-{self._num_runs}",
            drafts=choice is not None,
        )


def _best(tried: Sequence[Tried], current: DraftLimits) -> tuple[DraftLimits, float]:
    """The choice to go on with, and its gain over plain decoding.

    Never one whose trees are always full: the best of those at this concurrency loses at another.
    """
    standing = next(case for case in tried if case.choice == current)
    eligible = [case for case in tried if case.choice.adaptive == current.adaptive]
    winner = max(eligible, key=lambda case: case.ratio)
    # Round by round against the standing choice: both were measured next to each other.
    lead = median(
        ours / theirs for ours, theirs in zip(winner.ratios, standing.ratios, strict=True)
    )
    if lead > _WORTH_MOVING:
        return winner.choice, winner.ratio
    return standing.choice, standing.ratio


def run_traffic(
    engine: Engine,
    runners: Mapping[Tier, ModelRunner],
    traffic: Traffic,
    *,
    salt: str,
    drafts: bool,
) -> RunFigures:
    """Answer all prompts on the large tier, `traffic.concurrency` at a time.

    Raises EngineError when a request fails.
    """
    before, passes = engine.stats(), _passes(runners)
    waiting = [
        EngineRequest(
            request_id=f"{salt}/{index}",
            prompt_token_ids=prompt,
            tier="large",
            sampling=traffic.sampling,
            speculation=SpeculationParams(enabled=drafts),
            cache_salt=salt,
        )
        for index, prompt in enumerate(traffic.prompts)
    ]
    waiting.reverse()
    num_running, num_tokens = 0, 0
    started_s = time.perf_counter()
    while waiting or num_running:
        while waiting and num_running < traffic.concurrency:
            engine.submit(waiting.pop())
            num_running += 1
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                num_tokens += len(event.token_ids)
            elif isinstance(event, Failed):
                raise EngineError(f"{event.request_id}: {event.message}")
            elif isinstance(event, Finished):
                num_running -= 1
    elapsed_s = time.perf_counter() - started_s
    return _figures(before, engine.stats(), passes, _passes(runners), num_tokens, elapsed_s)


def _passes(runners: Mapping[Tier, ModelRunner]) -> dict[Tier, tuple[int, float]]:
    return {
        tier: (runner.times.num_passes, runner.times.total_s) for tier, runner in runners.items()
    }


def _figures(
    before: EngineStats,
    after: EngineStats,
    passes_before: Mapping[Tier, tuple[int, float]],
    passes_after: Mapping[Tier, tuple[int, float]],
    num_tokens: int,
    elapsed_s: float,
) -> RunFigures:
    """Return the figures that one run added to the engine's and the runners' counters."""
    earlier = dict(enumerate(before.accepted_per_depth))
    pass_s: dict[Tier, float] = {}
    for tier, (number, seconds) in passes_after.items():
        earlier_number, earlier_seconds = passes_before[tier]
        pass_s[tier] = (seconds - earlier_seconds) / max(number - earlier_number, 1)
    return RunFigures(
        num_tokens=num_tokens,
        elapsed_s=elapsed_s,
        num_steps=after.num_steps - before.num_steps,
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_per_depth=tuple(
            count - earlier.get(depth, 0) for depth, count in enumerate(after.accepted_per_depth)
        ),
        pass_s=pass_s,
    )


def speculation_toml(report: TuneReport, *, conditions: str) -> str:
    """The best settings as a section of outrider.toml.

    `conditions`: one line on what was measured with what. Where drafting does not pay, it is off.
    """
    best = report.best
    values = {
        "enabled": report.gain > 1.0,
        "adaptive": best.adaptive,
        "max_draft_nodes": best.max_draft_nodes,
        "max_draft_depth": best.max_draft_depth,
        "max_branching": best.max_branching,
        "max_frontier": best.max_frontier,
    }
    lines = [
        "# Written by `outrider draft tune`; use it with `outrider serve --config THIS_FILE`.",
        f"# {conditions}",
        f"# {report.gain:.2f} times plain decoding ({report.plain_tokens_per_s:.1f} tok/s).",
        "",
        "[speculation]",
        *(f"{name} = {str(value).lower()}" for name, value in values.items()),
    ]
    return "\n".join(lines) + "\n"
