"""Recorded processors: how long passes and the host's work take, for engines in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.engine.passes.step_times import StepTimeCurve
from outrider.verifier.params import Tier


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Seconds of passes by their rows, and of the host's work."""

    rows: tuple[int, ...]
    large_s: tuple[float, ...]
    small_s: tuple[float, ...]
    step_host_s: float = 0.00017
    tree_host_s: float = 0.0002
    """The host's seconds for a level of drafts, and as many again for the trees."""
    stream_host_s: float = 0.00004
    """Seconds that each stream adds to `step_host_s` and to `tree_host_s`."""

    def curve(
        self, tier: Tier, slowness: Callable[[int], float] = lambda rows: 1.0
    ) -> StepTimeCurve:
        """Return the curve that is measured while passes are so slow."""
        seconds = self.large_s if tier == "large" else self.small_s
        slow = [each * slowness(rows) for rows, each in zip(self.rows, seconds, strict=True)]
        return StepTimeCurve.from_points(self.rows, slow)


_ROWS: Final = (1, 2, 4, 8, 12, 16, 24, 64, 128)

# A large model of 400 M parameters in bfloat16, and a small one of 25 M, with one thread.
AVX2: Final = Processor(
    rows=_ROWS,
    large_s=(0.047, 0.047, 0.079, 0.152, 0.223, 0.294, 0.436, 1.15, 2.3),
    small_s=(0.003, 0.003, 0.005, 0.0095, 0.014, 0.0184, 0.027, 0.072, 0.144),
)
AVX512: Final = Processor(
    rows=_ROWS,
    large_s=(0.0094, 0.0096, 0.0098, 0.0109, 0.0109, 0.0136, 0.0195, 0.048, 0.095),
    small_s=(0.0006, 0.0006, 0.00062, 0.0007, 0.0007, 0.00085, 0.0012, 0.003, 0.006),
)
# The large model on both threads of one core of Zen 4, within 2 % of the medians of bench_load's
# steps; 128 rows lie between 90 and 167. The bundled small model's passes and the host's work are
# estimated from what whole steps took besides.
ZEN4_CORE: Final = Processor(
    rows=_ROWS,
    large_s=(0.0251, 0.0251, 0.0266, 0.0272, 0.0283, 0.0339, 0.05, 0.1368, 0.266),
    small_s=(0.0002, 0.0002, 0.00022, 0.00025, 0.0003, 0.00035, 0.0005, 0.001, 0.002),
    step_host_s=0.0005,
    tree_host_s=0.0004,
    stream_host_s=0.00002,
)
# SmolLM2 of 135 M parameters, whose host work is a greater share.
SMALL_AVX2: Final = Processor(
    rows=_ROWS,
    large_s=(0.0158, 0.0158, 0.0266, 0.0511, 0.075, 0.0988, 0.1466, 0.387, 0.773),
    small_s=(0.003, 0.003, 0.005, 0.0095, 0.014, 0.0184, 0.027, 0.072, 0.144),
)
# An 8 B and a 0.6 B model on an H100, whose passes hardly depend on their rows.
H100: Final = Processor(
    rows=_ROWS,
    large_s=(0.00495, 0.00495, 0.00496, 0.00498, 0.005, 0.00501, 0.00505, 0.0052, 0.0055),
    small_s=(0.00115, 0.00115, 0.00115, 0.00115, 0.00115, 0.00116, 0.00117, 0.0012, 0.0013),
    tree_host_s=0.0003,
)

PROCESSORS: Final = {
    "avx2": AVX2,
    "avx512": AVX512,
    "zen4-core": ZEN4_CORE,
    "small-avx2": SMALL_AVX2,
    "h100": H100,
}
