"""Cases in which other servers have corrupted text (docs/architecture.md, "The KV cache")."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.budget.calibration import EdgeCalibration
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from tests.engines import (
    Answer,
    FixedTimes,
    assert_idle,
    drafter_of,
    finish,
    make_engine,
    make_request,
    random_prompt,
    scripted_drafter,
    serve,
    step_once,
    texts,
    tiny_pair,
    watch_small_rows,
)
from tests.laws.cached_text import (
    BUSHY,
    assert_caches_always_hold_the_text,
    assert_caches_hold_the_text,
)
from tests.laws.same_answers import Way, assert_same_answers, by, plainly, total

# ---- a shared block is copied before it is written to -----------------------------------------


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("tier", ["large", "small"])
def test_a_shared_block_is_copied_while_its_owner_decodes(tier: str, block_size: int) -> None:
    """The second prompt's hit ends inside a block: all of it but the last token."""
    prompt = random_prompt(48)
    requests = [
        make_request(name, prompt, tier=tier, temperature=0.9, seed=seed, max_tokens=40)
        for name, seed in (("owner", 1), ("second", 2), ("third", 3))
    ]
    copied: list[int] = []

    def watch(engine: Engine) -> None:
        runner = engine._runners[tier]
        copy_blocks = runner.copy_blocks
        runner.copy_blocks = lambda pairs: (copied.extend(p[0] for p in pairs), copy_blocks(pairs))[
            1
        ]

    late = Way(arrive=(0, 3, 5).__getitem__, watch=watch)
    served = assert_same_answers(requests, vary=late | by(block_size=block_size, draft=BUSHY))
    assert served.answers["second"].stats.num_cached_tokens == 47
    assert served.answers["third"].stats.num_cached_tokens == 47
    assert len(copied) >= 2


