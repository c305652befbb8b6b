"""Figures of the engine: differences between snapshots, by hand."""

from dataclasses import replace

import pytest

from outrider.engine.events import EngineStats, StoreStats, TierStats
from outrider.gateway.http.dashboard.engine_figures import EngineMoments

FIRST = EngineStats(
    tiers={
        "large": TierStats(
            num_running=2,
            num_waiting=1,
            num_blocks=10,
            num_used_blocks=4,
            prefix_cache_queries=100,
            prefix_cache_hits=90,
            num_output_tokens=1000,
            num_newcomer_holds=2,
            newcomer_held_s=1.0,
        )
    },
    num_steps=50,
    num_stretched_steps=10,
    stretch_plain_steps=15.0,
    step_host_s=0.2,
    step_forward_s=0.8,
    num_drafts=10,
    num_draft_tokens=40,
    num_accepted_tokens=15,
    accepted_per_depth=(10, 5),
    drafted_by_source={"model": (20, 10)},
    accepted_by_source={"model": (10, 5)},
)
LATER = EngineStats(
    tiers={
        "large": replace(
            FIRST.tiers["large"],
            num_running=3,
            num_waiting=0,
            num_used_blocks=5,
            prefix_cache_queries=150,
            prefix_cache_hits=100,
            num_output_tokens=1600,
            num_held_newcomers=1,
            num_newcomer_holds=5,
            newcomer_held_s=3.0,
        )
    },
    num_steps=90,
    num_stretched_steps=30,
    stretch_plain_steps=39.0,
    step_host_s=0.4,
    step_forward_s=1.0,
    num_drafts=30,
    num_draft_tokens=120,
    num_accepted_tokens=75,
    accepted_per_depth=(30, 20, 4),
    drafted_by_source={"model": (60, 40, 10), "suffix": (10,), "grammar": (0,)},
    accepted_by_source={"model": (30, 20, 4), "suffix": (9,)},
)


def test_one_snapshot_is_about_all_since_the_start() -> None:
    moments = EngineMoments()
    assert moments.figures(5.0) is None
    moments.add(FIRST, 5.0)
    figures = moments.figures(6.0)
    assert figures is not None
    assert figures.over_s is None
    (tier,) = figures.tiers
    assert (tier.num_running, tier.num_waiting, tier.kv_cache_usage) == (2, 1, 0.4)
    assert tier.prefix_hit_share == pytest.approx(0.9)
    assert tier.tokens_per_s is None
    assert (figures.step_ms, figures.host_ms) == (pytest.approx(20.0), pytest.approx(4.0))
    assert (tier.num_held, tier.held_mean_ms) == (0, pytest.approx(500.0))
    assert figures.acceptance.tokens_per_step == pytest.approx(2.5)
    assert figures.acceptance.stretch == pytest.approx(1.5)
    assert figures.acceptance.accepted_by_depth == [1.0, 0.5]
    assert figures.history.age_s == [1.0]


def test_two_snapshots_give_the_figures_between_them() -> None:
    moments = EngineMoments()
    moments.add(FIRST, 5.0)
    moments.add(LATER, 15.0)
    figures = moments.figures(15.0)
    assert figures is not None
    assert figures.over_s == 10.0
    (tier,) = figures.tiers
    assert tier.tokens_per_s == pytest.approx(60.0)
    assert (figures.step_ms, figures.host_ms) == (pytest.approx(10.0), pytest.approx(5.0))
    assert (tier.num_held, tier.held_mean_ms) == (1, pytest.approx(500.0)), "three ended, one waits"
    assert tier.prefix_hit_share == pytest.approx(10 / 50)
    acceptance = figures.acceptance
    assert (acceptance.num_drafts, acceptance.num_draft_tokens) == (20, 80)
    assert acceptance.tokens_per_step == pytest.approx(1 + 60 / 20)
    assert acceptance.stretch == pytest.approx(1.2)
    assert acceptance.accepted_by_depth == [1.0, 0.75, 0.2]
    model, suffix = acceptance.sources
    assert (model.name, model.num_drafted, model.num_accepted) == ("model", 80, 39)
    assert model.by_depth == [pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.4)]
    assert (suffix.name, suffix.by_depth) == ("suffix", [0.9])
    assert figures.history.num_waiting == {"large": [1, 0]}
    assert figures.history.kv_cache_usage == {"large": [0.4, 0.5]}


def test_prompts_are_found_in_memory_or_on_the_disk() -> None:
    moments = EngineMoments()
    moments.add(FIRST, 5.0)
    figures = moments.figures(5.0)
    assert figures is not None
    assert figures.kv_folder is None
    stored = StoreStats(
        num_bytes=500,
        num_restored_tokens=4,
        saved_s=2.5,
        num_read_bytes=300,
        num_written_bytes=700,
    )
    moments.add(replace(LATER, store=stored), 15.0)
    figures = moments.figures(15.0)
    assert figures is not None
    assert figures.kv_folder is not None
    assert figures.kv_folder.memory_share == pytest.approx(6 / 50)
    assert figures.kv_folder.disk_share == pytest.approx(4 / 50)
    assert figures.kv_folder.saved_s == 2.5
    folder = figures.kv_folder
    assert (folder.num_read_bytes, folder.num_written_bytes, folder.num_bytes) == (300, 700, 500)


def test_an_idle_window_tells_of_the_time_since_the_start() -> None:
    moments = EngineMoments()
    moments.add(LATER, 5.0)
    moments.add(LATER, 15.0)
    figures = moments.figures(15.0)
    assert figures is not None
    assert figures.acceptance.num_drafts == 30
    assert figures.tiers[0].tokens_per_s == 0.0
    assert figures.tiers[0].prefix_hit_share == pytest.approx(100 / 150)


def test_a_restarted_engine_begins_anew() -> None:
    moments = EngineMoments()
    moments.add(LATER, 5.0)
    moments.add(FIRST, 15.0)
    figures = moments.figures(15.0)
    assert figures is not None
    assert figures.over_s is None
    assert figures.history.age_s == [0.0]


def test_snapshots_are_bounded_in_time_and_number() -> None:
    moments = EngineMoments()
    for tick in range(4000):
        moments.add(FIRST, tick * 0.25)
    figures = moments.figures(1000.0)
    assert figures is not None
    assert len(figures.history.age_s) <= 600
    assert figures.history.age_s[0] <= 301.0
    assert figures.over_s == pytest.approx(300, abs=2.0)
