"""Gumbel noise from a counter-based generator, keyed by (seed, stream, position, token id).

The same key gives the same bits on every device and in every batch: nothing is carried from one
draw to the next. A draw hashes the token id between the two words of a 64-bit row key with two
rounds of a 32-bit finaliser (the low-bias constants of C. Wellons, "hash-prospector", 2018), which
needs only shifts, exclusive-ors and 32-bit products and so reads the same in torch, in C++
(kernels/cpu/sampling_kernels.h), in Triton and in its interpreter.
"""

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.cpu.structs import NoiseCall
from outrider.kernels.sampling.compiled import instruction_set, num_threads_for, row_library
from outrider.kernels.triton_support import jit, launch, tl, uses_triton

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
# The largest 32-bit fraction that float32 can tell from 1.
_MAX_FRACTION = 1.0 - 2.0**-24
_BLOCK = 1024


def _splitmix64(state: int) -> int:
    """Return an output of the SplitMix64 generator (Steele, Lea, Flood, 2014) at `state`."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def stream_key(seed: int, stream: int) -> int:
    """Return what the positions of one stream have in common: 64 bits (host integers)."""
    return _splitmix64(_splitmix64(seed & _MASK_64) ^ stream)


def row_key(seed: int, stream: int, position: int) -> tuple[int, int]:
    """The two signed 32-bit words that key one row of noise (host integers)."""
    key = _splitmix64(stream_key(seed, stream) ^ position)
    low, high = key & _MASK_32, key >> 32
    return (low ^ (1 << 31)) - (1 << 31), (high ^ (1 << 31)) - (1 << 31)


def row_keys(
    stream_keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """`row_key` of many rows, int32 [..., 2], from their `stream_key`s and positions [...]."""
    state = stream_keys ^ positions.astype(np.uint64)
    state = state + np.uint64(0x9E3779B97F4A7C15)  # products and sums wrap
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = np.ascontiguousarray(state ^ (state >> np.uint64(31)))
    words = np.stack((state & np.uint64(_MASK_32), state >> np.uint64(32)), axis=-1)
    return words.astype(np.uint32).view(np.int32)


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


def _reference_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """The specification of the noise, from that of its bits."""
    unsigned = gumbel_bits(keys, vocab_size).to(torch.int64) & _MASK_32
    # [num_rows, vocab_size]; adding a half before scaling keeps float32's resolution near 0
    fraction = unsigned.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_MAX_FRACTION)
    return fraction.neg_().log1p_().neg_().log_().neg_()


@jit
def _mix_words(bits):  # type: ignore[no-untyped-def]
    """The 32-bit finaliser on uint32."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    return bits


@jit
def gumbel_bits_of(key_low, key_high, token_ids):  # type: ignore[no-untyped-def]
    """`gumbel_bits` inside a kernel: uint32 for int32 words of the row's key and token ids."""
    low = key_low.to(tl.uint32, bitcast=True)
    high = key_high.to(tl.uint32, bitcast=True)
    return _mix_words(_mix_words(token_ids.to(tl.uint32, bitcast=True) ^ low) ^ high)


@jit
def gumbel_of(key_low, key_high, token_ids):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise inside a kernel: float32, from the bits of `gumbel_bits_of`."""
    bits = gumbel_bits_of(key_low, key_high, token_ids)
    fraction = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    # log1p(-w) by logarithms alone (W. Kahan): what rounding took from 1 - w is known exactly.
    rest = 1.0 - fraction
    taken = 1.0 - rest
    is_tiny = taken == 0.0
    corrected = tl.log(rest) * (fraction / tl.where(is_tiny, 1.0, taken))
    return -tl.log(-tl.where(is_tiny, -fraction, corrected))


@jit
def _gumbel_noise_kernel(noise_ptr, keys_ptr, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key_low, key_high = tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1)
    noise = gumbel_of(key_low, key_high, token_ids)
    tl.store(noise_ptr + row * vocab_size + token_ids, noise, mask=token_ids < vocab_size)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [num_rows, vocab_size], for int32 keys [num_rows, 2].

    With w uniform in (0, 1), G = -log(-log(1 - w)): small w, where float32 is finest, make the
    large values that decide an argmax. Values lie in [-2.9, 22.9]. The bits below are the same on
    every device, the values to rounding.
    """
    noise = torch.empty(keys.shape[0], vocab_size, device=keys.device)
    if not uses_triton(keys):
        library = row_library(noise)
        if library is None:
            return _reference_noise(keys, vocab_size)
        words = keys.contiguous()
        call = NoiseCall(len(words), vocab_size, words.data_ptr(), noise.data_ptr())
        library.draw_noise(ctypes.addressof(call), instruction_set(), num_threads_for(noise))
        return noise
    grid = (keys.shape[0], -(-vocab_size // _BLOCK))
    launch(_gumbel_noise_kernel, grid, noise, keys.contiguous(), vocab_size, BLOCK=_BLOCK)
    return noise
