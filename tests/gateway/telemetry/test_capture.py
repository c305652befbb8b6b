"""Captured exchanges: on disk for the right ones, for the right time, for the right eyes."""

import asyncio
import json
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.settings.telemetry import CaptureSettings
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.telemetry import capture as capture_module
from outrider.gateway.telemetry.capture import (
    NULL_CAPTURE,
    Capture,
    Exchange,
    JsonlCapture,
    Recording,
    build_capture,
)

NOON_S = 1_795_348_800.0  # 2026-11-22T12:00:00Z
DAY_S = 86_400.0
TODAY = "capture-2026-11-22.jsonl"


class Opened:
    """A capture, its counters and its folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.registry = CollectorRegistry()
        self.capture: Capture = build_capture(
            CaptureSettings(folder=folder, **settings),
            self.registry,
            rng=random.Random(3),
            wall_clock=lambda: NOON_S,
        )

    def close(self) -> None:
        asyncio.run(self.capture.close())

    def count(self, state: str) -> float | None:
        return self.registry.get_sample_value("outrider_captured_total", {"state": state})

    def lines(self, name: str = TODAY) -> list[dict[str, Any]]:
        text = (self.folder / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line]


def whole(*texts: str) -> bytes:
    choices = [{"index": i, "message": {"content": text}} for i, text in enumerate(texts)]
    return json.dumps({"id": "x", "choices": choices}).encode()


def exchange(**more: Any) -> Exchange:
    body = {"model": "auto", "messages": [{"role": "user", "content": "I am a@example.org"}]}
    given: dict[str, Any] = {
        "request_id": "r-1",
        "endpoint": "chat",
        "ended_at": NOON_S,
        "request": json.dumps(body).encode(),
        "answer": whole("Hello, a@example.org.", "Ça va?"),
        "is_private": False,
        "key_id": "k-1",
        "tier": "small",
        "outcome": "answered",
    }
    return Exchange(**(given | more))


def test_an_exchange_is_a_line_that_its_owner_can_read(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "deep" / "captured")
    opened.capture.offer(exchange())
    opened.close()
    assert opened.lines() == [
        {
            "time": "2026-11-22T12:00:00.000Z",
            "request_id": "r-1",
            "key": "k-1",
            "endpoint": "chat",
            "tier": "small",
            "outcome": "answered",
            "request": {
                "model": "auto",
                "messages": [{"role": "user", "content": "I am [email]"}],
            },
            "answer": ["Hello, [email].", "Ça va?"],
            "is_cut": False,
        }
    ]
    assert stat.S_IMODE((opened.folder / TODAY).stat().st_mode) == 0o600
    assert stat.S_IMODE(opened.folder.stat().st_mode) == 0o700
    assert opened.count("written") == 1


def test_redaction_can_be_switched_off(tmp_path: Path) -> None:
    opened = Opened(tmp_path, redact=False)
    opened.capture.offer(exchange())
    opened.close()
    (line,) = opened.lines()
    assert line["answer"][0] == "Hello, a@example.org."
    assert line["request"]["messages"][0]["content"] == "I am a@example.org"


def test_private_requests_never(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = Opened(tmp_path)
    assert not any(opened.capture.wants(is_private=True) for _ in range(1000))
    opened.capture.offer(exchange(is_private=True))
    opened.close()
    assert not list(tmp_path.iterdir())
    assert "private request was offered" in caplog.text


def test_the_share_decides(tmp_path: Path) -> None:
    opened = Opened(tmp_path, share=0.25)
    assert 200 < sum(opened.capture.wants(is_private=False) for _ in range(1000)) < 300
    opened.close()
    assert not opened.capture.wants(is_private=False)


def test_without_a_folder_nothing(tmp_path: Path) -> None:
    capture = build_capture(
        CaptureSettings(), CollectorRegistry(), rng=random.Random(1), wall_clock=lambda: NOON_S
    )
    assert capture is NULL_CAPTURE
    assert not capture.wants(is_private=False)
    capture.offer(exchange())
    asyncio.run(capture.close())


def test_old_days_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    kept = ["capture-2026-11-20.jsonl", "capture-notes.jsonl", "capture-2026-13-45.jsonl", "other"]
    for name in (*kept, "capture-2026-11-19.jsonl", "capture-2020-01-01.jsonl"):
        (tmp_path / name).write_text("x")
    target = tmp_path / "precious"
    target.write_text("x")
    (tmp_path / "capture-2019-01-01.jsonl").symlink_to(target)
    opened = Opened(tmp_path, retention_days=2)
    opened.capture.offer(exchange())
    opened.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, TODAY, "precious"])


def test_each_day_has_its_file(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.capture.offer(exchange())
    opened.capture.offer(exchange(ended_at=NOON_S - DAY_S / 2 - 1, request_id="r-0"))
    opened.close()
    assert [line["request_id"] for line in opened.lines()] == ["r-1"]
    assert [line["request_id"] for line in opened.lines("capture-2026-11-21.jsonl")] == ["r-0"]


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / TODAY).write_text("")
    (tmp_path / TODAY).chmod(0o644)
    opened = Opened(tmp_path)
    opened.capture.offer(exchange())
    opened.close()
    assert stat.S_IMODE((tmp_path / TODAY).stat().st_mode) == 0o600


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("")
    folder = tmp_path / "captured"
    folder.mkdir()
    (folder / TODAY).symlink_to(target)
    opened = Opened(folder)
    opened.capture.offer(exchange())
    opened.close()
    assert target.read_text() == ""
    assert opened.count("failed") == 1


def test_texts_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 300_000}]}).encode()
    opened.capture.offer(exchange(request=body, answer=whole("y" * 300_000, "short")))
    opened.close()
    (line,) = opened.lines()
    assert line["request"] == {"omitted_bytes": len(body)}
    assert [len(text) for text in line["answer"]] == [256 * 1024, 5]


def test_the_text_of_a_stream_is_put_together(tmp_path: Path) -> None:
    pieces = [(0, "I am "), (1, "Ça"), (0, "a@exam"), (0, "ple.org"), (1, " va")]
    events = [
        json.dumps({"choices": [{"index": index, "delta": {"content": text}}]})
        for index, text in pieces
    ]
    events += ['{"choices": [], "usage": {}}', "[DONE]"]
    stream = "".join(f"data: {event}\n\n" for event in events) + ": a comment\n\ndata: {half"
    opened = Opened(tmp_path)
    opened.capture.offer(exchange(answer=stream.encode(), is_streamed=True, is_cut=True))
    opened.close()
    (line,) = opened.lines()
    assert line["answer"] == ["I am [email]", "Ça va"]
    assert line["is_cut"]


def test_a_recording_has_a_bound() -> None:
    recording = Recording()
    for _ in range(3):
        recording.add(b"x" * 500_000)
    assert recording.is_cut
    assert recording.answer == b"x" * 1_000_000


@pytest.mark.parametrize("request_body", [b"no json", b"\xff\xfe", b"[" * 100_000])
def test_unreadable_exchanges_are_counted_and_do_not_stop_the_next(
    tmp_path: Path, request_body: bytes
) -> None:
    opened = Opened(tmp_path)
    opened.capture.offer(exchange(request=request_body))
    opened.capture.offer(exchange(answer=b'{"choices": [{"text": "\\ud800"}]}'))
    opened.close()
    assert (opened.count("failed"), opened.count("written")) == (1, 1)
    assert opened.lines()[0]["answer"] == []  # half a character is no text


def test_a_full_disk_spoils_one_line_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls = os.write, [0]

    def half(file: int, data: bytes) -> int:
        calls[0] += 1
        return real(file, data[: len(data) // 2] if calls[0] in (1, 2) else data)

    monkeypatch.setattr("outrider.gateway.telemetry.capture.os.write", half)
    opened = Opened(tmp_path)
    for number in range(3):
        opened.capture.offer(exchange(request_id=f"r-{number}"))
    opened.close()
    assert (opened.count("failed"), opened.count("written")) == (2, 1)
    last = (tmp_path / TODAY).read_text().splitlines()[-1]
    assert json.loads(last)["request_id"] == "r-2"
    assert caplog.text.count("capture failed") == 1  # not once a request


def test_exchanges_beyond_the_disks_speed_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, entered = threading.Event(), threading.Event()
    real = JsonlCapture._write

    def slow(self: JsonlCapture, given: Exchange) -> None:
        entered.set()
        freed.wait(10)
        real(self, given)

    monkeypatch.setattr(JsonlCapture, "_write", slow)
    opened = Opened(tmp_path)
    opened.capture.offer(exchange())
    assert entered.wait(10)
    for _ in range(1100):
        opened.capture.offer(exchange())
    assert opened.count("dropped") == 100
    freed.set()
    opened.close()
    assert len(opened.lines()) == 1001


def test_exchanges_waiting_for_the_disk_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that sends large requests fills the memory while the disk is slow."""
    freed, entered = threading.Event(), threading.Event()
    real = JsonlCapture._write
    written: list[Exchange] = []

    def slow(self: JsonlCapture, given: Exchange) -> None:
        written.append(given)
        entered.set()
        freed.wait(10)
        real(self, given)

    monkeypatch.setattr(JsonlCapture, "_write", slow)
    monkeypatch.setattr(capture_module, "_MAX_PENDING_BYTES", 10_000)
    opened = Opened(tmp_path)
    opened.capture.offer(exchange(request=b"x" * 300_000, answer=b""))
    assert entered.wait(10)
    assert (written[0].num_bytes, written[0].omitted_bytes) == (0, 300_000)
    for _ in range(20):
        opened.capture.offer(exchange(request=b"{}", answer=b"x" * 998))
    assert opened.count("dropped") == 10
    freed.set()
    opened.close()
    assert len(opened.lines()) == 11


def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    both = [Opened(tmp_path), Opened(tmp_path)]
    for number in range(50):
        both[number % 2].capture.offer(exchange(request_id=f"r-{number}"))
    for opened in both:
        opened.close()
    found = {line["request_id"] for line in both[0].lines()}
    assert found == {f"r-{number}" for number in range(50)}


def test_a_folder_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"telemetry\.capture\.folder = .* cannot be written"):
        Opened(tmp_path / "file" / "below")


def test_after_the_end_nothing_is_written(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.close()
    opened.close()
    opened.capture.offer(exchange())
    assert opened.count("dropped") == 1
    assert not list(tmp_path.iterdir())
