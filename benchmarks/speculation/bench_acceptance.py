"""How often are drafts accepted: shared noise, greedy drafts with sample-and-match, or ratio test?

Method: the large model samples answers to held-out tasks, by temperature and top-p. Each text is
then read by both models, and benchmarks/speculation/acceptance_rules.py says of every token at
which rank each rule would have accepted a candidate. All rules are exact, so one text serves all.
Only the first is in the product, with the candidates of its second row.

Trees are chains with siblings: each depth has so many candidates, and the best one goes on. Depths
are 1 to 8. Rates are computed, not measured: tokens of a pass over the time of its passes, which
`--pass-times` takes from an earlier record of this pair (bench_speculation, quiet machine). So a
busy machine does not disturb this benchmark.

Reading it: `accepted` is the share of places at which a candidate was accepted; `tokens` those of a
pass with eight depths; `tok/s` those at the best of all depths.

    python -m benchmarks.speculation.bench_acceptance --pair disagreeing
    python -m benchmarks.speculation.bench_acceptance --public smollm2-135m \\
        --prompts prompts/mt_bench_question.jsonl --num-prompts 12 --max-prompt 160 --max-new 64

With `--public` the target is a public model, which writes real text, and the drafter is the same
model with noise on its weights (`--noise`). Its rates are those of such acceptance with the
recorded pair's pass times.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.shared.disagreeing import add_pair_option
from benchmarks.shared.driving import drive, make_requests
from benchmarks.shared.harness import (
    argument_parser,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    write_results,
)
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.record import RESULTS
from benchmarks.speculation.acceptance_rules import (
    SampledText,
    cut_behind_first,
    greedy_drafts,
    independent_draws,
    ratio_test,
    shared_noise,
    tokens_per_pass,
)
from benchmarks.speculation.noisy_drafter import noisy_pair
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.passes.step_times import StepTimeCurve
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import SamplingParams, Tier

TEMPERATURES: Final = (0.3, 0.7, 1.0)
TOP_PS: Final = (1.0, 0.95)
CANDIDATES: Final = (1, 2, 4, 8)
SHARPNESS: Final = 2.0
MAX_DEPTH: Final = 8
_READERS: Final[tuple[Tier, ...]] = ("large", "small")
_CONCURRENCY: Final = 16
_PASS_TIMES: Final = RESULTS / "bench_speculation-demo-400M-bfloat16.json"


def sampled_texts(
    pair: Pair, prompts: Sequence[Prompt], arguments: argparse.Namespace, sampling: SamplingParams
) -> list[SampledText]:
    """Have the large model answer, and both models read the answers."""
    requests = [
        replace(
            request,
            sampling=replace(
                request.sampling, temperature=sampling.temperature, top_p=sampling.top_p
            ),
        )
        for request in make_requests(
            prompts,
            tier="large",
            max_tokens=arguments.max_new,
            stop=pair.stop,
            seed=arguments.seed,
        )
    ]
    answers = drive(pair.bench(), requests, concurrency=_CONCURRENCY).streams
    return [
        read_text(pair, request.prompt_token_ids, answer.token_ids, request.sampling)
        for request, answer in zip(requests, answers, strict=True)
    ]


def read_text(
    pair: Pair, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams
) -> SampledText:
    """Return what both models and the noise say at each token of an answer."""
    ids = [*prompt, *answer]
    target, draft = (answer_logits(pair.runners[tier], ids, len(answer)) for tier in _READERS)
    noise = SequenceNoise(sampling, "large", vocab_size=target.shape[1])
    return SampledText(
        token_ids=torch.tensor(answer),
        target=target,
        draft=draft[:, : target.shape[1]],
        noise=noise.rows(len(prompt), len(answer), target.device),
        sampling=sampling,
    )


@torch.inference_mode()
def answer_logits(runner: ModelRunner, token_ids: Sequence[int], num_tokens: int) -> Tensor:
    """Return the logits that chose the last tokens, float32 [num_tokens, vocab_size]."""
    view = runner.new_view("acceptance")
    try:
        view.reserve(len(token_ids) - 1)
        piece = ForwardSlice(
            view=view, token_ids=list(token_ids[:-1]), start_slot=0, num_logit_rows=num_tokens
        )
        return runner.forward([piece]).logits.float().clone()
    finally:
        view.release()


def chances_by_rule(texts: Sequence[SampledText], seed: int) -> dict[str, list[Tensor]]:
    """Return what each rule says of each text."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "shared noise": [shared_noise(text) for text in texts],
        "the same, cut tokens behind": [cut_behind_first(text) for text in texts],
        "shared noise, drafts sharper": [shared_noise(text, sharpness=SHARPNESS) for text in texts],
        "greedy drafts": [greedy_drafts(text) for text in texts],
        "ratio test": [ratio_test(text, generator) for text in texts],
        "independent draws": [independent_draws(text, generator) for text in texts],
    }


