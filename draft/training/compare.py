"""Compares drafters of a large model on the same traffic: acceptance by depth, cost, speed.

Each drafter is measured against plain decoding with the same loaded large model, round by round, so
that a machine that slows down slows both; drafters are compared by these ratios. Chains of first
choices show how deep a drafter is right; trees sized by cost, as in serving, what that is worth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.draft.training.tune import DraftLimits, RunFigures, Traffic, run_traffic
from outrider.engine.core import Engine
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.params import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A drafter's runs, round by round; `level_s` are in seconds a pass of it."""

    name: str
    kind: str
    num_parameters: int
    plain: tuple[RunFigures, ...]
    chains: tuple[RunFigures, ...]
    trees: tuple[RunFigures, ...]

    @property
    def level_s(self) -> float:
        """The median time of a pass of the drafter in chains."""
        return median(run.pass_s["small"] for run in self.chains)

    @property
    def level_acceptance(self) -> list[float]:
        """Share accepted of each depth, of chains whose guesses above it were."""
        counts = [sum(column) for column in zip(*self._accepted, strict=True)]
        before = [sum(run.num_drafts for run in self.chains), *counts]
        return [count / max(above, 1) for count, above in zip(counts, before, strict=False)]

    @property
    def _accepted(self) -> Sequence[tuple[int, ...]]:
        depth = min(len(run.accepted_per_depth) for run in self.chains)
        return [run.accepted_per_depth[:depth] for run in self.chains]

    @property
    def chain_ratio(self) -> float:
        """Tokens a second of chains over plain decoding's in the same round, the median."""
        return _ratio(self.chains, self.plain)

    @property
    def tree_ratio(self) -> float:
        """Return the same ratio of trees."""
        return _ratio(self.trees, self.plain)


def _ratio(runs: Sequence[RunFigures], plain: Sequence[RunFigures]) -> float:
    return median(
        run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, plain, strict=True)
    )


def plain_tokens_per_s(compared: Sequence[Compared]) -> float:
    """Plain decoding's median rate over all drafters' rounds; ratios times it share one pace."""
    return median(run.tokens_per_s for found in compared for run in found.plain)


def measure_drafter(  # noqa: PLR0913 - all that a measurement has
    name: str,
    *,
    kind: str,
    build: Callable[[DraftLimits], Engine],
    runners: Mapping[Tier, ModelRunner],
    traffic: Traffic,
    rounds: int,
    depth: int,
    on_run: Callable[[str], None] = lambda label: None,
) -> Compared:
    """Run the traffic plainly, with chains and with trees, in turn. Raises EngineError.

    `runners`: the large one, and the drafter's as "small". `build`: an engine with these limits on
    them; where `adaptive` is off, the drafter alone guesses. `depth`: of the chains. The first
    round warms up and does not count.
    """
    chain = DraftLimits(
        max_draft_depth=depth,
        max_draft_nodes=depth,
        max_branching=1,
        max_frontier=1,
        adaptive=False,
    )
    trees = DraftLimits()
    engines = {"chains": build(chain), "trees": build(trees)}
    runs: dict[str, list[RunFigures]] = {"plain": [], "chains": [], "trees": []}
    for turn in range(rounds + 1):
        for case, found in runs.items():
            on_run(f"{name}: {case}, round {turn} of {rounds}")
            figures = run_traffic(
                engines.get(case, engines["trees"]),
                runners,
                traffic,
                salt=f"compare-{turn}-{case}",
                drafts=case != "plain",
            )
            if turn:
                found.append(figures)
    return Compared(
        name=name,
        kind=kind,
        num_parameters=runners["small"].model.num_parameters,
        plain=tuple(runs["plain"]),
        chains=tuple(runs["chains"]),
        trees=tuple(runs["trees"]),
    )
