"""How much faster is tree speculation than plain decoding, alone and in batches?

Method: the same prompts and weights for all. Our engine decodes plainly and speculatively (the
weights loaded once, speculation switched by request) at each batch size: so many requests in
flight, the next starts when one ends. All of a batch size are run in turn, round by round, after a
warm-up of each; no prompt is ever found in the prefix cache. Answers end at the end-of-text token
and are compared token for token; where they part, the gap between the two tokens' logits says
whether it was a tie (benchmarks/shared/compare.py). Other programs: bench_peers.

Reading it: `tok/s` has the prompts' time in it, `decode` has not. `x plain` is the ratio to plain
decoding, a median over the rounds. `x ceiling` is the decode rate in units of memory bandwidth /
weight bytes: what plain decoding can reach at most at batch 1. `tok/pass` is the mean number of
tokens that a pass of the large model emits for a sequence; draft, target and host share out the
engine's time (not on a GPU, where passes are only launched), and `host ms` is the median of a step.

    python -m benchmarks.speculation.bench_speculation --large DIR --small DIR --dtype bfloat16
    python -m benchmarks.speculation.bench_speculation --expand-target 400M --expand-draft 40M
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.compare import Comparison, compare_answers, runner_logits
from benchmarks.shared.disagreeing import add_pair_option, measured_agreement
from benchmarks.shared.driving import (
    Bench,
    Drive,
    add_draft_options,
    blocks_for,
    build_bench,
    draft_config,
    drive,
    load_runner,
    load_with_head,
    make_requests,
    tree_budget,
)
from benchmarks.shared.grown import grown_large, grown_small, small_folder
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    choose_threads,
    console,
    measure_bandwidth,
    measure_in_turn,
    milliseconds,
    paired_ratio,
    prepare,
    show_table,
    start,
    variant_name,
    write_results,
)
from benchmarks.shared.prompts import Prompt, load_prompts, load_tokenizer, stop_token_ids
from outrider.draft.budget.budget import TreeBudget
from outrider.draft.guesses.head_texts import Head
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.params import Tier

PLAIN = "outrider plain"
_WARM_UP_PROMPTS = 2
_WARM_UP_TOKENS = 24
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(kw_only=True)
class Setup:
    """The models and what they are asked. `benches`: an engine by the name of its drafter."""

    arguments: argparse.Namespace
    prompts: list[Prompt]
    stop: tuple[int, ...]
    large: ModelRunner
    benches: dict[str, Bench]
    budgets: dict[str, TreeBudget]

    @property
    def plain(self) -> Bench:
        """Any engine: plain decoding is speculation switched off."""
        return next(iter(self.benches.values()))


# ---- what is run ------------------------------------------------------------------------------


def run_engine(
    setup: Setup,
    bench: Bench,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    speculate: bool,
    limit: int,
) -> Drive:
    """All prompts through our engine, `batch` at a time."""
    requests = make_requests(
        prompts,
        tier="large",
        max_tokens=limit,
        speculate=speculate,
        temperature=setup.arguments.temperature,
        seed=setup.arguments.seed,
        stop=setup.stop,
    )
    return drive(bench, requests, concurrency=batch)


def cases(
    setup: Setup, prompts: Sequence[Prompt], *, batch: int, limit: int
) -> Mapping[str, Callable[[], Drive]]:
    """Return what is compared at one batch size: name -> a call that runs all prompts."""
    engine = partial(run_engine, setup, prompts=prompts, batch=batch, limit=limit)
    found: dict[str, Callable[[], Drive]] = {PLAIN: partial(engine, setup.plain, speculate=False)}
    for name, bench in setup.benches.items():
        found[f"outrider, {name}"] = partial(engine, bench, speculate=True)
    return found


def measure(setup: Setup, batch: int, ceiling: float) -> dict[str, Any]:
    """Run and report one batch size."""
    arguments = setup.arguments
    # Two fillings at least, so that a batch is full for most of the time.
    num_prompts = max(arguments.num_prompts, 2 * batch if batch > 1 else 0)
    prompts = setup.prompts[:num_prompts]
    runs = measure_in_turn(
        cases(setup, prompts, batch=batch, limit=arguments.max_new),
        repeats=arguments.repeats,
        warm_up=cases(
            setup,
            prompts[: max(_WARM_UP_PROMPTS, batch)],
            batch=batch,
            limit=min(_WARM_UP_TOKENS, arguments.max_new),
        ),
        description=f"batch {batch}",
    )
    tallies = {f"outrider, {name}": bench.verifier.tally for name, bench in setup.benches.items()}
    rates = {name: [run.tokens_per_s for run in done] for name, done in runs.items()}
    result: dict[str, Any] = {}
    for name, done in runs.items():
        entry: dict[str, Any] = {
            "tokens_per_s": Summary.of(rates[name]),
            "samples": rates[name],
            "num_tokens": done[-1].num_tokens,
            "over_outrider_plain": paired_ratio(rates[name], rates[PLAIN]),
        }
        entry |= _decoding(done, ceiling if batch == 1 else None)
        entry |= _inside(done[-1])
        if name in tallies:
            entry["drafting"] = _drafting(done[-1], tallies[name].acceptance_by_depth)
        result[name] = entry
    for bench in setup.benches.values():
        bench.verifier.tally.clear()
    comparisons = _compare(setup, prompts, runs)
    _show(batch, result, comparisons)
    return {
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        "cases": result,
        "equality": {name: c.record() for name, c in comparisons.items()},
    }


# ---- what is made of it -----------------------------------------------------------------------


def _decoding(done: Sequence[Drive], ceiling: float | None) -> dict[str, Any]:
    """The rate after the first token of each answer; only where answers come one at a time."""
    if ceiling is None:
        return {}
    rates = []
    for run in done:
        num_tokens = sum(answer.num_decoded_tokens for answer in run.streams)
        seconds = sum(answer.decode_s for answer in run.streams)
        if seconds > 0:
            rates.append(num_tokens / seconds)
    if not rates:
        return {}
    best = Summary.of(rates)
    return {"decode_tokens_per_s": best, "over_ceiling": best.median / ceiling}


def _inside(run: Drive) -> dict[str, Any]:
    """Return where our engine's time went, in the last round."""
    num_steps = len(run.steps)
    small_s = sum(step.small_s for step in run.steps)
    large_s = sum(step.large_s for step in run.steps)
    host_s = sum(step.host_s for step in run.steps)
    in_steps_s = small_s + large_s + host_s
    outputs = [answer.stats for answer in run.streams if answer.stats is not None]
    return {
        "num_steps": num_steps,
        "mean_in_flight": sum(step.num_in_flight for step in run.steps) / num_steps,
        "mean_emitted_tokens": sum(s.num_output_tokens for s in outputs)
        / max(sum(s.num_steps for s in outputs), 1),
        "draft_passes_per_step": sum(step.num_small_passes for step in run.steps) / num_steps,
        "time_share": {
            "draft_passes": small_s / in_steps_s,
            "target_passes": large_s / in_steps_s,
            "host": host_s / in_steps_s,
        },
        "host_s_per_step": Summary.of([step.host_s for step in run.steps]),
        "target_s_per_step": Summary.of([step.large_s for step in run.steps]),
    }


