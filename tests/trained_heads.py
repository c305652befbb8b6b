"""Heads that a second of training has taught the shipped large model's answers to a few prompts."""

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.draft.heads.protocol import HeadKind, HeadModel
from outrider.draft.heads.read_head import OWN, read_head
from outrider.draft.training.distill import DistillPlan
from outrider.draft.training.head_distil import distil_head
from outrider.draft.training.head_files import default_taps, write_head
from outrider.draft.training.head_job import fresh_head, tapped_runner
from outrider.draft.training.head_model import TrainedHead, TrainedHeadKind
from outrider.draft.training.own_answers import TappedRow, TokenRow, teach
from outrider.engine.model.decoder import DtypeName
from outrider.engine.model.load import load_model
from outrider.engine.passes.runner import ModelRunner
from tests.engines import (
    PAIR_FOLDER,
    Pair,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    texts,
)

LARGE = PAIR_FOLDER / "large"
NUM_PROMPTS = 6
NUM_TOKENS = 20
DEPTH = 3
"""Levels that the heads were unrolled to; what lies deeper they were never taught."""
_NUM_GUESSED = 200  # of EAGLE-3's own vocabulary


@dataclass(frozen=True, kw_only=True)
class Taught:
    """A head, the pair that it drafts in, and the same weights in plain torch.

    Where it is an MTP head, it was read from the checkpoint of this pair's large model.
    """

    pair: Pair
    head: HeadModel
    trained: TrainedHead


def taught_prompts() -> tuple[tuple[int, ...], ...]:
    """Prompts whose greedy answers, to NUM_TOKENS tokens, the heads have learnt."""
    return heldout_prompts(NUM_PROMPTS)


@cache
def taught_answers() -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """These prompts and their answers."""
    prompts = taught_prompts()
    requests = [
        make_request(str(number), prompt, max_tokens=NUM_TOKENS)
        for number, prompt in enumerate(prompts)
    ]
    answers = texts(serve(make_engine(shipped_pair(), speculates=False), requests))
    return tuple((prompt, tuple(answers[str(n)])) for n, prompt in enumerate(prompts))


def _rows() -> list[TokenRow]:
    rows = [
        TokenRow(token_ids=(*prompt, *answer), num_prompt_tokens=len(prompt))
        for prompt, answer in taught_answers()
    ]
    return [*rows, rows[0]]  # one is held out


@cache
def _trained(kind: TrainedHeadKind) -> TrainedHead:
    """A head after eight steps: its first choices are right far more often than not."""
    large = shipped_pair().large
    taps = default_taps(kind, large.config.num_layers)
    vocab_size = _NUM_GUESSED if kind == "eagle3" else large.config.vocab_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runner = ModelRunner(model=large, num_blocks=64)
        found = teach(tapped_runner(runner, taps), _rows(), 4, folder / "targets")
        rows = [row for row in found if isinstance(row, TappedRow)]
        trained = fresh_head(kind, LARGE, rows, vocab_size, seed=0)
        plan = DistillPlan(
            steps=8, batch_size=NUM_PROMPTS, learning_rate=1e-2, held_out=1 / (2 * len(rows))
        )
        distil_head(trained, rows, plan, folder / "run", depth=DEPTH, device=torch.device("cpu"))
    trained.train(False)
    return trained


@cache
def taught_head(kind: HeadKind, dtype: DtypeName = "float32") -> Taught:
    """A head that is right far more often than not, read from its files; not DFlash."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "files"
        if kind == "mtp":
            return _inside_its_checkpoint(_trained("mtp"), folder, dtype)
        assert kind in ("eagle3", "peagle")
        trained = _trained("eagle3")
        write_head(trained, LARGE, folder, torch.float32)
        if kind == "peagle":
            _guess_in_parallel(folder)
        pair = shipped_pair(dtype)
        head = read_head(str(folder), pair.large)  # type: ignore[arg-type]
        return Taught(pair=pair, head=head, trained=trained)


def _guess_in_parallel(folder: Path) -> None:
    """Make P-EAGLE of an EAGLE-3 head: one that knows the next token, and little behind it."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"ptd_token_id": 0, "block_size": DEPTH}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    mask = torch.randn(tensors["fc.weight"].shape[1], generator=torch.Generator().manual_seed(1))
    save_file({**tensors, "mask_hidden": mask[None, None]}, folder / "model.safetensors")


def _inside_its_checkpoint(trained: TrainedHead, folder: Path, dtype: DtypeName) -> Taught:
    """The head as a layer of a copy of the large checkpoint, named as Qwen3-Next's is."""
    shutil.copytree(LARGE, folder)
    path = folder / "model.safetensors"
    own = {f"mtp.{name}": weight.detach() for name, weight in trained.state_dict().items()}
    save_file({**load_file(path), **own}, path, {"format": "pt"})
    large = load_model(str(folder), dtype=dtype)
    head = read_head(OWN, large)  # type: ignore[arg-type]
    return Taught(pair=replace(shipped_pair(dtype), large=large), head=head, trained=trained)
