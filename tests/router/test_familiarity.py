"""Prompts that are unlike a router's training are told from the others, and abstained on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.draft.training.tasks.files import write_tasks
from outrider.router.costs import TypicalRequest
from outrider.router.familiarity import Familiarity
from outrider.router.features import FeatureConfig, prompt_features
from outrider.router.loading import RoutingOptions, load_router
from outrider.router.policy import RouteConstraints, WatchOptions
from outrider.router.scorer import RouterFileError, RouterScorer

BUNDLED = Path(__file__).parents[2] / "draft" / "pair" / "router"
SMALL = FeatureConfig(num_char_features=1024, num_word_features=64)
UNLIKE = (
    "Write a Python function that parses an ISO 8601 timestamp and returns an aware datetime.",
    "Which vaccines does a puppy need before its first walk in the park?",
    "Summarise Hamlet's soliloquy in modern slang, then critique your summary.",
    "Translate into Norwegian: the ferry was delayed by thick fog all morning.",
    "Draft an email to my landlord asking politely for the boiler to be repaired before Friday.",
    "Explain the difference between a mutex and a semaphore, with an example in C.",
    "Plan a three-day itinerary for Lisbon with two small children and no car.",
    "Why did the Roman republic fall? Argue for two competing explanations and weigh them.",
    "Prove that the square root of two is irrational, then generalise to any prime.",
    "My sourdough starter smells of acetone. What happened, and how do I rescue it?",
    "Write a limerick about a physicist who misplaced her bicycle in a wormhole.",
    "Review this SQL: SELECT * FROM orders o LEFT JOIN users u ON o.uid = u.id WHERE u.id IS NULL;",
)


def test_new_tasks_of_the_training_s_world_are_familiar_and_other_text_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, num_rows=200, seed=20_261_124)
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    tasks = [row["prompt"] for row in rows if "prompt" in row]
    scorer = RouterScorer.load(BUNDLED)
    unlike = [scorer.estimate_familiar(task) is None for task in tasks]
    assert np.mean(unlike) < 0.05
    # Short prompts of common words are hard to tell: docs/router.md has the shares of public ones.
    assert np.mean([scorer.estimate_familiar(prompt) is None for prompt in UNLIKE]) > 0.5
    assert scorer.estimate_familiar(tasks[0]) == scorer.estimate(tasks[0])


def test_the_distance_is_the_share_that_no_training_prompt_had() -> None:
    known = Familiarity.of(["add two numbers", "add three numbers", "add four numbers"], SMALL)
    near, far = (
        known.distance(prompt_features(text, SMALL)) for text in ("add two numbers", "xyzzy qwfp")
    )
    assert near == 0.0
    assert far > 0.5
    assert 0.0 < known.limit < 1.0, "each prompt against the others"
    assert known.distance(prompt_features("", SMALL)) == 0.0
    with pytest.raises(ValueError, match="limit=2"):
        Familiarity(known=np.zeros(3, dtype=np.bool_), limit=2.0)


def test_it_is_kept_in_the_file(tmp_path: Path) -> None:
    scorer = RouterScorer.load(BUNDLED)
    scorer.save(tmp_path)
    loaded = RouterScorer.load(tmp_path)
    assert loaded.familiarity is not None
    assert scorer.familiarity is not None
    assert loaded.familiarity.limit == scorer.familiarity.limit
    assert np.array_equal(loaded.familiarity.known, scorer.familiarity.known)
    replace(scorer, familiarity=None).save(tmp_path)
    assert RouterScorer.load(tmp_path).familiarity is None
    short = Familiarity(known=scorer.familiarity.known[:-64], limit=0.1)
    with pytest.raises(ValueError, match="known_features have shape"):
        replace(scorer, familiarity=short)


def test_half_of_it_is_refused(tmp_path: Path) -> None:
    from outrider.router.files import RouterFiles, read_files, write_files

    files = read_files(BUNDLED)
    arrays = {name: value for name, value in files.arrays.items() if name != "known_features"}
    write_files(tmp_path, RouterFiles(config=files.config, arrays=arrays))
    with pytest.raises(RouterFileError, match="known_features are missing"):
        RouterScorer.load(tmp_path)


def test_the_router_abstains_from_what_it_does_not_know() -> None:
    both, typical = ("small", "large"), TypicalRequest()
    policy = load_router(BUNDLED, both, RoutingOptions(), typical).policy
    route = policy.route(UNLIKE[0])
    assert (route.tier, route.quality, route.stage) == ("small", None, "answer")
    assert "unlike the router's training" in route.reason
    assert route.watch is not None
    unwatched = policy.route(UNLIKE[0], RouteConstraints(may_watch=False))
    assert unwatched.tier == "large"
    known = policy.route("What is 48 + 37?")
    assert known.quality is not None
    off = RoutingOptions(watch=WatchOptions(mode="off"))
    assert load_router(BUNDLED, both, off, typical).policy.route(UNLIKE[0]).tier == "large"
    bold = load_router(BUNDLED, both, RoutingOptions(abstains=False), typical).policy
    assert bold.route(UNLIKE[0]).quality is not None
