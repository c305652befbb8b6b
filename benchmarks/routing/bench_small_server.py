"""Is a small model behind a server judged as well as our own, and what does judging it take?

Method: held-out tasks of the demo pair's world, as in bench_routing_quality, without those that
have tools. The same small model answers them greedily three times: in this process's engine, in
another Outrider, and in llama.cpp's server (wheel `xllamacpp`, weights written as GGUF in 32 bits;
left out where it is not installed). The shipped router's answer stage judges each answer by the
log-probabilities that came with it: the first 16 tokens, and all of them. AUROC is the chance that
a right answer is judged better than a wrong one; goal: with 16 tokens of a server's within 0.03 of
our own with the whole answer. Intervals: bootstrap over prompts, 95 %.

Time: a gateway with the server as its small tier, every answer watched and kept (threshold 0),
against the server itself, in turn, streamed. `hold`: the server's own time between its first token
and the 16th, which a watched answer waits by design; `beyond`: what the gateway's first text takes
more than that. For answers with at least 20 tokens; medians over prompts.

Label-free: the routing without a router, on the same tasks in random orders. The large model judges
what is given up, and 1.5 % of what is kept; every order begins knowing nothing. Figures are means
over the orders, `later` those of the second half.

    python -m benchmarks.routing.bench_small_server
"""

import argparse
import asyncio
import importlib.util
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np

from benchmarks.routing.bench_routing_quality import questions_for
from benchmarks.routing.routing_runs import HOLD_BACK_TOKENS, collecting, label
from benchmarks.shared.harness import (
    CACHE,
    argument_parser,
    console,
    milliseconds,
    prepare,
    progress_bar,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.intervals import bootstrap
from benchmarks.shared.record import ROOT
from benchmarks.shared.upstream_servers import (
    HOST,
    Server,
    gateway_server,
    xllamacpp_server,
)
from outrider.gateway.answering.streaming.second_look import shared_tokens
from outrider.gateway.settings.tree import bundled_pair, load_settings
from outrider.gateway.tools.learning.collect.collecting import Collector
from outrider.gateway.tools.learning.collect.data import CollectQuestion
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.logprob_check import LogprobCheck
from outrider.gateway.wiring.upstream import build_upstreams
from outrider.router.dataset import read_labelled_prompts
from outrider.router.features import FloatRows
from outrider.router.label_free import EXPLORE_SHARE, AgreementModel, token_quantile
from outrider.router.scorer import RouterScorer

_TASK_SEED: Final = 20_261_124
_GOAL: Final = 0.03
_NUM_TIMED: Final = 24
_LEAST_TOKENS: Final = 20
_NUM_ORDERS: Final = 20
_WRITER: Final = ROOT / "tests" / "gateway" / "upstream" / "write_gguf.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The small model's answers to the questions: log-probabilities, and which are right."""

    logprobs: Sequence[Sequence[float]]
    is_right: FloatRows
    num_untrusted: int = 0


def auroc(scores: FloatRows, is_right: FloatRows) -> float:
    """The chance that a right answer scores higher than a wrong one; equal scores count half."""
    right, wrong = scores[is_right > 0], scores[is_right == 0]
    if not len(right) or not len(wrong):
        return float("nan")
    return float(
        (right[:, None] > wrong[None, :]).mean() + 0.5 * (right[:, None] == wrong[None, :]).mean()
    )


def judged(
    scorer: RouterScorer, questions: Sequence[CollectQuestion], answers: Answers, most: int | None
) -> FloatRows:
    """The router's quality of each answer by its first `most` tokens; None: by all."""
    qualities = []
    for question, logprobs in zip(questions, answers.logprobs, strict=True):
        seen = logprobs if most is None else logprobs[:most]
        estimate = scorer.estimate_answer(
            scorer.estimate(question.prompt), seen, is_whole=len(seen) == len(logprobs)
        )
        qualities.append(1.0 - estimate.gain)
    return np.array(qualities)


# ---- servers ----------------------------------------------------------------------------------


@contextmanager
def llama_server(small: Path) -> Iterator[Server]:
    """llama.cpp's server with these weights."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.gguf"
        subprocess.run([sys.executable, _WRITER, small, file], check=True, timeout=120)
        with xllamacpp_server(file, python=Path(sys.executable)) as server:
            yield server


@contextmanager
def outrider_server(small: Path) -> Iterator[Server]:
    """Another Outrider with the small model only."""
    options = ("--large", "none", "--small", str(small), "--num-threads", "1")
    with gateway_server([], options=(*options, "--set", "database_url=none")) as server:
        yield server


_KINDS: Final = {"llama.cpp": "llama_cpp", "another Outrider": "outrider"}


async def ask_server(
    name: str, server: Server, questions: Sequence[CollectQuestion], max_tokens: int
) -> Answers:
    """Ask as the watch does, and check that the log-probabilities are the text's."""
    settings = load_settings(
        flags={
            "tiers.device.url": server.url,
            "tiers.device.server": _KINDS[name],
            "models.large": "none",
            "models.small": "none",
        },
        environ={},
    )
    tier = build_upstreams(settings, {}, lambda attempt: None)["device"]
    await tier.start()
    logprobs, is_right, num_untrusted = [], [], 0
    try:
        model = (await tier.models())[0]
        with progress_bar(name, len(questions)) as advance:
            for question in questions:
                call = UpstreamCall(
                    endpoint="chat",
                    document={
                        "messages": _messages(question),
                        "temperature": 0,
                        "max_tokens": max_tokens,
                        "stream": True,
                    },
                    model=model,
                    request_id=question.digest,
                    arrival_s=time.monotonic(),
                    wants_logprobs=True,
                )
                check, seen = LogprobCheck(), list[float]()
                answer = tier.answer(call)
                await answer.begin()
                async with aclosing(answer.chunks()) as chunks:
                    async for chunk in chunks:
                        check.add(chunk)
                        seen += [entry.logprob for entry in chunk.token_logprobs]
                await answer.aclose()
                num_untrusted += check.complaint() is not None
                logprobs.append(seen)
                assert question.check.is_right is not None
                is_right.append(float(question.check.is_right(check.text)))
                advance(f"{np.mean(is_right):.1%} right")
    finally:
        await tier.close()
    return Answers(logprobs=logprobs, is_right=np.array(is_right), num_untrusted=num_untrusted)


def _messages(question: CollectQuestion) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in question.request.messages]


