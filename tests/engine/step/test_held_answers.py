"""Answers that wait for a decision, and what goes over with an answer that is given up."""

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.errors import InvalidRequestError, TierUnavailableError
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.verifier.params import Tier
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT, TokenTree
from tests.engines import (
    Answer,
    Pair,
    assert_idle,
    drafter_of,
    finish,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    tiny_pair,
    twins,
    watch_small_rows,
)

PROMPT = random_prompt(37)
# The tiny models are sure of nothing: a long answer is never likely to be right.
UNLIKELY = DraftConfig(min_path_prob=0.0)


def watched(request_id: str = "r", *, max_tokens: int = 12, **options: object) -> EngineRequest:
    settings: dict[str, object] = {"tier": "small", "may_escalate": True, "seed": 5} | options
    return make_request(request_id, PROMPT, max_tokens=max_tokens, **settings)


def plain_answer(tier: Tier, **options: object) -> list[int]:
    engine = make_engine(tiny_pair(), speculates=False)
    request = watched(tier=tier, may_escalate=False, **options)
    return serve(engine, [request])["r"].token_ids


def hold(engine: Engine, *requests: EngineRequest) -> dict[str, Answer]:
    """Serve until nothing but decisions is missing."""
    answers = serve(engine, requests)
    assert all(answer.held for answer in answers.values())
    return answers


def used(engine: Engine) -> dict[Tier, int]:
    return {tier: stats.num_used_blocks for tier, stats in engine.stats().tiers.items()}


# ---- held answers -----------------------------------------------------------------------------


def test_a_held_answer_is_no_work_and_keeps_its_blocks() -> None:
    engine = make_engine(tiny_pair())
    answer = hold(engine, watched())["r"]
    assert answer.held is not None
    assert answer.held.finish_reason == "length"
    assert answer.finished is None
    assert not engine.has_work
    num_steps = engine.stats().num_steps
    assert engine.step() == []
    assert engine.stats().num_steps == num_steps
    tier = engine.stats().tiers["small"]
    assert (tier.num_running, tier.num_waiting, tier.num_used_blocks) == (0, 0, 3)


def test_settled_it_ends_as_it_was() -> None:
    engine = make_engine(tiny_pair())
    answers = hold(engine, watched())
    engine.keep_on_tier("r")
    assert engine.has_work
    step_once(engine, answers)
    assert answers["r"].finish_reason == "length"
    assert answers["r"].finished is not None
    assert answers["r"].finished.tier == "small"
    assert answers["r"].token_ids == plain_answer("small")
    assert answers["r"].stats.num_output_tokens == 12
    assert_idle(engine)
    engine.keep_on_tier("r")  # unknown by now
    assert not engine.has_work


def test_an_answer_ended_by_a_stop_token_is_held() -> None:
    stop = plain_answer("small")[7]
    engine = make_engine(tiny_pair())
    answers = hold(engine, watched(stop_token_ids=(stop,)))
    assert answers["r"].held is not None
    assert answers["r"].held.finish_reason == "stop"
    engine.switch_tier("r", "large")
    finish(engine, answers)
    assert answers["r"].token_ids == plain_answer("large", stop_token_ids=(stop,))
    assert_idle(engine)


def test_settled_before_its_end_it_is_not_held() -> None:
    engine = make_engine(tiny_pair())
    answers = serve(
        engine,
        [watched()],
        on_step=lambda number, _: engine.keep_on_tier("r") if number == 4 else None,
    )
    assert answers["r"].held is None
    assert answers["r"].finish_reason == "length"
    assert_idle(engine)


@pytest.mark.parametrize("tier", ["small", "large"])
def test_only_watched_small_answers_are_held(tier: Tier) -> None:
    request = watched(tier=tier, may_escalate=tier == "large")
    answer = serve(make_engine(tiny_pair()), [request])["r"]
    assert answer.held is None
    assert answer.finish_reason == "length"


def test_an_abort_ends_a_held_answer() -> None:
    engine = make_engine(tiny_pair())
    answers = hold(engine, watched())
    engine.abort("r")
    assert used(engine) == {"small": 0, "large": 0}
    step_once(engine, answers)
    assert answers["r"].finish_reason == "abort"
    assert_idle(engine)


def test_held_answers_take_nobodys_place() -> None:
    engine = make_engine(tiny_pair(), config=EngineConfig(max_sequences=1))
    hold(engine, watched("a"), watched("b"))
    answers = serve(engine, [make_request("c", PROMPT, max_tokens=4)])
    assert answers["c"].finish_reason == "length"
    for name in ("a", "b"):
        engine.keep_on_tier(name)
    engine.step()
    assert_idle(engine)


