"""Is it right and how fast is it, on a GPU that has never run it: the first minutes.

    python -m benchmarks.gpu.gpu_first --out DIR --until 265              correctness, first figures
    python -m benchmarks.gpu.gpu_first --out DIR --until 150 --figures    the figures, with a curve

Method: all variants of the served pair's kernels are compiled first, in one process per core. Then
kernels at serving shapes are compared with float64 or the references, recorded passes with
unrecorded ones; models of Qwen3-8B's and 0.6B's shapes are made on the device, their passes and
levels are timed and profiled, and answers are decoded. How alike both models are is constructed
(gpu_paired_models), so an answer's speed belongs beside its `tokens_per_step`.

Reading it: DIR/gpu_first.jsonl has a line for each part as soon as it is known, so whatever ends
the run loses one line. A part that fails or finds no time hides no other; an illegal address ends
the run with status 3. `of_floor` is the time in which the weights can be read, at the read ceiling
of the same run, over the time.

--dry runs it at sizes that mean nothing, without a GPU in Triton's interpreter.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.gpu_engine_cases import DRY_SIZES, PairSizes
from benchmarks.gpu.gpu_first_checks import run_checks, run_pass_checks
from benchmarks.gpu.gpu_first_figures import PROFILED, Figures
from benchmarks.gpu.gpu_report import chosen_device, gpu_environment, start
from benchmarks.gpu.gpu_sections import ContextLostError, Facts, Sections
from benchmarks.shared.record import ROOT
from outrider.kernels.cpu.product_library import product_support

LAWS = (
    "tests/laws/test_gpu_laws.py::test_levels_of_the_small_model",
    "tests/laws/test_gpu_laws.py::test_levels_of_an_mtp_head",
    "tests/draft/device/test_device_growth.py::test_no_synchronisation_in_a_step_on_a_gpu",
    "tests/kernels/trees/test_grown_trees.py::test_a_step_waits_for_nothing_and_can_be_captured",
)
"""Run beside the checks: the tiny pair's texts in float32, with recorded levels."""

_LOST_STATUS = 3
_COMPILE_S = 40.0  # less time than this is no use to the compiler
_KEPT_S = 60.0  # for what comes behind it
_PART_BYTES = "15M"


# ---- the machine --------------------------------------------------------------------------------


def machine(device: torch.device) -> Facts:
    """Return versions and device: figures, and caches of kernels, are valid for these alone."""
    facts: dict[str, Any] = {
        **gpu_environment(device),
        "cores": os.cpu_count(),
        "programs": {name: shutil.which(name) is not None for name in ("gcc", "git", "make")},
        "compiled_library": product_support().detail,
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts["multiprocessors"] = found.multi_processor_count
        facts["l2_bytes"] = found.L2_cache_size
        facts["free_bytes"], facts["memory_bytes"] = torch.cuda.mem_get_info(device)
    return facts


def compile_variants(sections: Sections, workers: int) -> Facts:
    """Compile in processes of their own: this one has the GPU."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu.gpu_variants"),
            *("--workers", str(workers), "--launchers"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=max(sections.left_s - _KEPT_S, _COMPILE_S / 2),
    )
    return {"status": done.returncode, "output": done.stdout[-1500:], "errors": done.stderr[-500:]}


def pack_cache(folder: Path) -> Facts:
    """Pack the compiled kernels, so that a later machine of the same kind starts with them."""
    cache = os.environ.get("TRITON_CACHE_DIR")
    if cache is None or not Path(cache).is_dir():
        return {"packed": "nothing: TRITON_CACHE_DIR names no folder"}
    tar = subprocess.Popen(["tar", "-C", cache, "-czf", "-", "."], stdout=subprocess.PIPE)
    split = ["split", "-b", _PART_BYTES, "-", str(folder / "cache.tar.gz.part-")]
    subprocess.run(split, stdin=tar.stdout, check=True, timeout=40)
    tar.wait(timeout=5)
    parts = sorted(folder.glob("cache.tar.gz.part-*"))
    return {"packed": {part.name: part.stat().st_size for part in parts}}


# ---- the laws, beside all this ------------------------------------------------------------------


class Laws:
    """Tests in a process of their own, whose output is in a file."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "laws.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "-q", "--no-header"),
                    *("-p", "no:cacheprovider", "-W", "default", *LAWS),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self, sections: Sections) -> Facts:
        """Wait for them. Raises AssertionError where one failed or the time was not enough."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(sections.left_s - 5.0, 1.0))
        self.end()
        output = self._log.read_text(encoding="utf-8")[-600:]
        if self._process.returncode != 0:
            raise AssertionError(f"exit status {self._process.returncode}: {output}")
        return {"output": output}

    def end(self) -> None:
        """End what still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


