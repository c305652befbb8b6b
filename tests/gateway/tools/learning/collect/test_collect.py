"""`outrider router collect`: questions in, labelled rows out, interruptions in between."""

import asyncio
import base64
import json
import shutil
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from outrider.engine.events import EngineInfo, TierInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.tool_formats import HERMES, QWEN3_CODER, ToolFormat
from outrider.gateway.answering.text.tool_prompt import write_calls
from outrider.gateway.tools.learning.collect.collect_command import collect
from outrider.gateway.tools.learning.collect.collecting import (
    Collector,
    CollectPlan,
    CollectProgress,
    JudgeFn,
    pair_of,
)
from outrider.gateway.tools.learning.collect.data import CollectError, LabelFile, read_questions
from outrider.router.dataset import read_labelled_prompts
from outrider.verifier.params import Tier
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.models import save_hf_model

HIDDEN = (0.5, -1.25, 3.0)
Encode = Callable[[str], list[int]]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(text: str, expected: str = "fox", **more: Any) -> dict[str, Any]:
    return {"prompt": text, "expected": expected, "check": "regex", **more}


def answering(
    encode: Encode, answers: dict[Tier, str], *, max_context: int = 256
) -> ScriptedClient:
    """Says the tier's answer, two tokens a step."""

    def script(request: EngineRequest) -> Script:
        ids = encode(answers[request.tier])
        steps = [Step(token_ids=tuple(ids[i : i + 2])) for i in range(0, len(ids), 2)]
        return Script(steps=steps, hidden_state=HIDDEN)

    return ScriptedClient(vocab_size=420, script=script, max_context=max_context)


def run(
    engine: ScriptedClient,
    tokenizer: ChatTokenizer,
    data: Path,
    out: Path,
    *,
    plan: CollectPlan | None = None,
    ask: JudgeFn | None = None,
) -> tuple[CollectProgress, list[dict[str, Any]], list[CollectProgress]]:
    """Return what is reported at the end, the rows, and what was reported on the way."""

    async def work() -> tuple[CollectProgress, list[CollectProgress]]:
        info = await engine.info()
        tokenizers: dict[Tier, ChatTokenizer] = {"small": tokenizer, "large": tokenizer}
        collector = Collector(engine, info, tokenizers, plan or CollectPlan(batch_size=2), ask)
        reports: list[CollectProgress] = []
        labels = LabelFile(out, pair=collector.pair)
        return await collector.collect(read_questions(data), labels, reports.append), reports

    done, reports = asyncio.run(work())
    rows = [json.loads(line) for line in out.read_text().split("\n") if line]
    return done, rows, reports


def test_rows_hold_what_both_tiers_said_and_train_a_router(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path
) -> None:
    data = write_lines(
        tmp_path / "q.jsonl",
        [
            question("Which animal?", family="zoo", difficulty=3),
            question("How are you?", "fine|lazy"),
            {
                "messages": [
                    {"role": "system", "content": "Be quick."},
                    {"role": "user", "content": "And now?"},
                ],
                "expected": "I am fine",
                "check": {"kind": "exact"},
            },
        ],
    )
    engine = answering(encode, {"small": "I am fine", "large": "The quick brown fox"})
    out = tmp_path / "labels.jsonl"
    done, rows, reports = run(engine, tokenizer, data, out)
    assert [(row["weak_correct"], row["strong_correct"]) for row in rows] == [
        (0, 1),
        (1, 0),
        (1, 0),
    ]
    assert (done.num_rows, done.num_questions, done.num_skipped) == (3, 3, 0)
    assert done.weak_accuracy == pytest.approx(2 / 3)
    assert done.strong_accuracy == pytest.approx(1 / 3)
    assert [report.num_rows for report in reports] == [0, 2, 3]
    first, _, last = rows
    assert (first["family"], first["difficulty"]) == ("zoo", 3)
    assert "messages" not in first
    assert [message["role"] for message in last["messages"]] == ["system", "user"]
    assert last["prompt"] == "And now?"
    assert first["weak_answer"] == "I am fine"
    assert first["strong_answer"] == "The quick brown fox"
    assert first["weak_tokens"] == len(encode("I am fine")) == len(first["weak_logprobs"])
    assert first["strong_tokens"] == len(encode("The quick brown fox"))
    assert set(first["weak_logprobs"]) == {-0.25}
    state = np.frombuffer(base64.b64decode(first["hidden_state"]), dtype="<f4")
    assert tuple(state) == HIDDEN
    assert 0 <= first["weak_s"] < 5
    assert "pair" not in first  # these engines' checkpoints have no fingerprints
    read = read_labelled_prompts(out)
    assert read.prompts == ["Which animal?", "How are you?", "And now?"]
    assert list(read.weak) == [0, 1, 1]


