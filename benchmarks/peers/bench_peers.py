"""Is our speculation faster than others' on the same weights and prompts, and are answers equal?

Method: batch 1, greedy, the same number of threads on the same processor cores for all, prompt by
prompt: each prompt is answered by every program before the next one is asked
(benchmarks/shared/turns.py). All hold the target in the same number of bits (`--bits`), the drafter
in 16:

- outrider: plain, and with adaptive trees as in serving;
- transformers (16 bits), in a process with the environment that its users have
  (benchmarks/peers/peers.py): generate() plain and with assistant_model;
- OpenVINO GenAI, where `--openvino-python` names an interpreter that has it
  (benchmarks/peers/openvino_peer.py says how to make one): ContinuousBatchingPipeline plain, and
  with draft_model at several fixed numbers of assistant tokens. 8 bits: int8 with a scale a row; 4:
  int4 in groups of 128 numbers, by nncf. Its converter stores equal constants once, so the zero
  matrices of a grown model cost it fewer bytes than others: the table has them;
- llama.cpp, where `--llama` names an environment that has it (benchmarks/peers/llama_peer.py): its
  server plain and with its own drafting at several fixed lengths; BF16, Q8_0 or Q4_0.

No program remembers an answer: our requests have cache salts of their own, prefix caches and
n-gram drafts of the others are off. All of a peer's settings are reported, and ours is compared
with the fastest of each program. A program that is absent is named, here and in the results.

Reading it: `tok/s` has the prompts' time in it; `a pass` counts the tokens that a pass of the
target yields, `accepted` is the share of drafted tokens (where a program tells). Ratios are of
total rates with a 95 % interval (bootstrap over prompts). `equal`: answers equal, token for token,
to our plain ones in 16 bits, and to the program's own plain ones otherwise, since programs
quantise differently. Last, the time to the first token of `--long-prompt` tokens, plain.

One part again: each `--bits` is a run and a file of its own; OpenVINO and llama.cpp run only where
their options name them; `--long-prompt 0` leaves the long prompts out; `--variant` names the file.

    python -m benchmarks.peers.bench_peers --dtype bfloat16 --expand-target 400M \\
        --pair disagreeing --openvino-python runs/openvino-env/bin/python --llama runs/llama-env
"""

