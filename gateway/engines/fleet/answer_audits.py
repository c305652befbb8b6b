"""Audits of a fleet's answers: a replica that has nothing to do judges what another one wrote.

Replicas of one numerics fingerprint write the same text for the same request, so what differs has
broken memory, a bad driver, or weights that are not those it names (docs/scale.md).
"""

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, cast, get_args
from uuid import uuid4

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.engine.events import EngineEvent, Failed, PrefillDone
from outrider.gateway.engines.fleet.audited_answer import AuditedAnswer, can_be_audited, is_same
from outrider.gateway.engines.fleet.replica import EngineReplica, numerics_of
from outrider.gateway.engines.fleet.replica_attempt import ReplicaAttempt, is_loss
from outrider.gateway.engines.fleet.roster import Roster

logger = logging.getLogger(__name__)

Outcome = Literal["same", "different", "odd", "removed", "refused", "missed"]

KEPT_S: Final = 120.0
"""An answer that no replica had time for is forgotten."""
MOST_ANSWERS: Final = 64
MOST_BYTES: Final = 2**24
_MOST_JUDGES: Final = 4  # of one answer
_JUDGING_S: Final = 60.0
_AFTER_LOSS_S: Final = 300.0  # without audits: a text that ends engines ends one
_LOOK_S: Final = 0.2  # between two looks for a replica that is idle
_MOST_RECENT: Final = 50
_FEWEST_ODD: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPolicy:
    """How much is audited, and what follows."""

    share: float = 0.0
    """Of the answers that could be; 0: none is."""
    removes_at: float = 0.0
    """A replica that alone differed in this share of its last audits gets no more requests; 0: it
    is told of only."""


