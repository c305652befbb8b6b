"""Settings of the step loop."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of a step and of the queue.

    max_sequences: how many run at once, of both tiers. max_waiting: where so many wait, more are
    refused; those of a tenant with less than its share of the room are taken in until there are
    twice as many.
    max_tokens_per_step: rows in one pass, decode first and prefill chunks in what is left.
    prefill_chunk_s: how long the prefill part of a pass may take, so that a long prompt does not
    stall the answers beside it (measured while running; at least `min_prefill_tokens` anyway).
    lone_prefill_s: the same where no answer waits: commands do, and requests that come meanwhile.
    small_pass_share: while small-tier answers are written beside a large pass, small passes go on
    until they have taken this share of the large pass's time, so that a small answer runs at a pace
    of its own; `min_small_passes` and `max_small_passes` bound their number. overlap: host work
    that a step leaves behind (events to send, verdicts to learn from) is done while a GPU is busy
    with the next step; off, for debugging, before it. max_adapters, max_adapter_bytes: of each
    model's LoRA adapters that are resident at once.
    """

    max_sequences: int = 64
    max_waiting: int = 512
    max_tokens_per_step: int = 2048
    prefill_chunk_s: float = 0.1
    lone_prefill_s: float = 1.0
    min_prefill_tokens: int = 64
    small_pass_share: float = 0.4
    min_small_passes: int = 4
    max_small_passes: int = 32
    overlap: bool = True
    max_adapters: int = 64
    max_adapter_bytes: int = 1 << 30
