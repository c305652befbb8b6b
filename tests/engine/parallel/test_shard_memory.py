"""A rank reads its part of a checkpoint alone: what it takes at its peak is a part, too."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import save_hf_model

_LOAD = """
import sys
import torch
from outrider.engine.model.load import load_model
from outrider.engine.model.shard import Shard

torch.set_num_threads(1)
folder, count = sys.argv[1], int(sys.argv[2])
load_model(sys.argv[3], dtype="float32")  # what libraries take the first time

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

open("/proc/self/clear_refs", "w").write("5")
before = peak()
model = load_model(folder, dtype="float32", shard=Shard(rank=count - 1, count=count))
print(peak() - before, model.weight_bytes // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_rank_is_that_of_its_part(tmp_path: Path) -> None:
    save_hf_model(
        "llama3", tmp_path / "wide", vocab_size=4096, hidden_size=1024, intermediate_size=2048,
        num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    save_hf_model("llama3", tmp_path / "tiny")
    peaks, sizes = {}, {}
    for count in (1, 4):
        folders = str(tmp_path / "wide"), str(count), str(tmp_path / "tiny")
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, *folders], capture_output=True, text=True, check=True
        )
        peaks[count], sizes[count] = map(int, done.stdout.split())
    assert sizes[4] < 0.3 * sizes[1]
    assert peaks[4] < 0.5 * peaks[1]  # the part, and the tensors that it is read from
    assert peaks[4] < 2 * sizes[4]
