import json
import pickle
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from outrider.router.answer_features import NUM_ANSWER_FEATURES, num_answer_inputs
from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.dataset import LabelledPrompts
from outrider.router.estimates import MAX_LOGIT, LinearStage, QualityEstimate
from outrider.router.estimator import TrainedRouter
from outrider.router.features import FeatureConfig
from outrider.router.files import RouterFiles, read_files, write_files
from outrider.router.scorer import (
    RouterFileError,
    RouterScorer,
    prompt_hashes,
)

SMALL = FeatureConfig(num_char_features=64, num_word_features=64)


@pytest.fixture(scope="session")
def stages_folder(tmp_path_factory: pytest.TempPathFactory, trained_stages: TrainedRouter) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    trained_stages.scorer.save(folder)
    return folder


@pytest.fixture
def folder(stages_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stages_folder, tmp_path / "router"))


def edit_config(folder: Path, **changes: object) -> None:
    """Change values and sign the file anew: what a careful forger would do."""
    files = read_files(folder)
    write_files(folder, RouterFiles(config={**files.config, **changes}, arrays=files.arrays))


def edit_arrays(folder: Path, **changes: np.ndarray | None) -> None:
    files = read_files(folder)
    arrays = {**files.arrays, **changes}
    kept = {
        name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None
    }
    write_files(folder, RouterFiles(config=files.config, arrays=kept))


def text_scorer(**changes: Any) -> RouterScorer:
    values: dict[str, Any] = {
        "features": SMALL,
        "weight": np.zeros((2, SMALL.num_features)),
        "bias": np.array([0.5, 1.5]),
        "threshold": 0.5,
    }
    return RouterScorer(**(values | changes))


def linear(num_inputs: int, num_heads: int = 2) -> LinearStage:
    return LinearStage(weight=np.ones((num_heads, num_inputs)), bias=np.zeros(num_heads))


def assert_same(left: QualityEstimate, right: QualityEstimate) -> None:
    assert left.small == pytest.approx(right.small, abs=1e-6)
    assert left.large == pytest.approx(right.large, abs=1e-6)


def test_saved_and_loaded_scores_are_equal(
    stages_folder: Path, trained_stages: TrainedRouter, answered_data: LabelledPrompts
) -> None:
    loaded, scorer = RouterScorer.load(stages_folder), trained_stages.scorer
    assert answered_data.hidden is not None
    assert answered_data.logprobs is not None
    for text in ("", "What is 12 + 7?", "What is 555555 + 666666?", "Tell me a joke."):
        estimates = [router.estimate(text) for router in (loaded, scorer)]
        assert_same(*estimates)
        for state, logprobs in zip(answered_data.hidden[:5], answered_data.logprobs, strict=False):
            on_prompt = [
                router.estimate_prompt(estimate, state)
                for router, estimate in zip((loaded, scorer), estimates, strict=True)
            ]
            assert_same(*on_prompt)
            assert on_prompt[0] != estimates[0]
            on_answer = [
                router.estimate_answer(estimate, logprobs, is_whole=True)
                for router, estimate in zip((loaded, scorer), on_prompt, strict=True)
            ]
            assert_same(*on_answer)
            assert on_answer[0] != on_prompt[0]
    for name in ("threshold", "training", "pair", "calibration", "features", "hidden_size"):
        assert getattr(loaded, name) == getattr(scorer, name), name
    assert np.array_equal(loaded.prompt_hashes, scorer.prompt_hashes)


def test_the_files_are_small(router_folder: Path) -> None:
    assert sorted(path.name for path in router_folder.iterdir()) == [
        "router.json",
        "router.safetensors",
    ]
    assert sum(path.stat().st_size for path in router_folder.iterdir()) < 300_000


