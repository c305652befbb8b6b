"""An engine whose passes and host work take a recorded machine's time, by a clock of their own.

All is the product's but the time: small models choose tokens, and a pass takes what a pass with so
many rows took on a processor. The host's work is what `bench_host_overhead` finds: a share for each
step, and again for each level of drafts and for trees that are built.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import torch

from benchmarks.simulate.processors import Processor
from outrider.draft import tree_drafter
from outrider.draft.budget.budget import TreeBudget
from outrider.draft.budget.step_choice import StepChoice
from outrider.draft.config import DraftConfig
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.cache.kv_view import KVView
from outrider.engine.config import EngineConfig
from outrider.engine.events import Finished, TokensEmitted
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.runner import ModelRunner, PassOutput
from outrider.engine.passes.step_times import RunningStepTimes
from outrider.verifier.params import Tier
from tests.engines import make_engine, make_request, random_prompt, twins

# The token that a small model names which agrees with nothing.
_WRONG_TOKEN = 2


class Delivery(NamedTuple):
    """Tokens that a stream got in a step, and when."""

    at_s: float
    num_tokens: int


class VirtualMachine:
    """Streams of an engine on a processor. What may change while it runs is public."""

    def __init__(
        self,
        processor: Processor,
        *,
        agreement: float,
        believed: Callable[[int], float] = lambda rows: 1.0,
        sources: Sequence[Any] = ("model",),
        speculates: bool = True,
        temperature: float = 1.0,
        seed: int = 5,
        **options: Any,
    ) -> None:
        """`believed`: how slow the machine was when the curves were measured.

        `agreement`: the chance that the small model names the large one's token, of a stream that
        has none of its own.
        """
        self.processor = processor
        self.agreement = agreement
        self.slowness = 1.0
        self.now_s = 0.0
        self.lag_s = 0.0
        self.num_tokens = 0
        self.num_draft_passes = 0
        self.num_trees = 0
        self.deliveries: dict[str, list[Delivery]] = {}
        self._agreements: dict[str, float] = {}  # by name, which is such a stream's salt, too
        self._names_of_views = WeakKeyDictionary[KVView, str]()
        self._rng = np.random.default_rng(seed)
        self._names = map(str, count())
        self._temperature = temperature
        self._true = {
            tier: RunningStepTimes(processor.curve(tier, lambda rows: 1.0))
            for tier in ("large", "small")
        }
        self.times = {
            tier: RunningStepTimes(processor.curve(tier, believed)) for tier in ("large", "small")
        }
        self.engine = make_engine(
            twins(),
            budget=TreeBudget(target_pass_s=self.times["large"], draft_pass_s=self.times["small"]),
            draft=DraftConfig(sources=tuple(sources)),
            drafter_clock=lambda: self.now_s + self.lag_s,
            speculates=speculates,
            large_blocks=4096,
            small_blocks=4096,
            config=EngineConfig(max_sequences=64),
            **options,
        )
        for tier, runner in self.engine._runners.items():
            self._put_around(tier, runner)
        self.open: set[str] = set()

    @property
    def choice(self) -> StepChoice:
        """What chooses the drafter's steps."""
        drafter = self.engine._drafter
        assert isinstance(drafter, TreeDrafter)
        return drafter.choice

    def _put_around(self, tier: Tier, runner: ModelRunner) -> None:
        forward, new_view = runner.forward, runner.new_view

        def named(salt: str, *args: Any, **options: Any) -> KVView:
            view = new_view(salt, *args, **options)
            self._names_of_views[view] = salt
            return view

        def timed(slices: Sequence[Any], *args: Any, **options: Any) -> PassOutput:
            output = forward(slices, *args, **options)
            num_rows = sum(len(piece.token_ids) for piece in slices)
            noise = float(np.exp(self._rng.normal(0.0, 0.03)))
            seconds = self._true[tier](num_rows) * self.slowness * noise
            self.times[tier].observe(num_rows, seconds)
            self.now_s += seconds
            if tier == "small":
                self.num_draft_passes += 1
                self._spend_on_host(len(slices))
                return self._disagree(output, slices)
            return output

        runner.forward = timed  # type: ignore[method-assign]
        runner.new_view = named  # type: ignore[method-assign]

    def _spend_on_host(self, num_streams: int) -> None:
        host_s = self.processor.tree_host_s + num_streams * self.processor.stream_host_s
        self.now_s += host_s * self.slowness

    def _disagree(self, output: PassOutput, slices: Sequence[ForwardSlice]) -> PassOutput:
        agreements = [
            self._agreements.get(self._names_of_views[piece.view], self.agreement)
            for piece in slices
            for _ in range(piece.num_logit_rows)
        ]
        if not agreements:  # rows of a forest on the device are no slice's
            agreements = [self.agreement] * len(output.logits)
        is_wrong = torch.tensor(self._rng.random(len(agreements)) >= agreements)
        output.logits[is_wrong] = 0.0
        output.logits[is_wrong, _WRONG_TOKEN] = 50.0
        return output

    def step(self) -> None:
        """Run one step."""
        built = 0

        def counted(**options: Any) -> Any:
            nonlocal built
            built += 1
            return new_tree(**options)

        new_tree = tree_drafter.new_tree
        with patch.object(tree_drafter, "new_tree", counted):
            events = self.engine.step()
        processor = self.processor
        num_streams = len(self.open)
        host_s = processor.step_host_s + num_streams * processor.stream_host_s
        self.now_s += host_s * self.slowness
        if built:
            self._spend_on_host(built)
            self.num_trees += built
        for event in events:
            if isinstance(event, TokensEmitted):
                self.num_tokens += len(event.token_ids)
                delivery = Delivery(self.now_s, len(event.token_ids))
                self.deliveries[event.request_id].append(delivery)
            if isinstance(event, Finished):
                self.open.discard(event.request_id)

    def submit(
        self,
        max_tokens: int,
        *,
        seed: int | None = None,
        agreement: float | None = None,
        num_prompt: int = 6,
        **sampling: Any,
    ) -> None:
        """Begin a stream. `seed`: a number of an earlier one, which is said again.

        `agreement`: its own chance that a guess is right; then it shares nothing with others.
        `num_prompt`: the tokens of its prompt.
        """
        name = next(self._names)
        seed = int(name) if seed is None else seed
        sampling = {"temperature": self._temperature, "seed": seed} | sampling
        if agreement is not None:
            self._agreements[name] = agreement
            sampling["cache_salt"] = name
        prompt = random_prompt(num_prompt, seed=seed)
        request = make_request(name, prompt, max_tokens=max_tokens, **sampling)
        self.engine.submit(request)
        self.open.add(name)
        self.deliveries[name] = []

    def run(
        self, seconds: float, *, num_streams: int = 1, max_tokens: int = 450, num_prompt: int = 6
    ) -> float:
        """Keep so many streams open for so long; return tokens a second."""
        begun_s, begun = self.now_s, self.num_tokens
        while self.now_s < begun_s + seconds:
            while len(self.open) < num_streams:
                self.submit(max_tokens, num_prompt=num_prompt)
            self.step()
        return (self.num_tokens - begun) / (self.now_s - begun_s)

    def drain(self) -> None:
        """Let the open streams end."""
        while self.engine.has_work:
            self.step()
