"""Models on demand: started once, put out when others need room, never while they answer."""

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import ConflictError, UnavailableError
from outrider.gateway.http.server.veil import without_tiers
from outrider.gateway.telemetry.log_context import begin_log_context
from outrider.gateway.upstream.on_demand.metrics import ModelCollector
from outrider.gateway.upstream.on_demand.model import OnDemandModel
from tests.gateway.upstream.on_demand_world import pool_world, running, until


async def use(*models: OnDemandModel) -> None:
    """Ask models for an answer each, one after the other."""
    for model in models:
        await model.until_loaded()


async def refused(model: OnDemandModel) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        await model.until_loaded()
    return caught.value


async def test_requests_that_come_together_start_one_process() -> None:
    async with running(pool_world()) as world:
        tiny = world.add("tiny")
        await asyncio.gather(use(tiny), use(tiny), use(tiny))
        await use(tiny)
        assert (tiny.state, len(world.started)) == ("loaded", 1)


async def test_the_model_that_was_used_least_recently_makes_room() -> None:
    async with running(pool_world(memory_gib=2)) as world:
        first, second, third = map(world.add, ("first", "second", "third"))
        await use(first, second, first, third)
        assert world.names == ["first", "third"]
        assert (second.state, third.idle_s is None) == ("unloaded", False)
        await use(second)
        assert world.names == ["third", "second"]


async def test_as_many_are_put_out_as_are_in_the_way_and_none_in_vain() -> None:
    async with running(pool_world(memory_gib=3)) as world:
        small, other = world.add("small"), world.add("other")
        await use(small, other)
        big = world.add("big", 2.5)
        lease = world.begin(small)
        assert "it takes 2.5 GiB of memory, and 1 GiB are free" in str(await refused(big))
        assert world.names == ["small", "other"]
        lease.succeeded()
        await use(big)
        assert world.names == ["big"]


async def test_an_answer_is_never_cut_off_and_its_end_makes_room() -> None:
    async with running(pool_world(memory_gib=1)) as world:
        busy, other = world.add("busy"), world.add("other")
        await use(busy)
        lease = world.begin(busy)
        waiting = asyncio.create_task(use(other))
        await asyncio.sleep(0.15)
        assert world.names == ["busy"]
        lease.succeeded()
        await waiting
        assert world.names == ["other"]


async def test_a_model_that_is_waited_for_is_not_put_out() -> None:
    """Between the end of its loading and the first byte of the request it has none in flight."""
    async with running(pool_world(memory_gib=1)) as world:
        world.loads_at_once = False
        one, two = world.add("one"), world.add("two")

        async def ask() -> None:
            await one.until_loaded()
            with world.begin(one):
                await asyncio.sleep(0.02)
                assert world.names == ["one"]

        first = asyncio.create_task(ask())
        await until(lambda: len(world.started) == 1)
        second = asyncio.create_task(use(two))
        await until(lambda: two.num_waiting == 1)
        world.loads_at_once = True
        world.started[0].loaded.set()
        while not one.is_loaded:  # noqa: ASYNC110 - each turn of the loop is looked at
            await asyncio.sleep(0)
        assert one.is_busy
        await asyncio.gather(first, second)
        assert world.names == ["two"]


async def test_without_room_only_operators_are_told_what_holds_the_memory() -> None:
    async with running(pool_world(memory_gib=4)) as world:
        holder, other = world.add("holder", 3), world.add("other", 2)
        await use(holder)
        with world.begin(holder):
            error = await refused(other)
        assert str(error) == (
            "The other tier cannot load its model: it takes 2 GiB of memory, and 1 GiB are free "
            "beside other models. Try again in 10 s."
        )
        assert other.reason.endswith("are free; in use by holder (loaded, 3 GiB, 1 in flight)")
        assert error.retry_after_s == 10
        await use(other)  # no failure that keeps it away


