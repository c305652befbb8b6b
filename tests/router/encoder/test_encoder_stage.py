"""The encoder's stage: learnt where it tells something, stored, and the same when it serves."""

import asyncio
import json
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.gateway.answering.streaming.hold_back import HoldBack
from outrider.router.costs import TypicalRequest
from outrider.router.dataset import LabelledPrompts
from outrider.router.encoder import neighbours as neighbours_module
from outrider.router.encoder.bert import EncoderError, Floats32
from outrider.router.encoder.neighbours import Neighbours
from outrider.router.encoder.reader import PromptReader, once
from outrider.router.encoder.sentence import SentenceEncoder
from outrider.router.estimates import QualityEstimate
from outrider.router.estimator import TrainedRouter, train_router
from outrider.router.evaluation import apgr
from outrider.router.features import FloatRows
from outrider.router.files import RouterFileError, RouterFiles, read_files, write_files
from outrider.router.loading import RoutingOptions, load_router
from outrider.router.policy import WatchOptions
from outrider.router.scorer import RouterScorer
from outrider.router.stages import stage_rows
from outrider.router.watch import Judgement, WatchedAnswer, WatchPlan, WatchRules
from outrider.verifier.params import TIERS
from tests.router.conftest import QUICK
from tests.router.encoder.encoders import labels_near, write_encoder
from tests.router.routers import ScriptedStages


@pytest.fixture(scope="module")
def trained() -> TrainedRouter:
    return train_router(labels_near(300, seed=1), QUICK)


def rows_of(data: LabelledPrompts) -> Floats32:
    assert data.embeddings is not None
    return data.embeddings.rows


def test_neighbours_say_what_their_labels_were_and_far_from_all_the_mean() -> None:
    data = labels_near(200, seed=3)
    known = Neighbours.of(rows_of(data), [data.weak], seed=0)
    new = labels_near(200, seed=4)
    said = known.shares(rows_of(new))[:, 0]
    assert said[new.weak == 1.0].mean() > 0.7
    assert said[new.weak == 0.0].mean() < 0.3
    centre = known.shares(known.centre[None])
    assert centre[0, 0] == pytest.approx(data.weak.mean(), abs=0.1)


def test_of_many_prompts_a_part_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours_module, "MAX_ANCHORS", 50)
    data = labels_near(200, seed=3)
    known = Neighbours.of(rows_of(data), [data.weak], seed=0)
    assert len(known.anchors) == 50
    assert known.shares(rows_of(data))[data.weak == 1.0].mean() > 0.6


def test_embeddings_that_tell_are_kept_and_order_new_prompts(trained: TrainedRouter) -> None:
    assert trained.scorer.encoder is not None
    new = labels_near(300, seed=2)
    rows = stage_rows(trained.scorer, new)
    assert apgr(1.0 - rows.prompt, rows.weak, rows.strong) > 0.68
    assert apgr(1.0 - rows.text, rows.weak, rows.strong) < 0.6


@pytest.mark.slow
def test_embeddings_that_tell_nothing_are_left_out() -> None:
    trained = train_router(labels_near(300, seed=1, is_told=False), QUICK)
    assert trained.scorer.encoder is None
    assert "text_and_neighbours" in trained.scorer.training["held_out"]


def test_a_prompt_without_its_neighbours_is_judged_by_its_text(trained: TrainedRouter) -> None:
    text = trained.scorer.estimate("question number 3")
    for unfit in (None, np.zeros(1), np.zeros(12)):
        assert trained.scorer.estimate_prompt(text, None, unfit) == text