def figures(
    chances: Sequence[Tensor], num_candidates: int, pass_s: Mapping[str, Callable[[int], float]]
) -> dict[str, Any]:
    """Return acceptance, tokens of a pass, and the rate at the best depth."""
    accepted = torch.cat(list(chances))[:, :num_candidates].sum(-1).mean()
    by_depth = [
        tokens_per_pass(chances, num_candidates=num_candidates, max_depth=depth)
        for depth in range(1, MAX_DEPTH + 1)
    ]
    rates = [
        tokens / (pass_s["target"](1 + depth * num_candidates) + depth * pass_s["draft"](1))
        for depth, tokens in enumerate(by_depth, start=1)
    ]
    best = max(range(MAX_DEPTH), key=rates.__getitem__)
    return {
        "accepted": float(accepted),
        "tokens_per_pass": by_depth[-1],
        "tokens_per_s": rates[best],
        "best_depth": best + 1,
    }


def pass_curves(path: Path) -> dict[str, StepTimeCurve]:
    """Return seconds by rows of `target` and `draft`, as bench_speculation has recorded them."""
    record = json.loads(path.read_text(encoding="utf-8"))
    recorded = record["results"]["drafters"]["small drafts"]["pass_s_by_rows"]
    return {
        name: StepTimeCurve.from_points([int(rows) for rows in times], list(times.values()))
        for name, times in recorded.items()
    }


def main() -> None:
    """Parse, measure, report."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=60)
    add_pair_option(parser)
    parser.add_argument("--pass-times", type=Path, default=_PASS_TIMES, help="an earlier record")
    parser.add_argument("--public", help="a public model's name, in the pair's place")
    parser.add_argument("--noise", type=float, default=0.1, help="on the public model's drafter")
    arguments = parser.parse_args()
    if arguments.public:
        arguments.large, arguments.small = noisy_pair(
            arguments.public, arguments.noise, seed=arguments.seed
        )
    prepare(arguments)
    folders = Folders.of(arguments)
    prompts = folders.task_prompts(arguments, arguments.num_prompts)
    pair = folders.load(arguments, prompts, num_sequences=_CONCURRENCY)
    pass_s = pass_curves(arguments.pass_times)
    settings = []
    for temperature, top_p in itertools.product(TEMPERATURES, TOP_PS):
        sampling = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p)
        texts = sampled_texts(pair, prompts, arguments, sampling)
        settings.append(measured(texts, pass_s, arguments.seed))
        report(settings[-1])
    results = {
        "pair": pair.describe(),
        "pass_times": arguments.pass_times,
        "plain_tokens_per_s": 1.0 / pass_s["target"](1),
        "settings": settings,
    }
    write_results("bench_acceptance", variant_name(arguments), results, arguments)


def measured(
    texts: Sequence[SampledText], pass_s: Mapping[str, Callable[[int], float]], seed: int
) -> dict[str, Any]:
    """Return all figures of one temperature and top-p."""
    chances = chances_by_rule(texts, seed)
    unlike = sum(int((text.chosen() != text.token_ids).sum()) for text in texts)
    return {
        "temperature": texts[0].sampling.temperature,
        "top_p": texts[0].sampling.top_p,
        "num_tokens": sum(len(text.token_ids) for text in texts),
        "num_tokens_unlike": unlike,
        "rules": {
            rule: {str(count): figures(of_texts, count, pass_s) for count in CANDIDATES}
            for rule, of_texts in chances.items()
        },
    }


def report(setting: Mapping[str, Any]) -> None:
    """Print one temperature's table."""
    rows = [
        [
            rule,
            *(
                f"{one['accepted']:.3f} {one['tokens_per_pass']:.2f} {one['tokens_per_s']:.0f}"
                for one in by_count.values()
            ),
        ]
        for rule, by_count in setting["rules"].items()
    ]
    show_table(
        f"temperature {setting['temperature']:g}, top-p {setting['top_p']:g}: "
        "accepted, tokens, tok/s",
        ["rule", *(f"{count} candidates" for count in CANDIDATES)],
        rows,
        caption=f"{setting['num_tokens']} tokens, {setting['num_tokens_unlike']} chosen otherwise",
    )
    console.print()


if __name__ == "__main__":
    start(main)
