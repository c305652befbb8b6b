import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.sampling.gumbel_noise import (
    gumbel_bits,
    gumbel_bits_of,
    gumbel_noise,
    gumbel_of,
    row_key,
    row_keys,
    stream_key,
)
from outrider.kernels.triton_support import KernelChoice, jit, launch, tl, triton, use_kernels

SEEDS = st.integers(0, 2**64 - 1)
needs_library = pytest.mark.skipif(
    product_support().library is None, reason="needs the compiled library"
)
ALPHA = 1e-4

GOLDEN_KEYS = [[956087953, 595752380], [-119595540, 1965356962], [341374401, 2045686178]]
GOLDEN_BITS = [
    [-1138827970, -982400492, 1442859596, 228503853],
    [1526268999, -1762029522, 569826529, -90477579],
    [1770724707, -392920214, -1274570769, -625160766],
]
GOLDEN_NOISE = [
    [-0.28325543, -0.38879371, 0.89309758, 2.90643549],
    [0.82310402, 0.11543597, 1.94954157, -1.35069239],
    [0.63204664, -0.87195933, -0.19460781, -0.65606320],
]


def keys_of(*triples: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([row_key(*triple) for triple in triples], dtype=torch.int32)


def chi_square_p(observed: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * observed.sum()
    assert expected.min() > 5
    statistic = float(((observed - expected) ** 2 / expected).sum())
    stats = pytest.importorskip("scipy.stats")
    return float(stats.chi2.sf(statistic, len(probs) - 1))


def test_bits_of_known_keys_never_change() -> None:
    # A change here changes every sampled text: same seed, other answer.
    keys = keys_of((0, 0, 0), (7, 1, 12), (2**64 - 1, 5, 100_000))
    assert keys.tolist() == GOLDEN_KEYS
    assert gumbel_bits(keys, 4).tolist() == GOLDEN_BITS
    torch.testing.assert_close(
        gumbel_noise(keys, 4), torch.tensor(GOLDEN_NOISE), rtol=1e-5, atol=1e-6
    )


def mix(bits: int) -> int:
    bits ^= bits >> 16
    bits = bits * 0x7FEB352D % 2**32
    bits ^= bits >> 15
    bits = bits * 0x846CA68B % 2**32
    return bits ^ bits >> 16


def unmix(bits: int) -> int:
    bits ^= bits >> 16
    bits = bits * pow(0x846CA68B, -1, 2**32) % 2**32
    bits ^= bits >> 15 ^ bits >> 30
    bits = bits * pow(0x7FEB352D, -1, 2**32) % 2**32
    return bits ^ bits >> 16


def reference_bits(key: tuple[int, int], token_id: int) -> int:
    """The generator in plain integers, from its description."""
    low, high = (word % 2**32 for word in key)
    return mix(mix(token_id ^ low) ^ high)


@given(
    seed=SEEDS, stream=st.integers(0, 64), position=st.integers(0, 2**20), vocab=st.integers(0, 40)
)
def test_bits_equal_the_description(seed: int, stream: int, position: int, vocab: int) -> None:
    key = row_key(seed, stream, position)
    expected = [reference_bits(key, token_id) for token_id in range(vocab)]
    bits = gumbel_bits(torch.tensor([key], dtype=torch.int32), vocab)[0]
    assert [word % 2**32 for word in bits.tolist()] == expected


@given(
    rows=st.lists(st.tuples(SEEDS, st.integers(0, 64), st.integers(0, 2**20)), max_size=9),
)
def test_many_keys_at_once_are_the_same(rows: list[tuple[int, int, int]]) -> None:
    streams = np.array([stream_key(seed, stream) for seed, stream, _ in rows], np.uint64)
    positions = np.array([position for _, _, position in rows], np.int64)
    expected = [list(row_key(*row)) for row in rows]
    keys = row_keys(streams, positions)
    assert keys.dtype == np.int32
    assert keys.tolist() == expected
    square = row_keys(streams[:, None], positions[None, :])
    assert square.shape == (len(rows), len(rows), 2)
    assert [square[i, i].tolist() for i in range(len(rows))] == expected


@given(
    seeds=st.lists(SEEDS, min_size=1, max_size=5), vocab=st.integers(1, 50), more=st.integers(0, 50)
)
def test_a_row_depends_on_neither_batch_nor_width(seeds: list[int], vocab: int, more: int) -> None:
    keys = keys_of(*((seed, 1, 9) for seed in seeds))
    together = gumbel_noise(keys, vocab + more)
    for index in range(len(seeds)):
        alone = gumbel_noise(keys[index : index + 1], vocab)
        assert torch.equal(alone[0], together[index, :vocab])


def test_keys_tell_seed_stream_and_position_apart() -> None:
    triples = {
        (seed, stream, position)
        for seed in (0, 1, 2, 3, 2**32, 2**63, 2**64 - 1)
        for stream in range(8)
        for position in range(200)
    }
    assert len({row_key(*triple) for triple in triples}) == len(triples)


def test_the_noise_is_standard_gumbel() -> None:
    stats = pytest.importorskip("scipy.stats")
    keys = keys_of(*((3, 1, position) for position in range(500)))
    noise = gumbel_noise(keys, 2000).double()
    count = noise.numel()
    variance = math.pi**2 / 6
    assert abs(noise.mean() - 0.5772156649) < 5 * math.sqrt(variance / count)
    # The fourth central moment of a Gumbel variable is 5.4 variances squared.
    assert abs(noise.var() - variance) < 5 * variance * math.sqrt(4.4 / count)
    assert stats.kstest(noise.flatten()[::5].numpy(), stats.gumbel_r.cdf).pvalue > ALPHA
    per_token = noise.mean(0)
    assert (per_token - 0.5772).abs().max() < 6 * math.sqrt(variance / 500)


@pytest.mark.slow_cases
@pytest.mark.parametrize("varies", ["seed", "stream", "position"])
def test_argmax_of_logits_plus_noise_is_a_sample(varies: str) -> None:
    count = 40_000
    probs = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    triples = {
        "seed": [(number, 1, 30) for number in range(count)],
        "stream": [(11, number, 30) for number in range(count)],
        "position": [(11, 1, number) for number in range(count)],
    }[varies]
    scores = torch.from_numpy(np.log(probs)).float() + gumbel_noise(keys_of(*triples), len(probs))
    drawn = np.bincount(scores.argmax(-1).numpy(), minlength=len(probs))
    assert chi_square_p(drawn, probs) > ALPHA
    tilted = probs * np.linspace(0.9, 1.1, len(probs))
    assert chi_square_p(drawn, tilted / tilted.sum()) < ALPHA  # the test can fail


@pytest.mark.parametrize(
    "neighbour",
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (1, 0, -1), (2**32, 0, 0), (0, 2, 0)],
)
def test_rows_of_neighbouring_keys_are_uncorrelated(neighbour: tuple[int, int, int]) -> None:
    first = [(1000 + number, 2, 50) for number in range(300)]
    second = [
        tuple(part + step for part, step in zip(triple, neighbour, strict=True)) for triple in first
    ]
    a, b = gumbel_noise(keys_of(*first), 1000), gumbel_noise(keys_of(*second), 1000)
    a, b = a.double().flatten(), b.double().flatten()
    correlation = torch.corrcoef(torch.stack((a, b)))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(a.numel())
    shifted = torch.corrcoef(torch.stack((a[1:], b[:-1])))[0, 1]  # across token ids, too
    assert abs(shifted) < 5 / math.sqrt(a.numel())
    assert abs(torch.corrcoef(torch.stack((a[1:], a[:-1])))[0, 1]) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("choice", ["reference", "auto"])
def test_extreme_bits_give_finite_noise(choice: KernelChoice) -> None:
    extremes = [0, 1, 127, 2**31 - 1, 2**31, 2**32 - 200, 2**32 - 129, 2**32 - 2, 2**32 - 1]
    # Token 0 of a row whose first word is 0 has the bits that its second word is mixed to.
    words = torch.tensor([[0, unmix(bits)] for bits in extremes], dtype=torch.int64)
    keys = words.to(torch.uint32).view(torch.int32)
    assert [bits % 2**32 for bits in gumbel_bits(keys, 1)[:, 0].tolist()] == extremes
    with use_kernels(choice):
        noise = gumbel_noise(keys, 1)[:, 0]
    assert noise.isfinite().all()
    assert noise.min() > -2.9
    assert 22.8 < noise[0] < 22.9
    assert (noise.diff() <= 0).all()  # larger fractions never give larger noise


@needs_library
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 33, 5003])
def test_the_compiled_noise_is_the_specified_one(vocab_size: int) -> None:
    keys = keys_of(*((seed, 1, 5) for seed in range(19)))
    compiled = gumbel_noise(keys, vocab_size)
    with use_kernels("reference"):
        specified = gumbel_noise(keys, vocab_size)
    torch.testing.assert_close(compiled, specified, rtol=1e-6, atol=1e-6)
    apart = keys.repeat(1, 2)[:, :2].T.contiguous().T  # not in one piece
    assert gumbel_noise(apart, vocab_size).equal(compiled)


