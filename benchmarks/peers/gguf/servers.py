"""The servers of bench_gguf, each a process of its own."""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.peers.gguf.requests import Answer, ask_drafting, ask_llama, ask_outrider
from benchmarks.peers.llama_peer import Llama, native_server
from benchmarks.peers.openvino_peer import OpenVinoPeer, openvino_gguf_process
from benchmarks.peers.worker_process import WorkerProcess, worker_process
from benchmarks.shared.turns import Turn
from benchmarks.shared.upstream_servers import Server, gateway_server, xllamacpp_server

PLAIN: Final = "Outrider plain"
DRAFTING: Final = "Outrider"
HEAD: Final = "Outrider, drafter"
WHEEL: Final = "llama.cpp wheel"
NATIVE: Final = "llama.cpp native"
OPENVINO: Final = "OpenVINO"
LOOKUP: Final = "OpenVINO prompt lookup"
TRANSFORMERS: Final = "transformers"
PLAIN_PEERS: Final = (WHEEL, NATIVE, OPENVINO, TRANSFORMERS)
_AVX2: Final = {
    "OUTRIDER_CPU": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
_TELL: Final = "import xllamacpp as x; print(x.__version__); print(x.get_system_info())"
_TRANSFORMERS_WORKER: Final = Path(__file__).with_name("transformers_worker.py")
# OpenVINO's own example of prompt lookup.
_LOOKUP_TOKENS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What runs beside Outrider; None: left out.

    `schemes`: of Outrider, beside the file as it comes. `drafter`: a head of that model.
    `llama_drafting`: kinds of llama.cpp's own drafting without a model, of the native build.
    `dtype`: of transformers' weights.
    """

    schemes: Sequence[str] = ()
    drafter: Path | None = None
    llama_python: Path | None = None
    llama: Path | None = None
    llama_drafting: Sequence[str] = ()
    openvino_python: Path | None = None
    transformers_python: Path | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Started:
    """Running servers: what asks each, Outrider's and llama.cpp's, and versions of the others."""

    answers: dict[str, Answer] = field(default_factory=dict)
    gateways: dict[str, Server] = field(default_factory=dict)
    llamas: dict[str, Server] = field(default_factory=dict)
    builds: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """Names of the programs that are not ours."""
        return [name for name in self.answers if name not in self.gateways]


@dataclass(frozen=True, kw_only=True)
class Starter:
    """Starts servers on the file, with as many threads each. `is_avx2`: ours are held to AVX2."""

    file: Path
    num_threads: int
    is_avx2: bool
    stop: Sequence[int]

    @contextlib.contextmanager
    def started(self, programs: Programs) -> Iterator[Started]:
        """All of them; they end with the context."""
        found = Started()
        with contextlib.ExitStack() as stack:
            self._ours(stack, found, programs)
            self._wheel(stack, found, programs.llama_python)
            self._native(stack, found, programs)
            self._openvino(stack, found, programs.openvino_python)
            self._transformers(stack, found, programs)
            yield found

    @property
    def variables(self) -> Mapping[str, str]:
        """Those of the environment of every program that heeds them."""
        return _AVX2 if self.is_avx2 else {}

    def _ours(self, stack: contextlib.ExitStack, found: Started, programs: Programs) -> None:
        flags: dict[str, tuple[str, ...]] = {PLAIN: ("--no-speculation",), DRAFTING: ()}
        if programs.drafter is not None:
            flags[HEAD] = ("--drafter", str(programs.drafter))
        flags |= {
            f"Outrider {scheme}, plain": ("--no-speculation", "--quantize", scheme)
            for scheme in programs.schemes
        }
        shared = (
            *("--large", str(self.file), "--small", "none"),
            *("--num-threads", str(self.num_threads), "--set", "database_url=none"),
        )
        for name, more in flags.items():
            started = gateway_server([], options=(*shared, *more), variables=self.variables)
            server = stack.enter_context(started)
            found.gateways[name] = server
            found.answers[name] = partial(
                ask_drafting if name in (DRAFTING, HEAD) else ask_outrider, server
            )

    def _wheel(self, stack: contextlib.ExitStack, found: Started, python: Path | None) -> None:
        if python is None:
            return
        found.builds[WHEEL] = llama_build(python)
        started = xllamacpp_server(self.file, python=python, num_threads=self.num_threads)
        server = stack.enter_context(started)
        found.llamas[WHEEL] = server
        found.answers[WHEEL] = partial(ask_llama, server)

    def _native(self, stack: contextlib.ExitStack, found: Started, programs: Programs) -> None:
        if programs.llama is None:
            return
        llama = Llama.found_in(programs.llama)
        ways = {NATIVE: ()} | {
            f"llama.cpp {kind}": ("--spec-type", kind) for kind in programs.llama_drafting
        }
        for name, flags in ways.items():
            native = stack.enter_context(
                native_server(llama, self.file, flags, num_threads=self.num_threads)
            )
            server = Server(name=name, port=native.port, pid=native.pid)
            found.llamas[name] = server
            found.answers[name] = partial(ask_llama, server)
        found.builds[NATIVE] = {"version": llama.version, "instructions": llama.instructions}

    def _openvino(self, stack: contextlib.ExitStack, found: Started, python: Path | None) -> None:
        if python is None:
            return
        peer = stack.enter_context(
            openvino_gguf_process(
                python, self.file, num_threads=self.num_threads, variables=self.variables
            )
        )
        for name, way in ((OPENVINO, "plain"), (LOOKUP, "lookup")):
            found.answers[name] = partial(_openvino_answer, peer, way, self.stop)
        found.builds[OPENVINO] = peer.versions

    def _transformers(
        self, stack: contextlib.ExitStack, found: Started, programs: Programs
    ) -> None:
        if programs.transformers_python is None:
            return
        options = {
            "target": str(self.file),
            "dtype": programs.dtype,
            "num_threads": self.num_threads,
        }
        command = (programs.transformers_python, _TRANSFORMERS_WORKER)
        worker = stack.enter_context(
            worker_process(TRANSFORMERS, command, options, variables=self.variables)
        )
        found.answers[TRANSFORMERS] = partial(_transformers_answer, worker, self.stop)
        found.builds[TRANSFORMERS] = {**worker.versions, "dtype": programs.dtype}


def _openvino_answer(
    peer: OpenVinoPeer,
    way: str,
    stop: Sequence[int],
    token_ids: Sequence[int],
    max_tokens: int,
    temperature: float,
) -> Turn:
    return peer.answer(
        way,
        token_ids,
        max_tokens=max_tokens,
        stop=stop,
        num_assistant_tokens=0 if way == "plain" else _LOOKUP_TOKENS,
        temperature=temperature,
    )


def _transformers_answer(
    worker: WorkerProcess,
    stop: Sequence[int],
    token_ids: Sequence[int],
    max_tokens: int,
    temperature: float,
) -> Turn:
    job = {"token_ids": list(token_ids), "max_tokens": max_tokens, "stop": list(stop)}
    found = worker.ask(job | {"temperature": temperature})
    return Turn(
        token_ids=found["token_ids"],
        wall_s=found["wall_s"],
        decode_s=found["decode_s"],
        num_decoded_tokens=max(len(found["token_ids"]) - 1, 0),
    )


def llama_build(python: Path) -> dict[str, str]:
    """Return the properties of llama.cpp's wheel. Raises SystemExit where there is none."""
    try:
        told = subprocess.run(
            [python, "-c", _TELL], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        raise SystemExit(f"--llama-python {python}: it has no xllamacpp.") from None
    version, instructions = told.stdout.strip().splitlines()[-2:]
    return {"version": version, "instructions": instructions.strip(" |")}
