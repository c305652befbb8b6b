"""An upstream answer is the server's own, token for token, whatever happens on its way.

The servers are real: two Outrider gateways on the shipped pair, one that drafts and one that
decodes plainly, so that they cut the same answer into different events. Before them stand proxies
that break connections, before these the gateway under test. What is right is what the plain server
says when it is asked directly.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from outrider.draft.training.tasks.families import stream
from tests.engines import PAIR_FOLDER, chat_prompt, shipped_tokenizer
from tests.gateway.hybrid import TestPolicy
from tests.gateway.watches import PlannedWatch
from tests.laws.cutting_proxy import Cut, How, Proxies, cutting_proxies
from tests.laws.gateways import Gateway, Told, gateway

Document = dict[str, Any]

PLAIN, DRAFTING = 0, 1
NUM_PROMPTS: Final = 3
OPEN_FAMILY: Final = "reverse_word"
"""Of tasks that the pair has not learnt by heart: what is sampled hangs on the seed."""
HOWS: Final[tuple[How, ...]] = ("reset", "close")
HOMES: Final = pytest.mark.parametrize("home", [PLAIN, DRAFTING], ids=["plain", "drafting"])
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
HOT: Final = {"temperature": 2.0, "seed": 11, "min_tokens": 8, "max_tokens": 12}
GREEDY: Final = {"temperature": 0, "max_tokens": 16}
NUMBER: Final = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 12}, "number": {"type": "integer"}},
    "required": ["word", "number"],
    "additionalProperties": False,
}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CHAT: Final[dict[str, Document]] = {
    "greedy": GREEDY,
    "sampled": HOT,
    "options": {**HOT, "temperature": 1.3, "top_p": 0.9, "frequency_penalty": 0.8, "min_p": 0.01},
    "stop": {**HOT, "max_tokens": 16, "stop": [" ", "e"], "min_tokens": 5},
    "structured": {
        **HOT,
        "temperature": 1.0,
        "min_tokens": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": NUMBER, "strict": True},
        },
    },
    "logprobs": {**HOT, "logprobs": True, "top_logprobs": 2},
}
COMPLETIONS: Final[dict[str, Document]] = {
    "greedy": GREEDY,
    "sampled": HOT,
    "logprobs": {**HOT, "logprobs": 2},
}
CALLING: Final = {
    "messages": [{"role": "user", "content": "What will the weather in Oslo be in 3 days?"}],
    "tools": [TOOL],
    "temperature": 0,
    "max_tokens": 48,
}


# ---- servers ------------------------------------------------------------------------------------


@dataclass
class Clouds:
    """The servers, what stands before them, and prompts by the server that is their home."""

    servers: tuple[Gateway, Gateway]
    proxies: Proxies
    prompts: dict[int, list[str]] = field(default_factory=dict)
    known: dict[str, Told] = field(default_factory=dict)

    def right(self, path: str = "chat/completions", **document: Any) -> Told:
        """The plain server's own answer. It is asked once for each."""
        document = {"model": "large", **document}
        key = json.dumps([path, document], sort_keys=True)
        if key not in self.known:
            self.known[key] = self.servers[PLAIN].ask(path, **document)
        return self.known[key]

    def front(self, **flags: Any) -> AbstractContextManager[Gateway]:
        """A gateway without models of its own. In flags, `__` stands for the dot."""
        return gateway({"models.small": "none", **self._tiers, **_dotted(flags)})

    def device(
        self, policy: TestPolicy | None = None, **flags: Any
    ) -> AbstractContextManager[Gateway]:
        """A gateway with the small model; the servers play the large one's part."""
        return gateway({**self._tiers, "models.small": "demo", **_dotted(flags)}, policy=policy)

    @property
    def _tiers(self) -> dict[str, Any]:
        """The servers as what they are, and as if they were vLLM's."""
        urls = ",".join(f"{url}/v1" for url in self.proxies.urls)
        flags = {"models.large": "none", "handoff.tier": "cloud"}
        flags["tiers.text.tokenizer"] = str(PAIR_FOLDER / "large")
        for name, server in (("cloud", "outrider"), ("text", "vllm")):
            flags[f"tiers.{name}.url"] = urls
            flags[f"tiers.{name}.model"] = "large"
            flags[f"tiers.{name}.server"] = server
        return flags


