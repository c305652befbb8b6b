"""`make demo-hybrid`: a device with a small model and a cloud with a large one, which is cut off.

Two gateways run as processes of their own, with the settings of `examples/hybrid/`. The device is
asked over HTTP throughout; the cloud is killed in the middle of an answer and started again later.
Every question has to be answered.
"""

import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.gateway.tools.demo.process import DemoError, GatewayProcess

_EXAMPLES: Final = Path(__file__).parents[3] / "examples" / "hybrid"
_BUNDLED: Final = ("--large", "demo", "--small", "demo")  # not grown: a pass is short
_MAX_TOKENS: Final = 400
_TIMEOUT_S: Final = 30.0
_CUT_AFTER_CHUNKS: Final = 3
_MAX_CELL: Final = 58
# How long the cloud may take to be trusted again: its breaker is open for up to 30 s.
_BACK_TIMEOUT_S: Final = 60.0
_PAUSE_S: Final = 0.5
_BREAKER: Final = re.compile(
    r'^outrider_upstream_breaker_state\{[^}]*state="(\w+)"[^}]*\} 1\.0$', re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridQuestion:
    """A question to the device. `options` is the request's `outrider` object."""

    prompt: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _asked(prompt: str, **options: Any) -> HybridQuestion:
    return HybridQuestion(prompt=prompt, options=options)


_WEEKDAY: Final = "What weekday comes 225 days after a Sunday?"
_DAYS: Final = "How many days are there between June 17 and October 20?"
ONLINE: Final = (
    _asked("Who are you?"),
    _asked("What is 6 + 3?"),
    _asked("Reverse the word lamp."),
    _asked(_WEEKDAY),
    _asked(_DAYS),
    _asked("Put 41, 17, 93, 58 in order, smallest first."),
    _asked(_DAYS, privacy="private"),
    _asked("Which is larger, 71 or 38?", policy="prefer_cloud"),
)
LONG: Final = _asked("What is 8213 + 1949?", policy="prefer_cloud")
OFFLINE: Final = (
    _asked("What is 6 + 3?"),
    _asked(_WEEKDAY),
    _asked(_DAYS),
    _asked("What is 4786 + 3957?", policy="prefer_cloud"),
    _asked(_DAYS, privacy="private"),
)
RETURN: Final = _asked("What is 4786 + 3957?", policy="prefer_cloud")
BACK: Final = (_asked(_WEEKDAY), _asked("What is 9 + 5?"))
_RIGHT: Final[Mapping[str, str]] = {
    "What is 6 + 3?": "9",
    "Reverse the word lamp.": "p-m-a-l",
    _WEEKDAY: "Monday",
    _DAYS: "125 days",
    "Put 41, 17, 93, 58 in order, smallest first.": "17, 41, 58, 93",
    "Which is larger, 71 or 38?": "71",
    "What is 8213 + 1949?": "10162",
    "What is 4786 + 3957?": "8743",
    "What is 9 + 5?": "14",
}
"""What the answers' last line has to say. The small model alone is wrong more often."""


@dataclass(slots=True, kw_only=True)
class HybridReply:
    """One streamed answer. `ttft_s`: seconds from sending to the first text."""

    question: HybridQuestion
    text: str = ""
    ttft_s: float | None = None
    finish_reason: str | None = None
    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def is_answered(self) -> bool:
        """True if the answer has text and is complete."""
        return bool(self.text.strip()) and self.finish_reason is not None and not self.error

    @property
    def tier(self) -> str:
        """Return the tier that answered; after a change in mid-answer both."""
        return str(self.report.get("tier", "nobody"))


class DeviceApp:
    """The device's gateway as an app sees it. Keeps every reply."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        self.replies: list[HybridReply] = []

    def ask(
        self, question: HybridQuestion, on_chunk: Callable[[int], None] = lambda _: None
    ) -> HybridReply:
        """Stream one answer. `on_chunk` is told how many pieces of text there are so far."""
        reply = HybridReply(question=question)
        self.replies.append(reply)
        started_s = time.perf_counter()
        num_pieces = 0
        try:
            for chunk in self._stream(question):
                reply.report |= (chunk.model_extra or {}).get("outrider") or {}
                for choice in chunk.choices:
                    reply.finish_reason = choice.finish_reason or reply.finish_reason
                    if not choice.delta.content:
                        continue
                    if reply.ttft_s is None:
                        reply.ttft_s = time.perf_counter() - started_s
                    reply.text += choice.delta.content
                    num_pieces += 1
                    on_chunk(num_pieces)
        except openai.OpenAIError as error:
            reply.error = str(error)
        return reply

    def breaker(self) -> str:
        """The state of the cloud's breaker, as the metrics tell it."""
        with urlopen(str(self._client.base_url.join("/metrics")), timeout=_TIMEOUT_S) as metrics:
            found = _BREAKER.search(metrics.read().decode())
        return found.group(1).replace("_", "-") if found else "unknown"

    def _stream(self, question: HybridQuestion) -> Iterator[Any]:
        with self._client.chat.completions.create(
            model="auto",
            messages=[{"role": "user", "content": question.prompt}],
            temperature=0,
            max_tokens=_MAX_TOKENS,
            stream=True,
            extra_body={"outrider": dict(question.options)} if question.options else {},
        ) as stream:
            yield from stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Controls of the demo's cloud."""

    cut: Callable[[], None]
    """Cuts it off at once."""
    restore: Callable[[], None]
    """Connects it again."""


def run(console: Console, url: str, cloud: Cloud) -> int:
    """Ask everything, print the tables. Returns the exit status: 0 where all was answered."""
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S
    ) as client:
        device = DeviceApp(client)
        device.ask(_asked("What is 2 + 2?", policy="local_only"))
        device.ask(_asked("What is 2 + 2?", policy="prefer_cloud"))
        console.print(table("1. Both are there", [device.ask(q) for q in ONLINE]))
        reply = _cut_in_mid_answer(device, cloud)
        console.print(table("2. The cloud is killed in the middle of an answer", [reply]))
        _show_text(console, reply)
        console.print(table("3. Without the cloud", [device.ask(q) for q in OFFLINE]))
        console.print(
            f"The breaker of the cloud is {device.breaker()}. Starting the cloud again ..."
        )
        cloud.restore()
        started_s = time.monotonic()
        back = _ask_until_back(device)
        is_back = back[-1].tier == "cloud"
        if is_back:
            console.print(
                f"It answers {time.monotonic() - started_s:.1f} s after it was ready. Until then "
                f"the device answered {len(back) - 1} more. The breaker is {device.breaker()}."
            )
        rest = [device.ask(question) for question in BACK]
        console.print(table("4. The cloud is back", [*back[-1:], *rest]))
        return verdict(console, device.replies, is_back=is_back)


