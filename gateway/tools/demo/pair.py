"""`make demo`: a gateway with its default settings, asked with the official openai client.

The bundled pair is served grown (`grown_pair.py`): passes of a model of 7 million parameters cost
so little that speculation has nothing to save. The demo shows which tier answers each question
and how fast, and asks others with and without speculation. It fails if that changed a token.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from outrider.gateway.tools.demo.grown_pair import GROWN, kept_pair
from outrider.gateway.tools.demo.process import DemoError, GatewayProcess
from outrider.gateway.tools.demo.questions import FRESH, ROUTED, SAMPLED, DemoQuestion

_SERVE_ARGUMENTS = ("--log-level", "WARNING")
_MAX_TOKENS = 400
_MAX_CELL = 60
_WARM_UP = DemoQuestion(prompt="What is 2 + 2?", right="4")


@dataclass(slots=True, kw_only=True)
class PairReply:
    """One streamed answer. `tokens`: the text of each token; times in seconds since sending."""

    question: DemoQuestion
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    num_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    ttft_s: float = 0.0
    duration_s: float = 0.0

    @property
    def is_right(self) -> bool:
        """True if the answer is the known one."""
        return self.question.is_right(self.text)

    @property
    def decode_s(self) -> float:
        """Time from the first to the last token."""
        return max(self.duration_s - self.ttft_s, 1e-9)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, None if there was but one."""
        return (self.num_tokens - 1) / self.decode_s if self.num_tokens > 1 else None


def ask(
    client: openai.OpenAI,
    question: DemoQuestion,
    *,
    model: str = "auto",
    speculation: bool = True,
    temperature: float = 0.0,
    seed: int | None = None,
) -> PairReply:
    """Stream one answer. Raises openai.OpenAIError."""
    reply = PairReply(question=question)
    started_s = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question.prompt}],
        temperature=temperature,
        seed=seed,
        max_tokens=_MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-outrider-trace": "1"},
        extra_body={} if speculation else {"outrider": {"speculation": "off"}},
    )
    for chunk in stream:
        now_s = time.perf_counter() - started_s
        outrider = (chunk.model_extra or {}).get("outrider") or {}
        reply.tokens += [text for text, _ in outrider.get("tokens", [])]
        if "tier" in outrider:
            reply.report = outrider
        if chunk.usage is not None:
            reply.num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                reply.ttft_s = reply.ttft_s or now_s
                reply.duration_s = now_s
                reply.text += choice.delta.content
    return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationComparison:
    """One question with and without speculation."""

    label: str
    drafted: PairReply
    plain: PairReply

    @property
    def is_equal(self) -> bool:
        """True if both answers have the same tokens."""
        return (self.drafted.text, self.drafted.tokens) == (self.plain.text, self.plain.tokens)

    @property
    def speedup(self) -> float:
        """Speed-up of decoding by speculation, as a factor."""
        return self.plain.decode_s / self.drafted.decode_s


def compare(
    client: openai.OpenAI, question: DemoQuestion, label: str = "", **options: Any
) -> SpeculationComparison:
    """Ask the large model with speculation, then without.

    Each only once: answers are remembered and would draft themselves the next time.
    """
    drafted = ask(client, question, model="large", speculation=True, **options)
    plain = ask(client, question, model="large", speculation=False, **options)
    return SpeculationComparison(label=label or question.prompt, drafted=drafted, plain=plain)


def answers_table(replies: Sequence[PairReply]) -> Table:
    """Prompt, tier, answer and whether it is right, time to first token, rate, drafted tokens."""
    table = _table(
        "Routed by `model: auto`, streamed over HTTP",
        ("prompt", "tier", "answer", "right"),
        ("first\ntoken", "tokens\nper s", "drafted\ntokens", "accepted\ntokens"),
    )
    for reply in replies:
        rate = reply.tokens_per_s
        table.add_row(
            _short(reply.question.prompt),
            _tier(reply.report),
            _short_answer(reply.text),
            _right(reply),
            f"{reply.ttft_s * 1000:.0f} ms",
            "-" if rate is None else f"{rate:.0f}",
            str(reply.report.get("drafted_tokens", "?")),
            str(reply.report.get("accepted_tokens", "?")),
        )
    return table


