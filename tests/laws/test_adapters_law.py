"""An answer with an adapter is that of a model with its weights merged, whatever serves it.

Adapters are random, with A and B so large that every text differs from the base's; float32.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from outrider.draft.budget.calibration import EdgeCalibration
from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.request import AdapterRef, EngineRequest
from tests.adapters import adapter_ref, make_adapter, merged
from tests.engines import (
    Answer,
    Pair,
    engine_model,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    texts,
    tiny_pair,
)
from tests.laws.same_answers import (
    PLAIN,
    Way,
    assert_same_answers,
    by,
    plainly,
)

NUM_ADAPTERS = 3
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return tiny_pair("qwen3")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> list[AdapterRef]:
    """Adapters of the large model, of different ranks and modules."""
    folder = tmp_path_factory.mktemp("large")
    base = pair.large_reference
    return [
        adapter_ref(make_adapter(folder / "all", base, seed=1)),
        adapter_ref(
            make_adapter(folder / "qv", base, seed=2, rank=5, modules=("q_proj", "v_proj"))
        ),
        adapter_ref(
            make_adapter(
                folder / "mlp",
                base,
                seed=3,
                modules=("gate_proj", "down_proj", "o_proj"),
                config={"use_rslora": True, "rank_pattern": {"down_proj": 3}},
            )
        ),
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> AdapterRef:
    folder = tmp_path_factory.mktemp("small") / "little"
    return adapter_ref(make_adapter(folder, pair.small_reference, seed=4), tier="small")


def with_adapters(request: EngineRequest, *refs: AdapterRef | None) -> EngineRequest:
    return replace(request, adapters=tuple(ref for ref in refs if ref is not None))


def mixed_requests(
    refs: Sequence[AdapterRef | None], *, num_rounds: int = 2
) -> list[EngineRequest]:
    """Greedy and sampled requests of every adapter and of the base, on the same prompts."""
    return [
        with_adapters(
            make_request(
                f"{number}/{ref.name if ref else 'base'}/{mode}",
                random_prompt(20 + 7 * number, seed=number),
                seed=number,
                **options,
            ),
            ref,
        )
        for number in range(num_rounds)
        for ref in refs
        for mode, options in (("greedy", {}), ("sampled", SAMPLED))
    ]


def greedy_text(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Past any end token: `generate` would stop there."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
def test_greedy_text_is_that_of_merged_weights(pair: Pair, large: list[AdapterRef]) -> None:
    requests = [r for r in mixed_requests([*large, None]) if r.sampling.is_greedy]
    answers = texts(serve(make_engine(pair), requests))
    models = {"base": pair.large_reference} | {
        ref.name: merged(pair.large_reference, Path(ref.folder)) for ref in large
    }
    for request in requests:
        name = request.request_id.split("/")[1]
        expected = greedy_text(models[name], request.prompt_token_ids, 24)
        assert answers[request.request_id] == expected, name
    for number in range(2):  # the adapters matter
        of_prompt = {tuple(answers[f"{number}/{name}/greedy"]) for name in models}
        assert len(of_prompt) == len(models)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in peft
def test_text_is_pefts_own(pair: Pair, large: list[AdapterRef]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    prompt = random_prompt(25)
    for ref in large:
        requests = [with_adapters(make_request("a", prompt), ref)]
        (answer,) = serve(make_engine(pair), requests).values()
        base = merged(pair.large_reference, Path(large[0].folder))  # a copy: peft changes modules
        base.load_state_dict(pair.large_reference.state_dict())
        theirs = peft.PeftModel.from_pretrained(base, ref.folder).eval()
        assert answer.token_ids == greedy_text(theirs, prompt, 24), ref.name


@pytest.mark.slow
def test_more_adapters_than_places_take_turns(pair: Pair, large: list[AdapterRef]) -> None:
    vary = by(config=EngineConfig(max_adapters=1))
    served = assert_same_answers(mixed_requests([*large, None]), of=pair, vary=vary)
    assert served.engine.adapters.num_resident("large")[0] == 1


def test_adapters_share_no_blocks(pair: Pair, large: list[AdapterRef]) -> None:
    engine = make_engine(pair, speculates=False)
    prompt = random_prompt(70)
    found = []
    for number, ref in enumerate([None, *large, None, *large]):
        (answer,) = serve(engine, [with_adapters(make_request(f"{number}", prompt), ref)]).values()
        found.append(answer.stats.num_cached_tokens)
    assert found[:4] == [0] * 4
    assert min(found[4:]) >= 64


def test_an_adapter_with_other_weights_shares_no_blocks(tmp_path: Path, pair: Pair) -> None:
    engine = make_engine(pair, speculates=False)
    prompt = random_prompt(70)
    answers: list[Answer] = []
    for number, seed in enumerate((7, 8, 7)):
        folder = make_adapter(tmp_path / "changing", pair.large_reference, seed=seed)
        request = make_request(f"{number}", prompt)
        ref = adapter_ref(folder, version=str(number))
        answers += serve(engine, [with_adapters(request, ref)]).values()
    assert [answer.stats.num_cached_tokens >= 64 for answer in answers] == [False, False, True]
    assert answers[0].token_ids == answers[2].token_ids != answers[1].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("keeps_answer", [False, True])
def test_escalation_from_the_small_base_to_a_large_adapter(
    pair: Pair, large: list[AdapterRef], small: AdapterRef, keeps_answer: bool
) -> None:
    """Of a small base and of a small adapter; the escalated answer is the large adapter's own."""
    request = make_request(
        "a", random_prompt(30), tier="small", may_escalate=True, seed=5, **SAMPLED
    )
    vary = Way(escalate=lambda _: 4, keeps_answer=keeps_answer)
    for own in (None, small):
        asked = [with_adapters(request, own, large[0])]
        like = vary | by(speculates=False) if keeps_answer else PLAIN
        answer = assert_same_answers(asked, of=pair, vary=vary, like=like).answers["a"]
        assert answer.switches
        if keeps_answer:
            assert answer.token_ids[:4] == plainly(pair, asked)["a"][:4]