def _cut_in_mid_answer(device: DeviceApp, cloud: Cloud) -> HybridReply:
    """Cut off an answer of the cloud behind its first pieces."""
    is_cut = False

    def cut(num_pieces: int) -> None:
        nonlocal is_cut
        if num_pieces == _CUT_AFTER_CHUNKS:
            is_cut = True
            cloud.cut()

    reply = device.ask(LONG, cut)
    if not is_cut:
        cloud.cut()
    return reply


def _ask_until_back(device: DeviceApp) -> list[HybridReply]:
    """Return the answers until the cloud answers again, or until the time is up."""
    give_up_s = time.monotonic() + _BACK_TIMEOUT_S
    replies = [device.ask(RETURN)]
    while replies[-1].tier != "cloud" and time.monotonic() < give_up_s:
        time.sleep(_PAUSE_S)
        replies.append(device.ask(RETURN))
    return replies


def table(title: str, replies: Sequence[HybridReply]) -> Table:
    """Table of prompt, answer, tier, reason and time to the first text."""
    shown = Table(title=title, title_justify="left", show_lines=True)
    for name in ("prompt", "answer", "answered by", "why"):
        shown.add_column(name, ratio=3 if name != "answered by" else None)
    shown.add_column("first\ntext", justify="right", no_wrap=True)
    for reply in replies:
        ttft = "-" if reply.ttft_s is None else f"{reply.ttft_s * 1000:.0f} ms"
        answer = _answer(reply)
        shown.add_row(_prompt(reply.question), answer, _who(reply), _why(reply), ttft)
    return shown


