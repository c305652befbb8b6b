"""Are the weights held once? The engine's resident size against 1.15 x weights + KV + 600 MB.

Method: the engine in its own process, exactly as `outrider serve` starts it, answers a number of
prompts at once with speculation, some of them small-tier. Its resident size is read before (models
loaded, step times profiled) and after, and with it the peak since the start. The KV pool counts in
full in the bound although memory that was never written to is not resident; `without pool` is the
stricter bound that leaves it out.

    python -m benchmarks.models.bench_memory --dtype bfloat16 --expand-target 400M
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.shared.driving import make_requests
from benchmarks.shared.grown import grown_large, grown_small
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.prompts import load_prompts, load_tokenizer
from outrider.engine.events import TokensEmitted
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.read_config import read_model_config
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.build import build_client

_FACTOR = 1.15
_ALLOWANCE_BYTES = 600 * 10**6


async def measure(settings: Settings, requests: Sequence[EngineRequest]) -> dict[str, Any]:
    """Start the engine, answer everything, read the process's size before and after."""
    client = build_client(settings)
    assert isinstance(client, ProcessEngineClient)
    await client.start()
    try:
        info, stats = await client.info(), await client.stats()
        assert client.pid is not None
        process = psutil.Process(client.pid)
        loaded_bytes = process.memory_info().rss
        counts = await asyncio.gather(*(_follow(client, request) for request in requests))
        return {
            "num_parameters": {name: tier.num_parameters for name, tier in info.tiers.items()},
            "dtypes": {name: tier.dtype for name, tier in info.tiers.items()},
            "num_blocks": {tier: numbers.num_blocks for tier, numbers in stats.tiers.items()},
            "loaded_bytes": loaded_bytes,
            "used_bytes": process.memory_info().rss,
            "peak_bytes": _peak_bytes(client.pid),
            "num_tokens": sum(counts),
        }
    finally:
        await client.close()


async def _follow(client: ProcessEngineClient, request: EngineRequest) -> int:
    number = 0
    async for event in client.submit(request):
        if isinstance(event, TokensEmitted):
            number += len(event.token_ids)
    return number


def _peak_bytes(pid: int) -> int | None:
    """The largest resident size so far; only Linux keeps it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("VmHWM:")]
    return int(found[0][1]) * 1024 if found else None


def bounds(
    folders: dict[str, Path], measured: dict[str, Any], *, block_size: int
) -> dict[str, int]:
    """Bytes of weights and of the KV pool, and the bound that follows."""
    weights = pool = 0
    for tier, folder in folders.items():
        dtype: torch.dtype = getattr(torch, measured["dtypes"][tier])
        weights += measured["num_parameters"][tier] * dtype.itemsize
        pool += measured["num_blocks"][tier] * KVCache.bytes_per_block(
            read_model_config(folder), block_size=block_size, dtype=dtype
        )
    allowed = int(_FACTOR * weights) + _ALLOWANCE_BYTES
    return {
        "weight_bytes": weights,
        "kv_pool_bytes": pool,
        "bound_bytes": allowed + pool,
        "bound_without_pool_bytes": allowed,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one engine process and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--kv-cache-gib", type=float, default=0.25)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folders = {"large": grown_large(arguments), "small": grown_small(arguments)}
    choose_threads(arguments, folders["large"])
    settings = Settings.model_validate(
        {
            "models": {tier: str(folder) for tier, folder in folders.items()},
            "engine": {
                "dtype": arguments.dtype,
                "device": arguments.device,
                "num_threads": arguments.threads,
                "kv_cache_gib": arguments.kv_cache_gib,
            },
            "log_level": "WARNING",
        }
    )
    prompts = load_prompts(
        "tasks",
        load_tokenizer(folders["large"]),
        num_prompts=arguments.num_prompts,
        seed=arguments.seed,
    )
    requests = make_requests(prompts, tier="large", max_tokens=arguments.max_new)
    requests += make_requests(prompts, tier="small", max_tokens=arguments.max_new)
    with console.status("loading an engine process, and letting it answer"):
        measured = asyncio.run(measure(settings, requests))
    limits = bounds(folders, measured, block_size=settings.engine.block_size)
    results = measured | limits
    results["is_within_bound"] = measured["used_bytes"] <= limits["bound_bytes"]
    names = {
        "weight_bytes": "weights",
        "kv_pool_bytes": "KV pool",
        "loaded_bytes": "resident, loaded",
        "used_bytes": "resident, after use",
        "peak_bytes": "peak",
        "bound_bytes": "bound",
        "bound_without_pool_bytes": "bound without pool",
    }
    rows = [[text, f"{(results[key] or 0) / 1e6:.0f}"] for key, text in names.items()]
    rows.append(["within", verdict(results["is_within_bound"])])
    show_table("memory of the engine process", ["", "MB"], rows)
    write_results("bench_memory", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
