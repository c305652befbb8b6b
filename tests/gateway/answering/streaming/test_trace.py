"""Traced streams describe their tokens: origins, steps and trees, also after an escalation."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from outrider import draft
from outrider.engine.trace import NodeSource, StepTrace, TokenOrigin, TraceNode
from outrider.gateway.answering.streaming.trace import ChoiceTrace, DeltaTrace, as_reused
from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.gateway.watches import Outcome, PlannedWatch, collect, letters, watched_job

Encode = Callable[[str], list[int]]
SMALL, LARGE = "The small answer.", "Another one."


@pytest.fixture(scope="module")
def other() -> ChatTokenizer:
    """The shipped pair's: other ids for the same text."""
    return ChatTokenizer.load(Path(draft.__file__).parent / "pair" / "large")


def tree(ids: tuple[int, ...], *sources: NodeSource) -> tuple[TraceNode, ...]:
    """A root and a right guess below it."""
    root, guess = ids
    return (
        TraceNode(token_id=root, parent=-1, is_accepted=True),
        TraceNode(token_id=guess, parent=0, sources=sources, is_accepted=True),
    )


def told(outcome: Outcome) -> list[DeltaTrace]:
    return [delta.trace for delta in outcome.deltas if delta.trace is not None]


def test_only_the_prediction_is_told_as_reused() -> None:
    trace = StepTrace(
        origins=("model", "prediction", "suffix", "grammar", "target", "prediction"),
        nodes=(*tree((1, 2), "prediction", "model"), *tree((1, 3), "suffix")),
    )
    changed = as_reused(trace)
    assert changed.origins == ("model", "reused", "suffix", "grammar", "target", "reused")
    assert [node.sources for node in changed.nodes] == [(), ("reused", "model"), (), ("suffix",)]
    same = (("token_id", "parent", "is_accepted"), zip(trace.nodes, changed.nodes, strict=True))
    for before, after in same[1]:
        assert all(getattr(before, name) == getattr(after, name) for name in same[0])


@pytest.mark.parametrize("is_the_clients", [False, True])
def test_tokens_reused_from_another_tokenizer_are_predictions(
    tokenizer: ChatTokenizer, other: ChatTokenizer, encode: Encode, is_the_clients: bool
) -> None:
    """The small answer is told as a prediction there; a client's own prediction stays one."""
    small = [Step(token_ids=(token_id,)) for token_id in letters(SMALL, encode)]
    ids = asyncio.run(other.encode_answer(LARGE, 100))
    trace = StepTrace(
        origins=("prediction", *("target",) * (len(ids) - 1)),
        nodes=tree(ids[:2], "prediction", "model"),
    )
    large = [Step(token_ids=ids, num_drafted=1, num_accepted=1, num_predicted=1, trace=trace)]
    scripts = iter([Script(steps=small, hangs=True), Script(steps=large)])
    engine = ScriptedClient(vocab_size=420, script=lambda _: next(scripts))
    job = watched_job(tokenizer, [PlannedWatch("escalate", 4)], other=other).traced()
    if is_the_clients:
        (plan,) = job.choices
        assert plan.escalated is not None
        own = replace(plan.escalated, prediction_token_ids=(17, 18))
        job = msgspec.structs.replace(job, choices=(msgspec.structs.replace(plan, escalated=own),))
    outcome = collect(engine, job)
    assert outcome.text() == LARGE
    kind: TokenOrigin = "prediction" if is_the_clients else "reused"
    origins = [origin for trace in told(outcome) for origin in trace.origins]
    assert origins == [kind] + ["target"] * (len(ids) - 1)
    (first,) = [tree for trace in told(outcome) for tree in trace.trees]
    assert first.nodes[1][2] == (kind, "model")


def test_of_a_retracted_answer_nothing_is_told(tokenizer: ChatTokenizer, encode: Encode) -> None:
    small = [Step(token_ids=(token_id,)) for token_id in letters(SMALL, encode)]
    reused, *rest = letters(LARGE, encode)
    steps = [Step(token_ids=(reused,), trace=StepTrace(origins=("reused",)))]
    steps += [Step(token_ids=(token_id,)) for token_id in rest]
    script = Script(steps=small, escalated=Script(steps=steps))
    engine = ScriptedClient(vocab_size=420, script=lambda _: script)
    outcome = collect(engine, watched_job(tokenizer, [PlannedWatch("escalate", 5)]).traced())
    assert outcome.text() == LARGE
    traces = told(outcome)
    assert [origin for trace in traces for origin in trace.origins] == ["reused"] + [
        "target"
    ] * len(rest)
    assert [step for trace in traces for step in trace.steps] == list(range(len(LARGE)))


def test_a_tree_comes_once_and_with_text_of_its_step(tokenizer: ChatTokenizer) -> None:
    choice = ChoiceTrace(tokenizer)
    steps = [
        StepTrace(origins=("model", "target"), nodes=tree((40, 41), "model")),
        StepTrace(origins=("target",)),
        StepTrace(origins=("suffix",), nodes=tree((42, 43), "suffix")),
    ]
    choice.note(steps[0])
    first = choice.mark(steps[0], 0, was_drafted=True)
    second = choice.mark(steps[0], 1, was_drafted=False)
    choice.note(steps[1])
    third = choice.mark(steps[1], 0, was_drafted=False)
    choice.note(steps[2])
    fourth = choice.mark(steps[2], 0, was_drafted=True)
    said = [choice.of_pieces(marks) for marks in ([first], [second, third], [fourth])]
    assert [one and [tree.step for tree in one.trees] for one in said] == [[0], [], [2]]
    assert [one and one.steps for one in said] == [(0,), (0, 1), (2,)]
    assert [one and one.origins for one in said] == [("model",), ("target", "target"), ("suffix",)]


def test_untraced_streams_say_nothing(tokenizer: ChatTokenizer, encode: Encode) -> None:
    script = Script(steps=[Step(token_ids=tuple(encode(SMALL)))])
    engine = ScriptedClient(vocab_size=420, script=lambda _: script)
    outcome = collect(engine, watched_job(tokenizer, [PlannedWatch("commit", 1)]))
    assert outcome.text() == SMALL
    assert told(outcome) == []
    assert not engine.submitted[0].traces
