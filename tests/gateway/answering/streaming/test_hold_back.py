"""A small answer held back: what the client gets is one tier's answer, whatever happens when."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import draft
from outrider.engine.errors import PromptTooLongError, QueueFullError
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.jobs.extras import Extras
from outrider.gateway.answering.jobs.job import Answer, Job
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.tool_formats import FORMATS
from outrider.gateway.answering.text.tool_parser import ToolReading
from outrider.gateway.contract.errors.tree import EngineLostError, GenerationError
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.router.watch import Action
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.gateway.watches import (
    Outcome,
    PlannedWatch,
    collect,
    letters,
    run_virtually,
    unwatched,
    watched_job,
)

Encode = Callable[[str], list[int]]

SMALL = "The small model wrote this text."
LARGE = "What the large one says is different!"
POSITIONS = range(21)


def steps_of(ids: Iterable[int], sizes: Iterable[int] = (1,)) -> list[Step]:
    """The ids in steps of these sizes (cycled); all but a step's last token were drafted."""
    ids, sizes = list(ids), list(sizes)
    steps: list[Step] = []
    while ids:
        size = sizes[len(steps) % len(sizes)]
        part, ids = tuple(ids[:size]), ids[size:]
        steps.append(Step(token_ids=part, num_drafted=size, num_accepted=len(part) - 1))
    return steps


def engine_of(small: Script, large: Script) -> ScriptedClient:
    """Small requests play the one script and go on with the other; large ones play that."""

    def script(request: EngineRequest) -> Script:
        if request.tier == "large":
            return large
        return replace(small, escalated=large) if request.may_escalate else small

    return ScriptedClient(vocab_size=420, script=script)


def alone(engine: ScriptedClient, job: Job, action: Action) -> Outcome:
    """Return what the chosen tier says without a watch."""
    return collect(engine, unwatched(job, "large" if action == "escalate" else "small"))


def assert_same(outcome: Outcome, expected: Outcome, index: int = 0) -> None:
    """Text, thinking, calls, marks, log-probabilities, counts and end: all as expected."""
    assert outcome.error is None
    assert outcome.content(index) == expected.content(index)
    assert outcome.pieces(index) == expected.pieces(index)
    assert outcome.logprobs(index) == expected.logprobs(index)
    assert outcome.ends(index) == expected.ends(index)
    assert len(outcome.ends(index)) == 1
    usage, other = (o.generation.choices[index].usage for o in (outcome, expected))
    assert usage.num_tokens == other.num_tokens
    assert usage.num_reasoning_tokens == other.num_reasoning_tokens
    assert usage.num_accepted_tokens == other.num_accepted_tokens


@pytest.mark.slow_cases
@pytest.mark.parametrize("action", ["commit", "escalate"])
@pytest.mark.parametrize("place", range(0, 21, 4))
def test_every_position_with_a_stop_string_at_every_place(
    tokenizer: ChatTokenizer, encode: Encode, action: Action, place: int
) -> None:
    """The stop string lies in what is held, across the decision, behind it, or is none."""
    for word in ("STOP", "STO"):  # the second only looks like the beginning of one
        small = letters(SMALL[:place] + word + SMALL[place:], encode)
        large = letters(LARGE[:place] + word + LARGE[place:], encode)
        engine = engine_of(
            Script(steps=steps_of(small)), Script(steps=steps_of(large), finish_reason="length")
        )
        for at in POSITIONS:
            watch = PlannedWatch(action, at)
            job = watched_job(tokenizer, [watch], stops=("STOP",))
            outcome = collect(engine, job)
            assert_same(outcome, alone(engine, job, action))
            watch = outcome.generation.watches[0]
            num_written = place + 4 if word == "STOP" else len(small)
            assert watch.num_held_tokens == min(at, num_written)
            assert watch.escalated == (action == "escalate")
            assert not engine.running


texts = st.lists(
    st.sampled_from(["ab", "STOP", "ST", "OP", "é漢", " ", "🙂", "</think>"]), max_size=10
).map("".join)


