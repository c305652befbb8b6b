"""Checkers of answers, and a judge that is busy, wordy or wrong."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.training.tasks.families import FAMILIES, expected_by, stream
from outrider.draft.training.tasks.families import check as check_task
from outrider.gateway.tools.learning.collect.checkers import UncheckableError, last_line, make_check
from outrider.gateway.tools.learning.collect.judge import Judge, JudgeError

CALL = {"name": "add", "arguments": {"a": 1, "b": [True, None]}}


def is_right(kind: str, expected: object, answer: str, schema: object = None) -> bool:
    check = make_check(kind, expected, schema)
    assert check.is_right is not None
    return check.is_right(answer)


def call_text(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("kind", "expected", "right", "wrong"),
    [
        ("exact", "Hello.", ["Hello.", "  Hello.\n"], ["hello.", "Hello. Hello."]),
        ("regex", r"^Answer: 42\.$", ["Answer: 42.", "41?\nAnswer: 42.\n\n"], ["Answer: 42.\nno"]),
        ("regex", "42", ["it is 42, I think"], ["42\nno idea", ""]),
        (
            "json",
            '{"a": [1, 2.0]}',
            ['{"a":[1,2]}', 'So.\nAnswer: {"a": [1.0, 2]}'],
            ['{"a": [1]}'],
        ),
        ("json", {"a": 1}, ['{"a": 1}', '{\n "a": 1\n}'], ['{"a": true}', '{"a": 1, "b": 2}', "a"]),
        ("json", "1", ["1", "1.0", "Answer: 1"], ["true", '"1"', "[1]"]),
        (
            "tool_call",
            CALL,
            [call_text(CALL), "I will.\n" + call_text({**CALL, "arguments": CALL["arguments"]})],
            [
                json.dumps(CALL),
                call_text({**CALL, "name": "sub"}),
                call_text({**CALL, "arguments": {"a": 1, "b": [1, None]}}),
                call_text(CALL) + call_text(CALL),
                "<tool_call>\n" + json.dumps(CALL)[:-8],
                "",
            ],
        ),
        (
            "json_schema",
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}},
            ['{"a": 1}', '{"a": 1, "b": 2}'],
            ['{"a": "1"}', "{}", "no json", '{"a": 1'],
        ),
    ],
)
def test_answers_are_told_apart(
    kind: str, expected: object, right: Sequence[str], wrong: Sequence[str]
) -> None:
    assert [is_right(kind, expected, answer) for answer in right] == [True] * len(right)
    assert [is_right(kind, expected, answer) for answer in wrong] == [False] * len(wrong)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_json_is_right_exactly_if_its_canonical_text_is_the_same(left: Any, right: Any) -> None:
    canonical = [json.dumps(value, sort_keys=True) for value in (left, right)]
    assert is_right("json", canonical[0], json.dumps(right, indent=2)) == (
        canonical[0] == canonical[1]
    )


@given(st.text(), st.sampled_from(["exact", "regex", "json", "tool_call", "json_schema"]))
def test_no_answer_stops_a_check(answer: str, kind: str) -> None:
    expected = {"tool_call": CALL, "json_schema": {"type": "null"}}.get(kind, "1")
    assert is_right(kind, expected, answer) in (True, False)
    assert "\n" not in last_line(answer)


@pytest.mark.parametrize(
    ("kind", "expected", "why"),
    [
        ("regexp", "x", "unknown; available: exact, regex"),
        ("exact", None, "expected is missing"),
        ("regex", "(", "not a regular expression"),
        ("regex", "ä" * 513, "1026 bytes, at most 1024"),
        ("json", "{", "expected is not JSON"),
        ("json", "[" * 100_000, "expected is not JSON"),
        ("tool_call", '{"name": "f"}', "not a call such as"),
        ("json_schema", {"type": "nothing"}, "not a JSON schema"),
    ],
)
def test_answers_without_a_checker_are_refused(kind: str, expected: object, why: str) -> None:
    with pytest.raises(UncheckableError, match=why):
        make_check(kind, expected)


def test_the_demo_tasks_are_judged_as_their_own_checker_does() -> None:
    tasks = list(itertools.islice(stream(5, "heldout", FAMILIES), 150))
    assert {task.kind for task in tasks} == {"regex", "exact", "json", "tool_call"}
    num_right = 0
    for task in tasks:
        rivals = [other.answer for other in tasks if other.kind == task.kind][:12]
        for answer in (task.answer, task.answer + "!", task.answer.upper(), *rivals):
            found = is_right(task.kind, expected_by(task), answer)
            assert found == check_task(task, answer)
            num_right += found
        assert is_right(task.kind, expected_by(task), task.answer)
    assert num_right < 3 * len(tasks)


def test_a_schema_may_stand_apart_from_what_is_expected() -> None:
    assert is_right("json_schema", None, "3", schema={"type": "integer"})
    assert not is_right("json_schema", None, "true", schema={"type": "integer"})


def test_a_line_too_long_to_search_is_wrong() -> None:
    assert is_right("regex", "a", "b" * 4095 + "a")
    assert not is_right("regex", "a", "b" * 4096 + "a")


def test_without_the_validator_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "outrider.gateway.tools.learning.collect.checkers.importlib.util.find_spec",
        lambda name: None,
    )
    with pytest.raises(UncheckableError, match="pip install jsonschema-rs"):
        make_check("json_schema", {})


Reply = tuple[int, str] | None
"""Status and body; None breaks the connection off."""


def says(text: str) -> Reply:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]})


class Script:
    """Plays replies and remembers what was sent, and how long was waited."""

    def __init__(self, *replies: Reply, delay_s: float = 0.0) -> None:
        self.replies = list(replies)
        self.delay_s = delay_s
        self.sent: list[tuple[web.BaseRequest, Any]] = []
        self.waits_s: list[float] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.sent.append((request, await request.json()))
        await asyncio.sleep(self.delay_s)
        reply = self.replies.pop(0)
        if reply is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(status=reply[0], text=reply[1], headers={"location": "/elsewhere"})

    async def wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)

    def verdicts(self, *asked: tuple[str, str | None, str], **options: Any) -> list[bool]:
        """Return the verdicts of a judge that is asked in turn."""

        async def ask() -> list[bool]:
            async with (
                RawTestServer(self.answer) as server,
                Judge(
                    url=str(server.make_url("/v1/")), model="wise", sleep=self.wait, **options
                ) as judge,
            ):
                return [await judge.is_right(*one) for one in asked]

        return asyncio.run(ask())


def test_a_judge_is_asked_with_key_question_reference_and_answer() -> None:
    script = Script(says("CORRECT"), says(" INCORRECT.\n"))
    asked = ("2 + 2?", "4", "four"), ("2 + 2?", None, "five")
    assert script.verdicts(*asked, key="secret") == [True, False]
    (first, body), (_, second) = script.sent
    assert first.path == "/v1/chat/completions"
    assert first.headers["authorization"] == "Bearer secret"
    assert body["model"] == "wise"
    assert all(text in body["messages"][-1]["content"] for text in ("2 + 2?", "4", "four"))
    assert "<reference>" not in second["messages"][-1]["content"]
    assert script.waits_s == []


def test_busy_broken_and_wordy_judges_are_asked_again() -> None:
    script = Script((429, ""), None, says("I think CORRECT"), says("CORRECT"))
    assert script.verdicts(("q", "e", "a")) == [True]
    assert script.waits_s == [1.0, 2.0, 4.0]
    assert "authorization" not in script.sent[0][0].headers


@pytest.mark.parametrize(
    ("reply", "delay_s", "why"),
    [
        ((503, ""), 0.0, "no verdict in 4 attempts; at last it answered with status 503"),
        (says("correct"), 0.0, "it said 'correct' instead of CORRECT"),
        ((200, "[]"), 0.0, "it said '' instead of"),
        (says("CORRECT"), 10.0, "cannot be reached .SocketTimeoutError"),
    ],
)
def test_a_judge_without_a_verdict_is_an_error(reply: Reply, delay_s: float, why: str) -> None:
    script = Script(*[reply] * 4, delay_s=delay_s)
    with pytest.raises(JudgeError, match=why):
        script.verdicts(("q", "e", "a"), timeout_s=0.1 if delay_s else 60.0)
    assert len(script.sent) == 4


@pytest.mark.parametrize("status", [401, 307])
def test_a_refusal_is_not_tried_again_and_shows_no_key(status: int) -> None:
    script = Script((status, "bad key"))
    with pytest.raises(JudgeError, match=str(status)) as caught:
        script.verdicts(("q", "e", "a"), key="secret")
    assert "--judge-model" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://[/v1", "ftp://a/v1", "nonsense", "http://a..b/v1"])
def test_what_is_no_url_is_asked_only_once(url: str) -> None:
    async def ask() -> None:
        async with Judge(url=url, model="wise") as judge:
            await judge.is_right("q", "e", "a")

    with pytest.raises(JudgeError, match=r"cannot be asked: .*--judge-url"):
        asyncio.run(ask())
