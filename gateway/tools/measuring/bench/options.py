"""The flags of `outrider bench`. What they do is in `command`, which is loaded when it runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from outrider.gateway.tools.commands.flags import takes_flags

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

BENCH_HELP = """
Measure an OpenAI-compatible server: latencies, throughput, and the rate that it carries.

Without --url it starts a gateway of its own on a free port, and ends it afterwards.

[bold]Examples[/bold]

  outrider bench  [dim]# the bundled pair, four users, 30 seconds[/dim]

  outrider bench --url http://127.0.0.1:8000 --rate 5 --duration 60 --json run.json --html run.html

  outrider bench --prompts spec_bench.jsonl --category qa --num-requests 200 --concurrency 8

  outrider bench --trace azure_conv.csv --rate 2 --slo ttft_ms=500,inter_token_ms=50

  outrider bench --slo ttft_ms=500,inter_token_ms=50 --search  [dim]# the highest goodput[/dim]

  outrider bench --url http://127.0.0.1:8000 --users 200 --num-requests 2000  [dim]# for an experiment by user[/dim]

  outrider bench --ab outrider.max_draft_nodes=0 outrider.max_draft_nodes=16

  outrider bench --compare before.json after.json

Latencies count from when a request was due, so a slow server cannot hide behind a slow sender.
Exit status: 0 measured, 1 nothing could be measured, 2 a flag is wrong, 3 fewer requests met their
objectives than --fail-below.
"""  # noqa: E501 - what is typed stands on one line


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """The command line, a field a flag."""

    url: Annotated[
        str | None, typer.Option(help="Server to measure; default: a gateway started for this run.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Its model; default: auto, or the first that it lists.")
    ] = None
    key: Annotated[
        str | None,
        typer.Option(envvar="OUTRIDER_API_KEY", help="API key, if the server requires one."),
    ] = field(default=None, repr=False)
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts: JSON lines (Spec-Bench, …), or one a line.")
    ] = None
    category: Annotated[
        list[str] | None, typer.Option(help="Only prompts of this category; repeatable.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="A trace: Azure's CSV or Mooncake's JSON lines.")
    ] = None
    synthetic: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPT,ANSWER",
            help="Lengths in tokens instead of prompts: 128,64 or 64-256,32-64 or 128~0.5,64.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(min=0.0001, help="Requests per second, sent without waiting for answers."),
    ] = None
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant, or gamma:CV, which is burstier above 1.")
    ] = "poisson"
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent users; each sends its next request after an answer."),
    ] = None
    users: Annotated[
        int | None,
        typer.Option(min=1, help="Give each request one of N users: the units of experiments."),
    ] = None
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds of sending; default: 30.")
    ] = None
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests instead of seconds.")
    ] = None
    warm_up: Annotated[float, typer.Option(min=0.0, help="Seconds of warm-up, not measured.")] = 2.0
    max_in_flight: Annotated[
        int,
        typer.Option(
            min=1, help="With --rate: most requests at a time; the others wait, which is measured."
        ),
    ] = 1024
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer; with a trace, the maximum.")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            min=32, help="Context to scale a trace's lengths into; default: the target's."
        ),
    ] = None
    length_scale: Annotated[
        float | None, typer.Option(min=1e-6, help="Factor to scale lengths by.")
    ] = None
    max_gap: Annotated[
        float | None, typer.Option(min=0.0, help="Shorten a trace's silences to these seconds.")
    ] = None
    keep_lengths: Annotated[
        bool,
        typer.Option("--keep-lengths/--free-lengths", help="Answers as long as the trace's."),
    ] = True
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip invalid lines.")] = False
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Stream answers.")] = True
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A field of each request; repeatable."),
    ] = None
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME: VALUE", help="A header; repeatable.")
    ] = None
    slo: Annotated[
        str | None, typer.Option(help="Objectives: ttft_ms=500,inter_token_ms=50,e2e_ms=9000.")
    ] = None
    search: Annotated[
        bool, typer.Option("--search", help="Find the highest rate that meets --slo.")
    ] = False
    target_attainment: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of requests that must meet --slo.")
    ] = 0.9
    fail_below: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Exit 3 if a smaller share meets --slo.")
    ] = None
    price: Annotated[
        str | None,
        typer.Option(metavar="PROMPT,ANSWER", help="USD per million tokens, as in 0.15,0.60."),
    ] = None
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole answer.")] = 300.0
    stall: Annotated[float, typer.Option(min=0.1, help="Seconds without any data.")] = 60.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of times, lengths and order.")] = 0
    salt: Annotated[
        str,
        typer.Option(
            help=(
                "Salt of generated texts: the same salt gives the same texts, which a prefix "
                "cache may hold."
            )
        ),
    ] = ""
    commit: Annotated[str | None, typer.Option(help="Text to store in the result.")] = None
    serve: Annotated[
        str,
        typer.Option(
            metavar="FLAGS",
            help=('Flags of the gateway that this run starts, as in "--device cuda".'),
        ),
    ] = ""
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
    ] = None
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the result as an HTML page with plots."),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Measure nothing; compare two results."),
    ] = None
    ab: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B", help="Two sides in turn: each FIELD=VALUE[,…], or a URL, or base."
        ),
    ] = None


@app.command("bench", help=BENCH_HELP)
@takes_flags
def bench(flags: BenchFlags) -> None:
    """Measure; the help is `BENCH_HELP`."""
    # numpy and aiohttp would slow down `--help`.
    from outrider.gateway.tools.measuring.bench.bench_command import run_command

    run_command(flags)
