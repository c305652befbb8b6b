"""`outrider bench`, guidellm and aiperf, each as a process of its own, asked for the same figures.

guidellm and aiperf want other versions of packages than this repository, so make them environments:

    python -m venv runs/guidellm-env && runs/guidellm-env/bin/pip install guidellm
    python -m venv runs/aiperf-env && runs/aiperf-env/bin/pip install aiperf
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.harness import without_engine_environment
from benchmarks.shared.record import ROOT
from outrider.gateway.tools.measuring.bench.results import read_result

OURS: Final = "outrider bench"
GUIDELLM: Final = "guidellm"
AIPERF: Final = "aiperf"
FIGURES: Final = ("ttft_ms", "tpot_ms", "e2e_ms")
_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The task of every tool. `prompts`: one file a tool, in its own format, by the tool's name."""

    url: str
    model: str
    prompts: Mapping[str, Path]
    num_requests: int
    concurrency: int
    max_tokens: int
    tokenizer: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a tool: a sample for each whole answer, milliseconds."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    e2e_ms: list[float]
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program that measures. `program`: its command, up to the arguments of a run."""

    name: str
    program: tuple[str, ...]
    arguments: Callable[[Job, Path], list[str]]
    read: Callable[[Path], Measured]

    def run(self, job: Job, folder: Path, *, core: int | None) -> Measured:
        """Measure once; `folder` gets its files. Raises SystemExit with the end of its output."""
        folder.mkdir(parents=True)
        command = [*pinned(core), *self.program, *self.arguments(job, folder)]
        with without_engine_environment():
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
            )
        if done.returncode:
            raise SystemExit(f"{self.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return self.read(folder)


def pinned(core: int | None) -> list[str]:
    """The beginning of a command that has that core alone; nothing where there is none."""
    if core is None:
        return []
    text = (
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", text]


def write_prompts(texts: Sequence[str], folder: Path) -> dict[str, Path]:
    """The same prompts in each tool's words."""
    fields = {OURS: "prompt", GUIDELLM: "prompt", AIPERF: "text"}
    paths = {}
    for tool, field in fields.items():
        paths[tool] = folder / f"{tool.partition(' ')[0]}.jsonl"
        lines = [json.dumps({field: text}) + "\n" for text in texts]
        paths[tool].write_text("".join(lines), encoding="utf-8")
    return paths


# ---- outrider bench ---------------------------------------------------------------------------


def our_tool() -> Tool:
    """This repository's own."""
    program = (sys.executable, "-m", "outrider.gateway.cli", "bench")
    return Tool(name=OURS, program=program, arguments=our_arguments, read=read_ours)


def our_arguments(job: Job, folder: Path) -> list[str]:
    """The flags of a run."""
    return [
        *("--url", job.url, "--model", job.model, "--prompts", str(job.prompts[OURS])),
        *("--concurrency", str(job.concurrency), "--num-requests", str(job.num_requests)),
        *("--max-tokens", str(job.max_tokens), "--set", "temperature=0"),
        *("--warm-up", "0", "--json", str(folder / "run.json")),
    ]


def read_ours(folder: Path) -> Measured:
    """From when a request was sent, as the others count."""
    rows = read_result(folder / "run.json").measured
    good = [row for row in rows if row.is_success]
    return Measured(
        ttft_ms=[row.sent_ttft_ms for row in good if row.sent_ttft_ms is not None],
        tpot_ms=[row.tpot_ms for row in good if row.tpot_ms is not None],
        e2e_ms=[row.sent_e2e_ms for row in good if row.sent_e2e_ms is not None],
        num_failed=len(rows) - len(good),
    )


# ---- guidellm ---------------------------------------------------------------------------------


def guidellm_tool(environment: Path, request_format: str) -> Tool:
    """Out of its own environment; `request_format`: the path of the API that it asks."""

    def arguments(job: Job, folder: Path) -> list[str]:
        return guidellm_arguments(job, folder, request_format)

    program = (str(environment / "bin" / "guidellm"), "run")
    return Tool(name=GUIDELLM, program=program, arguments=arguments, read=read_guidellm)


def guidellm_arguments(job: Job, folder: Path, request_format: str) -> list[str]:
    """The flags of a run."""
    backend = {
        "kind": "openai_http",
        "target": job.url,
        "model": job.model,
        "request_format": request_format,
        "max_tokens": job.max_tokens,
        "http2": False,
        "validate_backend": False,  # it asks for /health, which not every server has
        "extras": {"body": {"temperature": 0}},
    }
    return [
        *("--backend", json.dumps(backend)),
        *("--profile", f"kind=concurrent,streams={job.concurrency}"),
        *("--constraint", f"kind=max_requests,count={job.num_requests}"),
        *("--data", f"kind=json_file,path={job.prompts[GUIDELLM]}"),
        *("--output", f"kind=json,path={folder / 'run.json'}"),
        "--disable-console",
    ]


def read_guidellm(folder: Path) -> Measured:
    """Its own figures of each request; its ITL is what is TPOT here."""
    document: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    requests = document["benchmarks"][0]["requests"]
    good = requests["successful"] or []
    failed = (requests["errored"] or []) + (requests["incomplete"] or [])
    return Measured(
        ttft_ms=_known(good, "time_to_first_token_ms"),
        tpot_ms=_known(good, "inter_token_latency_ms"),
        e2e_ms=[1e3 * seconds for seconds in _known(good, "request_latency")],
        num_failed=len(failed),
    )


def _known(requests: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(request[name]) for request in requests if request[name] is not None]


# ---- aiperf -----------------------------------------------------------------------------------


def aiperf_tool(environment: Path) -> Tool:
    """Out of its own environment."""
    program = (str(environment / "bin" / "aiperf"), "profile")
    return Tool(name=AIPERF, program=program, arguments=aiperf_arguments, read=read_aiperf)


def aiperf_arguments(job: Job, folder: Path) -> list[str]:
    """The flags of a run."""
    return [
        *("--model", job.model, "--url", job.url, "--endpoint-type", "chat", "--streaming"),
        *("--input-file", str(job.prompts[AIPERF]), "--custom-dataset-type", "single_turn"),
        *("--concurrency", str(job.concurrency), "--request-count", str(job.num_requests)),
        *("--warmup-request-count", "2", "--tokenizer", str(job.tokenizer)),
        *("--use-server-token-count", "--extra-inputs", f"max_tokens:{job.max_tokens}"),
        *("--extra-inputs", "temperature:0", "--export-level", "records"),
        *("--ui-type", "none", "--artifact-dir", str(folder / "artifacts")),
    ]


def read_aiperf(folder: Path) -> Measured:
    """Its own figures of each request; its ITL is what is TPOT here."""
    path = folder / "artifacts" / "profile_export.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    records = [one for one in records if one["metadata"]["benchmark_phase"] == "profiling"]
    good = [one["metrics"] for one in records if not one.get("error")]
    return Measured(
        ttft_ms=_values(good, "time_to_first_token"),
        tpot_ms=_values(good, "inter_token_latency"),
        e2e_ms=_values(good, "request_latency"),
        num_failed=len(records) - len(good),
    )


def _values(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(one[name]["value"]) for one in metrics if name in one]
