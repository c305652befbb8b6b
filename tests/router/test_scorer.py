import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from router.estimator import TrainedRouter
from router.features import FeatureConfig
from router.scorer import QualityEstimate, RouterFileError, RouterScorer

SMALL = FeatureConfig(num_char_features=64, num_word_features=64)


@pytest.fixture
def folder(router_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(router_folder, tmp_path / "router"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "router.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | changes), encoding="utf-8")


def replace_weights(folder: Path, content: bytes) -> None:
    (folder / "router.safetensors").write_bytes(content)
    edit_config(folder, weights_sha256=hashlib.sha256(content).hexdigest())


def test_saved_and_loaded_scores_are_equal(router_folder: Path, trained: TrainedRouter) -> None:
    loaded = RouterScorer.load(router_folder)
    for prompt in ("", "What is 12 + 7?", "What is 555555 + 666666?", "Tell me a joke."):
        ours, theirs = loaded.estimate(prompt), trained.scorer.estimate(prompt)
        assert ours.small == pytest.approx(theirs.small, abs=1e-6)
        assert ours.large == pytest.approx(theirs.large, abs=1e-6)
    assert loaded.threshold == trained.scorer.threshold
    assert loaded.training == trained.scorer.training


def test_the_files_are_small(router_folder: Path) -> None:
    assert sorted(path.name for path in router_folder.iterdir()) == [
        "router.json",
        "router.safetensors",
    ]
    assert sum(path.stat().st_size for path in router_folder.iterdir()) < 300_000


def test_serving_imports_neither_scikit_learn_nor_torch(router_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from router.policy import load_policy;"
        f"print(load_policy(Path({str(router_folder)!r})).route('What is 1 + 2?').tier);"
        "print([name for name in ('sklearn', 'scipy', 'torch', 'pickle5') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[:2] == ["small", "[]"]


def test_gain_and_quality() -> None:
    assert QualityEstimate(small=0.7, large=0.9).gain == pytest.approx(0.2)
    assert QualityEstimate(small=0.7, large=0.9).quality == pytest.approx(0.8)
    assert QualityEstimate(small=0.9, large=0.7).quality == 1.0
    assert QualityEstimate(small=0.7).quality == pytest.approx(0.7)


def test_extreme_weights_do_not_overflow() -> None:
    for bias in (-1e6, 1e6):
        scorer = RouterScorer(
            features=SMALL,
            weight=np.zeros((1, SMALL.num_features)),
            bias=np.array([bias]),
            threshold=0.5,
        )
        assert scorer.estimate("x").small == (0.0 if bias < 0 else 1.0)


@pytest.mark.parametrize(
    ("weight", "bias", "threshold", "why"),
    [
        (np.zeros((1, 3)), np.zeros(1), 0.5, "weight has shape"),
        (np.zeros((3, SMALL.num_features)), np.zeros(3), 0.5, "bias has shape"),
        (np.zeros((1, SMALL.num_features)), np.zeros((1, 1)), 0.5, "bias has shape"),
        (np.full((1, SMALL.num_features), np.nan), np.zeros(1), 0.5, "not finite"),
        (np.zeros((1, SMALL.num_features)), np.array([np.inf]), 0.5, "not finite"),
        (np.zeros((1, SMALL.num_features)), np.zeros(1), 1.5, "threshold"),
        (np.zeros((1, SMALL.num_features)), np.zeros(1), float("nan"), "threshold"),
    ],
)
def test_impossible_arrays_are_refused(
    weight: np.ndarray, bias: np.ndarray, threshold: float, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        RouterScorer(features=SMALL, weight=weight, bias=bias, threshold=threshold)


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(RouterFileError, match=r"router\.json: No such file"):
        RouterScorer.load(tmp_path / "nothing")
    (folder / "router.safetensors").unlink()
    with pytest.raises(RouterFileError, match=r"router\.safetensors: No such file"):
        RouterScorer.load(folder)


@pytest.mark.parametrize("name", ["router.json", "router.safetensors"])
@pytest.mark.parametrize(
    "content", [b"", pickle.dumps({"weight": [1.0]}), b"\x00" * 64, b"{}", b"[" * 10_000]
)
def test_anything_else_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(RouterFileError, match="outrider router train"):
        RouterScorer.load(folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "other"}, "not a router"),
        ({"version": 2}, "version 2 is unknown"),
        ({"feature_version": 99}, "feature_version 99 is unknown"),
        ({"heads": ["strong"]}, "heads"),
        ({"heads": ["weak"]}, "2 heads in the weights"),
        ({"threshold": "high"}, "not a finite number"),
        ({"threshold": 7}, "threshold=7"),
        ({"features": {}}, "features must name"),
        ({"features": []}, '"features" must be a dict'),
        ({"training": None}, '"training" must be a dict'),
        ({"weights_sha256": "0" * 64}, "SHA-256 differs"),
    ],
)
def test_a_changed_config_is_refused(folder: Path, changes: dict[str, object], why: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(RouterFileError, match=why):
        RouterScorer.load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_char_features", 64), ("num_char_features", True), ("max_head_chars", 99.5)],
)
def test_a_changed_feature_size_is_refused(folder: Path, name: str, value: object) -> None:
    config = json.loads((folder / "router.json").read_text(encoding="utf-8"))
    edit_config(folder, features=config["features"] | {name: value})
    with pytest.raises(RouterFileError):
        RouterScorer.load(folder)


def test_tampered_weights_are_refused(folder: Path) -> None:
    arrays = load_file(folder / "router.safetensors")
    spoiled = arrays["weight"].copy()
    spoiled[0, 0] = np.nan
    cases = (
        ({"weight": spoiled, "bias": arrays["bias"]}, "not finite"),
        ({"weight": arrays["weight"][:, :-1].copy(), "bias": arrays["bias"]}, "has shape"),
        ({"weight": arrays["weight"]}, "not weight and bias"),
        ({"weight": arrays["weight"].astype(np.int32), "bias": arrays["bias"]}, "is int32"),
    )
    for changed, why in cases:
        replace_weights(folder, save(changed))
        with pytest.raises(RouterFileError, match=why):
            RouterScorer.load(folder)
    content = bytearray(save(arrays))
    content[-1] ^= 1
    (folder / "router.safetensors").write_bytes(content)
    with pytest.raises(RouterFileError, match="SHA-256 differs"):
        RouterScorer.load(folder)
