"""Loads of any size run the same compiled kernels: none is compiled while streams wait."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.kernels.ahead_of_time import ROOT

# Recorded as for a GPU; a variant is what Triton's own rules compile apart.
PROGRAM = """
import json
from collections import defaultdict

import torch

from outrider.kernels.experts.cut_tiles import cut_tiles
from outrider.kernels.kv.compact_kv import compact_kv
from outrider.kernels.kv.write_kv import write_kv
from outrider.kernels.layers.embedding import embed_tokens
from outrider.kernels.layers.row_invariant_linear import row_invariant_linear
from outrider.kernels.sampling.penalties import apply_penalties
from outrider.kernels.triton_support import record_launches

cache = torch.zeros(1, 2, 8, 16, 2, 64)


def load(rows):
    places = torch.arange(rows)
    embed_tokens(torch.zeros(64, 32), places)
    row_invariant_linear(torch.zeros(rows, 64), torch.zeros(32, 64))
    heads = torch.zeros(rows, 2, 64)
    write_kv(heads, heads, cache[0, 0], cache[0, 1], places)
    compact_kv(cache, places, places)
    cut_tiles(torch.zeros(rows, 2, dtype=torch.int64), 8, 16)
    apply_penalties(torch.zeros(4, 64), places, torch.zeros(rows), num_overrides=rows // 2)


def specialised(parameter, value):
    if not isinstance(value, int) or parameter.do_not_specialize:
        return type(value).__name__
    return "is 1" if value == 1 else f"divisible by 16: {value % 16 == 0}"


variants = defaultdict(set)
with torch.inference_mode(), record_launches(90) as launches:
    for rows in (1, 2, 15, 16, 17, 32, 33):
        load(rows)
for launch in launches:
    pairs = zip(launch.kernel.params, launch.args)
    constants = (launch.kernel.__name__, launch.num_warps, str(launch.constexprs))
    variants[constants].add(tuple(specialised(*pair) for pair in pairs))
print(json.dumps({" ".join(map(str, name)): len(found) for name, found in variants.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_mixed_load_launches_one_variant_of_each_kernel() -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**kept, "OUTRIDER_KERNELS": "triton", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    variants = json.loads(answer.stdout)
    assert len(variants) >= 6
    assert {name for name, number in variants.items() if number > 1} == set()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "kinds",
    [
        ["plain"],
        pytest.param(
            ["fp8", "int8 experts", "recurrent", "adapters", "head", "recorded int4"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_after_the_warm_up_a_mixed_load_launches_nothing_new(kinds: list[str]) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.kernels.mixed_load", *kinds],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    assert [found["kind"] for found in lines] == kinds
    for found in lines:
        assert found["warm-up"] >= 40, found["kind"]
        assert found["load"] == [], found["kind"]
