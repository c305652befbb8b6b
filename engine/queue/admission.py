"""Checks of requests before they are queued: whether a model can serve them, and in time."""

from typing import Final

from outrider.engine.cache.recurrent_lines import BOUNDARY
from outrider.engine.config import EngineConfig
from outrider.engine.errors import (
    InfeasibleObjectiveError,
    InvalidRequestError,
    PromptTooLongError,
)
from outrider.engine.events import TierInfo
from outrider.engine.model.checkpoint_files import model_name, written_at
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import Drafter
from outrider.engine.queue.block_exchange import kv_fingerprint
from outrider.engine.queue.scheduler import Scheduler
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.ttft_predictor import ForecastCorrection, RemainingWork, predict_ttft_s
from outrider.verifier.params import Tier

# A refused request is told to come back after about this long.
# The least retry time of a refusal.
_LEAST_RETRY_S: Final = 0.05


def check_prompt(request: EngineRequest, runner: ModelRunner) -> None:
    """Raise InvalidRequestError or PromptTooLongError for tokens that the model cannot take."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    for name, tokens in (
        ("prompt", prompt),
        ("prediction", request.prediction_token_ids),
        ("resumed", request.resumed_token_ids or ()),
        ("retracted", request.retracted_token_ids),
    ):
        if tokens and (min(tokens) < 0 or max(tokens) >= runner.vocab_size):
            raise InvalidRequestError(
                f"{name} token ids must lie in [0, {runner.vocab_size}); "
                f"found {min(tokens)} to {max(tokens)}"
            )
    assert runner.max_context is not None
    if len(request.prediction_token_ids) > runner.max_context:
        raise InvalidRequestError(
            f"the prediction has {len(request.prediction_token_ids)} tokens, more than this tier's "
            f"context of {runner.max_context}; shorten it"
        )
    if len(prompt) + request.sampling.max_tokens > runner.max_context:
        raise PromptTooLongError(
            num_tokens=len(prompt),
            max_tokens=request.sampling.max_tokens,
            max_context=runner.max_context,
        )


def check_cascade(
    request: EngineRequest, small: ModelRunner | None, drafter: Drafter | None
) -> None:
    """Raise unless both models can judge every position: both have to know every token."""
    if request.tier != "large":
        raise InvalidRequestError(
            f"a cascade is an answer of the large tier, not of {request.tier!r}"
        )
    if small is None or drafter is None or not drafter.gives_logits:
        raise InvalidRequestError(
            "a cascade needs a small model that drafts for the large one, with its tokenizer"
        )
    check_prompt(request, small)


class ObjectiveGate:
    """Refuses requests whose first token cannot come in time, where they ask for that.

    What it foretells is compared with what comes of the requests that it lets in.
    """

    def __init__(self, scheduler: Scheduler, *, config: EngineConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self.calibration = ForecastCorrection()
        self._forecasts: dict[Sequence, tuple[float, float]] = {}  # (when, predicted seconds)

    def check(self, sequence: Sequence, now_s: float) -> None:
        """Raise InfeasibleObjectiveError where a sequence's `ttft_s` is out of reach.

        With no other sequence there it is only refused if the fastest passes of late would be too
        slow as well: an engine that has nothing else to do can only lose by refusing.
        """
        ttft_s = sequence.request.objective.ttft_s
        if ttft_s is None or self._scheduler.times.row_s(sequence.tier) is None:
            return  # nothing is asked, or nothing is known
        elapsed_s = max(now_s - sequence.arrival_s, 0.0)
        alone_s = self._rows_of(sequence) * self._scheduler.times.best_row_s[sequence.tier]
        if elapsed_s + alone_s > ttft_s:
            raise InfeasibleObjectiveError(
                ttft_s=ttft_s,
                predicted_wait_s=alone_s,
                retry_after_s=None if alone_s > ttft_s else _LEAST_RETRY_S,
            )
        predicted_s = self._predict(sequence, now_s)
        wait_s = predicted_s * self.calibration.ratio
        has_others = bool(self._scheduler.num_running or self._scheduler.waiting)
        if has_others and elapsed_s + wait_s > ttft_s:
            self.calibration.relax()
            raise InfeasibleObjectiveError(
                ttft_s=ttft_s,
                predicted_wait_s=wait_s,
                retry_after_s=max(wait_s - ttft_s, _LEAST_RETRY_S),
            )
        self._forecasts[sequence] = (now_s, predicted_s)

    def note_first_token(self, sequence: Sequence, now_s: float) -> None:
        """Learn from a forecast, if there was one."""
        if (forecast := self._forecasts.pop(sequence, None)) is not None:
            then_s, predicted_s = forecast
            self.calibration.note(predicted_s=predicted_s, actual_s=now_s - then_s)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended; perhaps it never got as far as its first token."""
        self._forecasts.pop(sequence, None)

    def _predict(self, newcomer: Sequence, now_s: float) -> float:
        """Seconds until its first token, before correction."""
        scheduler, times, tier = self._scheduler, self._scheduler.times, newcomer.tier
        pool = newcomer.view.pool
        num_free_sequences = self._config.max_sequences - scheduler.num_running
        num_blocks = pool.num_available
        running: list[RemainingWork] = []
        for other_tier, sequences in scheduler.running.items():
            for sequence in sequences:
                is_here = other_tier == tier
                job = RemainingWork(
                    num_rows=sequence.num_prefill_tokens * is_here * (not sequence.is_decoding),
                    num_tokens=times.remaining_tokens(sequence),
                    num_blocks=len(sequence.view.block_table) * is_here,
                )
                if scheduler.gives_way_to(sequence, newcomer):
                    num_free_sequences, num_blocks = (
                        num_free_sequences + 1,
                        num_blocks + job.num_blocks,
                    )
                else:
                    running.append(job)
        ahead = [self._job(s, len(s.token_ids)) for s in scheduler.ahead_of(newcomer, now_s)]
        others = bool(running or ahead)
        first_token_s = predict_ttft_s(
            running=running,
            ahead=ahead,
            newcomer=self._job(newcomer, self._rows_of(newcomer)),
            num_free_sequences=num_free_sequences,
            num_blocks=num_blocks,
            row_s=times.prefill_row_s(tier, is_alone=not others),
            token_s=times.token_s(tier),
        )
        return first_token_s + (times.step_s or 0.0) * others

    def _job(self, sequence: Sequence, num_rows: int) -> RemainingWork:
        num_tokens = self._scheduler.times.remaining_tokens(sequence)
        num_slots = len(sequence.token_ids) + int(num_tokens)
        return RemainingWork(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_blocks=-(-num_slots // sequence.view.pool.block_size),
        )

    @staticmethod
    def _rows_of(sequence: Sequence) -> int:
        """Return what is left of its prompt after the prefix that is cached."""
        num_cached = sequence.view.match_prefix(sequence.cacheable_token_ids)
        sequence.view.release()
        return len(sequence.token_ids) - num_cached


def _devices(model: CausalModel) -> str:
    """Name the device; with the number of them where the model is on several."""
    count = model.config.num_ranks
    return str(model.device) if count == 1 else f"{count} x {model.device.type}"


def tier_info(tier: Tier, runner: ModelRunner) -> TierInfo:
    """Describe a loaded tier."""
    model = runner.model
    assert runner.max_context is not None
    return TierInfo(
        tier=tier,
        model_id=model_name(model.config.model_id),
        path=model.config.model_id,
        max_context=runner.max_context,
        vocab_size=runner.vocab_size,
        num_parameters=model.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        device=_devices(model),
        created=written_at(model.config.model_id),
        fingerprint=model.fingerprint,
        scheme=model.scheme,
        deterministic=model.deterministic,
        numerics=model.numerics,
        kv_dtype=str(runner.kv_cache.dtype),
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        checkpoint_tokens=0 if model.config.recurrence is None else BOUNDARY,
        kv_fingerprint=kv_fingerprint(runner),
        kv_token_bytes=runner.extents.block_bytes / runner.block_size,
    )