@dataclass(frozen=True)
class Case:
    """Two texts, how they are cut into steps, and when the watch decides what."""

    small: str
    large: str
    sizes: list[int]
    at: int | None
    action: Action
    gap_s: float
    hold_back_s: float | None
    thinks: bool
    use_stops: bool


cases = st.builds(
    Case,
    small=texts,
    large=texts,
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    at=st.none() | st.integers(0, 20),
    action=st.sampled_from(["commit", "escalate"]),
    gap_s=st.sampled_from([0.0, 0.01]),
    hold_back_s=st.none() | st.sampled_from([0.0, 0.02, 0.035, 1.0]),
    thinks=st.booleans(),
    use_stops=st.booleans(),
)


@given(case=cases)
def test_nothing_is_repeated_or_lost(tokenizer: ChatTokenizer, encode: Encode, case: Case) -> None:
    """However tokens are grouped, whenever and why the watch decides."""
    end = tokenizer.stop_token_ids
    small, large = (
        Script(steps=steps_of([*encode(text), *end], case.sizes), gap_s=case.gap_s)
        for text in (case.small, case.large)
    )
    engine = engine_of(small, large)
    job = watched_job(
        tokenizer,
        [PlannedWatch(case.action, case.at)],
        hold_back_s=case.hold_back_s,
        stops=("STOP", "OPx") if case.use_stops else (),
        continues_text=not case.thinks,
    )
    assert job.escalation is not None
    job = msgspec.structs.replace(
        job,
        choices=tuple(
            msgspec.structs.replace(plan, opens_thinking=case.thinks) for plan in job.choices
        ),
        escalation=msgspec.structs.replace(job.escalation, opens_thinking=case.thinks),
    )
    outcome = collect(engine, job)
    assert_same(outcome, alone(engine, job, case.action))
    assert not engine.running


@pytest.mark.slow_cases
@pytest.mark.parametrize("action", ["commit", "escalate"])
def test_calls(tokenizer: ChatTokenizer, encode: Encode, action: Action) -> None:
    """Tool calls are held, dropped and sent like text."""
    call = '<tool_call>\n{{"name": "add", "arguments": {{"a": {}}}}}\n</tool_call>'
    engine = engine_of(
        Script(steps=steps_of(encode("Let me see. " + call.format(1)), [2])),
        Script(steps=steps_of(encode(call.format(2) + "\n" + call.format(3)), [3])),
    )
    for at in POSITIONS:
        job = watched_job(
            tokenizer,
            [PlannedWatch(action, at)],
            tools=ToolReading(format=FORMATS["hermes"]),
        )
        outcome = collect(engine, job)
        assert_same(outcome, alone(engine, job, action))
        assert outcome.ends() == ["tool_calls"]
        names = [text for kind, _, text in outcome.content() if kind == "call"]
        assert names == ["add"] * (2 if action == "escalate" else 1)


# ---- when it is decided ---------------------------------------------------------------------


@pytest.mark.parametrize("action", ["commit", "escalate"])
@pytest.mark.parametrize("hold_back_s", [0.0, 0.25, 0.3, 5.0])
def test_the_time_limit(
    tokenizer: ChatTokenizer, encode: Encode, action: Action, hold_back_s: float
) -> None:
    """The first text comes at most the limit, and for the large tier a step, after it could have.

    The limit falls between steps as well as on one; what is waited for then is not lost.
    """
    gap_s = 0.1
    engine = engine_of(
        Script(steps=steps_of(letters(SMALL, encode)), gap_s=gap_s),
        Script(steps=steps_of(letters(LARGE, encode)), gap_s=gap_s),
    )
    watch = PlannedWatch(action)
    job = watched_job(tokenizer, [watch], hold_back_s=hold_back_s)
    metrics = GatewayMetrics()
    outcome = collect(engine, job, metrics)
    assert_same(outcome, alone(engine, job, action))
    ends_s = gap_s * len(letters(SMALL, encode))
    decided_s = min(gap_s + hold_back_s, ends_s)
    late_s = outcome.times_s[0] - decided_s
    if action == "commit":
        assert late_s == pytest.approx(0, abs=1e-6)
    else:
        # The scripted small model sees the switch at its next step; then the large one's first.
        assert 0 < late_s <= 2 * gap_s + 1e-6
    assert watch.asked[-1] == ("end" if hold_back_s == 5.0 else "time")
    assert outcome.generation.ttft_s() == pytest.approx(outcome.times_s[0])
    text = metrics.exposition(None).decode()
    tier = "large" if action == "escalate" else "small"
    assert f'outrider_cascade_hold_back_seconds_count{{tier="{tier}"}} 1.0' in text


