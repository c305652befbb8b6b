"""`make demo`: a gateway with its default settings, asked with the official openai client.

The bundled pair is served grown (`grown_pair.py`): passes of a model of 7 million parameters cost
so little that speculation has nothing to save. The demo shows which tier answers each question
and how fast, and asks others with and without speculation. It fails if that changed a token.
"""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.gateway.tools.demo.comparing import (
    DemoReply,
    SpeculationComparison,
    ask,
    busy,
    compare,
    demo_client,
    demo_console,
    demo_progress,
    demo_table,
    short,
    short_answer,
    verdict,
)
from outrider.gateway.tools.demo.grown_pair import GROWN, kept_pair
from outrider.gateway.tools.demo.process import DemoError, GatewayProcess
from outrider.gateway.tools.demo.questions import FRESH, ROUTED, SAMPLED, DemoQuestion

_SERVE_ARGUMENTS = ("--log-level", "WARNING")
_WARM_UP = DemoQuestion(prompt="What is 2 + 2?", right="4")


def answers_table(replies: Sequence[DemoReply]) -> Table:
    """Prompt, tier, answer and whether it is right, time to first token, rate, drafted tokens."""
    table = demo_table(
        "Routed by `model: auto`, streamed over HTTP",
        ("prompt", "tier", "answer", "right"),
        ("first\ntoken", "tokens\nper s", "drafted\ntokens", "accepted\ntokens"),
    )
    for reply in replies:
        rate = reply.tokens_per_s
        table.add_row(
            short(reply.question.prompt),
            _tier(reply.report),
            short_answer(reply.text),
            _right(reply),
            f"{reply.ttft_s * 1000:.0f} ms",
            "-" if rate is None else f"{rate:.0f}",
            str(reply.report.get("drafted_tokens", "?")),
            str(reply.report.get("accepted_tokens", "?")),
        )
    return table


def _right(reply: DemoReply) -> Text:
    """Say that the answer is right, or give the right one."""
    if reply.is_right:
        return Text("yes", style="green")
    return Text(f"no: {reply.question.right}", style="red")


def _tier(report: Mapping[str, Any]) -> str:
    """Return the tier; after an escalation also how much of the small answer was kept."""
    if not report.get("escalated"):
        return str(report.get("tier", "?"))
    written = report["reused_tokens"] + report["discarded_tokens"]
    return f"small, then {report['tier']}\n({report['reused_tokens']} of {written} tokens kept)"


def comparison_table(comparisons: Sequence[SpeculationComparison]) -> Table:
    """Tabulate the same prompts with and without speculation."""
    table = demo_table(
        "The large model with and without speculation, in turn, each question new",
        ("prompt", "right"),
        ("tokens", "plain\ntok/s", "with\ntok/s", "speed-up", "accepted\n/ drafted", "equal"),
    )
    for item in comparisons:
        report = item.drafted.report
        table.add_row(
            short(item.label),
            _right(item.drafted),
            str(item.drafted.num_tokens),
            f"{item.plain.tokens_per_s or 0:.0f}",
            f"{item.drafted.tokens_per_s or 0:.0f}",
            f"{item.speedup:.2f} x",
            f"{report.get('accepted_tokens', '?')} / {report.get('drafted_tokens', '?')}",
            "[green]yes[/]" if item.is_equal else "[red]NO[/]",
        )
    return table


def run(console: Console, url: str) -> int:
    """Ask everything, print both tables. Returns the exit status."""
    with (
        demo_client(url) as client,
        demo_progress(console) as progress,
    ):
        task = progress.add_task("warming up", total=len(ROUTED) + len(FRESH) + 1)
        for model in ("small", "large"):
            ask(client, _WARM_UP, model=model)
        replies = []
        for question in ROUTED:
            progress.update(task, description="asking", advance=1)
            replies.append(ask(client, question))
        own_answers = [
            ask(client, reply.question, model="large")
            for reply in replies
            if reply.report.get("escalated")
        ]
        comparisons = []
        for question in FRESH:
            progress.update(task, description="with and without speculation", advance=1)
            comparisons.append(compare(client, question))
        progress.update(task, description="sampling", advance=1)
        label = f"(sampled, 0.8) {SAMPLED.prompt}"
        comparisons.append(compare(client, SAMPLED, label, temperature=0.8, seed=1234))
    console.print(answers_table(replies))
    num_right = sum(reply.is_right for reply in replies)
    console.print(f"{num_right} of {len(replies)} answers are right.")
    console.print(comparison_table(comparisons))
    return max(
        _check(console, replies, own_answers), verdict(console, comparisons, ", sampled ones too")
    )


def _check(console: Console, replies: Sequence[DemoReply], own_answers: Sequence[DemoReply]) -> int:
    """Compare answers that were handed over with the large model's own. Returns the status."""
    escalated = [reply for reply in replies if reply.report.get("escalated")]
    for reply, own in zip(escalated, own_answers, strict=True):
        if reply.text != own.text:
            console.print(f"[red]Not the large model's own answer:[/red] {own.question.prompt}")
            return 1
    if escalated:
        console.print("[green]Answers that were handed over are the large model's own.[/green]")
    empty = [reply.question.prompt for reply in replies if not reply.text.strip()]
    if empty:
        console.print(f"[red]No answer came to:[/red] {'; '.join(empty)}", soft_wrap=True)
    return 1 if empty else 0


def main(arguments: Sequence[str]) -> int:
    """Grow the pair, start a gateway with further arguments of `outrider serve`, ask it."""
    console = demo_console()
    started_s = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            console.print(
                f"The bundled pair is grown to {GROWN['large']} and {GROWN['small']} parameters: "
                "the same answers, at the price that a pass of such models has.",
                soft_wrap=True,
            )
            with busy(console, "Growing it, once, and starting the gateway ..."):
                folder = kept_pair(lambda _: None)
                models = (f"--{name}={folder / name}" for name in ("large", "small", "router"))
                serve_arguments = [*models, *_SERVE_ARGUMENTS, *arguments]
                url = stack.enter_context(GatewayProcess(serve_arguments)).start()
            console.print(
                f"Gateway on {url} with default settings, up in "
                f"{time.perf_counter() - started_s:.1f} s.",
                soft_wrap=True,
            )
            status = run(console, url)
    except (DemoError, OSError, openai.OpenAIError) as error:
        console.print(f"[red]The demo failed:[/red] {error}", soft_wrap=True, markup=True)
        return 1
    console.print(f"Done in {time.perf_counter() - started_s:.1f} s.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