def _dotted(flags: Document) -> Document:
    return {name.replace("__", "."): value for name, value in flags.items()}


@pytest.fixture(scope="module")
def clouds() -> Iterator[Clouds]:
    with (
        gateway({"speculation.enabled": False}) as plain,
        gateway() as drafting,
        cutting_proxies([plain.url, drafting.url]) as proxies,
    ):
        made = Clouds((plain, drafting), proxies)
        made.prompts = {PLAIN: [], DRAFTING: []}
        tasks = stream(7, "heldout", families=(OPEN_FAMILY,))
        with made.front() as front:
            for task in itertools.islice(tasks, 64):
                proxies.cut()
                front.ask(model="cloud", **chat(task.prompt), max_tokens=1)
                made.prompts[proxies.sent[0].server].append(task.prompt)
                if min(map(len, made.prompts.values())) >= NUM_PROMPTS:
                    break
        yield made


@pytest.fixture(autouse=True)
def uncut(clouds: Clouds) -> None:
    clouds.proxies.cut()


@pytest.fixture(scope="module")
def healthy(clouds: Clouds) -> Iterator[Gateway]:
    """A front whose requests are not cut."""
    with clouds.front() as made:
        yield made


@pytest.fixture
def front(clouds: Clouds) -> Iterator[Gateway]:
    with clouds.front() as made:
        yield made


def chat(prompt: str) -> Document:
    return {"messages": [{"role": "user", "content": prompt}]}


def completion(prompt: str) -> Document:
    return {"prompt": shipped_tokenizer().decode(chat_prompt(prompt))}


def every_cut(
    clouds: Clouds, front: Gateway, path: str = "chat/completions", **document: Any
) -> Iterator[Told]:
    """The answer, cut behind its first event, its second one, and so on to its end."""
    for number in itertools.count(1):
        cut = Cut(number, how=HOWS[number % len(HOWS)], pauses=number % 3 > 0)
        clouds.proxies.cut(cut)
        told = front.ask(path, **{"model": "cloud", **STREAMED, **document})
        front.heal()
        if not cut.is_done:
            assert number > 2, "it was never cut"
            return
        yield told


def check_whole(told: Told, right: Told) -> None:
    """It came to its end, and is the right answer."""
    assert told.error is None, told
    if told.report["usage_source"] != "reported":
        # All of its text had come, but not the number of its tokens.
        told = replace(told, num_tokens=right.num_tokens)
    told.check(right)


def check_cut(clouds: Clouds, told: Told, right: Told) -> bool:
    """Check that no client can see the cut. Returns whether another server continued."""
    check_whole(told, right)
    went_on = len(clouds.proxies.sent) > 1
    assert told.report["continuations"] == went_on
    if went_on:
        assert len({sent.server for sent in clouds.proxies.sent}) == 2
        assert told.report["usage_source"] == "reported"
    return went_on


# ---- passing through ----------------------------------------------------------------------------


@pytest.mark.slow_cases
@HOMES
@pytest.mark.parametrize("name", CHAT)
def test_a_chat_passes_through(clouds: Clouds, healthy: Gateway, name: str, home: int) -> None:
    document = {**chat(clouds.prompts[home][0]), **CHAT[name]}
    right = clouds.right(**document)
    assert right.text
    assert right.error is None
    for options in ({}, STREAMED):
        told = healthy.ask(model="cloud", **document, **options)
        told.check(right)
        assert told.error is None
    assert [sent.server for sent in clouds.proxies.sent] == [home] * 2
    assert bool(right.tokens) == (name == "logprobs")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_passes_through(clouds: Clouds, healthy: Gateway, name: str) -> None:
    for prompt in clouds.prompts[PLAIN][:2]:
        document = {**completion(prompt), **COMPLETIONS[name]}
        right = clouds.right("completions", **document)
        for options in ({}, STREAMED):
            told = healthy.ask("completions", model="cloud", **document, **options)
            told.check(right)
            assert told.error is None


