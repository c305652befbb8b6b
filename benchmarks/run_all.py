"""Run each benchmark that needs no GPU, in less than an hour; results go to benchmarks/results.

Each script runs in a process of its own, one after the other, with counts that fit the time. For
figures to be quoted, run the scripts by themselves on an idle machine, with their own defaults.
A script whose data or other programs are not there is left out, and said to be.

    python -m benchmarks.run_all            # on the demo pair
    python -m benchmarks.run_all --quick    # only to see that everything works
    python -m benchmarks.run_all --only bench_memory bench_gateway
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.routing.bench_assurance import SETS
from benchmarks.routing.bench_tiers import MODELS as TIER_MODELS
from benchmarks.routing.real_questions import HUMAN_EVAL, SPEC_BENCH
from benchmarks.routing.routerbench import FOLDER, PARTS
from benchmarks.routing.routerbench import SETS as TIER_SETS
from benchmarks.shared.harness import CACHE, console, show_table
from benchmarks.shared.record import ROOT
from benchmarks.shared.slo_trace import DEFAULT_TRACE as TRACE
from outrider.gateway.settings.public_models import public_path

_QUICK_RESULTS = CACHE / "quick-benchmarks"
_TARGET = ("--expand-target", "400M")
_QUICK_TARGET = ("--expand-target", "100M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script with its arguments, and with those of a quick run.

    `needs`: what it cannot run without, in the repository or under $OUTRIDER_DATA.
    """

    script: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...]
    needs: tuple[str, ...] = ()

    def command(self, *, quick: bool) -> list[str]:
        """Return what is run. Quick results never take the place of real ones."""
        options = (*self.quick, "--results", str(_QUICK_RESULTS)) if quick else self.arguments
        file = next((ROOT / "benchmarks").glob(f"*/{self.script}.py"))
        return [sys.executable, "-m", f"benchmarks.{file.parent.name}.{self.script}", *options]

    @property
    def missing(self) -> list[str]:
        """Return what it needs and is not there."""
        data = os.environ.get("OUTRIDER_DATA")
        places = [ROOT, *([Path(data)] if data else [])]
        return [name for name in self.needs if not any((at / name).exists() for at in places)]


