"""Is our speculation faster than others' on the same weights and prompts, and are answers equal?

Method: batch 1, greedy, the same number of threads for all, prompt by prompt: each prompt is
answered by every program before the next one is asked (benchmarks/turns.py).

- outrider: plain, and with adaptive trees as in serving;
- transformers, in a process with the environment that its users have (benchmarks/peers.py):
  generate() plain, with assistant_model (its default schedule of draft lengths) and with prompt
  lookup;
- OpenVINO GenAI, where `--openvino-python` names the interpreter of an environment that has it
  (benchmarks/openvino_peer.py says how to make one): ContinuousBatchingPipeline plain, with
  draft_model at several fixed numbers of assistant tokens, and with prompt lookup. Weights are
  converted without compression, computed and cached in the same 16-bit format. Its converter
  stores equal constants once, so the zero matrices of a grown model cost it less memory: 0.63 GB
  instead of 0.8 GB at 400 M.

All of a peer's settings are reported, and ours is compared with the fastest of each program.

Reading it: `tok/s` has the prompts' time in it. The other columns are ratios of total rates with a
95 % interval (bootstrap over prompts). `equal`: answers equal to our plain ones, token for token.

    python -m benchmarks.bench_peers --dtype bfloat16 --expand-target 400M \
        --openvino-python runs/openvino-env/bin/python
"""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compare import Comparison
from benchmarks.driving import add_draft_options, make_requests
from benchmarks.harness import (
    argument_parser,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.openvino_peer import OpenVinoPeer, openvino_process
from benchmarks.pair import Folders, Pair, add_prompt_options
from benchmarks.peers import Peer, PeerModels, PeerTask, peer_process
from benchmarks.prompts import Prompt
from benchmarks.turns import Case, Turn, Turns, engine_case
from engine.request import EngineRequest

PLAIN = "outrider plain"
OURS = "outrider"
_TRANSFORMERS, _OPENVINO = "transformers", "openvino"
_LOOKUP_TOKENS = 8
_PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def our_cases(pair: Pair, prompts: Sequence[Prompt], max_tokens: int) -> dict[str, Case]:
    """Plain and as in serving."""
    bench = pair.bench()

    def request_for(question: int, speculate: bool) -> EngineRequest:
        (request,) = make_requests(
            [prompts[question]],
            tier="large",
            max_tokens=max_tokens,
            stop=pair.stop,
            speculate=speculate,
        )
        return request

    return {
        PLAIN: engine_case(bench, partial(request_for, speculate=False)),
        OURS: engine_case(bench, partial(request_for, speculate=True)),
    }


def transformers_cases(
    peer: Peer, pair: Pair, prompts: Sequence[Prompt], max_tokens: int
) -> dict[str, Case]:
    """generate() in its three ways."""

    def answer(question: int, assisted: bool = False, lookup: bool = False) -> Turn:
        done = peer.run(
            PeerTask(
                prompt=prompts[question],
                max_tokens=max_tokens,
                stop=pair.stop,
                assisted=assisted,
                lookup=lookup,
            )
        )
        return Turn(
            token_ids=done.token_ids,
            wall_s=done.wall_s,
            decode_s=done.decode_s,
            num_decoded_tokens=done.num_decoded_tokens,
        )

    return {
        f"{_TRANSFORMERS} plain": answer,
        f"{_TRANSFORMERS} assisted": partial(answer, assisted=True),
        f"{_TRANSFORMERS} prompt lookup": partial(answer, lookup=True),
    }


def openvino_cases(
    peer: OpenVinoPeer,
    pair: Pair,
    prompts: Sequence[Prompt],
    max_tokens: int,
    assistant_tokens: Sequence[int],
) -> dict[str, Case]:
    """ContinuousBatchingPipeline in its three ways."""

    def answer(question: int, way: str, num_assistant_tokens: int = 0) -> Turn:
        token_ids, wall_s = peer.answer(
            way,
            prompts[question].token_ids,
            max_tokens=max_tokens,
            stop=pair.stop,
            num_assistant_tokens=num_assistant_tokens,
        )
        return Turn(token_ids=token_ids, wall_s=wall_s)

    return {
        f"{_OPENVINO} plain": partial(answer, way="plain"),
        **{
            f"{_OPENVINO} speculative, {number}": partial(
                answer, way="assisted", num_assistant_tokens=number
            )
            for number in assistant_tokens
        },
        f"{_OPENVINO} prompt lookup": partial(
            answer, way="lookup", num_assistant_tokens=_LOOKUP_TOKENS
        ),
    }


def report(
    turns: Turns, pair: Pair, prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Rates, ratios and equality of all cases; and ours over the best of each program."""
    reports = {name: turns.report(name) for name in turns.by_case}
    comparisons = {
        name: turns.compare(name, PLAIN, prompts, scores_of=lambda _: pair.next_logits)
        for name in turns.by_case
        if name != PLAIN
    }
    programs = [
        program
        for program in (_TRANSFORMERS, _OPENVINO)
        if any(name.startswith(program) for name in reports)
    ]
    for name, entry in reports.items():
        entry["over_outrider_plain"] = turns.ratio(name, PLAIN)
        for program in programs:
            entry[f"over_{program}_plain"] = turns.ratio(name, f"{program} plain")
    ahead: dict[str, dict[str, Any]] = {}
    for program in programs:
        names = [name for name in reports if name.startswith(program)]
        best = max(names, key=lambda name: reports[name]["tokens_per_s"])
        ahead[program] = {"best": best, "outrider_over_best": turns.ratio(OURS, best)}
    _show(reports, programs, comparisons)
    for found in ahead.values():
        ratio = found["outrider_over_best"]
        console.print(
            f"ahead of {found['best']}: {verdict(ratio is not None and ratio.low > 1)} ({ratio})"
        )
    return {
        "cases": reports,
        "ahead": ahead,
        "equality": {name: comparison.record() for name, comparison in comparisons.items()},
    }


def _show(
    reports: Mapping[str, Mapping[str, Any]],
    programs: Sequence[str],
    comparisons: Mapping[str, Comparison],
) -> None:
    names = {program: f"over_{program}_plain" for program in programs}
    rows = [
        [
            name,
            f"{entry['tokens_per_s']:.1f}",
            str(entry["over_outrider_plain"]),
            *(str(entry[key]) for key in names.values()),
            str(comparisons.get(name, "")),
        ]
        for name, entry in reports.items()
    ]
    columns = ["", "tok/s", "x our plain", *(f"x {program}" for program in names), "equal"]
    show_table("batch 1", columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all programs and write the results."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=12, max_new=96)
    parser.add_argument("--openvino-python", type=Path, help="interpreter that has openvino-genai")
    parser.add_argument("--assistant-tokens", type=int, nargs="+", default=[5, 8, 12, 16])
    add_draft_options(parser)
    parser.set_defaults(repeats=2)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folders = Folders.of(arguments)
    prompts = folders.task_prompts(arguments, arguments.num_prompts)
    pair = folders.load(arguments, prompts)
    cases = our_cases(pair, prompts, arguments.max_new)
    dtype = pair.runners["large"].model.dtype
    results: dict[str, Any] = pair.describe()
    with contextlib.ExitStack() as stack:
        models = PeerModels(
            target=folders.large,
            assistant=folders.small,
            dtype=dtype,
            device=arguments.device,
            num_threads=arguments.threads,
        )
        with console.status("loading the same weights in transformers"):
            peer = stack.enter_context(peer_process(models))
        cases |= transformers_cases(peer, pair, prompts, arguments.max_new)
        if arguments.openvino_python:
            openvino = stack.enter_context(
                openvino_process(
                    arguments.openvino_python,
                    target=folders.large,
                    draft=folders.small,
                    num_threads=arguments.threads,
                    precision=_PRECISIONS[results["dtype"]],
                )
            )
            results["openvino_versions"] = openvino.versions
            cases |= openvino_cases(
                openvino, pair, prompts, arguments.max_new, arguments.assistant_tokens
            )
        turns = Turns.take(
            cases,
            num_questions=len(prompts),
            num_rounds=arguments.repeats,
            description="programs",
        )
    results["num_prompts"] = len(prompts)
    results["num_prompt_tokens"] = sum(len(prompt.token_ids) for prompt in prompts)
    results |= report(turns, pair, prompts, arguments)
    more = [f"draft{arguments.expand_draft}"] if arguments.expand_draft else []
    write_results("bench_peers", variant_name(arguments, *more), results, arguments)


if __name__ == "__main__":
    start(main)