import argparse
import contextlib
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.peer_programs import (
    OUR_SCHEMES,
    OUTRIDER,
    Others,
    Program,
    add_peer_options,
    cases_of,
    our_program,
)
from benchmarks.shared.compare import Comparison
from benchmarks.shared.disagreeing import add_pair_option
from benchmarks.shared.driving import add_draft_options
from benchmarks.shared.harness import (
    argument_parser,
    console,
    milliseconds,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.record import git
from benchmarks.shared.turns import Turns

PLAIN = f"{OUTRIDER} plain"
OURS = f"{OUTRIDER} trees"
# Of the disagreeing pair, from the goals of the numerics work.
_GOALS = {16: 1.15, 8: 1.3, 4: 1.3}


def compare(
    turns: Turns, programs: Sequence[Program], prompts: Sequence[Prompt], pair: Pair, bits: int
) -> dict[str, Comparison]:
    """Are answers equal to plain ones; in 16 bits of one program to those of another?"""
    found = {}
    for program in programs:
        own_plain = f"{program.name} plain"
        for name in program.answers:
            base = PLAIN if bits == 16 else own_plain
            if name != base:
                scores = (lambda _: pair.next_logits) if base == PLAIN else None
                found[name] = turns.compare(name, base, prompts, scores_of=scores)
    return found


def standing(turns: Turns, programs: Sequence[Program]) -> dict[str, dict[str, Any]]:
    """Ours over each other program: plain over plain, and trees over its best setting."""
    ahead: dict[str, dict[str, Any]] = {}
    for program in programs:
        if program.name == OUTRIDER:
            continue
        rates = {name: turns.report(name)["tokens_per_s"] for name in program.answers}
        best = max(rates, key=rates.__getitem__)
        ahead[program.name] = {
            "best": best,
            "plain_over_plain": turns.ratio(PLAIN, f"{program.name} plain"),
            "outrider_over_best": turns.ratio(OURS, best),
        }
    return ahead


def report(
    turns: Turns,
    programs: Sequence[Program],
    comparisons: Mapping[str, Comparison],
    bits: int,
) -> dict[str, Any]:
    """Rates, ratios, acceptance and equality of all cases; and ours over each program."""
    reports: dict[str, dict[str, Any]] = {}
    for program in programs:
        for name in program.answers:
            reports[name] = turns.report(name) | {
                "weight_bytes": program.weight_bytes,
                "over_own_plain": turns.ratio(name, f"{program.name} plain"),
                "over_outrider_plain": turns.ratio(name, PLAIN),
            }
    ahead = standing(turns, programs)
    _show(reports, comparisons, bits)
    for name, entry in ahead.items():
        plain, best = entry["plain_over_plain"], entry["outrider_over_best"]
        is_met = plain is not None and plain.estimate >= 1.0
        console.print(f"plain as fast as {name}: {verdict(is_met)} ({plain})")
        is_met = best is not None and best.estimate >= _GOALS[bits]
        console.print(f"{_GOALS[bits]} x {entry['best']}: {verdict(is_met)} ({best})")
    return {
        "cases": reports,
        "ahead": ahead,
        "equality": {name: comparison.record() for name, comparison in comparisons.items()},
    }


def _show(
    reports: Mapping[str, Mapping[str, Any]], comparisons: Mapping[str, Comparison], bits: int
) -> None:
    rows = [
        [
            name,
            f"{entry['weight_bytes'] / 1e6:.0f}",
            f"{entry['tokens_per_s']:.1f}",
            _figure(entry.get("tokens_per_pass")),
            _figure(entry.get("acceptance_rate")),
            str(entry["over_own_plain"]),
            str(entry["over_outrider_plain"]),
            str(comparisons.get(name, "")),
        ]
        for name, entry in reports.items()
    ]
    columns = ["", "MB", "tok/s", "a pass", "accepted", "x own plain", "x our plain", "equal"]
    show_table(f"batch 1, weights of {bits} bits", columns, rows)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def long_prompts(folders: Folders, arguments: argparse.Namespace) -> list[Prompt]:
    """Prompts of exactly `--long-prompt` tokens, of many tasks in a row; no two begin alike."""
    pieces = folders.task_prompts(arguments, arguments.num_prompts * arguments.long_prompt // 20)
    length, prompts, ids = arguments.long_prompt, list[Prompt](), list[int]()
    for piece in pieces:
        ids += piece.token_ids
        if len(ids) >= length:
            prompts.append(Prompt(messages=(), token_ids=tuple(ids[-length:]), kind="long"))
            ids = []
    return prompts[: arguments.num_long]


def first_tokens(
    programs: Sequence[Program], prompts: Sequence[Prompt], num_rounds: int
) -> dict[str, Any]:
    """Seconds to the first token of long prompts, program by program; and ours over theirs."""
    answers = {program.name: program.plain for program in programs}
    turns = Turns.take(
        cases_of(answers, prompts, max_tokens=1),
        num_questions=len(prompts),
        num_rounds=num_rounds,
        num_warm_up=1,
        description="long prompts",
    )
    median_s = {
        name: statistics.median(turn.wall_s for turn in turns.all_of(name)) for name in answers
    }
    over = {name: turns.ratio(OUTRIDER, name) for name in answers if name != OUTRIDER}
    rows = [
        [name, milliseconds(value), str(over.get(name, ""))] for name, value in median_s.items()
    ]
    title = f"first token of {len(prompts[0].token_ids)} tokens"
    show_table(title, ["", "median ms", "our rate over its"], rows)
    return {"median_s": median_s, "outrider_rate_over": over}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=12, max_new=96)
    add_peer_options(parser)
    add_pair_option(parser)
    parser.add_argument("--long-prompt", type=int, default=1000, help="tokens; 0: do not measure")
    parser.add_argument("--num-long", type=int, default=5, help="long prompts")
    add_draft_options(parser)
    parser.set_defaults(repeats=1)
    return parser.parse_args(argv)


def _use_cores(number: int) -> None:
    """Stay on so many cores, and with us every program that is started from here."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


def main(argv: Sequence[str] | None = None) -> None:
    """Run all programs and write the results."""
    arguments = _parse(argv)
    prepare(arguments)
    folders = Folders.of(arguments)
    _use_cores(arguments.threads)
    prompts = folders.task_prompts(arguments, arguments.num_prompts)
    long = long_prompts(folders, arguments) if arguments.long_prompt else []
    pair = folders.load(arguments, [*prompts, *long], scheme=OUR_SCHEMES[arguments.bits])
    with contextlib.ExitStack() as stack:
        others = Others(
            stack=stack, arguments=arguments, folders=folders, pair=pair, bits=arguments.bits
        )
        there, absent = others.programs()
        programs = [our_program(pair, str(git("rev-parse", "--short=12", "HEAD"))), *there]
        answers = {name: way for program in programs for name, way in program.answers.items()}
        turns = Turns.take(
            cases_of(answers, prompts, arguments.max_new),
            num_questions=len(prompts),
            num_rounds=arguments.repeats,
            description="programs",
        )
        comparisons = compare(turns, programs, prompts, pair, arguments.bits)
        results: dict[str, Any] = {
            **pair.describe(),
            "bits": arguments.bits,
            "versions": {program.name: program.version for program in programs},
            "absent": absent,
            "num_prompts": len(prompts),
            "num_prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
            **report(turns, programs, comparisons, arguments.bits),
        }
        if long:
            results["first_token"] = first_tokens(programs, long, arguments.repeats)
    more = [f"draft{arguments.expand_draft}"] if arguments.expand_draft else []
    more += [f"{arguments.bits}-bits"] if arguments.bits != 16 else []
    write_results("bench_peers", variant_name(arguments, *more), results, arguments)


if __name__ == "__main__":
    start(main)
