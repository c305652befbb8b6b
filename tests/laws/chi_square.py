"""Two models that have nothing in common, and a test of what they are sampled from."""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from tests.engines import Pair, engine_model
from tests.models import make_hf_model

VOCAB_SIZE = 7


PROMPT = (3, 1, 4, 1, 5)


@cache
def strangers() -> Pair:
    """Two models that have nothing in common, of moderate opinions."""
    shape = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "initializer_range": 0.12}
    large = make_hf_model("llama2", seed=1, **shape)
    small = make_hf_model("llama2", seed=2, **shape)
    return Pair(
        large=engine_model(large),
        small=engine_model(small),
        large_reference=large,
        small_reference=small,
    )


def p_value(drawn: NDArray[np.int64], exact: NDArray[np.float64]) -> float:
    """Chi-square goodness of fit; cells with fewer than five expected counts share one cell."""
    expected = (exact * drawn.sum()).ravel()
    observed = drawn.ravel()
    assert not observed[expected == 0].any(), "a token that was cut off has been emitted"
    often = expected >= 5
    assert often.sum() > 50
    observed_cells = np.append(observed[often], observed[~often].sum())
    expected_cells = np.append(expected[often], expected[~often].sum())
    keep = expected_cells > 0
    observed_cells, expected_cells = observed_cells[keep], expected_cells[keep]
    statistic = ((observed_cells - expected_cells) ** 2 / expected_cells).sum()
    return float(chi2.sf(statistic, len(expected_cells) - 1))
