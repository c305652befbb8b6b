"""`make demo-real`: a public language model, asked ten real prompts with and without speculation.

The model is fetched once (`outrider models get`). No small model drafts for it: repeated text does,
so speculation gains where an answer repeats its prompt or itself. The demo shows the answers and
fails if speculation changed a token.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Final

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.gateway.settings.public_models import PUBLIC_MODELS
from outrider.gateway.tools.commands.models.fetching import ModelFetchError, fetch_model
from outrider.gateway.tools.commands.terminal import LoadingProgress
from outrider.gateway.tools.demo.comparing import (
    SpeculationComparison,
    ask,
    busy,
    compare,
    demo_client,
    demo_console,
    demo_progress,
    demo_table,
    verdict,
)
from outrider.gateway.tools.demo.process import DemoError, GatewayProcess
from outrider.gateway.tools.demo.questions import DemoQuestion
from outrider.gateway.tools.demo.real_prompts import REAL_PROMPTS

_MODEL: Final = PUBLIC_MODELS["smollm2-135m"]
_WARM_UP: Final = DemoQuestion(prompt="Name a colour.", right="")
_MAX_SHOWN: Final = 120


def real_table(comparisons: Sequence[SpeculationComparison]) -> Table:
    """Tabulate what was asked, how each answer begins, and its pace with and without drafts."""
    table = demo_table(
        "Ten prompts to one model, with and without speculation, in turn",
        ("prompt", "how the answer begins"),
        ("tokens", "plain\ntok/s", "with\ntok/s", "tokens\na step", "equal"),
    )
    table.show_lines = True
    for item in comparisons:
        table.add_row(
            Text(f"{item.label}: {_beginning(item.drafted.question.prompt, _MAX_SHOWN // 2)}"),
            Text(_beginning(item.drafted.text, _MAX_SHOWN)),
            str(item.drafted.num_tokens),
            f"{item.plain.tokens_per_s or 0:.0f}",
            f"{item.drafted.tokens_per_s or 0:.0f}",
            f"{item.drafted.report.get('mean_emitted_tokens') or 0:.2f}",
            "[green]yes[/]" if item.is_equal else "[red]NO[/]",
        )
    return table


def _beginning(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most].rstrip()} ..."


def run(console: Console, url: str) -> int:
    """Ask everything, print the table. Returns the exit status."""
    with demo_client(url) as client, demo_progress(console) as progress:
        task = progress.add_task("warming up", total=len(REAL_PROMPTS))
        ask(client, _WARM_UP, model="large", max_tokens=16)
        comparisons = []
        for one in REAL_PROMPTS:
            progress.update(task, description=f"asking: {one.kind}")
            question = DemoQuestion(prompt=one.prompt, right="")
            comparisons.append(compare(client, question, one.kind, max_tokens=one.max_tokens))
            progress.advance(task)
    console.print(real_table(comparisons))
    empty = [item.label for item in comparisons if not item.drafted.text.strip()]
    if empty:
        console.print(f"[red]No answer came to:[/red] {', '.join(empty)}", soft_wrap=True)
    return max(verdict(console, comparisons), int(bool(empty)))


def main(arguments: Sequence[str]) -> int:
    """Fetch the model, start a gateway with further arguments of `outrider serve`, ask it."""
    console = demo_console()
    started_s = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            with LoadingProgress(console) as progress:
                file = fetch_model(_MODEL, progress.report)
            console.print(
                f"{_MODEL.summary}, {_MODEL.licence}. It writes fluently; with 135 million "
                f"parameters it is often wrong.\nIts file: {file}",
                soft_wrap=True,
            )
            with busy(console, "Starting the gateway ..."):
                model = (_MODEL.name, "--small", "none", "--log-level", "WARNING")
                url = stack.enter_context(GatewayProcess([*model, *arguments])).start()
            console.print(
                f"Gateway on {url}, up in {time.perf_counter() - started_s:.1f} s. No small model "
                "drafts: repeated text does, which helps where an answer repeats something.",
                soft_wrap=True,
            )
            status = run(console, url)
    except (DemoError, ModelFetchError, openai.OpenAIError) as error:
        console.print(f"[red]The demo failed:[/red] {error}", soft_wrap=True, markup=True)
        return 1
    console.print(f"Done in {time.perf_counter() - started_s:.1f} s. Ask it yourself:")
    console.print(f"  .venv/bin/outrider serve {_MODEL.name}", highlight=False)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