def test_blocks_of_held_answers_are_taken_before_any_preemption() -> None:
    """13 blocks of 4 hold one answer of 49 tokens: the next one needs the first one's."""
    engine = make_engine(tiny_pair(), block_size=4, small_blocks=13, prefix_caching=False)
    answers = hold(engine, watched("a"))
    assert used(engine)["small"] == 12
    second = make_request("b", PROMPT, tier="small", max_tokens=12)
    answers |= serve(engine, [second])
    assert answers["b"].stats.num_preemptions == 0
    assert used(engine)["small"] == 0
    engine.switch_tier("a", "large")  # only its tokens are left
    step_once(engine, answers)
    assert answers["a"].emitted[-1].num_drafted_tokens > 0
    finish(engine, answers)
    assert answers["a"].token_ids == plain_answer("large")
    assert_idle(engine)


def test_an_answer_that_is_whole_has_nothing_to_be_continued_by() -> None:
    engine = make_engine(tiny_pair())
    answers = hold(engine, watched())
    engine.switch_tier("r", "large", keeps_answer=True)
    step_once(engine, answers)
    assert answers["r"].switches == []
    assert answers["r"].finish_reason == "length"
    assert_idle(engine)


def test_a_tier_that_is_not_there_changes_nothing() -> None:
    small = ModelRunner(model=tiny_pair().small, num_blocks=64)
    engine = Engine(runners={"small": small})
    answers = hold(engine, watched())
    with pytest.raises(TierUnavailableError):
        engine.switch_tier("r", "large")
    engine.keep_on_tier("r")
    step_once(engine, answers)
    assert answers["r"].token_ids == plain_answer("small")
    assert_idle(engine)


def test_an_answer_that_the_other_tier_cannot_read_is_not_continued() -> None:
    pair, narrow = tiny_pair(), tiny_pair(vocab_size=90)
    mixed = Pair(
        large=narrow.large,
        small=pair.small,
        large_reference=narrow.large_reference,
        small_reference=pair.small_reference,
    )
    prompt = random_prompt(20, vocab_size=80)
    wide = {"logit_bias": ((120, 100.0),), "max_tokens": 6}
    engine = make_engine(mixed)
    engine.submit(make_request("r", prompt, tier="small", may_escalate=True, **wide))
    answers: dict[str, Answer] = {}
    for _ in range(3):
        step_once(engine, answers)
    with pytest.raises(InvalidRequestError, match="token id 120"):
        engine.switch_tier("r", "large", keeps_answer=True)
    engine.switch_tier("r", "large")  # as a draft it does no harm
    finish(engine, answers)
    assert len(answers["r"].token_ids) == 6
    assert_idle(engine)


# ---- what goes over ---------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_right_answer_costs_one_pass_and_no_small_row(temperature: float) -> None:
    """Sampled, twins agree where the noise does not decide: then the rivals are what is right."""
    engine = make_engine(twins(), draft=UNLIKELY)
    answers = hold(engine, watched(max_tokens=24, temperature=temperature))
    rows = watch_small_rows(engine)
    engine.switch_tier("r", "large")
    step_once(engine, answers)
    first = answers["r"].emitted[-1]
    if temperature == 0.0:
        assert len(first.token_ids) == 24
        assert first.num_reused_tokens == 23
        assert answers["r"].stats.num_steps == 1
    else:
        assert first.num_accepted_tokens > 0
    assert rows == []
    finish(engine, answers)
    expected = serve(
        make_engine(twins(), speculates=False),
        [watched(tier="large", may_escalate=False, max_tokens=24, temperature=temperature)],
    )
    assert answers["r"].token_ids == expected["r"].token_ids
    assert_idle(engine)


def test_a_rival_is_accepted_where_the_written_token_is_wrong() -> None:
    """The large stream's best candidates stand beside the small stream's own tokens."""
    num_rivals = 0
    for seed in range(8):
        engine = make_engine(twins())
        answers = hold(engine, watched(temperature=1.0, seed=seed))
        written = answers["r"].token_ids.copy()
        engine.switch_tier("r", "large")
        step_once(engine, answers)
        first = answers["r"].emitted[-1]
        num_common = 0
        while written[num_common] == first.token_ids[num_common]:
            num_common += 1
        assert first.num_reused_tokens <= num_common
        num_rivals += first.num_accepted_tokens > first.num_reused_tokens
    # Twins rank alike, so the first difference is always a rival that was right.
    assert num_rivals == 8


def test_the_small_view_keeps_the_agreed_tokens() -> None:
    """After a whole answer in common, the drafter has nothing but the last token to catch up."""
    engine = make_engine(twins(), prefix_caching=False, draft=UNLIKELY)
    engine.submit(watched(max_tokens=40))
    answers: dict[str, Answer] = {}
    for _ in range(20):
        step_once(engine, answers)
    engine.switch_tier("r", "large")
    step_once(engine, answers)
    assert len(answers["r"].token_ids) == 21
    rows = watch_small_rows(engine)
    finish(engine, answers)
    # 20 tokens were written, the 20th was not computed, and the 21st is the next root.
    assert rows[0] == 2
    assert_idle(engine)


