"""What do returning conversations and coding agents gain from a folder for keys and values?

Question: of users whose prompts come back, how much sooner does an answer begin with a folder on a
disk, also after restarts; and what does it cost where everything fits in memory?

Method: the bundled pair's large model grown to --large parameters, in bfloat16, without drafts.
Texts are scaled down: a token stands for --scale tokens. All arms answer the same, in turn: no
folder (off), one (disk), one with engines that are restarted (restart), and no folder but memory
for everything (ample), which is the most that could be gained.

replay: conversations drawn from Mooncake's trace (--trace), or from texts with its statistics.
Calls arrive at the trace's moments, so far apart that an engine without a folder is busy for --load
of the time. The memory has a quarter of the blocks that were used and will be used again (their
peak), but the longest prompt fits. Each arm has a clock that stands still while the others run.
In `restart` the engine is a new one, with empty memory, after each quarter of the calls.

agents: five coding agents take turns, alone. Their prompts grow from 24 to 60 thousand tokens over
--scale, tools first. The memory has a quarter of what all of them need. In `restart` each turn
finds an engine with empty memory.

fits: the same agents, one call right after the other, with memory for all. The folder gives
nothing, and is to cost nothing. `work_over_off` is the processor time of the engine's own thread.

Reading it: TTFT is the time from a call's arrival to its first token. Ratios above 1 are a gain.
Files come from the system's page cache; a slow disk adds bytes / bandwidth.

    python -m benchmarks.sessions.bench_sessions --trace mooncake_conversation_trace.jsonl
    python -m benchmarks.sessions.bench_sessions --parts agents fits --large 400M --scale 16
    python -m benchmarks.sessions.bench_sessions --calls 640 --scale 32 --longest 24000
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final

import torch

from benchmarks.sessions.session_arms import Answer, Arm, Replay
from benchmarks.sessions.session_texts import (
    AgentSession,
    Call,
    agent_session,
    trace_calls,
    working_set,
)
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, count, figure, option
from benchmarks.shared.driving import BLOCK_SIZE
from benchmarks.shared.grown import grown
from benchmarks.shared.harness import progress_bar
from benchmarks.shared.intervals import ratio_of_rates
from benchmarks.shared.record import percentile
from benchmarks.simulate.fleet_trace import read_mooncake, synthetic
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.gateway.settings.tree import bundled_pair
from outrider.kernels.cpu.product_library import product_support

PARTS: Final = ("replay", "agents", "fits")
_ARMS: Final = ("off", "disk", "restart", "ample")
_WITHOUT_FOLDER: Final = ("off", "ample")
_SESSIONS: Final = 5
_PRESSURE: Final = 4
"""The working set over the memory's blocks."""
_SPARE_BLOCKS: Final = 8
_ANSWER_TOKENS: Final = 8
_SLICE_S: Final = 2.0
_RESTARTS: Final = 4
_TRIAL_CALLS: Final = 6
_SYNTHETIC_ROWS: Final = 12_000
_LEAST_GAIN: Final = 5.0
_LEAST_P95_GAIN: Final = 2.0
_MOST_LOSS: Final = 0.01
_MOST_ADDED_S: Final = 1e-3


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(1, "how often all agents' turns are answered in `fits`")
    parts: tuple[str, ...] = option(PARTS, "what is measured", choices=PARTS)
    large: str = option("60M", "parameters that the large model is grown to")
    trace: Path | None = option(None, "Mooncake's trace (JSON lines); unset: texts like it")
    calls: int = option(100, "of the replay")
    scale: int = option(32, "tokens that a token stands for; 32 at most")
    longest: int = option(24_000, "tokens of the replay's longest prompt, before they are scaled")
    turns: int = option(2, "least requests of a conversation of the replay")
    load: float = option(0.9, "share of the time that the replay keeps an engine busy, off")
    folder: Path | None = option(None, "where the folders are made; unset: with temporary files")
    threads: int = option(1)
    seed: int = option(0)


def measure(options: Options) -> Results:
    """Return the times to the first token by part and arm, and their ratios."""
    torch.set_num_threads(options.threads)
    folder = grown(bundled_pair() / "large", options.large)
    model = load_model(str(folder), dtype="bfloat16")
    parts: dict[str, Callable[[CausalModel, Options], Results]] = {
        "replay": _replay,
        "agents": _agents,
        "fits": _fits,
    }
    return {
        "parts": {name: parts[name](model, options) for name in options.parts},
        "products": product_support().detail.split(" in ")[0],
        "numerics": model.numerics,
    }


@contextmanager
def _arms(
    model: CausalModel,
    options: Options,
    names: Sequence[str],
    *,
    num_blocks: int,
    ample_blocks: int,
) -> Iterator[dict[str, Arm]]:
    """Engines with memory for so many blocks, `ample` with more. Some have a folder each."""
    with ExitStack() as stack:
        arms = {}
        for name in names:
            place = None
            if name not in _WITHOUT_FOLDER:
                made = tempfile.TemporaryDirectory(prefix="kv-", dir=options.folder)
                place = Path(stack.enter_context(made))
            number = ample_blocks if name == "ample" else num_blocks
            arms[name] = Arm(model, num_blocks=number, folder=place)
            stack.callback(arms[name].close)
        yield arms


