"""Other programs on the same weights: our answers are theirs, in 16 bits.

    OPENVINO_PYTHON=$PWD/runs/openvino-env/bin/python LLAMA_ENVIRONMENT=$PWD/runs/llama-env \
        make test-long ARGS=tests/benchmarks/test_peers_bench.py

openvino_peer.py and llama_peer.py in benchmarks/peers say how to make the environments.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import bench_peers
from benchmarks.peers.llama_peer import Llama
from benchmarks.peers.peer_programs import OUR_SCHEMES

OPENVINO, LLAMA = "OPENVINO_PYTHON", "LLAMA_ENVIRONMENT"
SHORT = ["--num-prompts", "2", "--max-new", "24", "--long-prompt", "0", "--assistant-tokens", "4"]


def results_of(folder: Path, *options: str) -> dict[str, Any]:
    common = ["--dtype", "bfloat16", "--threads", "1", "--results", str(folder)]
    bench_peers.main([*common, *SHORT, *options])
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"]
    return found


def test_an_environment_without_llama_server_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no llama-server"):
        Llama.found_in(tmp_path)


def test_help_tells_how_to_repeat_one_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_peers.main(["--help"])
    assert ended.value.code == 0
    assert "One part again" in capsys.readouterr().out


@pytest.mark.long
def test_programs_that_are_not_installed_are_named(tmp_path: Path) -> None:
    results = results_of(tmp_path)
    assert set(results["absent"]) == {"openvino", "llama.cpp"}
    assert results["equality"]["transformers plain"]["num_equal"] == 2


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get(OPENVINO), reason=f"{OPENVINO} names no interpreter")
@pytest.mark.parametrize("bits", OUR_SCHEMES)
def test_openvino_answers_with_and_without_a_drafter(bits: int, tmp_path: Path) -> None:
    found = results_of(tmp_path, "--bits", str(bits), "--openvino-python", os.environ[OPENVINO])
    assert {"openvino plain", "openvino 4 tokens"} <= set(found["cases"])


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get(LLAMA), reason=f"{LLAMA} names no environment")
@pytest.mark.parametrize("bits", OUR_SCHEMES)
def test_llama_cpp_answers_with_and_without_a_drafter(bits: int, tmp_path: Path) -> None:
    found = results_of(tmp_path, "--bits", str(bits), "--llama", os.environ[LLAMA])
    assert found["cases"]["llama.cpp 4 tokens"]["tokens_per_pass"] > 1.0