@pytest.mark.slow
def test_calls_pass_through(clouds: Clouds, healthy: Gateway) -> None:
    right = clouds.right(**CALLING)
    assert right.calls[0][0] == "get_weather"
    assert right.finish_reason == "tool_calls"
    for model in ("cloud", "text"):
        for options in ({}, STREAMED):
            healthy.ask(model=model, **CALLING, **options).check(right)


def test_seeds_matter_here(clouds: Clouds) -> None:
    """Or else much of what follows would hold for any seed."""
    document = chat(clouds.prompts[PLAIN][0])
    texts = {clouds.right(**{**document, **HOT, "seed": seed}).text for seed in range(4)}
    assert len(texts) == 4


# ---- cut in mid-stream --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAT)
def test_wherever_a_chat_is_cut_it_goes_on(clouds: Clouds, front: Gateway, name: str) -> None:
    homes = (PLAIN, DRAFTING) if name in ("greedy", "sampled") else (PLAIN,)
    for home in homes:
        document = {**chat(clouds.prompts[home][1]), **CHAT[name]}
        right = clouds.right(**document)
        num_continued = 0
        for told in every_cut(clouds, front, **document):
            num_continued += check_cut(clouds, told, right)
        assert num_continued >= (1 if home == DRAFTING else 2)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_wherever_a_completion_is_cut_it_goes_on(clouds: Clouds, front: Gateway, name: str) -> None:
    document = {**completion(clouds.prompts[PLAIN][1]), **COMPLETIONS[name]}
    right = clouds.right("completions", **document)
    num_continued = 0
    for told in every_cut(clouds, front, "completions", **document):
        num_continued += check_cut(clouds, told, right)
    assert num_continued >= 1


@pytest.mark.slow
@HOMES
def test_without_a_seed_the_tier_names_one(clouds: Clouds, front: Gateway, home: int) -> None:
    document = {**chat(clouds.prompts[home][2]), "temperature": 2.0, "max_tokens": 8}
    seeds = []
    for told in every_cut(clouds, front, **document):
        seeds.append({sent.document["seed"] for sent in clouds.proxies.sent})
        assert len(seeds[-1]) == 1
        right = clouds.right(**document, seed=min(seeds[-1]))
        if check_cut(clouds, told, right):
            again = clouds.proxies.sent[1].document
            assert again["prediction"]["content"]
            assert right.text.startswith(again["prediction"]["content"])
    assert len(set.union(*seeds)) == len(seeds) > 2


@pytest.mark.slow
def test_an_answer_may_be_cut_more_than_once(clouds: Clouds, front: Gateway) -> None:
    document = {**chat(clouds.prompts[PLAIN][0]), **HOT}
    right = clouds.right(**document)
    num_continued = []
    for places in ((1, 2), (2, 1), (3, 2, 5), (5, 1, 6)):
        clouds.proxies.cut(*map(Cut, places))
        told = front.ask(model="cloud", **document, **STREAMED)
        front.heal()
        check_whole(told, right)
        assert told.report["continuations"] == len(clouds.proxies.sent) - 1
        num_continued.append(told.report["continuations"])
    assert max(num_continued) > 1


def test_silence_counts_as_a_cut(clouds: Clouds) -> None:
    document = {**chat(clouds.prompts[PLAIN][0]), **HOT}
    right = clouds.right(**document)
    with clouds.front(tiers__cloud__timeouts__between_tokens_s=0.5) as front:
        for number in (1, 4):
            clouds.proxies.cut(Cut(number, how="stall"))
            told = front.ask(model="cloud", **document, **STREAMED)
            assert check_cut(clouds, told, right)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_greedy_text_goes_on_behind_itself(clouds: Clouds, front: Gateway, path: str) -> None:
    """By `continue_final_message`, or behind the prompt, as servers of other kinds do it."""
    wrap = chat if path.startswith("chat") else completion
    num_continued = 0
    for home in (PLAIN, DRAFTING) if wrap is chat else (PLAIN,):
        document = {**wrap(clouds.prompts[home][1]), **GREEDY}
        right = clouds.right(path, **document)
        for told in every_cut(clouds, front, path, model="text", **document):
            num_continued += check_cut(clouds, told, right)
    assert num_continued >= 1