class AnswerAudits:
    """Keeps some of a pool's answers for a moment, and has them judged by idle replicas."""

    def __init__(self, policy: AuditPolicy, roster: Roster) -> None:
        self.policy = policy
        self._roster = roster
        self._rng = random.Random()
        self._kept: list[AuditedAnswer] = []
        # Both by replica's name, as metrics are.
        self._outcomes: defaultdict[str, Counter[Outcome]] = defaultdict(Counter)
        self._were_odd: defaultdict[str, deque[bool]] = defaultdict(
            partial(deque, maxlen=_MOST_RECENT)
        )
        self._resumes_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Forget all answers. May be called again."""
        self._kept.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def counts(self) -> Iterator[tuple[str, Outcome, int]]:
        """Yield how often each replica came out how, zeros too; nothing where none is audited."""
        for name in self._roster.replicas if self.policy.share else ():
            for outcome in get_args(Outcome):
                yield name, outcome, self._outcomes[name][outcome]

    @property
    def num_kept(self) -> int:
        """Count the answers that await their end."""
        return len(self._kept)

    def keep(self, attempt: ReplicaAttempt, token_ids: Sequence[int]) -> None:
        """Take in a whole answer; a share of those that can be audited is kept."""
        is_chosen = self._rng.random() < self.policy.share and bool(token_ids)
        if not is_chosen or not can_be_audited(attempt.request):
            return
        answer = AuditedAnswer(attempt=attempt, token_ids=tuple(token_ids), kept_s=time.monotonic())
        if not self._judges(answer):
            return
        self._kept.append(answer)
        while self.num_kept > MOST_ANSWERS or sum(a.num_bytes for a in self._kept) > MOST_BYTES:
            self._settle(self._kept[0])
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._audit_all(), name="answer-audits")

    # ---- judges ---------------------------------------------------------------------------

    async def _audit_all(self) -> None:
        """Have answers judged until none is left."""
        while self._kept:
            if (found := self._next()) is not None:
                await self._audit(*found)
            elif self._kept:
                await asyncio.sleep(_LOOK_S)

    def _next(self) -> tuple[AuditedAnswer, EngineReplica] | None:
        """Return an answer and who judges it now, if any; settle what waits for nobody."""
        now_s = time.monotonic()
        for answer in list(self._kept):
            left = self._judges(answer)
            if not left or now_s - answer.kept_s > KEPT_S:
                self._settle(answer)
            elif now_s >= self._resumes_s and (idle := list(filter(_is_idle, left))):
                return answer, self._rng.choice(idle)
        return None

    def _judges(self, answer: AuditedAnswer) -> list[EngineReplica]:
        """Return the replicas that an answer is still to be judged by."""
        if answer.is_confirmed or answer.is_stale or len(answer.verdicts) >= _MOST_JUDGES:
            return []
        attempt = answer.attempt
        numerics = numerics_of(attempt.info, attempt.request)
        return [
            replica
            for replica in self._roster.replicas.values()
            if replica not in (answer.author, *answer.verdicts)
            and replica.serves(attempt.request, numerics)
            and replica.is_up
            and not replica.is_draining
        ]

    async def _audit(self, answer: AuditedAnswer, judge: EngineReplica) -> None:
        """Have one replica judge an answer."""
        verdict = None
        try:
            async with asyncio.timeout(_JUDGING_S):
                verdict = await self._verdict(answer, judge)
        except EngineDiedError:
            self._resumes_s = time.monotonic() + _AFTER_LOSS_S
        except (TimeoutError, EngineError) as error:
            logger.info("no audit replica=%s reason=%r", judge.name, error)
        answer.verdicts[judge] = verdict
        if verdict is None:
            self._outcomes[judge.name]["refused"] += 1

    async def _verdict(self, answer: AuditedAnswer, judge: EngineReplica) -> bool | None:
        """Return whether the judge would have written the same; None where it does not say.

        Raises EngineError.
        """
        request = answer.judging(f"audit-{uuid4().hex}")
        found: PrefillDone | None = None
        stream = cast("AsyncGenerator[EngineEvent, None]", judge.client.submit(request))
        judge.begin(request.request_id, len(request.prompt_token_ids))
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, PrefillDone):
                        found = event
                    elif isinstance(event, Failed):
                        raise (EngineDiedError if is_loss(event) else EngineError)(event.message)
        finally:
            judge.end(request.request_id)
        info = judge.info
        if found is None or info is None or not found.judgements:
            return None
        if found.numerics != answer.attempt.numerics:  # another one's adapter, or process
            return None
        is_deterministic = info.tiers[request.tier].deterministic
        return is_same(found.judgements[0], is_deterministic=is_deterministic)

    # ---- what was found -------------------------------------------------------------------

    def _settle(self, answer: AuditedAnswer) -> None:
        """Count what was found of an answer, and forget it."""
        self._kept.remove(answer)
        author, agreeing, differing = answer.author, answer.agreeing, answer.differing
        outcomes = self._outcomes[author.name]
        if answer.is_stale or not (agreeing or differing):
            outcomes["missed"] += 1
            return
        odd = answer.odd_one
        outcomes["different" if differing else "same"] += 1
        if differing:
            logger.error(
                "replicas differ author=%s agree=%s differ=%s odd=%s tokens=%d",
                author.name,
                ",".join(each.name for each in agreeing),
                ",".join(each.name for each in differing),
                "unknown" if odd is None else odd.name,
                len(answer.token_ids),
            )
            if odd is None:
                return
        for replica in (author, *agreeing, *differing):
            self._were_odd[replica.name].append(replica is odd)
        if odd is not None:
            self._note_odd(odd)

    def _note_odd(self, replica: EngineReplica) -> None:
        """Count a replica that differed from all others; at the set rate, it is taken out."""
        outcomes, were_odd = self._outcomes[replica.name], self._were_odd[replica.name]
        outcomes["odd"] += 1
        limit = max(self.policy.removes_at * len(were_odd), _FEWEST_ODD)
        if self.policy.removes_at and sum(were_odd) >= limit and not replica.is_draining:
            outcomes["removed"] += 1
            were_odd.clear()
            self._roster.distrust(replica)


def _is_idle(replica: EngineReplica) -> bool:
    return not (replica.load.num_running or replica.load.num_queued_prompt_tokens)