# ---- time -------------------------------------------------------------------------------------


def times_of(name: str, server: Server, questions: Sequence[CollectQuestion]) -> dict[str, Any]:
    """Seconds until the first text: the server's own, and through a gateway that watches it."""
    options = (
        *("--large", "none", "--small", "none", "--set", "database_url=none"),
        *("--set", "tiers.device.local=true", "--set", f"tiers.device.server={_KINDS[name]}"),
        *("--set", "handoff.small=device", "--set", "routing.threshold=0"),
        *("--set", "routing.explore_share=0", "--set", "routing.hold_back_ms=5000"),
    )
    cloud = ("cloud", f"http://{HOST}:9/v1")  # never asked: every answer is kept
    hold_s, beyond_s, plain_s = [], [], []
    with (
        gateway_server([("device", server.url), cloud], options=options) as gateway,
        httpx.Client(timeout=60) as client,
    ):
        for number, question in enumerate(questions):
            arrivals = _arrivals(client, server.url, question, None)
            watched = _arrivals(client, gateway.url, question, "auto")
            if number < 2 or len(arrivals) < _LEAST_TOKENS:
                continue  # warm-up; and what ends within the hold
            held_s = arrivals[HOLD_BACK_TOKENS - 1] - arrivals[0]
            hold_s.append(held_s)
            plain_s.append(arrivals[0])
            beyond_s.append(watched[0] - arrivals[0] - held_s)
            if len(hold_s) == _NUM_TIMED:
                break
    return {
        "num_answers": len(hold_s),
        "server_first_token_s": statistics.median(plain_s),
        "hold_s": statistics.median(hold_s),
        "beyond_s": statistics.median(beyond_s),
    }