def test_serving_imports_neither_scikit_learn_nor_torch(stages_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from outrider.router.scorer import RouterScorer;"
        f"scorer = RouterScorer.load(Path({str(stages_folder)!r}));"
        "text = scorer.estimate('What is 1 + 2?');"
        "prompt = scorer.estimate_prompt(text, [5.0] * 6);"
        "print(scorer.estimate_answer(prompt, [-0.1], is_whole=False).small > 0.5);"
        "print([name for name in ('sklearn', 'scipy', 'torch') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[:2] == ["True", "[]"]


def test_gain_and_quality() -> None:
    assert QualityEstimate(small=0.7, large=0.9).gain == pytest.approx(0.2)
    assert QualityEstimate(small=0.7, large=0.9).quality == pytest.approx(0.8)
    assert QualityEstimate(small=0.9, large=0.7).quality == 1.0
    assert QualityEstimate(small=0.7).quality == pytest.approx(0.7)


@given(st.floats(0.0, 1.0), st.one_of(st.none(), st.floats(0.0, 1.0)))
def test_logits_are_bounded_and_keep_the_probability(small: float, large: float | None) -> None:
    estimate = QualityEstimate(small=small, large=large)
    logits = estimate.logits
    assert len(logits) == (1 if large is None else 2)
    assert max(map(abs, logits)) <= MAX_LOGIT
    assert 1.0 / (1.0 + np.exp(-logits[0])) == pytest.approx(small, abs=1e-5)


def test_extreme_weights_do_not_overflow() -> None:
    for bias in (-1e6, 1e6):
        scorer = text_scorer(bias=np.array([bias, bias]))
        assert scorer.estimate("x").small == (0.0 if bias < 0 else 1.0)


def test_without_a_stage_or_its_input_the_estimate_stays() -> None:
    plain = text_scorer()
    estimate = plain.estimate("x")
    assert plain.hidden_size is None
    assert plain.estimate_prompt(estimate, [1.0]) is estimate
    assert plain.estimate_answer(estimate, [-1.0], is_whole=True) is estimate
    scorer = text_scorer(probe=linear(2 + 3), answer=linear(num_answer_inputs(2)))
    assert scorer.hidden_size == 3
    for state in (None, [], [1.0, 2.0], [1.0, np.nan, 2.0], [1.0, np.inf, 2.0]):
        assert scorer.estimate_prompt(estimate, state) is estimate
    assert scorer.estimate_answer(estimate, [], is_whole=False) is estimate
    assert scorer.estimate_answer(estimate, [], is_whole=True) is not estimate


def test_the_probe_sees_logits_and_state() -> None:
    weight = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, -1.0]])
    probe = LinearStage(weight=weight, bias=np.array([0.1, 0.2]))
    scorer = text_scorer(probe=probe)
    found = scorer.estimate_prompt(scorer.estimate("x"), (2.0, 3.0))
    logits = np.array([0.5 + 0.5 * 2.0 + 0.1, 1.5 - 3.0 + 0.2])
    assert found.logits == pytest.approx(logits.tolist())


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40),
    st.booleans(),
    st.floats(0.0, 1.0),
)
@settings(max_examples=100, deadline=None)
def test_no_numbers_make_the_answer_stage_fail(
    logprobs: list[float], is_whole: bool, small: float
) -> None:
    scorer = text_scorer(answer=linear(num_answer_inputs(2)))
    estimate = QualityEstimate(small=small, large=1.0)
    found = scorer.estimate_answer(estimate, logprobs, is_whole=is_whole)
    assert 0.0 <= found.small <= 1.0
    assert 0.0 <= found.quality <= 1.0


def test_calibration_sets_the_threshold(trained_stages: TrainedRouter) -> None:
    scorer = trained_stages.scorer
    assert scorer.calibration is not None
    assert scorer.threshold == scorer.calibration.chosen.threshold
    other = replace(scorer.calibration, chosen=scorer.calibration.points[0])
    moved = scorer.with_calibration(other)
    assert moved.threshold == other.chosen.threshold != scorer.threshold
    with pytest.raises(ValueError, match="is not the calibration's"):
        replace(scorer, threshold=0.123)


