"""Settings of the step loop."""

from dataclasses import dataclass
from typing import Final, Literal

EngineRole = Literal["both", "prefill", "decode"]
"""prefill: computes prompts for other engines. decode: has long prompts computed by those, where
that pays. both: computes its own."""

MAX_SCORED_ROWS: Final = 256
"""Rows of prompts in one pass whose log-probabilities are wanted: each takes a vocabulary of
float32, however long the prompt is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of a step and of the queue."""

    max_sequences: int = 64
    """Sequences of both tiers that run at once."""
    max_waiting: int = 512
    """Where this many wait, more are refused. A tenant with less than its share of the queue is
    still admitted, until twice as many wait."""
    max_tokens_per_step: int = 2048
    """Rows in one pass: decode rows first, prefill chunks in what is left."""
    prefill_chunk_s: float = 0.1
    """Time for the prefill part of a pass, so that a long prompt does not stall the answers beside
    it. Passes are measured while the engine runs."""
    lone_prefill_s: float = 1.0
    """The same where no answer waits. Commands and new requests still do."""
    min_prefill_tokens: int = 64
    """Prompt tokens that a pass may always take, whatever `prefill_chunk_s` says."""
    small_pass_share: float = 0.4
    """Small passes beside a large pass go on until they took this share of its time. So a small
    answer runs at a pace of its own."""
    min_small_passes: int = 4
    """Fewest small passes beside a large one."""
    max_small_passes: int = 32
    """Most small passes beside a large one."""
    overlap: bool = True
    """A step leaves host work behind: events to send, verdicts to learn from. True: it is done
    while a GPU runs the next step. False: it is done before that step, for debugging."""
    max_adapters: int = 64
    """LoRA adapters of each model that are resident at once."""
    max_adapter_bytes: int = 1 << 30
    """Bytes of each model's resident LoRA adapters."""
    role: EngineRole = "both"
    """Beside other engines. It changes nothing here; gateways choose by it."""
