"""Gumbel noise from a counter-based generator, keyed by (seed, stream, position, token id).

The same key gives the same bits on every device and in every batch: nothing is carried from one
draw to the next. A draw hashes the token id between the two words of a 64-bit row key with two
rounds of a 32-bit finaliser (the low-bias constants of C. Wellons, "hash-prospector", 2018), which
needs only shifts, exclusive-ors and 32-bit products and so reads the same in torch, in Triton and
in its interpreter.
"""

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
# The largest 32-bit fraction that float32 can tell from 1.
_MAX_FRACTION = 1.0 - 2.0**-24


def _splitmix64(state: int) -> int:
    """One output of the SplitMix64 generator (Steele, Lea, Flood, 2014) at `state`."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def row_key(seed: int, stream: int, position: int) -> tuple[int, int]:
    """The two signed 32-bit words that key one row of noise (host integers)."""
    key = _splitmix64(_splitmix64(_splitmix64(seed & _MASK_64) ^ stream) ^ position)
    low, high = key & _MASK_32, key >> 32
    return (low ^ (1 << 31)) - (1 << 31), (high ^ (1 << 31)) - (1 << 31)


def _mix(bits: Tensor) -> Tensor:
    """The 32-bit finaliser on int32, in place; products wrap, shifts are made logical."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _MULTIPLIER_1
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _MULTIPLIER_2
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def gumbel_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """Random bits of every (row, token): int32 [num_rows, vocab_size] for int32 keys [num_rows, 2].

    The specification that every other implementation must equal bit for bit.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = _mix(token_ids[None, :] ^ keys[:, :1])  # [num_rows, vocab_size]
    return _mix(bits ^ keys[:, 1:])


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [num_rows, vocab_size], for int32 keys [num_rows, 2].

    With w uniform in (0, 1), G = -log(-log(1 - w)): small w, where float32 is finest, make the
    large values that decide an argmax. Values lie in [-2.9, 22.9].
    """
    unsigned = gumbel_bits(keys, vocab_size).to(torch.int64) & _MASK_32
    # [num_rows, vocab_size]; adding a half before scaling keeps float32's resolution near 0
    fraction = unsigned.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_MAX_FRACTION)
    return fraction.neg_().log1p_().neg_().log_().neg_()
