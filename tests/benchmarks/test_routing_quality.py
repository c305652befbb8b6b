import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.routing.bench_routing_quality import (
    judge,
    labelled_data,
    parse,
    policy_figures,
    questions_for,
    show,
)
from benchmarks.routing.routing_plot import draw
from benchmarks.routing.routing_policies import (
    ESCALATED,
    LARGE,
    SMALL,
    cross_fitted,
    curve,
    known_by,
    one_tier,
    oracle,
)
from benchmarks.routing.routing_runs import SPECULATIVE, Labels, by_way, select_rows
from outrider.engine.events import TierInfo
from outrider.gateway.tools.learning.collect.data import read_questions
from outrider.router.scorer import RouterScorer, prompt_hashes
from outrider.verifier.params import Tier
from tests.benchmarks.routed_rows import PRICES, ROWS, TARGET
from tests.benchmarks.scorers import make_scorer


def write_questions(path: Path, texts: list[str]) -> Path:
    rows = [{"prompt": text, "expected": "1", "check": "exact"} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_only_the_questions_rows_are_selected_in_their_order(tmp_path: Path) -> None:
    questions = read_questions(write_questions(tmp_path / "q.jsonl", ["a", "b", "c"]))
    digests = [question.digest for question in questions]
    everything = tmp_path / "labels.jsonl"
    lines = {name: json.dumps({"id": name, "n": n}) for n, name in enumerate(["x", *digests])}
    everything.write_text("".join(lines[name] + "\n" for name in (digests[2], "x", digests[0])))
    kept = select_rows(everything, tmp_path / "rows.jsonl", questions)
    assert kept == [questions[0], questions[2]]
    found = [json.loads(line)["id"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert found == [digests[0], digests[2]]


@pytest.mark.slow
def test_tasks_that_the_router_was_trained_on_are_left_out(tmp_path: Path) -> None:
    arguments = parse(["--quick", "--num-prompts", "30"])
    everything = questions_for(arguments, make_scorer(None), tmp_path)
    assert len(everything) > 10
    seen = [question.prompt for question in everything[:5]]
    scorer = make_scorer(None)
    remembering = RouterScorer(
        features=scorer.features,
        weight=scorer.weight,
        bias=scorer.bias,
        threshold=0.5,
        prompt_hashes=np.unique(prompt_hashes(seen)),
    )
    fewer = questions_for(arguments, remembering, tmp_path)
    assert not {question.prompt for question in fewer} & set(seen)
    assert len(fewer) == len([q for q in everything if q.prompt not in seen])


def test_escalations_take_the_time_of_the_stage_that_decides_them() -> None:
    names = ("small", "large", "escalated, prompt", "escalated, answer")
    seconds = {name: np.array([float(place)]) for place, name in enumerate(names)}
    assert by_way(seconds, "prompt")[ESCALATED] == 2.0
    assert by_way(seconds, "answer")[ESCALATED] == 3.0
    assert by_way(seconds, "text")[SMALL] == 0.0
    assert by_way(seconds, "text")[LARGE] == 1.0


def test_without_files_labelled_data_are_left_out_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    assert labelled_data(parse([])) == {}
    assert labelled_data(parse(["--data", str(tmp_path)])) == {}
    said = capsys.readouterr().out
    assert said.count("mmlu: left out") == said.count("gsm8k: left out") == 2


@pytest.mark.slow
def test_the_figure_shows_every_policy(tmp_path: Path) -> None:
    outcomes = {
        "always small": one_tier(ROWS, SMALL, PRICES),
        "always large": one_tier(ROWS, LARGE, PRICES),
        "cascade, 16 held": cross_fitted(ROWS, TARGET, PRICES),
        SPECULATIVE.format(alpha=0.3): one_tier(ROWS, LARGE, PRICES),
        "oracle": oracle(ROWS, PRICES),
    }
    seconds = {
        name: np.linspace(1.0, 2.0, 6) * (1 + place)
        for place, name in enumerate(
            (
                "small",
                "large",
                "escalated, prompt",
                "escalated, answer",
                SPECULATIVE.format(alpha=0.3),
            )
        )
    }
    table = policy_figures(outcomes, {"cascade, 16 held": "answer"}, seconds, np.arange(6))
    assert list(table) == list(outcomes)
    assert table["always large"].p50_s == pytest.approx(3.0)
    assert table[SPECULATIVE.format(alpha=0.3)].p50_s == pytest.approx(7.5)
    assert table["always small"].cost < table["cascade, 16 held"].cost < 1.0
    results: dict[str, Any] = {
        "policies": table,
        "curves": {"router": curve(known_by(ROWS, "text"), PRICES)},
        "conditions": {"num_prompts": 400, "num_latency_prompts": 6, "latency": "large of 400 M"},
    }
    draw(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def tier_info(tier: Tier, num_parameters: int) -> TierInfo:
    return TierInfo(
        tier=tier,
        model_id=tier,
        path=tier,
        max_context=1,
        vocab_size=1,
        num_parameters=num_parameters,
        dtype="float32",
        device="cpu",
    )


def test_all_stages_are_judged_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = Labels(
        path=tmp_path / "rows.jsonl",
        kept=[],
        tiers={"small": tier_info("small", 100), "large": tier_info("large", 1000)},
        pair=None,
        speculative={0.3: (ROWS.strong, np.full(len(ROWS.text), 30.0))},
    )
    arguments = parse(["--resamples", "40"])
    judged, outcomes, stages, report = judge(arguments, ROWS, labels, make_scorer(None))
    assert list(stages) == ["router", "router + probe", "cascade, 16 held"]
    assert set(outcomes) == {
        *("always small", "always large", *stages, SPECULATIVE.format(alpha=0.3), "oracle")
    }
    gains = judged["cascade_gain_at_equal_cost"]
    assert list(gains) == ["text", "prompt"]
    assert gains["text"].estimate > gains["prompt"].estimate > 0
    assert judged["within_one_point"]["answer"] < judged["within_one_point"]["text"]
    apgrs = [judged["stages"][stage]["apgr"].value for stage in ("text", "prompt", "answer")]
    assert sorted(apgrs) == apgrs
    assert judged["goals"]["probe_apgr_met"] == (apgrs[1] >= 0.85)
    assert judged["goals"]["large_share_met"]
    names = ("small", "large", "escalated, prompt", "escalated, answer")
    seconds = {name: np.ones(3) for name in (*names, SPECULATIVE.format(alpha=0.3))}
    table = policy_figures(outcomes, stages, seconds, np.arange(3))
    show({**judged, "policies": table, "prices": {}, "labelled_data": {}}, report)
    said = capsys.readouterr().out
    assert all(name in said for name in outcomes)
