"""An engine whose process ends by SIGKILL at a named moment of its next request.

The moment is the text of a file, which the engine deletes as it ends; without the file it goes on.
Of several engines with one file, the first that comes to the moment ends.
`emitted N`: N tokens, of all the engine's requests together, have left since the file was there.
"""

import json
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from outrider.engine.cache.block_news import BlockFeed
from outrider.engine.cache.extents import Extent
from outrider.engine.cache.peers import BlocksWanted
from outrider.engine.events import (
    EngineEvent,
    EngineInfo,
    EngineStats,
    Finished,
    PrefillDone,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.pinned_prompts import PinnedPrompts
from outrider.gateway.engines.backends.step_loop import LoadingCallback, StepEngine
from outrider.gateway.wiring.build import build_engine_from_json
from outrider.verifier.params import Tier
from tests.gateway.scripted_engine import ScriptedEngine

OnEvents = Callable[[list[EngineEvent]], None]

MOMENTS = ("admitted", "prefilling", "prefilled", "between tokens", "finished", "aborting")
_NUM_TOKENS = 5
"""So many are emitted before `between tokens`."""


class MortalEngine:
    """Passes everything on to another engine. Implements `StepEngine`."""

    def __init__(self, inner: StepEngine, armed: Path) -> None:
        """`armed` is the file that names the moment."""
        self._inner = inner
        self._armed = armed
        self._num_submitted = 0
        self._num_emitted = 0
        self._num_counted = 0

    @property
    def blocks(self) -> BlockFeed:
        return self._inner.blocks

    def export_blocks(self, wanted: BlocksWanted) -> list[Extent] | None:
        self._come("exporting")
        return self._inner.export_blocks(wanted)

    @property
    def pins(self) -> PinnedPrompts:
        return self._inner.pins

    @property
    def overlaps(self) -> bool:
        return self._inner.overlaps

    @property
    def has_work(self) -> bool:
        return self._inner.has_work

    def submit(self, request: EngineRequest) -> None:
        self._inner.submit(request)
        self._num_submitted += 1
        self._come("admitted")

    def abort(self, request_id: str) -> None:
        self._come("aborting")
        self._inner.abort(request_id)

    def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        self._inner.switch_tier(request_id, tier, keeps_answer=keeps_answer)

    def keep_on_tier(self, request_id: str) -> None:
        self._inner.keep_on_tier(request_id)

    def step(
        self, on_events: OnEvents | None = None, while_busy: Callable[[], None] | None = None
    ) -> list[EngineEvent]:
        def look(events: list[EngineEvent]) -> None:
            self._look(events)
            assert on_events is not None
            on_events(events)

        def work() -> None:
            if self._num_submitted:
                self._come("prefilling")
            if while_busy is not None:
                while_busy()

        events = self._inner.step(None if on_events is None else look, work)
        self._look(events)
        return events

    def stats(self) -> EngineStats:
        return self._inner.stats()

    def info(self) -> EngineInfo:
        return self._inner.info()

    def _look(self, events: Iterable[EngineEvent]) -> None:
        """Before they leave."""
        if (moment := self._moment()).startswith("emitted"):
            self._num_counted += sum(
                len(event.token_ids) for event in events if isinstance(event, TokensEmitted)
            )
            if self._num_counted >= int(moment.split()[1]):
                self._end()
        for event in events:
            match event:
                case PrefillDone():
                    self._come("prefilled")
                case TokensEmitted():
                    self._num_emitted += len(event.token_ids)
                    if self._num_emitted > _NUM_TOKENS:
                        self._come("between tokens")
                case Finished():
                    self._come("finished")
                case _:
                    pass

    def _come(self, moment: str) -> None:
        """End where this is the moment."""
        if self._moment() == moment:
            self._end()

    def _moment(self) -> str:
        """Return what the file says; nothing where there is none."""
        try:
            return self._armed.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _end(self) -> None:
        with suppress(FileNotFoundError):  # another engine was first
            self._armed.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class WordsEngine(ScriptedEngine):
    """The scripted engine, in the tokens of the shipped pair."""

    def step(
        self, on_events: object = None, while_busy: Callable[[], None] | None = None
    ) -> list[EngineEvent]:
        return [
            replace(event, token_ids=tuple(300 + token % 700 for token in event.token_ids))
            if isinstance(event, TokensEmitted)
            else event
            for event in super().step(on_events, while_busy)
        ]


def build(arguments: str, on_progress: LoadingCallback) -> MortalEngine:
    """The builder; `settings`: as JSON, for the engine that they describe; else a scripted one."""
    options = json.loads(arguments)
    settings = options.get("settings")
    inner = build_engine_from_json(settings, on_progress) if settings else WordsEngine(step_s=0.002)
    return MortalEngine(inner, Path(options["armed"]))
