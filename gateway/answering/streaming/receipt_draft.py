"""A receipt while its answer is written: collects the tokens, and signs them at the end."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.jobs.receipt_terms import ReceiptTerms
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.contract.answers.responder import RouteReason
from outrider.gateway.contract.schema.responses import OutriderReport
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    from outrider.engine.request import EngineRequest
    from outrider.gateway.answering.streaming.generation import Generation
    from outrider.gateway.contract.schema.receipts import (
        Nonces,
        Receipt,
        ReceiptChoice,
        ReceiptPayload,
    )


class ReceiptDraft:
    """One answer's receipt. What makes and signs it is imported with the first one."""

    def __init__(self, job: Job, terms: ReceiptTerms) -> None:
        self._job = job
        self._terms = terms
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._answers: dict[int, list[int]] = {}

    def note(self, deltas: Iterable[Delta]) -> None:
        """Note what the client gets."""
        for delta in deltas:
            if delta.prompt is not None:
                self._prompts[delta.index] = delta.prompt.token_ids
            self._answers.setdefault(delta.index, []).extend(delta.token_ids)

    def put_into(
        self, report: OutriderReport, generation: "Generation", origin: RouteReason
    ) -> None:
        """Put the receipt of the whole answer into its report, or why there is none."""
        from outrider.gateway.receipts.signing_keys import NoSigningKeyError

        if origin.continues is not None:
            report.no_receipt = "another server began the answer"
        elif any(len(written) > 1 for written in generation.writers):
            report.no_receipt = "two tiers wrote the answer"
        elif len({choice.numerics for choice in generation.choices}) > 1:
            report.no_receipt = "the choices were written in different arithmetic"
        else:
            try:
                report.receipt = self._signed(generation)
            except NoSigningKeyError as error:
                report.no_receipt = str(error)

    def _signed(self, generation: "Generation") -> "Receipt":
        """Make and sign it. Raises NoSigningKeyError."""
        from outrider.gateway.receipts.receipt import draw_nonces, sign

        nonces = [draw_nonces() for _ in self._answers]
        return sign(self._payload(generation, nonces), nonces, self._terms.keys)

    def _payload(self, generation: "Generation", nonces: "list[Nonces]") -> "ReceiptPayload":
        from outrider.gateway.answering.streaming.sse import system_fingerprint
        from outrider.gateway.contract.schema.receipts import ReceiptPayload
        from outrider.gateway.receipts.receipt import VERSION, sampling_of
        from outrider.gateway.settings.extras import own_version

        terms, tier = self._terms, generation.tier
        first = self._request(0, tier)
        is_open = terms.reveals_tiers
        return ReceiptPayload(
            type="outrider-receipt",
            version=VERSION,
            id=self._job.job_id,
            issued_at=int(time.time()),
            model=(terms.model or tier) if is_open else None,
            checkpoint=(terms.checkpoints.get(tier) or None) if is_open else None,
            numerics=system_fingerprint(generation.numerics) if is_open else None,
            adapter=terms.adapters.get(tier) if is_open else None,
            engine=own_version() if is_open else None,
            seed=None if first.sampling.is_greedy else str(first.sampling.seed),
            sampling=sampling_of(
                first, small_checkpoint=terms.checkpoints.get("small") if is_open else None
            ),
            choices=[
                self._choice(index, generation, own)
                for index, own in zip(sorted(self._answers), nonces, strict=True)
            ],
        )

    def _choice(self, index: int, generation: "Generation", nonces: "Nonces") -> "ReceiptChoice":
        from outrider.gateway.contract.schema.receipts import ReceiptChoice
        from outrider.gateway.receipts.receipt import commit

        ((tier, _),) = generation.writers[index]
        is_open = self._terms.reveals_tiers
        number = self._request(index, tier).sampling.choice_index
        return ReceiptChoice(
            index=index,
            tier=tier if is_open else None,
            stream=number * 2 + (tier == "large") if is_open else None,
            prompt=commit("prompt", nonces.prompt, self._prompts[index]),
            answer=commit("answer", nonces.answer, self._answers[index]),
            finish_reason=str(generation.choices[index].finish_reason),
        )

    def _request(self, index: int, tier: Tier) -> "EngineRequest":
        """Return the request by which a tier wrote a choice."""
        plan = self._job.choices[index]
        return plan.escalated if plan.escalated and tier != self._job.tier else plan.request
