import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.gateway.settings import extras
from outrider.gateway.tools.learning.routers.commands import app
from outrider.router.scorer import RouterScorer
from tests.router.conftest import labelled_sums, write_jsonl
from tests.router.encoder.encoders import write_encoder

runner = CliRunner()
HEADER = "prompt,weak_correct,strong_correct\n"


def run(*arguments: str | Path) -> Result:
    return runner.invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: str | Path) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def as_json(*arguments: str | Path) -> dict[str, Any]:
    report = json.loads(succeed(*arguments, "--json").stdout)
    assert isinstance(report, dict)
    return report


@pytest.fixture(scope="session")
def collected_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows like those of `outrider router collect`: hidden states and log-probabilities tell more
    than the text does."""
    rng = np.random.default_rng(0)
    rows = []
    for number, prompt in enumerate(labelled_sums(300, seed=5).prompts):
        is_easy, will_slip = rng.random(2) < (0.5, 0.3)
        hidden = (rng.normal(size=6) + 3.0 * is_easy).astype("<f4")
        logprobs = rng.uniform(-0.1, 0.0, 8)
        if will_slip:
            logprobs[2] = -3.0
        rows.append(
            {
                "prompt": f"{prompt} ({number})",
                "weak_correct": int(is_easy and not will_slip),
                "strong_correct": int(rng.random() < 0.95),
                "hidden_state": base64.b64encode(hidden.tobytes()).decode(),
                "weak_logprobs": logprobs.tolist(),
                "prompt_tokens": 20,
                "weak_tokens": 8,
                "strong_tokens": 10,
                "weak_s": 0.1,
                "strong_s": 0.5,
                "pair": "aaaa-bbbb",
            }
        )
    path = tmp_path_factory.mktemp("collected") / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def staged_router(tmp_path_factory: pytest.TempPathFactory, collected_file: Path) -> Path:
    out = tmp_path_factory.mktemp("staged") / "router"
    succeed("train", "--data", collected_file, "--out", out)
    return out


def test_train_then_eval(training_file: Path, held_out_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "router"
    trained = succeed("train", "--data", training_file, "--out", out)
    assert "the small model answers from a text quality of" in trained.output

    arguments = ["eval", "--router", out, "--data", held_out_file, "--resamples", "50"]
    report = as_json(*arguments)
    assert report["apgr"] > 0.75
    assert report["cpt50"] < report["cpt80"] < 0.8
    assert report["apgr_interval"][0] < report["apgr"] < report["apgr_interval"][1]
    assert (report["num_prompts"], report["stage"]) == (400, "text")
    assert report["stages"]["text"]["apgr"] == report["apgr"]
    assert report["setting"]["accuracy"] == report["threshold_accuracy"]
    assert report["setting"]["band"] is None

    table = succeed(*arguments)
    for word in ("APGR", "CPT(50 %)", "ECE", "random", "oracle", "best single", "this router"):
        assert word in table.output


@pytest.mark.slow
def test_train_says_what_it_did_as_json(tmp_path: Path) -> None:
    out = tmp_path / "router"
    data = write_jsonl(tmp_path / "a.jsonl", labelled_sums(120, seed=4))
    report = as_json("train", "--data", data, "--out", out, "--strong-share", "0.4")
    chosen = report["calibration"]["chosen"]
    assert 0.3 < chosen["strong_share"] <= 0.4
    assert report["threshold"] == chosen["threshold"] == RouterScorer.load(out).threshold
    assert report["training"]["num_rows"] == 120


@pytest.mark.slow
def test_every_stage_that_the_data_allow_is_judged(
    staged_router: Path, collected_file: Path, held_out_file: Path
) -> None:
    arguments = ["eval", "--router", staged_router, "--resamples", "20", "--data"]
    prices = ["--small-price", "1/2", "--large-price", "10/20"]
    report = as_json(*arguments, collected_file, *prices)
    assert list(report["stages"]) == ["text", "prompt", "answer"]
    apgrs = [stage["apgr"] for stage in report["stages"].values()]
    assert apgrs == sorted(apgrs)
    assert (report["stage"], report["apgr"]) == ("answer", apgrs[-1])
    setting = report["setting"]
    assert setting["band"] is not None
    assert setting["watched_share"] > 0.2
    # Between a small and a large request in tokens of 20 + 8 and 20 + 10.
    assert 36e-6 < setting["mean_cost_usd"] < 36e-6 + 400e-6
    assert 0.1 <= setting["median_s"] <= 0.6
    assert report["num_training_prompts"] == 300
    table = succeed(*arguments, collected_file, *prices).output
    assert "USD a request" in table
    assert "in between" in table

    text_only = run(*arguments, held_out_file)
    assert "note: the data have no hidden_state and no weak_logprobs" in text_only.stderr


def test_whole_answers_are_judged_by_all_their_tokens(
    staged_router: Path, collected_file: Path
) -> None:
    arguments = ["eval", "--router", staged_router, "--data", collected_file, "--resamples", "0"]
    # The slip is the third token.
    one_token = as_json(*arguments, "--hold-back-tokens", "1")
    whole = as_json(*arguments, "--whole-answers")
    assert (one_token["hold_back_tokens"], whole["hold_back_tokens"]) == (1, 8)
    assert whole["apgr"] > one_token["apgr"]


def test_known_prompts_are_reported_and_refused(
    training_file: Path, router_folder: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed.csv"
    known = json.loads(training_file.read_text(encoding="utf-8").splitlines()[0])["prompt"]
    others = "".join(f"new {number},{number % 2},1\n" for number in range(30))
    mixed.write_text(f'{HEADER}{others}"  {known}",0,1\nnew 1,1,1\n', encoding="utf-8")
    arguments = ["eval", "--router", router_folder, "--data", mixed, "--resamples", "0"]
    result = succeed(*arguments)
    assert "1 of 32 prompts were in the router's training data" in result.stderr
    assert "1 rows repeat a prompt of another row" in result.stderr
    assert as_json(*arguments)["num_training_prompts"] == 1
    refused = run(*arguments, "--strict")
    assert refused.exit_code == 2
    assert known in refused.stderr
    assert "refused because of --strict" in refused.stderr
    calibrated = run(
        "calibrate", "--router", router_folder, "--data", mixed, "--quality", "0.9", "--strict"
    )
    assert calibrated.exit_code == 2
    mixed.write_text(HEADER + others, encoding="utf-8")
    succeed(*arguments, "--strict")


def test_data_of_another_pair_are_noticed(
    staged_router: Path, collected_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    text = collected_file.read_text(encoding="utf-8").replace("aaaa-bbbb", "aaaa-cccc")
    other.write_text(text, encoding="utf-8")
    arguments = ["eval", "--router", staged_router, "--data", other, "--resamples", "0"]
    result = succeed(*arguments)
    assert "trained for the pair aaaa-bbbb, the data are of aaaa-cccc" in result.stderr
    assert run(*arguments, "--strict").exit_code == 2


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("target", "figure", "low", "high"),
    [
        (("--strong-share", "0.3"), "strong_share", 0.25, 0.3),
        (("--quality", "0.95"), "relative_accuracy", 0.95, 0.97),
    ],
)
def test_calibrate_meets_its_target_and_writes_it(
    target: tuple[str, str],
    figure: str,
    low: float,
    high: float,
    router_folder: Path,
    held_out_file: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "set"
    arguments = ["calibrate", "--router", router_folder, "--data", held_out_file, *target]
    chosen = as_json(*arguments, "--out", out)["chosen"]
    assert low <= chosen[figure] <= high
    written = RouterScorer.load(out)
    assert written.threshold == chosen["threshold"]
    assert written.training["calibrated_on"]["num_rows"] == 400
    # What was promised is what eval finds.
    report = as_json("eval", "--router", out, "--data", held_out_file, "--resamples", "0")
    assert report["setting"][figure] == pytest.approx(chosen[figure])
    table = succeed(*arguments)
    assert "\n> " in table.output
    assert "Nothing was written" in table.output


@pytest.mark.slow
def test_calibrate_by_cost(
    staged_router: Path, collected_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["calibrate", "--router", staged_router, "--data", collected_file]
    missing = run(*arguments, "--max-cost", "0.0002")
    assert missing.exit_code == 2
    assert "--small-price and --large-price" in missing.stderr
    flags = ["--small-price", "1/2", "--large-price", "10/20"]
    out = tmp_path / "set"
    by_flags = as_json(*arguments, "--max-cost", "0.0002", *flags, "--out", out)["chosen"]
    assert 0.0 < by_flags["strong_share"] < 0.5
    target = RouterScorer.load(out).training["calibrated_on"]["target"]
    assert (target["max_cost_usd"], target["prices"]["large"]["completion"]) == (0.0002, 20.0)
    (tmp_path / "outrider.toml").write_text(
        "[routing.prices.small]\nprompt = 1.0\ncompletion = 2.0\n"
        "[routing.prices.large]\nprompt = 10.0\ncompletion = 20.0\n",
        encoding="utf-8",
    )
    assert as_json(*arguments, "--max-cost", "0.0002")["chosen"] == by_flags
    too_little = run(*arguments, "--max-cost", "0.00001")
    assert too_little.exit_code == 2
    assert "the cheapest costs 3.6e-05 USD" in too_little.stderr


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "give one of --strong-share, --quality, --max-cost, --max-seconds, not none"),
        (("--strong-share", "0.3", "--quality", "0.9"), "not --strong-share and --quality"),
        (("--strong-share", "1.5"), "strong_share=1.5 must be"),
        (("--quality", "1.9"), "no setting reaches 1.900"),
        (("--max-cost", "1", "--small-price", "1"), "both --small-price and --large-price"),
        (("--max-cost", "1", "--small-price", "1", "--large-price", "2/3"), "as in 0.05/0.2"),
        (("--max-cost", "1", "--small-price", "1/2", "--large-price", "2/-3"), "--large-price is"),
        (("--max-cost", "1", "--small-price", "1/2", "--large-price", "2/3"), "no prompt_tokens"),
    ],
)
def test_targets_that_cannot_be(
    flags: tuple[str, ...], why: str, router_folder: Path, held_out_file: Path
) -> None:
    result = run("calibrate", "--router", router_folder, "--data", held_out_file, *flags)
    assert result.exit_code == 2
    assert why in result.stderr


@pytest.mark.slow
def test_no_gap_is_said_and_weak_only_routes_all_the_same(tmp_path: Path) -> None:
    data, out = labelled_sums(100, seed=3), tmp_path / "router"
    file = write_jsonl(tmp_path / "a.jsonl", replace(data, strong=data.weak))
    plain = succeed("train", "--data", file, "--out", out)
    assert "the large model adds nothing" in plain.output
    assert RouterScorer.load(out).threshold == 0.0
    no_gap = run("eval", "--router", out, "--data", file)
    assert no_gap.exit_code == 2
    assert "is not above the small one's" in no_gap.stderr
    weak_only = succeed("train", "--data", file, "--out", out, "--weak-only")
    assert "taken as never wrong" in weak_only.output
    assert RouterScorer.load(out).threshold > 0.3


def test_data_is_also_looked_up_under_the_variable(
    held_out_file: Path, router_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_DATA", str(held_out_file.parent))
    succeed("eval", "--router", router_folder, "--data", held_out_file.name, "--resamples", "0")


@pytest.mark.parametrize(
    ("router", "data", "why"),
    [(None, "none.csv", "no such file"), ("nowhere", None, "No such file")],
)
def test_what_is_missing_is_named(
    router: str | None,
    data: str | None,
    why: str,
    router_folder: Path,
    held_out_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    result = run("eval", "--router", router or router_folder, "--data", data or held_out_file)
    assert result.exit_code == 2
    assert why in result.stderr


def test_labels_of_one_tier_cannot_be_judged(router_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "weak.csv"
    data.write_text("prompt,weak_correct\nhi,1\n", encoding="utf-8")
    result = run("eval", "--router", router_folder, "--data", data)
    assert result.exit_code == 2
    assert "strong_correct" in result.stderr


def test_too_few_rows_to_train(tmp_path: Path) -> None:
    data = tmp_path / "weak.csv"
    data.write_text("prompt,weak_correct\nhi,1\n", encoding="utf-8")
    out = tmp_path / "router"
    result = run("train", "--data", data, "--out", out)
    assert result.exit_code == 2
    assert "too few" in result.stderr
    assert not out.exists()


@pytest.mark.slow
def test_plots_are_pictures(router_folder: Path, held_out_file: Path, tmp_path: Path) -> None:
    plots = tmp_path / "deep" / "plots"
    arguments = ["eval", "--router", router_folder, "--data", held_out_file, "--resamples", "5"]
    report = as_json(*arguments, "--plots", plots)
    assert report["num_prompts"] == 400
    names = sorted(path.name for path in plots.iterdir())
    assert names == ["calibration.png", "cost_quality.png", "qualities.png"]
    for path in plots.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_only_pictures_are_missing(
    router_folder: Path, held_out_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = extras.PathFinder.find_spec
    monkeypatch.setattr(
        extras.PathFinder,
        "find_spec",
        lambda name, *places: None if name == "matplotlib" else real(name, *places),
    )
    arguments = ["--router", router_folder, "--data", held_out_file]
    result = run("eval", *arguments, "--plots", tmp_path)
    assert result.exit_code == 2
    assert 'pip install "outrider[bench]"' in result.stderr
    succeed("eval", *arguments, "--resamples", "0")
    succeed("report", *arguments, "--resamples", "0", "--out", tmp_path / "a.html")


@pytest.mark.slow_cases
@pytest.mark.parametrize("command", ["collect", "train", "eval", "calibrate", "report"])
def test_every_command_shows_examples(command: str) -> None:
    output = succeed(command, "--help").output
    assert "Examples" in output
    assert f"outrider router {command}" in output


@pytest.mark.slow
def test_a_router_with_a_sentence_encoder_is_trained_and_judged(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt": f"{'dog' if is_easy else 'cat'} {'cat' if is_easy else 'dog'} {number}",
            "weak_correct": int(is_easy),
            "strong_correct": 1,
        }
        for number, is_easy in enumerate((rng.random(160) < 0.5).tolist())
    ]
    data = tmp_path / "labels.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "router"
    report = as_json("train", "--data", data, "--out", out, "--encoder", encoder)
    assert {"text", "neighbours", "text_and_neighbours"} <= set(report["training"]["held_out"])

    missing = run("train", "--data", data, "--out", out, "--encoder", "no-such-encoder")
    assert missing.exit_code == 2
    assert "neither a folder nor an installed package" in missing.output


def test_calibrate_for_seconds_weighs_gains_by_them(
    staged_router: Path, collected_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "weighed"
    target = ("--max-seconds", "0.4", "--out", out)
    report = as_json("calibrate", "--router", staged_router, "--data", collected_file, *target)
    assert report["gain_per"] == "second"
    assert report["costs"]["dollars"] is None
    weighed = RouterScorer.load(out)
    assert weighed.worth is not None
    assert weighed.worth.model.unit == "second"
    again = succeed("eval", "--router", out, "--data", collected_file, "--resamples", "5")
    assert "seconds (median)" in again.output
    # Calibrated for requests again, the router forgets what they cost.
    plain = ("--strong-share", "0.3", "--out", out)
    succeed("calibrate", "--router", out, "--data", collected_file, *plain)
    assert RouterScorer.load(out).worth is None


@pytest.mark.slow
def test_train_weighs_gains_by_seconds_where_the_labels_have_some(
    staged_router: Path, collected_file: Path, training_file: Path, tmp_path: Path
) -> None:
    weighed = RouterScorer.load(staged_router)
    assert weighed.worth is not None
    assert weighed.worth.model.unit == "second"
    assert weighed.training["gain_per"] == "second"
    base = ("train", "--data", collected_file, "--out", tmp_path / "router")
    said = succeed(*base).output
    assert "Gains count per second" in said
    assert "at least 95.0% of always large's accuracy is kept with" in said
    prices = ("--small-price", "0.05/0.2", "--large-price", "0.5/2")
    assert as_json(*base, "--gain-per", "dollar", *prices)["gain_per"] == "dollar"
    # A share counts requests; labels without seconds say nothing of them.
    for plain in (("--gain-per", "request"), ("--strong-share", "0.3")):
        assert "gain_per" not in as_json(*base, *plain)
        assert RouterScorer.load(tmp_path / "router").worth is None
    assert "gain_per" not in as_json("train", "--data", training_file, "--out", tmp_path / "text")


def test_calibrate_says_what_it_weighs_and_what_it_lacks(
    staged_router: Path, collected_file: Path, held_out_file: Path
) -> None:
    prices = ("--small-price", "0.05/0.2", "--large-price", "0.5/2")
    base = ("calibrate", "--router", staged_router, "--strong-share", "0.3")
    said = succeed(*base, "--data", collected_file, "--gain-per", "dollar", *prices).output
    assert "Gains count per dollar" in said
    assert "Answer lengths: predicted to" in said
    assert "A median request: small 0.1 s" in said
    assert "settings begin answers; with the others 300 prompts do not show" in said
    assert "text at 0.000" in said
    failed = run(*base, "--data", collected_file, "--gain-per", "dollar")
    assert failed.exit_code == 2
    assert "prices of both tiers" in failed.output
    failed = run(*base, "--data", held_out_file, "--gain-per", "second")
    assert failed.exit_code == 2
    assert "have no weak_tokens" in failed.output


def test_poisoned_labels_are_refused_unless_they_are_trusted(
    staged_router: Path, collected_file: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in collected_file.read_text().splitlines()]
    swapped = [
        {**row, "weak_correct": row["strong_correct"], "strong_correct": row["weak_correct"]}
        for row in rows
    ]
    inverted = [{**row, "weak_correct": 1 - row["weak_correct"]} for row in rows]
    for poisoned, why in (
        (swapped, "small model beats the large one"),
        (inverted, "confidence runs against weak_correct"),
    ):
        path = tmp_path / "poisoned.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in poisoned))
        for command in (
            ("train", "--data", path, "--out", tmp_path / "router"),
            ("calibrate", "--router", staged_router, "--data", path, "--strong-share", "0.3"),
        ):
            refused = run(*command)
            assert refused.exit_code == 2
            assert why in refused.output.replace("\n", " ")
            assert "--trust-labels" in refused.output
    trusted = succeed(
        "calibrate", "--router", staged_router, "--data", path, "--strong-share", "0.3",
        "--trust-labels",
    )  # fmt: skip
    assert "note: the small model's confidence" in trusted.output


def test_eval_has_the_fields_scores_and_says_what_it_lacks(
    staged_router: Path, collected_file: Path, router_folder: Path, held_out_file: Path
) -> None:
    prices = ("--small-price", "0.05/0.2", "--large-price", "0.5/2", "--resamples", "5")
    report = as_json("eval", "--router", staged_router, "--data", collected_file, *prices)
    assert report["missing"] == []
    assert set(report["answerers"]) == {
        "always small", "always large", "a fair coin", "this router", "oracle"
    }  # fmt: skip
    aiq = report["aiq"]
    assert aiq["a fair coin"] < aiq["this router"] < aiq["oracle"]
    assert 0.0 < report["answerers"]["this router"]["arena_score"] < 1.0
    assert "flips" not in report
    said = succeed("eval", "--router", router_folder, "--data", held_out_file, "--resamples", "5")
    assert "Not stated: AIQ and RouterArena's score need prices" in said.output.replace("\n", " ")
    assert "Not stated: latencies need weak_s" in said.output.replace("\n", " ")
    assert said.output.count("always small") == 1, "accuracies are said once"


def test_eval_compares_two_routers_and_counts_flips(
    staged_router: Path, router_folder: Path, held_out_file: Path
) -> None:
    asked = ("eval", "--router", router_folder, "--data", held_out_file, "--resamples", "20")
    report = as_json(*asked, "--against", router_folder, "--margin", "0", "--flips")
    assert report["comparison"]["accuracy"] == [0.0, 0.0, 0.0]
    assert report["comparison"]["is_not_inferior"] is True
    assert set(report["flips"]) == {"case", "spacing", "typos", "options"}
    assert report["flips"]["case"]["num_prompts"] > 0
    said = succeed(*asked, "--against", staged_router, "--flips").output
    assert "decisions that flip" in said
    assert "By a margin of 0.01" in said
