"""Does the playground keep 60 frames a second while an answer streams in at 200 tokens a second?

Method: a gateway over an engine that writes at a set pace and tells where its tokens come from;
its page in headless Chromium, which is asked a question as a user would. The page's
requestAnimationFrame is heard from the answer's first token to its last. `idle` is the same page
with nothing to do: what this machine's browser can reach. `plain`: a token an event, 200 events a
second. `drafted`: four a step with a tree of 24 guesses. `tree shown`: the same, with the tree of
the last step on show, which is drawn anew with every step. `long`: the same as `drafted`, for 4,000
tokens. Cases run in turn (A B A B).

Reading it: `frames/s` is the median of the rounds. A frame is late where it came more than one and
a half of a sixtieth of a second after the one before. `work` is the page's main thread in a second,
in milliseconds: script, style and layout, by Chromium's own counters; a frame has 16.7 ms.

    python -m benchmarks.gateway.bench_page
"""

import argparse
import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Final

import uvicorn
from playwright.sync_api import Page, ViewportSize, sync_playwright

from benchmarks.shared.harness import (
    DEMO_PAIR,
    Summary,
    argument_parser,
    console,
    measure_in_turn,
    percentile,
    quiet_transformers,
    show_table,
    start,
    verdict,
    write_results,
)
from benchmarks.shared.paced_engine import PacedEngine
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.http.server.pages import load_page
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.router.policy import FixedPolicy

GOAL_FRAMES_PER_S: Final = 60.0
# A display's frames do not begin with our window: one of a second's may fall outside of it.
_TOLERANCE: Final = 1.0
GOAL_BYTES: Final = 150_000
_LATE_MS: Final = 1.5 * 1000 / 60
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
_PAGES: Final = {"playground": "index.html", "dashboard": "dashboard.html"}
_COUNTERS: Final = ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration", "TaskDuration")
_WIDE: Final = ViewportSize(width=1180, height=820)
_TEXT: Final = (
    "The small model rides ahead and the large one follows, so that most of what is written has "
    "been guessed before it is said. Where a guess is wrong, the large model says its own word, "
    "and the next step goes on from there: no text is ever other than the large model's.\n"
)
# Hears frames from now on.
_HEAR: Final = """() => {
  window.heard = [];
  const hear = (ms) => { window.heard.push(ms); window.hearing = requestAnimationFrame(hear); };
  cancelAnimationFrame(window.hearing);
  window.hearing = requestAnimationFrame(hear);
}"""
# The times of frames while the last answer was written.
_HEARD: Final = """() => {
  const { firstMs, lastMs } = [...document.querySelectorAll('.text')].at(-1).view.seen;
  return [firstMs, lastMs, window.heard];
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An answer that is streamed. `num_nodes`: guesses in a step's tree."""

    num_tokens: int
    tokens_per_step: int = 1
    num_nodes: int = 0
    shows_tree: bool = False


