"""Engines made by hand, and driven with a bounded number of requests in flight."""

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.shared.prompts import Prompt
from benchmarks.shared.step_timer import ForwardCpu, StepRecord, StepTimer
from outrider.draft.budget.budget import PassTimeEstimate, TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.guesses.head_texts import Head
from outrider.draft.heads.protocol import HeadModel
from outrider.draft.heads.read_head import read_head
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.events import Finished, RequestStats, TokensEmitted
from outrider.engine.model.decoder import DtypeName
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import Rounding, SchemeName
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.step_times import follow_step_times
from outrider.engine.queue.policy import QueuePolicy
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.gateway.settings.tree import SpeculationSettings
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.judged import JudgedSequence
from outrider.verifier.params import SamplingParams, Source, Tier
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict

BLOCK_SIZE = 16

# ---- the engine -------------------------------------------------------------------------------


def load_with_head(
    folder: Path,
    head_folder: Path,
    *,
    dtype: DtypeName,
    device: str,
    num_blocks: int,
    scheme: SchemeName | None = None,
) -> tuple[ModelRunner, Head]:
    """Load a large model and the head that reads it, each with a cache of `num_blocks` blocks."""
    rounding = None if scheme is None else Rounding(scheme=scheme)
    model = load_model(str(folder), dtype=dtype, device=device, rounding=rounding)
    head: HeadModel = read_head(str(head_folder), model)  # type: ignore[arg-type]
    large = ModelRunner(
        model=model, num_blocks=num_blocks, block_size=BLOCK_SIZE, taps=head.tap_layers
    )
    runner = ModelRunner(model=head, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return large, Head(model=head, runner=runner, vocab_size=large.vocab_size)


def load_runner(
    folder: Path,
    *,
    dtype: DtypeName,
    device: str,
    num_blocks: int,
    scheme: SchemeName | None = None,
) -> ModelRunner:
    """Load a model and give it a cache of `num_blocks` blocks.

    `scheme`: how its weights are rounded; nothing is kept on disk. None: as they are.
    """
    rounding = None if scheme is None else Rounding(scheme=scheme)
    model = load_model(str(folder), dtype=dtype, device=device, rounding=rounding)
    return ModelRunner(model=model, num_blocks=num_blocks, block_size=BLOCK_SIZE)


def blocks_for(*, num_sequences: int, num_tokens: int) -> int:
    """Blocks that so many sequences of so many tokens need, with room for their drafts."""
    per_sequence = -(-num_tokens // BLOCK_SIZE) + 4
    # Twice, so that finished prompts that are still cached are never in the way; and never less
    # than the start-up profile of step times wants.
    return max(2 * num_sequences * per_sequence, 64)


@dataclass(slots=True)
class DraftTally:
    """Counts of verified trees. `offered[d]`: trees with a node of depth d + 1; `accepted[d]`:
    trees whose accepted path reached it.
    """

    num_trees: int = 0
    num_nodes: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, depth: int, num_nodes: int, num_accepted: int) -> None:
        """Count one tree of `num_nodes` guesses."""
        self.num_trees += 1
        self.num_nodes += num_nodes
        missing = depth - len(self.offered)
        self.offered.extend([0] * missing)
        self.accepted.extend([0] * missing)
        for level in range(depth):
            self.offered[level] += 1
        for level in range(num_accepted):
            self.accepted[level] += 1

    def clear(self) -> None:
        """Start anew."""
        self.num_trees = self.num_nodes = 0
        self.offered.clear()
        self.accepted.clear()

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Return, of the trees that reach a depth, the share in which it was accepted."""
        return [
            accepted / offered
            for accepted, offered in zip(self.accepted, self.offered, strict=True)
        ]


class RecordingVerifier(CoupledVerifier):
    """The coupled verifier, with a tally of what it judged."""

    def __init__(self) -> None:
        self.tally = DraftTally()

    def verify(
        self,
        sequences: Sequence[JudgedSequence],
        trees: Sequence[TokenTree],
        logits: Tensor,
    ) -> list[Verdict]:
        """As the parent, and count."""
        verdicts = super().verify(sequences, trees, logits)
        for tree, result in zip(trees, verdicts, strict=True):
            if tree.num_draft_nodes:
                self.tally.add(max(tree.depth), tree.num_draft_nodes, result.num_accepted_tokens)
        return verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """An engine with handles on its parts. `runners["small"]` drafts, be it a head's."""

    engine: Engine
    runners: Mapping[Tier, ModelRunner]
    verifier: RecordingVerifier
    forward_cpu: ForwardCpu


def build_bench(  # noqa: PLR0913 - all that an engine is made of
    runners: Mapping[Tier, ModelRunner],
    *,
    draft_config: DraftConfig | None = None,
    budget: TreeBudget | None = None,
    config: EngineConfig | None = None,
    policy: QueuePolicy | None = None,
    forward_cpu: ForwardCpu | None = None,
    head: Head | None = None,
    draft_clock: Callable[[], float] = time.monotonic,
) -> Bench:
    """An engine over runners that may be shared with other engines, one engine at work at a time.

    With a small model it drafts, without one the head; a request can switch that off, which is
    plain decoding.
    `forward_cpu`: of another engine over the same runners, whose passes are counted already.
    `draft_clock`: by which the drafter learns what steps take.
    """
    verifier = RecordingVerifier()
    drafter = None
    if "small" in runners and "large" in runners:
        drafter = TreeDrafter(
            runner=runners["small"], config=draft_config, budget=budget, clock=draft_clock
        )
    elif head is not None:
        drafter = TreeDrafter(
            runner=None, head=head, config=draft_config, budget=budget, clock=draft_clock
        )
    engine = Engine(
        runners=runners, verifier=verifier, drafter=drafter, config=config, policy=policy
    )
    if head is not None:
        runners = {**runners, "small": head.runner}
    gc.collect()  # as the engine's process does: what was loaded is not searched again and again
    gc.freeze()
    if forward_cpu is None:
        forward_cpu = ForwardCpu()
        for runner in runners.values():
            forward_cpu.put_around(runner)
    return Bench(engine=engine, runners=runners, verifier=verifier, forward_cpu=forward_cpu)


def tree_budget(
    runners: Mapping[Tier, ModelRunner],
    *,
    target_pass_s: PassTimeEstimate | None = None,
    head: Head | None = None,
) -> TreeBudget:
    """The budget that serving uses: from both models' step times, measured now and followed.

    `head`: drafts in the small model's place. A runner's passes are followed by one curve: budgets
    that share the target give it on.
    """
    draft_pass_s = follow_step_times(runners["small"] if head is None else head.runner)
    return TreeBudget(
        target_pass_s=target_pass_s or follow_step_times(runners["large"]),
        draft_pass_s=draft_pass_s,
        head_pass_s=None if head is None else draft_pass_s,
    )


_DRAFT_OPTIONS = ("max_draft_nodes", "max_draft_depth", "max_branching", "max_frontier")


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Limits of a tree; unset ones are as in serving."""
    for name in _DRAFT_OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)


def draft_config(arguments: argparse.Namespace) -> DraftConfig:
    """The drafter's limits: what serving has unless the arguments say otherwise."""
    serving = SpeculationSettings()
    limits: dict[str, Any] = {
        "max_draft_nodes": serving.max_draft_nodes,
        "max_draft_depth": serving.max_draft_depth,
        "max_branching": serving.max_branching,
        "max_frontier": serving.max_frontier,
    }
    wanted = {name: getattr(arguments, name, None) for name in _DRAFT_OPTIONS}
    limits |= {name: value for name, value in wanted.items() if value is not None}
    return DraftConfig(**limits)


# ---- driving it -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Stream:
    """Tokens of one request. `arrivals`: (seconds since the drive began, tokens so far)."""

    submitted_s: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    stats: RequestStats | None = None

    @property
    def decode_s(self) -> float:
        """From the first delivery to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens that came after the first delivery."""
        return self.arrivals[-1][1] - self.arrivals[0][1]


@dataclass(slots=True, kw_only=True)
class Drive:
    """A finished run: its streams in the requests' order, and its steps."""

    wall_s: float
    streams: list[Stream]
    steps: list[StepRecord]

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""
        return sum(len(answer.token_ids) for answer in self.streams)

    @property
    def tokens_per_s(self) -> float:
        """Prompts included in the time."""
        return self.num_tokens / self.wall_s

    @property
    def outputs(self) -> list[list[int]]:
        """The answers' token ids."""
        return [answer.token_ids for answer in self.streams]


def drive(bench: Bench, requests: Sequence[EngineRequest], *, concurrency: int) -> Drive:
    """Run all requests, at most `concurrency` at a time; a new one starts when one ends."""
    engine = bench.engine
    assert not engine.has_work, "the engine is busy with something else"
    waiting = iter(requests)
    streams: dict[str, Stream] = {}
    steps: list[StepRecord] = []
    timer = StepTimer(bench)
    in_flight = 0
    started_s = time.perf_counter()
    while True:
        for request in itertools.islice(waiting, concurrency - in_flight):
            streams[request.request_id] = Stream(submitted_s=time.perf_counter() - started_s)
            engine.submit(request)
            in_flight += 1
        if not in_flight:
            break
        events, record = timer.step(in_flight)
        steps.append(record)
        now_s = time.perf_counter() - started_s
        for event in events:
            if isinstance(event, TokensEmitted):
                answer = streams[event.request_id]
                answer.token_ids.extend(event.token_ids)
                answer.arrivals.append((now_s, len(answer.token_ids)))
            elif isinstance(event, Finished):
                streams[event.request_id].stats = event.stats
                in_flight -= 1
    wall_s = time.perf_counter() - started_s
    return Drive(wall_s=wall_s, streams=list(streams.values()), steps=steps)


_run_numbers = itertools.count()


def make_requests(  # noqa: PLR0913 - every field of a request, with defaults
    prompts: Iterable[Prompt],
    *,
    tier: Tier,
    max_tokens: int,
    speculate: bool = True,
    temperature: float = 0.0,
    seed: int = 0,
    stop: tuple[int, ...] = (),
    sources: tuple[Source, ...] | None = None,
    predictions: Sequence[tuple[int, ...]] | None = None,
) -> list[EngineRequest]:
    """Requests that share no prefix with any earlier run: each run pays for its prompts.

    The salt keeps remembered answers apart as well, so no run is told what an earlier one wrote.
    """
    salt = f"run-{next(_run_numbers)}"
    return [
        EngineRequest(
            request_id=f"{salt}-{index}",
            prompt_token_ids=prompt.token_ids,
            tier=tier,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed + index,
                stop_token_ids=stop,
            ),
            speculation=SpeculationParams(enabled=speculate, sources=sources),
            cache_salt=f"{salt}-{index}",
            prediction_token_ids=() if predictions is None else predictions[index],
        )
        for index, prompt in enumerate(prompts)
    ]