def _drafting(run: Drive, acceptance_by_depth: list[float]) -> dict[str, Any]:
    stats = [answer.stats for answer in run.streams if answer.stats is not None]
    drafted = sum(s.num_drafted_tokens for s in stats)
    accepted = sum(s.num_accepted_tokens for s in stats)
    return {
        "num_drafted_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_by_depth": acceptance_by_depth,
    }


def _compare(
    setup: Setup, prompts: Sequence[Prompt], runs: Mapping[str, Sequence[Drive]]
) -> dict[str, Comparison]:
    """Speculative against plain."""
    prompt_ids = [prompt.token_ids for prompt in prompts]
    reference_logits = runner_logits(setup.large) if setup.arguments.temperature == 0 else None
    pairs = {f"{name} = {PLAIN}": (PLAIN, name) for name in runs if name != PLAIN}
    return {
        label: compare_answers(
            prompt_ids,
            runs[left][-1].outputs,
            runs[right][-1].outputs,
            next_logits=reference_logits,
        )
        for label, (left, right) in pairs.items()
    }


def _show(
    batch: int,
    result: Mapping[str, Mapping[str, Any]],
    comparisons: Mapping[str, Comparison],
) -> None:
    columns = ["", "tok/s", "x plain", "decode", "x ceiling", "tok/pass"]
    columns += ["draft", "target", "host", "host ms"]
    rows = []
    for name, entry in result.items():
        shares = entry.get("time_share")
        rows.append(
            [
                name,
                f"{entry['tokens_per_s'].median:.1f}",
                f"{entry['over_outrider_plain'].median:.2f}",
                _figure(entry.get("decode_tokens_per_s"), ".1f"),
                _figure(entry.get("over_ceiling"), ".2f"),
                _figure(entry.get("mean_emitted_tokens"), ".2f"),
                *([f"{share:.0%}" for share in shares.values()] if shares else ["", "", ""]),
                milliseconds(entry["host_s_per_step"].median) if shares else "",
            ]
        )
    equality = "\n".join(f"{label}: {comparison}" for label, comparison in comparisons.items())
    show_table(f"batch {batch}", columns, rows, caption=equality)
    for name, entry in result.items():
        drafting = entry.get("drafting")
        if drafting and drafting["acceptance_by_depth"]:
            depths = " ".join(f"{share:.2f}" for share in drafting["acceptance_by_depth"])
            console.print(f"[dim]{name}: accepted by depth {depths}[/dim]")


def _figure(value: Summary | float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value.median if isinstance(value, Summary) else value, form)


# ---- building ---------------------------------------------------------------------------------


