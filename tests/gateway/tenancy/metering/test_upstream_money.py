"""Issue 15, hole 3: whatever ends an answer of an upstream tier early, what was delivered is paid.

Charged are the server's own figures where they come, else what was counted, and the ledger and the
limits agree.
"""

import concurrent.futures
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockRequest, MockScript, ToolCall, Toxic
from outrider.gateway.answering.candidates.upstream_responder import UpstreamResponder
from outrider.gateway.http.server.answer_response import AnswerResponse, ClientFormat
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD, LimitSpec
from tests.gateway.conftest import OpenWorld
from tests.gateway.hostile import hostile, piece, streamed
from tests.gateway.hybrid import CHAT, Streamed
from tests.gateway.tenancy.metering.tenants import Books

Open = Callable[..., Any]
Scripted = MockScript | Callable[[MockRequest], MockScript]
PRICE = {"prompt": 100.0, "completion": 1000.0}
LONG = MockScript(num_pieces=400, usage="never")
BROKE = 0.05
MANY = LimitSpec(tokens_per_minute=10_000, usd_per_day=100)


@pytest.fixture
def opened(opened: OpenWorld) -> Open:
    """Opens a gateway with a key and one upstream tier, whose answers have no default length."""

    @contextmanager
    def opening(script: Scripted = LONG, **options: Any) -> Iterator[Books]:
        tier = {"price": PRICE, **options.pop("tier", {})}
        with opened(tier=tier, clouds=[script], **options) as made:
            object.__setattr__(made.world.context.limits, "default_max_tokens", None)
            yield made

    return opening


