"""An answer that other replicas are to judge, and what they said of it."""

from dataclasses import dataclass, field
from typing import Final

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.request import LOW, EngineRequest, LatencyObjective, Verification
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.engines.fleet.replica_attempt import ReplicaAttempt
from outrider.verifier.params import Hypothesis, SamplingParams
from outrider.verifier.token_logprobs import Judgement

# No tenant's, so a judge computes all of the text itself, from none of the author's blocks. And a
# private one, so nothing of it goes to a disk, to other engines or into published news.
_SALT: Final = f"{PRIVATE_SALT}audit"
_TOKEN_BYTES: Final = 40  # of an id in a tuple

# Outside deterministic mode a near tie may fall either way, with a gap of some hundredths. An
# honest answer has less than one in a hundred tokens of that kind.
_ROUNDING_GAP: Final = 1.0
_ROUNDING_GAP_PER_TOKEN: Final = 0.01


@dataclass(slots=True, kw_only=True, eq=False)
class AuditedAnswer:
    """A whole answer of one replica."""

    attempt: ReplicaAttempt
    """How it was written."""
    token_ids: tuple[int, ...]
    kept_s: float
    """When it was kept, by the audits' clock."""
    verdicts: dict[EngineReplica, bool | None] = field(default_factory=dict)
    """By judge: whether it would have written the same; None where it did not say."""

    @property
    def author(self) -> EngineReplica:
        """The replica that wrote it."""
        return self.attempt.replica

    @property
    def num_bytes(self) -> int:
        """The texts' size in memory, nearly."""
        request = self.attempt.request
        texts = (self.token_ids, request.prompt_token_ids, request.prediction_token_ids)
        num_tokens = sum(map(len, (*texts, request.retracted_token_ids)))
        return _TOKEN_BYTES * num_tokens + len(request.grammar.text if request.grammar else "")

    @property
    def is_stale(self) -> bool:
        """True if its author was started anew: what is found says nothing of the new process."""
        return self.author.generation != self.attempt.generation

    @property
    def agreeing(self) -> list[EngineReplica]:
        """The judges that would have written the same."""
        return [judge for judge, is_same in self.verdicts.items() if is_same]

    @property
    def differing(self) -> list[EngineReplica]:
        """The judges that would have written something else."""
        return [judge for judge, is_same in self.verdicts.items() if is_same is False]

    @property
    def is_confirmed(self) -> bool:
        """True if nobody else need be asked."""
        return bool(self.agreeing) and not self.differing

    @property
    def odd_one(self) -> EngineReplica | None:
        """The replica that differs from all others; None where there is none, or no telling."""
        if self.agreeing:
            return self.differing[0] if len(self.differing) == 1 else None
        return self.author if len(self.differing) > 1 else None

    def judging(self, request_id: str) -> EngineRequest:
        """Return the request that has it judged, by one prefill."""
        written = self.attempt.request
        hypothesis = Hypothesis(sampling=written.sampling, noise_tier=written.tier)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=written.prompt_token_ids + self.token_ids,
            tier=written.tier,
            sampling=SamplingParams(max_tokens=0),
            grammar=written.grammar,
            adapters=written.adapters,
            cache_salt=_SALT,
            priority=LOW,
            objective=LatencyObjective(is_batch=True),
            verification=Verification(num_tokens=len(self.token_ids), hypotheses=(hypothesis,)),
        )


def can_be_audited(request: EngineRequest) -> bool:
    """Return whether an answer can be judged, and is its replica's own work alone.

    Private texts stay where they are. Blocks from another engine may be that one's fault.
    """
    is_private = request.cache_salt.startswith(PRIVATE_SALT)
    is_own = request.resumed_token_ids is None and request.source is None
    is_plain = request.cascade is None and request.verification is None
    return is_own and is_plain and not is_private and bool(request.prompt_token_ids)


def is_same(found: Judgement, *, is_deterministic: bool) -> bool:
    """Return whether a text is what its judge would have written, rounding aside."""
    if is_deterministic:
        return found.num_same == found.num_tokens
    return found.total_gap <= _ROUNDING_GAP + _ROUNDING_GAP_PER_TOKEN * found.num_tokens