def test_a_stored_router_estimates_as_the_trained_one(
    trained: TrainedRouter, tmp_path: Path
) -> None:
    trained.scorer.save(tmp_path)
    loaded = RouterScorer.load(tmp_path)
    new = labels_near(40, seed=2)
    found = stage_rows(loaded, new).prompt
    assert found == pytest.approx(stage_rows(trained.scorer, new).prompt, abs=1e-6)
    config = json.loads((tmp_path / "router.json").read_text(encoding="utf-8"))
    assert config["encoder"]["id"]["source"] == "nowhere"
    assert config["encoder"]["id"]["dimension"] == 12


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dimension": 13}, "dimension 13, but the stored embeddings have 12 numbers"),
        ({"dimension": "12"}, "dimension='12'"),
    ],
)
def test_an_encoder_of_another_dimension_is_refused(
    trained: TrainedRouter, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    trained.scorer.save(tmp_path)
    files = read_files(tmp_path)
    encoder = dict(files.config["encoder"])
    encoder["id"] = {**encoder["id"], **changes}
    changed = RouterFiles(config={**files.config, "encoder": encoder}, arrays=files.arrays)
    write_files(tmp_path, changed)
    with pytest.raises(RouterFileError, match=why):
        RouterScorer.load(tmp_path)


@pytest.mark.parametrize("name", ["neighbour_anchors", "neighbour_means"])
def test_missing_neighbours_are_named(trained: TrainedRouter, tmp_path: Path, name: str) -> None:
    trained.scorer.save(tmp_path)
    files = read_files(tmp_path)
    arrays = {key: array for key, array in files.arrays.items() if key != name}
    write_files(tmp_path, RouterFiles(config=files.config, arrays=arrays))
    with pytest.raises(RouterFileError, match=name):
        RouterScorer.load(tmp_path)


def test_a_router_of_the_version_before_is_read_and_an_older_one_named(
    trained: TrainedRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(trained.scorer, encoder=None)
    monkeypatch.setattr("outrider.router.files.FORMAT_VERSION", 2)
    plain.save(tmp_path / "two")
    files = read_files(tmp_path / "two")
    config = {name: value for name, value in files.config.items() if name != "encoder"}
    write_files(tmp_path / "two", RouterFiles(config=config, arrays=files.arrays))
    assert RouterScorer.load(tmp_path / "two").encoder is None
    monkeypatch.setattr("outrider.router.files.FORMAT_VERSION", 1)
    plain.save(tmp_path / "one")
    with pytest.raises(RouterFileError, match="unknown version 1; available: 2, 3, 4; train the"):
        RouterScorer.load(tmp_path / "one")


def watched(shares: Future[FloatRows | None], **rules: object) -> WatchedAnswer:
    values = {"threshold": 0.5, "sure": (0.2, 0.9), "last_stage": "prompt", **rules}
    stages = ScriptedStages(prompt=0.4, answers={1: 0.5})
    return WatchedAnswer(stages, WatchRules(**values), QualityEstimate(small=0.6), None, shares)


def test_the_watch_takes_what_is_there_when_the_prompt_is_judged() -> None:
    there: Future[FloatRows | None] = Future()
    there.set_result(np.array([0.7]))
    judgement = watched(there).on_prompt([0.1])
    assert (judgement.action, judgement.confidence) == ("commit", pytest.approx(0.7))
    late = watched(Future()).on_prompt([0.1])
    assert (late.action, late.confidence) == ("escalate", pytest.approx(0.4))


def test_a_held_answer_is_judged_once_its_prompt_is_read() -> None:
    reading: Future[FloatRows | None] = Future()
    plan = WatchPlan(new_watch=lambda: watched(reading), read_prompt=lambda: reading)
    hold_back = HoldBack(plan, time.monotonic)

    async def judged() -> Judgement | None:
        asyncio.get_running_loop().call_later(0.02, reading.set_result, np.array([0.7]))
        await hold_back.until_read()
        return hold_back.judge_prompt([0.1])

    judgement = asyncio.run(judged())
    assert judgement is not None
    assert judgement.confidence == pytest.approx(0.7)


def test_a_reading_that_never_ends_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.gateway.answering.streaming.hold_back._MOST_READING_S", 0.01)
    reading: Future[FloatRows | None] = Future()
    plan = WatchPlan(new_watch=lambda: watched(reading), read_prompt=lambda: reading)
    hold_back = HoldBack(plan, time.monotonic)
    asyncio.run(hold_back.until_read())
    judgement = hold_back.judge_prompt([0.1])
    assert judgement is not None
    assert judgement.confidence == pytest.approx(0.4)


def small_reader(folder: Path) -> tuple[SentenceEncoder, Neighbours]:
    """A tiny encoder, and two labelled texts."""
    encoder = SentenceEncoder.load(str(write_encoder(folder)))
    rows = encoder.embed_all(["what is the sum", "a dog"]).rows
    return encoder, Neighbours.of(rows, [np.array([0.0, 1.0])], seed=0)


def test_a_prompt_is_read_once_for_all_choices_and_only_if_one_is_watched(
    tmp_path: Path,
) -> None:
    encoder, known = small_reader(tmp_path)
    texts: list[str] = []

    class Counted(PromptReader):
        def submit(self, text: str) -> Future[FloatRows | None]:
            texts.append(text)
            return super().submit(text)

    pending = once(Counted(encoder, known), "what is the sum")
    assert texts == []
    first, second = pending(), pending()
    assert first is second
    expected = known.shares(encoder.embed("what is the sum")[None])[0]
    found = first.result(timeout=30)
    assert found is not None
    assert found.tolist() == expected.tolist()
    assert texts == ["what is the sum"]
    assert once(None, "what")().result() is None


def test_prompts_behind_many_others_do_without(tmp_path: Path) -> None:
    reader = PromptReader(*small_reader(tmp_path))
    pending = [reader.submit("dog " * 128) for _ in range(200)]
    found = [one.result(timeout=30) for one in pending]
    assert found[0] is not None
    assert any(one is None for one in found)
    assert reader.submit("dog").result(timeout=30) is not None


def test_a_loaded_router_embeds_what_it_watches(trained: TrainedRouter, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", width=12)
    encoder = SentenceEncoder.load(str(folder))
    stage = trained.scorer.encoder
    assert stage is not None
    named = replace(stage, config=replace(stage.config, id=encoder.id))
    replace(trained.scorer, encoder=named).save(tmp_path / "router")
    options = RoutingOptions(watch=WatchOptions(mode="always"), abstains=False)
    policy = load_router(tmp_path / "router", TIERS, options, TypicalRequest()).policy
    plan = policy.route("what is the sum of a dog").watch
    assert plan is not None
    assert plan.read_prompt is not None
    plan.read_prompt().result(timeout=30)
    judgement = plan.new_watch().on_prompt(None)
    scorer = trained.scorer
    shares = stage.neighbours.shares(encoder.embed("what is the sum of a dog")[None])[0]
    text = scorer.estimate("what is the sum of a dog")
    expected = scorer.estimate_prompt(text, None, shares).quality
    assert judgement.confidence == pytest.approx(expected, abs=1e-6)
    assert judgement.confidence != pytest.approx(text.quality, abs=1e-6)


def test_a_router_is_not_loaded_without_its_encoder(trained: TrainedRouter, tmp_path: Path) -> None:
    trained.scorer.save(tmp_path / "router")
    with pytest.raises(EncoderError, match="no sentence encoder 'nowhere'"):
        load_router(tmp_path / "router", TIERS, RoutingOptions(), TypicalRequest())
    other = RoutingOptions(encoder=str(write_encoder(tmp_path / "encoder", width=16)))
    with pytest.raises(EncoderError, match="embeddings of 16 numbers, the router was trained with"):
        load_router(tmp_path / "router", TIERS, other, TypicalRequest())
