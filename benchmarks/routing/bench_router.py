"""What does a routing decision cost, alone and inside a gateway under load, and what the probe?

Method: prompts of 100 to 100,000 characters, made of held-out task prompts, twenty different ones a
length. `alone`: the shipped router's policy decides in this process, the lengths in turn. `in
gateway`: a whole gateway runs in a thread of this process, its engine in another one; a second
process chats with it over several connections and asks for the same prompts meanwhile. A wrapper
around the policy measures each decision where the gateway makes it. Time is processor time of the
deciding thread: what other programs take from the machine is not in it. `judging`: what a watch of
the cascade adds when it is told of the prompt and of 16 tokens, where the router has these stages.
`passes`: forward passes of the small model over the same requests with and without the hidden
state that the probe wants, the second time with the prompt in the prefix cache.

Reading it: p50 at most 1 ms and p99 at most 3 ms for up to 2,000 characters, and no more for
100,000; no extra pass.

    python -m benchmarks.routing.bench_router
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.shared.driving import blocks_for, build_bench, drive, load_runner, make_requests
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    console,
    percentile,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.prompts import load_prompts, load_tokenizer
from benchmarks.shared.record import ROOT
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import bundled_pair, load_settings
from outrider.gateway.wiring.build import build_parts
from outrider.gateway.wiring.serving import background_gateway
from outrider.router.costs import TypicalRequest
from outrider.router.loading import RoutingOptions, load_router
from outrider.router.policy import (
    RoutePolicy,
    TrainedPolicy,
    WatchOptions,
    own_setting,
)
from outrider.router.scorer import RouterScorer
from outrider.verifier.params import TIERS

LENGTHS = (100, 500, 2_000, 10_000, 100_000)
_BOUND_LENGTH = 2_000
_GOAL_P50_S = 1e-3
_GOAL_P99_S = 3e-3
_TEXTS_PER_LENGTH = 20
_HELD_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Thread processor time of decisions, in seconds."""

    p50_s: float
    p99_s: float
    num_decisions: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Cost":
        """Raises ValueError for no samples."""
        return cls(
            p50_s=percentile(samples, 50.0),
            p99_s=percentile(samples, 99.0),
            num_decisions=len(samples),
        )

    def meets(self) -> bool:
        """Return whether it is within both goals."""
        return self.p50_s <= _GOAL_P50_S and self.p99_s <= _GOAL_P99_S


@dataclass(slots=True)
class TimedPolicy:
    """A policy, and what its decisions cost by the length of the prompt."""

    policy: RoutePolicy
    samples: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    threads: set[int] = field(default_factory=set)

    def route(self, text: str, *constraints: Any, **more: Any) -> Any:
        """As the policy does; may be called from any thread."""
        started_s = time.thread_time()
        try:
            return self.policy.route(text, *constraints, **more)
        finally:
            self.samples[len(text)].append(time.thread_time() - started_s)
            self.threads.add(threading.get_ident())

    def costs(self, lengths: Sequence[int]) -> dict[int, Cost]:
        """By length, for those lengths that were decided."""
        return {size: Cost.of(self.samples[size]) for size in lengths if self.samples.get(size)}


def make_texts(pieces: Sequence[str], lengths: Sequence[int], number: int) -> dict[int, list[str]]:
    """`number` different texts of each length exactly, of pieces in random order."""
    rng = random.Random(0)
    texts: dict[int, list[str]] = {}
    for length in lengths:
        texts[length] = []
        for _ in range(number):
            parts: list[str] = []
            while sum(map(len, parts)) + len(parts) < length:
                parts.append(rng.choice(pieces))
            texts[length].append(" ".join(parts)[:length].ljust(length, "."))
    return texts


def measure_alone(
    policy: RoutePolicy, texts: Mapping[int, Sequence[str]], rounds: int
) -> dict[int, Cost]:
    """Each text once a round, the lengths in turn, after a round unmeasured."""
    for of_length in texts.values():
        policy.route(of_length[0])
    timed = TimedPolicy(policy)
    for _ in range(rounds):
        for number in range(_TEXTS_PER_LENGTH):
            for of_length in texts.values():
                timed.route(of_length[number])
    return timed.costs(list(texts))


