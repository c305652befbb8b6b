"""Settings and fixtures that all tests share."""

import asyncio
import gc
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Programs that tests start find the product and the tests' helpers where the tests find them.
os.environ["PYTHONPATH"] = os.pathsep.join(
    str(Path(__file__).resolve().parents[1] / place) for place in (".ci/src", ".")
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to a hub
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Tiny products: further threads only wait for each other, and for the other process of the tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Gateways that name no database have this one, and not the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="outrider-tests-")

import pytest
import torch
from hypothesis import settings

from tests.services import (  # noqa: F401 - fixtures
    database_url,
    postgres_server,
    postgres_url,
    redis_server,
    redis_url,
)
from tests.sizes import repeats

if not torch.cuda.is_available():  # before any kernel is imported
    os.environ["TRITON_INTERPRET"] = "1"

# Test machines are shared and slow at times: a time limit for each example only adds noise.
settings.register_profile("outrider", deadline=None, max_examples=repeats(50, 15))
settings.load_profile("outrider")

# Tiny tensors: a second thread only waits at barriers.
torch.set_num_threads(1)

gc.disable()  # while modules are imported and tests collected, nothing is garbage


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if pyfuncitem.get_closest_marker("uvloop") is not None:
        import uvloop  # not on every machine that runs the kernels' tests

        uvloop.run(test)
    else:
        asyncio.run(test)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all cases but the first of each test that is marked `slow_cases`."""
    begun = set()
    for item in items:
        if item.get_closest_marker("slow_cases") is None:
            continue
        test = item.nodeid.partition("[")[0]
        if test in begun:
            item.add_marker(pytest.mark.slow)
        begun.add(test)


def pytest_collection_finish() -> None:
    """Take what the imports left out of the collector's rounds, as a serving gateway does.

    One round over half a million objects takes up to half a second of the thread that it meets,
    and a request's grammar pays for what its thread does.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter clear the imports away, or Triton's bindings report them as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _state_folder() -> Iterator[None]:
    """Remove with the tests what they wrote there."""
    yield
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)
