"""How much faster are answers that repeat text, and which source of guesses makes them so?

Method: batch 1, greedy, prompt by prompt: each is answered plainly and with each choice of sources
before the next one is asked (benchmarks/shared/turns.py). Four kinds of questions, in the format of
the shipped pair's tasks, with its large model's own answers (benchmarks/speculation/repeats.py):

- edit: a task that stands in the conversation with its answer is asked again, one item changed;
- quote: four passages stand in the conversation, and one of them answers the question;
- rewrite: a task of which the client predicts the answer as it was before one item was changed;
- known answer: the client predicts the answer itself, but for one edit in every 16 tokens.

No request is told anything of an earlier one: prefix cache and remembered answers are kept apart by
a salt, so what an answer repeats stands in its own prompt or prediction.

Reading it: `tok/s` and `x plain` have the prompts' time in them (prompts of `edit` and `quote` are
longer than the answers), `x decode` only the time after the first token. Ratios are of total rates,
with a 95 % interval (bootstrap over prompts). `tok/pass`: tokens that a pass of the large model
emits. `wasted`: verified nodes that were not accepted, per emitted token.

    python -m benchmarks.speculation.bench_repeats --dtype bfloat16 --expand-target 400M
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.shared.compare import Comparison
from benchmarks.shared.driving import Bench, add_draft_options, make_requests
from benchmarks.shared.harness import (
    argument_parser,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.pair import Folders, Pair
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.turns import Case, Turns, engine_case
from benchmarks.speculation import repeats as repeating
from benchmarks.speculation.repeats import Repeat
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Source

PLAIN = "plain"
_ALL = "all sources"
_GOAL_OVER_PLAIN = 5.0

_Sources = tuple[Source, ...] | None


def source_choices(*, has_predictions: bool) -> dict[str, _Sources]:
    """Name -> the sources of a case; None for all of them."""
    choices: dict[str, _Sources] = {"model": ("model",), "suffix": ("suffix",)}
    if has_predictions:
        choices["prediction"] = ("prediction",)
    return {**choices, _ALL: None}


def request_for(
    question: int,
    *,
    pair: Pair,
    repeats: Sequence[Repeat],
    max_tokens: int,
    speculate: bool = True,
    sources: _Sources = None,
) -> EngineRequest:
    """One request; the prediction goes with it whether its source is allowed or not."""
    (request,) = make_requests(
        [repeats[question].prompt],
        tier="large",
        max_tokens=max_tokens,
        stop=pair.stop,
        speculate=speculate,
        sources=sources,
        predictions=[repeats[question].prediction_token_ids],
    )
    return request


def measure(
    pair: Pair, bench: Bench, kind: str, repeats: Sequence[Repeat], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run and report all choices of sources on one kind of questions."""
    request = partial(request_for, pair=pair, repeats=repeats, max_tokens=arguments.max_new)
    cases: dict[str, Case] = {PLAIN: engine_case(bench, partial(request, speculate=False))}
    has_predictions = any(repeat.prediction_token_ids for repeat in repeats)
    for name, sources in source_choices(has_predictions=has_predictions).items():
        cases[name] = engine_case(bench, partial(request, sources=sources))
    turns = Turns.take(
        cases,
        num_questions=len(repeats),
        num_rounds=arguments.repeats,
        description=kind,
    )
    prompts = [repeat.prompt for repeat in repeats]
    reports = {name: turns.report(name) for name in cases}
    comparisons = {
        name: turns.compare(name, PLAIN, prompts, scores_of=lambda _: pair.next_logits)
        for name in cases
        if name != PLAIN
    }
    for name, report in reports.items():
        report["over_plain"] = turns.ratio(name, PLAIN)
        report["over_plain_decode"] = turns.ratio(name, PLAIN, decode=True)
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    _show(f"{kind} ({num_prompt_tokens // len(prompts)} tokens a prompt)", reports, comparisons)
    return {
        "num_prompts": len(prompts),
        "num_prompt_tokens": num_prompt_tokens,
        "num_predicted_tokens": sum(len(repeat.prediction_token_ids) for repeat in repeats),
        "cases": reports,
        "equality": {name: comparison.record() for name, comparison in comparisons.items()},
    }


def _show(
    title: str, reports: Mapping[str, Mapping[str, Any]], comparisons: Mapping[str, Comparison]
) -> None:
    rows = []
    for name, report in reports.items():
        drafted = "wasted_nodes_per_token" in report
        rows.append(
            [
                name,
                f"{report['tokens_per_s']:.1f}",
                str(report["over_plain"]),
                f"{report['decode_tokens_per_s']:.1f}",
                str(report["over_plain_decode"]),
                f"{report['tokens_per_pass']:.2f}",
                f"{report['wasted_nodes_per_token']:.2f}" if drafted else "",
                str(comparisons.get(name, "")),
            ]
        )
    columns = ["", "tok/s", "x plain", "decode", "x decode", "tok/pass", "wasted", "equal"]
    show_table(title, columns, rows)
    overall, decoding = (
        reports[_ALL][ratio].estimate for ratio in ("over_plain", "over_plain_decode")
    )
    console.print(
        f"at least {_GOAL_OVER_PLAIN} x plain: {verdict(decoding >= _GOAL_OVER_PLAIN)} decoding, "
        f"{verdict(overall >= _GOAL_OVER_PLAIN)} with the prompts' time"
    )


def questions(folders: Folders, arguments: argparse.Namespace) -> dict[str, list[Repeat]]:
    """The kinds that can be made without a model."""
    makers = {
        "edit": repeating.edits,
        "quote": repeating.quotes,
        "rewrite": repeating.rewrites,
    }
    return {
        kind: make(folders.tokenizer, number=arguments.num_prompts, seed=arguments.seed)
        for kind, make in makers.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run all kinds and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--max-new", type=int, default=160, help="longest answer, in tokens")
    parser.add_argument("--edit-every", type=int, default=16, help="tokens between two edits")
    add_draft_options(parser)
    parser.set_defaults(repeats=2)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folders = Folders.of(arguments)
    kinds = questions(folders, arguments)
    pair = folders.load(arguments, [r.prompt for repeats in kinds.values() for r in repeats])
    bench = pair.bench()

    def plain_answer(prompt: Prompt) -> list[int]:
        request = partial(
            request_for, pair=pair, repeats=[Repeat(prompt=prompt)], max_tokens=arguments.max_new
        )
        return engine_case(bench, partial(request, speculate=False))(0).token_ids

    with console.status("answering what is to be predicted"):
        kinds["known answer"] = repeating.known_answers(
            folders.tokenizer,
            plain_answer,
            number=arguments.num_prompts,
            seed=arguments.seed,
            every=arguments.edit_every,
        )
    results = {
        **pair.describe(),
        "kinds": {
            kind: measure(pair, bench, kind, repeats, arguments) for kind, repeats in kinds.items()
        },
    }
    write_results("bench_repeats", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
