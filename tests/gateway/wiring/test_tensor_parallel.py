"""A large model on several devices: from the flag to answers, and what is refused before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.draft.heads.decoder_head import DecoderHead
from outrider.engine.errors import EngineError, UnsupportedModelError
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.load import load_model
from outrider.engine.model.shard import Shard
from outrider.engine.model.whole_ends import ends_of
from outrider.engine.parallel.runner import ParallelRunner
from outrider.engine.passes.runner import ModelRunner
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring import build, tensor_parallel
from outrider.gateway.wiring.drafter import load_head
from outrider.gateway.wiring.engine import load_runners
from outrider.gateway.wiring.tensor_parallel import threads_of_rank
from tests.draft.heads.head_files import (
    eagle3_weights,
    specforge_config,
    specforge_names,
    write_head,
)
from tests.engines import heldout_prompts, make_request, serve, texts
from tests.heads import random_pair

FLAGS = {
    "engine.device": "cpu",
    "engine.dtype": "float32",
    "engine.max_context": 128,
    "engine.num_threads": 2,
    "engine.num_blocks": 64,
    "speculation.adaptive": False,
}


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "usable_physical_cores", lambda: 4)


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"engine.tensor_parallel": 8}, EngineError, "needs as many devices.* has 4 CPU cores"),
        ({"engine.tensor_parallel": 3}, UnsupportedModelError, "divide all of it: 1, 2, 4"),
        (
            {"engine.tensor_parallel": 2, "models.large": "none", "models.small": "demo"},
            EngineError,
            "name it with --large",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused_before_it_is_loaded(
    flags: dict[str, Any], error: type[EngineError], words: str
) -> None:
    settings = load_settings(environ={}, flags=FLAGS | flags)
    with pytest.raises(error, match=words):
        load_runners(settings, no_progress)


def test_a_head_gets_the_ends_of_the_whole_model(tmp_path: Path) -> None:
    """Beside a part of the large model, whose table of tokens and head are parts, too."""
    reference = random_pair().large_reference
    reference.save_pretrained(tmp_path / "large")
    weights = eagle3_weights(num_tokens=60)
    path = write_head(tmp_path / "head", specforge_names(weights), specforge_config(weights))
    part = load_model(str(tmp_path / "large"), dtype="float32", shard=Shard(rank=1, count=2))
    flags = {"models.large": str(tmp_path / "large"), "models.drafter": path}
    head = load_head(load_settings(environ={}, flags=flags), {"large": part}, no_progress)
    assert isinstance(head, DecoderHead)
    table = reference.get_input_embeddings().weight
    assert torch.equal(head._embedding, table)
    assert isinstance(part, DecoderModel)
    ends = ends_of(part)
    assert ends.config.num_query_heads == 2 * part.config.num_query_heads
    rows = torch.randn(3, table.shape[1])
    with torch.inference_mode():
        found, right = ends.head(rows), reference.get_output_embeddings()(rows)
    assert torch.allclose(found, right, atol=1e-5)


def test_ranks_share_the_threads() -> None:
    each = [
        threads_of_rank(load_settings(environ={}, flags=FLAGS | {"engine.tensor_parallel": count}))
        for count in (1, 2, 4)
    ]
    assert each == [2, 1, 1]


@pytest.mark.slow
def test_an_engine_of_two_ranks_answers_as_one_of_one() -> None:
    said = []
    for count in (1, 2):
        settings = load_settings(environ={}, flags=FLAGS | {"engine.tensor_parallel": count})
        engine = build.build_engine(settings, no_progress)
        large = engine._runners["large"]
        assert isinstance(large, ParallelRunner if count > 1 else ModelRunner)
        assert engine.info().tiers["large"].device == ("cpu", "2 x cpu")[count - 1]
        assert type(engine._runners["small"]) is ModelRunner
        requests = [
            make_request(str(number), prompt, max_tokens=16)
            for number, prompt in enumerate(heldout_prompts(2))
        ]
        said.append(texts(serve(engine, requests)))
        if isinstance(large, ParallelRunner):
            large.close()
    assert said[0] == said[1]
