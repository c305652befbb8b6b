"""Everything that crosses the process border arrives as it left."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider.engine.errors
from outrider.engine.errors import (
    EngineDiedError,
    EngineError,
    InfeasibleObjectiveError,
    PromptTooLongError,
    QueueFullError,
    TierUnavailableError,
)
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    PrefillDone,
    RequestStats,
    TierInfo,
    TierStats,
    TierSwitched,
    TierWork,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.engine.trace import StepTrace, TraceNode
from outrider.gateway.engines.backends import wire
from outrider.verifier.params import SOURCES, TIERS, SamplingParams
from outrider.verifier.token_logprobs import TokenLogprobs

counts = st.integers(0, 2**40)
token_ids = st.integers(0, 2**31)
floats = st.floats(allow_nan=False)
ids = st.text(max_size=40)
tiers = st.sampled_from(TIERS)
sources = st.sampled_from(SOURCES)

logprobs = st.builds(
    TokenLogprobs,
    token_id=token_ids,
    logprob=floats,
    top=st.lists(st.tuples(token_ids, floats), max_size=3).map(tuple),
)
tier_work = st.builds(
    TierWork,
    tier=tiers,
    num_prompt_tokens=counts,
    num_cached_tokens=counts,
    num_computed_tokens=counts,
    num_output_tokens=counts,
    num_discarded_tokens=counts,
    num_draft_rows=counts,
    num_hit_tokens=counts,
)
request_stats = st.builds(
    RequestStats,
    num_prompt_tokens=counts,
    num_cached_tokens=counts,
    num_output_tokens=counts,
    num_drafted_tokens=counts,
    num_accepted_tokens=counts,
    num_reused_tokens=counts,
    num_steps=counts,
    num_preemptions=counts,
    queue_s=st.none() | floats,
    ttft_s=st.none() | floats,
    work=st.lists(tier_work, max_size=2).map(tuple),
)
traces = st.builds(
    StepTrace,
    origins=st.lists(st.sampled_from([*SOURCES, "small", "target", "reused"]), max_size=5).map(
        tuple
    ),
    nodes=st.lists(
        st.builds(
            TraceNode,
            token_id=token_ids,
            parent=st.integers(-1, 255),
            sources=st.lists(st.sampled_from([*SOURCES, "reused"]), max_size=3).map(tuple),
            is_accepted=st.booleans(),
        ),
        max_size=4,
    ).map(tuple),
)
events: st.SearchStrategy[EngineEvent] = st.one_of(
    st.builds(
        PrefillDone,
        request_id=ids,
        tier=tiers,
        num_prompt_tokens=counts,
        num_cached_tokens=counts,
        queue_s=floats,
        hidden_state=st.none() | st.lists(floats, max_size=4).map(tuple),
    ),
    st.builds(
        TokensEmitted,
        request_id=ids,
        token_ids=st.lists(token_ids, max_size=5).map(tuple),
        num_drafted_tokens=counts,
        num_accepted_tokens=counts,
        logprobs=st.lists(logprobs, max_size=3).map(tuple),
        num_predicted_tokens=counts,
        num_unratified_tokens=counts,
        num_reused_tokens=counts,
        trace=st.none() | traces,
    ),
    st.builds(AnswerHeld, request_id=ids, finish_reason=st.sampled_from(["stop", "length"])),
    st.builds(TierSwitched, request_id=ids, tier=tiers, keeps_answer=st.booleans()),
    st.builds(
        Finished,
        request_id=ids,
        tier=tiers,
        finish_reason=st.sampled_from(["stop", "length", "abort"]),
        stats=request_stats,
    ),
    st.builds(Failed, request_id=ids, code=ids, message=ids, stats=st.none() | request_stats),
)
row_token_ids = st.integers(0, 2**31 - 1)
requests = st.builds(
    EngineRequest,
    request_id=ids,
    prompt_token_ids=st.lists(token_ids, max_size=8).map(tuple),
    tier=tiers,
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 10**6),
        temperature=st.floats(0, 100),
        top_k=st.integers(0, 2**31 - 1),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        seed=st.integers(0, 2**64 - 1),
        choice_index=st.integers(0, 100),
        stop_token_ids=st.lists(row_token_ids, max_size=3).map(tuple),
        num_logprobs=st.none() | st.integers(0, 20),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0, 10, exclude_min=True),
        logit_bias=st.lists(st.tuples(row_token_ids, st.floats(-1e6, 1e6)), max_size=3).map(tuple),
        min_tokens=st.integers(0, 1),
    ),
    speculation=st.builds(
        SpeculationParams,
        enabled=st.booleans(),
        max_draft_nodes=st.none() | st.integers(0, 255),
        max_draft_depth=st.none() | st.integers(0, 255),
        sources=st.none() | st.lists(sources, max_size=4).map(tuple),
        inter_token_s=st.none() | st.floats(1e-5, 1e3),
    ),
    group_id=st.none() | ids,
    cache_salt=ids,
    arrival_s=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    return_hidden_state=st.booleans(),
    prediction_token_ids=st.lists(token_ids, max_size=4).map(tuple),
    retracted_token_ids=st.lists(token_ids, max_size=4).map(tuple),
    may_escalate=st.booleans(),
    tenant=ids,
    weight=st.floats(0, 1e9, exclude_min=True),
    priority=st.sampled_from([-1, 0, 1]),
    traces=st.booleans(),
)
tier_stats = st.builds(
    TierStats,
    num_running=counts,
    num_blocks=counts,
    num_used_blocks=counts,
    num_computed_tokens=counts,
    num_discarded_tokens=counts,
    num_draft_rows=counts,
)
engine_stats = st.builds(
    EngineStats,
    tiers=st.dictionaries(tiers, tier_stats),
    num_steps=counts,
    accepted_per_depth=st.lists(counts, max_size=4).map(tuple),
    drafted_by_source=st.dictionaries(sources, st.lists(counts, max_size=3).map(tuple)),
    accepted_by_source=st.dictionaries(sources, st.lists(counts, max_size=3).map(tuple)),
    num_unratified_tokens=counts,
    step_host_s=floats,
)
tier_infos = st.builds(
    TierInfo,
    tier=tiers,
    model_id=ids,
    path=ids,
    max_context=counts,
    vocab_size=counts,
    num_parameters=counts,
    dtype=ids,
    device=ids,
    fingerprint=ids,
)
commands: st.SearchStrategy[wire.Command] = st.one_of(
    st.builds(wire.Submit, requests),
    st.builds(wire.SwitchTier, ids, tiers, st.booleans()),
    st.builds(wire.KeepOnTier, ids),
    st.builds(wire.Abort, ids),
    st.builds(wire.GetStats, counts),
    st.just(wire.Ping()),
    st.just(wire.Stop()),
)
wire_errors = st.builds(
    wire.WireError, ids, ids, st.dictionaries(ids, counts | floats | ids, max_size=2)
)
replies: st.SearchStrategy[wire.Reply] = st.one_of(
    st.builds(
        wire.Welcome,
        ids,
        st.builds(EngineInfo, tiers=st.dictionaries(tiers, tier_infos), speculation=st.booleans()),
        st.dictionaries(tiers, ids),
    ),
    st.builds(wire.Crashed, wire_errors),
    st.builds(wire.Refused, ids, wire_errors),
    st.builds(wire.StatsReply, counts, engine_stats),
    st.just(wire.Pong()),
    st.lists(events, max_size=4).map(wire.Events.pack),
)

reports: st.SearchStrategy[wire.Report] = st.one_of(
    st.builds(wire.Loading, ids, floats),
    st.builds(wire.Ready, ids),
    st.builds(wire.LoadFailed, wire_errors),
)


@given(commands)
def test_commands_round_trip(command: wire.Command) -> None:
    assert wire.decode_command(wire.encode(command)) == command


@given(replies)
def test_replies_round_trip(reply: wire.Reply) -> None:
    assert wire.decode_reply(wire.encode(reply)) == reply


@given(reports)
def test_reports_are_lines_and_round_trip(report: wire.Report) -> None:
    line = wire.encode_report(report)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert wire.decode_report(line[:-1]) == report


@given(st.lists(events, max_size=6))
def test_the_events_of_a_step_keep_their_order_and_types(step_events: list[EngineEvent]) -> None:
    decoded = wire.decode_reply(wire.encode(wire.Events.pack(step_events)))
    assert isinstance(decoded, wire.Events)
    assert decoded.unpack() == step_events
    assert [type(event) for event in decoded.unpack()] == [type(event) for event in step_events]


def test_an_untraced_step_has_no_trace_on_the_wire() -> None:
    """It would travel with every token."""
    plain = TokensEmitted(request_id="r", token_ids=(1, 2))
    told = TokensEmitted(
        request_id="r", token_ids=(1, 2), trace=StepTrace(origins=("model", "target"))
    )
    without, with_trace = (wire.encode(wire.Events.pack([event])) for event in (plain, told))
    assert b"origins" not in without
    assert b"model" in with_trace


def test_an_unknown_origin_is_refused() -> None:
    event = TokensEmitted(request_id="r", token_ids=(1,), trace=StepTrace(origins=("model",)))
    frame = wire.encode(wire.Events.pack([event])).replace(b"model", b"muddl")
    with pytest.raises(msgspec.ValidationError):
        wire.decode_reply(frame)


def test_a_decoded_request_is_checked_like_any_other() -> None:
    request = EngineRequest(
        request_id="r",
        prompt_token_ids=(1,),
        tier="large",
        sampling=SamplingParams(max_tokens=123),
    )
    frame = wire.encode(wire.Submit(request)).replace(bytes([123]), bytes([255]))
    with pytest.raises(ValueError, match=r"max_tokens=-1 must be in \[0, "):
        wire.decode_command(frame)


@pytest.mark.parametrize(
    "error",
    [
        PromptTooLongError(num_tokens=9000, max_tokens=10, max_context=8192),
        QueueFullError(num_waiting=4, retry_after_s=2.5),
        InfeasibleObjectiveError(ttft_s=0.2, predicted_wait_s=1.5, retry_after_s=1.3),
        InfeasibleObjectiveError(ttft_s=0.2, predicted_wait_s=1.5, retry_after_s=None),
        TierUnavailableError("no small tier"),
        EngineDiedError("gone"),
    ],
)
def test_errors_keep_class_message_and_numbers(error: EngineError) -> None:
    reply = wire.Refused("r", wire.pack_error(error))
    decoded = wire.decode_reply(wire.encode(reply))
    assert isinstance(decoded, wire.Refused)
    rebuilt = wire.unpack_error(decoded.error)
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    assert vars(rebuilt) == vars(error)
    assert rebuilt.code == error.code


def test_every_engine_error_can_travel() -> None:
    classes = [
        value
        for value in vars(outrider.engine.errors).values()
        if isinstance(value, type) and issubclass(value, EngineError)
    ]
    assert len(classes) >= 7
    for error_class in classes:
        rebuilt = wire.unpack_error(wire.WireError(error_class.__name__, "text", {}))
        assert type(rebuilt) is error_class


def test_foreign_errors_arrive_as_engine_errors_that_name_their_type() -> None:
    rebuilt = wire.unpack_error(wire.pack_error(FileNotFoundError("no config.json")))
    assert type(rebuilt) is EngineError
    assert str(rebuilt) == "FileNotFoundError: no config.json"
