"""What does the cascade do with a public small model on real prompts, out of the box?

Method: SmolLM2-135M at four bits (`outrider models get smollm2-135m`) is the small tier of an
ordinary gateway with default settings and without a router; the large one is an upstream server.
That one is scripted: it writes the reference that people gave (real_questions.py), a word at a
time, cut at --max-new words, with a pace of --first-token-ms and --gap-ms. So it is always right
where answers are judged, and what the small model keeps can only cost accuracy: read the figures as
bounds for a large model that is better still than any. 200 questions, 40 of each of five kinds, are
asked one at a time, streamed, greedily, up to --max-new tokens, in the same order of each policy:
the small model alone; `auto` as it comes; `auto` with `routing.cascade = "always"`, which begins
each answer with the small model; and `auto` with `routing.strong_share`. Each policy has a gateway
of its own, started anew. `hold_back_ms` is raised, so that a busy machine
holds 16 tokens too; the default, 250 ms, allows as many at 64 tokens/s.

Reading it: `at once`: the large model answered, the small one was not asked. `handed over`: the
small one began, what it wrote was held back and given up. `kept`: it answered. An answer whose
beginning was sent is never handed over to an upstream server (`routing.mid_stream` is for two
models of one engine). `right`: of the 120 questions whose answers can be judged. `over chance`:
what is right, less what a random choice with the same share for the large model gets right.
`AUROC`: the chance that a right answer of the small model has a higher score than a wrong one, by
its first 16 tokens and by all. Intervals: bootstrap over questions, 95 %. Times are of a machine
that does nothing else, or mean nothing.

    OUTRIDER_DATA=... python -m benchmarks.routing.bench_real_cascade
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.routing.bench_small_server import auroc
from benchmarks.routing.real_answers import WAYS, RealAnswer, ask_all, scripted, wait_for_small
from benchmarks.routing.real_cascade_plot import draw
from benchmarks.routing.real_questions import (
    RealQuestion,
    common_words,
    data_folder,
    load_questions,
)
from benchmarks.routing.routing_policies import mean_interval
from benchmarks.routing.routing_runs import HOLD_BACK_TOKENS
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Results, Table, Text, figure, option
from benchmarks.shared.harness import console
from benchmarks.shared.intervals import Interval, bootstrap
from benchmarks.shared.mock_upstream import MockThread, mock_in_thread
from benchmarks.shared.record import Summary
from benchmarks.shared.upstream_servers import gateway_server
from outrider.gateway.settings.public_models import PUBLIC_MODELS
from outrider.gateway.tools.commands.models.fetching import ModelFetchError, fetch_model
from outrider.router.features import FloatRows
from outrider.router.label_free import text_agreement, token_quantile

_MODEL: Final = "smollm2-135m"
_SMALL: Final = "always small"
_THRESHOLD: Final = re.compile(r"(?:<|>=|reach) (\d\.\d+)")


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    per_kind: int = option(40, "questions of each kind")
    max_new: int = option(128, "longest answer, in tokens")
    first_token_ms: float = option(200.0, "of the large model")
    gap_ms: float = option(10.0, "between two words of the large model")
    strong_share: float = option(0.5, "routing.strong_share of the last policy")
    seed: int = option(0, "of the questions' order")


# ---- asking -----------------------------------------------------------------------------------


def measure(options: Options) -> Results:
    """Return figures by policy, and how well the score tells right answers from wrong ones."""
    questions = load_questions(data_folder(), options.per_kind)
    random.Random(options.seed).shuffle(questions)
    script = scripted(
        questions,
        max_words=options.max_new,
        first_token_s=options.first_token_ms / 1e3,
        gap_s=options.gap_ms / 1e3,
    )
    _fetch()
    with mock_in_thread(script) as large:
        asked = {
            name: _asked(large, questions, model, settings, options.max_new)
            for name, model, settings in _policies(options)
        }
    small = asked[_SMALL].answers
    is_right = judged(questions, small)
    scores = {
        "the first 16 tokens": scores_of(small, HOLD_BACK_TOKENS),
        "all tokens": scores_of(small, None),
    }
    return {
        "num_questions": len(questions),
        "num_judged": int(np.isfinite(is_right).sum()),
        "policies": {name: policy_figures(each, is_right) for name, each in asked.items()},
        "kinds": kinds_of(questions, is_right, asked),
        "scores": {name: score_figures(questions, each, is_right) for name, each in scores.items()},
        "curve": curve_of(scores["the first 16 tokens"], is_right),
    }


def _fetch() -> None:
    try:
        fetch_model(PUBLIC_MODELS[_MODEL], lambda stage, _: console.print(stage))
    except ModelFetchError as error:
        raise SystemExit(f"{_MODEL}: {error}") from error


def _policies(options: Options) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each policy's name, the model that is asked for, and the gateway's settings."""
    share = f"routing.strong_share={options.strong_share:g}"
    yield _SMALL, "small", ()
    yield "auto, as it comes", "auto", ()
    yield "auto, each begun", "auto", ("--set", "routing.cascade=always")
    yield f"auto, {share.partition('.')[2]}", "auto", ("--set", share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A policy's answers, and what is known behind them."""

    answers: Sequence[RealAnswer]
    threshold: float | None
    """The score from which on an answer is kept, as the last reason tells it."""
    num_predictions: int
    """Requests to the large model that brought the small one's text along."""


def _asked(
    large: MockThread,
    questions: Sequence[RealQuestion],
    model: str,
    settings: tuple[str, ...],
    max_tokens: int,
) -> Asked:
    """Ask all questions of a gateway that is started for them."""
    large.requests.clear()
    given = ("--large", "none", "--small", _MODEL, "--set", "database_url=none", *settings)
    with gateway_server([("cloud", large.url)], options=given) as server:
        wait_for_small(server)
        answers = ask_all(server, questions, model=model, max_tokens=max_tokens)
    sent = [request.document for request in large.requests]
    return Asked(
        answers=answers,
        threshold=_last_threshold(answers),
        num_predictions=sum("prediction" in document for document in sent),
    )


def _last_threshold(answers: Sequence[RealAnswer]) -> float | None:
    told = [found for answer in answers if (found := _THRESHOLD.search(answer.reason))]
    return float(told[-1].group(1)) if told else None


# ---- figures ----------------------------------------------------------------------------------


def judged(questions: Sequence[RealQuestion], answers: Sequence[RealAnswer]) -> FloatRows:
    """Return 1 for each right answer, 0 for each wrong one; NaN where nothing judges."""
    return np.array(
        [
            float("nan") if question.is_right is None else float(question.is_right(answer.text))
            for question, answer in zip(questions, answers, strict=True)
        ]
    )


def scores_of(answers: Sequence[RealAnswer], most: int | None) -> FloatRows:
    """Return the label-free score of each answer by its first `most` tokens; None: by all."""
    return np.array([token_quantile(answer.logprobs[:most]) for answer in answers])


def policy_figures(asked: Asked, small_right: FloatRows) -> dict[str, Any]:
    """Return accuracy, what it gains over chance, shares, tokens and times of a policy.

    `small_right`: whether the small model's answers are right; the large one's always are.
    """
    answers = asked.answers
    is_known = np.isfinite(small_right)
    is_large = np.array([answer.way != "kept" for answer in answers])
    right = np.where(is_large, 1.0, small_right)[is_known]
    own_large, own_small = is_large[is_known], small_right[is_known]

    def over_chance(units: Any) -> float:
        share = own_large[units].mean()
        return float(right[units].mean() - share - (1.0 - share) * own_small[units].mean())

    return {
        "right": mean_interval(right),
        "large_share": float(is_large.mean()),
        "large_share_of_judged": float(own_large.mean()),
        "over_chance": bootstrap(over_chance, len(right)),
        "threshold": asked.threshold,
        "num_predictions": asked.num_predictions,
        "small_tokens_kept": sum(a.num_tokens for a in answers if a.way == "kept"),
        "small_tokens_given_up": sum(a.discarded_tokens for a in answers),
        "ways": {way: _way_figures(answers, way) for way in WAYS},
        "first_s": Summary.of([answer.first_s for answer in answers]),
        "whole_s": Summary.of([answer.whole_s for answer in answers]),
    }


def _way_figures(answers: Sequence[RealAnswer], way: str) -> dict[str, Any]:
    own = [answer for answer in answers if answer.way == way]
    if not own:
        return {"share": 0.0}
    return {
        "share": len(own) / len(answers),
        "held_tokens": Summary.of([float(answer.held_tokens) for answer in own]),
        "first_s": Summary.of([answer.first_s for answer in own]),
        "whole_s": Summary.of([answer.whole_s for answer in own]),
    }


def kinds_of(
    questions: Sequence[RealQuestion], is_right: FloatRows, asked: Mapping[str, Asked]
) -> dict[str, dict[str, Any]]:
    """Return, for each kind, how good the small model is and what the policies keep of it."""
    small = asked[_SMALL].answers
    scores = scores_of(small, HOLD_BACK_TOKENS)
    pairs = [(answer, each.reference) for answer, each in zip(small, questions, strict=True)]
    common = np.array([common_words(answer.text, text) for answer, text in pairs])
    held = ["".join(answer.tokens[:HOLD_BACK_TOKENS]) for answer in small]
    agreement = np.array(
        [text_agreement(begun, text) for begun, (_, text) in zip(held, pairs, strict=True)]
    )
    kinds = np.array([question.kind for question in questions])
    found = {}
    for kind in sorted(set(kinds)):
        own = kinds == kind
        right = is_right[own]
        found[kind] = {
            "num": int(own.sum()),
            "small_right": None if np.isnan(right).any() else float(right.mean()),
            "common_words": float(common[own].mean()),
            "agreement_held": float(agreement[own].mean()),
            "score": Summary.of(scores[own].tolist()),
            "kept": {name: _kept_share(each, own) for name, each in asked.items()},
        }
    return found


def _kept_share(asked: Asked, own: Any) -> float:
    return float(np.array([answer.way == "kept" for answer in asked.answers])[own].mean())


def score_figures(
    questions: Sequence[RealQuestion], scores: FloatRows, is_right: FloatRows
) -> dict[str, Any]:
    """Return the score's quantiles, and AUROC: of all judged questions, and within each kind."""
    is_known = np.isfinite(is_right)
    kinds = np.array([question.kind for question in questions])
    parts = {"all": is_known}
    parts |= {kind: is_known & (kinds == kind) for kind in sorted(set(kinds[is_known]))}
    return {
        "quantiles": np.quantile(scores, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist(),
        "greatest": float(scores.max()),
        "auroc": {name: _auroc(scores[part], is_right[part]) for name, part in parts.items()},
    }


def _auroc(scores: FloatRows, is_right: FloatRows) -> Interval | None:
    """Return None where all answers are right, or all wrong."""
    if len(set(is_right.tolist())) == 1:
        return None

    def figure_of(units: Any) -> float:
        found = auroc(scores[units], is_right[units])
        return 0.5 if np.isnan(found) else found

    return bootstrap(figure_of, len(scores))


def curve_of(scores: FloatRows, is_right: FloatRows) -> list[tuple[float, float]]:
    """Return (large share, accuracy) of every threshold of the score, on the judged questions."""
    is_known = np.isfinite(is_right)
    order = np.argsort(scores[is_known])
    right = is_right[is_known][order]
    number = len(right)
    return [(cut / number, float(cut + right[cut:].sum()) / number) for cut in range(number + 1)]


# ---- for people -------------------------------------------------------------------------------


def _interval(key: str) -> Text:
    def text(entry: Mapping[str, Any]) -> str:
        found = entry[key]
        return f"{100 * found.estimate:.1f} ({100 * found.low:.0f} to {100 * found.high:.0f})"

    return text


def _share_of(way: str) -> Text:
    return lambda entry: f"{entry['ways'][way]['share']:.1%}"


def tables(options: Options, results: Results) -> Iterator[Table]:
    """Policies, the times of the ways, kinds of questions, the score."""
    yield Table(
        title=f"{results['num_questions']} questions, {results['num_judged']} of them judged",
        columns=(
            ("right, %", _interval("right")),
            ("over chance", _interval("over_chance")),
            *((way, _share_of(way)) for way in WAYS),
            ("kept from", figure("threshold")),
            ("given up", figure("small_tokens_given_up", ".0f")),
            ("first, ms", benchmark.milliseconds("first_s", ".0f")),
            ("whole, ms", benchmark.milliseconds("whole_s", ".0f")),
        ),
        entries=results["policies"],
    )
    yield Table(
        title="by way of answering",
        columns=(
            ("share", figure("share")),
            ("held", figure("held_tokens", ".0f")),
            ("first, ms", benchmark.milliseconds("first_s", ".0f")),
            ("whole, ms", benchmark.milliseconds("whole_s", ".0f")),
        ),
        entries={
            f"{name}: {way}": entry
            for name, policy in results["policies"].items()
            for way, entry in policy["ways"].items()
            if entry["share"]
        },
    )
    yield Table(
        title="by kind of question",
        columns=(
            ("questions", figure("num", ".0f")),
            ("small right", figure("small_right")),
            ("common words", figure("common_words")),
            ("agreement", figure("agreement_held")),
            ("score", figure("score")),
        ),
        entries=results["kinds"],
    )
    yield Table(
        title="AUROC of the score",
        columns=tuple(
            (part, _auroc_text(part)) for part in results["scores"]["all tokens"]["auroc"]
        ),
        entries=results["scores"],
    )


def _auroc_text(part: str) -> Text:
    def text(entry: Mapping[str, Any]) -> str:
        found = entry["auroc"][part]
        return "" if found is None else str(found)

    return text


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, variant=_MODEL, draw=draw
)

if __name__ == "__main__":
    BENCHMARK.start()
