"""The end of a rank is the engine's, and the end of rank 0 that of all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.engine.errors import RankLostError
from tests.engines import (
    PAIR_FOLDER,
    make_request,
    random_prompt,
    shipped_pair,
)
from tests.ranks import parted

_END_S = 30.0


@pytest.mark.slow
def test_a_killed_rank_ends_the_engine_with_the_reason() -> None:
    with parted(PAIR_FOLDER / "large", 2, dtype="float32") as found:
        engine = found.engine(shipped_pair())
        engine.submit(make_request("a", random_prompt(40)))
        engine.step()
        pids = found.ranks.pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"Rank 1 of 2 .*SIGKILL"):
            _ = [engine.step() for _ in range(100)]
        with pytest.raises(RankLostError):  # also where it is idle
            engine.step()
    assert not any(is_alive(pid) for pid in pids)


_RANK_0 = """
from tests.engines import *
from tests.ranks import parted

with parted(PAIR_FOLDER / "large", 2, dtype="float32") as found:
    print(found.ranks.folder, *found.ranks.pids, flush=True)
    while True:
        serve(found.engine(shipped_pair()), [make_request("a", random_prompt(40))])
        print("served", flush=True)
"""


@pytest.mark.slow
def test_no_rank_outlives_rank_0() -> None:
    command = [sys.executable, "-c", _RANK_0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        folder, *numbers = rank_0.stdout.readline().split()
        pids = [int(each) for each in numbers]
        assert rank_0.stdout.readline() == "served\n"
        assert all(is_alive(pid) for pid in pids)
        rank_0.kill()
    until_s = time.monotonic() + _END_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until_s, "a rank goes on without rank 0"
        time.sleep(0.01)
    assert not Path(folder).exists()


def is_alive(pid: int) -> bool:
    """True for a process that runs; one that has ended may still wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
