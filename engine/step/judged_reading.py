"""The small model's part in judging a cascade's answer: it reads the text beside the large one."""

from outrider.engine.config import EngineConfig
from outrider.engine.passes.runner import ForwardSlice
from outrider.engine.protocols import Drafter
from outrider.engine.queue.scheduler import PassPlan, Scheduler
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.step.timed_passes import TimedPasses
from outrider.engine.trees.verify_items import num_scored_rows


class JudgedReading:
    """Gives judges the small model's logits of the rows that a large pass is about to score."""

    def __init__(
        self,
        *,
        drafter: Drafter | None,
        passes: TimedPasses,
        scheduler: Scheduler,
        config: EngineConfig,
    ) -> None:
        self._drafter = drafter
        self._passes = passes
        self._scheduler = scheduler
        self._max_rows = config.max_tokens_per_step

    def run(self, large: PassPlan) -> None:
        """Read what the plan's pass scores; what cannot be read as far is taken from the plan.

        To be called before anything of the step is drafted: drafts may have to give way.
        """
        wanted = [planned for planned in large.prefills if _needs_small(*planned)]
        if self._drafter is None or not wanted:
            return
        pieces: list[tuple[Sequence, ForwardSlice]] = []
        for sequence, num_tokens in sorted(wanted, key=lambda each: each[0].arrival_number):
            end = sequence.view.num_computed_tokens + num_tokens
            max_rows = max(self._max_rows, num_tokens)
            piece = self._drafter.read_judged(sequence, end=end, max_rows=max_rows)
            if piece is not None:
                pieces.append((sequence, piece))
        judges = self._read(pieces) if pieces else set()
        waiting = {sequence.request_id for sequence, _ in wanted} - judges
        large.prefills = [each for each in large.prefills if each[0].request_id not in waiting]

    def _read(self, pieces: list[tuple[Sequence, ForwardSlice]]) -> set[str]:
        """Run rows and hand over their logits; return the requests that have all they need."""
        logits = self._passes.forward("small", [piece for _, piece in pieces]).logits
        judges: set[str] = set()
        row = 0
        for sequence, piece in pieces:
            num_rows = piece.num_logit_rows
            for counts in self._scheduler.counts(sequence, "small"):
                counts.num_draft_rows += len(piece.token_ids)
            piece.view.advance(piece.start_slot + len(piece.token_ids), sequence.token_ids)
            if num_rows and sequence.judge is not None:
                # A copy: the small model's next pass may come before the large one.
                sequence.judge.take_small(logits[row : row + num_rows].clone())
                judges.add(sequence.request_id)
            row += num_rows
        return judges


def _needs_small(sequence: Sequence, num_tokens: int) -> bool:
    """Return whether the next tokens of a prompt are judged by both models."""
    if sequence.judge is None or not sequence.judge.needs_small:
        return False
    return num_scored_rows(sequence, sequence.view.num_computed_tokens + num_tokens) > 0