def find_browser() -> str | None:
    """Chromium's path; OUTRIDER_CHROMIUM names another."""
    named = os.environ.get("OUTRIDER_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _BROWSERS)), None)


def main() -> None:
    """Run it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="tokens per second")
    parser.add_argument("--tokens", type=int, default=1200, help="of an answer")
    parser.add_argument("--long", type=int, default=4000, help="tokens of a long answer")
    arguments = parser.parse_args()
    browser = find_browser()
    if browser is None:
        console.print("Skipped: there is no Chromium (Debian: apt-get install chromium).")
        return
    quiet_transformers()
    results = _measure(arguments, browser)
    results["page_bytes"] = {name: len(load_page(file).body) for name, file in _PAGES.items()}
    _show(results)
    write_results("bench_page", arguments.variant or "playground", results, arguments)


def _measure(arguments: argparse.Namespace, browser: str) -> dict[str, Any]:
    """Every case's figures, and the browser's version."""
    tokenizer = ChatTokenizer.load(DEMO_PAIR / "large")
    token_ids = asyncio.run(tokenizer.encode_answer(_TEXT, len(_TEXT)))
    engine = PacedEngine(token_ids, vocab_size=max(token_ids) + 1, tokens_per_s=arguments.rate)
    drafted = Case(num_tokens=arguments.tokens, tokens_per_step=4, num_nodes=24)
    cases: dict[str, Case | None] = {
        "idle": None,
        "plain": Case(num_tokens=arguments.tokens),
        "drafted": drafted,
        "tree shown": replace(drafted, shows_tree=True),
        "long": replace(drafted, num_tokens=arguments.long),
    }
    with _gateway(engine, tokenizer) as url, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        page = chromium.new_page(viewport=_WIDE)
        page.set_default_timeout(1e3 * (30 + 2 * arguments.long / arguments.rate))
        page.goto(f"{url}/playground")
        page.locator("#state.ready").wait_for()
        rounds = measure_in_turn(
            {name: partial(_run, page, engine, case) for name, case in cases.items()},
            repeats=arguments.repeats,
            warm_up={
                name: partial(_run, page, engine, case and _brief(case))
                for name, case in cases.items()
            },
        )
        version = chromium.version
        chromium.close()
    return {"browser": version, "cases": {name: _figures(done) for name, done in rounds.items()}}


def _brief(case: Case) -> Case:
    """A short one of its kind."""
    return Case(num_tokens=100, tokens_per_step=case.tokens_per_step, num_nodes=case.num_nodes)


def _run(page: Page, engine: PacedEngine, case: Case | None) -> dict[str, Any]:
    """One answer, or two seconds of none: the gaps between frames, and the page's work."""
    page.evaluate("document.getElementById('new').click()")  # hidden before the first message
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    if case is None:
        page.evaluate(_HEAR)
        before = _counters(devtools)
        page.wait_for_timeout(2000)
        heard = page.evaluate("window.heard")
        first_ms, last_ms, num_tokens = heard[0], heard[-1], 0
    else:
        engine.tokens_per_step, engine.num_nodes = case.tokens_per_step, case.num_nodes
        page.evaluate("document.getElementById('options').open = true")
        page.fill("#max-tokens", str(case.num_tokens))
        page.fill("#prompt", "Go on.")
        page.evaluate(_HEAR)
        before = _counters(devtools)
        page.press("#prompt", "Enter")
        if case.shows_tree:
            page.click(".live button")
        page.locator("article:not(.running)").wait_for()
        first_ms, last_ms, heard = page.evaluate(_HEARD)
        num_tokens = page.locator(".text .t").count()
    work = _counters(devtools)
    devtools.detach()
    frames = [ms for ms in heard if first_ms <= ms <= last_ms]
    span_s = (last_ms - first_ms) / 1e3
    return {
        "gaps_ms": [b - a for a, b in pairwise(frames)],
        "num_elements": num_tokens,
        "span_s": span_s,
        "work_ms_per_s": {
            name: 1e3 * (work[name] - before[name]) / max(span_s, 1e-3) for name in _COUNTERS
        },
    }


def _counters(devtools: Any) -> dict[str, float]:
    """Chromium's counters of the page so far, seconds."""
    told = devtools.send("Performance.getMetrics")["metrics"]
    return {one["name"]: one["value"] for one in told if one["name"] in _COUNTERS}


def _figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    gaps_ms = [gap for done in rounds for gap in done["gaps_ms"]]
    rates = [len(done["gaps_ms"]) / (sum(done["gaps_ms"]) / 1e3) for done in rounds]
    return {
        "frames_per_s": Summary.of(rates),
        "gap_ms": {
            "p50": percentile(gaps_ms, 50.0),
            "p95": percentile(gaps_ms, 95.0),
            "p99": percentile(gaps_ms, 99.0),
            "maximum": max(gaps_ms),
        },
        "late_share": sum(gap > _LATE_MS for gap in gaps_ms) / len(gaps_ms),
        "num_frames": len(gaps_ms),
        "num_elements": rounds[-1]["num_elements"],
        "span_s": median(done["span_s"] for done in rounds),
        "work_ms_per_s": {
            name: median(done["work_ms_per_s"][name] for done in rounds) for name in _COUNTERS
        },
    }


def _show(results: dict[str, Any]) -> None:
    rows = []
    for name, figures in results["cases"].items():
        rate, gap, work = figures["frames_per_s"], figures["gap_ms"], figures["work_ms_per_s"]
        met = rate.median >= GOAL_FRAMES_PER_S - _TOLERANCE
        rows.append(
            [
                *(name, f"{rate.median:.1f}", f"{rate.minimum:.1f}", f"{gap['p99']:.1f}"),
                *(f"{gap['maximum']:.0f}", f"{100 * figures['late_share']:.2f} %"),
                *(f"{work['TaskDuration']:.0f}", verdict(met)),
            ]
        )
    show_table(
        f"the playground in Chromium {results['browser']}",
        ["case", "frames/s", "least", "gap p99 ms", "max ms", "late", "work ms/s", "60?"],
        rows,
    )
    for name, size in results["page_bytes"].items():
        console.print(f"{name}: {size:,} bytes, below 150 kB: {verdict(size < GOAL_BYTES)}")


@contextmanager
def _gateway(engine: PacedEngine, tokenizer: ChatTokenizer) -> Iterator[str]:
    """The gateway's URL; it ends with the block."""
    parts = GatewayParts(
        engine=engine,
        tokenizers={"small": tokenizer, "large": tokenizer},
        router=FixedPolicy("large"),
        limits=GatewayLimits(),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(build_app(parts), loop="uvloop", http="httptools", log_level="error")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    start(main)
