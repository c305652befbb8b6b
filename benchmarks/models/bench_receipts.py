"""What does verifying an answer cost, and what does it find?

Cost: a verification of an answer of `--answer` tokens behind a prompt of `--prompt`, over the
prefill of as many tokens (an ordinary request for one token), in turn, nothing cached. forged: of
the answer backwards, of which nearly every token differs, so that its gap is worked out. Judging
takes a vocabulary of noise a token, whatever the model; so the model has to be of a real one's size
(`--expand-target`).

Detection: `--answers` sampled answers of `--tokens` tokens, all judged by the same weights under
the claim of temperature 1. honest: it is true. fewer bits: the writer's weights have four bits.
cooler: the writer's temperature was 0.8. An answer's suspicion is its gap to the model's own
choices, summed over its first tokens; `AUC` is how often a false answer is more suspect than an
honest one, ties half. A GGUF file's plain weights are the judge's, its own bits the fewer ones.

False alarms: `--honest` answers of `--honest-tokens` tokens, half of them greedy. One token that
differs is an alarm: where sums have one order there is none. With none in N, fewer than 3 / N of
all honest answers raise one (at 95 %).

Reading it: `verification over prefill` at most 1.2; AUC at least 0.999; no false alarm.

    python -m benchmarks.models.bench_receipts --dtype bfloat16 --expand-target 400M
    python -m benchmarks.models.bench_receipts --large FOLDER --dtype bfloat16 --honest 10000
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.driving import BLOCK_SIZE, blocks_for
from benchmarks.shared.grown import grown_large
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    choose_threads,
    measure_in_turn,
    milliseconds,
    paired_ratio,
    prepare,
    show_table,
    start,
    timed,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.prompts import load_prompts, load_tokenizer
from outrider.engine.core import Engine
from outrider.engine.events import Failed, PrefillDone, TokensEmitted
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import DECODE, Rounding, StoredWay
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest, Verification
from outrider.gateway.wiring.checkpoints import checkpoint
from outrider.verifier.params import Hypothesis, SamplingParams
from outrider.verifier.token_logprobs import Judgement

_MOST_COST: Final = 1.2
_LEAST_AUC: Final = 0.999
_CLAIM: Final = 1.0
_COOLER: Final = 0.8
_FEWER_BITS: Final = "fewer bits"
_PREFIXES: Final = {_FEWER_BITS: 300, "cooler": 500}
"""Tokens within which each kind of false answer is to be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A request and its answer."""

    request: EngineRequest
    token_ids: tuple[int, ...]


def run(engine: Engine, requests: Sequence[EngineRequest], *, batch: int) -> list[Written]:
    """Answer all requests, a batch at a time."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for event in _events(engine, requests, batch=batch):
        if isinstance(event, TokensEmitted):
            answers[event.request_id] += event.token_ids
    return [
        Written(request=request, token_ids=tuple(answers[request.request_id]))
        for request in requests
    ]


def judge(engine: Engine, texts: Sequence[Written], *, most: int, batch: int) -> list[Judgement]:
    """Judge the first tokens of answers under the claim of their requests, at temperature 1."""
    asked = [verification_of(text, most) for text in texts if text.token_ids]
    found = {
        event.request_id: event.judgements[0]
        for event in _events(engine, asked, batch=batch)
        if isinstance(event, PrefillDone)
    }
    return [found[request.request_id] for request in asked]


def _events(engine: Engine, requests: Sequence[EngineRequest], *, batch: int) -> list[Any]:
    """Run requests to their ends. Raises SystemExit where one fails."""
    events: list[Any] = []
    for first in range(0, len(requests), batch):
        for request in requests[first : first + batch]:
            engine.submit(request)
        while engine.has_work:
            events += engine.step()
    failed = [event for event in events if isinstance(event, Failed)]
    if failed:
        raise SystemExit(f"A request failed: {failed[0].message}")
    return events


def verification_of(text: Written, most: int) -> EngineRequest:
    """Ask whether a text's first tokens are what its claim leads to."""
    token_ids = text.token_ids[:most]
    sampling = text.request.sampling
    claimed = sampling if sampling.is_greedy else replace(sampling, temperature=_CLAIM)
    return EngineRequest(
        request_id=f"{text.request.request_id}-judged-{most}",
        prompt_token_ids=(*text.request.prompt_token_ids, *token_ids),
        tier="large",
        sampling=SamplingParams(max_tokens=0),
        verification=Verification(
            num_tokens=len(token_ids),
            hypotheses=(Hypothesis(sampling=claimed, noise_tier="large"),),
        ),
    )


