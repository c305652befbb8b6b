"""The work reported to requests adds up to the engine's counters, whatever happens to them."""

import random
from collections import Counter
from dataclasses import asdict, replace

import pytest

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.errors import InvalidGrammarError
from outrider.engine.events import EngineEvent, Failed, Finished, TierWork
from outrider.engine.request import GrammarSpec
from outrider.verifier.params import CascadeParams, Tier
from tests.engines import (
    make_engine,
    make_request,
    random_prompt,
    tiny_pair,
    watch_small_rows,
)

MAX_PROMPT, MAX_TOKENS = 60, 24

# TierStats' names of what TierWork calls otherwise, or the same.
COUNTERS = {
    "num_computed_tokens": "num_computed_tokens",
    "num_output_tokens": "num_output_tokens",
    "num_discarded_tokens": "num_discarded_tokens",
    "num_drafted_tokens": "num_drafted_tokens",
    "num_accepted_tokens": "num_accepted_tokens",
    "num_draft_rows": "num_draft_rows",
    "num_preemptions": "num_preemptions",
    "num_queried_tokens": "prefix_cache_queries",
    "num_hit_tokens": "prefix_cache_hits",
}


class Accounts:
    """Steps an engine and compares the sums with its counters after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ended: dict[str, Finished | Failed] = {}

    def step(self) -> list[EngineEvent]:
        events = self.engine.step()
        for event in events:
            if isinstance(event, Finished | Failed):
                assert event.request_id not in self.ended
                self.ended[event.request_id] = event
        self.compare()
        return events

    def compare(self) -> None:
        live = [sequence.stats().work for sequence in self.engine._sequences.values()]
        # An abort's last word comes with the next step.
        unsent = [e for e in self.engine._events if isinstance(e, Finished | Failed)]
        every = [work for ending in (*self.ended.values(), *unsent) for work in ending.work]
        every += [work for works in live for work in works]
        stats = self.engine.stats()
        for tier, counted in stats.tiers.items():
            sums = total(work for work in every if work.tier == tier)
            for name, counter in COUNTERS.items():
                assert sums[name] == getattr(counted, counter), (tier, name)
            left = sums["num_queried_tokens"] - sums["num_hit_tokens"]
            assert counted.num_prompt_tokens == left
        sums = total(every)
        assert sums["num_drafted_tokens"] == stats.num_draft_tokens
        assert sums["num_accepted_tokens"] == stats.num_accepted_tokens
        assert sums["num_unratified_tokens"] == stats.num_unratified_tokens

    def run(self) -> None:
        for number in range(5000):
            if not self.engine.has_work:
                return
            self.step()
            if number % 500 == 499:  # a cascade may wait for the small blocks that these keep
                for sequence in list(self.engine.scheduler.held):
                    self.engine.keep_on_tier(sequence.request_id)
        raise AssertionError("the requests do not end")


def total(works: object) -> Counter[str]:
    sums: Counter[str] = Counter()
    for work in works:  # type: ignore[attr-defined]
        sums.update({name: n for name, n in asdict(work).items() if name != "tier"})
    return sums


def work_of(ending: Finished | Failed, tier: Tier) -> TierWork:
    (found,) = [work for work in ending.work if work.tier == tier]
    return found


def check_case(number: int) -> Counter[str]:
    """One random engine and its requests; returns what all of them did."""
    rng = random.Random(number)
    block_size = rng.choice([1, 4, 16])
    fewest = -(-(MAX_PROMPT + MAX_TOKENS) // block_size)
    engine = make_engine(
        tiny_pair(),
        block_size=block_size,
        large_blocks=fewest + rng.choice([0, 3, fewest]),
        small_blocks=fewest + rng.choice([0, 3, fewest]),
        prefix_caching=rng.random() < 0.8,
        on_device=number % 2 == 1,
        config=EngineConfig(
            max_sequences=rng.choice([2, 5, 64]),
            max_tokens_per_step=rng.choice([7, 64]),
            min_prefill_tokens=1,
        ),
        draft=DraftConfig(max_draft_nodes=rng.choice([7, 32]), max_catch_up_tokens=9),
    )
    accounts = Accounts(engine)
    tiers: dict[str, Tier] = {}
    for n in range(rng.randrange(3, 11)):
        tier = rng.choice(["large", "large", "small"])
        length = rng.randrange(1, MAX_PROMPT)
        request = make_request(
            f"{n}",
            random_prompt(MAX_PROMPT, seed=rng.randrange(3))[:length],
            tier=tier,
            max_tokens=rng.randrange(1, MAX_TOKENS + 1),
            temperature=rng.choice([0.0, 0.9]),
            speculation=rng.random() < 0.8,
            group_id=rng.choice([None, "g"]),
            may_escalate=tier == "small" and rng.random() < 0.6,
        )
        has_cascade = tier == "large" and number % 4 == 0 and rng.random() < 0.4
        engine.submit(
            replace(
                request,
                cascade=CascadeParams(alpha=0.5) if has_cascade else None,
                tenant=rng.choice(["", "a", "b"]),
                priority=rng.choice([-1, 0, 1]),
            )
        )
        tiers[request.request_id] = tier
        for _ in range(rng.choice([0, 1, 3])):
            accounts.step()
        name = rng.choice(list(tiers))
        if name in engine._sequences and rng.random() < 0.4:
            tiers[name] = "small" if tiers[name] == "large" else "large"
            engine.switch_tier(name, tiers[name], keeps_answer=rng.random() < 0.4)
            accounts.compare()
        if rng.random() < 0.3:
            engine.abort(rng.choice(list(tiers)))
            accounts.compare()
    accounts.run()
    for name in list(engine._sequences):  # what is held now
        engine.keep_on_tier(name) if rng.random() < 0.5 else engine.switch_tier(name, "large")
    accounts.run()
    assert set(accounts.ended) == set(tiers)
    return total(work for ending in accounts.ended.values() for work in ending.work)


def test_the_sums_equal_the_counters_at_any_moment() -> None:
    everything: Counter[str] = Counter()
    for number in range(24):
        everything += check_case(number)
    for name in asdict(TierWork(tier="small")):
        assert name == "tier" or everything[name] > 0, f"{name} never happened"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_sums_equal_the_counters_in_many_cases() -> None:
    for number in range(24, 3000):
        check_case(number)


def test_a_plain_answer() -> None:
    engine = make_engine(tiny_pair(), speculates=False)
    accounts = Accounts(engine)
    engine.submit(make_request("a", random_prompt(20), max_tokens=5))
    accounts.run()
    ending = accounts.ended["a"]
    assert ending.work == (
        TierWork(
            tier="large",
            num_prompt_tokens=20,
            num_computed_tokens=20,
            num_output_tokens=5,
            num_steps=5,
            num_queried_tokens=20,
        ),
    )
    engine.submit(make_request("b", random_prompt(20), max_tokens=5))
    accounts.run()
    again = work_of(accounts.ended["b"], "large")
    assert (again.num_cached_tokens, again.num_computed_tokens) == (16, 4)


def test_drafting_is_the_small_models_work() -> None:
    engine = make_engine(tiny_pair())
    accounts = Accounts(engine)
    engine.submit(make_request("a", random_prompt(20), max_tokens=24))
    accounts.run()
    small, large = accounts.ended["a"].work
    assert (small.tier, small.num_prompt_tokens, small.num_output_tokens) == ("small", 0, 0)
    # it read the prompt and the answer at least, then its own guesses
    assert small.num_draft_rows > 20 + 20
    assert large.num_draft_rows == 0
    assert large.num_drafted_tokens > large.num_accepted_tokens > 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("on_device", [False, True])
def test_every_row_of_a_draft_pass_is_somebodys(on_device: bool) -> None:
    engine = make_engine(tiny_pair(), on_device=on_device)
    small_rows = watch_small_rows(engine)
    accounts = Accounts(engine)
    for number in range(3):
        prompt = random_prompt(10 + 9 * number, seed=number)
        engine.submit(make_request(str(number), prompt, max_tokens=24))
    accounts.run()
    each = [work_of(accounts.ended[str(number)], "small").num_draft_rows for number in range(3)]
    assert sum(each) == sum(small_rows)
    # everybody's text was read once at least, and the longest prompt is read by one of them only
    assert all(rows >= 10 + 9 * number + 10 for number, rows in enumerate(each))


def test_a_request_that_never_ran_did_nothing() -> None:
    engine = make_engine(tiny_pair())
    accounts = Accounts(engine)
    engine.submit(make_request("a", random_prompt(20)))
    engine.abort("a")
    accounts.step()
    assert accounts.ended["a"].work == ()


def test_an_aborted_request_reports_its_work() -> None:
    engine = make_engine(
        tiny_pair(),
        speculates=False,
        config=EngineConfig(max_tokens_per_step=8, min_prefill_tokens=8),
    )
    accounts = Accounts(engine)
    engine.submit(make_request("a", random_prompt(20)))
    accounts.step()
    engine.abort("a")
    accounts.step()
    work = work_of(accounts.ended["a"], "large")
    assert (work.num_prompt_tokens, work.num_computed_tokens, work.num_output_tokens) == (20, 8, 0)


def test_an_escalated_answer_is_discarded_and_a_kept_one_is_not() -> None:
    for keeps_answer in (False, True):
        engine = make_engine(tiny_pair(), speculates=False)
        accounts = Accounts(engine)
        engine.submit(make_request("a", random_prompt(20), tier="small", max_tokens=400))
        while engine.stats().tiers["small"].num_output_tokens < 6:
            accounts.step()
        num_small = engine.stats().tiers["small"].num_output_tokens
        engine.switch_tier("a", "large", keeps_answer=keeps_answer)
        for _ in range(3):
            accounts.step()
        engine.abort("a")
        accounts.step()
        small, large = accounts.ended["a"].work
        assert small.num_output_tokens == num_small
        assert small.num_discarded_tokens == (0 if keeps_answer else num_small)
        assert large.num_prompt_tokens == 20
        assert large.num_computed_tokens == (20 + num_small if keeps_answer else 20)
        assert (large.num_output_tokens, large.num_discarded_tokens) == (3, 0)


@pytest.mark.slow
def test_switching_back_discards_the_tokens_of_both_tiers() -> None:
    engine = make_engine(tiny_pair(), speculates=False)
    accounts = Accounts(engine)
    engine.submit(make_request("a", random_prompt(20), tier="small", max_tokens=200))
    accounts.step()
    engine.switch_tier("a", "large", keeps_answer=True)
    accounts.step()
    engine.switch_tier("a", "small")
    accounts.run()
    small, large = accounts.ended["a"].work
    assert large.num_discarded_tokens == large.num_output_tokens > 0
    assert small.num_output_tokens - small.num_discarded_tokens == 200
    assert small.num_discarded_tokens > 0


def test_recomputed_tokens_count_again() -> None:
    engine = make_engine(
        tiny_pair(), speculates=False, block_size=4, large_blocks=36, prefix_caching=False
    )
    accounts = Accounts(engine)
    for number in range(4):
        prompt = random_prompt(30, seed=number)
        engine.submit(make_request(str(number), prompt, max_tokens=30, speculation=False))
    accounts.run()
    works = [work_of(accounts.ended[str(number)], "large") for number in range(4)]
    lost = [work for work in works if work.num_preemptions]
    assert lost
    for work in works:
        assert work.num_prompt_tokens == 30
        assert (work.num_computed_tokens > 30) == (work in lost)


class _NoGrammars:
    """A compiler that takes its time to find out that there is none."""

    def compile(self, spec: GrammarSpec, *, salt: str = "", tenant: str = "") -> object:
        from concurrent.futures import Future

        future: Future[object] = Future()
        future.set_exception(InvalidGrammarError("nonsense"))
        return future


def test_a_grammar_that_cannot_be_is_told_that_nothing_was_done() -> None:
    engine = make_engine(tiny_pair(), grammars={"large": _NoGrammars()})  # type: ignore[dict-item]
    accounts = Accounts(engine)
    request = make_request("a", random_prompt(20))
    engine.submit(replace(request, grammar=GrammarSpec(kind="regex", text="a")))
    accounts.run()
    ending = accounts.ended["a"]
    assert isinstance(ending, Failed)
    assert ending.stats is not None
    assert (ending.stats.num_prompt_tokens, ending.work) == (20, ())