def test_small_answers_with_adapters(
    pair: Pair, small: AdapterRef, large: list[AdapterRef]
) -> None:
    """Beside large ones with others, in one engine."""
    base = make_request("base", random_prompt(30), tier="small")
    requests = [
        base,
        with_adapters(replace(base, request_id="little"), small),
        *mixed_requests([large[1]], num_rounds=1),
    ]
    answers = texts(assert_same_answers(requests, of=pair).answers)
    model = merged(pair.small_reference, Path(small.folder))
    assert answers["little"] == greedy_text(model, base.prompt_token_ids, 24) != answers["base"]


def test_drafts_are_calibrated_for_each_adapter(pair: Pair, large: list[AdapterRef]) -> None:
    calibration = EdgeCalibration()
    engine = make_engine(pair, calibration=calibration, draft=DraftConfig(sources=("model",)))
    serve(engine, [with_adapters(make_request("a", random_prompt(30), max_tokens=64), large[0])])
    assert calibration.version == 0, "what an adapter's answers teach is its own"
    serve(engine, [make_request("b", random_prompt(30), max_tokens=64)])
    assert calibration.version > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama3", "phi3", "gemma3", "glm", "olmo2", "cohere2", "qwen3-moe"]
)
def test_families(tmp_path: Path, family: str) -> None:
    """Fused, turned, parallel and sparse layers: modules lie where the adapter says."""
    pair = tiny_pair(family)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_up_proj", "down_proj")
    if family == "qwen3-moe":
        modules = modules[:4]
    folder = make_adapter(tmp_path / "own", pair.large_reference, seed=9, modules=modules)
    requests = [
        with_adapters(make_request("with", random_prompt(30)), adapter_ref(folder)),
        make_request("without", random_prompt(30)),
    ]
    answers = texts(serve(make_engine(pair), requests))
    model = engine_model(merged(pair.large_reference, folder))
    expected = serve(
        make_engine(replace(pair, large=model)), [make_request("m", random_prompt(30))]
    )
    assert answers["with"] == expected["m"].token_ids != answers["without"]


@pytest.mark.slow
def test_the_shipped_pair(tmp_path: Path) -> None:
    """Merged weights in float32, speculating in a batch of adapters; in bfloat16 as alone."""
    pair = shipped_pair()
    refs = [
        adapter_ref(
            make_adapter(tmp_path / f"{seed}", pair.large_reference, seed=seed, strength=0.15)
        )
        for seed in range(2)
    ]
    requests = [
        with_adapters(make_request(f"{ref.name if ref else 'base'}/{number}", prompt), ref)
        for number, prompt in enumerate(heldout_prompts(3))
        for ref in (*refs, None)
    ]
    answers = texts(serve(make_engine(pair), requests))
    for ref in refs:
        model = engine_model(merged(pair.large_reference, Path(ref.folder)))
        own = [r for r in requests if r.adapters == (ref,)]
        expected = serve(
            make_engine(replace(pair, large=model)), [replace(r, adapters=()) for r in own]
        )
        for request in own:
            assert answers[request.request_id] == expected[request.request_id].token_ids
    half = shipped_pair("bfloat16")
    assert_same_answers(requests, of=half)


def test_steps_go_on_while_an_adapter_is_read(
    pair: Pair, large: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for its adapter while another one's tokens come."""
    import threading

    from outrider.engine.queue import adapter_queue

    may_read = threading.Event()
    read = adapter_queue.read_adapter

    def slow_read(*args: Any, **options: Any) -> object:
        assert may_read.wait(60)
        return read(*args, **options)

    monkeypatch.setattr(adapter_queue, "read_adapter", slow_read)
    engine = make_engine(pair, config=EngineConfig(max_sequences=4))
    requests = [
        make_request("base", random_prompt(20)),
        with_adapters(make_request("own", random_prompt(20)), large[0]),
    ]

    def watch(step: int, answers: dict[str, Answer]) -> None:
        if answers["base"].finished is not None:
            may_read.set()
        elif "own" in answers:
            assert not answers["own"].token_ids

    answers = texts(serve(engine, requests, on_step=watch))
    assert answers == plainly(pair, requests)