# ---- the parts ----------------------------------------------------------------------------------


def run_correctness(
    sections: Sections, device: torch.device, folder: Path, *, is_dry: bool
) -> None:
    """All checks, with the laws beside them on a GPU."""
    if is_dry:
        run_checks(sections, device, is_dry=True)
        return
    laws = Laws(folder)
    try:
        run_checks(sections, device, is_dry=False)
        sections.run("laws", partial(laws.result, sections))
    finally:
        laws.end()


def run_first_figures(sections: Sections, figures: Figures, *, is_dry: bool) -> bool:
    """Load the pair, time its passes, and decode. False where there is no pair."""
    needs_s = 0.0 if is_dry else 8.0
    if not sections.run("load", figures.load, needs_s=3 * needs_s):
        return False
    sections.run("passes", figures.passes, needs_s=needs_s)
    if not is_dry:  # a profile is the device's
        for what in PROFILED:
            sections.run(f"profile {what}", partial(figures.profile, what), needs_s=needs_s)
    sections.run("answers plain", partial(figures.answers, "plain"), needs_s=needs_s)
    sections.run("answers drafted", partial(figures.answers, "drafted"), needs_s=needs_s)
    if not is_dry:  # passes of twelve sizes are timed for it
        sections.run("answers budgeted", partial(figures.answers, "budgeted"), needs_s=needs_s)
    return True


def run_more_figures(sections: Sections, figures: Figures, *, is_dry: bool) -> None:
    """Profile the host, and measure tokens per second over acceptance."""
    needs_s = 0.0 if is_dry else 10.0
    sections.run("host plain", partial(figures.host, "plain"), needs_s=needs_s)
    if is_dry:
        return
    sections.run("host budgeted", partial(figures.host, "budgeted"), needs_s=needs_s)
    sampled = partial(figures.answers, "budgeted", 0.8)
    sections.run("answers sampled", sampled, needs_s=needs_s)
    sections.run("curve", figures.curve, needs_s=needs_s)


def run_all(sections: Sections, arguments: argparse.Namespace) -> None:
    """The parts of this call in their order."""
    device, is_dry, folder = chosen_device(arguments), arguments.dry, arguments.out
    sections.run("machine", partial(machine, device))
    if not is_dry:
        compiling = partial(compile_variants, sections, arguments.workers)
        sections.run("compile", compiling, needs_s=_COMPILE_S)
        sections.run("pack", partial(pack_cache, folder))
    if arguments.figures:
        run_pass_checks(sections, device, is_dry=is_dry)
    else:
        run_correctness(sections, device, folder, is_dry=is_dry)
    figures = Figures(sections, DRY_SIZES if is_dry else PairSizes(), device, folder)
    if run_first_figures(sections, figures, is_dry=is_dry) and arguments.figures:
        run_more_figures(sections, figures, is_dry=is_dry)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu_first.jsonl")
    parser.add_argument("--until", type=float, default=265.0, help="seconds until it is over")
    parser.add_argument("--figures", action="store_true", help="figures instead of most checks")
    parser.add_argument("--only", default="", help="beginnings of parts' names, with commas")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--dry", action="store_true", help="tiny; without a GPU interpreted")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 0 where all went well, 1 where one failed, 3 where the device was lost."""
    arguments = _parser().parse_args(argv)
    only = tuple(name for name in arguments.only.split(",") if name)
    sections = Sections(arguments.out / "gpu_first.jsonl", until_s=arguments.until, only=only)
    try:
        run_all(sections, arguments)
    except ContextLostError:
        sections.end()
        return _LOST_STATUS
    return sections.end()


if __name__ == "__main__":
    start(main)
