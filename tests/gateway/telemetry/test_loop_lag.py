"""The event loop's lag: by how much later than due it wakes."""

import asyncio
import contextlib
import time

from prometheus_client import CollectorRegistry

from outrider.gateway.telemetry.loop_lag import LoopLag, StageTimes


def total(registry: CollectorRegistry, name: str) -> float:
    value = registry.get_sample_value(f"outrider_event_loop_lag_seconds_{name}")
    assert value is not None
    return value


def test_the_lag_is_the_delay_of_a_sleep() -> None:
    now = 100.0
    taken = iter([0.05, 0.06, 0.25, 0.049])

    async def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds == 0.05
        try:
            now += next(taken)
        except StopIteration:
            raise asyncio.CancelledError from None

    registry = CollectorRegistry()
    lag = LoopLag(registry, interval_s=0.05, clock=lambda: now, sleep=sleep)

    async def main() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await lag.run()

    assert lag.quantile_s(0.5) is None
    asyncio.run(main())
    assert total(registry, "count") == 4
    assert round(total(registry, "sum"), 6) == 0.21, "10 ms and 200 ms; early is no lag"
    assert round(lag.quantile_s(0.5) or 0.0, 6) == 0.01
    assert round(lag.quantile_s(0.99) or 0.0, 6) == 0.2
    late = registry.get_sample_value("outrider_event_loop_lag_seconds_bucket", {"le": "0.1"})
    assert late == 3


def test_a_loop_that_is_held_up_shows_it() -> None:
    registry = CollectorRegistry()

    async def main() -> None:
        running = asyncio.create_task(LoopLag(registry, interval_s=0.01).run())
        await asyncio.sleep(0)  # it has begun to wait
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is held up on purpose
        while not total(registry, "count"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert total(registry, "sum") > 0.08


def test_tasks_of_the_loop_are_counted_when_they_are_read() -> None:
    registry = CollectorRegistry()

    async def main() -> list[float | None]:
        measuring = asyncio.create_task(LoopLag(registry).run())
        await asyncio.sleep(0)  # it has begun
        few = registry.get_sample_value("outrider_event_loop_tasks")
        waiting = [asyncio.create_task(asyncio.Event().wait()) for _ in range(5)]
        many = registry.get_sample_value("outrider_event_loop_tasks")
        for task in (measuring, *waiting):
            task.cancel()
        await asyncio.gather(measuring, *waiting, return_exceptions=True)
        return [few, many]

    assert asyncio.run(main()) == [2, 7]


def test_stages_are_told_apart() -> None:
    registry = CollectorRegistry()
    stages = StageTimes(registry)
    assert stages.quantiles_s(0.99) == {}
    for held_s in (0.001, 0.002, 0.004, 0.3):
        stages.observe("prompt", held_s)
    stages.observe("route", 0.0001)
    assert stages.quantiles_s(0.5) == {"prompt": 0.004, "route": 0.0001}
    assert stages.quantiles_s(0.99) == {"prompt": 0.3, "route": 0.0001}
    name, labels = "outrider_event_loop_held_seconds_sum", {"stage": "prompt"}
    assert registry.get_sample_value(name, labels) == 0.307