@pytest.mark.slow
def test_an_answer_that_cannot_continue_adds_no_text(clouds: Clouds, front: Gateway) -> None:
    """Calls and logprobs at the wrong moment: an error, behind a beginning that is right."""
    right = clouds.right(**CALLING)
    ends = []
    for told in every_cut(clouds, front, **CALLING):
        ends.append(told.error is None)
        if told.error is None:
            check_cut(clouds, told, right)
        else:
            told.check(right)
    assert not all(ends)


# ---- handed over --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_weak_local_answer_becomes_the_clouds_own(clouds: Clouds, options: Document) -> None:
    places = itertools.cycle((0, 1, 3, 7))
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=next(places)))
    num_predictions = 0
    with clouds.device(policy) as device:
        for prompt in clouds.prompts[PLAIN][:2] + clouds.prompts[DRAFTING][:2]:
            document = {**chat(prompt), **options}
            right = clouds.right(**document)
            local = clouds.right(**document, model="small").text
            for way in ({}, STREAMED):
                clouds.proxies.cut()
                told = device.ask(model="auto", **document, **way)
                told.check(right)
                assert (told.report["tier"], told.report["hand_off"]) == ("cloud", "confidence")
                guess = clouds.proxies.sent[0].document.get("prediction", {"content": ""})
                assert local.startswith(guess["content"])
                num_predictions += bool(guess["content"])
    assert num_predictions > 2


@pytest.mark.slow
def test_a_handed_over_answer_that_is_cut_goes_on(clouds: Clouds) -> None:
    policy = TestPolicy(watch=lambda: PlannedWatch("escalate", at=3))
    document = {**chat(clouds.prompts[PLAIN][0]), **HOT, "max_tokens": 8}
    right = clouds.right(**document)
    num_continued = 0
    with clouds.device(policy) as device:
        for told in every_cut(clouds, device, **document, model="auto"):
            num_continued += check_cut(clouds, told, right)
            assert told.report["hand_off"] == "confidence"
    assert num_continued >= 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_local_answer_that_is_kept_is_the_local_models_own(
    clouds: Clouds, options: Document
) -> None:
    """Because it is good enough, or because no tier takes it over."""
    watches = {"commit": 2, "escalate": 4}
    for action, place in watches.items():
        policy = TestPolicy(watch=lambda a=action, p=place: PlannedWatch(a, at=p))  # type: ignore[misc]
        with clouds.device(policy) as device:
            clouds.proxies.refuses = action == "escalate"
            try:
                for prompt, way in itertools.product(clouds.prompts[PLAIN][:2], ({}, STREAMED)):
                    document = {**chat(prompt), **options}
                    told = device.ask(model="auto", **document, **way)
                    told.check(clouds.right(**document, model="small"))
                    assert told.report["tier"] == "small"
                    assert told.report["degraded"] == clouds.proxies.refuses
            finally:
                clouds.proxies.refuses = False


@pytest.mark.slow
def test_behind_the_clouds_words_the_local_model_goes_on_as_it_would(clouds: Clouds) -> None:
    """Where that is allowed, and no other tier is left."""
    flags = {"handoff.continue_on_failure": True, "handoff.policy": "prefer_cloud"}
    with clouds.device(**flags, tiers__cloud__max_retries=0) as device:
        for prompt, number in itertools.product(clouds.prompts[PLAIN][:2], (1, 3, 6)):
            document = {**chat(prompt), **GREEDY, "max_tokens": 40}
            clouds.proxies.cut(Cut(number), *(Cut(0) for _ in range(4)))
            told = device.ask(model="auto", **document, **STREAMED)
            device.heal()
            assert told.error is None
            assert told.report["tier"] == "small"
            assert told.report["degraded"]
            # The last events before the cut may have been lost with the connection.
            begun = ["".join(told.pieces[:number]) for number in range(number, 0, -1)]
            assert clouds.right(**document).text.startswith(begun[-1])
            assert any(_goes_on(clouds, document, told, beginning) for beginning in begun)


def _goes_on(clouds: Clouds, document: Document, told: Told, beginning: str) -> bool:
    """Return whether the small model says the same behind this beginning, as far as it may."""
    turns = [*document["messages"], {"role": "assistant", "content": beginning}]
    asked = {**document, "messages": turns, "continue_final_message": True, "model": "small"}
    right = beginning + clouds.right(**asked).text
    return right == told.text or (told.finish_reason == "length" and right.startswith(told.text))


