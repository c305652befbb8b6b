"""The event loop's lag: by how much later than due it wakes."""

import asyncio
import contextlib
import time

from prometheus_client import CollectorRegistry

from gateway.telemetry.loop_lag import LoopLag


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
