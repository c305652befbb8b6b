"""Log lines: the same calls for people and for programs; nothing forged, nothing private."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from outrider.gateway.telemetry.log_context import begin_log_context, log_context
from outrider.gateway.telemetry.logs import (
    JsonFormatter,
    LogFormat,
    TextFormatter,
    configure_logging,
)

ROOT = Path(__file__).parents[3]
SECRET = "or-abcdefgh-do-not-print-me"

# Not below the loggers of the program: what the tests set up must not stay.
log = logging.getLogger("tests.lines")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    levels = {
        name: found.level
        for name, found in logging.Logger.manager.loggerDict.items()
        if isinstance(found, logging.Logger)
    }
    yield
    root.handlers[:], root.level = before
    logging.getLogger("uvicorn.access").filters = []
    for name, found in logging.Logger.manager.loggerDict.items():
        if isinstance(found, logging.Logger):
            found.setLevel(levels.get(name, logging.NOTSET))


def set_up(log_format: LogFormat, level: str = "INFO", process: str = "gateway") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, log_format, process=process, stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_people_get_a_line() -> None:
    stream = set_up("text", process="engine")
    log.info("answered job=%s tokens=%d ttft_s=%.3f", "j-1", 12, 0.12345)
    log.debug("not this one")
    (line,) = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \S+ INFO engine tests\.lines answered job=j-1 tokens=12 ttft_s=0\.123",
        line,
    )


def test_programs_get_the_fields_of_the_same_call() -> None:
    stream = set_up("json")
    log.warning(
        "breaker opened: replica=%s reason=%r open_s=%.1f tries=%d error=%s message=%s share=%g",
        "h:1", "it's", 2.04, 3, None, ValueError("no"), 0.5,
    )  # fmt: skip
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "WARNING",
        "process": "gateway",
        "logger": "tests.lines",
        "event": "breaker opened",
        "replica": "h:1",
        "reason": "it's",
        "open_s": 2.0,
        "tries": 3,
        "error": None,
        "message_": "no",  # `message` is what other libraries say
        "share": 0.5,
    }


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        ("no fields at all", (), {"event": "no fields at all"}),
        ("50%% full used=%d", (3,), {"event": "50% full", "used": 3}),
        ("a %s in the middle x=%d", ("word", 1), {"event": "a word in the middle", "x": 1}),
        ("share=%% of=%d", (1,), {"event": "share=%", "of": 1}),
        ("of=%*d", (5, 1), {"message": "of=    1"}),
        ("one field x=%d", ("no number",), {"event": "one field", "x": "no number"}),
        ("%s - %s", ("a", "b"), {"message": "a - b"}),
        ("a=%(a)s", ({"a": 1},), {"message": "a=1"}),
        ("wide n=%5d", (3,), {"event": "wide", "n": 3}),
        ("never n=%f", (float("nan"),), {"event": "never", "n": "nan"}),
        ("never n=%s", (float("inf"),), {"event": "never", "n": "inf"}),
        ("flag on=%s", (True,), {"event": "flag", "on": True}),
        ("half a character x=%s", ("\ud800",), {"event": "half a character", "x": "\ud800"}),
    ],
)
def test_other_calls(template: str, arguments: tuple[Any, ...], expected: dict[str, Any]) -> None:
    stream = set_up("json")
    log.info(template, *arguments)
    (line,) = lines(stream)
    for name in ("time", "level", "process", "logger"):
        del line[name]
    assert line == expected


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_requests_ids_are_on_all_lines_of_its_tasks(log_format: LogFormat) -> None:
    stream = set_up(log_format)

    async def deep() -> None:
        context = log_context()
        assert context is not None
        context.tier = "small"
        log.info("deep key=%s", "the line's own")

    async def request(number: int) -> None:
        context = begin_log_context(f"r-{number}")
        context.key = f"k-{number}"
        log.info("before")
        await asyncio.create_task(deep())
        log.info("after")

    async def main() -> None:
        await asyncio.gather(*(asyncio.create_task(request(number)) for number in range(3)))
        log.info("between requests")

    asyncio.run(main())
    text = stream.getvalue()
    if log_format == "text":
        assert "before request_id=r-1 key=k-1\n" in text
        assert "deep key=the line's own request_id=r-1 tier=small\n" in text
        assert "after request_id=r-1 key=k-1 tier=small\n" in text
        assert "between requests\n" in text
        return
    found = [line for line in lines(stream) if line.get("request_id") == "r-2"]
    assert [(line["event"], line["key"], line.get("tier")) for line in found] == [
        ("before", "k-2", None),
        ("deep", "the line's own", "small"),
        ("after", "k-2", "small"),
    ]
    assert "request_id" not in lines(stream)[-1]


@given(st.text(max_size=50), st.sampled_from(["text", "json"]))
def test_no_value_begins_a_line_or_turns_one_around(value: str, log_format: LogFormat) -> None:
    formatter = TextFormatter("gateway") if log_format == "text" else JsonFormatter("gateway")
    record = logging.LogRecord("n", logging.INFO, "", 1, "label=%s", (value,), None)
    line = formatter.format(record)
    assert len(line.splitlines()) == 1
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", line)
    if log_format == "json":
        assert json.loads(line)["label"] == value


def test_a_forged_line_stays_in_its_own() -> None:
    stream = set_up("text")
    log.info("refused path=%s", "/x\n2026-01-01 INFO gateway admin granted\x1b[2K")
    (line,) = stream.getvalue().splitlines()
    assert r"/x\n2026-01-01 INFO gateway admin granted\x1b[2K" in line


class _Request(BaseModel):
    count: int


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_does_not_quote_the_request(log_format: LogFormat) -> None:
    stream = set_up(log_format)

    def fails() -> None:
        try:
            _Request.model_validate_json(f'{{"count": "{SECRET}"}}')
        except ValueError as error:
            raise RuntimeError(f"cannot read {SECRET}") from error

    async def request() -> None:
        begin_log_context("r-1")
        try:
            fails()
        except RuntimeError:
            log.exception("request failed status=%d", 500)

    asyncio.run(request())
    text = stream.getvalue()
    assert SECRET not in text
    assert "RuntimeError" in text
    assert "ValidationError" in text
    assert "test_logs.py" in text
    assert text.index("ValidationError") < text.index("RuntimeError")


def test_a_traceback_outside_of_requests_says_all() -> None:
    stream = set_up("json")
    try:
        raise RuntimeError("the disk is full")
    except RuntimeError:
        log.exception("no journal")
    (line,) = lines(stream)
    assert line["event"] == "no journal"
    assert "RuntimeError: the disk is full" in line["exception"]


def test_access_lines_are_without_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = set_up("json")
    access = logging.getLogger("uvicorn.access")
    access.setLevel(logging.INFO)
    for logger in (access, logging.getLogger("uvicorn")):
        monkeypatch.setattr(logger, "propagate", True)  # uvicorn's servers of other tests stop it
    access.info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", f"/v1/usage?key={SECRET}", "1.1", 200
    )
    (line,) = lines(stream)
    assert (line["event"], line["path"], line["status"]) == ("access", "/v1/usage", 200)
    access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/" + "a" * 30_000, "1.1", 404)
    assert len(lines(stream)[-1]["path"]) == 256
    assert SECRET not in stream.getvalue()


def test_libraries_are_quiet_even_where_we_are_not() -> None:
    stream = set_up("json", level="DEBUG")
    log.debug("ours")
    database, http = "sqlalchemy.engine.Engine", ("httpcore2.http11", "urllib3.connectionpool")
    for name in (database, *http, "httpx2", "uvicorn.error"):
        logging.getLogger(name).info("INSERT %s", SECRET)
    assert [line["event"] for line in lines(stream)] == ["ours"]


def test_setting_up_again_replaces() -> None:
    first = set_up("text")
    second = set_up("json")
    log.info("one")
    assert not first.getvalue()
    assert len(lines(second)) == 1


def test_calls_of_the_program_have_the_form_that_gives_fields() -> None:
    """Each `log.info("…", …)` of the package: words, then name=%s for every value."""
    call = re.compile(
        r"\b(?:log|logger)\.(?:debug|info|warning|error|exception)\(\s*((?:\"[^\"]*\"\s*)+)"
    )
    odd = []
    num_calls = 0
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for found in call.finditer(path.read_text(encoding="utf-8")):
            num_calls += 1
            template = "".join(re.findall(r'"([^"]*)"', found[1]))
            record = logging.LogRecord("n", logging.INFO, "", 1, template, (), None)
            values = re.findall(r"%[^%\s]*?[a-zA-Z]", template.replace("%%", ""))
            record.args = tuple(1 for _ in values)
            if "event" not in json.loads(JsonFormatter("gateway").format(record)):
                odd.append(f"{path.name}: {template}")
    assert num_calls > 30
    assert not odd