def test_prompts_of_training_are_known(trained_stages: TrainedRouter) -> None:
    known = "What is 1 + 2?"
    scorer = replace(trained_stages.scorer, prompt_hashes=prompt_hashes([known]))
    assert scorer.was_trained_on([known, f" {known}\n", "what is 1 + 2?", "\ud800"]).tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert scorer.was_trained_on([]).tolist() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weight": np.zeros((1, 3)), "bias": np.zeros(1)}, "weight has shape"),
        ({"weight": np.zeros((3, SMALL.num_features)), "bias": np.zeros(3)}, "bias has shape"),
        ({"bias": np.zeros((1, 1))}, "bias has shape"),
        ({"weight": np.full((2, SMALL.num_features), np.nan)}, "not finite"),
        ({"bias": np.array([np.inf, 0.0])}, "not finite"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"pair": ""}, "two fingerprints"),
        ({"pair": "x" * 101}, "two fingerprints"),
        ({"probe": linear(2)}, "no hidden state"),
        ({"probe": linear(8, num_heads=1)}, "probe has 1 heads"),
        ({"probe": linear(2**18)}, "no hidden state"),
        ({"answer": linear(NUM_ANSWER_FEATURES)}, "answer has"),
        ({"prompt_hashes": np.zeros(2, dtype=np.uint64)}, "ascending"),
        ({"prompt_hashes": np.zeros(2)}, "prompt_hashes are float64"),
    ],
)
def test_impossible_parts_are_refused(changes: dict[str, object], why: str) -> None:
    assert text_scorer(threshold=ALWAYS_LARGE).threshold == ALWAYS_LARGE
    with pytest.raises(ValueError, match=why):
        text_scorer(**changes)


def test_an_impossible_layer_is_refused() -> None:
    for weight, bias in (
        (np.zeros((2, 3)), np.zeros(1)),
        (np.zeros(3), np.zeros(3)),
        (np.full((1, 2), np.inf), np.zeros(1)),
    ):
        with pytest.raises(ValueError, match=r"has shape|not finite"):
            LinearStage(weight=weight, bias=bias)


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(RouterFileError, match=r"router\.json: No such file"):
        RouterScorer.load(tmp_path / "nothing")
    (folder / "router.safetensors").unlink()
    with pytest.raises(RouterFileError, match=r"router\.safetensors: No such file"):
        RouterScorer.load(folder)


@pytest.mark.parametrize("name", ["router.json", "router.safetensors"])
@pytest.mark.parametrize(
    "content",
    [b"", pickle.dumps({"weight": [1.0]}), b"\x00" * 64, b"{}", b"[" * 10_000, b'{"format": NaN}'],
)
def test_anything_else_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(RouterFileError, match="outrider router train"):
        RouterScorer.load(folder)


@pytest.mark.parametrize(("name", "size_mib"), [("router.json", 2), ("router.safetensors", 65)])
def test_files_that_are_too_large_are_not_read(folder: Path, name: str, size_mib: int) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(size_mib * 2**20)
    with pytest.raises(RouterFileError, match="at most"):
        RouterScorer.load(folder)


def test_version_one_says_what_to_do(folder: Path) -> None:
    edit_config(folder, version=1)
    with pytest.raises(RouterFileError, match=r"unknown version 1.*train the router again"):
        RouterScorer.load(folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "other"}, "not a router"),
        ({"version": 5}, "unknown version 5; available: 2, 3, 4"),
        ({"feature_version": 99}, "unknown feature_version 99"),
        ({"answer_feature_version": 0}, "unknown answer_feature_version 0"),
        ({"heads": ["strong"]}, "heads"),
        ({"heads": ["weak"]}, "2 heads in the weights"),
        ({"threshold": "high"}, "not a number"),
        ({"threshold": True}, "not a number"),
        ({"threshold": 7}, "threshold=7"),
        ({"threshold": 0.5}, "is not the calibration's"),
        ({"features": {}}, "FeatureConfig must name"),
        ({"features": []}, "must be a JSON object"),
        ({"training": None}, '"training" must be a JSON object'),
        ({"pair": 3}, "pair=3"),
        ({"calibration": {}}, "Calibration must name"),
        ({"surprise": 1}, "must name"),
    ],
)
def test_a_changed_config_is_refused(folder: Path, changes: dict[str, object], why: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(RouterFileError, match=why):
        RouterScorer.load(folder)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("stage", "mood", "stage='mood'"),
        ("quality_deciles", [0.1, "x"], "is not a finite number"),
        ("quality_deciles", 3, "must be a list"),
        ("points", [{}], "OperatingPoint must name"),
        ("chosen", None, "must be a JSON object"),
    ],
)
def test_a_changed_calibration_is_refused(folder: Path, name: str, value: object, why: str) -> None:
    calibration = read_files(folder).config["calibration"]
    edit_config(folder, calibration=calibration | {name: value})
    with pytest.raises(RouterFileError, match=why):
        RouterScorer.load(folder)


