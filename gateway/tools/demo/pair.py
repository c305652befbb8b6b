"""`make demo`: a gateway on the bundled pair, called over HTTP with the official openai client.

It shows which tier answers each prompt and how fast, repeats the hard prompts without
speculation, and fails if speculation changed a single token.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from gateway.tools.demo.process import DemoError, GatewayProcess

EASY_PROMPTS = (
    "Who are you?",
    "What is 6 + 3?",
    "Which is larger, 71 or 38?",
    "Reverse the word lamp.",
    "Sort these words alphabetically: river, apple, moon.",
)
HARD_PROMPTS = (
    "What is 4786 + 3957?",
    "Put 297, 322, 985, 204, 553, 898, 695, 641 in order, largest first.",
    "What weekday comes 225 days after a Sunday?",
    "How many days are there between June 17 and October 20?",
    'Turn this into a JSON object that follows {"name": "string", "age": "integer", '
    '"city": "string"}: Maria works as a writer, is 34 years old and lives in Lisbon.',
)
SAMPLED_PROMPT = "Sam has 12 apples. Sam buys 9. Sam doubles the number of apples. How many now?"

# float32: there equality is exact whatever shares a pass, and the pair is small enough for it.
# Fixed trees: a machine that is busy installing packages would be measured wrong. Guesses of the
# small model only: the prompts are asked twice, and remembered answers would flatter the figures.
_SERVE_ARGUMENTS = (
    *("--dtype", "float32", "--log-level", "WARNING"),
    *("--set", "speculation.adaptive=false", "--set", "speculation.max_draft_nodes=8"),
    *("--set", "speculation.max_draft_depth=6", "--set", "speculation.max_branching=2"),
    *("--set", "speculation.sources=model"),
)
_MAX_TOKENS = 400
_MAX_CELL = 60
_ROUNDS = 2  # each mode answers each hard prompt so often; the quicker time counts


@dataclass(slots=True, kw_only=True)
class PairReply:
    """One streamed answer. `tokens`: the text of each token; times in seconds since sending."""

    prompt: str
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    num_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    ttft_s: float = 0.0
    duration_s: float = 0.0

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
    prompt: str,
    *,
    model: str = "auto",
    speculation: bool = True,
    temperature: float = 0.0,
    seed: int | None = None,
) -> PairReply:
    """Stream one answer. Raises openai.OpenAIError."""
    reply = PairReply(prompt=prompt)
    started_s = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
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
    """One prompt with and without speculation. `plain` and `drafted` are the quicker runs."""

    label: str
    drafted: PairReply
    plain: PairReply
    is_equal: bool

    @property
    def speedup(self) -> float:
        """Speed-up of decoding by speculation, as a factor."""
        return self.plain.decode_s / self.drafted.decode_s


def compare(
    client: openai.OpenAI, prompt: str, label: str, **options: Any
) -> SpeculationComparison:
    """Ask the large model in turn with and without speculation (A B A B)."""
    drafted, plain = [], []
    for _ in range(_ROUNDS):
        drafted.append(ask(client, prompt, model="large", speculation=True, **options))
        plain.append(ask(client, prompt, model="large", speculation=False, **options))
    answers = [(reply.text, reply.tokens) for reply in (*drafted, *plain)]
    return SpeculationComparison(
        label=label,
        drafted=min(drafted, key=lambda reply: reply.decode_s),
        plain=min(plain, key=lambda reply: reply.decode_s),
        is_equal=all(answer == answers[0] for answer in answers),
    )


def answers_table(replies: Sequence[PairReply]) -> Table:
    """Prompt, tier, answer, time to first token, rate, drafted and accepted tokens."""
    table = _table(
        "Routed by `model: auto`, streamed over HTTP",
        ("prompt", "tier", "answer"),
        ("first\ntoken", "tokens\nper s", "drafted\ntokens", "accepted\ntokens"),
    )
    for reply in replies:
        rate = reply.tokens_per_s
        table.add_row(
            _short(reply.prompt),
            _tier(reply.report),
            _short_answer(reply.text),
            f"{reply.ttft_s * 1000:.0f} ms",
            "-" if rate is None else f"{rate:.0f}",
            str(reply.report.get("drafted_tokens", "?")),
            str(reply.report.get("accepted_tokens", "?")),
        )
    return table


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
    """Both ends of an answer: how it sets out and what it comes to."""
    line = " / ".join(text.strip().splitlines())
    if len(line) > _MAX_CELL:
        line = f"{line[: _MAX_CELL // 2 - 3].rstrip()} ... {line[-_MAX_CELL // 2 + 2 :].lstrip()}"
    return Text(line)


def comparison_table(comparisons: Sequence[SpeculationComparison]) -> Table:
    """The same prompts with and without speculation."""
    table = _table(
        "The large model, with and without speculation",
        ("prompt",),
        ("tokens", "plain\ntok/s", "with\ntok/s", "speed-up", "accepted\n/ drafted", "equal"),
    )
    for item in comparisons:
        report = item.drafted.report
        table.add_row(
            _short(item.label),
            str(item.drafted.num_tokens),
            f"{item.plain.tokens_per_s or 0:.0f}",
            f"{item.drafted.tokens_per_s or 0:.0f}",
            f"{item.speedup:.2f} x",
            f"{report.get('accepted_tokens', '?')} / {report.get('drafted_tokens', '?')}",
            "[green]yes[/]" if item.is_equal else "[red]NO[/]",
        )
    return table


def verdict(console: Console, comparisons: Sequence[SpeculationComparison]) -> int:
    """Say what came out. Returns the exit status."""
    total = sum(c.plain.decode_s for c in comparisons) / sum(
        c.drafted.decode_s for c in comparisons
    )
    middle = statistics.median(c.speedup for c in comparisons)
    console.print(f"Speed-up by speculation: {total:.2f} x in all, {middle:.2f} x in the median.")
    different = [c for c in comparisons if not c.is_equal]
    if not different:
        console.print("[green]Every answer is token for token the same, sampled ones too.[/green]")
        return 0
    for item in different:
        console.print(f"[red]Not equal:[/red] {item.label}", soft_wrap=True)
        console.print(Text(f"  with:    {item.drafted.text!r}\n  without: {item.plain.text!r}"))
    console.print(
        "Speculation must never change an answer. In float32 this is a bug: please report it. "
        "In bfloat16 two tokens whose logits nearly tie may change places."
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
    prompts = [*EASY_PROMPTS, *HARD_PROMPTS]
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
        task = progress.add_task("warming up", total=len(prompts) + len(HARD_PROMPTS) + 1)
        for model in ("small", "large"):
            ask(client, "What is 2 + 2?", model=model)
        replies = []
        for prompt in prompts:
            progress.update(task, description="asking", advance=1)
            replies.append(ask(client, prompt))
        own_answers = [
            ask(client, reply.prompt, model="large")
            for reply in replies
            if reply.report.get("escalated")
        ]
        comparisons = []
        for prompt in HARD_PROMPTS:
            progress.update(task, description="with and without speculation", advance=1)
            comparisons.append(compare(client, prompt, prompt))
        progress.update(task, description="sampling", advance=1)
        label = f"(sampled, 0.8) {SAMPLED_PROMPT}"
        comparisons.append(compare(client, SAMPLED_PROMPT, label, temperature=0.8, seed=1234))
    console.print(answers_table(replies))
    console.print(comparison_table(comparisons))
    escalated = [reply for reply in replies if reply.report.get("escalated")]
    for reply, own in zip(escalated, own_answers, strict=True):
        if reply.text != own.text:
            console.print(f"[red]Not the large model's own answer:[/red] {reply.prompt}")
            return 1
    if escalated:
        console.print("[green]Answers that were handed over are the large model's own.[/green]")
    empty = [reply.prompt for reply in replies if not reply.text.strip()]
    if empty:
        console.print(f"[red]No answer came to:[/red] {'; '.join(empty)}", soft_wrap=True)
        return 1
    return verdict(console, comparisons)


def main(arguments: Sequence[str]) -> int:
    """Start a gateway with `outrider serve`'s arguments and put it through its paces."""
    # Logs have no width of their own; the default would squeeze the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    started_s = time.perf_counter()
    serve_arguments = [*_SERVE_ARGUMENTS, *arguments]
    try:
        with contextlib.ExitStack() as stack:
            with _busy(console, "Starting the gateway on the bundled pair ..."):
                url = stack.enter_context(GatewayProcess(serve_arguments)).start()
            console.print(
                f"Gateway on {url}, up in {time.perf_counter() - started_s:.1f} s "
                f"(outrider serve --port 0 {' '.join(serve_arguments)}).",
                soft_wrap=True,
            )
            status = run(console, url)
    except (DemoError, openai.OpenAIError, httpx.HTTPError) as error:
        console.print(f"[red]The demo failed:[/red] {error}", soft_wrap=True, markup=True)
        return 1
    console.print(f"Done in {time.perf_counter() - started_s:.1f} s.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
