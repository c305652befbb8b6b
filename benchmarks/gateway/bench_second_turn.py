"""How much sooner does an agent's second turn begin than its first?

Method: the bundled pair, the large model grown to --large parameters, answers /v1/messages as
Claude Code asks: a billing line that differs in each request, then instructions of some 2,000
tokens, streamed. Each round is a new conversation with instructions of its own, of two turns, one
after the other. The figures are the seconds from sending a turn to its first text, and the share of
the first turn's prompt that the second found in the prefix cache.

Reading it: the second turn is to begin within 0.15 of the first one's time, with 95 % cached.

    python -m benchmarks.gateway.bench_second_turn
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, figure, option
from benchmarks.shared.grown import grown
from benchmarks.shared.record import Summary
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import bundled_pair, load_settings
from outrider.gateway.wiring.serving import background_gateway

_SHARE_OF_FIRST: Final = 0.15
_CACHED: Final = 0.95
_BILLING: Final = "x-anthropic-billing-header: cc_version=2.1.{0}; cch={0:05x};"


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(9, "conversations that are measured")
    large: str = option("150M", "parameters that the large model is grown to")
    rules: int = option(200, "sentences of the instructions, of 10 tokens each")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One turn. `message`: the answer, as the next request holds it."""

    ttft_s: float
    num_prompt: int
    num_cached: int
    message: dict[str, Any]


def measure(options: Options) -> Results:
    """Return both turns' times to the first text, their ratio and what was cached."""
    large = grown(bundled_pair() / "large", options.large)
    flags = {"models.large": str(large), "models.small": "none", "log_level": "WARNING"}
    first, second, ratios, cached = [], [], [], []
    with (
        background_gateway(load_settings(flags=flags, environ={}), no_progress) as url,
        httpx.Client(base_url=url, timeout=300) as http,
    ):
        for number in range(options.repeats + 1):  # the first conversation warms up
            begun, continued = _conversation(http, number, options.rules)
            if number:
                first.append(begun.ttft_s)
                second.append(continued.ttft_s)
                ratios.append(continued.ttft_s / begun.ttft_s)
                cached.append(continued.num_cached / begun.num_prompt)
    return {
        "prompt_tokens": begun.num_prompt,
        "first_s": Summary.of(first),
        "second_s": Summary.of(second),
        "ratio": Summary.of(ratios),
        "cached": Summary.of(cached),
    }


def _conversation(http: httpx.Client, number: int, num_rules: int) -> tuple[_Turn, _Turn]:
    rules = " ".join(f"Rule {number}.{rule}: answer with the sum." for rule in range(num_rules))
    asked = {"role": "user", "content": f"What is {number + 11} + 25?"}
    begun = _ask(http, 2 * number, rules, [asked])
    more = {"role": "user", "content": "And 3 + 4?"}
    return begun, _ask(http, 2 * number + 1, rules, [asked, begun.message, more])


def _ask(http: httpx.Client, number: int, rules: str, messages: list[dict[str, Any]]) -> _Turn:
    body = {
        "model": "large",
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "system": [
            {"type": "text", "text": _BILLING.format(number)},
            {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
    }
    sent_s = time.perf_counter()
    ttft_s, text, usage = 0.0, "", {}
    with http.stream("POST", "/v1/messages", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_delta":
                ttft_s = ttft_s or time.perf_counter() - sent_s
                text += event["delta"]["text"]
            elif event.get("type") == "message_delta":
                usage = event["usage"]
    num_cached = usage["cache_read_input_tokens"]
    return _Turn(
        ttft_s=ttft_s,
        num_prompt=usage["input_tokens"] + num_cached,
        num_cached=num_cached,
        message={"role": "assistant", "content": text},
    )


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row of the medians."""
    yield Table(
        title=f"two turns of an agent, large model of {options.large}",
        columns=(
            ("prompt tokens", figure("prompt_tokens", ".0f")),
            ("first turn, s", figure("first_s", ".3f")),
            ("second turn, s", figure("second_s", ".3f")),
            ("second / first", figure("ratio", ".3f")),
            ("cached", figure("cached", ".3f")),
        ),
        entries={"median": results},
    )


def goals(results: Results) -> list[Goal]:
    """Return what the second turn is to keep."""
    return [
        Goal(
            words="second turn / first turn",
            measured=results["ratio"].median,
            bound=_SHARE_OF_FIRST,
        ),
        Goal(
            words="share of the first prompt that is cached",
            measured=results["cached"].median,
            bound=_CACHED,
            at_least=True,
        ),
    ]


BENCHMARK: Final = Benchmark(
    options=Options,
    measure=measure,
    tables=tables,
    goals=goals,
    variant=lambda options: options.large.lower(),
)

if __name__ == "__main__":
    BENCHMARK.start()