# ---- the kernel -----------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(triton is None, reason="there is no triton for this system")


@jit
def _bits_kernel(bits_ptr, keys_ptr, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tokens = tl.arange(0, BLOCK)
    bits = gumbel_bits_of(tl.load(keys_ptr + 2 * row), tl.load(keys_ptr + 2 * row + 1), tokens)
    places = bits_ptr + row * vocab_size + tokens
    tl.store(places, bits.to(tl.int32, bitcast=True), mask=tokens < vocab_size)


@jit
def _noise_of_words_kernel(noise_ptr, words_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + places)
    tl.store(noise_ptr + places, gumbel_of(words ^ words, words, places))


@needs_triton
@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(SEEDS, st.integers(0, 9), st.integers(0, 2**20)), max_size=4),
    vocab_size=st.integers(1, 1000),
)
def test_the_kernels_bits_are_the_same(
    device: torch.device, rows: list[tuple[int, int, int]], vocab_size: int
) -> None:
    keys = keys_of(*rows).reshape(-1, 2).to(device)
    bits = torch.full((len(rows), vocab_size), 77, dtype=torch.int32, device=device)
    launch(_bits_kernel, (len(rows),), bits, keys, vocab_size, BLOCK=1024)
    assert torch.equal(bits.cpu(), gumbel_bits(keys.cpu(), vocab_size))


