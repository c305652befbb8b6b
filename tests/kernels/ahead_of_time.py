"""Compile what would be launched, for GPUs that are not here, and read what it takes of them.

Each specimen (tests/kernels/specimens.py) calls a launcher with CPU tensors of serving sizes; its
launches are recorded instead of made, and Triton compiles each for every architecture, specialised
just as it would be on that GPU (types, alignment of pointers and sizes, constants). The resources
are the assembler's: registers and local memory from cuobjdump, shared memory from Triton.

    python -m tests.kernels.ahead_of_time                      all specimens, sm_80, sm_90, sm_100
    python -m tests.kernels.ahead_of_time rope rms_norm -a 90  two files' kernels, one architecture
    python -m tests.kernels.ahead_of_time --in-turn            each specimen for one of the three
    python -m tests.kernels.ahead_of_time --specimens FILE.py  another list of specimens

The exit status is 1 where a kernel does not compile, spills, or asks for more than there is.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_SPECIMENS = Path(__file__).with_name("specimens.py")
ARCHITECTURES = (80, 90, 100)

# The CUDA programming guide's table of compute capabilities, per block.
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
MAX_REGISTERS_PER_THREAD = 255
# Per multiprocessor; the same for all three.
REGISTER_FILE = 65536
SHARED_FILE_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
RESERVED_SHARED_BYTES = 1 << 10  # of each block
MAX_WARPS = 64
# Columns of tensor memory on sm_100; triton keeps sums of products there.
MAX_TENSOR_MEMORY = 512

_RESOURCES = re.compile(r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources of one compiled kernel. `error`: why there is none, then all figures are 0.

    `specimens`: whose launches it serves. registers: per thread; shared_bytes: per program;
    local_bytes: spills and stack, per thread; tensor_memory: columns, on sm_100.
    """

    stem: str
    kernel: str
    specimens: tuple[str, ...]
    architecture: int
    constants: str
    num_warps: int = 0
    registers: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    tensor_memory: int = 0
    error: str | None = None

    @property
    def programs_per_multiprocessor(self) -> int:
        """Return how many fit side by side, by registers, shared memory and warps."""
        if self.error is not None:
            return 0
        per_warp = -(-self.registers * 32 // 256) * 256  # registers are handed out 256 at a time
        by_registers = REGISTER_FILE // max(per_warp * self.num_warps, 1)
        shared = SHARED_FILE_BYTES[self.architecture] // (self.shared_bytes + RESERVED_SHARED_BYTES)
        return min(by_registers, shared, MAX_WARPS // self.num_warps, 32)

    def complaints(self) -> list[str]:
        """Return what is beyond the chip's limits; nothing for a kernel that is fine."""
        if self.error is not None:
            return [self.error]
        found = []
        if self.registers > MAX_REGISTERS_PER_THREAD:
            found.append(f"{self.registers} registers, at most {MAX_REGISTERS_PER_THREAD}")
        if self.local_bytes:
            found.append(f"{self.local_bytes} bytes of local memory: registers are spilled")
        if self.shared_bytes > MAX_SHARED_BYTES[self.architecture]:
            limit = MAX_SHARED_BYTES[self.architecture]
            found.append(f"{self.shared_bytes} bytes of shared memory, at most {limit}")
        if self.tensor_memory > MAX_TENSOR_MEMORY:
            found.append(f"{self.tensor_memory} columns of tensor memory, at most 512")
        if not found and self.programs_per_multiprocessor < 1:
            found.append(f"{self.num_warps} warps of {self.registers} registers do not fit")
        return found


class _AssumedGPU:
    """Stands in for Triton's driver, so that its own specialisation and options are used."""

    def __init__(self) -> None:
        self.architecture = 90

    def get_current_device(self) -> int:
        return self.architecture  # kernels are kept per device, so each has its own

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


def compile_specimens(
    path: Path,
    *,
    stems: Sequence[str],
    architectures: Sequence[int],
    with_long: bool,
    in_turn: bool = False,
) -> list[Usage]:
    """Record and compile; one entry for each different kernel of an architecture, or failure.

    in_turn: each specimen is compiled for one architecture only, its neighbour for the next.
    """
    from triton.runtime import driver

    specimens = [
        specimen
        for specimen in load_specimens(path)
        if (not stems or specimen.stem in stems) and (with_long or not specimen.is_long)
    ]
    gpu = _AssumedGPU()
    driver.set_active(gpu)
    usages: list[Usage] = []
    for turn, gpu.architecture in enumerate(architectures):
        own = specimens[turn :: len(architectures)] if in_turn else specimens
        by_kernel: dict[
            int, tuple[Any, Usage]
        ] = {}  # the compiled kernels are kept: ids are theirs
        for specimen in own:
            try:
                launches = _launches_of(specimen, gpu.architecture)
            except Exception as error:  # noqa: BLE001 - reported, and the others go on
                usages.append(_failure(specimen, "(launcher)", gpu.architecture, "", error))
                continue
            for launch in launches:
                try:
                    _compile(launch, specimen, gpu.architecture, by_kernel)
                except Exception as error:  # noqa: BLE001 - as above
                    name = launch.kernel.__name__
                    constants = _constants(launch)
                    usages.append(_failure(specimen, name, gpu.architecture, constants, error))
        usages += [usage for _, usage in by_kernel.values()]
    return usages


def _compile(
    launch: Any, specimen: Any, architecture: int, by_kernel: dict[int, tuple[Any, Usage]]
) -> None:
    """Compile one launch, unless it is the same to the compiler as an earlier one."""
    compiled = launch.kernel.warmup(
        *launch.args,
        **launch.constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        grid=launch.grid,
    )
    if id(compiled) not in by_kernel:
        usage = _usage(compiled, specimen, architecture, _constants(launch))
        by_kernel[id(compiled)] = (compiled, usage)
        return
    _, usage = by_kernel[id(compiled)]
    if specimen.name not in usage.specimens:
        names = (*usage.specimens, specimen.name)
        by_kernel[id(compiled)] = (compiled, replace(usage, specimens=names))


def recorded_kernels(path: Path) -> set[str]:
    """All kernels that the specimens launch, as file.name; nothing is compiled."""
    return {
        f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"
        for specimen in load_specimens(path)
        for launch in _launches_of(specimen, 90)
    }


def load_specimens(path: Path) -> tuple[Any, ...]:
    """SPECIMENS of a Python file: objects with `stem`, `name`, `is_long` and `run()`."""
    spec = importlib.util.spec_from_file_location(f"_specimens_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return tuple(module.SPECIMENS)


def _launches_of(specimen: Any, architecture: int) -> list[Any]:
    import torch

    from outrider.kernels.triton_support import record_launches

    with torch.inference_mode(), record_launches(architecture) as launches:
        specimen.run()
    if not launches:
        raise RuntimeError("the specimen launched nothing")
    return launches


def _constants(launch: Any) -> str:
    """The launch's constants in short, and its stages."""
    shown = [f"{name}={value}" for name, value in launch.constexprs.items()]
    return " ".join([*shown, f"stages={launch.num_stages}"])


def _failure(
    specimen: Any, kernel: str, architecture: int, constants: str, error: Exception
) -> Usage:
    lines = traceback.format_exception(error)
    cause = error.__cause__ or error
    return Usage(
        stem=specimen.stem,
        kernel=kernel,
        specimens=(specimen.name,),
        architecture=architecture,
        constants=constants,
        error=f"{type(cause).__name__}: {cause}\n{''.join(lines[-6:])}",
    )


def _usage(compiled: Any, specimen: Any, architecture: int, constants: str) -> Usage:
    registers, local_bytes = _assembled(compiled.asm["cubin"])
    return Usage(
        stem=specimen.stem,
        kernel=compiled.metadata.name,
        specimens=(specimen.name,),
        architecture=architecture,
        constants=constants,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        local_bytes=local_bytes,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
    )


def _assembled(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) per thread, as cuobjdump reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        answer = subprocess.run(
            [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
        )
    found = _RESOURCES.findall(answer.stdout)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump shows {len(found)} functions: {answer.stdout}")
    _, registers, stack, _, local = found[0]
    return int(registers), int(stack) + int(local)


def table(usages: Sequence[Usage]) -> str:
    """One line for each kernel, variant and architecture, kernels in the order of their files."""
    head = f"{'kernel':28} {'sm':>3} {'warps':>5} {'regs':>4} {'shared':>7} {'spill':>5} {'fit':>3}"
    lines = [f"{head}  specimen: constants"]
    for usage in sorted(usages, key=lambda one: (one.stem, one.kernel, one.constants)):
        figures = (
            "does not compile"
            if usage.error is not None
            else f"{usage.num_warps:5} {usage.registers:4} {usage.shared_bytes:7} "
            f"{usage.local_bytes:5} {usage.programs_per_multiprocessor:3}"
        )
        where = f"{usage.specimens[0]}: {usage.constants}"
        lines.append(f"{usage.kernel:28} {usage.architecture:3} {figures}  {where}")
    return "\n".join(lines)


@contextmanager
def _compiling_environment() -> Iterator[None]:
    """Triton's kernels chosen, its interpreter off; kernels must not be imported before."""
    if "outrider.kernels.triton_support" in sys.modules:
        raise RuntimeError("kernels are loaded: compile ahead of time in a process of its own")
    os.environ["OUTRIDER_KERNELS"] = "triton"
    os.environ.pop("TRITON_INTERPRET", None)
    yield


def run_apart(*arguments: str, timeout_s: float) -> dict[str, Any]:
    """This program in a process of its own, for tests: what `--json` prints."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", "--json", *arguments],
        cwd=ROOT,
        env={**kept, "OUTRIDER_KERNELS": "triton", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if not answer.stdout.strip():
        raise RuntimeError(answer.stderr[-4000:])
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stems", nargs="*", help="files in kernels/ without .py; default: all")
    parser.add_argument("-a", "--architectures", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--specimens", type=Path, default=DEFAULT_SPECIMENS)
    parser.add_argument("--in-turn", action="store_true", help="each for one architecture")
    parser.add_argument("--long", action="store_true", help="rare variants as well")
    parser.add_argument("--list", action="store_true", help="only name the kernels launched")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args(argv)
    with _compiling_environment():
        if arguments.list:
            names = sorted(recorded_kernels(arguments.specimens))
            print(json.dumps({"kernels": names}) if arguments.json else "\n".join(names))  # noqa: T201
            return 0
        usages = compile_specimens(
            arguments.specimens,
            stems=arguments.stems,
            architectures=arguments.architectures,
            with_long=arguments.long,
            in_turn=arguments.in_turn,
        )
    if arguments.json:
        print(json.dumps({"usages": [asdict(usage) for usage in usages]}))  # noqa: T201
    else:
        print(table(usages))  # noqa: T201
    wrong = [(usage, usage.complaints()) for usage in usages if usage.complaints()]
    for usage, complaints in wrong:
        where = f"{usage.kernel} sm_{usage.architecture} ({usage.specimens[0]})"
        sys.stderr.write(f"\n{where}: {'; '.join(complaints)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