def test_only_the_small_tier_is_asked_for_what_only_it_gives(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "q.jsonl", [question("One?"), question("Two?"), question("3?")])
    engine = answering(encode, {"small": "fox", "large": "fox"})
    plan = CollectPlan(max_tokens=500, temperature=0.5, seed=9, batch_size=2)
    run(engine, tokenizer, data, tmp_path / "labels.jsonl", plan=plan)
    # A tier answers a batch alone.
    tiers = [request.tier for request in engine.submitted]
    assert tiers == ["small"] * 2 + ["large"] * 2 + ["small", "large"]
    for request in engine.submitted:
        is_small = request.tier == "small"
        assert request.return_hidden_state == is_small
        assert request.sampling.num_logprobs == (0 if is_small else None)
        assert request.sampling.max_tokens == 256 - len(request.prompt_token_ids)
        assert request.sampling.stop_token_ids == tokenizer.stop_token_ids
        assert request.sampling.temperature == 0.5
        assert not request.may_escalate
    salts = {request.cache_salt for request in engine.submitted}
    assert len(salts) == 2
    assert len({request.sampling.seed for request in engine.submitted}) == 3


def test_an_interrupted_run_goes_on_where_it_was(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "q.jsonl", [question(f"Number {n}?") for n in range(5)])
    out = tmp_path / "labels.jsonl"
    whole = answering(encode, {"small": "fox", "large": "dog"})
    _, expected, _ = run(whole, tokenizer, data, tmp_path / "whole.jsonl")

    def script(request: EngineRequest) -> Script:
        if len(broken.submitted) > 6:  # in the second batch
            return Script(failure=("engine_died", "The engine died."))
        return whole.script(request)

    broken = ScriptedClient(vocab_size=420, script=script)
    with pytest.raises(CollectError, match="The engine died"):
        run(broken, tokenizer, data, out)
    assert len(out.read_text().splitlines()) == 2
    torn = out.read_text() + '{"id": "half a ro'
    out.write_text(torn)
    engine = answering(encode, {"small": "fox", "large": "dog"})
    done, rows, reports = run(engine, tokenizer, data, out)
    assert [report.num_rows for report in reports] == [2, 4, 5]
    assert done.num_rows == 5
    assert len(engine.submitted) == 6

    def timeless(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if not name.endswith("_s")}

    assert [*map(timeless, rows)] == [*map(timeless, expected)]
    again = answering(encode, {"small": "fox", "large": "dog"})
    run(again, tokenizer, data, out)
    assert not again.submitted


def test_text_that_other_tools_take_for_line_ends_is_read_back(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "q.jsonl", [question("One\u2028two\x85three?")])
    out = tmp_path / "labels.jsonl"
    engine = answering(encode, {"small": "fox", "large": "dog"})
    run_once = run(engine, tokenizer, data, out)[0]
    assert run_once.num_rows == 1
    assert LabelFile(out, pair=None).missing(read_questions(data)) == []


def test_prompts_that_do_not_fit_are_left_out_and_counted(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "q.jsonl", [question("Hello? " * 60), question("Short?")])
    engine = answering(encode, {"small": "fox", "large": "fox"}, max_context=60)
    done, rows, _ = run(engine, tokenizer, data, tmp_path / "labels.jsonl")
    assert (done.num_skipped, done.num_rows) == (1, 1)
    assert rows[0]["prompt"] == "Short?"
    assert {request.tier for request in engine.submitted} == {"small", "large"}


def test_a_judge_decides_where_the_row_says_so(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path
) -> None:
    rows_in = [question("Which animal?", check="judge"), question("And this?")]
    data = write_lines(tmp_path / "q.jsonl", rows_in)
    asked: list[tuple[str, str | None, str]] = []

    async def ask(*what: Any) -> bool:
        asked.append(what)
        return bool(what[2] == "dog")

    engine = answering(encode, {"small": "dog", "large": "fox"})
    _, rows, _ = run(engine, tokenizer, data, tmp_path / "labels.jsonl", ask=ask)
    assert [(row["weak_correct"], row["strong_correct"]) for row in rows] == [(1, 0), (0, 1)]
    assert sorted(asked) == [("Which animal?", "fox", "dog"), ("Which animal?", "fox", "fox")]
    with pytest.raises(CollectError, match="--judge-url"):
        run(engine, tokenizer, data, tmp_path / "more.jsonl")


