import pytest

from benchmarks.shared.driving import drive, make_requests
from benchmarks.shared.prompts import Prompt
from tests.benchmarks.benches import make_bench, make_prompts
from tests.engines import random_prompt, serve


@pytest.mark.slow
def test_a_drive_gives_the_engines_answers_and_accounts_for_the_time() -> None:
    bench = make_bench()
    prompts = make_prompts(7)
    done = drive(bench, make_requests(prompts, tier="large", max_tokens=12), concurrency=3)
    requests = make_requests(prompts, tier="large", max_tokens=12, speculate=False)
    plain = serve(make_bench().engine, requests)
    assert done.outputs == [plain[request.request_id].token_ids for request in requests]
    assert done.num_tokens == 7 * 12
    assert max(step.num_in_flight for step in done.steps) == 3
    assert sum(step.num_emitted for step in done.steps) == done.num_tokens
    for step in done.steps:
        assert 0 < step.large_s < step.wall_s
        assert step.host_s > 0
    assert sum(step.wall_s for step in done.steps) <= done.wall_s
    assert not done.steps[-1].had_prefill
    assert done.steps[0].had_prefill


def test_the_tally_agrees_with_the_requests_own_counts() -> None:
    bench = make_bench()
    requests = make_requests(make_prompts(4), tier="large", max_tokens=20)
    done = drive(bench, requests, concurrency=4)
    tally = bench.verifier.tally
    stats = [answer.stats for answer in done.streams if answer.stats is not None]
    assert tally.num_nodes == sum(s.num_drafted_tokens for s in stats) > 0
    # Tokens that were cut off an answer's end are accepted by the verifier only.
    assert sum(tally.accepted) >= sum(s.num_accepted_tokens for s in stats) > 0
    assert tally.offered[0] == tally.num_trees
    assert all(0 <= share <= 1 for share in tally.acceptance_by_depth)
    assert sorted(tally.offered, reverse=True) == tally.offered


def test_runs_find_nothing_of_each_other_in_the_prefix_cache() -> None:
    bench = make_bench()
    prompts = [Prompt(messages=(), token_ids=random_prompt(64), kind="random")] * 2
    for _ in range(2):
        requests = make_requests(prompts, tier="large", max_tokens=2)
        done = drive(bench, requests, concurrency=1)
        assert [s.stats.num_cached_tokens for s in done.streams if s.stats] == [0, 0]
