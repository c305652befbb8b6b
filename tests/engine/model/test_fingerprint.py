import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.engine.model import fingerprint
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from tests.engines import make_engine, shipped_pair

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "transformers_version": "5.1"}


def write_checkpoint(folder: Path, *, seed: int = 0, size: int = 1000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=size).astype(np.float32) for name in ("a", "b", "c")}
    save_file({"a": arrays["a"]}, folder / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": arrays["b"], "c": arrays["c"]}, folder / "model-2.safetensors")
    return folder


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def change_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=4))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_it_is_sixteen_digits_and_the_same_for_a_copy(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    found = checkpoint_fingerprint(folder)
    assert len(found) == 16
    assert set(found) <= set("0123456789abcdef")
    assert checkpoint_fingerprint(Path(copy)) == found


def test_fingerprint_ignores_changes_without_effect(folder: Path) -> None:
    found = checkpoint_fingerprint(folder)
    change_config(folder, transformers_version="6.0", torch_dtype="float32", use_cache=False)
    (folder / "README.md").write_text("new")
    (folder / "model-1.safetensors").rename(folder / "weights.safetensors")
    assert checkpoint_fingerprint(folder) == found


def test_fingerprint_changes_with_the_function(folder: Path) -> None:
    seen = {checkpoint_fingerprint(folder)}
    change_config(folder, hidden_size=16)
    seen.add(checkpoint_fingerprint(folder))
    flip_byte(folder / "model-2.safetensors", -1)
    seen.add(checkpoint_fingerprint(folder))
    save_file({"z": np.zeros(3, dtype=np.float32)}, folder / "model-3.safetensors")
    seen.add(checkpoint_fingerprint(folder))
    assert len(seen) == 4


def test_of_a_large_file_samples_of_every_tensor_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE_BELOW_BYTES", 0)
    monkeypatch.setattr(fingerprint, "_NUM_PIECES", 2)
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=10_000).astype(np.float32) for name in ("a", "b", "c")}
    path = folder / "model-3.safetensors"
    seen = set()
    for name in (None, "a", "b", "c"):
        changed = {key: value + 1 if key == name else value for key, value in arrays.items()}
        save_file(changed, path)
        seen.add(checkpoint_fingerprint(folder))
    for place in (-1, path.stat().st_size - 120_000):
        save_file(arrays, path)
        flip_byte(path, place)
        seen.add(checkpoint_fingerprint(folder))
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("config.json", None, r"config\.json is missing"),
        ("config.json", b"{", "cannot be read"),
        ("config.json", b"[]", "is not a JSON object"),
        ("model-1.safetensors", b"", "is not a safetensors file"),
        ("model-1.safetensors", b"\xff" * 64, "is not a safetensors file"),
        ("model-1.safetensors", b"\x02" + bytes(7) + b"[]", "is not a safetensors file"),
        ("model-1.safetensors", b"\x08" + bytes(7) + b'{"a": 1}', "is not a safetensors file"),
    ],
)
def test_a_folder_without_a_checkpoint_is_named(
    folder: Path, name: str, content: bytes | None, why: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=why):
        checkpoint_fingerprint(folder)


def test_a_file_that_was_cut_off_is_named(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="cut off"):
        checkpoint_fingerprint(folder)
    for other in folder.glob("*.safetensors"):
        other.unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        checkpoint_fingerprint(folder)


def test_the_engine_says_the_fingerprint_of_each_tier() -> None:
    tiers = make_engine(shipped_pair()).info().tiers
    for info in tiers.values():
        assert info.fingerprint == checkpoint_fingerprint(Path(info.path))
    assert tiers["small"].fingerprint != tiers["large"].fingerprint


def test_it_needs_no_torch() -> None:
    program = (
        "import sys, outrider.engine.model.fingerprint; "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]