async def test_a_model_larger_than_all_memory_is_refused_before_any_is_put_out() -> None:
    async with running(pool_world(memory_gib=2)) as world:
        small, huge = world.add("small"), world.add("huge", 5)
        await use(small)
        assert "it takes 5 GiB of memory, and 1 GiB are free" in str(await refused(huge))
        assert world.names == ["small"]


async def test_the_machines_free_memory_bounds_models_where_no_size_is_set() -> None:
    async with running(pool_world(memory_gib=None, free_gib=2.5)) as world:
        one, two, three = map(world.add, ("one", "two", "three"))
        await use(one, two, three)
        assert world.names == ["two", "three"]


async def test_a_model_keeps_the_memory_that_it_does_not_use_yet() -> None:
    async with running(pool_world(memory_gib=None, free_gib=2.5)) as world:
        world.used_gib = 0.1
        one, two, three = map(world.add, ("one", "two", "three"))
        await use(one, two, three)
        assert world.names == ["two", "three"]


async def test_models_that_load_at_once_do_not_take_the_same_memory() -> None:
    async with running(pool_world(memory_gib=None, free_gib=1.5)) as world:
        world.loads_at_once = False
        one, two = world.add("one"), world.add("two")
        first = asyncio.create_task(refused(one))
        await until(lambda: len(world.started) == 1)
        await asyncio.gather(first, refused(two))
        assert len(world.started) == 1


async def test_a_model_that_cannot_load_is_not_started_again_and_again() -> None:
    async with running(pool_world()) as world:
        world.error = "no such folder"
        broken = world.add("broken")
        errors = await asyncio.gather(refused(broken), refused(broken))
        assert {str(error) for error in errors} == {
            "The broken tier cannot load its model: no such folder. Try again in 10 s."
        }
        assert (await refused(broken)).retry_after_s == pytest.approx(10, abs=1)
        assert (broken.state, len(world.started)) == ("failed", 1)
        assert broken.reason == "no such folder: /models/secret"  # for operators
        world.clock.skipped_s += 11
        told = await refused(broken)
        assert re.search(r"in (19|20) s", str(told))
        assert "broken" not in without_tiers(problem_of(told)).message
        assert len(world.started) == 2
        world.error = ""
        await broken.load()  # by hand at once
        assert (broken.state, broken.reason) == ("loaded", "")


async def test_a_request_waits_no_longer_than_it_may_and_loading_goes_on() -> None:
    async with running(pool_world()) as world:
        world.loads_at_once = False
        slow = world.add("slow")
        error = await refused(slow)
        assert "has not loaded its model within 0.3 s; it goes on" in str(error)
        assert error.retry_after_s == 10
        with pytest.raises(UnavailableError, match=r"within 0\.0"):
            await slow.until_loaded(world.clock() + 0.01)
        world.started[0].loaded.set()
        await use(slow)
        assert len(world.started) == 1


async def test_no_more_requests_wait_than_may() -> None:
    async with running(pool_world()) as world:
        world.loads_at_once = False
        slow, other = world.add("slow"), world.add("other")
        waiting = [asyncio.create_task(refused(slow)) for _ in range(3)]
        await until(lambda: slow.num_waiting == 3)
        assert "3 requests wait for models" in str(await refused(other))
        assert len(world.started) == 1
        await asyncio.gather(*waiting)


async def test_a_tenant_that_takes_all_places_leaves_others_their_share() -> None:
    async def refused_of(tenant: str, model: OnDemandModel) -> str:
        begin_log_context("req-1").tenant = tenant
        return str(await refused(model))

    async with running(pool_world()) as world:
        world.loads_at_once = False
        slow, other = world.add("slow"), world.add("other")
        places = [("many", slow)] * 3 + [("few", other)] * 2 + [("third", slow)]
        waiting = []
        for number, (tenant, model) in enumerate(places, 1):
            waiting.append(asyncio.create_task(refused_of(tenant, model)))
            await until(lambda number=number: world.pool.waiting.total() == number)
        for tenant in ("many", "few", "third", "fourth"):
            assert "6 requests wait" in await asyncio.create_task(refused_of(tenant, slow))
        told = await asyncio.gather(*waiting)
        assert all("has not loaded" in each for each in told)
        assert not world.pool.waiting


