"""Named prompts in a folder of extents, so that they are kept beyond a restart.

    FOLDER/v1-FINGERPRINT/p-CODE.pin      until when, and the codes of the blocks; and sealed what
                                          the prompt is, whose, and its name

The first part is for whoever cleans the folder up, and says no more than the names of extents do.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from outrider.engine.cache.block_pool import BlockHash
from outrider.engine.cache.extent_space import ExtentSpace
from outrider.engine.cache.extents import ExtentError
from outrider.engine.cache.sealing import CODE_SIZE
from outrider.engine.request import AdapterRef, EngineRequest, Pin
from outrider.verifier.params import SamplingParams

logger = logging.getLogger(__name__)

_PATTERN: Final = "p-*.pin"


def write_pin(
    space: ExtentSpace, request: EngineRequest, hashes: Sequence[BlockHash], until_s: float
) -> None:
    """Write what is to be kept until a time, in seconds since 1970. Failures are logged."""
    assert request.pin is not None
    secret = {
        "name": request.pin.name,
        "tenant": request.tenant,
        "tier": request.tier,
        "cache_salt": request.cache_salt,
        "token_ids": request.prompt_token_ids,
        "adapters": [asdict(each) for each in request.adapters],
    }
    clear = {"until_s": until_s, "codes": "".join(map(space.code, hashes))}
    try:
        space.write_note(_file_name(space, request), _json(clear), _json(secret))
    except OSError as error:
        logger.warning("a named prompt is not kept beyond a restart reason=%s", error)


def remove_pin(space: ExtentSpace, request: EngineRequest) -> None:
    """Remove what `write_pin` wrote, if it is there."""
    with contextlib.suppress(OSError):
        (space.folder / _file_name(space, request)).unlink()


def read_pins(space: ExtentSpace, now_s: float) -> Iterator[EngineRequest]:
    """Yield a request for each prompt that is still to be kept; files that cannot be read go."""
    for path in sorted(space.folder.glob(_PATTERN)):
        try:
            clear, secret = space.read_note(path.name)
            left_s = float(json.loads(clear)["until_s"]) - now_s
            request = _request(path.name, json.loads(secret), left_s) if left_s > 0 else None
        except (OSError, ExtentError, ValueError, KeyError, TypeError) as error:
            logger.warning("a named prompt cannot be read file=%s reason=%s", path, error)
            request = None
        if request is not None:
            yield request
            continue
        with contextlib.suppress(OSError):
            path.unlink()


def pinned_codes(folder: Path, now_s: float) -> frozenset[str]:
    """Return the codes of a space's blocks that are to be kept; remove what has had its time."""
    codes: set[str] = set()
    for path in folder.glob(_PATTERN):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with path.open("rb") as file:
                clear = json.loads(file.readline())
            if float(clear["until_s"]) <= now_s:
                path.unlink()
                continue
            own = str(clear["codes"])
            codes.update(own[place : place + CODE_SIZE] for place in range(0, len(own), CODE_SIZE))
    return frozenset(codes)


def _file_name(space: ExtentSpace, request: EngineRequest) -> str:
    assert request.pin is not None
    named = f"{request.tenant}\0{request.pin.name}\0{request.tier}".encode()
    return f"p-{space.code(hashlib.blake2b(named, digest_size=16).digest())}.pin"


def _request(file_name: str, fields: dict[str, Any], left_s: float) -> EngineRequest:
    """Return the request that has a prompt computed, or read, and kept. Raises ValueError."""
    return EngineRequest(
        request_id=file_name,
        prompt_token_ids=tuple(fields["token_ids"]),
        tier=fields["tier"],
        sampling=SamplingParams(max_tokens=0),
        cache_salt=fields["cache_salt"],
        tenant=fields["tenant"],
        adapters=tuple(AdapterRef(**each) for each in fields["adapters"]),
        pin=Pin(name=fields["name"], ttl_s=left_s),
    )


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()
