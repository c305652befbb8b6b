"""The engine's edges: what it refuses, what it reports, and the pace of the two tiers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.errors import (
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    TierUnavailableError,
)
from outrider.engine.events import EngineEvent, Failed, Finished, PrefillDone, TokensEmitted
from outrider.engine.model.decoder import DecoderModel, DtypeName
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import SpeculationParams
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.params import SamplingParams
from tests.engines import (
    Answer,
    assert_idle,
    finish,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    step_once,
    texts,
    tiny_pair,
)
from tests.models import save_hf_model


def large_only(**options: Any) -> Engine:
    runner = ModelRunner(model=tiny_pair().large, num_blocks=64)
    return Engine(runners={"large": runner}, **options)


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limited_by", ["model", "cache", "setting"])
def test_the_context_can_be_filled_to_the_last_token(limited_by: str) -> None:
    limit = 64
    pair = tiny_pair(max_positions=limit) if limited_by == "model" else tiny_pair()
    num_blocks = 4 if limited_by == "cache" else 40
    max_context = limit if limited_by == "setting" else None
    small = ModelRunner(model=pair.small, num_blocks=num_blocks, max_context=max_context)
    large = ModelRunner(model=pair.large, num_blocks=num_blocks, max_context=max_context)
    engine = Engine(
        runners={"large": large, "small": small},
        drafter=TreeDrafter(runner=small),
    )
    for num_prompt in (1, 40, 48, 63):
        for tier in ("large", "small"):
            request = make_request(
                "r", random_prompt(num_prompt), tier=tier, max_tokens=limit - num_prompt,
                temperature=0.9,
            )  # fmt: skip
            answer = serve(engine, [request])["r"]
            assert len(answer.token_ids) == limit - num_prompt
            assert answer.finish_reason == "length"
            too_long = make_request(
                "r", random_prompt(num_prompt), tier=tier, max_tokens=limit - num_prompt + 1
            )
            with pytest.raises(PromptTooLongError) as refused:
                engine.submit(too_long)
            assert refused.value.num_tokens == num_prompt
            assert refused.value.max_tokens == limit - num_prompt + 1
            assert refused.value.max_context == limit
            assert f"{num_prompt}" in str(refused.value)
            assert "64" in str(refused.value)
    assert_idle(engine)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        make_engine(tiny_pair()).submit(make_request("r", ()))


@pytest.mark.parametrize("token_id", [-1, 131, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    engine = make_engine(tiny_pair())
    with pytest.raises(InvalidRequestError, match=rf"\[0, 131\).*{token_id}"):
        engine.submit(make_request("r", (5, token_id, 7)))
    assert_idle(engine)


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine(tiny_pair())
    request = make_request("r", random_prompt(5), max_tokens=3)
    engine.submit(request)
    with pytest.raises(InvalidRequestError, match="'r' is in use"):
        engine.submit(request)
    answers: dict[str, Answer] = {}
    finish(engine, answers)
    assert len(answers["r"].token_ids) == 3
    assert len(serve(engine, [request])["r"].token_ids) == 3


def test_a_tier_that_is_not_loaded_is_refused() -> None:
    engine = large_only()
    with pytest.raises(TierUnavailableError, match=r"small.*not loaded.*large"):
        engine.submit(make_request("r", random_prompt(5), tier="small"))
    engine.submit(make_request("r", random_prompt(5)))
    with pytest.raises(TierUnavailableError, match="small"):
        engine.switch_tier("r", "small")


def test_a_full_queue_is_refused_with_a_time() -> None:
    engine = make_engine(tiny_pair(), config=EngineConfig(max_waiting=2, max_sequences=1))
    engine.submit(make_request("a", random_prompt(5)))
    engine.submit(make_request("b", random_prompt(5)))
    with pytest.raises(QueueFullError) as refused:
        engine.submit(make_request("c", random_prompt(5)))
    assert refused.value.num_waiting == 2
    assert refused.value.retry_after_s > 0
    answers: dict[str, Answer] = {}
    step_once(engine, answers)  # one of them starts
    engine.submit(make_request("c", random_prompt(5)))
    finish(engine, answers)
    assert set(answers) == {"a", "b", "c"}


def test_an_engine_without_models_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        Engine(runners={})


def test_unknown_ids_are_ignored() -> None:
    engine = make_engine(tiny_pair())
    engine.abort("nobody")
    engine.switch_tier("nobody", "large")
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1), ("seed", -1),
        ("seed", 2**64), ("choice_index", -1), ("num_logprobs", 21), ("num_logprobs", -1),
        ("num_prompt_logprobs", 21), ("num_prompt_logprobs", -1),
    ],
)  # fmt: skip
def test_sampling_out_of_range_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SamplingParams(**{"max_tokens": 5, name: value})


@pytest.mark.parametrize("fields", [{"max_draft_nodes": 256}, {"max_draft_depth": 256}])
def test_speculation_out_of_range_names_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))}=256"):
        SpeculationParams(**fields)


# ---- what is reported ------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["large", "small"])
def test_the_prefill_reports_the_last_prompt_tokens_hidden_state(tier: str) -> None:
    pair = tiny_pair()
    reference = pair.large_reference if tier == "large" else pair.small_reference
    prompt = random_prompt(48)
    engine = make_engine(pair, config=EngineConfig(max_tokens_per_step=20))
    with torch.inference_mode():
        expected = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    for name in ("first", "cached"):  # a prefix hit stops one token short
        request = make_request(name, prompt, tier=tier, return_hidden_state=True, max_tokens=4)
        (prefill,) = serve(engine, [request])[name].prefills
        assert prefill.hidden_state is not None
        torch.testing.assert_close(torch.tensor(prefill.hidden_state), expected, atol=1e-4, rtol=0)
        assert (prefill.tier, prefill.num_prompt_tokens) == (tier, 48)
        assert prefill.num_cached_tokens == (47 if name == "cached" else 0)
    (prefill,) = serve(engine, [make_request("r", prompt, tier=tier)])["r"].prefills
    assert prefill.hidden_state is None


def test_prompts_that_share_a_pass_report_each_their_own() -> None:
    pair = tiny_pair()
    prompts = {str(length): random_prompt(length) for length in (5, 20, 11)}
    requests = [
        make_request(name, prompt, return_hidden_state=True, max_tokens=9)
        for name, prompt in prompts.items()
    ]
    # The first one decodes with a tree when the others' prompts come into the same pass.
    answers = serve(make_engine(pair), requests, arrivals={"20": 2, "11": 2})
    for name, prompt in prompts.items():
        with torch.inference_mode():
            expected = pair.large_reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        found = torch.tensor(answers[name].prefills[0].hidden_state)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_equal_transformers(speculation: bool, temperature: float) -> None:
    """Also of tokens that were accepted inside a tree, under the raw distribution."""
    pair = tiny_pair()
    requests = [
        make_request(
            f"{number}", random_prompt(10 + number, seed=number), max_tokens=30, seed=number,
            temperature=temperature, top_k=20, num_logprobs=num_logprobs, speculation=speculation,
        )
        for number, num_logprobs in enumerate((0, 3, 20, None))
    ]  # fmt: skip
    engine = make_engine(pair)
    answers = serve(engine, requests)
    assert (engine.stats().num_accepted_tokens > 0) == speculation
    for request in requests:
        answer = answers[request.request_id]
        if request.sampling.num_logprobs is None:
            assert answer.logprobs == []
            continue
        full = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
        with torch.inference_mode():
            logits = pair.large_reference(full).logits[0, len(request.prompt_token_ids) - 1 : -1]
        expected = logits.log_softmax(-1)  # [num_emitted, vocab_size]
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        for entry, row in zip(answer.logprobs, expected, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            values, ids = row.topk(request.sampling.num_logprobs)
            assert [token_id for token_id, _ in entry.top] == ids.tolist()
            assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    pair = tiny_pair(vocab_size=12)
    request = make_request("r", (3, 4, 5), num_logprobs=20, max_tokens=3)
    answer = serve(make_engine(pair), [request])["r"]
    assert all(sorted(t for t, _ in entry.top) == list(range(12)) for entry in answer.logprobs)


def test_events_and_counters_add_up() -> None:
    engine = make_engine(tiny_pair())
    requests = [
        make_request(
            f"{number}", random_prompt(20, seed=number), max_tokens=10 + number,
            tier="small" if number % 2 else "large", temperature=0.8, seed=number,
        )
        for number in range(6)
    ]  # fmt: skip
    answers = serve(engine, requests)
    large = [answer for name, answer in answers.items() if int(name) % 2 == 0]
    for answer in answers.values():
        stats = answer.stats
        assert stats.num_output_tokens == len(answer.token_ids)
        assert stats.num_steps == len(answer.emitted)
        assert stats.num_drafted_tokens == sum(e.num_drafted_tokens for e in answer.emitted)
        assert stats.num_accepted_tokens == sum(e.num_accepted_tokens for e in answer.emitted)
        assert stats.mean_emitted_tokens == stats.num_output_tokens / stats.num_steps
        assert stats.queue_s is not None
        assert stats.ttft_s is not None
        assert 0 <= stats.queue_s <= stats.ttft_s
        # Each step emits the accepted tokens and one more.
        assert all(len(e.token_ids) <= e.num_accepted_tokens + 1 for e in answer.emitted)
    stats = engine.stats()
    assert stats.num_draft_tokens == sum(a.stats.num_drafted_tokens for a in large)
    assert stats.num_accepted_tokens == sum(a.stats.num_accepted_tokens for a in large)
    assert sum(stats.accepted_per_depth) == stats.num_accepted_tokens
    assert list(stats.accepted_per_depth) == sorted(stats.accepted_per_depth, reverse=True)
    drafts = [e for a in large for e in a.emitted if e.num_drafted_tokens]
    assert stats.num_drafts == len(drafts)
    assert stats.tiers["large"].num_output_tokens == sum(len(a.token_ids) for a in large)
    assert stats.tiers["small"].num_prompt_tokens == 60
    assert stats.step_host_s > 0
    assert stats.step_forward_s > 0
    info = engine.info()
    assert info.speculation
    assert info.tiers["large"].vocab_size == 131
    assert info.tiers["large"].dtype == "float32"


def test_times_come_from_the_engines_clock() -> None:
    now_s = 100.0
    engine = large_only(clock=lambda: now_s)
    engine.submit(make_request("r", random_prompt(5), max_tokens=2))
    now_s = 103.0
    (prefill, first) = engine.step()
    assert isinstance(prefill, PrefillDone)
    assert isinstance(first, TokensEmitted)
    assert prefill.queue_s == 3.0
    now_s = 104.0
    (_, finished) = engine.step()
    assert isinstance(finished, Finished)
    assert (finished.stats.queue_s, finished.stats.ttft_s) == (3.0, 3.0)


def test_one_tier_alone_serves_without_a_drafter() -> None:
    request = make_request("r", random_prompt(12), temperature=0.8)
    assert texts(serve(large_only(), [request])) == texts(
        serve(make_engine(tiny_pair()), [request])
    )


# ---- pace ----------------------------------------------------------------------------------


def test_a_small_answer_does_not_wait_for_the_large_pass() -> None:
    engine = make_engine(tiny_pair())
    engine.submit(make_request("large", random_prompt(9), max_tokens=40))
    engine.submit(make_request("small", random_prompt(9), tier="small", max_tokens=40))
    early: list[EngineEvent] = []
    late: list[EngineEvent] = []
    large_passes_at_hand_over: list[int] = []

    def forward(events: list[EngineEvent]) -> None:
        large_passes_at_hand_over.append(engine._runners["large"].times.num_passes)
        early.extend(events)

    begun = engine._runners["large"].times.num_passes
    late.extend(engine.step(forward))
    assert large_passes_at_hand_over[0] == begun  # before the step's large pass
    assert {event.request_id for event in early} == {"small"}
    assert {event.request_id for event in late} == {"large"}


def test_small_answers_get_their_share_beside_a_slow_large_model() -> None:
    engine = make_engine(tiny_pair(), config=EngineConfig(small_pass_share=0.5), draft=None)
    engine._passes.mean_s.update(small=1e-3, large=1.0)  # as measured beside a much larger target
    engine.submit(make_request("large", random_prompt(9), max_tokens=4, speculation=False))
    engine.submit(make_request("small", random_prompt(9), tier="small", max_tokens=60))
    before = engine._runners["small"].times.num_passes
    engine.step()
    assert engine._runners["small"].times.num_passes - before == EngineConfig().max_small_passes


@pytest.mark.slow_cases
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("small_passes", [1, 4])
def test_small_answers_advance_in_every_small_pass(small_passes: int, speculation: bool) -> None:
    engine = make_engine(
        tiny_pair(), config=EngineConfig(min_small_passes=small_passes), draft=None
    )
    passes = engine._runners["small"].times
    large = [
        make_request(
            f"l{n}", random_prompt(9, seed=n), max_tokens=120, temperature=0.8,
            speculation=speculation,
        )
        for n in range(4)
    ]  # fmt: skip
    for request in large:
        engine.submit(request)
    answers: dict[str, Answer] = {}
    for _ in range(3):
        step_once(engine, answers)
    engine.submit(make_request("small", random_prompt(9), tier="small", max_tokens=60))
    num_large_steps = engine._runners["large"].times.num_passes
    while "small" not in answers or answers["small"].finished is None:
        before, emitted = passes.num_passes, len(answers.get("small", Answer()).token_ids)
        step_once(engine, answers)
        gained = len(answers["small"].token_ids) - emitted
        done = answers["small"].finished is not None
        assert gained == passes.num_passes - before or done
        assert gained >= small_passes or done
    assert engine._runners["large"].times.num_passes - num_large_steps <= 60 // small_passes + 1
    for request in large:
        assert len(answers[request.request_id].token_ids) > 3  # they went on meanwhile
        engine.abort(request.request_id)
    step_once(engine, answers)
    assert_idle(engine)


def test_without_large_work_a_step_is_one_small_pass() -> None:
    engine = make_engine(tiny_pair())
    answers = serve(engine, [make_request("s", random_prompt(9), tier="small", max_tokens=10)])
    assert engine.stats().num_steps == 10
    assert len(answers["s"].emitted) == 10


def test_the_shipped_pair_describes_itself() -> None:
    tiers = make_engine(shipped_pair()).info().tiers
    assert tiers["large"].num_parameters >= 8 * tiers["small"].num_parameters
    assert tiers["large"].vocab_size == tiers["small"].vocab_size
    assert tiers["large"].model_id == "large"


# ---- numbers that are not finite -----------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_an_answer_of_numbers_that_are_not_finite_fails(
    name: str, dtype: DtypeName, tmp_path: Path
) -> None:
    save_hf_model("llama2", tmp_path)
    model = DecoderModel.load(str(tmp_path), dtype=dtype)
    engine = Engine(
        runners={"large": ModelRunner(model=model, num_blocks=64)}, verifier=CoupledVerifier()
    )
    request = make_request("sound", [1, 5, 9], max_tokens=4, num_logprobs=2)
    assert len(serve(engine, [request])["sound"].token_ids) == 4
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[name][7, 3] = float("nan")
    save_file(tensors, file)
    model = DecoderModel.load(str(tmp_path), dtype=dtype)
    engine = Engine(
        runners={"large": ModelRunner(model=model, num_blocks=64)}, verifier=CoupledVerifier()
    )
    for number, temperature in enumerate((0.0, 0.9)):
        engine.submit(make_request("r", [1, 5, 9], max_tokens=4, temperature=temperature))
        events = [event for _ in range(6) for event in engine.step()]
        assert not [event for event in events if isinstance(event, TokensEmitted)]
        assert isinstance(events[-1], Failed)
        assert events[-1].code == "not_finite"
        assert "check the checkpoint" in events[-1].message
        assert engine.stats().num_not_finite == number + 1
        assert engine.stats().is_unfit is (number == 1)
    assert_idle(engine)