# ---- only accepted tokens are published ----------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [1, 9, 20, 33])
def test_a_text_that_goes_on_hits_the_cache_and_goes_on_the_same(
    temperature: float, cut: int
) -> None:
    """Noise belongs to the position, so prompt + half the answer continues with the other half."""
    engine = make_engine(tiny_pair(), block_size=4, draft=BUSHY)
    prompt = random_prompt(21)
    first = make_request("first", prompt, max_tokens=40, temperature=temperature, seed=8)
    answer = serve(engine, [first])["first"].token_ids
    assert answer == plainly(tiny_pair(), [first])["first"]
    follow_up = make_request(
        "next", (*prompt, *answer[:cut]), max_tokens=40 - cut, temperature=temperature, seed=8
    )
    again = serve(engine, [follow_up])["next"]
    assert again.token_ids == answer[cut:]
    num_prompt = 21 + cut
    assert again.stats.num_cached_tokens == min((num_prompt // 4) * 4, num_prompt - 1)


@pytest.mark.parametrize("drafts", ["tree", "random"])
def test_rejected_tokens_are_never_found(drafts: str) -> None:
    """Prompts that leave the answer's path hit exactly the blocks before they leave it."""
    prompt = random_prompt(10)
    first = make_request("first", prompt, max_tokens=30, temperature=1.2, seed=4)
    answer = plainly(tiny_pair(), [first])["first"]
    drafter = scripted_drafter({"first": answer}, chance_right=0.6) if drafts == "random" else None
    engine = make_engine(tiny_pair(), block_size=2, draft=BUSHY, drafter=drafter)
    assert serve(engine, [first])["first"].token_ids == answer
    for number, cut in enumerate(range(0, 28, 5)):
        wrong = (answer[cut] + 1) % 131
        other = make_request(
            f"other{number}", (*prompt, *answer[:cut], wrong, *answer[cut + 1 : cut + 4]),
            max_tokens=8, temperature=1.2, seed=4, speculation=False,
        )  # fmt: skip
        answers = serve(engine, [other])
        assert answers[other.request_id].stats.num_cached_tokens == (10 + cut) // 2 * 2
        assert texts(answers) == plainly(tiny_pair(), [other])


# ---- compaction ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_compaction_of_branching_trees_in_both_caches(temperature: float) -> None:
    engine = make_engine(tiny_pair(), block_size=4, draft=BUSHY)
    moved: dict[str, int] = {"large": 0, "small": 0}

    def count(tier: str) -> Callable[[list[int], list[int]], None]:
        runner = engine._runners[tier]
        original = runner.move_slots

        def move_slots(sources: list[int], destinations: list[int]) -> None:
            moved[tier] += len(sources)
            original(sources, destinations)

        return move_slots

    for tier, runner in engine._runners.items():
        runner.move_slots = count(tier)
    assert_caches_always_hold_the_text(engine, temperature)
    assert moved["large"] > 10, "no accepted path had to be moved"
    assert moved["small"] > 10


# ---- draft views that fall behind ---------------------------------------------------------


class Unlearning(EdgeCalibration):
    """A calibration that learns nothing: earlier drafts do not change the next ones."""

    def fit(self, curve: int) -> None:
        """Leave the curve as it is: the compiled library's trees observe for themselves."""


class Switchable:
    """A budget that finds drafting worth its time only while `is_on`."""

    def __init__(self) -> None:
        self.is_on = True
        self.budget = TreeBudget(
            target_pass_s=FixedTimes(lambda rows: 1.0),
            draft_pass_s=FixedTimes(lambda rows: 1e-6 if self.is_on else 1e6),
        )


def switchable_engine(switch: Switchable) -> Engine:
    return make_engine(
        tiny_pair(),
        draft=replace(BUSHY, sources=("model",)),
        budget=switch.budget,
        calibration=Unlearning(),
        drafter_clock=lambda: 0.0,  # steps are not compared by it
        block_size=4,
    )


@pytest.mark.parametrize("num_steps_off", [1, 4, 13])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_drafter_that_was_off_catches_up(num_steps_off: int, temperature: float) -> None:
    """Afterwards it drafts as if it had never been off: as for a fresh request with this text."""
    switch = Switchable()
    engine = switchable_engine(switch)
    prompt = random_prompt(30, seed=2)
    request = make_request("r", prompt, max_tokens=60, temperature=temperature, seed=6)
    answers: dict[str, Answer] = {}
    engine.submit(request)
    for _ in range(5):
        step_once(engine, answers)
    switch.is_on = False
    for _ in range(num_steps_off):
        step_once(engine, answers)
        assert answers["r"].emitted[-1].num_drafted_tokens == 0
    switch.is_on = True
    num_before = len(answers["r"].token_ids)
    step_once(engine, answers)
    assert answers["r"].emitted[-1].num_drafted_tokens > 0
    assert_caches_hold_the_text(engine, at_least=2 * (30 + num_before))
    finish(engine, answers)
    answer = answers["r"].token_ids
    assert answer == plainly(tiny_pair(), [request])["r"]

    # The fresh request's first token comes from its prefill.
    fresh = make_request(
        "fresh", (*prompt, *answer[: num_before - 1]), max_tokens=61 - num_before,
        temperature=temperature, seed=6,
    )  # fmt: skip
    fresh_events = serve(switchable_engine(Switchable()), [fresh])["fresh"].emitted[1:]
    counts = [(e.num_drafted_tokens, e.num_accepted_tokens) for e in answers["r"].emitted]
    fresh_counts = [(e.num_drafted_tokens, e.num_accepted_tokens) for e in fresh_events]
    assert counts[-len(fresh_counts) :] == fresh_counts


# ---- pressure ------------------------------------------------------------------------------


def test_draft_views_go_before_any_answer_is_preempted() -> None:
    large = [
        make_request(f"l{number}", random_prompt(40, seed=number), max_tokens=50, temperature=0.8)
        for number in range(2)
    ]
    small = [
        make_request(f"s{number}", random_prompt(44, seed=9 + number), tier="small", max_tokens=60)
        for number in range(2)
    ]
    expected = plainly(tiny_pair(), large + small)
    # The small answers need 2 * 26 blocks at the end, the draft views as many again.
    engine = make_engine(tiny_pair(), block_size=4, small_blocks=56)
    drafter = drafter_of(engine)
    views_gone: list[int] = []

    def watch(number: int, answers: dict[str, Answer]) -> None:
        views_gone.append(sum(state.view is None for state in drafter._states.values()))

    arrivals = {"s0": 3, "s1": 4}
    answers = serve(engine, large + small, arrivals=arrivals, on_step=watch)
    assert texts(answers) == expected
    assert max(views_gone) > 0
    assert engine.stats().tiers["small"].num_preemptions == 0
    assert_idle(engine)


def test_trees_shrink_before_anybody_is_preempted() -> None:
    """Room for both answers to the token: trees get what is left over, without pre-emption."""
    requests = [
        make_request(f"{number}", random_prompt(15, seed=number), max_tokens=33, temperature=0.7)
        for number in range(2)
    ]
    served = assert_same_answers(requests, vary=by(block_size=4, large_blocks=24, draft=BUSHY))
    assert served.engine.stats().tiers["large"].num_preemptions == 0
    drafted = [e.num_drafted_tokens for a in served.answers.values() for e in a.emitted]
    assert max(drafted) > 20


# ---- tenants -------------------------------------------------------------------------------


def test_tenants_share_nothing_in_either_cache() -> None:
    prompt = random_prompt(64)
    engine = make_engine(tiny_pair())
    rows = watch_small_rows(engine)

    def hits(name: str, salt: str, tier: str) -> tuple[int, int]:
        """(cached tokens, most rows of a small pass)."""
        rows.clear()
        request = make_request(name, prompt, cache_salt=salt, tier=tier, max_tokens=8)
        return serve(engine, [request])[name].stats.num_cached_tokens, max(rows)

    assert hits("a1", "a", "large") == (0, 65)  # the drafter computes the prompt, too
    cached, small_rows = hits("a2", "a", "large")
    assert cached == 63
    assert small_rows < 20
    assert hits("b1", "b", "large") == (0, 65)
    # The small tier shares the drafter's blocks, of the same tenant only.
    assert hits("a3", "a", "small")[0] == 63
    assert hits("c1", "c", "small") == (0, 64)
    assert hits("c2", "c", "small")[0] == 63
    assert hits("n1", "", "large")[0] == 0


# ---- abort ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["large", "small"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 8, 12])
def test_an_abort_frees_every_block_at_once(num_steps: int, tier: str) -> None:
    """Waiting, prefilling in chunks, decoding, with a draft view that is behind or ahead."""
    engine = make_engine(
        tiny_pair(), config=EngineConfig(max_tokens_per_step=16, min_prefill_tokens=1)
    )
    engine.submit(make_request("r", random_prompt(60), tier=tier, max_tokens=100))
    answers: dict[str, Answer] = {}
    for _ in range(num_steps):
        step_once(engine, answers)
    used = [stats.num_used_blocks for stats in engine.stats().tiers.values()]
    assert (sum(used) > 0) == (num_steps > 0)
    engine.abort("r")
    assert [stats.num_used_blocks for stats in engine.stats().tiers.values()] == [0, 0]
    step_once(engine, answers)
    assert answers["r"].finish_reason == "abort"
    assert_idle(engine)


def test_an_abort_leaves_the_others_alone() -> None:
    requests = [
        make_request(f"{number}", random_prompt(20, seed=number % 2), temperature=0.9, seed=number)
        for number in range(6)
    ]
    expected = plainly(tiny_pair(), requests)
    engine = make_engine(tiny_pair(), block_size=4)

    def watch(number: int, answers: dict[str, Answer]) -> None:
        if number in (1, 2, 3):
            engine.abort(str(2 * number - 1))

    answers = serve(engine, requests, on_step=watch)
    for name in "135":
        assert answers[name].finish_reason == "abort"
        assert answers[name].token_ids == expected[name][: len(answers[name].token_ids)]
    assert {name: answers[name].token_ids for name in "024"} == {n: expected[n] for n in "024"}
    assert_idle(engine)


# ---- the end of an answer inside a tree ------------------------------------------------------


@pytest.fixture(scope="module")
def long_answer() -> list[int]:
    request = make_request("r", random_prompt(12), max_tokens=40, temperature=1.0, seed=3)
    return plainly(tiny_pair(), [request])["r"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9, 17])
@pytest.mark.parametrize("drafts", ["tree", "beyond"])
def test_max_tokens_inside_a_tree_cuts_exactly(
    max_tokens: int, drafts: str, long_answer: list[int]
) -> None:
    drafter = None
    if drafts == "beyond":  # proposes the whole long answer whatever max_tokens says
        drafter = scripted_drafter({"r": long_answer}, chance_right=1.0, num_levels=7)
    engine = make_engine(tiny_pair(), block_size=4, drafter=drafter)
    request = make_request("r", random_prompt(12), max_tokens=max_tokens, temperature=1.0, seed=3)
    answer = serve(engine, [request])["r"]
    assert answer.token_ids == long_answer[:max_tokens]
    assert answer.finish_reason == "length"
    assert answer.stats.num_output_tokens == max_tokens
    assert answer.stats.num_accepted_tokens <= max_tokens - 1 or drafts == "beyond"
    assert_idle(engine)


@pytest.mark.parametrize("drafts", ["tree", "oracle", "off"])
def test_a_stop_token_inside_a_tree_cuts_exactly(drafts: str, long_answer: list[int]) -> None:
    for position, stop in enumerate(long_answer[:20]):
        drafter = None
        if drafts == "oracle":
            drafter = scripted_drafter({"r": long_answer}, chance_right=1.0, num_levels=6)
        engine = make_engine(tiny_pair(), block_size=4, drafter=drafter)
        request = make_request(
            "r", random_prompt(12), max_tokens=40, temperature=1.0, seed=3,
            stop_token_ids=(stop, 130 if stop != 130 else 129), speculation=drafts != "off",
        )  # fmt: skip
        answer = serve(engine, [request])["r"]
        ends = [long_answer.index(t) for t in request.sampling.stop_token_ids if t in long_answer]
        assert answer.token_ids == long_answer[: min(ends) + 1]
        assert min(ends) <= position
        assert answer.finish_reason == "stop"
        assert_idle(engine)
        # What was accepted behind the stop was not published as a part of the text.
        again = serve(engine, [request])["r"]
        assert again.token_ids == answer.token_ids


def test_a_stop_token_at_and_behind_max_tokens(long_answer: list[int]) -> None:
    """In one tree: the stop token counts up to the last permitted token, and not behind it."""
    place = next(n for n in range(4, 20) if long_answer[n] not in long_answer[:n])
    for max_tokens, reason in ((place - 1, "length"), (place, "length"), (place + 1, "stop")):
        drafter = scripted_drafter({"r": long_answer}, chance_right=1.0, num_levels=place + 3)
        request = make_request(
            "r", random_prompt(12), max_tokens=max_tokens, temperature=1.0, seed=3,
            stop_token_ids=(long_answer[place],),
        )  # fmt: skip
        answer = serve(make_engine(tiny_pair(), drafter=drafter), [request])["r"]
        assert answer.token_ids == long_answer[:max_tokens]
        assert answer.finish_reason == reason


def test_the_cache_after_a_cut_answer_is_right(long_answer: list[int]) -> None:
    drafter = scripted_drafter({"r": long_answer}, chance_right=1.0, num_levels=9)
    for max_tokens in range(1, 24):
        engine = make_engine(tiny_pair(), block_size=2, drafter=drafter)
        request = make_request(
            "r", random_prompt(12), max_tokens=max_tokens, temperature=1.0, seed=3
        )
        serve(engine, [request])
        longer = make_request(
            "r", (*random_prompt(12), *long_answer[:max_tokens]), max_tokens=40 - max_tokens,
            temperature=1.0, seed=3, speculation=False,
        )  # fmt: skip
        again = serve(engine, [longer])["r"]
        assert again.token_ids == long_answer[max_tokens:]
        assert again.stats.num_cached_tokens >= (12 + max_tokens - 1) // 2 * 2


def test_many_small_requests_leave_nothing_behind() -> None:
    engine = make_engine(tiny_pair(), block_size=4, large_blocks=30, small_blocks=30, draft=BUSHY)
    requests = [
        make_request(
            str(number), random_prompt(1 + number % 23, seed=number % 5), max_tokens=1 + number % 9,
            tier="small" if number % 3 else "large", temperature=number % 2, seed=number,
        )
        for number in range(60)
    ]  # fmt: skip
    answers = serve(engine, requests, arrivals={str(n): n // 4 for n in range(60)})
    assert total(answers, "num_output_tokens") == sum(r.sampling.max_tokens for r in requests)
    assert_idle(engine)
