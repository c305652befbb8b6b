"""OpenVINO GenAI on the same weights, in a process with an interpreter of its own.

It needs other versions of transformers than this repository, so make an environment for it:

    python -m venv runs/openvino-env
    runs/openvino-env/bin/pip install torch==2.13.0 openvino-genai "optimum-intel[openvino]"
    runs/openvino-env/bin/pip uninstall torchvision    # only where its build does not fit torch's
    python -m benchmarks.peers.bench_peers --openvino-python runs/openvino-env/bin/python ...
"""

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.worker_process import WorkerProcess, worker_process
from benchmarks.shared.grown import fingerprint
from benchmarks.shared.harness import CACHE, console
from benchmarks.shared.turns import Turn

_WORKER = Path(__file__).with_name("openvino_worker.py")
_FOLDER = CACHE / "openvino"


class OpenVinoPeer:
    """The other process, seen from here.

    `versions`: of its packages. `weight_bytes`: its file's.
    """

    def __init__(self, worker: WorkerProcess, weight_bytes: int) -> None:
        self._worker = worker
        self.weight_bytes = weight_bytes
        self.versions = worker.versions

    def answer(
        self,
        way: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[int],
        num_assistant_tokens: int = 0,
        temperature: float = 0.0,
    ) -> Turn:
        """Answer in a `way`: plain, assisted or lookup. Raises RuntimeError."""
        result = self._worker.ask(
            {
                "way": way,
                "token_ids": list(token_ids),
                "max_tokens": max_tokens,
                "stop": list(stop),
                "num_assistant_tokens": num_assistant_tokens,
                "temperature": temperature,
            }
        )
        num_accepted = result["num_accepted"]
        return Turn(
            token_ids=result["token_ids"],
            wall_s=result["wall_s"],
            decode_s=result["decode_s"],
            num_decoded_tokens=max(len(result["token_ids"]) - 1, 0),
            num_accepted_tokens=num_accepted,
            num_passes=len(result["token_ids"]) - num_accepted,
        )


@contextlib.contextmanager
def openvino_process(
    python: Path, *, target: Path, draft: Path, weights: str, num_threads: int, precision: str
) -> Iterator[OpenVinoPeer]:
    """Convert what is not converted yet, and start a process that ends with the context.

    `weights`: "bf16", "int8" or "int4", of the target; the drafter's stay as they are. `precision`:
    "bf16", "f16" or "f32", of the computation, and of the KV cache of uncompressed weights; beside
    compressed ones it has OpenVINO's own default, 8 bits, which is faster.
    """
    target = _converted(python, target, weights)
    options = {
        "target": str(target),
        "draft": str(_converted(python, draft, "bf16")),
        "properties": {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision if weights == "bf16" else "u8",
        },
    }
    with worker_process("OpenVINO", (python, _WORKER, "serve"), options) as worker:
        yield OpenVinoPeer(worker, (target / "openvino_model.bin").stat().st_size)


@contextlib.contextmanager
def openvino_gguf_process(
    python: Path, file: Path, *, num_threads: int, variables: Mapping[str, str]
) -> Iterator[OpenVinoPeer]:
    """Start a process that reads the GGUF file itself, in OpenVINO's own default precisions."""
    options = {"target": str(file), "properties": {"INFERENCE_NUM_THREADS": num_threads}}
    command = (python, _WORKER, "serve")
    with worker_process("OpenVINO", command, options, variables=variables) as worker:
        yield OpenVinoPeer(worker, file.stat().st_size)


def _converted(python: Path, source: Path, weights: str) -> Path:
    """The folder of OpenVINO's files, made once. Raises RuntimeError with what the tool said."""
    folder = _FOLDER / f"{source.name}-{fingerprint(source, 0)}-{weights}"
    if folder.is_dir():
        return folder
    _FOLDER.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=_FOLDER, prefix="unfinished-"))
    try:
        with console.status(f"converting {source.name} for OpenVINO"):
            done = subprocess.run(
                [str(python), str(_WORKER), "convert", str(source), str(unfinished), weights],
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
