"""The last step of `kernels/sampling/truncation_floor.py`: search a row's border among few
candidates."""

from outrider.kernels.triton_support import jit, tl


@jit
def scaled(logits, temperature):  # type: ignore[no-untyped-def]
    """The scores that truncation and noise see: divided and rounded as torch does."""
    return tl.math.div_rn(logits, temperature)


@jit
def cuts_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size):  # type: ignore[no-untyped-def]
    """(temperature, 0 for greedy; whether top-k cuts; whether top-p does) of a row."""
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    cuts_k = (temperature > 0) & (top_k > 0) & (top_k < vocab_size)
    cuts_p = (temperature > 0) & (tl.load(top_p_ptr + row) < 1.0)
    return temperature, cuts_k, cuts_p


@jit
def peak_of(peaks):  # type: ignore[no-untyped-def]
    """The row's greatest score, of those of its chunks; 0 where no token is possible."""
    peak = tl.max(peaks, axis=0)
    return tl.where(peak == float("-inf"), 0.0, peak)


@jit
def _key_of(value):  # type: ignore[no-untyped-def]
    """int64 numbers in the order of the float32 values, neighbours for neighbours."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def _value_of(key):  # type: ignore[no-untyped-def]
    """The inverse of `_key_of`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _reaching(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    candidates_ptr,
    logits_ptr,
    temperature,
    num_collected,
    num_logits,
    key,
    upper_bar,
    peak,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count how many candidates reach a key and stay below the upper bar, or what they weigh.

    They are the ones that were collected, or else all logits: one of the two numbers is 0.
    """
    bits = key.to(tl.int32)  # spelled out: the interpreter takes its time for a call
    bar = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    sums = tl.full([BLOCK], 0.0, tl.float32)  # counts are exact below 2^24
    start = 0
    while start < tl.maximum(num_collected, num_logits):
        places = start + tl.arange(0, BLOCK)
        is_collected, is_logit = places < num_collected, places < num_logits
        collected = tl.load(candidates_ptr + places, mask=is_collected, other=0.0)
        logits = tl.load(logits_ptr + places, mask=is_logit, other=0.0)
        scores = tl.where(is_collected, collected, tl.math.div_rn(logits, temperature))
        is_in = (is_collected | is_logit) & (scores >= bar) & (scores < upper_bar)
        if BY_MASS:
            sums += tl.exp(tl.where(is_in, scores - peak, float("-inf")))
        else:
            sums += is_in.to(tl.float32)
        start += BLOCK
    return tl.sum(sums, axis=0)


@jit
def _search(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    candidates_ptr,
    logits_ptr,
    temperature,
    num_collected,
    num_logits,
    low,
    high,
    upper_bar,
    peak,
    missing,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest key, from `low` to below `high`, at which what is missing is reached."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        reached = _reaching(
            candidates_ptr,
            logits_ptr,
            temperature,
            num_collected,
            num_logits,
            middle,
            upper_bar,
            peak,
            BY_MASS=BY_MASS,
            BLOCK=BLOCK,
        )
        is_enough = reached >= missing
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@jit
def search_floor_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    floor_ptr,
    candidates_ptr,
    values_ptr,
    numbers_ptr,
    peaks_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The floor of one row; see `outrider.kernels.sampling.truncation_floor` for the arguments."""
    row = tl.program_id(0).to(tl.int64)
    temperature, cuts_k, cuts_p = cuts_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    min_p = tl.load(min_p_ptr + row)
    cuts_min_p = (temperature > 0) & (min_p > 0.0)
    floor = tl.full([], float("-inf"), tl.float32)
    if cuts_k | cuts_p | cuts_min_p:
        chunks = tl.arange(0, CHUNKS)
        peaks = tl.load(
            peaks_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
        )
        peak = peak_of(peaks)
        if cuts_k | cuts_p:
            own_candidates = candidates_ptr + row * CAPACITY
            own_logits = logits_ptr + row * logits_stride
            lower_bar = tl.load(values_ptr + row * 4)
            upper_bar = tl.load(values_ptr + row * 4 + 1)
            mass_above = tl.load(values_ptr + row * 4 + 2)
            total = tl.load(values_ptr + row * 4 + 3)
            num_above = tl.load(numbers_ptr + row * 2).to(tl.float32)
            num_between = tl.load(numbers_ptr + row * 2 + 1)
            num_collected = tl.where(num_between <= CAPACITY, num_between, 0)
            num_logits = tl.where(num_between <= CAPACITY, 0, vocab_size)
            low = _key_of(lower_bar)
            high = _key_of(tl.minimum(upper_bar, peak)) + (upper_bar > peak).to(tl.int64)
            if cuts_k:
                top_k = tl.load(top_k_ptr + row).to(tl.float32)
                low = _search(
                    own_candidates,
                    own_logits,
                    temperature,
                    num_collected,
                    num_logits,
                    low,
                    high,
                    upper_bar,
                    peak,
                    top_k - num_above,
                    BY_MASS=False,
                    BLOCK=CAPACITY,
                )
            if cuts_k & cuts_p:  # what the top-k weigh: equals at their border count k in all
                num_more = _reaching(
                    own_candidates,
                    own_logits,
                    temperature,
                    num_collected,
                    num_logits,
                    low + 1,
                    upper_bar,
                    peak,
                    BY_MASS=False,
                    BLOCK=CAPACITY,
                )
                mass_more = _reaching(
                    own_candidates,
                    own_logits,
                    temperature,
                    num_collected,
                    num_logits,
                    low + 1,
                    upper_bar,
                    peak,
                    BY_MASS=True,
                    BLOCK=CAPACITY,
                )
                num_equal = tl.load(top_k_ptr + row).to(tl.float32) - num_above - num_more
                total = mass_above + mass_more + num_equal * tl.exp(_value_of(low) - peak)
            if cuts_p:
                low = _search(
                    own_candidates,
                    own_logits,
                    temperature,
                    num_collected,
                    num_logits,
                    low,
                    high,
                    upper_bar,
                    peak,
                    tl.load(top_p_ptr + row) * total - mass_above,
                    BY_MASS=True,
                    BLOCK=CAPACITY,
                )
            floor = _value_of(low)
        if cuts_min_p:
            floor = tl.maximum(floor, peak + tl.log(min_p))
        floor = tl.minimum(floor, tl.max(peaks, axis=0))  # the likeliest always stays
    tl.store(floor_ptr + row, floor)
