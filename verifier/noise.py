"""The noise rows of one sequence, computed once and used by its drafter and its verifier."""

import torch
from torch import Tensor

from outrider.kernels.sampling.gumbel_noise import gumbel_noise, row_key, stream_key
from outrider.verifier.params import SamplingParams, Tier

_NUM_AHEAD = 16


class SequenceNoise:
    """Gumbel noise by position of the token to be emitted.

    The n choices of a request and the two tiers draw from separate streams: the decision to
    escalate has looked at the small tier's tokens, so the large one must not reuse their noise.
    """

    def __init__(self, sampling: SamplingParams, tier: Tier, *, vocab_size: int) -> None:
        self._seed = sampling.seed
        self._stream = sampling.choice_index * 2 + (tier == "large")
        # What `outrider.kernels.sampling.gumbel_noise.row_keys` makes keys from, together with
        # positions.
        self.stream_key = stream_key(sampling.seed, self._stream)
        self._vocab_size = vocab_size
        self._first = 0
        self._rows: Tensor | None = None

    def rows(self, first_position: int, num_positions: int, device: torch.device) -> Tensor:
        """Noise for consecutive positions, float32 [num_positions, vocab_size]."""
        offset = first_position - self._first
        if self._rows is None or offset < 0 or offset + num_positions > self._rows.shape[0]:
            keys = torch.tensor(
                [
                    row_key(self._seed, self._stream, first_position + ahead)
                    for ahead in range(max(num_positions, _NUM_AHEAD))
                ],
                dtype=torch.int32,
                device=device,
            )
            self._rows = gumbel_noise(keys, self._vocab_size)
            self._first, offset = first_position, 0
        return self._rows[offset : offset + num_positions]