@pytest.mark.slow
def test_whoever_the_router_chooses_gives_its_own_answer(clouds: Clouds) -> None:
    tiers = set()
    with clouds.device() as device:
        for task in itertools.islice(stream(7, "heldout"), 12):
            document = {**chat(task.prompt), **GREEDY}
            told = device.ask(model="auto", **document, **STREAMED)
            tier = told.report["tier"]
            told.check(clouds.right(**document, model="large" if tier == "cloud" else tier))
            tiers.add(tier)
    assert tiers == {"small", "cloud"}


# ---- tried again, asked twice -------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_try_gives_the_same_answer(clouds: Clouds, front: Gateway) -> None:
    tries: tuple[tuple[str, How, dict[str, Any]], ...] = (
        ("cloud", "reset", HOT),
        ("cloud", "close", GREEDY),
        ("text", "reset", GREEDY),
    )
    for home, way in itertools.product((PLAIN, DRAFTING), ({}, STREAMED)):
        for model, how, options in tries:
            document = {**chat(clouds.prompts[home][0]), **options}
            clouds.proxies.cut(Cut(0, how=how), Cut(0, how=how))
            told = front.ask(model=model, **document, **way)
            front.heal()
            told.check(clouds.right(**document))
            assert told.error is None
            assert len(clouds.proxies.sent) == 3


@pytest.mark.slow
def test_a_hedge_gives_the_same_answer(clouds: Clouds) -> None:
    """Whoever is faster; and the hedge, where the first one says nothing at all."""
    with clouds.front(tiers__cloud__hedge_share=1.0) as front:
        tier = front.context.upstream.tiers["cloud"]
        ways = (({}, tier._state.whole), (STREAMED, tier.first_token))
        races: tuple[tuple[Cut, ...], ...] = ((), (Cut(0, how="stall"),))
        for home, options in itertools.product((PLAIN, DRAFTING), (GREEDY, HOT)):
            document = {**chat(clouds.prompts[home][1]), **options}
            for (way, learned), cuts in itertools.product(ways, races):
                for _ in range(40):
                    learned.add(1e-4)  # so that every answer is late
                clouds.proxies.cut(*cuts)
                clouds.proxies.num_awaited = 2  # else the first may win before the hedge is sent
                told = front.ask(model="cloud", **document, **way)
                check_whole(told, clouds.right(**document))
                assert told.report["hedged"]
                assert {sent.server for sent in clouds.proxies.sent} == {PLAIN, DRAFTING}


# ---- anything -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_it_is_the_same_answer(clouds: Clouds, seed: int) -> None:
    """Prompts, options, cuts and ways to be asked, drawn at random."""
    rng = random.Random(seed)
    num_continued = 0
    with clouds.front() as front, clouds.device(TestPolicy(watch=_escalating(rng))) as device:
        for task in itertools.islice(stream(seed, "heldout", families=(OPEN_FAMILY,)), 30):
            path, wrap, options = rng.choice(
                [("chat/completions", chat, options) for options in CHAT.values()]
                + [("completions", completion, options) for options in COMPLETIONS.values()]
            )
            document = {**wrap(task.prompt), **options, "max_tokens": rng.randint(1, 40)}
            document["min_tokens"] = 0
            if "seed" in document:
                document["seed"] = rng.getrandbits(31)
            right = clouds.right(path, **document)
            asked = rng.choice([front, device]) if path == "chat/completions" else front
            model = "auto" if asked is device else "cloud"
            if document["temperature"] == 0 and rng.random() < 0.5 and asked is front:
                model = "text"
            cuts = [rng.randint(0, 12) for _ in range(rng.randint(1, 3))]
            clouds.proxies.cut(*(Cut(cut, rng.choice(HOWS), rng.random() < 0.5) for cut in cuts))
            told = asked.ask(path, **{**STREAMED, **document, "model": model})
            asked.heal()
            check_whole(told, right)
            num_continued += told.report["continuations"]
    assert num_continued > 10


def _escalating(rng: random.Random) -> Callable[[], PlannedWatch]:
    return lambda: PlannedWatch("escalate", at=rng.randint(0, 6))