@pytest.mark.parametrize("band", [[0.1], [0.1, 0.2, 0.3], ["a", "b"], 0.5])
def test_a_changed_band_is_refused(folder: Path, band: object) -> None:
    calibration = read_files(folder).config["calibration"]
    chosen = calibration["chosen"] | {"band": band}
    edit_config(folder, calibration=calibration | {"chosen": chosen})
    with pytest.raises(RouterFileError, match="band"):
        RouterScorer.load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_char_features", 64), ("num_char_features", True), ("max_head_chars", 99.5)],
)
def test_a_changed_feature_size_is_refused(folder: Path, name: str, value: object) -> None:
    features = read_files(folder).config["features"]
    edit_config(folder, features=features | {name: value})
    with pytest.raises(RouterFileError):
        RouterScorer.load(folder)


def test_tampered_weights_are_refused(folder: Path, stages_folder: Path) -> None:
    arrays = read_files(stages_folder).arrays
    spoiled = arrays["weight"].copy()
    spoiled[0, 0] = np.nan
    cases: tuple[tuple[dict[str, np.ndarray | None], str], ...] = (
        ({"weight": spoiled}, "not finite"),
        ({"weight": arrays["weight"][:, :-1].copy()}, "has shape"),
        ({"bias": None}, "the weights hold"),
        ({"probe_bias": None}, "the weights hold"),
        ({"probe_weight": arrays["probe_weight"][:1].copy()}, "has shape"),
        ({"answer_weight": arrays["answer_weight"][:, 1:].copy()}, "answer has"),
        ({"prompt_hashes": arrays["prompt_hashes"][::-1].copy()}, "ascending"),
        ({"prompt_hashes": np.zeros(1)}, "prompt_hashes is float64"),
        ({"weight": arrays["weight"].astype(np.int32)}, "is int32"),
        ({"extra": np.zeros(1)}, "the weights hold"),
    )
    for changes, why in cases:
        shutil.copytree(stages_folder, folder, dirs_exist_ok=True)
        edit_arrays(folder, **changes)
        with pytest.raises(RouterFileError, match=why):
            RouterScorer.load(folder)


def test_weights_of_another_router_are_refused(folder: Path) -> None:
    (folder / "router.safetensors").write_bytes(save({"weight": np.zeros((1, 3))}))
    with pytest.raises(RouterFileError, match="SHA-256 differs"):
        RouterScorer.load(folder)


def test_layout_of_the_json_does_not_matter_but_its_values_do(folder: Path) -> None:
    path = folder / "router.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    names = list(config)
    random.Random(0).shuffle(names)
    path.write_text(json.dumps({name: config[name] for name in names}), encoding="utf-8")
    RouterScorer.load(folder)
    path.write_text(json.dumps(config | {"pair": "a-b"}), encoding="utf-8")
    with pytest.raises(RouterFileError, match="was changed after it was written"):
        RouterScorer.load(folder)
    path.write_text('{"format": "outrider-router", "format": 1}', encoding="utf-8")
    with pytest.raises(RouterFileError, match="stands twice"):
        RouterScorer.load(folder)


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_bit_is_refused_or_harmless(
    data: st.DataObject, stages_folder: Path, folder: Path
) -> None:
    name = data.draw(st.sampled_from(["router.json", "router.safetensors"]))
    content = bytearray((stages_folder / name).read_bytes())
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    content[place // 8] ^= 1 << (place % 8)
    shutil.copytree(stages_folder, folder, dirs_exist_ok=True)
    (folder / name).write_bytes(content)
    whole = RouterScorer.load(stages_folder)
    try:
        loaded = RouterScorer.load(folder)
    except RouterFileError:
        return
    assert (loaded.threshold, loaded.pair) == (whole.threshold, whole.pair)
    assert loaded.calibration == whole.calibration
    assert loaded.training == whole.training
    assert loaded.estimate("What is 1 + 2?") == whole.estimate("What is 1 + 2?")
