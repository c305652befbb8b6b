"""An answer behind blocks that another engine computed is the one that is computed cold.

Bit for bit, in the bundled pair's compiled arithmetic: greedy and sampled, with and without
guesses. Two real engines; the line between them is a socket with keys.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import make_engine, serve, tiny_pair
from tests.gateway.engines.backends.replicas import make_keys
from tests.laws.mixed import long_requests
from tests.laws.same_answers import (
    ACCEPTING,
    ALONE,
    AS_USUAL,
    COLD,
    UNDRAFTED,
    Way,
    assert_same_answers,
    by,
)
from tests.laws.test_moved_blocks_law import PAIR, conversations, exactly
from tests.peers import from_source, listening, peer_lines
from tests.stores import slow_down

SLOWLY = Way(watch=slow_down, shows=("num_cached_tokens",))


@pytest.mark.slow_cases
@pytest.mark.parametrize("guesses", [True, False])
def test_a_peers_blocks_give_the_same_tokens_and_logprobs(guesses: bool, tmp_path: Path) -> None:
    keys, requests, source = make_keys(tmp_path), conversations(), make_engine(PAIR())
    serve(source, requests)
    with listening(source, keys) as endpoint, peer_lines(keys) as lines:
        served = assert_same_answers(
            from_source(requests, endpoint),
            of=PAIR(),
            vary=by(peers=lines)
            | SLOWLY
            | Way(guesses=guesses)
            | (ACCEPTING if guesses else AS_USUAL),
            like=COLD | ALONE | UNDRAFTED,
            within=exactly,
        )
    stats = served.engine.stats().peers
    least = sum(len(each.prompt_token_ids) // 16 * 16 - 16 for each in requests)
    assert stats.num_pulled_tokens >= least
    assert stats.num_late == stats.num_failed == stats.num_damaged == 0
    assert source.stats().peers.num_sent_bytes == stats.num_pulled_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["windowed", "recurrent", "few blocks", "fp8"])
def test_every_layout_comes_from_a_peer(layout: str) -> None:
    options: dict[str, Any] = {
        "windowed": {"window_blocks": 66, "block_size": 4},
        "recurrent": {},
        "few blocks": {"large_blocks": 40, "small_blocks": 40},
        "fp8": {"kv_dtype": torch.float8_e4m3fn},
    }[layout]
    architecture = {"windowed": "gemma2", "recurrent": "qwen3_5"}.get(layout, "llama3")
    pair = tiny_pair(architecture, max_positions=256, drift=0.03)
    requests = long_requests((31, 60, 97, 140, 180))
    source = make_engine(pair, **options)
    right = serve(source, requests)
    with listening(source) as endpoint, peer_lines() as lines:
        served = assert_same_answers(
            from_source(requests, endpoint),
            of=pair,
            vary=by(peers=lines, **options) | SLOWLY | Way(at_a_time=2),
            right=right,
        )
        assert served.engine.stats().peers.num_pulled_tokens > 0
