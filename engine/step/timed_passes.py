"""Forward passes of all models, their times, and the host work that is done beside them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from torch import Tensor

from outrider.engine.config import EngineConfig
from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.level_graphs import RecordedTrees
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.protocols import DraftLevels, DraftModel
from outrider.engine.queue.scheduler import Scheduler
from outrider.engine.step.deferred_host_work import DeferredHostWork
from outrider.engine.step.snapshot import StepCounts
from outrider.engine.trees.verify_items import VerifyItem
from outrider.verifier.own_failure import OwnFailure
from outrider.verifier.params import Tier

_PASS_TIME_WEIGHT: Final = 0.1


class TimedPasses:
    """Runs passes and learns how long they take.

    mean_s: seconds of a tier's recent passes, as a running mean.
    """

    def __init__(
        self,
        *,
        runners: Mapping[Tier, ModelRunner],
        scheduler: Scheduler,
        host_work: DeferredHostWork,
        counts: StepCounts,
        config: EngineConfig,
        head: ModelRunner | None = None,
    ) -> None:
        """`head`: of a drafter that reads the large model's hidden states."""
        self._runners = runners
        self._head = head
        self._scheduler = scheduler
        self._host_work = host_work
        self._counts = counts
        self._config = config
        self.mean_s: dict[Tier, float] = {"small": 1e-3, "large": 1e-3}

    def forward(
        self,
        tier: Tier,
        slices: list[ForwardSlice],
        device_rows: DeviceRows | None = None,
        picked: PickedRows | None = None,
    ) -> PassOutput:
        """Start a pass, do the deferred host work, and note the passes that have ended."""
        output = self._runners[tier].forward(slices, device_rows, picked=picked)
        self._host_work.run()
        self._note(tier)
        return output

    def prepare_masks(self, items: Sequence[VerifyItem]) -> None:
        """Have grammars' masks worked out beside the next pass, which their trees are a part of."""
        if not self._host_work.overlaps:  # a pass on the CPU leaves no time for it
            return
        for item in items:
            if item.sequence.grammar is not None and item.sequence.failure is None:
                self._host_work.defer(partial(_prepare_masks, item))

    def grow_level(self, trees: RecordedTrees, model: DraftModel) -> None:
        """Start a recorded level of trees, with all else as for a pass."""
        if model == "head":
            assert self._head is not None, "a head's level without a head"
            self._head.grow_level(trees)
        else:
            self._runners["small"].grow_level(trees)
        self._host_work.run()
        self._note(None if model == "head" else "small")

    def grow_levels(self, levels: DraftLevels) -> None:
        """Run levels of drafts of the small model, with all else as for a pass."""
        levels.run()
        self._host_work.run()
        self._note("small")

    def _note(self, tier: Tier | None) -> None:
        """Take note of the passes of a tier that have ended; None for the head's."""
        runner = self._head if tier is None else self._runners[tier]
        assert runner is not None, "a head's pass without a head"
        for done in runner.take_finished():  # on a GPU earlier ones than the last
            self._counts.forward_s += done.seconds
            if tier is None:
                continue
            self.mean_s[tier] += _PASS_TIME_WEIGHT * (done.seconds - self.mean_s[tier])
            if done.num_logit_rows < done.num_rows:
                self._scheduler.note_pass(tier, num_rows=done.num_rows, elapsed_s=done.seconds)

    def forward_head(
        self,
        slices: list[ForwardSlice],
        device_rows: DeviceRows | None,
        features: Tensor | None,
    ) -> PassOutput:
        """Start a pass of the head; `features`: [num_rows, feature_size]."""
        assert self._head is not None, "a head's pass without a head"
        output = self._head.forward(slices, device_rows, features)
        self._host_work.run()
        self._note(None)
        return output

    def num_small_beside_large(self) -> int:
        """Count how many small passes a large one leaves time for, by the passes' recent times."""
        config, mean_s = self._config, self.mean_s
        affordable = int(config.small_pass_share * mean_s["large"] / mean_s["small"])
        return min(max(affordable, config.min_small_passes), config.max_small_passes)


def _prepare_masks(item: VerifyItem) -> None:
    sequence = item.sequence
    if sequence.grammar is not None:
        with OwnFailure(sequence):
            sequence.grammar.masks(sequence.token_ids, item.tree.paths)