def _right(reply: PairReply) -> Text:
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


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name)
    for name in numbers:
        # Only texts may wrap in a narrow terminal.
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _short(text: str) -> Text:
    """The beginning of a text that would take too much of the table."""
    return Text(text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 3]}...")


def _short_answer(text: str) -> Text:
    """Return both ends of an answer: how it begins and what it comes to."""
    line = " / ".join(text.strip().splitlines())
    if len(line) > _MAX_CELL:
        line = f"{line[: _MAX_CELL // 2 - 3].rstrip()} ... {line[-_MAX_CELL // 2 + 2 :].lstrip()}"
    return Text(line)


def comparison_table(comparisons: Sequence[SpeculationComparison]) -> Table:
    """Tabulate the same prompts with and without speculation."""
    table = _table(
        "The large model with and without speculation, in turn, each question new",
        ("prompt", "right"),
        ("tokens", "plain\ntok/s", "with\ntok/s", "speed-up", "accepted\n/ drafted", "equal"),
    )
    for item in comparisons:
        report = item.drafted.report
        table.add_row(
            _short(item.label),
            _right(item.drafted),
            str(item.drafted.num_tokens),
            f"{item.plain.tokens_per_s or 0:.0f}",
            f"{item.drafted.tokens_per_s or 0:.0f}",
            f"{item.speedup:.2f} x",
            f"{report.get('accepted_tokens', '?')} / {report.get('drafted_tokens', '?')}",
            "[green]yes[/]" if item.is_equal else "[red]NO[/]",
        )
    return table


def _speedup(comparisons: Sequence[SpeculationComparison]) -> str:
    """The speed-up in all, and how far single questions differ."""
    total = sum(c.plain.decode_s for c in comparisons)
    total /= sum(c.drafted.decode_s for c in comparisons)
    factors = sorted(c.speedup for c in comparisons)
    low, _, high = statistics.quantiles(factors, n=4, method="inclusive")
    return (
        f"Speculation: {total:.1f} times as fast in all; half of the {len(factors)} questions lie "
        f"between {low:.1f} and {high:.1f}, all between {factors[0]:.1f} and {factors[-1]:.1f}."
    )


def verdict(console: Console, comparisons: Sequence[SpeculationComparison]) -> int:
    """Say what came out. Returns the exit status."""
    console.print(_speedup(comparisons))
    different = [c for c in comparisons if not c.is_equal]
    if not different:
        console.print("[green]Every answer is token for token the same, sampled ones too.[/green]")
        return 0
    for item in different:
        console.print(f"[red]Not equal:[/red] {item.label}", soft_wrap=True)
        console.print(Text(f"  with:    {item.drafted.text!r}\n  without: {item.plain.text!r}"))
    console.print(
        "Speculation must never change an answer. On an x86 CPU this is a bug: please report it. "
        "Elsewhere two tokens whose logits nearly tie may change places in 16 bits."
    )
    return 1


def _busy(console: Console, text: str) -> contextlib.AbstractContextManager[object]:
    """A line that moves in a terminal, and stands still in a log."""
    if console.is_terminal:
        return console.status(text)
    console.print(text)
    return contextlib.nullcontext()


def run(console: Console, url: str) -> int:
    """Ask everything, print both tables. Returns the exit status."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as progress,
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
    return max(_check(console, replies, own_answers), verdict(console, comparisons))


def _check(console: Console, replies: Sequence[PairReply], own_answers: Sequence[PairReply]) -> int:
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
    # Logs have no width of their own; the default would squeeze the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    started_s = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            console.print(
                f"The bundled pair is grown to {GROWN['large']} and {GROWN['small']} parameters: "
                "the same answers, at the price that a pass of such models has.",
                soft_wrap=True,
            )
            with _busy(console, "Growing it, once, and starting the gateway ..."):
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
