"""A large model on several devices: from the flag to answers, and what is refused before."""

from typing import Any

import pytest

from engine.errors import EngineError, UnsupportedModelError
from engine.parallel.runner import ParallelRunner
from engine.passes.runner import ModelRunner
from gateway.backends.step_loop import no_progress
from gateway.settings.tree import load_settings
from gateway.wiring import build, tensor_parallel
from gateway.wiring.engine import load_runners
from gateway.wiring.tensor_parallel import threads_of_rank
from tests.engines import heldout_prompts, make_request, serve, texts

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
        assert type(engine._runners["small"]) is ModelRunner
        requests = [
            make_request(str(number), prompt, max_tokens=16)
            for number, prompt in enumerate(heldout_prompts(2))
        ]
        said.append(texts(serve(engine, requests)))
        if isinstance(large, ParallelRunner):
            large.close()
    assert said[0] == said[1]