def test_the_watch_hears_everything_once(tokenizer: ChatTokenizer, encode: Encode) -> None:
    ids = letters("abcdefgh", encode)
    steps = [
        Step(token_ids=tuple(ids[i : i + 2]), logprobs=(-0.1 * i, -0.2 * i)) for i in (0, 2, 4, 6)
    ]
    small = Script(steps=steps, hidden_state=(0.5, -1.0))
    watch = PlannedWatch("commit", at=5)
    outcome = collect(engine_of(small, Script()), watched_job(tokenizer, [watch]))
    assert outcome.text() == "abcdefgh"
    assert watch.hidden_state == (0.5, -1.0)
    assert watch.asked == ["prompt", "tokens", "tokens", "tokens"]  # not after the commit
    assert watch.logprobs == [x for step in steps[:3] for x in step.logprobs]


def test_a_watch_that_will_not_decide_lets_the_answer_stand(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    engine = engine_of(Script(steps=steps_of(encode(SMALL)), gap_s=0.1), Script())
    for hold_back_s in (None, 0.25):
        job = watched_job(tokenizer, [PlannedWatch("hold")], hold_back_s=hold_back_s)
        outcome = collect(engine, job)
        assert outcome.text() == SMALL
        assert not outcome.generation.watches[0].escalated


@pytest.mark.parametrize("at", [0, 3, None])
def test_commit_settles_and_escalate_switches_once(
    tokenizer: ChatTokenizer, encode: Encode, at: int | None
) -> None:
    engine = engine_of(Script(steps=steps_of(encode(SMALL))), Script(steps=steps_of(encode(LARGE))))
    collect(engine, watched_job(tokenizer, [PlannedWatch("commit", at)]))
    assert set(engine.settled) == {"r-0"}
    assert (engine.switched, engine.aborted) == ([], [])
    engine.settled.clear()
    collect(engine, watched_job(tokenizer, [PlannedWatch("escalate", at)]))
    assert (engine.switched, engine.settled) == ([("r-0", "large", False)], [])


# ---- what goes wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3, None])
@pytest.mark.parametrize("stops", [(), ("text",)])
def test_a_large_tier_that_refuses(
    tokenizer: ChatTokenizer, encode: Encode, at: int | None, stops: tuple[str, ...]
) -> None:
    """The small answer is delivered whole, and the reason says so."""
    small = Script(steps=steps_of(encode(SMALL)))
    engine = ScriptedClient(vocab_size=420, script=lambda _: small)
    job = watched_job(tokenizer, [PlannedWatch("escalate", at)], stops=stops)
    metrics = GatewayMetrics()
    outcome = collect(engine, job, metrics)
    assert_same(outcome, alone(engine, job, "commit"))
    generation = outcome.generation
    assert "could not take it, small answer kept" in generation.reason
    assert (generation.tier, generation.watches[0].escalated) == ("small", False)
    assert generation.num_discarded_tokens == 0
    text = metrics.exposition(None).decode()
    assert 'outrider_cascade_decisions_total{action="refuse",tier="small"} 1.0' in text


def test_a_whole_small_answer_replaces_a_large_one_that_fails(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    small = Script(steps=steps_of(encode(SMALL)))
    engine = engine_of(small, Script(failure=("no_memory", "The engine has no memory left.")))
    job = watched_job(tokenizer, [PlannedWatch("escalate")])
    outcome = collect(engine, job)
    assert_same(outcome, alone(engine, job, "commit"))
    assert "small answer kept" in outcome.generation.reason
    assert outcome.generation.tier == "small"
    # Of one that is not whole, nothing can be sent.
    early = collect(engine, watched_job(tokenizer, [PlannedWatch("escalate", 3)]))
    assert isinstance(early.error, GenerationError)
    assert early.deltas == []
    # Nor when the large one's text is out.
    begun = Script(steps=steps_of(encode("Yes, ")), failure=("no_memory", "None left."))
    late = collect(engine_of(small, begun), watched_job(tokenizer, [PlannedWatch("escalate")]))
    assert isinstance(late.error, GenerationError)
    assert late.text() == "Yes, "


@pytest.mark.parametrize("at", [0, 3, None])
@pytest.mark.parametrize("dies_in", ["small", "large"])
def test_a_dead_engine_is_a_clean_error(
    tokenizer: ChatTokenizer, encode: Encode, at: int | None, dies_in: str
) -> None:
    death = ("engine_died", "The engine stopped.")
    small = Script(steps=steps_of(encode(SMALL)))
    large = Script(steps=steps_of(encode(LARGE)))
    if dies_in == "small":
        engine = ScriptedClient(
            vocab_size=420, script=lambda _: replace(small, steps=small.steps[:2], failure=death)
        )
        job = watched_job(tokenizer, [PlannedWatch("commit", 10)])
        (plan,) = job.choices
        plan = msgspec.structs.replace(plan, request=replace(plan.request, may_escalate=False))
        job = msgspec.structs.replace(job, choices=(plan,))
    else:
        engine = engine_of(small, replace(large, steps=(), failure=death))
        job = watched_job(tokenizer, [PlannedWatch("escalate", at)])
    outcome = collect(engine, job)
    assert isinstance(outcome.error, EngineLostError)
    assert outcome.deltas == []
    assert not engine.running


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hold_back_s", [None, 60.0])
def test_leaving_while_text_is_held_aborts(
    tokenizer: ChatTokenizer, encode: Encode, n: int, hold_back_s: float | None
) -> None:
    """Also while a read waits for its time limit."""
    engine = engine_of(Script(steps=steps_of(encode(SMALL)), hangs=True), Script())
    job = watched_job(tokenizer, [PlannedWatch() for _ in range(n)], hold_back_s=hold_back_s)

    async def main() -> None:
        generation = Generation(engine, job, GatewayMetrics(), asyncio.get_running_loop().time)
        first = asyncio.create_task(anext(generation.steps()))
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert len(engine.running) == n
        assert not first.done()
        first.cancel()
        await asyncio.wait((first,))
        assert first.cancelled()
        assert len(asyncio.all_tasks()) == 1

    run_virtually(main())
    assert sorted(engine.aborted) == [f"r-{index}" for index in range(n)]
    assert not engine.running


def test_an_unheld_answer_is_escalated_only_by_another_request(
    tokenizer: ChatTokenizer, other: ChatTokenizer, encode: Encode
) -> None:
    """It is over when the watch gives it up: only another request can still answer."""
    engine = engine_of(
        Script(steps=steps_of(encode(SMALL))), Script(steps=steps_of(other_ids(other, LARGE)))
    )
    for tokenizer_of_large, text in ((None, SMALL), (other, LARGE)):
        job = watched_job(tokenizer, [PlannedWatch("escalate")], other=tokenizer_of_large)
        (plan,) = job.choices
        plan = msgspec.structs.replace(plan, request=replace(plan.request, may_escalate=False))
        outcome = collect(engine, msgspec.structs.replace(job, choices=(plan,)))
        assert outcome.text() == text
        assert outcome.generation.tier == ("small" if text == SMALL else "large")


# ---- another tokenizer ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def other() -> ChatTokenizer:
    """The shipped pair's: other ids for the same text."""
    return ChatTokenizer.load(Path(draft.__file__).parent / "pair" / "large")


def other_ids(other: ChatTokenizer, text: str) -> list[int]:
    return list(asyncio.run(other.encode_answer(text, 1000)))


@pytest.mark.parametrize("at", [*range(0, 21, 3), None])
@pytest.mark.parametrize("hold_back_s", [None, 0.5])
def test_another_tokenizer_answers_anew(
    tokenizer: ChatTokenizer,
    other: ChatTokenizer,
    encode: Encode,
    at: int | None,
    hold_back_s: float | None,
) -> None:
    """The small text is proposed in the large model's tokens; its request ends, and only then."""
    small = letters(SMALL, encode)
    ids = [*other_ids(other, LARGE), *other.stop_token_ids]
    steps = [replace(step, num_predicted=1) for step in steps_of(ids, [2])]
    engine = engine_of(Script(steps=steps_of(small), gap_s=0.01), Script(steps=steps, gap_s=0.01))
    watch = PlannedWatch("escalate", at)
    job = watched_job(tokenizer, [watch], other=other, hold_back_s=hold_back_s)
    outcome = collect(engine, job)
    assert_same(outcome, alone(engine, job, "escalate"))
    assert outcome.text() == LARGE
    begun, asked = engine.submitted[0], engine.submitted[1]
    assert (begun.request_id, asked.request_id) == ("r-0", "r-0-large")
    num_told = len(small) if at is None and hold_back_s is None else watch.num_tokens
    assert other.decode(asked.prediction_token_ids) == SMALL[:num_told]
    assert engine.aborted[0] == "r-0"
    assert engine.switched == []
    generation = outcome.generation
    usage = generation.choices[0].usage
    assert usage.num_reused_tokens == len(steps)
    assert (usage.num_prediction_tokens, usage.num_predicted_tokens) == (0, 0)
    assert not engine.running
    spelled = [
        (delta.tokenizer or tokenizer).token_bytes(entry.token_id)
        for delta in outcome.deltas
        for entry in delta.logprobs
    ]
    assert b"".join(spelled).decode() == LARGE


def test_the_small_request_ends_when_the_large_one_has_begun(
    tokenizer: ChatTokenizer, other: ChatTokenizer, encode: Encode
) -> None:
    large = Script(steps=steps_of(other_ids(other, LARGE)), hangs=True)
    engine = engine_of(Script(steps=steps_of(encode(SMALL)), hangs=True), large)
    job = watched_job(tokenizer, [PlannedWatch("escalate", 4)], other=other)
    outcome = collect(engine, job, take=1)
    assert LARGE.startswith(outcome.text())
    assert engine.aborted == ["r-0", "r-0-large"]


@pytest.mark.parametrize("at", [0, 5, None])
@pytest.mark.parametrize(
    "large",
    [
        Script(refusal=QueueFullError(num_waiting=9, retry_after_s=1.0)),
        Script(refusal=PromptTooLongError(num_tokens=9, max_tokens=9, max_context=9)),
        Script(failure=("no_memory", "None left.")),
        Script(breaks_off=True),
    ],
)
def test_another_tokenizers_tier_refuses(
    tokenizer: ChatTokenizer, other: ChatTokenizer, encode: Encode, at: int | None, large: Script
) -> None:
    """The small answer never stopped, so it is streamed on."""
    engine = engine_of(Script(steps=steps_of(encode(SMALL)), gap_s=0.01), large)
    job = watched_job(tokenizer, [PlannedWatch("escalate", at)], other=other)
    outcome = collect(engine, job)
    assert_same(outcome, alone(engine, job, "commit"))
    assert "small answer kept" in outcome.generation.reason
    assert "r-0" in engine.settled
    assert not engine.running


def test_a_clients_own_prediction_stays_the_clients(
    tokenizer: ChatTokenizer, other: ChatTokenizer, encode: Encode
) -> None:
    large = [Step(token_ids=tuple(other_ids(other, LARGE)), num_predicted=3)]
    engine = engine_of(Script(steps=steps_of(encode(SMALL))), Script(steps=large))
    job = watched_job(tokenizer, [PlannedWatch("escalate", 4)], other=other)
    (plan,) = job.choices
    assert plan.escalated is not None
    plan = msgspec.structs.replace(
        plan,
        request=replace(plan.request, prediction_token_ids=(7, 8, 9, 10)),
        escalated=replace(plan.escalated, prediction_token_ids=(17, 18, 19, 20)),
    )
    outcome = collect(engine, msgspec.structs.replace(job, choices=(plan,)))
    assert engine.submitted[1].prediction_token_ids == (17, 18, 19, 20)
    usage = outcome.generation.choices[0].usage
    assert (usage.num_predicted_tokens, usage.num_mispredicted_tokens) == (3, 1)
    assert usage.num_reused_tokens == 0


# ---- in mid-stream --------------------------------------------------------------------------


@pytest.mark.parametrize("continue_at", range(5, 16))
@pytest.mark.parametrize("stop", [None, "small text", "over, and"])
def test_the_large_tier_continues_behind_the_sent_text(
    tokenizer: ChatTokenizer, encode: Encode, continue_at: int, stop: str | None
) -> None:
    """A stop string may begin in one tier's text and end in the other's."""
    small, large = letters("A small text, and more of it", encode), letters(" is over, and", encode)
    engine = engine_of(Script(steps=steps_of(small)), Script(steps=steps_of(large)))
    watch = PlannedWatch("commit", at=3, continue_at=continue_at)
    stops = () if stop is None else (stop,)
    job = watched_job(tokenizer, [watch], mid_stream=True, stops=stops)
    metrics = GatewayMetrics()
    outcome = collect(engine, job, metrics)
    if stop == "small text" and continue_at >= 12:
        assert outcome.text() == "A "
        assert outcome.ends() == ["stop"]
        return
    # The scripted engine learns of the switch before its next step.
    written = "A small text, and more of it"[:continue_at] + " is over, and"
    assert outcome.text() == (written.partition(stop)[0] if stop else written)
    assert outcome.ends() == ["stop"]
    assert engine.switched == [("r-0", "large", True)]
    assert outcome.generation.choices[0].usage.num_tokens == continue_at + len(large)
    assert outcome.generation.num_discarded_tokens == 0
    assert outcome.generation.tier == "large"
    found = metrics.exposition(None).decode()
    assert 'cascade_decisions_total{action="commit",tier="small"} 1.0' in found
    assert 'cascade_decisions_total{action="continue",tier="large"} 1.0' in found
    num_gaps = continue_at - 3, len(large) - 1  # none across the switch
    for tier, number in zip(("small", "large"), num_gaps, strict=True):
        assert f'inter_token_latency_seconds_count{{tier="{tier}"}} {float(number)}' in found


def test_no_continuation_unless_asked_for(
    tokenizer: ChatTokenizer, other: ChatTokenizer, encode: Encode
) -> None:
    """Nor between tokenizers, where the text's tokens would not be the large model's."""
    engine = engine_of(Script(steps=steps_of(letters(SMALL, encode))), Script())
    for mid_stream, tokenizer_of_large in ((False, None), (True, other)):
        watch = PlannedWatch("commit", at=3, continue_at=8)
        job = watched_job(tokenizer, [watch], mid_stream=mid_stream, other=tokenizer_of_large)
        assert collect(engine, job).text() == SMALL
    assert engine.switched == []


# ---- several choices, and who learns from them ----------------------------------------------


def test_each_choice_decides_alone(tokenizer: ChatTokenizer, encode: Encode) -> None:
    large = [replace(step, num_reused=1) for step in steps_of(letters(LARGE, encode), [4])]
    engine = engine_of(Script(steps=steps_of(letters(SMALL, encode))), Script(steps=large))
    answers: list[Answer] = []
    watches = [PlannedWatch("commit", 2), PlannedWatch("escalate", 16), PlannedWatch("commit")]
    job = watched_job(tokenizer, watches, on_answer=answers.append)
    outcome = collect(engine, job)
    assert [outcome.text(index) for index in range(3)] == [SMALL, LARGE, SMALL]
    generation = outcome.generation
    assert generation.tier == "large"
    assert generation.model_id == "test/large-model"
    assert [usage.num_held_tokens for usage in generation.watches] == [2, 16, len(SMALL)]
    assert generation.num_discarded_tokens == 16 - len(large)
    assert generation.reason == (
        "router: unsure (0.55); cascade: escalate at tokens (1 of 3 choices escalated)"
    )
    answers.sort(key=lambda answer: (answer.tier, answer.num_tokens))
    assert answers == [
        Answer(
            tier="large",
            text=LARGE,
            escalated=True,
            confidence=0.5,
            num_tokens=len(LARGE),
            num_retracted_tokens=16,
            num_reused_tokens=len(large),
        ),
        Answer(tier="small", text=SMALL, confidence=0.5, num_tokens=len(SMALL)),
        Answer(tier="small", text=SMALL, confidence=0.5, num_tokens=len(SMALL)),
    ]


def test_answers_that_break_off_teach_nothing(tokenizer: ChatTokenizer, encode: Encode) -> None:
    answers: list[Answer] = []
    engine = engine_of(Script(steps=steps_of(encode(SMALL)), hangs=True), Script())
    job = watched_job(tokenizer, [PlannedWatch("commit", 1)], on_answer=answers.append)
    collect(engine, job, take=2)
    assert answers == []


# ---- what is said of the prompt -------------------------------------------------------------


def prompts_of(outcome: Outcome) -> list[str]:
    """The echoes that came, in front of everything else."""
    kinds = [delta.kind for delta in outcome.deltas]
    assert "prompt" not in kinds[1:]
    return [delta.text for delta in outcome.deltas if delta.kind == "prompt"]


@pytest.mark.parametrize("action", ["commit", "escalate"])
@pytest.mark.parametrize("at", [0, 3, None])
def test_an_echo_comes_once_whoever_answers(
    tokenizer: ChatTokenizer, encode: Encode, action: Action, at: int | None
) -> None:
    large = Script(steps=steps_of(encode(LARGE)))
    engine = engine_of(Script(steps=steps_of(encode(SMALL))), large)
    job = echoing(watched_job(tokenizer, [PlannedWatch(action, at)]))
    outcome = collect(engine, job)
    assert prompts_of(outcome) == ["Say:"]
    tier = "large" if action == "escalate" else "small"
    assert outcome.generation.numerics == f"scripted-{tier}"


def test_an_echo_of_a_large_tier_that_fails_is_taken_back(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    small = Script(steps=steps_of(encode(SMALL)))
    engine = engine_of(small, Script(failure=("no_memory", "The engine has no memory left.")))
    outcome = collect(engine, echoing(watched_job(tokenizer, [PlannedWatch("escalate")])))
    assert prompts_of(outcome) == ["Say:"]
    assert (outcome.text(), outcome.generation.tier) == (SMALL, "small")


def test_an_echo_comes_once_where_the_large_tier_goes_on_behind_text(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    large = Script(steps=steps_of(encode(LARGE)))
    engine = engine_of(Script(steps=steps_of(encode(SMALL))), large)
    watch = PlannedWatch("commit", 2, continue_at=5)
    outcome = collect(engine, echoing(watched_job(tokenizer, [watch], mid_stream=True)))
    assert prompts_of(outcome) == ["Say:"]
    assert outcome.generation.tier == "large"


def echoing(job: Job) -> Job:
    """The same job, whose answers begin with an echo."""
    plans = tuple(msgspec.structs.replace(plan, prompt_text="Say:") for plan in job.choices)
    extras = Extras(echoes=True, has_prompt=True)
    return msgspec.structs.replace(job, choices=plans, extras=extras)
