"""Named prompts: kept as long as was asked, for one tenant, and never in the way of a request."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.core import Engine
from outrider.engine.errors import InvalidRequestError, PinTooLargeError
from outrider.engine.events import Failed
from outrider.engine.request import EngineRequest, Pin
from tests.engines import make_engine, make_request, random_prompt, serve, tiny_pair
from tests.stores import opened_store, settle, slow_down, stored_files

PROMPT = random_prompt(100)


def pinning(
    name: str = "rules", prompt: tuple[int, ...] = PROMPT, *, ttl_s: float = 3600.0, **options: Any
) -> EngineRequest:
    """A request that has the prompt computed and kept."""
    request = make_request(f"pin-{name}", prompt, max_tokens=0, **options)
    return replace(request, tenant="team", pin=Pin(name=name, ttl_s=ttl_s))


def small_engine(**options: Any) -> Engine:
    """An engine whose caches have room for few texts."""
    return make_engine(tiny_pair(), large_blocks=40, small_blocks=40, **options)


def crowd_out(engine: Engine) -> None:
    """Have other texts take the place of all that is not held."""
    pool_tokens = engine.info().tiers["large"].num_blocks * engine.info().tiers["large"].block_size
    for number in range(pool_tokens // 140 + 1):
        other = make_request(f"other-{number}", random_prompt(140, seed=number), max_tokens=0)
        serve(engine, [other])


def num_cached(engine: Engine, prompt: tuple[int, ...] = PROMPT, **options: Any) -> int:
    asked = make_request("asked", (*prompt, 5, 6, 7), max_tokens=4, **options)
    return serve(engine, [asked])["asked"].stats.num_cached_tokens


def test_a_kept_prompt_is_found_where_others_were_evicted() -> None:
    engine = small_engine()
    other = random_prompt(100, seed=1)
    serve(engine, [make_request("other", other), pinning()])
    crowd_out(engine)
    assert num_cached(engine, other) == 0
    assert num_cached(engine) == 96
    (info,) = engine.pins.infos()
    assert (info.name, info.tenant, info.tier, info.num_tokens) == ("rules", "team", "large", 96)


def test_a_kept_prompt_is_that_of_its_salt_alone() -> None:
    engine = small_engine()
    serve(engine, [pinning(cache_salt="a")])
    assert num_cached(engine, cache_salt="b") == 0
    assert num_cached(engine, cache_salt="a") == 96


def test_what_was_kept_for_its_time_or_deleted_can_be_evicted() -> None:
    engine = small_engine()
    serve(engine, [pinning(ttl_s=1e-9)])
    assert engine.pins.infos() == []
    serve(engine, [pinning()])
    assert engine.pins.release("another team", "rules") == []
    assert [info.name for info in engine.pins.release("team", "rules")] == ["rules"]
    assert engine.stats().tiers["large"].num_used_blocks == 0
    crowd_out(engine)
    assert num_cached(engine) == 0


def test_a_name_that_is_taken_gets_another_prompt() -> None:
    engine = small_engine()
    serve(engine, [pinning()])
    serve(engine, [pinning(prompt=random_prompt(40))])
    assert [info.num_tokens for info in engine.pins.infos()] == [32]
    assert engine.stats().tiers["large"].num_used_blocks == 2


def test_what_is_kept_leaves_room_for_the_longest_request() -> None:
    """20 blocks, of which a request of full length needs 16: 4 are left, less than a quarter."""
    engine = make_engine(tiny_pair(max_positions=256), large_blocks=20)
    with pytest.raises(PinTooLargeError, match=r"at most 64 tokens .* this prompt has 80"):
        engine.submit(pinning(prompt=random_prompt(80)))
    serve(engine, [pinning(prompt=random_prompt(64))])
    with pytest.raises(PinTooLargeError, match=r"0 of them are left.*delete another"):
        engine.submit(pinning("more", prompt=random_prompt(16)))
    longest = make_request("longest", random_prompt(200, seed=2), max_tokens=56)
    assert serve(engine, [longest])["longest"].stats.num_output_tokens == 56


def test_of_two_prompts_that_come_at_once_and_fit_alone_only_one_is_kept() -> None:
    engine = small_engine()
    for number in range(2):
        engine.submit(pinning(f"{number}", prompt=random_prompt(120, seed=number)))
    events = []
    while engine.has_work:
        events += engine.step()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.code == "pin_too_large"
    assert len(engine.pins.infos()) == 1
    assert engine.stats().tiers["large"].num_used_blocks == 7


def test_what_keeps_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"whole blocks of 16 tokens.* has 15"):
        small_engine().submit(pinning(prompt=random_prompt(15)))
    with pytest.raises(InvalidRequestError, match="prefix caching is off"):
        small_engine(prefix_caching=False).submit(pinning())


@pytest.mark.parametrize(
    ("architecture", "options", "found"),
    [
        ("gemma2", {"window_blocks": 90, "block_size": 4, "large_blocks": 110}, 100),
        ("qwen3_5", {"large_blocks": 40}, 64),
    ],
)
def test_windowed_and_recurrent_layers_keep_what_a_pass_goes_on_from(
    architecture: str, options: dict[str, Any], found: int
) -> None:
    engine = make_engine(tiny_pair(architecture, max_positions=256), **options)
    serve(engine, [pinning()])
    crowd_out(engine)
    assert num_cached(engine) == found


def test_windowed_layers_keep_no_more_than_a_lone_answer_leaves() -> None:
    pair = tiny_pair("gemma2", max_positions=256)
    engine = make_engine(pair, window_blocks=66, block_size=4)
    with pytest.raises(PinTooLargeError):
        engine.submit(pinning())


# ---- beyond a restart ---------------------------------------------------------------------------


def restarted(store: Any) -> Engine:
    """An engine that knows nothing but what the folder has."""
    engine = small_engine(store=store)
    slow_down(engine)
    engine.pins.restore(engine.submit)
    settle(engine, store)
    return engine


def keep_in(folder: Path, request: EngineRequest) -> None:
    with opened_store(folder) as store:
        engine = small_engine(store=store)
        serve(engine, [request])
        settle(engine, store)


def test_a_kept_prompt_comes_back_from_the_folder_and_stays(tmp_path: Path) -> None:
    keep_in(tmp_path, pinning(cache_salt="salt"))
    with opened_store(tmp_path) as store:
        engine = restarted(store)
        (info,) = engine.pins.infos()
        assert (info.name, info.tenant, info.num_tokens) == ("rules", "team", 96)
        assert 3000.0 < info.left_s <= 3600.0
        assert engine.stats().store.num_restored_tokens == 96
        crowd_out(engine)
        assert num_cached(engine, cache_salt="salt") == 96


def test_what_was_deleted_or_had_its_time_does_not_come_back(tmp_path: Path) -> None:
    keep_in(tmp_path / "a", pinning())
    with opened_store(tmp_path / "a") as store:
        engine = restarted(store)
        engine.pins.release("team", "rules")
        settle(engine, store)
        assert restarted(store).pins.infos() == []
    keep_in(tmp_path / "b", pinning(ttl_s=1e-9))
    with opened_store(tmp_path / "b") as store:
        assert restarted(store).pins.infos() == []
    assert not list(tmp_path.rglob("*.pin"))


def test_what_is_kept_outlives_the_folders_time_and_its_budget(tmp_path: Path) -> None:
    keep_in(tmp_path, pinning())
    with opened_store(tmp_path) as store:
        engine = restarted(store)
        serve(engine, [make_request("other", random_prompt(100, seed=1))])
        settle(engine, store)
    kept = stored_files(tmp_path)
    with opened_store(tmp_path, ttl_s=0.0) as store:
        store.folder.collect()
        (left,) = stored_files(tmp_path)
        assert left in kept
    with opened_store(tmp_path, budget_bytes=left.stat().st_size + 2**14) as store:
        engine = restarted(store)
        crowd_out(engine)
        settle(engine, store)
        assert left in stored_files(tmp_path)


def test_a_pin_that_was_changed_is_not_used(tmp_path: Path) -> None:
    keep_in(tmp_path, pinning(ttl_s=60.0))
    (path,) = tmp_path.rglob("*.pin")
    path.write_bytes(path.read_bytes().replace(b'"until_s": 1', b'"until_s": 9', 1))
    with opened_store(tmp_path) as store:
        assert restarted(store).pins.infos() == []
    assert not path.exists()
