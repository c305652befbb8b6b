"""OpenVINO GenAI on the same weights, in a process with an interpreter of its own.

It needs other versions of transformers than this repository, so make an environment for it:

    python -m venv runs/openvino-env
    runs/openvino-env/bin/pip install openvino-genai "optimum-intel[openvino]"
    runs/openvino-env/bin/pip uninstall torchvision    # only where its build does not fit torch's
    python -m benchmarks.bench_peers --openvino-python runs/openvino-env/bin/python ...
"""

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import CACHE, console, without_engine_environment

_WORKER = Path(__file__).with_name("openvino_worker.py")
_FOLDER = CACHE / "openvino"
_LOOKUP_NGRAM = 3


class OpenVinoPeer:
    """The other process, seen from here. `versions`: of its packages."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.versions: dict[str, str] = self._receive()

    def answer(
        self,
        way: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[int],
        num_assistant_tokens: int = 0,
    ) -> tuple[list[int], float]:
        """Greedy answer and its seconds; way: plain, assisted or lookup. Raises RuntimeError."""
        job = {
            "way": way,
            "token_ids": list(token_ids),
            "max_tokens": max_tokens,
            "stop": list(stop),
            "num_assistant_tokens": num_assistant_tokens,
            "max_ngram_size": _LOOKUP_NGRAM,
        }
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        result = self._receive()
        return result["token_ids"], result["wall_s"]

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs OpenVINO has died")
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise RuntimeError(f"OpenVINO failed: {result['error']}")
        return result


@contextlib.contextmanager
def openvino_process(
    python: Path, *, target: Path, draft: Path, num_threads: int, precision: str
) -> Iterator[OpenVinoPeer]:
    """Convert what is not converted yet, and start a process that ends with the context.

    precision: "bf16", "f16" or "f32", of the computation and the KV cache.
    """
    options = {
        "target": str(_converted(python, target)),
        "draft": str(_converted(python, draft)),
        "num_threads": num_threads,
        "precision": precision,
    }
    with without_engine_environment():
        process = subprocess.Popen(
            [str(python), str(_WORKER), "serve", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    try:
        yield OpenVinoPeer(process)
    finally:
        process.kill()
        process.wait()


def _converted(python: Path, source: Path) -> Path:
    """The folder of OpenVINO's files, made once. Raises RuntimeError with what the tool said."""
    state = (source / "model.safetensors").stat()
    folder = _FOLDER / f"{source.name}-{state.st_size}-{state.st_mtime_ns}"
    if folder.is_dir():
        return folder
    _FOLDER.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=_FOLDER, prefix="unfinished-"))
    try:
        with console.status(f"converting {source.name} for OpenVINO"):
            done = subprocess.run(
                [str(python), str(_WORKER), "convert", str(source), str(unfinished)],
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode != 0:
            raise RuntimeError(f"OpenVINO could not convert {source.name}: {done.stderr[-2000:]}")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