def _arrivals(
    client: httpx.Client, url: str, question: CollectQuestion, model: str | None
) -> list[float]:
    """Seconds from sending to each piece of text."""
    name = model or client.get(f"{url}/models").json()["data"][0]["id"]
    body = {"model": name, "messages": _messages(question), "temperature": 0, "stream": True}
    started_s, found = time.perf_counter(), []
    with client.stream("POST", f"{url}/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = msgspec.json.decode(line[6:]).get("choices") or ()
                if any(choice.get("delta", {}).get("content") for choice in choices):
                    found.append(time.perf_counter() - started_s)
    return found


# ---- without labels ---------------------------------------------------------------------------


async def agreements(
    arguments: argparse.Namespace, questions: Sequence[CollectQuestion]
) -> tuple[FloatRows, FloatRows]:
    """Scores of the small model's first tokens, and the share that the large model writes too."""
    scores, shares = [], []
    async with collecting(arguments) as (collector, _):
        with progress_bar("agreement", len(questions)) as advance:
            for question in questions:
                score, share = await _agreement(collector, question)
                scores.append(score)
                shares.append(share)
                advance(f"{np.mean(shares):.1%}")
    return np.array(scores), np.array(shares)


async def _agreement(collector: Collector, question: CollectQuestion) -> tuple[float, float]:
    small, large = [await collector.prepare(question, tier) for tier in ("small", "large")]
    assert small is not None
    assert large is not None
    answer = await collector.answer(small)
    held = answer.token_ids[:HOLD_BACK_TOKENS]
    share = await shared_tokens(collector.engine, large.request, held)
    assert share is not None
    return token_quantile(answer.logprobs[:HOLD_BACK_TOKENS]), share


def label_free(
    scores: FloatRows, shares: FloatRows, weak: FloatRows, strong: FloatRows, target: float
) -> dict[str, float]:
    """Accuracy and the large model's share, learnt anew in each of some random orders."""
    figures = []
    for seed in range(_NUM_ORDERS):
        rng, model = random.Random(seed), AgreementModel(target)
        order = list(range(len(scores)))
        rng.shuffle(order)
        right, is_large = [], []
        for place in order:
            is_weak = scores[place] < model.threshold
            if is_weak or rng.random() < EXPLORE_SHARE:
                model.learn(float(scores[place]), float(shares[place]))
            right.append(strong[place] if is_weak else weak[place])
            is_large.append(float(is_weak))
        half = len(order) // 2
        figures.append(
            (np.mean(right), np.mean(is_large), np.mean(right[half:]), np.mean(is_large[half:]))
        )
    names = ("accuracy", "large_share", "later_accuracy", "later_large_share")
    return dict(zip(names, (float(x) for x in np.mean(figures, axis=0)), strict=True))


# ---- all of it --------------------------------------------------------------------------------


def stage_figures(
    scorer: RouterScorer, questions: Sequence[CollectQuestion], by_name: Mapping[str, Answers]
) -> dict[str, Any]:
    """AUROC of each source of answers, and how far it is from our own whole answers."""
    ours = by_name["our engine"]
    whole = judged(scorer, questions, ours, None)
    best = auroc(whole, ours.is_right)
    figures: dict[str, Any] = {}
    for name, answers in by_name.items():
        held = judged(scorer, questions, answers, HOLD_BACK_TOKENS)
        right = answers.is_right

        def gap(units: Any, held: FloatRows = held, right: FloatRows = right) -> float:
            own = auroc(whole[units], ours.is_right[units])
            return auroc(held[units], right[units]) - own

        figures[name] = {
            "accuracy": float(right.mean()),
            "auroc_held": auroc(held, right),
            "auroc_whole": auroc(judged(scorer, questions, answers, None), right),
            "gap": bootstrap(gap, len(held), seed=0),
            "met": auroc(held, right) >= best - _GOAL,
            "num_untrusted": answers.num_untrusted,
        }
    return figures


def show(results: Mapping[str, Any]) -> None:
    """The tables."""
    show_table(
        "how well right answers are told from wrong ones (AUROC)",
        ["", "right", "16 tokens", "whole", "16 - our whole", "95 %", "goal met", "untrusted"],
        [
            [
                name,
                f"{entry['accuracy']:.1%}",
                f"{entry['auroc_held']:.3f}",
                f"{entry['auroc_whole']:.3f}",
                f"{entry['gap'].estimate:+.3f}",
                f"{entry['gap'].low:+.3f} to {entry['gap'].high:+.3f}",
                verdict(entry["met"]),
                str(entry["num_untrusted"]),
            ]
            for name, entry in results["sources"].items()
        ],
    )
    show_table(
        "time to the first text, ms",
        ["", "answers", "server alone", "hold", "beyond"],
        [
            [
                name,
                str(entry["num_answers"]),
                *(
                    milliseconds(entry[field])
                    for field in ("server_first_token_s", "hold_s", "beyond_s")
                ),
            ]
            for name, entry in results["times"].items()
        ],
    )
    show_table(
        "without a router",
        ["", "accuracy", "large", "later", "large"],
        [
            [name, *(f"{entry[field]:.1%}" if field in entry else "" for field in _FIELDS)]
            for name, entry in results["label_free"].items()
        ],
    )


_FIELDS: Final = ("accuracy", "large_share", "later_accuracy", "later_large_share")


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--router", type=Path, default=bundled_pair() / "router")
    parser.add_argument("--num-prompts", type=int, default=600, help="held-out tasks")
    parser.add_argument("--task-seed", type=int, default=_TASK_SEED)
    parser.add_argument("--max-new", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--max-context", type=int, help="default: the models' own")
    parser.add_argument("--batch", type=int, default=32, help="questions answered at a time")
    parser.add_argument("--targets", type=float, nargs="*", default=[0.7, 0.8, 0.9, 0.95])
    return parser.parse_args()


def main() -> None:
    """Ask, judge, print, write."""
    arguments = _arguments()
    arguments.alphas = []
    prepare(arguments)
    folder = CACHE / "small-server"
    scorer = RouterScorer.load(arguments.router)
    asked: Sequence[CollectQuestion] = [
        question
        for question in questions_for(arguments, scorer, folder)
        if not question.request.tools
    ]
    labels = label(arguments, asked, folder)
    questions = labels.kept
    data = read_labelled_prompts(labels.path)
    assert data.logprobs is not None
    assert data.strong is not None
    by_name = {
        "our engine": Answers(
            logprobs=[list(map(float, row)) for row in data.logprobs], is_right=data.weak
        )
    }
    times: dict[str, Any] = {}
    with ExitStack() as stack:
        servers = {"another Outrider": stack.enter_context(outrider_server(arguments.small))}
        if importlib.util.find_spec("xllamacpp") is not None:
            servers["llama.cpp"] = stack.enter_context(llama_server(arguments.small))
        else:
            console.print("llama.cpp: left out; pip install xllamacpp gguf")
        for name, server in servers.items():
            by_name[name] = asyncio.run(ask_server(name, server, questions, arguments.max_new))
            times[name] = times_of(name, server, questions)
    scores, shares = asyncio.run(agreements(arguments, questions))
    free = {
        "always small": {"accuracy": float(data.weak.mean()), "large_share": 0.0},
        "always large": {"accuracy": float(data.strong.mean()), "large_share": 1.0},
        **{
            f"agreement {target:g}": label_free(scores, shares, data.weak, data.strong, target)
            for target in arguments.targets
        },
    }
    results = {
        "num_prompts": len(questions),
        "hold_back_tokens": HOLD_BACK_TOKENS,
        "explore_share": EXPLORE_SHARE,
        "goal": _GOAL,
        "sources": stage_figures(scorer, questions, by_name),
        "times": times,
        "auroc_of_token_quantile": auroc(scores, data.weak),
        "label_free": free,
    }
    show(results)
    write_results("bench_small_server", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