def test_a_request_without_drafts_is_handed_over_without_any() -> None:
    engine = make_engine(twins())
    answers = hold(engine, watched(speculation=False))
    engine.switch_tier("r", "large")
    assert used(engine)["small"] == 0
    finish(engine, answers)
    assert answers["r"].stats.num_drafted_tokens == answers["r"].stats.num_reused_tokens == 0
    assert answers["r"].stats.num_steps == 12


@pytest.mark.parametrize(("limit", "most"), [("nodes", 5), ("depth", 3), ("rows", 4)])
def test_the_tree_in_the_prefill_keeps_to_its_limits(limit: str, most: int) -> None:
    speculation = SpeculationParams(
        max_draft_nodes=most if limit == "nodes" else None,
        max_draft_depth=most if limit == "depth" else None,
    )
    # The prompt's 37 rows leave 4 in the pass that ends it.
    config = EngineConfig(max_tokens_per_step=41) if limit == "rows" else None
    engine = make_engine(
        twins(), config=config, draft=DraftConfig(max_draft_nodes=64), prefix_caching=False
    )
    answers = hold(engine, watched(speculation=speculation))
    engine.switch_tier("r", "large")
    step_once(engine, answers)
    first = answers["r"].emitted[-1]
    assert 0 < first.num_accepted_tokens <= most
    if limit != "depth":
        assert first.num_drafted_tokens <= most


def test_a_clients_prediction_is_checked_where_the_prompt_ends() -> None:
    """The whole answer, predicted, comes with the first pass; beside a retracted one it counts."""
    expected = plain_answer("large", max_tokens=20)
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        tier="large",
        sampling=watched(max_tokens=20).sampling,
        prediction_token_ids=tuple(expected),
    )
    answer = serve(make_engine(tiny_pair()), [request])["r"]
    assert answer.token_ids == expected
    assert len(answer.emitted[0].token_ids) == 20
    assert answer.emitted[0].num_predicted_tokens == answer.emitted[0].num_accepted_tokens == 19
    assert answer.stats.num_reused_tokens == 0


def test_predicted_and_reused_tokens_are_counted_apart() -> None:
    """A prediction that is wrong everywhere beside a retracted answer that is right."""
    engine = make_engine(twins(), draft=UNLIKELY)
    expected = serve(make_engine(twins()), [watched(tier="large", may_escalate=False)])["r"]
    wrong = tuple(min(expected.token_ids) + 1 for _ in range(12))
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        tier="small",
        sampling=watched().sampling,
        prediction_token_ids=wrong,
        may_escalate=True,
    )
    answers = hold(engine, request)
    engine.switch_tier("r", "large")
    finish(engine, answers)
    mine = [event for event in answers["r"].emitted if event.num_accepted_tokens]
    assert answers["r"].token_ids == expected.token_ids
    assert sum(event.num_reused_tokens for event in mine) == 11
    assert sum(event.num_predicted_tokens for event in mine) == 0


def test_the_tree_names_its_sources() -> None:
    engine = make_engine(twins())
    hold(engine, watched(temperature=0.8))
    sequence = engine._sequences["r"]
    assert len(sequence.rivals) == 12
    assert all(
        token in dict(named)
        for token, named in zip(sequence.output_token_ids, sequence.rivals, strict=True)
    )
    engine.switch_tier("r", "large")
    drafter = drafter_of(engine)
    tree = drafter.propose_from_text(sequence, max_nodes=64, num_rows=37, num_beside=0)
    assert isinstance(tree, TokenTree)
    assert set(tree.sources[1:]) == {SOURCE_BIT["model"], SOURCE_BIT["model"] | RECALLED_BIT}
    recalled = [n for n in range(1, tree.num_nodes) if tree.sources[n] & RECALLED_BIT]
    chain = [tree.token_ids[node] for node in recalled]
    assert chain == sequence.proposal_token_ids[: len(chain)]


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_written", [1, 9, 20])
def test_behind_a_mismatch_the_drafter_reads_the_text_and_not_the_retracted_one(
    num_written: int,
) -> None:
    """Twins with the same noise agree on every token, unless the draft view holds another text."""
    chains = DraftConfig(max_branching=1, max_frontier=1, min_path_prob=0.0, sources=("model",))
    engine = make_engine(twins(), draft=chains, prefix_caching=False, block_size=4)
    engine.submit(watched(max_tokens=60, temperature=1.0))
    answers: dict[str, Answer] = {}
    for _ in range(num_written):
        step_once(engine, answers)
    written = answers["r"].token_ids.copy()
    assert len(written) == num_written
    engine.switch_tier("r", "large")
    finish(engine, answers)
    assert answers["r"].token_ids[:num_written] != written
    later = answers["r"].emitted[num_written + 1 :]
    assert later
    assert all(event.num_accepted_tokens == event.num_drafted_tokens for event in later)
    assert_idle(engine)