def test_a_conversation_that_the_template_refuses_is_named(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": text, "name": "Ann"} for text in ("One?", "Two?")]
    row = {"messages": turns, "expected": "fox", "check": "regex"}
    data = write_lines(tmp_path / "q.jsonl", [row])
    engine = answering(encode, {"small": "fox", "large": "fox"})
    with pytest.raises(CollectError, match=r"begins 'Two\?': .* must alternate"):
        run(engine, tokenizer, data, tmp_path / "labels.jsonl")
    assert not engine.submitted


@pytest.mark.parametrize("form", [HERMES, QWEN3_CODER])
def test_tools_are_shown_and_calls_are_read(
    tokenizer: ChatTokenizer, encode: Encode, tmp_path: Path, form: ToolFormat
) -> None:
    tokenizer = copy(tokenizer)
    tokenizer.dialect = replace(tokenizer.dialect, format=form)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "add", "parameters": schema}
    call = {"name": "add", "arguments": {"a": 4}}
    row = question("Add.", json.dumps(call), check="tool_call")
    tools = [{"type": "function", "function": function}]
    data = write_lines(tmp_path / "q.jsonl", [{**row, "tools": tools}])
    engine = answering(
        encode, {"small": write_calls([call], form), "large": "I cannot."}, max_context=4096
    )
    _, rows, _ = run(engine, tokenizer, data, tmp_path / "labels.jsonl")
    assert (rows[0]["weak_correct"], rows[0]["strong_correct"]) == (1, 0)
    for request in engine.submitted:
        assert request.grammar is not None
        assert request.grammar.kind == "parts"
        assert "add" in tokenizer.decode(request.prompt_token_ids)