def _prompt(question: HybridQuestion) -> Text:
    shown = Text(_short(question.prompt))
    for name, value in question.options.items():
        shown.append(f"\n{name}: {value}", style="cyan")
    return shown


def _answer(reply: HybridReply) -> Text:
    """Return the answer's last line, green or red where the right one is known."""
    line = (reply.text.strip().split("\n") or [""])[-1].removeprefix("Answer: ").removesuffix(".")
    right = _RIGHT.get(reply.question.prompt)
    if right is None or not reply.is_answered:
        return Text(_short(line))
    if line == right:
        return Text(_short(line), style="green")
    return Text(_short(line), style="red").append(f"\nwrong, it is {right}", style="")


def _who(reply: HybridReply) -> Text:
    if not reply.is_answered:
        return Text("nobody", style="red")
    shown = Text(reply.tier, style="green" if reply.tier == "cloud" else "")
    if reply.report.get("degraded"):
        shown.append("\ndegraded", style="yellow")
    return shown


def _why(reply: HybridReply) -> Text:
    if not reply.is_answered:
        return Text(reply.error or "the answer is empty or broken off", style="red")
    return Text(str(reply.report.get("reason", "?")))


def _short(text: str) -> str:
    """The beginning of a text that would take too much of the table."""
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 3]}..."


def _show_text(console: Console, reply: HybridReply) -> None:
    """Print the answer that changed tiers, to show that nothing is missing."""
    console.print(Text("The whole answer: ").append(" / ".join(reply.text.split("\n"))))


def verdict(console: Console, replies: Sequence[HybridReply], *, is_back: bool) -> int:
    """Say what came out. Returns the exit status."""
    by_tier: dict[str, list[HybridReply]] = {}
    for reply in replies:
        if reply.is_answered:
            by_tier.setdefault(reply.tier, []).append(reply)
    for tier, answers in sorted(by_tier.items()):
        times_s = [reply.ttft_s for reply in answers if reply.ttft_s is not None]
        num_degraded = sum(bool(reply.report.get("degraded")) for reply in answers)
        degraded = f", {num_degraded} of them degraded" if num_degraded else ""
        console.print(
            f"{tier}: {len(answers)} answers{degraded}; first text after "
            f"{statistics.median(times_s) * 1000:.0f} ms in the median."
        )
    missing = [reply for reply in replies if not reply.is_answered]
    for reply in missing:
        console.print(Text(f"Not answered: {reply.question.prompt} ({reply.error})", style="red"))
    if not is_back:
        console.print("[red]The cloud did not come back.[/red]")
    if missing or not is_back:
        return 1
    console.print(f"[green]All {len(replies)} questions were answered.[/green]")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Start both gateways, the device's with further arguments of `outrider serve`."""
    # Logs have no width of their own; the default would squeeze the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    started_s = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            # With speculation the bundled model finishes before the cloud can be cut off.
            cloud_arguments = [*_serve_arguments("cloud"), *_BUNDLED, "--no-speculation"]
            cloud = stack.enter_context(GatewayProcess(cloud_arguments))
            console.print("Starting the cloud ...")
            cloud_url = cloud.start()
            console.print(f"The cloud is on {cloud_url}. Starting the device ...")
            device_arguments = [
                *_serve_arguments("device"),
                *("--set", f"tiers.cloud.url={cloud_url}/v1", *arguments),
            ]
            device_url = stack.enter_context(GatewayProcess(device_arguments)).start()
            console.print(
                f"The device is on {device_url}, {time.perf_counter() - started_s:.1f} s in all. "
                "The app talks to the device only.",
                soft_wrap=True,
            )
            status = run(console, device_url, Cloud(cut=cloud.kill, restore=_starter(cloud)))
    except DemoError as error:
        console.print(Text(f"The demo failed: {error}", style="red"), soft_wrap=True)
        return 1
    console.print(f"Done in {time.perf_counter() - started_s:.1f} s.")
    return status


def _serve_arguments(name: str) -> list[str]:
    return ["--config", str(_EXAMPLES / f"{name}.toml"), "--log-level", "ERROR"]


def _starter(cloud: GatewayProcess) -> Callable[[], None]:
    def start() -> None:
        cloud.start()

    return start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
