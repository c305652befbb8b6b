"""Do guesses from several sources together bring at least what the best one brings, in each domain?

Question: which source of guesses is best depends on the text. Does a tree that all of them share,
and a choice that learns what pays, cost anything beside the best source alone?

Method: each domain of a file of prompts (Spec-Bench's categories) is answered by an engine that
has learnt nothing, one answer after the other, once with guesses of the small model alone, once of
repeated text alone, once of both. Passes and the host's work take what they took on a recorded
processor, as in simulate_load. With `--public` the target is a public model, which writes real
text, and the drafter is the same model with noise on its weights (`--noise`).

Reading it: tokens per second over plain decoding's, in virtual time, and that of both sources over
the better single one's. Above 1 the tree that they share is worth more than either.

    python -m benchmarks.simulate.simulate_sources --public smollm2-135m --dtype bfloat16 \\
        --prompts prompts/spec_bench_half.jsonl
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks.shared.disagreeing import add_pair_option
from benchmarks.shared.driving import make_requests
from benchmarks.shared.harness import (
    argument_parser,
    console,
    prepare,
    progress_bar,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt
from benchmarks.simulate.processors import PROCESSORS, Processor
from benchmarks.simulate.simulate_load import Machine
from benchmarks.speculation.bench_load import ON
from benchmarks.speculation.noisy_drafter import noisy_pair
from outrider.engine.events import TokensEmitted
from outrider.verifier.params import Source

SOURCES: Final[dict[str, tuple[Source, ...]]] = {
    "model": ("model",),
    "text": ("suffix",),
    "both": ("model", "suffix"),
}
PLAIN: Final = "plain"
_LEAST: Final = 0.98
# Prompts of a file that are looked through for those of each domain.
_MOST_PROMPTS: Final = 600


def by_domain(prompts: Sequence[Prompt], number: int) -> dict[str, list[Prompt]]:
    """Return the first prompts of each domain."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        of_kind = found.setdefault(prompt.kind, [])
        if len(of_kind) < number and prompt not in of_kind:
            of_kind.append(prompt)
    return found


def rate(
    pair: Pair, processor: Processor, prompts: Sequence[Prompt], *, side: str, max_new: int
) -> float:
    """Return the tokens a second of answers one after the other, prompts' time left out."""
    machine = Machine(pair, processor, side=ON, seed=0)
    engine, seconds, num_tokens = machine.bench.engine, 0.0, 0
    requests = make_requests(
        prompts,
        tier="large",
        max_tokens=max_new,
        speculate=side != PLAIN,
        stop=pair.stop,
        sources=SOURCES.get(side),
    )
    with machine.running():
        for request in requests:
            # What was answered before may be said again, as to one who works on something.
            engine.submit(replace(request, cache_salt=side))
            first_s: float | None = None
            while engine.has_work:
                for event in engine.step():
                    if isinstance(event, TokensEmitted) and first_s is None:
                        first_s = machine.now_s
                    elif isinstance(event, TokensEmitted):
                        num_tokens += len(event.token_ids)
            assert first_s is not None, "an answer without a token"
            seconds += machine.now_s - first_s
    return num_tokens / seconds


def compare(rates: Mapping[str, float]) -> dict[str, float]:
    """Return each side over plain decoding, and both sources over the better one."""
    found = {side: rates[side] / rates[PLAIN] for side in SOURCES}
    return {**found, "both over the best": rates["both"] / max(rates["model"], rates["text"])}


def _show(domains: Mapping[str, Mapping[str, Any]]) -> None:
    columns = [*SOURCES, "both over the best"]
    show_table(
        "tokens per second over plain decoding's, virtual time",
        ["domain", *columns],
        [
            [name, *(f"{domain['ratio'][column]:.2f}" for column in columns)]
            for name, domain in domains.items()
        ],
    )
    worst = min(domains, key=lambda name: domains[name]["ratio"]["both over the best"])
    least = domains[worst]["ratio"]["both over the best"]
    console.print(
        f"both at least {_LEAST} of the best in each domain: {verdict(least >= _LEAST)} "
        f"({least:.3f}, {worst})"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run all domains and write the results."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=4, max_new=96)
    parser.add_argument("--processor", choices=sorted(PROCESSORS), default="avx512")
    parser.add_argument("--public", help="a public model's name, in the pair's place")
    parser.add_argument("--noise", type=float, default=0.1, help="on the public model's drafter")
    add_pair_option(parser)
    arguments: argparse.Namespace = parser.parse_args(argv)
    if arguments.public:
        arguments.large, arguments.small = noisy_pair(
            arguments.public, arguments.noise, seed=arguments.seed
        )
    prepare(arguments)
    folders = Folders.of(arguments)
    found = by_domain(folders.task_prompts(arguments, _MOST_PROMPTS), arguments.num_prompts)
    everything = [prompt for prompts in found.values() for prompt in prompts]
    pair = folders.load(arguments, everything, num_sequences=2)
    domains: dict[str, dict[str, Any]] = {}
    sides = [PLAIN, *SOURCES]
    with progress_bar("domains", len(found) * len(sides)) as advance:
        for name, prompts in found.items():
            rates: dict[str, float] = {}
            for side in sides:
                rates[side] = rate(
                    pair,
                    PROCESSORS[arguments.processor],
                    prompts,
                    side=side,
                    max_new=arguments.max_new,
                )
                advance(f"{name}, {side}")
            domains[name] = {"tokens_per_s": rates, "ratio": compare(rates)}
    _show(domains)
    results = {**pair.describe(), "processor": arguments.processor, "domains": domains}
    variant = arguments.public or variant_name(arguments)
    write_results("simulate_sources", f"{variant}-{arguments.processor}", results, arguments)


if __name__ == "__main__":
    start(main)