def auc(honest: Sequence[float], false: Sequence[float]) -> float:
    """Return how often a false answer is more suspect than an honest one, ties half."""
    wins = sum((one > other) + 0.5 * (one == other) for one in false for other in honest)
    return wins / (len(honest) * len(false))


# ---- the parts ------------------------------------------------------------------------------


def requests_of(
    name: str, prompts: Sequence[tuple[int, ...]], *, tokens: int, temperature: float, seed: int
) -> list[EngineRequest]:
    """Return one for each prompt, with a seed of its own."""
    return [
        EngineRequest(
            request_id=f"{name}-{number}",
            prompt_token_ids=prompt,
            tier="large",
            sampling=SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed + number),
        )
        for number, prompt in enumerate(prompts)
    ]


def measure_cost(engine: Engine, arguments: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Time verifications and prefills of the same length, in turn."""
    numbers = itertools.count()
    prompt = tuple(7 * place % vocab_size for place in range(arguments.prompt))
    sampling = SamplingParams(max_tokens=arguments.answer, temperature=_CLAIM, seed=arguments.seed)
    request = EngineRequest(
        request_id="cost", prompt_token_ids=prompt, tier="large", sampling=sampling
    )
    (honest,) = run(engine, [request], batch=1)
    forged = replace(honest, token_ids=honest.token_ids[::-1])

    def prefill() -> float:
        whole = replace(
            request,
            request_id=f"prefill-{next(numbers)}",
            prompt_token_ids=(*prompt, *honest.token_ids),
            sampling=replace(sampling, max_tokens=1),
        )
        return timed(partial(_events, engine, [whole], batch=1))

    def verify(text: Written) -> float:
        named = replace(text, request=replace(request, request_id=f"verify-{next(numbers)}"))
        asked = verification_of(named, arguments.answer)
        return timed(partial(_events, engine, [asked], batch=1))

    cases: dict[str, Callable[[], float]] = {
        "prefill": prefill,
        "verify": partial(verify, honest),
        "verify_forged": partial(verify, forged),
    }
    times = measure_in_turn(cases, repeats=arguments.repeats)
    return {
        "prefill_s": Summary.of(times["prefill"]),
        "verify_s": Summary.of(times["verify"]),
        "verify_forged_s": Summary.of(times["verify_forged"]),
        "over_prefill": paired_ratio(times["verify"], times["prefill"]),
        "forged_over_prefill": paired_ratio(times["verify_forged"], times["prefill"]),
    }


def _length(arguments: argparse.Namespace) -> int:
    return int(arguments.prompt + arguments.answer)


def measure_detection(
    judging: Engine,
    cheap: Engine,
    prompts: Sequence[tuple[int, ...]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Judge true and false answers."""
    ask = partial(requests_of, prompts=prompts, tokens=arguments.tokens, seed=arguments.seed)
    honest = run(judging, ask("honest", temperature=_CLAIM), batch=arguments.batch)
    false = {
        _FEWER_BITS: run(cheap, ask("bits", temperature=_CLAIM), batch=arguments.batch),
        "cooler": run(judging, ask("cooler", temperature=_COOLER), batch=arguments.batch),
    }
    found: dict[str, Any] = {}
    for name, texts in false.items():
        most = min(_PREFIXES[name], arguments.tokens)
        own = judge(judging, honest, most=most, batch=arguments.batch)
        theirs = judge(judging, texts, most=most, batch=arguments.batch)
        found[name] = {
            "tokens": most,
            "auc": auc([each.total_gap for each in own], [each.total_gap for each in theirs]),
            "found": sum(each.num_same < each.num_tokens for each in theirs) / len(theirs),
            "share": _share(theirs),
            "honest_share": _share(own),
        }
    return found


def _share(judgements: Sequence[Judgement]) -> float:
    """Return the share of all tokens that match."""
    return sum(each.num_same for each in judgements) / sum(each.num_tokens for each in judgements)


def count_alarms(
    engine: Engine, prompts: Sequence[tuple[int, ...]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Count the honest answers of which a token differs."""
    num_alarms = num_tokens = num_answers = 0
    cycled = itertools.cycle(prompts)
    for number, first in enumerate(range(0, arguments.honest, arguments.batch)):
        count = min(arguments.batch, arguments.honest - first)
        requests = requests_of(
            f"alarms-{number}",
            list(itertools.islice(cycled, count)),
            tokens=arguments.honest_tokens,
            temperature=_CLAIM if number % 2 else 0.0,
            seed=arguments.seed + first,
        )
        texts = run(engine, requests, batch=arguments.batch)
        found = judge(engine, texts, most=arguments.honest_tokens, batch=arguments.batch)
        num_alarms += sum(each.num_same < each.num_tokens for each in found)
        num_tokens += sum(each.num_tokens for each in found)
        num_answers += len(found)
    return {"answers": num_answers, "tokens": num_tokens, "alarms": num_alarms}


def engine_of(
    path: Path, arguments: argparse.Namespace, rounding: Rounding | StoredWay | None
) -> tuple[Engine, ModelRunner]:
    """Return an engine of one model, which remembers no prefix."""
    model = load_model(
        str(path),
        dtype=arguments.dtype,
        device=arguments.device,
        deterministic=None,
        rounding=rounding,
    )
    length = max(_length(arguments), arguments.tokens + arguments.max_prompt)
    runner = ModelRunner(
        model=model,
        num_blocks=blocks_for(num_sequences=arguments.batch, num_tokens=length),
        block_size=BLOCK_SIZE,
        prefix_caching=False,
    )
    return Engine(runners={"large": runner}), runner


def load_ids(path: Path, arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the prompts' tokens."""
    prompts = load_prompts(
        arguments.prompts,
        load_tokenizer(path),
        num_prompts=arguments.answers,
        seed=arguments.seed,
        max_tokens=arguments.max_prompt,
    )
    return [prompt.token_ids for prompt in prompts]


def show(results: Mapping[str, Any]) -> None:
    """Print the tables."""
    cost, alarms = results["cost"], results["honest"]
    ratio = cost["over_prefill"].median
    show_table(
        "a verification",
        ["", "ms", "over prefill", f"at most {_MOST_COST}"],
        [
            ["prefill", milliseconds(cost["prefill_s"].median), "", ""],
            [
                "verification",
                milliseconds(cost["verify_s"].median),
                f"{ratio:.3f}",
                verdict(ratio <= _MOST_COST),
            ],
            [
                "of a forged text",
                milliseconds(cost["verify_forged_s"].median),
                f"{cost['forged_over_prefill'].median:.3f}",
                "",
            ],
        ],
    )
    show_table(
        "false answers",
        ["", "tokens", "AUC", f"at least {_LEAST_AUC}", "found", "share", "of honest"],
        [
            [
                name,
                str(row["tokens"]),
                f"{row['auc']:.4f}",
                verdict(row["auc"] >= _LEAST_AUC),
                f"{row['found']:.1%}",
                f"{row['share']:.4f}",
                f"{row['honest_share']:.4f}",
            ]
            for name, row in results["false"].items()
        ],
    )
    show_table(
        "honest answers",
        ["answers", "tokens", "false alarms"],
        [[f"{alarms['answers']:,}", f"{alarms['tokens']:,}", str(alarms["alarms"])]],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", default="tasks", help='"tasks", or a JSON-lines file')
    parser.add_argument("--max-prompt", type=int, default=256, help="tokens of a prompt at most")
    parser.add_argument("--prompt", type=int, default=64, help="tokens, where cost is measured")
    parser.add_argument("--answer", type=int, default=512, help="tokens, where cost is measured")
    parser.add_argument("--answers", type=int, default=40, help="of each kind")
    parser.add_argument("--tokens", type=int, default=500, help="of an answer that is judged")
    parser.add_argument("--honest", type=int, default=400, help="answers, for false alarms")
    parser.add_argument("--honest-tokens", type=int, default=24, help="of each of these")
    parser.add_argument("--batch", type=int, default=16, help="requests at a time")
    arguments = parser.parse_args(argv)
    is_file = Path(arguments.large).is_file()
    arguments.large = Path(checkpoint(str(arguments.large)))
    prepare(arguments)
    path = grown_large(arguments)
    choose_threads(arguments, path)
    judging, runner = engine_of(path, arguments, DECODE if is_file else None)
    cheap, _ = engine_of(path, arguments, None if is_file else Rounding(scheme="int4"))
    prompts = load_ids(path, arguments)
    results = {
        "cost": measure_cost(judging, arguments, runner.vocab_size),
        "false": measure_detection(judging, cheap, prompts, arguments),
        "honest": count_alarms(judging, prompts, arguments),
    }
    show(results)
    write_results("bench_receipts", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