def charged(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Tokens and nano-dollars."""
    return (
        sum(row["num_charged_tokens"] for row in rows),
        sum(row["charge_nanos"] for row in rows),
    )


def ask_stream(made: Books, **fields: Any) -> httpx.Response:
    return made.world.chat(model="cloud", stream=True, **fields)


def read_a_little(made: Books, num_lines: int, **fields: Any) -> list[str]:
    """Leave a stream after so many lines."""
    url = f"{made.world.url}/v1/chat/completions"
    body = {**CHAT, "model": "cloud", "stream": True, **fields}
    with httpx.stream("POST", url, json=body, headers=made.world.http.headers) as stream:
        lines = stream.iter_lines()
        return [next(lines) for _ in range(num_lines)]


@pytest.mark.slow_cases
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_that_a_limit_cuts_is_charged(opened: Open, with_usage: bool) -> None:
    """It was free: the gateway's own [DONE] settled before the attempt was booked."""
    with opened(limits=LimitSpec(usd_per_day=BROKE)) as made:
        options = {"stream_options": {"include_usage": True}} if with_usage else {}
        answer = Streamed(ask_stream(made, **options))
        (row,) = made.rows(1)
        refused = ask_stream(made)
    assert answer.is_done
    assert '"finish_reason":"length"' in answer.raw.decode()
    assert row["outcome"] == "limited"
    assert row["num_charged_tokens"] == row["num_prompt_tokens"] + row["num_completion_tokens"]
    assert 0.8 * BROKE < row["charge_nanos"] / NANOS_PER_USD <= BROKE
    assert refused.status_code == 429
    if with_usage:
        usage = next(chunk["usage"] for chunk in answer.chunks if chunk.get("usage"))
        assert usage["total_tokens"] == row["num_charged_tokens"]


def test_six_streams_under_a_small_budget_cost_no_more_than_it(opened: Open) -> None:
    """They cost 1.20 USD and charged nothing."""
    with opened(limits=LimitSpec(usd_per_day=BROKE)) as made:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            told = list(pool.map(lambda _: ask_stream(made), range(6)))
        made.settle()
        answers = [Streamed(response) for response in told if response.status_code == 200]
        rows = made.rows(len(answers))
        used = made.used("usd_per_day")
    delivered = sum(len(answer.text.split()) for answer in answers)
    assert answers
    assert {response.status_code for response in told} <= {200, 429}
    assert delivered * PRICE["completion"] * 1e-6 <= BROKE
    assert sum(row["cost_nanos"] for row in rows) <= BROKE * NANOS_PER_USD
    assert delivered <= sum(row["num_completion_tokens"] for row in rows)
    assert used == charged(rows)[1]


def test_a_stream_behind_a_long_prompt_costs_no_more_than_its_budget(opened: Open) -> None:
    """Each token counts at the price behind its prompt when it is delivered, and in the books."""
    dear = {name: 20 * usd for name, usd in PRICE.items()}
    tier = {"price": {**PRICE, "long_prompts": [{"above": 5, **dear}]}}
    with opened(limits=LimitSpec(usd_per_day=20 * BROKE), tier=tier) as made:
        answer = Streamed(ask_stream(made))
        (row,) = made.rows(1)
        used = made.used("usd_per_day")
    assert (row["outcome"], row["num_prompt_tokens"] > 5) == ("limited", True)
    assert len(answer.text.split()) <= row["num_completion_tokens"]
    assert used == row["charge_nanos"] == row["cost_nanos"]
    assert 0.8 * 20 * BROKE < used / NANOS_PER_USD <= 20 * BROKE


def test_a_stream_that_max_cost_usd_bounds_ends_at_the_tenants_limit(opened: Open) -> None:
    """Issue 15, second round: it was taken for one whose whole length is reserved.

    The tokens that its money pays for are no bound of the client, and are not reserved. Yet only
    the fewest tokens that its text can have counted, so it went on to three times its limit.
    """
    with opened(limits=LimitSpec(usd_per_day=BROKE)) as made:
        answer = Streamed(ask_stream(made, outrider={"max_cost_usd": 100}))
        (row,) = made.rows(1)
    assert answer.is_done
    assert row["outcome"] == "limited"
    assert len(answer.text.split()) * PRICE["completion"] * 1e-6 <= BROKE
    assert row["charge_nanos"] == row["cost_nanos"] <= BROKE * NANOS_PER_USD


def test_a_client_that_leaves_a_stream_pays_for_what_it_got(opened: Open) -> None:
    with opened(MockScript(num_pieces=400, gap_s=0.002), limits=MANY) as made:
        lines = read_a_little(made, 20)
        (row,) = made.rows(1)
        used = made.used("tokens_per_minute")
    texts = [json.loads(line[6:]) for line in lines if line]
    delivered = sum(bool(c["choices"][0]["delta"].get("content")) for c in texts if c["choices"])
    assert row["outcome"] == "cancelled"
    assert row["num_charged_tokens"] >= row["num_prompt_tokens"] + delivered > 0
    assert used == row["num_charged_tokens"]


def test_images_are_paid_by_a_client_that_leaves_before_the_usage(opened: Open) -> None:
    """They were free: only the text of the prompt was charged."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    message = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}
    script = MockScript(num_pieces=400, gap_s=0.002)
    with opened(script, limits=MANY, tier={"media_tokens": 700}) as made:
        read_a_little(made, 4, messages=[message], max_tokens=400)
        (row,) = made.rows(1)
        used = made.used("tokens_per_minute")
    assert row["outcome"] == "cancelled"
    assert 700 < row["num_prompt_tokens"] < 720
    assert used == row["num_charged_tokens"] >= row["num_prompt_tokens"]


def test_hidden_tokens_are_paid_by_a_client_that_leaves_before_the_usage(opened: Open) -> None:
    """The reason to end was there: what the server reports comes right behind it."""
    script = MockScript(pieces=("Yes.",), reported_usage=(10, 500), usage="always", gap_s=0.1)
    with opened(script, limits=MANY) as made:
        url, headers = f"{made.world.url}/v1/chat/completions", made.world.http.headers
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**CHAT, "model": "cloud", **fields}
        with httpx.stream("POST", url, json=body, headers=headers) as stream:
            next(line for line in stream.iter_lines() if '"stop"' in line)
        (row,) = made.rows(1)
    assert (row["usage_source"], row["num_charged_tokens"]) == ("reported", 510)


def test_an_answer_that_its_own_deadline_ends_is_paid(opened: Open) -> None:
    script = MockScript(num_pieces=400, gap_s=0.01, usage="never")
    options = {"outrider": {"deadline_ms": 150}}
    with opened(script, limits=MANY) as made:
        stream = ask_stream(made, **options)
        script = MockScript(first_token_delay_s=1)
        made.world.cloud.script = script
        whole = made.world.chat(model="cloud", **options)
        rows = made.rows(2)
        used = made.used("tokens_per_minute")
    assert (stream.status_code, whole.status_code) == (200, 504)
    assert "deadline_exceeded" in stream.text
    for row, least in zip(rows, (5, 1), strict=True):
        assert (row["outcome"], row["failure"]) == ("cancelled", "deadline_exceeded")
        assert row["num_charged_tokens"] >= row["num_prompt_tokens"] + least
    assert used == sum(row["num_charged_tokens"] for row in rows)


def test_a_whole_answer_that_its_client_does_not_wait_for_is_paid(opened: Open) -> None:
    """The server may have written all of it: as much is charged as it can have been by then."""
    with opened(MockScript(first_token_delay_s=5), limits=MANY) as made:
        with pytest.raises(httpx.ReadTimeout):
            made.world.http.post(
                "/v1/chat/completions",
                json={**CHAT, "model": "cloud", "max_tokens": 20},
                timeout=0.3,
            )
        (row,) = made.rows(1)
    assert (row["outcome"], row["usage_source"]) == ("cancelled", "estimated")
    assert row["num_completion_tokens"] == 20
    assert row["num_charged_tokens"] == row["num_prompt_tokens"] + 20


def test_a_failure_of_the_server_is_free_in_mid_stream_too(opened: Open) -> None:
    toxic = Toxic(kind="reset", after_events=5)
    with opened(MockScript(num_pieces=40, toxic=toxic), limits=MANY) as made:
        answer = Streamed(ask_stream(made))
        (row,) = made.rows(1)
        used = made.used("tokens_per_minute")
    assert answer.error is not None
    assert (row["outcome"], row["num_charged_tokens"], used) == ("failed", 0, 0)
    assert row["cost_nanos"] > 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("usage", ["always", "never"])
def test_an_answer_that_was_repeated_after_it_broke_off_is_charged_once(
    opened: Open, usage: Any
) -> None:
    """A server that replays writes the delivered beginning again: it was charged twice."""
    whole = MockScript(num_pieces=40, usage=usage, reported_usage=(10, 90))
    cuts = [Toxic(kind="reset", after_events=n) for n in (12, 30)]
    scripts = iter([*(MockScript(num_pieces=40, toxic=cut) for cut in cuts), whole])

    def script(_: MockRequest) -> MockScript:
        return next(scripts)

    tier = {"server": "outrider"}
    with opened(script, limits=MANY, tier=tier) as made:
        answer = Streamed(ask_stream(made, stream_options={"include_usage": True}))
        rows = made.rows(3)
        used = made.used("tokens_per_minute")
    first, *others = rows
    prompt = first["num_charged_tokens"] - first["num_completion_tokens"]
    assert answer.is_done
    assert [row["kind"] for row in others] == ["continuation"] * 2
    assert 0 < prompt == first["num_prompt_tokens"]
    written = [row["num_completion_tokens"] for row in rows]
    assert 12 <= written[0] < written[1] < written[2]
    assert sum(row["num_charged_tokens"] for row in rows) == prompt + written[2] == used
    assert [row["num_discarded_tokens"] for row in rows] == [0, *written[:2]]


@pytest.mark.slow_cases
@pytest.mark.parametrize("last", ["large", "second"])
def test_a_prompt_is_charged_once_where_another_model_continues_the_answer(
    opened: Open, last: str
) -> None:
    """The continuing model's prompt has the delivered text in it: both were charged twice."""
    broken = MockScript(num_pieces=40, toxic=Toxic(kind="reset", after_events=12))
    second = (MockScript(pieces=("and ", "so ", "on.")), {"server": "vllm"})
    options = {
        "others": {"second": second},
        "aliases": {"robust": {"models": ("cloud", last)}},
    }
    with opened(broken, limits=MANY, **options) as made:
        made.world.says("and so on.")
        response = made.world.chat(model="robust", stream=True)
        first, rest = sorted(made.rows(2), key=lambda row: str(row["kind"]))
        used = made.used("tokens_per_minute")
    assert Streamed(response).text.endswith("so on.")
    assert (first["kind"], first["outcome"], first["tier"]) == ("answer", "failed", "cloud")
    assert (rest["kind"], rest["outcome"], rest["tier"]) == ("continuation", "answered", last)
    assert (
        first["num_charged_tokens"] == first["num_prompt_tokens"] + first["num_completion_tokens"]
    )
    assert rest["num_prompt_tokens"] > 0
    assert 0 < rest["num_charged_tokens"] == rest["num_completion_tokens"]
    assert used == first["num_charged_tokens"] + rest["num_charged_tokens"]


def test_a_report_of_nothing_is_not_believed(opened: Open) -> None:
    usage = {"stream_options": {"include_usage": True}}
    with opened(limits=MANY) as made:
        for number, claimed in enumerate([(0, 0), (-5, -5), (0, 1)]):
            made.world.cloud.script = MockScript(
                num_pieces=200, reported_usage=claimed, usage="always"
            )
            whole = made.world.chat(model="cloud").json()["outrider"]
            streamed = Streamed(ask_stream(made, **(usage if number else {}))).report
            assert whole["usage_corrected"] is streamed["usage_corrected"] is True
        rows = made.rows(6)
    for row in rows:
        assert row["num_completion_tokens"] >= 200
        assert row["num_prompt_tokens"] > 0
        total = row["num_prompt_tokens"] + row["num_completion_tokens"]
        assert row["num_charged_tokens"] == total


def test_calls_of_tools_are_counted_as_they_grow(opened: Open) -> None:
    """A call of 4,000 characters in one event was one token."""
    calls = (ToolCall(name="write", arguments=json.dumps({"text": "word " * 800})),)
    script = MockScript(pieces=("",), tool_calls=calls, usage="never", finish_reason="tool_calls")
    tools = [{"type": "function", "function": {"name": "write"}}]
    # Reserved for the prompt with its tools are some 700 tokens, and the call has a thousand.
    with opened(script, limits=LimitSpec(tokens_per_minute=1200)) as made:
        response = ask_stream(made, tools=tools)
        assert response.status_code == 200, response.text
        (row,) = made.rows(1)
    assert row["outcome"] == "limited"
    assert row["num_charged_tokens"] <= 1200
    assert response.text.count("word ") < 600


def test_a_comment_that_looks_like_the_end_settles_nothing(opened: Open) -> None:
    """What followed it was free."""
    pieces = [piece(f"word{number} ") for number in range(50)]
    comment = b": data: [DONE]\n\n"
    answer = streamed(*pieces[:2], comment, *pieces[2:], piece(finish="stop"))
    with hostile(answer) as far, opened(limits=MANY, tier={"url": far.url}) as made:
        told = Streamed(ask_stream(made))
        (row,) = made.rows(1)
    assert told.is_done
    assert row["outcome"] == "answered"
    assert row["num_completion_tokens"] >= 50
    assert row["num_charged_tokens"] > 50


CONTROLS = "".join(map(chr, (*range(32), 127)))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "names",
    [
        {"models": [f"down/gone{CONTROLS}x", "cloud"], "model": None},
        {"model": "cloud", f"odd{CONTROLS}x": 1},
    ],
)
def test_a_control_character_in_a_name_ends_in_no_header(
    opened: Open, names: dict[str, Any]
) -> None:
    """It made the head of the answer invalid: the stream failed, and was not charged."""
    options = {
        "unknown_fields": "ignore",
        "tiers": {"down": {"url": "http://127.0.0.1:9/v1", "max_retries": 0}},
    }
    with opened(MockScript(), limits=LimitSpec(requests_per_day=1), **options) as made:
        answer = made.world.chat(stream=True, **names)
        row = made.rows(2 if "models" in names else 1)[-1]
        refused = made.world.chat(model="cloud")
    assert answer.status_code == 200
    told = answer.headers["x-outrider-reason"] + answer.headers.get("x-outrider-ignored-fields", "")
    assert "gone x" in told or "odd x" in told
    assert told.isascii()
    assert told.isprintable()
    assert row["num_charged_tokens"] > 0
    assert refused.status_code == 429


def fail(*_: Any) -> None:
    raise KeyError("a fault of the gateway's own")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("place", "name", "stream"),
    [
        (AnswerResponse, "_start", True),
        (ClientFormat, "part", True),
        (UpstreamResponder, "_whole_body", False),
    ],
)
def test_an_answer_that_a_fault_of_ours_ends_is_paid_where_a_server_wrote_it(
    opened: Open, monkeypatch: pytest.MonkeyPatch, place: type, name: str, stream: bool
) -> None:
    """A client that can cause such a fault had the servers' work for nothing."""
    with opened(MockScript(num_pieces=40), limits=LimitSpec(requests_per_day=1)) as made:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            try:
                # Such a fault ends the connection, which no other request may be sent on meanwhile.
                once = {"connection": "close"}
                broken = made.world.chat(model="cloud", stream=stream, headers=once)
            except httpx.RemoteProtocolError:
                broken = None
        (row,) = made.rows(1)
        refused = made.world.chat(model="cloud")
    assert broken is None or broken.status_code == 500 or "internal_error" in broken.text
    assert row["charge_nanos"] == row["cost_nanos"] > 0
    assert refused.status_code == 429