@pytest.mark.slow
@needs_triton
@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(SEEDS, st.integers(0, 9), st.integers(0, 2**20)), max_size=4),
    vocab_size=st.sampled_from([1, 7, 1023, 1024, 1025, 3001]),
)
def test_the_kernels_noise_is_the_same_to_rounding(
    device: torch.device, rows: list[tuple[int, int, int]], vocab_size: int
) -> None:
    keys = keys_of(*rows).reshape(-1, 2).to(device)
    torch.use_deterministic_algorithms(True)  # what is allocated is poisoned
    try:
        with use_kernels("triton"):
            noise = gumbel_noise(keys, vocab_size)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(
        noise.cpu(), gumbel_noise(keys.cpu(), vocab_size), rtol=1e-6, atol=2e-6
    )


@needs_triton
def test_extreme_bits_are_the_same_to_rounding(device: torch.device) -> None:
    # All sizes of 1 - w, also those that float32 cannot tell from 1, found by undoing the hash.
    wanted = [0, 1, 2, 3, 100, 2**7, 2**8, 2**9, 2**12, 2**16, 2**20, 2**24, 2**28, 2**31]
    wanted += [2**32 - 1 - number for number in wanted]
    words = torch.tensor([unmix(bits) ^ mix(place) for place, bits in enumerate(wanted)])
    words = torch.cat((words, torch.zeros(32 - len(wanted), dtype=torch.int64)))
    words = ((words + 2**31) % 2**32 - 2**31).to(torch.int32)
    noise = torch.full((32,), torch.nan, device=device)
    launch(_noise_of_words_kernel, (1,), noise, words.to(device), BLOCK=32)
    fractions = np.minimum((np.array(wanted, np.float32) + np.float32(0.5)) / 2**32, 1 - 2**-24)
    expected = torch.from_numpy(-np.log(-np.log1p(-fractions.astype(np.float64))))
    torch.testing.assert_close(noise.cpu().double()[: len(wanted)], expected, rtol=1e-6, atol=1e-6)
