"""Which stage of a router brings how much: text, sentence encoder, hidden state, begun answer?

Method: a router is trained with all stages that its labels allow, each kept by the rule of
`outrider router train`: it is nearer to the labels on held-out folds. MMLU and GSM8K (text and
encoder) are trained on their gold file and judged on their dev file; then five times on random
parts of both files together, as large as these two, because one split of so few prompts is mostly
chance. The demo pair's router is trained on held-out tasks of its own world and judged on others;
its answers are kept under runs/. The encoder is timed on texts of 64 and 128 tokens in processor
time of one thread; for AVX2 run it with OPENBLAS_CORETYPE=Haswell, which numpy's products obey.

Reading it: `folds` is the squared error of the expected gain on held-out folds, where lower is
better and which decides; `APGR` on new prompts, 0.5 is chance; `gain` what the stage adds to the
text's, with the 95 % interval of a paired bootstrap over prompts. A stage that is left out has no
APGR. `resampled`: the mean over the five parts, with the mean of their intervals.

    python -m benchmarks.routing.bench_features --encoder FOLDER|PACKAGE --data DATA
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing.features_plot import draw
from benchmarks.routing.routing_runs import HOLD_BACK_TOKENS, label
from benchmarks.shared.harness import (
    CACHE,
    argument_parser,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    write_results,
)
from outrider.draft.training.tasks.files import write_tasks
from outrider.gateway.tools.learning.collect.data import read_questions
from outrider.router.calibration import StageRows
from outrider.router.dataset import LabelledPrompts, read_labelled_prompts
from outrider.router.encoder.sentence import EmbeddedTexts, SentenceEncoder
from outrider.router.estimator import train_router
from outrider.router.evaluation import BootstrapInterval, apgr
from outrider.router.features import FloatRows
from outrider.router.stages import stage_rows

_TRAIN_SEED: Final = 20_261_130
_TEST_SEED: Final = 20_261_121
_TIMED_TOKENS: Final = (64, 128)
_RUNS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """A stage on prompts that its router has not seen."""

    apgr: BootstrapInterval
    gain: BootstrapInterval
    """Over the text's."""


def figures_of(rows: StageRows, num_resamples: int, whole: StageRows) -> dict[str, StageFigures]:
    """By stage; `whole`: the same prompts, whole answers read."""
    gains = {"text": 1.0 - rows.text}
    if "prompt" in rows.stages:
        gains["prompt"] = 1.0 - rows.prompt
    if rows.answer is not None and whole.answer is not None:
        gains[f"answer, {HOLD_BACK_TOKENS} tokens"] = 1.0 - rows.answer
        gains["answer, whole"] = 1.0 - whole.answer
    areas = {name: bootstrap(gain, rows, num_resamples) for name, gain in gains.items()}
    return {
        name: StageFigures(apgr=_interval(area), gain=_interval(area - areas["text"]))
        for name, area in areas.items()
    }


def bootstrap(gain: FloatRows, rows: StageRows, num_resamples: int) -> FloatRows:
    """APGR of the prompts, then of resamples of them, the same ones at each call."""
    rng = np.random.default_rng(0)
    count = len(gain)
    picks = [np.arange(count), *(rng.integers(0, count, count) for _ in range(num_resamples))]
    return np.array([apgr(gain[pick], rows.weak[pick], rows.strong[pick]) for pick in picks])


def _interval(samples: FloatRows) -> BootstrapInterval:
    low, high = np.quantile(samples[1:] if len(samples) > 1 else samples, (0.025, 0.975))
    return BootstrapInterval(value=float(samples[0]), low=float(low), high=float(high))


def judged(train: LabelledPrompts, test: LabelledPrompts, num_resamples: int) -> dict[str, Any]:
    """Train on the one, judge on the other."""
    scorer = train_router(train).scorer
    rows, whole = (
        stage_rows(scorer, test, hold_back_tokens=tokens) for tokens in (HOLD_BACK_TOKENS, None)
    )
    kept = {"encoder": scorer.encoder, "probe": scorer.probe, "answer": scorer.answer}
    return {
        "num_train": len(train.prompts),
        "num_test": len(test.prompts),
        "folds": scorer.training["held_out"],
        "kept": [name for name, stage in kept.items() if stage is not None],
        "stages": figures_of(rows, num_resamples, whole),
    }