_BF16 = ("--dtype", "bfloat16")
_TOOLS = ("--guidellm", "runs/guidellm-env", "--aiperf", "runs/aiperf-env")
JOBS = (
    Job(
        script="bench_speculation",
        arguments=("--dtype", "float32", "--repeats", "2"),
        quick=("--dtype", "float32", "--repeats", "1", "--num-prompts", "2", "--batch", "1", "4"),
    ),
    Job(
        script="bench_speculation",
        arguments=(
            *(*_BF16, *_TARGET, "--expand-draft", "40M"),
            *("--repeats", "2", "--num-prompts", "5", "--max-new", "96"),
        ),
        quick=(
            *(*_BF16, *_QUICK_TARGET, "--expand-draft", "10M"),
            *("--repeats", "1", "--num-prompts", "1", "--max-new", "16", "--batch", "1", "2"),
        ),
    ),
    Job(
        script="bench_tree_policies",
        arguments=(*_BF16, *_TARGET, "--num-prompts", "8", "--repeats", "1", "--chains", "4", "8"),
        quick=(
            *(*_BF16, *_QUICK_TARGET, "--chains", "4"),
            *("--repeats", "1", "--num-prompts", "1", "--max-new", "16"),
        ),
    ),
    Job(
        script="bench_acceptance",
        arguments=("--pair", "disagreeing", "--num-prompts", "40"),
        quick=("--num-prompts", "2", "--max-new", "16"),
    ),
    Job(
        script="bench_repeats",
        arguments=(*_BF16, *_TARGET, "--num-prompts", "3", "--repeats", "1"),
        quick=(*_BF16, *_QUICK_TARGET, "--num-prompts", "1", "--repeats", "1", "--max-new", "16"),
    ),
    Job(
        script="bench_load",
        arguments=(*_BF16, *_TARGET, "--pairs", "3", "--most", "16", "--window-s", "1"),
        quick=(*_BF16, *_QUICK_TARGET, "--pairs", "1", "--most", "2", "--window-s", "0.5"),
    ),
    Job(
        script="bench_peers",
        arguments=(*_BF16, *_TARGET, "--num-prompts", "4", "--repeats", "1", "--max-new", "64"),
        quick=(*_BF16, *_QUICK_TARGET, "--num-prompts", "1", "--repeats", "1", "--max-new", "8"),
    ),
    Job(
        script="bench_gguf",
        arguments=("--repeats", "10", "--num-long", "3"),
        quick=("--repeats", "1", "--num-long", "1", "--max-new", "24", "--long-prompt", "100"),
        needs=(public_path("smollm2-135m"),),
    ),
    Job(
        script="bench_through_transformers",
        arguments=(*_BF16, *_TARGET, "--num-prompts", "4", "--repeats", "1", "--max-new", "64"),
        quick=(*_BF16, *_QUICK_TARGET, "--num-prompts", "1", "--repeats", "1", "--max-new", "16"),
    ),
    Job(
        script="bench_experts",
        arguments=("--calls", "20"),
        quick=("--shapes", "Qwen3 30B-A3B", "--gib", "0.3", "--calls", "3", "--rows", "1", "4"),
    ),
    Job(
        script="bench_recurrent",
        arguments=("--repeats", "20"),
        quick=("--repeats", "1", "--vocab", "512"),
    ),
    Job(
        script="bench_kv_folder",
        arguments=("--repeats", "2"),
        quick=("--repeats", "1", "--large", "100M", "--lengths", "200"),
    ),
    Job(
        script="bench_kv_peers",
        arguments=("--repeats", "2"),
        quick=("--repeats", "1", "--large", "100M", "--length", "200", "--prompts", "1"),
    ),
    Job(
        script="bench_sessions",
        arguments=(),
        quick=("--large", "20M", "--calls", "20", "--scale", "64"),
    ),
    Job(
        script="bench_moved_blocks",
        arguments=("--conversations", "40", "--kills", "100"),
        quick=("--conversations", "40", "--questions", "6", "--max-new", "4", "--kills", "8"),
    ),
    Job(
        script="bench_host_overhead",
        arguments=_BF16,
        quick=(*_BF16, "--repeats", "1", "--steps", "5", "--sequences", "1", "4"),
    ),
    Job(
        script="bench_taps",
        arguments=(*_BF16, *_TARGET, "--seconds", "5"),
        quick=(*_BF16, *_QUICK_TARGET, "--seconds", "0.2", "--repeats", "1"),
    ),
    Job(
        script="bench_receipts",
        arguments=(*_BF16, *_TARGET, "--repeats", "5", "--answers", "16", "--honest", "200"),
        quick=(
            *(*_BF16, *_QUICK_TARGET, "--repeats", "1", "--answers", "2", "--tokens", "24"),
            *("--answer", "40", "--honest", "4", "--honest-tokens", "8", "--batch", "4"),
        ),
    ),
    Job(
        script="bench_small_tier",
        arguments=(*_BF16, *_TARGET, "--repeats", "2", "--num-prompts", "2", "--max-new", "48"),
        quick=(
            *(*_BF16, *_QUICK_TARGET, "--streams", "0", "1"),
            *("--repeats", "1", "--num-prompts", "1", "--max-new", "32"),
        ),
    ),
    Job(
        script="bench_fair_queue",
        arguments=("--dtype", "float32", "--repeats", "2"),
        quick=(
            *("--dtype", "float32", "--repeats", "1", "--burst", "8", "--max-new", "16"),
            *("--steady", "4", "--max-sequences", "4"),
        ),
    ),
    Job(
        script="bench_cascade",
        arguments=("--num-prompts", "6", "--repeats", "2", "--pool", "160"),
        quick=("--quick",),
    ),
    Job(
        script="bench_routing_quality",
        arguments=("--num-prompts", "500", "--num-latency", "16"),
        quick=("--quick",),
    ),
    Job(
        script="bench_served_router",
        arguments=("--num-prompts", "300"),
        quick=("--num-prompts", "6"),
    ),
    Job(
        script="bench_router_figures",
        arguments=(),
        quick=("--num-prompts", "60"),
    ),
    Job(
        script="bench_features",
        arguments=(),
        quick=("--quick",),
    ),
    Job(
        script="bench_drafters",
        arguments=("--steps", "199", "--prompts", "2200", "--held-out", "120"),
        quick=("--steps", "10", "--prompts", "100", "--held-out", "20"),
    ),
    Job(
        script="bench_small_server",
        arguments=("--num-prompts", "200"),
        quick=("--num-prompts", "8", "--max-new", "24", "--repeats", "1"),
    ),
    Job(
        script="bench_real_cascade",
        arguments=("--per-kind", "20"),
        quick=("--per-kind", "1", "--max-new", "24"),
        needs=(public_path("smollm2-135m"), SPEC_BENCH, HUMAN_EVAL),
    ),
    Job(
        script="bench_assurance",
        arguments=(),
        quick=("--sets", "gsm8k", "--draws", "5"),
        needs=tuple(f"routing/{name}_{part}.csv" for name in SETS for part in ("gold", "dev")),
    ),
    Job(
        script="bench_tiers",
        arguments=(),
        quick=("--models", *TIER_MODELS[:3], "--resamples", "20"),
        needs=tuple(f"{FOLDER}/{name}_{part}.csv" for name in TIER_SETS for part in PARTS),
    ),
    Job(script="bench_router", arguments=("--seconds", "20"), quick=("--quick",)),
    Job(script="bench_products", arguments=_TARGET, quick=("--repeats", "3")),
    Job(
        script="bench_portable",
        arguments=(*_TARGET, "--threads", "1"),
        quick=(*_QUICK_TARGET, "--threads", "1", "--repeats", "2"),
    ),
    Job(
        script="bench_coupled_answers",
        arguments=(),
        quick=("--num-tasks", "4", "--num-seeds", "2", "--max-new", "16"),
    ),
    Job(script="bench_quality", arguments=(), quick=("--num-tasks", "48")),
    Job(
        script="bench_adapters",
        arguments=(*_BF16, *_TARGET, "--repeats", "1", "--max-new", "24"),
        quick=(*_BF16, *_QUICK_TARGET, "--repeats", "1", "--batch", "4", "--max-new", "8"),
    ),
    Job(script="bench_loading", arguments=_TARGET, quick=_QUICK_TARGET),
    Job(
        script="bench_memory",
        arguments=(*_BF16, *_TARGET),
        quick=(*_BF16, "--num-prompts", "2", "--max-new", "16"),
    ),
    Job(
        script="bench_gateway",
        arguments=_BF16,
        quick=(*_BF16, "--repeats", "1", "--num-prompts", "2", "--clients", "1", "4"),
    ),
    Job(
        script="bench_tenants",
        arguments=("--requests", "0"),
        quick=("--requests", "0", "--repeats", "1", "--seconds", "2"),
    ),
    Job(
        script="bench_batches",
        arguments=("--requests", "2000", "--repeats", "2"),
        quick=("--requests", "40", "--seconds", "3", "--repeats", "1"),
    ),
    Job(
        script="bench_gateway_time",
        arguments=(),
        quick=("--repeats", "1", "--seconds", "1"),
    ),
    Job(script="bench_on_demand", arguments=(), quick=("--repeats", "1")),
    Job(
        script="bench_workers",
        arguments=(),
        quick=("--repeats", "1", "--seconds", "1"),
    ),
    Job(
        script="bench_remote_engine",
        arguments=(),
        quick=("--repeats", "1", "--requests", "2", "--chunks", "5"),
    ),
    Job(script="bench_loop_holds", arguments=(), quick=("--repeats", "2")),
    Job(
        script="bench_concurrency",
        arguments=(),
        quick=("--seconds", "1", "--repeats", "1"),
    ),
    Job(
        script="bench_largest_bodies",
        arguments=("--repeats", "3"),
        quick=("--repeats", "1", "--only", "tools"),
    ),
    Job(
        script="bench_upstream",
        arguments=("--repeats", "3", "--seconds", "8"),
        quick=("--repeats", "1", "--seconds", "2"),
    ),
    Job(
        script="bench_checks",
        arguments=("--repeats", "3", "--seconds", "6"),
        quick=("--repeats", "1", "--seconds", "2"),
    ),
    Job(
        script="bench_upstream_faults",
        arguments=("--cases", "replica", "--seconds", "4"),
        quick=(
            *("--cases", "replica", "--seconds", "2"),
            *("--faults", "refused", "reset in mid-stream", "stall in mid-stream"),
        ),
    ),
    Job(
        script="bench_slo",
        arguments=("--share", "0.1", "--loads", "0.8", "--repeats", "1"),
        quick=(
            *("--share", "0.02", "--loads", "0.8", "--repeats", "1", "--sample", "32"),
            *("--rate", "20", "--context", "256"),
        ),
        needs=(str(TRACE),),
    ),
    Job(
        script="bench_block_index",
        arguments=("--repeats", "3"),
        quick=("--replicas", "20", "--pairs", "20000", "--runs", "5", "--repeats", "1"),
    ),
    Job(
        script="bench_experiments",
        arguments=(),
        quick=("--requests", "500", "--repeats", "1"),
    ),
    Job(
        script="bench_cache",
        arguments=(),
        quick=("--requests", "50", "--repeats", "1"),
    ),
    Job(
        script="bench_second_turn",
        arguments=(),
        quick=("--repeats", "1", "--large", "20M"),
    ),
    Job(
        script="bench_replay",
        arguments=("--repeats", "2"),
        quick=("--repeats", "1", "--seconds", "1", "--warm-up", "0.2", "--rate", "50"),
    ),
    Job(
        script="bench_agreement",
        arguments=(*_TOOLS, "--repeats", "3"),
        quick=(*_TOOLS, "--repeats", "1", "--requests", "4", "--max-tokens", "8"),
        needs=_TOOLS[1::2],
    ),
    Job(
        script="bench_page",
        arguments=("--repeats", "2"),
        quick=("--repeats", "1", "--tokens", "100", "--long", "200"),
    ),
    Job(
        script="bench_plan",
        arguments=("--dtype", "float32"),
        quick=("--dtype", "float32", "--users", "1", "4", "--seconds", "2", "--max-new", "16"),
    ),
    Job(
        script="bench_lab",
        arguments=(),
        quick=("--seconds", "5", "--folder", str(CACHE / "quick-lab")),
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the jobs; exit status 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny counts")
    parser.add_argument("--only", nargs="+", choices=sorted({job.script for job in JOBS}))
    arguments = parser.parse_args(argv)
    jobs = [job for job in JOBS if arguments.only is None or job.script in arguments.only]
    rows = []
    for number, job in enumerate(jobs, start=1):
        command = job.command(quick=arguments.quick)
        console.rule(f"{number} of {len(jobs)}: {' '.join(command[2:])}", align="left")
        if job.missing:
            rows.append([job.script, f"left out: no {', '.join(job.missing)}", ""])
            continue
        started_s = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        seconds = time.monotonic() - started_s
        rows.append([job.script, "ok" if status == 0 else f"status {status}", f"{seconds:.0f}"])
    show_table("benchmarks", ["script", "ended", "seconds"], rows)
    if any(row[1].startswith("status") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
