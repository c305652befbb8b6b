"""The way of a streamed chat through the gateway gets no longer."""

import asyncio
from pathlib import Path

from benchmarks.gateway.count_request_path import count_request_path


def test_a_request_meets_no_more_modules_and_carriers_than_before(tmp_path: Path) -> None:
    path = asyncio.run(count_request_path(tmp_path))
    assert len(path.modules) <= 53, "\n".join(path.modules)
    assert len(path.carriers) <= 26, "\n".join(path.carriers)
