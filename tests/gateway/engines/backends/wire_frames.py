"""A message of each kind, and what it was on the wire when its protocol's version was new.

python -m tests.gateway.engines.backends.wire_frames    # after a raise of PROTOCOL_VERSION
"""

import base64
import json
from pathlib import Path
from typing import Any, Final

from outrider.engine.cache.peers import BlocksWanted
from outrider.engine.events import (
    AdapterInfo,
    AnswerHeld,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    PrefillDone,
    RequestStats,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends import wire
from outrider.verifier.params import SamplingParams

FILE: Final = Path(__file__).with_name("wire_frames.json")
ERROR: Final = wire.WireError("QueueFullError", "full", {"num_waiting": 3})
EVENTS: Final = (
    PrefillDone(
        request_id="a", tier="large", num_prompt_tokens=3, num_cached_tokens=0, queue_s=0.5
    ),
    TokensEmitted(request_id="a", token_ids=(1, 2), num_drafted_tokens=2, num_accepted_tokens=1),
    AnswerHeld(request_id="a", finish_reason="stop"),
    TierSwitched(request_id="a", tier="large", keeps_answer=True),
    Finished(
        request_id="a",
        tier="small",
        finish_reason="length",
        stats=RequestStats(num_prompt_tokens=3),
    ),
    Failed(request_id="a", code="not_finite", message="no number"),
)
REQUEST: Final = EngineRequest(
    request_id="a",
    prompt_token_ids=(1, 2, 3),
    tier="large",
    sampling=SamplingParams(max_tokens=5, temperature=0.5),
    cache_salt="salt",
    tenant="team",
)
ADAPTER: Final = AdapterRef(name="legal", folder="/adapters/legal", tier="large")
INFO: Final = AdapterInfo(digest="d", max_rank=8, num_modules=2, num_bytes=100)
WANTED: Final = BlocksWanted(
    tier="large", fingerprint="f", first=0, parent=b"p" * 16, hashes=(b"h" * 16,), wait_s=0.5
)
SAMPLES: Final[dict[str, Any]] = {
    "submit": wire.Submit(REQUEST),
    "switch_tier": wire.SwitchTier("a", "large", True),
    "keep_on_tier": wire.KeepOnTier("a"),
    "abort": wire.Abort("a"),
    "unpin": wire.Unpin("team", "rules"),
    "get_stats": wire.GetStats(1),
    "prepare_adapter": wire.PrepareAdapter(1, ADAPTER),
    "get_blocks": wire.GetBlocks(),
    "pull_blocks": wire.PullBlocks(1, WANTED),
    "ping": wire.Ping(),
    "stop": wire.Stop(),
    "hello": wire.Hello(wire.PROTOCOL_VERSION),
    "crashed": wire.Crashed(ERROR),
    "refused": wire.Refused("a", ERROR),
    "stats": wire.StatsReply(1, EngineStats(num_steps=7)),
    "adapter": wire.AdapterReply(1, INFO, None),
    "pulled_blocks": wire.PulledBlocks(1, [b"extent"], ERROR),
    "pong": wire.Pong(),
    "blocks": wire.BlocksChanged(2, b"kept", b"dropped"),
    "blocks_reset": wire.BlocksReset(2, b"kept"),
    "events": wire.Events.pack(EVENTS),
    "welcome": wire.Welcome("g", EngineInfo(tiers={}, speculation=True), {"large": "t"}),
    "draining": wire.EngineDraining(),
    "goodbye": wire.Goodbye("it ends", True),
}
"""By tag. Fields that came after a version was new stand at their defaults."""


def main() -> None:
    """Write the file."""
    frames = {
        tag: base64.b64encode(wire.encode(message)).decode() for tag, message in SAMPLES.items()
    }
    document = {"protocol": wire.PROTOCOL_VERSION, "frames": frames}
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