@contextmanager
def timed_gateway(arguments: argparse.Namespace) -> Iterator[tuple[TimedPolicy, int]]:
    """A gateway in this process whose policy is timed, and its port."""
    found: list[TimedPolicy] = []

    def timed_parts(*given: Any) -> Any:
        parts = build_parts(*given)
        found.append(TimedPolicy(parts.router))
        return replace(parts, router=found[0])

    flags: dict[str, Any] = {"engine.device": arguments.device, "engine.dtype": arguments.dtype}
    if not _is_demo(arguments):
        flags |= {"models.large": str(arguments.large), "models.small": str(arguments.small)}
        flags |= {"models.router": str(arguments.router), "routing.force_router": True}
    settings = load_settings(flags={**flags, "log_level": "WARNING"}, environ={})
    with (
        patch("outrider.gateway.wiring.serving.build_parts", timed_parts),
        background_gateway(settings, no_progress) as url,
    ):
        yield found[0], int(url.rpartition(":")[2])


def _is_demo(arguments: argparse.Namespace) -> bool:
    pair = bundled_pair().resolve()
    return all(
        Path(getattr(arguments, name)).resolve() == pair / name
        for name in ("large", "small", "router")
    )


def measure_in_gateway(
    arguments: argparse.Namespace, texts: Mapping[int, Sequence[str]], chats: Sequence[str]
) -> tuple[dict[int, Cost], dict[str, Any]]:
    """Costs by length under load, and what the load was."""
    asked = [
        of_length[number] for number in range(_TEXTS_PER_LENGTH) for of_length in texts.values()
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        (Path(folder) / "chats.json").write_text(json.dumps(list(chats)), encoding="utf-8")
        with console.status("starting a gateway"), timed_gateway(arguments) as (timed, port):
            command = [sys.executable, "-m", "benchmarks.routing.route_load", "--port", str(port)]
            command += ["--seconds", f"{arguments.seconds:g}", "--texts", folder]
            command += ["--clients", str(arguments.clients)]
            load = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if load.returncode:
                raise SystemExit(f"the load process failed:\n{load.stderr[-2000:]}")
            costs = timed.costs(list(texts))
            num_threads = len(timed.threads)
    if costs.keys() != texts.keys():
        missing = sorted(texts.keys() - costs.keys())
        raise SystemExit(f"no decision was seen for prompts of {missing}; raise --seconds")
    return costs, {
        **json.loads(load.stdout),
        "clients": arguments.clients,
        "seconds": arguments.seconds,
        "deciding_threads": num_threads,
    }


def measure_judging(
    scorer: RouterScorer, texts: Sequence[str], rounds: int
) -> dict[str, Cost] | None:
    """Return what a watch costs; None for a router without a probe and an answer stage."""
    if scorer.hidden_size is None or scorer.answer is None:
        return None
    setting = own_setting(scorer)
    policy = TrainedPolicy(
        scorer=scorer, current_setting=lambda: setting, watch=WatchOptions(mode="always")
    )
    rng = random.Random(0)
    on_prompt: list[float] = []
    on_tokens: list[float] = []
    for _ in range(rounds):
        for text in texts:
            plan = policy.route(text).watch
            assert plan is not None, "every prompt is watched"
            watch = plan.new_watch()
            hidden = tuple(rng.gauss(0.0, 1.0) for _ in range(scorer.hidden_size))
            logprobs = [-rng.expovariate(4.0) for _ in range(_HELD_TOKENS)]
            started_s = time.thread_time()
            watch.on_prompt(hidden)
            told_s = time.thread_time()
            for value in logprobs:
                watch.on_tokens([value])
            on_prompt.append(told_s - started_s)
            on_tokens.append(time.thread_time() - told_s)
    return {"prompt": Cost.of(on_prompt), "16 tokens": Cost.of(on_tokens)}


def count_passes(arguments: argparse.Namespace, num_prompts: int) -> dict[str, dict[str, int]]:
    """Passes of the small model by whether hidden states are returned, cold and cached."""
    tokenizer = load_tokenizer(arguments.small)
    prompts = load_prompts("tasks", tokenizer, num_prompts=num_prompts, seed=arguments.seed)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    runner = load_runner(
        arguments.small,
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=blocks_for(num_sequences=4 * num_prompts, num_tokens=longest + 16),
    )
    bench = build_bench({"small": runner})
    counts: dict[str, dict[str, int]] = {}
    for name, wanted in (("without", False), ("with", True)):
        requests = make_requests(prompts, tier="small", max_tokens=8)
        counts[name] = {}
        for state in ("cold", "cached"):
            before = runner.times.num_passes
            again = [
                replace(
                    request,
                    request_id=f"{request.request_id}-{state}",
                    return_hidden_state=wanted,
                )
                for request in requests
            ]
            drive(bench, again, concurrency=1)
            counts[name][state] = runner.times.num_passes - before
    return counts


def show(
    costs: Mapping[str, Mapping[int, Cost]],
    judging: Mapping[str, Cost] | None,
    passes: Mapping[str, Mapping[str, int]],
) -> None:
    """The tables."""
    rows = []
    for length in next(iter(costs.values())):
        row = [f"{length:,} characters"]
        for of_length in costs.values():
            cost = of_length[length]
            row += [f"{cost.p50_s * 1e6:.0f}", f"{cost.p99_s * 1e6:.0f}", str(cost.num_decisions)]
        rows.append([*row, verdict(all(entry[length].meets() for entry in costs.values()))])
    columns = [part for name in costs for part in (f"{name}, p50 us", "p99", "n")]
    caption = "passes of the small model, without and with hidden states: " + ", ".join(
        f"{state} {passes['without'][state]} and {passes['with'][state]}"
        for state in passes["without"]
    )
    if judging is not None:
        caption += "".join(
            f"\njudging, {name}: p50 {cost.p50_s * 1e6:.0f} us, p99 {cost.p99_s * 1e6:.0f} us"
            for name, cost in judging.items()
        )
    show_table("routing decisions", ["", *columns, "met"], rows, caption=caption)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all of it and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--router", type=Path, default=bundled_pair() / "router")
    parser.add_argument("--rounds", type=int, default=25, help="of twenty texts a length, alone")
    parser.add_argument("--seconds", type=float, default=45.0, help="of load")
    parser.add_argument("--clients", type=int, default=4, help="that chat, and as many that ask")
    parser.add_argument("--num-prompts", type=int, default=24, help="whose passes are counted")
    parser.add_argument("--quick", action="store_true", help="only to see that everything works")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.num_prompts = 2, 4.0, 4
    prepare(arguments)
    choose_threads(arguments, arguments.large)
    tokenizer = load_tokenizer(arguments.large)
    prompts = load_prompts("tasks", tokenizer, num_prompts=200, seed=arguments.seed)
    pieces = [prompt.messages[-1]["content"] for prompt in prompts]
    texts = make_texts(pieces, LENGTHS, _TEXTS_PER_LENGTH)
    loaded = load_router(arguments.router, TIERS, RoutingOptions(), TypicalRequest())
    alone = measure_alone(loaded.policy, texts, arguments.rounds)
    judging = measure_judging(RouterScorer.load(arguments.router), pieces[:20], arguments.rounds)
    passes = count_passes(arguments, arguments.num_prompts)
    in_gateway, load = measure_in_gateway(arguments, texts, pieces)
    show({"alone": alone, "in gateway": in_gateway}, judging, passes)
    bounded = [length for length in LENGTHS if length <= _BOUND_LENGTH or length == LENGTHS[-1]]
    results = {
        "alone": alone,
        "in_gateway": in_gateway,
        "load": load,
        "judging": judging,
        "small_passes": passes,
        "goals": {
            "p50_s": _GOAL_P50_S,
            "p99_s": _GOAL_P99_S,
            "met": all(entry[n].meets() for entry in (alone, in_gateway) for n in bounded),
            "no_extra_pass": passes["with"] == passes["without"],
        },
    }
    write_results("bench_router", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