def test_questions_differ_by_all_that_is_asked_and_checked(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        question("One?"),
        question("One?", family="again"),  # the same question
        question("One?", "dog"),
        question("One?", tools=tools),
        question("One?", check="exact"),
        {"messages": [{"role": "user", "content": "One?"}], "expected": "fox", "check": "regex"},
    ]
    found = read_questions(write_lines(tmp_path / "q.jsonl", rows))
    assert len(found) == 4
    assert [q.check.kind for q in found] == ["regex", "regex", "regex", "exact"]
    assert len(read_questions(tmp_path / "q.jsonl", limit=2)) == 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: must be a JSON object"),
        ({"expected": "1", "check": "exact"}, "prompt .or messages. is missing"),
        (question("  "), "prompt .or messages. is missing or empty"),
        ({"prompt": "One?", "expected": "1"}, "--check"),
        (question("One?", check="fuzzy"), "'fuzzy' is unknown"),
        (question("One?", "("), "not a regular expression"),
        ({**question("One?"), "messages": [{"role": "tool"}]}, "line 2: messages.0"),
        ({**question("One?"), "messages": [{"role": "user", "content": " "}]}, "user is empty"),
        (question("One?", tools=[{"type": "function"}]), "line 2: tools.0"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: object, why: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    line = row if isinstance(row, str) else json.dumps(row)
    path.write_text(json.dumps(question("Fine?")) + "\n" + line + "\n")
    with pytest.raises(CollectError, match=why):
        read_questions(path)


def test_a_file_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    out = write_lines(tmp_path / "labels.jsonl", [{"prompt": "mine", "weak_correct": 1}])
    with pytest.raises(CollectError, match="line 1: not a row of `outrider router collect`"):
        LabelFile(out, pair=None)
    row = {"id": "a", "weak_correct": 1, "strong_correct": 0, "pair": "1-2"}
    write_lines(out, [row])
    with pytest.raises(CollectError, match=r"other models \(pair 1-2, now 1-3\)"):
        LabelFile(out, pair="1-3")
    assert LabelFile(out, pair="1-2").labels == {"a": (1, 0)}
    write_lines(out, [row | {"small_weights": "int8"}])
    with pytest.raises(CollectError, match=r"a small model in int8, now int4"):
        LabelFile(out, pair="1-2", small_weights="int4")
    assert LabelFile(out, pair="1-2", small_weights="int8").labels == {"a": (1, 0)}
    with pytest.raises(CollectError, match=r"\.jsonl"):
        LabelFile(tmp_path / "labels.csv", pair=None)


def tier_info(tier: Tier, fingerprint: str) -> TierInfo:
    return TierInfo(
        tier=tier,
        model_id="m",
        path="p",
        max_context=8,
        vocab_size=8,
        num_parameters=8,
        dtype="float32",
        device="cpu",
        fingerprint=fingerprint,
    )


def test_a_pair_is_named_small_first_and_only_where_both_are_known() -> None:
    both: dict[Tier, TierInfo] = {
        "large": tier_info("large", "bb"),
        "small": tier_info("small", "aa"),
    }
    assert pair_of(EngineInfo(tiers=both, speculation=True)) == "aa-bb"
    unknown: dict[Tier, TierInfo] = {**both, "large": tier_info("large", "")}
    assert pair_of(EngineInfo(tiers=unknown, speculation=True)) is None
    assert pair_of(EngineInfo(tiers={"small": both["small"]}, speculation=False)) is None


# ---- the command ------------------------------------------------------------------------------

cli = typer.Typer()
cli.command()(collect)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> dict[str, Path]:
    folders = {}
    for seed, tier in enumerate(("small", "large")):
        folders[tier] = tmp_path_factory.mktemp(tier)
        save_hf_model("llama2", folders[tier], seed=seed, vocab_size=420, eos_token_id=1)
        shutil.copytree(tokenizer_folder, folders[tier], dirs_exist_ok=True)
    return folders


def invoke(pair: dict[str, Path], data: Path, out: Path, *more: str) -> Result:
    config = data.parent / "outrider.toml"
    config.write_text('[speculation]\nadaptive = false\n[engine]\ndevice = "cpu"\n')
    words = ["--data", str(data), "--out", str(out), "--config", str(config)]
    models = [word for tier, path in pair.items() for word in (f"--{tier}", str(path))]
    return CliRunner().invoke(cli, [*words, *models, "--num-threads", "1", *more])


@pytest.mark.slow
def test_the_command_labels_with_real_models(pair: dict[str, Path], tmp_path: Path) -> None:
    rows_in = [{"prompt": f"How are you {n}?", "expected": "."} for n in range(3)]
    data, out = write_lines(tmp_path / "q.jsonl", rows_in), tmp_path / "labels.jsonl"
    options = ["--check", "regex", "--max-tokens", "6", "--batch", "2"]
    result = invoke(pair, data, out, *options)
    assert result.exit_code == 0, result.output
    assert "3 rows" in result.output
    assert f"outrider router train --data {out}" in result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        assert row["weak_tokens"] == len(row["weak_logprobs"]) == 6
        assert all(value <= 0 for value in row["weak_logprobs"])
        assert len(base64.b64decode(row["hidden_state"])) == 4 * 64  # of the tiny model
        assert row["weak_s"] > 0
    # float32 and greedy, so the same answers again, in another batch.
    alone = tmp_path / "alone.jsonl"
    assert invoke(pair, data, alone, *options, "--limit", "1").exit_code == 0
    (again,) = [json.loads(line) for line in alone.read_text().splitlines()]
    assert again["weak_answer"] == rows[0]["weak_answer"]
    assert again["strong_answer"] == rows[0]["strong_answer"]
    assert again["hidden_state"] == pytest.approx(rows[0]["hidden_state"])


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (["--data", "none.jsonl"], "no such file"),
        (["--check", "fuzzy"], "--check fuzzy: unknown"),
        (["--small", "./nowhere"], "no such folder"),
        (["--small", "none"], "name both, --small and --large"),
        (["--out", "labels.csv"], "must end in .jsonl"),
        (["--judge-url", "http://x/v1"], "both --judge-url and --judge-model"),
        (
            ["--judge-url", "http://x/v1", "--judge-model", "m", "--judge-key-env", "NO_SUCH_KEY"],
            "no variable NO_SUCH_KEY",
        ),
    ],
)
def test_what_is_wrong_is_said(
    change: list[str], why: str, pair: dict[str, Path], tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "q.jsonl", [question("One?")])
    result = invoke(pair, data, tmp_path / "labels.jsonl", *change)
    assert result.exit_code == 1, result.output
    assert why in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "labels.jsonl").exists()


def test_missing_models_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "outrider.gateway.engines.backends.in_process", None
    )  # its import would fail
    data = write_lines(tmp_path / "q.jsonl", [question("One?")])
    nowhere = dict.fromkeys(("small", "large"), tmp_path / "nowhere")
    result = invoke(nowhere, data, tmp_path / "labels.jsonl")
    assert result.exit_code == 1, result.output
    assert "no such folder" in result.output


@pytest.fixture(autouse=True)
def same_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
