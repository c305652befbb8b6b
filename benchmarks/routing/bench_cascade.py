"""What does a streaming cascade cost where the small answer stays, and gain where it does not?

Method: the demo pair grown to 400 M parameters without changing what it computes, batch 1, question
by question: every case answers one before the next is asked, and another begins each time
(benchmarks/shared/turns.py). The watch is the serving one.

Time to the first token. `always small` against `cascade`: a watched small answer whose watch
decides at the end of the hold-back (16 tokens), after the prompt's hidden state and the tokens'
log-probabilities went through the router's stages, and commits. Tasks of all difficulties.

Escalation. Hard tasks that the two models answer differently; which these are is found out with the
pair as it is, not grown. `escalated` hands the request over: the small tokens are proposed to the
large model and the small KV goes on as its draft. `restarted` throws the answer away at the same
moment and asks the large tier anew, with speculation; its drafter finds the prompt in the prefix
cache. After 16 tokens (streaming) and after the whole answer, where the tasks are those whose
answers agree by about 70 %: the share of the large answer's tokens that stand in the small one in
the same order.

Reading it: `added ms` is the paired difference of the times to the first token, goal: its median is
at most the time for which the first token was held plus one small step. `x to the last token`:
restarted over escalated, from the submission, with a 95 % interval over questions; goals 1.05
(streaming) and 1.5 (whole). `x from the decision` leaves the small answer's time out. `reused`:
share of the escalated answer's tokens that the small answer held at their place. `equal`: both ways
give the same tokens, or by how little they miss it in bfloat16.

    python -m benchmarks.routing.bench_cascade
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing.escalation import (
    HandedTurn,
    agreement,
    committed,
    escalated,
    nearest,
    plain,
    restarted,
    watched,
)
from benchmarks.shared.driving import (
    add_draft_options,
    blocks_for,
    build_bench,
    drive,
    load_runner,
    make_requests,
)
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    console,
    milliseconds,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.intervals import Interval, bootstrap
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt, load_tokenizer, make_prompt, stop_token_ids
from benchmarks.shared.turns import Turns
from outrider.draft.training.tasks.families import DIFFICULTIES
from outrider.draft.training.tasks.files import distinct_tasks
from outrider.engine.request import EngineRequest
from outrider.gateway.settings.tree import bundled_pair
from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.scorer import RouterScorer
from outrider.router.watch import AnswerWatch, Stages, UntrainedAnswers, WatchedAnswer, WatchRules
from outrider.verifier.params import Tier

HOLD_BACK_TOKENS = 16
_HARD = DIFFICULTIES[2:]
_AGREEMENT = 0.7
_GOALS = {"streaming": 1.05, "whole": 1.5}
_POOL_CONCURRENCY = 16


def task_prompts(
    tokenizer: Any, number: int, *, seed: int, difficulties: Sequence[int], max_tokens: int
) -> list[Prompt]:
    """Held-out tasks without tools, none longer than `max_tokens`."""
    prompts: list[Prompt] = []
    for task in distinct_tasks(seed, "heldout", difficulties=difficulties):
        if len(prompts) == number:
            break
        if not task.tools:
            messages = [{"role": m["role"], "content": m["content"]} for m in task.messages]
            prompt = make_prompt(tokenizer, messages, kind=task.family)
            if len(prompt.token_ids) <= max_tokens:
                prompts.append(prompt)
    return prompts


def agreements_of(arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> list[float]:
    """Measure how far the two models' answers agree, with the large tier's length cut."""
    answers: dict[Tier, list[list[int]]] = {}
    longest = max(len(prompt.token_ids) for prompt in prompts) + arguments.max_new
    tiers: tuple[Tier, ...] = ("small", "large")
    for tier in tiers:
        folder = getattr(arguments, tier)
        with console.status(f"asking the {tier} model {len(prompts)} tasks"):
            runner = load_runner(
                folder,
                dtype=arguments.dtype,
                device=arguments.device,
                num_blocks=blocks_for(num_sequences=_POOL_CONCURRENCY, num_tokens=longest),
            )
            requests = make_requests(
                prompts,
                tier=tier,
                max_tokens=arguments.max_new,
                stop=stop_token_ids(folder, load_tokenizer(folder)),
            )
            bench = build_bench({tier: runner})
            answers[tier] = drive(bench, requests, concurrency=_POOL_CONCURRENCY).outputs
    return [
        agreement(small, large)
        for small, large in zip(answers["small"], answers["large"], strict=True)
    ]


def watch_maker(folder: Path) -> Callable[[], AnswerWatch]:
    """Serving's watch, made to wait for all tokens that it may hold and then to commit."""
    scorer = RouterScorer.load(folder)
    stages: Stages = scorer if scorer.answer is not None else UntrainedAnswers(scorer)
    rules = WatchRules(threshold=0.0, sure=(0.0, ALWAYS_LARGE), hold_back_tokens=HOLD_BACK_TOKENS)
    estimate = scorer.estimate("What is 2 + 2?")
    return lambda: WatchedAnswer(stages, rules, estimate)