# ---- the parts --------------------------------------------------------------------------------


def _replay(model: CausalModel, options: Options) -> Results:
    rows = synthetic(_SYNTHETIC_ROWS) if options.trace is None else read_mooncake(options.trace)
    calls = trace_calls(
        rows,
        count=options.calls,
        scale=options.scale,
        longest=options.longest,
        least_turns=options.turns,
        seed=options.seed,
    )
    returning = working_set(calls, BLOCK_SIZE)
    longest = max(len(call.prompt) + call.max_tokens for call in calls)
    num_blocks = max(returning // _PRESSURE, longest // BLOCK_SIZE + _SPARE_BLOCKS)
    ample = sum(len(call.prompt) for call in calls) // BLOCK_SIZE + num_blocks
    with _arms(model, options, _ARMS, num_blocks=num_blocks, ample_blocks=ample) as arms:
        calls = _spread(arms["off"], calls, options.load)
        replays = {
            name: Replay(
                arm,
                calls,
                restart_after=-(-len(calls) // _RESTARTS) if name == "restart" else None,
            )
            for name, arm in arms.items()
        }
        _run_in_turn(replays)
        span_s = calls[-1].at_s
        return {
            "calls": len(calls),
            "prompt_tokens": sum(len(call.prompt) for call in calls),
            "memory_blocks": num_blocks,
            "working_set": returning / num_blocks,
            "span_s": span_s,
            "load": replays["off"].busy_s / span_s,
            **_compared(arms),
        }


def _spread(arm: Arm, calls: Sequence[Call], load: float) -> list[Call]:
    """Return the calls at moments that keep the arm busy for so much of the time.

    What a token takes is measured with some of the calls, in a private text each.
    """
    trial = calls[:: max(len(calls) // _TRIAL_CALLS, 1)]
    begun_s = arm.now_s
    for number, call in enumerate(trial):
        name = arm.ask((5 + number, *call.prompt), max_tokens=call.max_tokens)
        del arm.answers[name]
    row_s = (arm.now_s - begun_s) / sum(len(call.prompt) for call in trial)
    span_s = row_s * sum(len(call.prompt) for call in calls) / load
    slower = span_s / max(calls[-1].at_s, 1e-9)
    return [
        Call(at_s=call.at_s * slower, prompt=call.prompt, max_tokens=call.max_tokens)
        for call in calls
    ]


def _run_in_turn(replays: dict[str, Replay]) -> None:
    """Run all replays to their ends, a slice of each at a time."""
    until_s = 0.0
    with progress_bar("replay", sum(each.num_calls for each in replays.values())) as advance:
        while not all(each.is_done for each in replays.values()):
            until_s += _SLICE_S
            for name, replay in replays.items():
                before = replay.num_answered
                replay.advance(until_s)
                for _ in range(replay.num_answered - before):
                    advance(name)


def _agents(model: CausalModel, options: Options) -> Results:
    sessions = _sessions(options)
    total = sum(map(_num_blocks, sessions))
    num_blocks = max(total // _PRESSURE, max(map(_num_blocks, sessions)) + _SPARE_BLOCKS)
    ample = total + _SPARE_BLOCKS * _SESSIONS
    with _arms(model, options, _ARMS, num_blocks=num_blocks, ample_blocks=ample) as arms:
        _take_turns(arms, sessions, description="agents", pauses=True)
        return {
            "memory_blocks": num_blocks,
            "working_set": total / num_blocks,
            **_compared(arms),
        }


def _fits(model: CausalModel, options: Options) -> Results:
    sessions = _sessions(options)
    ample = sum(map(_num_blocks, sessions)) + _SPARE_BLOCKS * _SESSIONS
    off: list[Answer] = []
    disk: list[Answer] = []
    for _ in range(options.repeats):
        with _arms(model, options, ("off", "disk"), num_blocks=ample, ample_blocks=ample) as arms:
            _take_turns(arms, sessions, description="fits", pauses=False)
            off += arms["off"].answers.values()
            disk += arms["disk"].answers.values()
            compared = _compared(arms)
    ones = [1.0] * len(off)
    seconds = [[each.wall_s for each in arm] for arm in (disk, off)]
    work = [[each.thread_s for each in arm] for arm in (disk, off)]
    added = [one.ttft_s - other.ttft_s for one, other in zip(disk, off, strict=True)]
    return {
        "memory_blocks": ample,
        "throughput_over_off": ratio_of_rates((ones, ones), (seconds[0], seconds[1])),
        "work_over_off": 1 / ratio_of_rates((ones, ones), (work[0], work[1])).estimate,
        "added_ttft_s": median(added),
        **compared,
    }


def _sessions(options: Options) -> list[AgentSession]:
    return [
        agent_session(number, scale=options.scale, seed=options.seed) for number in range(_SESSIONS)
    ]


def _num_blocks(session: AgentSession) -> int:
    """Return the blocks of a session's last turn."""
    answers = (len(session.results) + 1) * _ANSWER_TOKENS
    return -(-(session.num_tokens + answers) // BLOCK_SIZE)


def _take_turns(
    arms: dict[str, Arm], sessions: Sequence[AgentSession], *, description: str, pauses: bool
) -> None:
    """Have all turns of all sessions answered, each by every arm before the next one.

    Which arm begins changes with every turn. `pauses`: tools run meanwhile, so there is time to
    write; and the arm `restart` begins each turn anew.
    """
    texts = {name: [session.prompt for session in sessions] for name in arms}
    num_turns = max(len(session.results) for session in sessions) + 1
    order = list(arms)
    total = sum(len(session.results) + 1 for session in sessions) * len(arms)
    with progress_bar(description, total) as advance:
        for turn in range(num_turns):
            for number, session in enumerate(sessions):
                if turn > len(session.results):
                    continue
                for name in order:
                    arm, known = arms[name], texts[name]
                    if name == "restart" and pauses:
                        arm.restart()
                    answer = arm.answers[arm.ask(known[number], max_tokens=_ANSWER_TOKENS)]
                    if pauses:
                        arm.settle()
                    result = session.results[turn] if turn < len(session.results) else ()
                    known[number] = (*known[number], *answer.token_ids, *result)
                    advance(name)
                order = order[1:] + order[:1]


# ---- figures ----------------------------------------------------------------------------------


def _compared(arms: dict[str, Arm]) -> Results:
    """Return the arms' figures, and what they gain over the first one."""
    answers = {name: list(arm.answers.values()) for name, arm in arms.items()}
    base = _times(answers["off"])
    right = [each.token_ids for each in answers["off"]]
    figures = {}
    for name, arm in arms.items():
        own, stats = _times(answers[name]), arm.store_stats
        figures[name] = own | {
            "mean_gain": base["ttft_mean_s"] / own["ttft_mean_s"],
            "p95_gain": base["ttft_p95_s"] / own["ttft_p95_s"],
            "cached_tokens": sum(each.num_cached_tokens for each in answers[name]),
            "restored_tokens": stats.num_restored_tokens,
            "read_bytes": stats.num_read_bytes,
            "written_bytes": stats.num_written_bytes,
            "dropped": stats.num_dropped,
            "equal_answers": fmean(
                one.token_ids == other for one, other in zip(answers[name], right, strict=True)
            ),
        }
    return {"arms": figures}


def _times(answers: Sequence[Answer]) -> dict[str, float]:
    ttft = [each.ttft_s for each in answers]
    return {
        "ttft_mean_s": fmean(ttft),
        "ttft_median_s": median(ttft),
        "ttft_p95_s": percentile(ttft, 95.0),
    }


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A table a part, a row an arm."""
    for name, part in results["parts"].items():
        yield Table(
            title=f"{name}, large model of {options.large}, {options.threads} threads",
            columns=(
                ("TTFT mean, s", figure("ttft_mean_s", ".3f")),
                ("median, s", figure("ttft_median_s", ".3f")),
                ("p95, s", figure("ttft_p95_s", ".3f")),
                ("gain, mean", figure("mean_gain")),
                ("gain, p95", figure("p95_gain")),
                ("cached", count("cached_tokens")),
                ("restored", count("restored_tokens")),
                ("MB read", figure("read_bytes", ".0f", scale=1e-6)),
                ("MB written", figure("written_bytes", ".0f", scale=1e-6)),
                ("dropped", count("dropped")),
                ("equal answers", figure("equal_answers", ".3f")),
            ),
            entries=part["arms"],
            caption=", ".join(f"{key}: {value:.3g}" for key, value in _facts(part)),
        )


def _facts(part: Results) -> Iterator[tuple[str, float]]:
    return ((key, value) for key, value in part.items() if isinstance(value, int | float))


def goals(results: Results) -> list[Goal]:
    """Return what a folder is to gain, and may cost."""
    parts, found = results["parts"], []
    for arm in ("disk", "restart"):
        if "replay" in parts:
            gain = parts["replay"]["arms"][arm]["p95_gain"]
            found.append(_least(f"replay: p95 off / {arm}", gain, _LEAST_P95_GAIN))
        if "agents" in parts:
            gain = parts["agents"]["arms"][arm]["mean_gain"]
            found.append(_least(f"agents: mean off / {arm}", gain, _LEAST_GAIN))
    if "fits" in parts:
        rate = parts["fits"]["throughput_over_off"].estimate
        added_s = parts["fits"]["added_ttft_s"]
        found.append(_least("fits: throughput disk / off", rate, 1 - _MOST_LOSS))
        found.append(Goal(words="fits: TTFT added, s", measured=added_s, bound=_MOST_ADDED_S))
    for name, part in parts.items():
        equal = min(arm["equal_answers"] for arm in part["arms"].values())
        found.append(_least(f"{name}: answers that are equal", equal, 1.0))
    return found


def _least(words: str, measured: float, bound: float) -> Goal:
    return Goal(words=words, measured=measured, bound=bound, at_least=True)


def _variant(options: Options) -> str:
    return f"{options.large}-bfloat16-{options.threads}-threads"


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, variant=_variant, goals=goals
)

if __name__ == "__main__":
    BENCHMARK.start()
