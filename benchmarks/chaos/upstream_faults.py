"""The fault table: what goes wrong with a server, and how an answer is judged that came through it.

A client must get an answer in full, or be told in OpenAI's words that there is none; in time, and
with no text twice or missing.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from benchmarks.shared.mock_upstream import MockScript, MockThread
from benchmarks.shared.toxics import Toxic
from benchmarks.shared.upstream_load import Exchange

Verdict = Literal["answered", "refused", "broken", "hung", "late", "wrong_text"]
"""refused: an error in OpenAI's words, behind a true beginning of the answer or at once. broken:
neither an end nor an error. wrong_text: something is missing, twice, or another's."""

GOOD: Final[frozenset[Verdict]] = frozenset({"answered", "refused"})
_AFTER: Final = 8
_NEVER_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong. `toxic` None: no server listens."""

    name: str
    toxic: Toxic | None = None

    def strike(self, mock: MockThread, healthy: MockScript) -> None:
        """From now on the server has it."""
        if self.toxic is None:
            mock.refuse()
        else:
            mock.script = replace(healthy, toxic=self.toxic)


FAULTS: Final = (
    Fault(name="refused"),
    Fault(name="reset", toxic=Toxic(kind="reset")),
    Fault(name="reset in mid-stream", toxic=Toxic(kind="reset", after_events=_AFTER)),
    Fault(name="500", toxic=Toxic(kind="status", status=500)),
    Fault(name="503", toxic=Toxic(kind="status", status=503)),
    Fault(name="429, retry after 1 s", toxic=Toxic(kind="status", status=429, retry_after_s=1)),
    Fault(name="slow headers", toxic=Toxic(kind="slow_headers", delay_s=_NEVER_S)),
    Fault(name="slow first token", toxic=Toxic(kind="slow_first_token", delay_s=_NEVER_S)),
    Fault(name="stall in mid-stream", toxic=Toxic(kind="stall", after_events=_AFTER)),
    Fault(name="garbage", toxic=Toxic(kind="garbage")),
    Fault(name="garbage in mid-stream", toxic=Toxic(kind="garbage", after_events=_AFTER)),
    Fault(name="half-closed", toxic=Toxic(kind="half_closed", after_events=_AFTER)),
    Fault(name="ended early", toxic=Toxic(kind="no_done", after_events=_AFTER)),
    Fault(name="wrong content type", toxic=Toxic(kind="content_type")),
    Fault(name="10 MB line", toxic=Toxic(kind="long_line")),
    Fault(name="10 MB line in mid-stream", toxic=Toxic(kind="long_line", after_events=_AFTER)),
    Fault(name="error in mid-stream", toxic=Toxic(kind="error_event", after_events=_AFTER)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One answer: what became of it, its text, and when its first text came."""

    verdict: Verdict
    text: str
    first_text_s: float | None
    """From sending; None where no text came."""
    total_s: float
    """From sending to its end."""
    status: int
    """HTTP's."""
    code: str = ""
    """The error's."""


@dataclass(slots=True)
class _Read:
    """The content of an answer."""

    text: str = ""
    first_ns: int | None = None
    is_finished: bool = False
    error: Mapping[str, Any] | None = None


def judge(exchange: Exchange, expected: Collection[str], *, limit_s: float) -> Judged:
    """Judge an answer: it should be one of these texts, and take no longer than `limit_s`."""
    read = _read_stream(exchange) if _is_stream(exchange) else _read_whole(exchange)
    total_s = (exchange.ended_ns - exchange.sent_ns) / 1e9
    return Judged(
        verdict=_verdict(exchange, read, expected, is_late=total_s > limit_s),
        text=read.text,
        first_text_s=None if read.first_ns is None else (read.first_ns - exchange.sent_ns) / 1e9,
        total_s=total_s,
        status=exchange.status,
        code=str((read.error or {}).get("code") or ""),
    )


def _verdict(
    exchange: Exchange, read: _Read, expected: Collection[str], *, is_late: bool
) -> Verdict:
    if exchange.failure == "hung":
        return "hung"
    if not any(text.startswith(read.text) for text in expected):
        return "wrong_text"
    if exchange.failure:
        return "broken"
    if is_late:
        return "late"
    if read.error is not None:
        return "refused"
    if not read.is_finished:
        return "broken"
    return "answered" if read.text in expected else "wrong_text"


def _is_stream(exchange: Exchange) -> bool:
    return exchange.headers.get("content-type", "").startswith("text/event-stream")


def _read_stream(exchange: Exchange) -> _Read:
    """The first choice of a stream; what cannot be read leaves it unfinished."""
    read = _Read()
    has_reason = False
    for moment_ns, event in exchange.events():
        data = event.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            read.is_finished = has_reason
            continue
        try:
            document = json.loads(data)
            if "error" in document:
                read.error = document["error"]
                continue
            for choice in document["choices"]:
                content = choice["delta"].get("content") or ""
                if content and read.first_ns is None:
                    read.first_ns = moment_ns
                read.text += content
                has_reason = has_reason or bool(choice.get("finish_reason"))
        except (ValueError, KeyError, TypeError):
            return read
    return read


def _read_whole(exchange: Exchange) -> _Read:
    """An answer of one piece: a completion or an error."""
    read = _Read()
    try:
        document = json.loads(exchange.body)
        if "error" in document:
            read.error = document["error"]
            return read
        read.text = document["choices"][0]["message"]["content"]
        read.first_ns = exchange.ended_ns
        read.is_finished = exchange.status == 200
    except (ValueError, KeyError, TypeError):
        pass
    return read


def tally(answers: Sequence[Judged]) -> dict[str, int]:
    """Return how many of each verdict."""
    verdicts: tuple[Verdict, ...] = ("answered", "refused", "broken", "hung", "late", "wrong_text")
    return {name: sum(answer.verdict == name for answer in answers) for name in verdicts}