def request_maker(
    pair: Pair, prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> Callable[[int], EngineRequest]:
    """Small-tier requests, each with a cache of its own."""

    def request_for(question: int) -> EngineRequest:
        (request,) = make_requests(
            [prompts[question]],
            tier="small",
            max_tokens=arguments.max_new,
            temperature=arguments.temperature,
            seed=arguments.seed + question,
            stop=pair.stop,
        )
        return request

    return request_for


def first_tokens(
    pair: Pair, prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Times to the first token with and without a watch."""
    engine = pair.bench().engine
    request_for = request_maker(pair, prompts, arguments)
    new_watch = watch_maker(arguments.router)
    turns = Turns.take(
        {
            "always small": lambda question: plain(engine, request_for(question)),
            "cascade": lambda question: committed(
                engine, watched(request_for(question)), new_watch()
            ),
        },
        num_questions=len(prompts),
        num_rounds=arguments.ttft_rounds,
        description="first token",
    )
    small, watch = (turns.by_case[name] for name in ("always small", "cascade"))
    pairs = [
        list(zip(ours, theirs, strict=True)) for ours, theirs in zip(watch, small, strict=True)
    ]
    added = [[ours.wall_s - theirs.wall_s for ours, theirs in rounds] for rounds in pairs]
    held_s = float(np.median([turn.decode_s for turn in turns.all_of("cascade")]))
    step_s = float(
        np.median(
            [
                turn.decode_s / (turn.num_decoded_tokens - 1)
                for turn in turns.all_of("always small")
                if turn.num_decoded_tokens > 1
            ]
        )
    )
    median = median_interval(added)
    return {
        "small_ttft_s": float(np.median([turn.wall_s for turn in turns.all_of("always small")])),
        "cascade_ttft_s": float(np.median([turn.wall_s for turn in turns.all_of("cascade")])),
        "added_s": median,
        "held_s": held_s,
        "step_s": step_s,
        "met": median.estimate <= held_s + step_s,
        "equal": turns.compare("cascade", "always small", prompts).record(),
    }


def median_interval(samples: Sequence[Sequence[float]]) -> Interval:
    """The median of all samples; the units are questions, each with its rounds."""
    arrays = [np.asarray(unit, dtype=np.float64) for unit in samples]

    def figure(units: NDArray[np.int64]) -> float:
        return float(np.median(np.concatenate([arrays[unit] for unit in units])))

    return bootstrap(figure, len(arrays))


def escalations(
    pair: Pair,
    prompts: Sequence[Prompt],
    arguments: argparse.Namespace,
    *,
    after: int | None,
    goal: float,
) -> dict[str, Any]:
    """Escalated against restarted after so many tokens, None for the whole answer."""
    engine = pair.bench().engine
    request_for = request_maker(pair, prompts, arguments)
    reused: list[float] = []

    def answer(question: int, way: Callable[..., HandedTurn]) -> HandedTurn:
        turn = way(engine, watched(request_for(question)), after)
        if way is escalated:
            reused.append(turn.num_reused_tokens / len(turn.token_ids))
        return turn

    turns = Turns.take(
        {
            "escalated": partial(answer, way=escalated),
            "restarted": partial(answer, way=restarted),
        },
        num_questions=len(prompts),
        num_rounds=arguments.repeats,
        description="whole answers" if after is None else f"after {after} tokens",
    )
    scores_of = pair.scores_of(arguments.temperature, arguments.seed)
    whole = turns.ratio("escalated", "restarted")
    assert whole is not None
    return {
        "num_questions": len(prompts),
        "speedup": whole,
        "speedup_from_decision": turns.ratio("escalated", "restarted", decode=True),
        "escalated_s": float(np.median([turn.wall_s for turn in turns.all_of("escalated")])),
        "restarted_s": float(np.median([turn.wall_s for turn in turns.all_of("restarted")])),
        "reused_share": float(np.mean(reused)),
        "escalated": turns.report("escalated"),
        "restarted": turns.report("restarted"),
        "equal": turns.compare("escalated", "restarted", prompts, scores_of=scores_of),
        "goal": goal,
        "met": whole.estimate >= goal,
    }


def show(ttft: dict[str, Any], by_kind: dict[str, dict[str, Any]]) -> None:
    """The tables."""
    added = ttft["added_s"]
    show_table(
        f"time to the first token, {HOLD_BACK_TOKENS} tokens held",
        ["", "small ms", "cascade ms", "added ms", "held ms", "step ms", "met"],
        [
            [
                "committed",
                milliseconds(ttft["small_ttft_s"]),
                milliseconds(ttft["cascade_ttft_s"]),
                f"{added.estimate * 1e3:.2f} ({added.low * 1e3:.2f}-{added.high * 1e3:.2f})",
                milliseconds(ttft["held_s"]),
                milliseconds(ttft["step_s"]),
                verdict(ttft["met"]),
            ]
        ],
    )
    show_table(
        "escalated against restarted with speculation",
        [
            *("", "agree", "x to the last token", "x from the decision", "escalated s"),
            *("restarted s", "reused", "equal", "goal", "met"),
        ],
        [
            [
                f"{name}, {entry['num_questions']} tasks",
                f"{entry['agreement']:.2f}",
                str(entry["speedup"]),
                str(entry["speedup_from_decision"]),
                f"{entry['escalated_s']:.3f}",
                f"{entry['restarted_s']:.3f}",
                f"{entry['reused_share']:.2f}",
                str(entry["equal"]),
                f"{entry['goal']:.2f}",
                verdict(entry["met"]),
            ]
            for name, entry in by_kind.items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Choose the questions, measure, write the results."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=12, max_new=160)
    add_draft_options(parser)
    parser.add_argument("--router", type=Path, default=bundled_pair() / "router")
    parser.add_argument("--pool", type=int, default=240, help="hard tasks to choose among")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ttft-rounds", type=int, default=5, help="of the first tokens' cases")
    parser.add_argument("--quick", action="store_true", help="only to see that everything works")
    parser.set_defaults(dtype="bfloat16", expand_target="400M", max_prompt=512)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.num_prompts, arguments.pool, arguments.max_new = 2, 24, 64
        arguments.repeats, arguments.ttft_rounds = 1, 1
        arguments.expand_target = "100M"
    prepare(arguments)
    choose_threads(arguments, arguments.large)
    tokenizer = load_tokenizer(arguments.large)
    make = partial(task_prompts, tokenizer, seed=arguments.seed, max_tokens=arguments.max_prompt)
    pool = make(arguments.pool, difficulties=_HARD)
    agreements = agreements_of(arguments, pool)
    number = arguments.num_prompts
    different = [place for place, share in enumerate(agreements) if share < 1.0]
    places = {"streaming": different[:number], "whole": nearest(agreements, _AGREEMENT, number)}
    if not all(places.values()):
        raise SystemExit("both models answered every task alike; raise --pool")
    easy = make(number, difficulties=DIFFICULTIES)
    arguments.threads = None  # the grown model's own
    pair = Folders.of(arguments).load(arguments, [*pool, *easy])
    ttft = first_tokens(pair, easy, arguments)
    by_kind: dict[str, dict[str, Any]] = {}
    for kind, after in (("streaming", HOLD_BACK_TOKENS), ("whole", None)):
        chosen = [pool[place] for place in places[kind]]
        entry = escalations(pair, chosen, arguments, after=after, goal=_GOALS[kind])
        entry["agreement"] = float(np.mean([agreements[place] for place in places[kind]]))
        by_kind[kind] = entry
    show(ttft, by_kind)
    results = {
        "pair": pair.describe(),
        "hold_back_tokens": HOLD_BACK_TOKENS,
        "differing_share_of_hard_tasks": len(different) / len(pool),
        "first_token": ttft,
        "escalation": {
            kind: {**entry, "equal": entry["equal"].record()} for kind, entry in by_kind.items()
        },
    }
    write_results("bench_cascade", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
