"""Does `outrider bench` measure what guidellm and aiperf measure?

Method: the same prompts, greedy, with the same number of users, are asked of one gateway with the
bundled pair by each tool in turn (A B C A B C): each is a process of its own on the core that the
gateway does not have. Before that all prompts are asked once, so that no tool meets a colder server
than the others. `--target mock`: a server with fixed delays instead, where the truth is known.

Reading it: medians of the rounds' medians. `ratio`: the tool's median over ours of the same round,
as a geometric mean with a 95 % interval (Student's t on logarithms). A tool agrees where its
interval holds 1, or where the ratio is nearer to 1 than our own rounds are to each other. Clients
count from when they send, so ours is `sent_ttft_ms` and `sent_e2e_ms`. aiperf's time a token ends
with the last event, ours and guidellm's with the last one that has a token.

    python -m benchmarks.peers.bench_agreement --guidellm runs/guidellm-env --aiperf runs/aiperf-env
"""

import argparse
import contextlib
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from scipy.stats import t as student

from benchmarks.peers.agreement_tools import (
    FIGURES,
    OURS,
    Job,
    Measured,
    Tool,
    aiperf_tool,
    guidellm_tool,
    our_tool,
    write_prompts,
)
from benchmarks.shared.harness import (
    DEMO_PAIR,
    console,
    measure_in_turn,
    quiet_transformers,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.prompts import load_prompts, load_tokenizer
from benchmarks.shared.record import RESULTS
from benchmarks.shared.upstream_servers import Server, cores, gateway_server, mock_server

_PAIR, _MOCK = "pair", "mock"
_MODELS: Final = {_PAIR: "large", _MOCK: "mock-model"}
_MOCK_OPTIONS: Final = ("--first-token-ms", "50", "--gap-ms", "10")
_NUM_PROMPTS: Final = 40


@contextlib.contextmanager
def server(target: str, *, core: int | None, max_tokens: int) -> Iterator[Server]:
    """Start the server that is measured."""
    if target == _MOCK:
        with mock_server([*_MOCK_OPTIONS, "--tokens", str(max_tokens)], core=core) as running:
            yield running
        return
    options = ("--set", "database_url=none", "--num-threads", "1")
    with gateway_server([], options=options, core=core) as running:
        yield running


def tools(arguments: argparse.Namespace) -> list[Tool]:
    """Ours, and those that an environment is named for. Raises SystemExit where it has none."""
    found = [our_tool()]
    if arguments.guidellm is not None:
        found.append(guidellm_tool(arguments.guidellm.resolve(), arguments.guidellm_format))
    if arguments.aiperf is not None:
        found.append(aiperf_tool(arguments.aiperf.resolve()))
    for tool in found[1:]:
        if not Path(tool.program[0]).is_file():
            raise SystemExit(f"{tool.name}: there is no {tool.program[0]}")
    if len(found) == 1:
        raise SystemExit(
            "nobody to agree with: name an environment with --guidellm or --aiperf "
            "(benchmarks/peers/agreement_tools.py says how to make one)"
        )
    return found


def prompt_texts(num: int) -> list[str]:
    """Held-out tasks of the bundled pair's world."""
    prompts = load_prompts("tasks", load_tokenizer(DEMO_PAIR / "large"), num_prompts=num)
    return [prompt.messages[-1]["content"] for prompt in prompts]


def measure(found: Sequence[Tool], arguments: argparse.Namespace) -> dict[str, list[Measured]]:
    """Rounds of each tool, by its name."""
    server_core, load_core = cores()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_prompts(prompt_texts(_NUM_PROMPTS), folder)
        with server(arguments.target, core=server_core, max_tokens=arguments.max_tokens) as asked:
            job = Job(
                url=f"http://127.0.0.1:{asked.port}",
                model=_MODELS[arguments.target],
                prompts=prompts,
                num_requests=arguments.requests,
                concurrency=arguments.concurrency,
                max_tokens=arguments.max_tokens,
                tokenizer=DEMO_PAIR / "large",
            )
            numbers = iter(range(10_000))

            def once(tool: Tool, task: Job) -> Measured:
                return tool.run(task, folder / f"run-{next(numbers)}", core=load_core)

            warm = replace(job, num_requests=_NUM_PROMPTS)
            return measure_in_turn(
                {tool.name: partial(once, tool, job) for tool in found},
                repeats=arguments.repeats,
                warm_up={tool.name: partial(once, tool, warm) for tool in found},
                description="tools",
            )


# ---- figures ----------------------------------------------------------------------------------


def compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Their rounds' figures over ours, round by round. Raises ValueError for fewer than two."""
    if len(ours) < 2:
        raise ValueError("one round tells nothing about noise")
    logs = [math.log(there / here) for here, there in zip(ours, theirs, strict=True)]
    middle = statistics.fmean(logs)
    quantile = float(student.ppf(0.975, len(logs) - 1))
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    noise = max(ours) / min(ours)
    ratio, low, high = (math.exp(value) for value in (middle, middle - half, middle + half))
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": ratio,
        "low": low,
        "high": high,
        "our_rounds_ratio": noise,
        "agrees": low <= 1.0 <= high or max(ratio, 1 / ratio) <= noise,
    }


def figures(rounds: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Return what each other tool says of each figure's median."""

    def medians(tool: str, name: str) -> list[float]:
        return [statistics.median(getattr(one, name)) for one in rounds[tool]]

    return {
        tool: {name: compared(medians(OURS, name), medians(tool, name)) for name in FIGURES}
        for tool in rounds
        if tool != OURS
    }


def check(rounds: Mapping[str, Sequence[Measured]]) -> None:
    """Raises SystemExit where a tool has failures, which would make its figures another thing's."""
    for tool, runs in rounds.items():
        if num_failed := sum(run.num_failed for run in runs):
            raise SystemExit(f"{tool}: {num_failed} requests failed")


def _show(results: Mapping[str, Any]) -> None:
    rows = [
        [
            f"{tool}, {name}",
            f"{entry['ours']:.2f}",
            f"{entry['theirs']:.2f}",
            f"{entry['ratio']:.3f}",
            f"{entry['low']:.3f} to {entry['high']:.3f}",
            f"{entry['our_rounds_ratio']:.3f}",
            verdict(entry["agrees"]),
        ]
        for tool, entries in results.items()
        for name, entry in entries.items()
    ]
    head = ["medians, ms", "ours", "theirs", "ratio", "95 %", "our rounds", "agrees"]
    show_table("agreement", head, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guidellm", type=Path, help="virtual environment that has it")
    parser.add_argument("--aiperf", type=Path, help="virtual environment that has it")
    parser.add_argument(
        "--guidellm-format", default="/v1/responses", help="path of the API that guidellm asks"
    )
    parser.add_argument("--target", choices=(_PAIR, _MOCK), default=_PAIR)
    parser.add_argument("--requests", type=int, default=80, help="a round")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    arguments = parser.parse_args(argv)
    found = tools(arguments)
    quiet_transformers()
    rounds = measure(found, arguments)
    check(rounds)
    results = figures(rounds)
    _show(results)
    if not all(entry["agrees"] for entries in results.values() for entry in entries.values()):
        console.print("Not all agree: the notes at the top of this script say how they count.")
    write_results("bench_agreement", arguments.target, {"tools": results}, arguments)


if __name__ == "__main__":
    start(main)
