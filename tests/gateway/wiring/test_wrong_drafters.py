"""`outrider serve --drafter` with what cannot draft: a sentence that says why, and a status."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider.draft.training.head_files import head_sizes, read_target_ends, write_head
from outrider.draft.training.head_model import HEADS
from outrider.engine.model.read_config import read_model_config
from outrider.gateway.cli import app
from tests.engines import PAIR_FOLDER

LARGE = PAIR_FOLDER / "large"
IN_PROCESS = ("--port", "0", "--set", "engine.process=false", "--set", "database_url=none")

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Take away what writes to a command's stderr, which is closed behind it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def right_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head for the bundled large model, in half of its vocabulary."""
    config = read_model_config(LARGE)
    token_ids = torch.arange(0, config.vocab_size, 2)
    sizes = head_sizes("eagle3", config, len(token_ids))
    folder = tmp_path_factory.mktemp("head")
    head = HEADS["eagle3"](sizes, read_target_ends(LARGE), token_ids)
    write_head(head, LARGE, folder, torch.float32)
    return folder


def of_another_width(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config |= {"hidden_size": 128, "num_attention_heads": 2}


def of_speculators(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    layers = dict(config)
    config.clear()
    config |= {
        "speculators_model_type": "eagle3",
        "speculators_version": "1.4.0",
        "transformer_layer_config": layers,
        "rank_aware_gates": True,
    }


WRONG_HEADS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "another hidden size": (
        of_another_width,
        ("reads hidden states of 128 numbers", "has a hidden size of 256", "trained for this one"),
    ),
    "another vocabulary": (
        lambda config, _: config.update(vocab_size=151936),
        ("a vocabulary of 151936 tokens", "has 2048", "trained for this model"),
    ),
    "another checkpoint": (
        lambda config, _: config.update(target_fingerprint="c0ffee"),
        ("the fingerprint c0ffee", "delete target_fingerprint from"),
    ),
    "no d2t": (
        lambda _, tensors: tensors.pop("d2t"),
        ("guesses 1024 of 2048 tokens, but has no table d2t",),
    ),
    "newer speculators": (
        of_speculators,
        ("rank_aware_gates, of speculators 1.4.0", "up to speculators 0.9", "Update outrider"),
    ),
    "speculators' other kinds": (
        lambda config, _: config.update(speculators_model_type="medusa"),
        ("is a 'medusa' drafter of speculators", "supported are eagle3, peagle, dflash, mtp."),
    ),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", WRONG_HEADS)
def test_a_head_that_is_not_for_this_model(name: str, right_head: Path, tmp_path: Path) -> None:
    change, found = WRONG_HEADS[name]
    config = json.loads((right_head / "config.json").read_text())
    tensors = load_file(right_head / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    sentence = refusal("--small", "none", "--drafter", str(tmp_path), status=1)
    assert str(tmp_path) in sentence
    for part in found:
        assert part in sentence


def test_mtp_of_a_checkpoint_without_it() -> None:
    sentence = refusal("--drafter", "mtp", status=1)
    assert f"{LARGE.name} has no MTP head" in sentence
    assert "Name a drafter's folder or hub id, or leave the drafter away." in sentence


def test_a_language_model() -> None:
    sentence = refusal("--drafter", str(PAIR_FOLDER / "small"), status=1)
    assert "is a LlamaForCausalLM, not a drafter that reads hidden states" in sentence
    assert "name it as one" in sentence


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--drafter", "./nowhere"), ("'./nowhere': no such folder. Name a folder",)),
        (("--drafter", "mtp", "--large", "none"), ("there is none", "name one with --large")),
    ],
)
def test_what_is_not_there(arguments: tuple[str, ...], found: tuple[str, ...]) -> None:
    sentence = refusal(*arguments, status=2)
    assert "models.drafter (--drafter)" in sentence
    for part in found:
        assert part in sentence


def refusal(*arguments: str, status: int) -> str:
    """What `outrider serve` says last, and then ends with a status."""
    result = CliRunner().invoke(app, ["serve", *IN_PROCESS, *arguments])
    assert result.exit_code == status
    assert "Traceback" not in result.output
    assert not result.stdout
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("outrider: ")
    assert last.endswith(".")
    return last