def resampled(
    gold: LabelledPrompts, dev: LabelledPrompts, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Means over random parts of both files together, as large as these are."""
    everything = _joined(gold, dev)
    parts = []
    for number in range(arguments.parts):
        order = np.random.default_rng(number).permutation(len(everything.prompts))
        train, test = order[: len(gold.prompts)], order[len(gold.prompts) :]
        with console.status(f"part {number + 1} of {arguments.parts}"):
            parts.append(judged(_at(everything, train), _at(everything, test), arguments.resamples))
    ends = ["text", "prompt"] if any(part["kept"] for part in parts) else ["text"]
    # A part that leaves the encoder out is judged by its text.
    found = {
        name: [part["stages"].get(name, part["stages"]["text"]) for part in parts] for name in ends
    }
    return {
        "kept": [part["kept"] for part in parts],
        "stages": {
            name: StageFigures(
                apgr=_mean([entry.apgr for entry in entries]),
                gain=_mean([entry.gain for entry in entries]),
            )
            for name, entries in found.items()
        },
    }


def _mean(intervals: Sequence[BootstrapInterval]) -> BootstrapInterval:
    low, value, high = (
        float(np.mean([getattr(one, name) for one in intervals]))
        for name in ("low", "value", "high")
    )
    return BootstrapInterval(value=value, low=low, high=high)


def _joined(one: LabelledPrompts, other: LabelledPrompts) -> LabelledPrompts:
    assert one.strong is not None
    assert other.strong is not None
    embeddings = None
    if one.embeddings is not None and other.embeddings is not None:
        rows = np.concatenate((one.embeddings.rows, other.embeddings.rows))
        embeddings = EmbeddedTexts(id=one.embeddings.id, rows=rows)
    return replace(
        one,
        prompts=[*one.prompts, *other.prompts],
        weak=np.concatenate((one.weak, other.weak)),
        strong=np.concatenate((one.strong, other.strong)),
        embeddings=embeddings,
    )


def _at(data: LabelledPrompts, places: NDArray[np.intp]) -> LabelledPrompts:
    """Return the rows at these places."""
    changes: dict[str, Any] = {}
    for name in data.__dataclass_fields__:
        values = getattr(data, name)
        if isinstance(values, np.ndarray):
            changes[name] = values[places]
        elif isinstance(values, list):
            changes[name] = [values[place] for place in places.tolist()]
        elif isinstance(values, EmbeddedTexts):
            changes[name] = EmbeddedTexts(id=values.id, rows=values.rows[places])
    return replace(data, **changes)


def with_encoder(data: LabelledPrompts, encoder: SentenceEncoder | None) -> LabelledPrompts:
    """Return the data with embeddings, where there is an encoder."""
    if encoder is None:
        return data
    with console.status(f"embedding {len(data.prompts):,} prompts"):
        return replace(data, embeddings=encoder.embed_all(data.prompts))


def labelled_files(
    arguments: argparse.Namespace, encoder: SentenceEncoder | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """MMLU and GSM8K, where their files are."""
    for name in ("mmlu", "gsm8k"):
        files = [arguments.data / "routing" / f"{name}_{part}.csv" for part in ("gold", "dev")]
        if not all(file.is_file() for file in files):
            console.print(f"{name}: left out; {files[0]} or {files[1]} is missing")
            continue
        gold, dev = (with_encoder(read_labelled_prompts(file), encoder) for file in files)
        with console.status(f"training a router on {name}"):
            found = judged(gold, dev, arguments.resamples)
        yield name, {**found, "resampled": resampled(gold, dev, arguments)}


def demo_pair(arguments: argparse.Namespace, encoder: SentenceEncoder | None) -> dict[str, Any]:
    """The shipped pair on tasks of its own world."""
    folder = CACHE / "routing-features"
    data = {}
    for part, seed, count in (
        ("train", _TRAIN_SEED, arguments.num_train),
        ("test", _TEST_SEED, arguments.num_test),
    ):
        (folder / part).mkdir(parents=True, exist_ok=True)
        path = folder / part / f"questions-{seed}-{count}.jsonl"
        write_tasks(path, num_rows=count, seed=seed)
        labels = label(arguments, read_questions(path), folder / part)
        data[part] = read_labelled_prompts(labels.path)
    known = set(data["train"].prompts)
    new = np.array([prompt not in known for prompt in data["test"].prompts])
    data["test"] = _at(data["test"], np.flatnonzero(new))
    train, test = (with_encoder(data[part], encoder) for part in ("train", "test"))
    with console.status("training a router on the demo pair"):
        return judged(train, test, arguments.resamples)


def time_encoder(encoder: SentenceEncoder) -> dict[str, Any]:
    """Processor time of one embedding, by the number of tokens."""
    times = {}
    for count in _TIMED_TOKENS:
        ids = list(range(1000, 1000 + count))
        work = partial(encoder.bert.embed, ids)
        times[count] = sorted(_thread_s(work) for _ in range(_RUNS))
    long_text = "What is the capital of France? " * 3_400
    encoder.embed(long_text)
    return {
        "fingerprint": encoder.id.fingerprint,
        "dimension": encoder.id.dimension,
        "depth": encoder.id.depth,
        "embed_p50_s": {count: found[_RUNS // 2] for count, found in times.items()},
        "text_of_100000_s": _thread_s(lambda: encoder.embed(long_text)),
    }


def _thread_s(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def show(results: Mapping[str, Any]) -> None:
    """The tables."""
    for name, found in results["data"].items():
        rows = [
            [
                stage,
                f"{entry.apgr.value:.3f}",
                _range(entry.apgr),
                f"{entry.gain.value:+.3f}",
                _range(entry.gain),
            ]
            for kind in (found, found.get("resampled", {"stages": {}}))
            for stage, entry in _named(kind, is_resampled=kind is not found)
        ]
        folds = ", ".join(
            f"{key} {entry['gain_error']:.4f}" for key, entry in found["folds"].items()
        )
        caption = f"kept: {', '.join(found['kept']) or 'the text alone'}; folds: {folds}"
        show_table(name, ["", "APGR", "95 %", "gain", "95 %"], rows, caption=caption)
    if results["encoder"] is not None:
        console.print(results["encoder"])


def _named(found: Mapping[str, Any], *, is_resampled: bool) -> Iterator[tuple[str, StageFigures]]:
    for stage, entry in found["stages"].items():
        yield (f"{stage}, resampled" if is_resampled else stage), entry


def _range(found: BootstrapInterval) -> str:
    return f"{found.low:.3f} to {found.high:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Train, judge, write the results and the plot."""
    parser = argument_parser(__doc__)
    parser.add_argument("--encoder", type=Path, help="folder or package; default: no encoder")
    parser.add_argument("--data", type=Path, help="holds routing/*.csv; default: $OUTRIDER_DATA")
    parser.add_argument("--num-train", type=int, default=3000, help="tasks of the demo pair")
    parser.add_argument("--num-test", type=int, default=1000, help="tasks of the demo pair")
    parser.add_argument("--parts", type=int, default=5, help="of gold and dev together")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap")
    parser.add_argument("--quick", action="store_true", help="only to see that everything works")
    parser.set_defaults(max_new=256, batch=32, alphas=[], max_context=None)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.num_train, arguments.num_test, arguments.parts = 400, 96, 1
        arguments.resamples = 50
    arguments.data = arguments.data or Path(os.environ.get("OUTRIDER_DATA", "data"))
    prepare(arguments)
    encoder = None if arguments.encoder is None else SentenceEncoder.load(str(arguments.encoder))
    results: dict[str, Any] = {
        "encoder": None if encoder is None else time_encoder(encoder),
        "data": dict(labelled_files(arguments, encoder)),
    }
    results["data"]["demo pair"] = demo_pair(arguments, encoder)
    show(results)
    path = write_results("bench_features", variant_name(arguments), results, arguments)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    start(main)