def drafter_folders(arguments: argparse.Namespace) -> dict[str, Path]:
    """The drafters by name: the small model as it is, and grown where that was asked for."""
    drafters = {"small drafts": small_folder(arguments)}
    if arguments.expand_draft:
        drafters[f"{arguments.expand_draft} drafts"] = grown_small(arguments)
    for folder in [*arguments.drafter, *arguments.head]:
        drafters[f"{folder.name} drafts"] = folder
    return drafters


def build(arguments: argparse.Namespace, large_folder: Path, drafters: dict[str, Path]) -> Setup:
    """Load everything once: the plain and the speculative engine share the target's weights."""
    tokenizer = load_tokenizer(large_folder)
    prompts = load_prompts(
        arguments.prompts,
        tokenizer,
        num_prompts=max(arguments.num_prompts, 2 * max(arguments.batch)),
        seed=arguments.seed,
        max_tokens=arguments.max_prompt,
        difficulties=arguments.difficulty,
    )
    longest = max(len(prompt.token_ids) for prompt in prompts) + arguments.max_new
    num_blocks = blocks_for(num_sequences=max(arguments.batch), num_tokens=longest)
    how: dict[str, Any] = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "num_blocks": num_blocks,
    }
    with console.status("loading the large model"):
        large = load_runner(large_folder, **how)
    benches: dict[str, Bench] = {}
    budgets: dict[str, TreeBudget] = {}
    for name, folder in drafters.items():
        with console.status(f"loading, and profiling step times: {name}"):
            head: Head | None = None
            runners: dict[Tier, ModelRunner] = {"large": large}
            if folder in arguments.head:
                runners["large"], head = load_with_head(large_folder, folder, **how)
            else:
                runners["small"] = load_runner(folder, **how)
            if not arguments.no_budget:
                others = [] if head else [each.target_pass_s for each in budgets.values()]
                budgets[name] = tree_budget(
                    runners, head=head, target_pass_s=next(iter(others), None)
                )
            benches[name] = build_bench(
                runners, draft_config=draft_config(arguments), budget=budgets.get(name), head=head
            )
    return Setup(
        arguments=arguments,
        prompts=prompts,
        stop=() if arguments.ignore_eos else stop_token_ids(large_folder, tokenizer),
        large=large,
        benches=benches,
        budgets=budgets,
    )


def _pass_times(budget: TreeBudget | None) -> dict[str, Any] | None:
    """Return what the budget believes at the end that passes take, by their rows."""
    if budget is None:
        return None
    return {
        "target": {rows: budget.target_pass_s(rows) for rows in _SHOWN_ROWS},
        "draft": {rows: budget.draft_pass_s(rows) for rows in _SHOWN_ROWS},
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--prompts",
        default="tasks",
        help='"tasks" (held out, of the shipped pair\'s world) or a JSON-lines file, also relative '
        "to $OUTRIDER_DATA, such as prompts/spec_bench_half.jsonl",
    )
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--difficulty", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--max-prompt", type=int, default=1024, help="longest prompt, in tokens")
    parser.add_argument("--max-new", type=int, default=128, help="longest answer, in tokens")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action="store_true", help="answers of exactly --max-new")
    parser.add_argument("--no-budget", action="store_true", help="always the largest trees")
    parser.add_argument("--drafter", type=Path, nargs="+", default=[], help="more small models")
    parser.add_argument("--head", type=Path, nargs="+", default=[], help="heads of the target")
    add_draft_options(parser)
    add_pair_option(parser)
    arguments = parser.parse_args(argv)
    if arguments.num_prompts < 1 or min(arguments.batch) < 1:
        parser.error("--num-prompts and --batch must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run all batch sizes and write the results."""
    arguments = _parse(argv)
    prepare(arguments)
    large_folder, drafters = grown_large(arguments), drafter_folders(arguments)
    choose_threads(arguments, large_folder)
    with console.status("measuring memory bandwidth"):
        bandwidth = measure_bandwidth(device=arguments.device)
    setup = build(arguments, large_folder, drafters)
    model = setup.large.model
    ceiling = bandwidth / model.weight_bytes  # passes per second
    console.print(
        f"target {model.num_parameters / 1e6:.1f} M parameters, {model.dtype}, "
        f"{arguments.threads} threads; memory {bandwidth / 1e9:.1f} GB/s, "
        f"ceiling {ceiling:.1f} passes/s"
    )
    batches = {batch: measure(setup, batch, ceiling) for batch in arguments.batch}
    results: dict[str, Any] = {
        "target_parameters": model.num_parameters,
        "drafters": {
            name: {
                "parameters": bench.runners["small"].model.num_parameters,
                "agreement": measured_agreement(drafters[name]),
                "pass_s_by_rows": _pass_times(setup.budgets.get(name)),
            }
            for name, bench in setup.benches.items()
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "bandwidth_bytes_per_s": bandwidth,
        "ceiling_passes_per_s": ceiling,
        "batches": batches,
    }
    more = [Path(arguments.prompts).name.split(".")[0]] if arguments.prompts != "tasks" else []
    more += [f"t{arguments.temperature:g}"] if arguments.temperature else []
    write_results("bench_speculation", variant_name(arguments, *more), results, arguments)


if __name__ == "__main__":
    start(main)
