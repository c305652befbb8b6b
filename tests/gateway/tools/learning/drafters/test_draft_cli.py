"""`outrider draft`: from prompts to a drafter that serves, and to settings that are understood."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from outrider.gateway.cli import app
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings import extras
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring import build as wiring
from tests.gateway.upstream.write_gguf import main as write_gguf
from tests.models import save_hf_model

runner = CliRunner()
QUICK = ["--device", "cpu", "--num-threads", "1"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("large")
    save_hf_model("llama2", folder, seed=1, vocab_size=420, eos_token_id=1)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": f"How are you {'today ' * n}?"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def drafter(
    large: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("out") / "drafter"
    arguments = ["--layers", "1", "--width", "32", "--steps", "4", "--max-tokens", "8"]
    return out, train(large, data, out, *arguments)


def train(large: Path, data: Path, out: Path, *more: str) -> Result:
    arguments = ["--large", str(large), "--data", str(data), "--out", str(out), *QUICK, *more]
    return runner.invoke(app, ["draft", "train", *arguments])


def tune(large: Path, small: Path, data: Path, out: Path, *more: str) -> Result:
    models = ["--large", str(large), "--small", str(small), "--data", str(data)]
    return runner.invoke(app, ["draft", "tune", *models, "--out", str(out), *QUICK, *more])


def test_a_drafter_is_trained_and_drafts_in_the_engine(
    large: Path, drafter: tuple[Path, Result]
) -> None:
    out, result = drafter
    assert result.exit_code == 0, result.output
    assert "among its first three" in result.output
    assert f"outrider serve --large {large} --small {out}" in result.output
    flags = {
        "models.large": str(large),
        "models.small": str(out),
        "engine.device": "cpu",
        "speculation.adaptive": False,
    }
    engine = wiring.build_engine(load_settings(environ={}, flags=flags), no_progress)
    assert engine.info().speculation


@pytest.mark.slow
def test_a_head_of_a_gguf_file_drafts_for_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, out = tmp_path / "tiny.gguf", tmp_path / "head"
    write_gguf(bundled_pair() / "small", file)
    few = ["--steps", "2", "--max-tokens", "8", "--draft-vocab", "100", "--batch-size", "2"]
    trained = train(file, data, out, "--kind", "eagle3", *few)
    assert trained.exit_code == 0, trained.output
    assert f"outrider serve --large {file} --drafter {out}" in " ".join(trained.output.split())
    measured = ["--prompts", "2", "--max-tokens", "4", "--rounds", "1"]
    words = [str(file), "--drafter", str(out), "--data", str(data), *QUICK, *measured]
    compared = runner.invoke(app, ["draft", "compare", *words])
    assert compared.exit_code == 0, compared.output
    assert "head" in compared.output


def test_a_second_run_needs_resume(large: Path, data: Path, drafter: tuple[Path, Result]) -> None:
    out, _ = drafter
    size = ["--layers", "1", "--width", "32", "--max-tokens", "8"]
    refused = train(large, data, out, *size, "--steps", "6")
    assert refused.exit_code == 1
    assert "--resume" in refused.output
    changed = train(large, data, out, "--layers", "1", "--steps", "6", "--resume")
    assert changed.exit_code == 1
    assert "max_tokens, width changed" in changed.output
    resumed = train(large, data, out, *size, "--steps", "6", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "6 steps" in resumed.output


@pytest.mark.slow
def test_tuning_writes_settings_and_pictures(
    large: Path, data: Path, drafter: tuple[Path, Result], tmp_path: Path
) -> None:
    out, plots = tmp_path / "tuned.toml", tmp_path / "plots"
    grid = ["--depths", "2", "--nodes", "2,4", "--branching", "1", "--frontier", "1"]
    few = ["--prompts", "2", "--max-tokens", "8", "--rounds", "1"]
    result = tune(large, drafter[0], data, out, *grid, *few, "--plots", str(plots))
    assert result.exit_code == 0, result.output
    assert "tok/s" in result.output
    settings = load_settings(environ={}, config_file=out)
    standing = load_settings(environ={}).speculation.max_draft_nodes
    assert settings.speculation.max_draft_nodes in (2, 4, standing)
    assert f"max_draft_depth = {settings.speculation.max_draft_depth}" in out.read_text()
    for name in ("acceptance_by_depth.png", "speed_by_tree_size.png"):
        assert (plots / name).read_bytes().startswith(b"\x89PNG")
    again = tune(large, drafter[0], data, out, *grid, *few)
    assert again.exit_code == 2
    assert "exists already" in again.output


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"--large": "./nowhere"}, "no such folder"),
        ({"--small": "./nowhere"}, "no such folder"),
        ({"--data": "none.jsonl"}, "no such file"),
        ({"--width": "100"}, "multiple of 16"),
        ({"--from-data": None}, "row 1 has no answer"),
        ({"--max-length": "2"}, "raise --max-length"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(
    change: dict[str, str | None], why: str, large: Path, data: Path, tmp_path: Path
) -> None:
    arguments: dict[str, str | None] = {
        "--large": str(large),
        "--data": str(data),
        "--out": str(tmp_path / "out"),
        **change,
    }
    words = [word for pair in arguments.items() for word in pair if word is not None]
    result = runner.invoke(app, ["draft", "train", *words, *QUICK])
    assert result.exit_code == 1, result.output
    assert why in result.output
    assert "Traceback" not in result.output


def test_an_architecture_that_the_engine_cannot_run_is_named(data: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    for name in ("model.safetensors", "tokenizer.json"):
        (strange / name).touch()
    result = train(strange, data, tmp_path / "out")
    assert result.exit_code == 1
    assert "GPT2LMHeadModel" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("values", ["4,x", "0,4", "300", ""])
def test_values_that_no_tree_can_have(values: str, large: Path, data: Path, tmp_path: Path) -> None:
    result = tune(large, large, data, tmp_path / "o.toml", "--depths", values)
    assert result.exit_code == 1
    assert "max_draft_depth" in result.output or "measured anyway" in result.output


def test_a_missing_extra_says_what_to_install(
    large: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras.PathFinder, "find_spec", lambda name: None)
    for result, extra in (
        (train(large, data, tmp_path / "out"), "train"),
        (tune(large, large, data, tmp_path / "o.toml", "--plots", "p"), "bench"),
    ):
        assert result.exit_code == 1
        assert f'pip install "outrider[{extra}]"' in result.output


@pytest.fixture(autouse=True)
def same_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("train", "--large", "./nosuch", "--out", "o"), "./nosuch: no such folder"),
        (("tune", "--large", "./nosuch", "--small", "a/b"), "./nosuch: no such folder"),
        (("compare", "a/b", "--drafter", "./nosuch"), "./nosuch: no such folder"),
        (("train", "--large", "smollm2-135m", "--out", "o"), "outrider models get smollm2-135m"),
        (("train", "--large", "a/b", "--out", "o"), "nodata.jsonl: no such file"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_loaded(
    command: tuple[str, ...], missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(
        sys.modules, "outrider.draft.training.distill", None
    )  # its import would fail
    result = CliRunner().invoke(app, ["draft", *command, "--data", "nodata.jsonl"])
    assert result.exit_code == 1
    assert missing in " ".join(result.output.split())
