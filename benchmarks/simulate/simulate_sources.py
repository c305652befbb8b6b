"""Do guesses from several sources together bring at least what the best one brings, in each domain?

Question: which source of guesses is best depends on the text. Does a tree that all of them share,
and a choice that learns what pays, cost anything beside the best source alone?

Method: each domain of a file of prompts (Spec-Bench's categories) is answered by an engine that
has learnt nothing, one answer after the other, once with guesses of the small model alone, once of
repeated text alone, once of both. Passes and the host's work take what they took on a recorded
processor, as in simulate_load. With `--public` the target is a public model, which writes real
text, and the drafter is the same model with noise on its weights (`--noise`).

Reading it: tokens per second over plain decoding's, in virtual time, and that of both sources over
the better single one's, with a 95 % interval (bootstrap over answers). Above 1 the tree that they
share is worth more than either.

    python -m benchmarks.simulate.simulate_sources --public smollm2-135m --dtype bfloat16 \\
        --prompts prompts/spec_bench_half.jsonl
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from benchmarks.shared.intervals import Interval, ratio_of_rates
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
BOTH: Final = "both over the best"
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


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer's tokens behind its first one, and the seconds that these took."""

    num_tokens: int
    seconds: float


def answer_all(
    pair: Pair, processor: Processor, prompts: Sequence[Prompt], *, side: str, max_new: int
) -> list[Answer]:
    """Answer one prompt after the other; the prompts' own time is left out."""
    machine = Machine(pair, processor, side=ON, seed=0)
    engine, answers = machine.bench.engine, list[Answer]()
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
            num_tokens = 0
            while engine.has_work:
                for event in engine.step():
                    if isinstance(event, TokensEmitted) and first_s is None:
                        first_s = machine.now_s
                    elif isinstance(event, TokensEmitted):
                        num_tokens += len(event.token_ids)
            assert first_s is not None, "an answer without a token"
            answers.append(Answer(num_tokens, machine.now_s - first_s))
    return answers


def compare(sides: Mapping[str, Sequence[Answer]]) -> dict[str, Interval]:
    """Return each side over plain decoding, and both sources over the better one."""

    tokens = {side: [each.num_tokens for each in answers] for side, answers in sides.items()}
    seconds = {side: [each.seconds for each in answers] for side, answers in sides.items()}

    def over(one: str, other: str) -> Interval:
        return ratio_of_rates((tokens[one], tokens[other]), (seconds[one], seconds[other]))

    found = {side: over(side, PLAIN) for side in SOURCES}
    best = max(("model", "text"), key=lambda side: found[side].estimate)
    return {**found, BOTH: over("both", best)}


def _show(domains: Mapping[str, Mapping[str, Any]]) -> None:
    columns = [*SOURCES, BOTH]
    show_table(
        "tokens per second over plain decoding's, virtual time",
        ["domain", *columns],
        [
            [name, *(str(domain["ratio"][column]) for column in columns)]
            for name, domain in domains.items()
        ],
    )
    ratios = {name: domain["ratio"][BOTH] for name, domain in domains.items()}
    worst = min(ratios, key=lambda name: ratios[name].estimate)
    is_met = ratios[worst].estimate >= _LEAST
    console.print(
        f"both at least {_LEAST} of the best in each domain: {verdict(is_met)} "
        f"(least: {ratios[worst]}, {worst})"
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
            answers: dict[str, list[Answer]] = {}
            for side in sides:
                answers[side] = answer_all(
                    pair,
                    PROCESSORS[arguments.processor],
                    prompts,
                    side=side,
                    max_new=arguments.max_new,
                )
                advance(f"{name}, {side}")
            domains[name] = {"answers": answers, "ratio": compare(answers)}
    _show(domains)
    results = {**pair.describe(), "processor": arguments.processor, "domains": domains}
    variant = arguments.public or variant_name(arguments)
    write_results("simulate_sources", f"{variant}-{arguments.processor}", results, arguments)


if __name__ == "__main__":
    start(main)
