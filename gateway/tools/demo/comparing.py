"""Parts of the demos that ask with and without speculation: replies, tables and a verdict."""

import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from outrider.gateway.tools.demo.questions import DemoQuestion

MAX_TOKENS: Final = 400
_MAX_CELL: Final = 60


@dataclass(slots=True, kw_only=True)
class DemoReply:
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
    max_tokens: int | None = None,
) -> DemoReply:
    """Stream one answer, of at most 400 tokens if not said. Raises openai.OpenAIError."""
    reply = DemoReply(question=question)
    started_s = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question.prompt}],
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens or MAX_TOKENS,
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
    drafted: DemoReply
    plain: DemoReply

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


def demo_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table without rows, whose numbers are not wrapped."""
    table = Table(title=title, title_justify="left")
    for name in texts:
        table.add_column(name)
    for name in numbers:
        # Only texts may wrap in a narrow terminal.
        table.add_column(name, justify="right", no_wrap=True)
    return table


def short(text: str) -> Text:
    """The beginning of a text that would take too much of the table."""
    return Text(text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 3]}...")


def short_answer(text: str) -> Text:
    """Return both ends of an answer: how it begins and what it comes to."""
    line = " / ".join(text.strip().splitlines())
    if len(line) > _MAX_CELL:
        line = f"{line[: _MAX_CELL // 2 - 3].rstrip()} ... {line[-_MAX_CELL // 2 + 2 :].lstrip()}"
    return Text(line)


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


def verdict(console: Console, comparisons: Sequence[SpeculationComparison], more: str = "") -> int:
    """Say what came out; `more` where all answers are the same. Returns the exit status."""
    console.print(_speedup(comparisons))
    different = [c for c in comparisons if not c.is_equal]
    if not different:
        console.print(f"[green]Every answer is token for token the same{more}.[/green]")
        return 0
    for item in different:
        console.print(f"[red]Not equal:[/red] {item.label}", soft_wrap=True)
        console.print(Text(f"  with:    {item.drafted.text!r}\n  without: {item.plain.text!r}"))
    console.print(
        "Speculation must never change an answer. On an x86 CPU this is a bug: please report it. "
        "Elsewhere two tokens whose logits nearly tie may change places in 16 bits."
    )
    return 1


def busy(console: Console, text: str) -> contextlib.AbstractContextManager[object]:
    """A line that moves in a terminal, and stands still in a log."""
    if console.is_terminal:
        return console.status(text)
    console.print(text)
    return contextlib.nullcontext()


def demo_progress(console: Console) -> Progress:
    """Return a bar that counts questions, in a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def demo_console() -> Console:
    """Return a console; logs have no width of their own, and the default would squeeze tables."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def demo_client(url: str) -> openai.OpenAI:
    """Return the official client of a gateway."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0)
