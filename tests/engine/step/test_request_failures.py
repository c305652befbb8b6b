"""One request's own values never raise out of a step, nor reach into another request's rows."""

import logging
import math
from typing import Any

import pytest

from outrider.engine.core import Engine
from outrider.engine.errors import InvalidRequestError
from outrider.engine.events import Failed
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.step_loop import _apply
from outrider.gateway.engines.backends.wire import (
    Events,
    Refused,
    Reply,
    Submit,
    decode_reply,
    encode,
)
from outrider.verifier.params import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams
from tests.engines import assert_idle, make_engine, make_request, serve, shipped_pair, tiny_pair
from tests.grammars import schema_spec, shipped_compiler

HUGE = 10**400


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_k": HUGE}, "top_k"),
        ({"max_tokens": HUGE}, "max_tokens"),
        ({"choice_index": HUGE}, "choice_index"),
        ({"seed": HUGE}, "seed"),
        ({"logit_bias": ((-5, 1.0),)}, "logit_bias"),  # another request's row
        ({"logit_bias": ((HUGE, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((5, math.inf),)}, "logit_bias"),
        ({"logit_bias": ((5, 1e308),)}, "logit_bias"),
        ({"logit_bias": ((5, 1.0),) * (MAX_LOGIT_BIASES + 1)}, "logit_bias"),
        ({"stop_token_ids": (-1,), "min_tokens": 2}, "stop_token_ids"),
        ({"stop_token_ids": (1,) * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        ({"temperature": math.nan}, "temperature"),
        ({"presence_penalty": 1e308}, "presence_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"min_tokens": HUGE}, "min_tokens"),
        ({"num_logprobs": HUGE}, "num_logprobs"),
    ],
)
def test_numbers_that_would_raise_in_a_step_are_refused_by_name(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=f"{field}"):
        SamplingParams(**{"max_tokens": 8, **fields})


@pytest.mark.parametrize("arrival_s", [math.nan, math.inf, -math.inf])
def test_an_arrival_is_a_time(arrival_s: float) -> None:
    with pytest.raises(ValueError, match="arrival_s"):
        EngineRequest(
            request_id="a",
            prompt_token_ids=(1,),
            tier="large",
            sampling=SamplingParams(max_tokens=1),
            arrival_s=arrival_s,
        )


def test_a_prediction_longer_than_the_context_is_refused() -> None:
    engine = make_engine(tiny_pair())
    request = make_request("a", [5], max_tokens=4)
    object.__setattr__(request, "prediction_token_ids", (5,) * 100_000)
    with pytest.raises(InvalidRequestError, match="prediction has 100000 tokens"):
        engine.submit(request)
    assert_idle(engine)


def test_a_change_of_tier_that_breaks_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(tiny_pair())
    other = make_request("other", [7, 8, 9], max_tokens=12)
    alone = serve(make_engine(tiny_pair()), [other])["other"].token_ids
    engine.submit(make_request("a", [5, 6], tier="small", may_escalate=True))
    engine.submit(other)
    engine.step()
    monkeypatch.setattr(engine._drafter, "adopt", _breaks)
    engine.switch_tier("a", "large")
    events = [event for _ in range(40) if engine.has_work for event in engine.step()]
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.request_id, event.code) for event in failed] == [("a", "request_failed")]
    tokens = [t for e in events if e.request_id == "other" for t in getattr(e, "token_ids", ())]
    assert tokens == alone[-len(tokens) :]
    assert len(tokens) >= len(alone) - 12
    assert not engine.has_work
    assert not engine.scheduler.waiting


@pytest.mark.parametrize("where", ["policy", "grammar"])
def test_a_request_that_cannot_be_queued_leaves_nothing_behind(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(shipped_pair(), grammars={"large": shipped_compiler()})
    request = make_request("a", [5, 6])
    if where == "policy":
        monkeypatch.setattr(engine.scheduler._policy, "added", _breaks)
    else:
        object.__setattr__(request, "grammar", schema_spec({"type": "object"}))
        monkeypatch.setattr(engine._preparation.grammars, "add", _breaks)
    replies = told(engine, request)
    assert isinstance(replies[0], Refused)
    assert "RuntimeError" in replies[0].error.message
    monkeypatch.undo()
    assert_idle(engine)
    assert len(serve(engine, [make_request("a", [5, 6], max_tokens=3)])["a"].token_ids) == 3


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "\ud800"},
        {"enum": ["\ud800"]},
        {"type": "object", "properties": {"\ud800": {"type": "nope"}}},
        {"\ud800": 1, "$ref": "#/\ud800"},
    ],
)
def test_messages_about_a_grammar_can_be_encoded(schema: object) -> None:
    """The gateway hears of it in UTF-8: a message that cannot be encoded would end the engine."""
    engine = make_engine(shipped_pair(), grammars={"large": shipped_compiler()})
    request = make_request("a", [5, 6], max_tokens=2)
    object.__setattr__(request, "grammar", schema_spec(schema))
    engine.submit(request)
    while engine.has_work:
        sent = encode(Events.pack(engine.step()))
        assert isinstance(decode_reply(sent), Events)


def test_a_refusal_with_half_a_surrogate_can_be_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tiny_pair())
    monkeypatch.setattr(engine, "submit", _breaks_in_no_text)
    # The logged traceback has the surrogate too, which pytest-xdist cannot send in a report.
    with caplog.at_level(logging.CRITICAL, logger="outrider.gateway.engines.backends.step_loop"):
        (reply,) = told(engine, make_request("a", [5]))
    assert isinstance(decode_reply(encode(reply)), Refused)


def told(engine: Engine, request: EngineRequest) -> list[Reply]:
    replies: list[Reply] = []

    class Line:
        def receive(self, *, wait: bool) -> list[Any]:
            return []

        def send(self, reply: Reply, /) -> None:
            replies.append(reply)

    _apply(Submit(request), engine, Line())
    return replies


def _breaks(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


def _breaks_in_no_text(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken \ud800")