async def test_a_client_that_goes_away_leaves_the_loading_to_others() -> None:
    async with running(pool_world()) as world:
        world.loads_at_once = False
        tiny = world.add("tiny")
        gone, stays = asyncio.create_task(use(tiny)), asyncio.create_task(use(tiny))
        await until(lambda: tiny.num_waiting == 2)
        gone.cancel()
        await until(lambda: tiny.num_waiting == 1 and bool(world.started))
        world.started[0].loaded.set()
        await stays
        assert len(world.started) == 1


async def test_a_process_that_ends_soon_is_a_failure_and_a_later_end_is_none() -> None:
    async with running(pool_world()) as world:
        tiny = world.add("tiny")
        await use(tiny)
        world.started[0].crash()
        await until(lambda: tiny.state == "failed")
        assert "ended soon (status -9)" in str(await refused(tiny))
        world.clock.skipped_s += 11
        await use(tiny)
        world.clock.skipped_s += 100
        world.started[1].crash()
        await until(lambda: tiny.state == "unloaded")
        await use(tiny)
        assert len(world.started) == 3


async def test_a_model_that_nobody_uses_is_put_out() -> None:
    async with running(pool_world()) as world:
        short, long = world.add("short", keep_alive_s=30), world.add("long")
        await use(short, long)
        with world.begin(short):
            world.clock.skipped_s += 100
            await until(lambda: world.clock() - short.last_used_s < 50)  # seen in use
            assert world.names == ["short", "long"]
        world.clock.skipped_s += 100
        await until(lambda: world.names == ["long"])
        await use(short)
        assert world.names == ["long", "short"]


async def test_a_request_during_the_end_of_a_process_starts_another_one() -> None:
    async with running(pool_world()) as world:
        tiny = world.add("tiny")
        await use(tiny)
        await asyncio.gather(tiny.unload(), use(tiny))
        assert (tiny.state, len(world.started), len(world.names)) == ("loaded", 2, 1)


async def test_unloading_by_hand_refuses_a_model_in_use_and_ends_a_loading_that_nobody_awaits() -> (
    None
):
    async with running(pool_world()) as world:
        tiny = world.add("tiny")
        await use(tiny)
        with world.begin(tiny), pytest.raises(ConflictError, match="1 requests under way"):
            await tiny.unload()
        await tiny.unload()
        assert (tiny.state, world.names) == ("unloaded", [])
        world.loads_at_once = False
        await refused(tiny)
        await tiny.unload()
        assert (tiny.state, world.names) == ("unloaded", [])


async def test_the_end_of_the_gateway_ends_models_that_load() -> None:
    world = pool_world()
    async with running(world):
        world.loads_at_once = False
        await refused(world.add("slow"))
    assert world.names == []


async def test_metrics_count_loads_evictions_and_refused_requests() -> None:
    async with running(pool_world(memory_gib=1)) as world:
        collector, registry = ModelCollector(), CollectorRegistry()
        collector.models = world.pool.models
        registry.register(collector)
        one, two = world.add("one"), world.add("two")
        await use(one, two, one)
        with world.begin(one):
            waiting = asyncio.create_task(refused(two))
            await until(lambda: two.num_waiting == 1)
            assert value(registry, "waiting_requests", tier="two") == 1
            await waiting
        world.error = "torn"
        await refused(two)
        assert value(registry, "loads_total", tier="one") == 2
        assert value(registry, "load_seconds_total", tier="two") > 0
        assert value(registry, "evictions_total", tier="one", why="memory") == 2
        assert value(registry, "loaded", tier="one") == 0
        assert value(registry, "refused_requests_total", tier="two") == 2
        assert value(registry, "load_failures_total", tier="two") == 1


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"outrider_on_demand_{name}", labels)
    assert found is not None, name
    return found
