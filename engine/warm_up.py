"""Runs a request of every kind before the first client's: kernels compile when first launched."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from outrider.engine.core import Engine
from outrider.engine.events import AnswerHeld
from outrider.engine.request import EngineRequest
from outrider.verifier.params import CascadeParams, SamplingParams, Tier

# A row of a decode, chunks of a prompt as they come; text that repeats lets every source guess.
_PROMPT_LENGTHS = (5, 40, 300)
_MAX_TOKENS = 12
_BRIEF_PROMPT, _BRIEF_TOKENS = 24, 4
_KINDS = (
    SamplingParams(max_tokens=_MAX_TOKENS),
    SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.8, seed=1),
    SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.8, top_k=40, top_p=0.9, seed=2),
    SamplingParams(max_tokens=_MAX_TOKENS, presence_penalty=0.5),
    SamplingParams(max_tokens=_MAX_TOKENS, repetition_penalty=1.1),
)
_PERIOD = 11
# A salt of its own, so that no request finds these prompts in the prefix cache.
_CACHE_SALT = "warm-up"


def warm_up(engine: Engine, on_progress: Callable[[int, int], None] | None = None) -> None:
    """Serve requests of every kind, alone and together, on an engine that is thrown away then.

    It counts what it serves and learns from it. `on_progress(done, total)` counts requests.
    """
    requests = list(_requests(engine))
    rounds = [[request] for request in requests] + [requests]
    done, total = 0, 2 * len(requests)
    for batch in rounds:
        for request in batch:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, AnswerHeld):  # at once: its blocks may be what others wait for
                    engine.keep_on_tier(event.request_id)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, total)


def warm_up_briefly(engine: Engine) -> None:
    """Serve one short request of each tier: a prefill, decodes and a draft, as at the first client.

    For an engine that is thrown away then, where no kernel has to be compiled.
    """
    tiers = engine.info().tiers
    vocab_size = min(info.vocab_size for info in tiers.values())
    for tier, info in tiers.items():
        length = max(min(_BRIEF_PROMPT, info.max_context - _BRIEF_TOKENS), 1)
        sampling = SamplingParams(max_tokens=_BRIEF_TOKENS)
        engine.submit(_request(f"{_CACHE_SALT}-{tier}", tier, length, vocab_size, sampling))
        while engine.has_work:
            engine.step()


def _requests(engine: Engine) -> Iterator[EngineRequest]:
    known = engine.info()
    tiers = known.tiers
    vocab_size = min(info.vocab_size for info in tiers.values())
    for tier, info in tiers.items():
        for number, sampling in enumerate(_KINDS):
            wanted = _PROMPT_LENGTHS[number % len(_PROMPT_LENGTHS)]
            length = max(min(wanted, info.max_context - _MAX_TOKENS), 1)
            yield _request(f"{_CACHE_SALT}-{tier}-{number}", tier, length, vocab_size, sampling)
    if known.speculation and len(tiers) > 1:
        # Answers whose candidates are ranked for the other tier, and both models' distributions.
        longest = min(own.max_context for own in tiers.values()) - _MAX_TOKENS
        for number, sampling in enumerate(_KINDS):
            name, length = f"{_CACHE_SALT}-both-{number}", max(min(_BRIEF_PROMPT, longest), 1)
            plain = _request(name, "small", length, vocab_size, sampling)
            yield replace(plain, may_escalate=True)
            mixed = replace(plain, request_id=f"{name}-cascade", tier="large")
            yield replace(mixed, cascade=CascadeParams(alpha=0.5))


def _request(
    request_id: str, tier: Tier, length: int, vocab_size: int, sampling: SamplingParams
) -> EngineRequest:
    prompt = tuple(place % min(_PERIOD, vocab_size) for place in range(length))
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        tier=tier,
        sampling=sampling,
        cache_salt=_CACHE_SALT,
    )
