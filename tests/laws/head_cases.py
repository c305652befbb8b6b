"""What the laws of heads are tried with: each kind, with random and with trained weights."""

from dataclasses import dataclass, replace
from functools import cache

from outrider.draft.heads.protocol import HeadModel
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Source
from tests.engines import Pair, make_request, random_prompt, shipped_pair
from tests.heads import random_head, random_pair
from tests.laws.mixed import mixed_requests
from tests.laws.options import OPTIONS
from tests.laws.same_answers import plainly
from tests.sizes import repeats
from tests.trained_heads import NUM_TOKENS, taught_head, taught_prompts


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """A head and the pair that it drafts in."""

    name: str
    pair: Pair
    head: HeadModel

    @property
    def plain_pair(self) -> Pair:
        """The pair that all cases with these weights have: its plain answers are computed once."""
        return shipped_pair() if self.is_taught else random_pair()

    @property
    def is_taught(self) -> bool:
        """True for trained weights."""
        return self.name.startswith("taught")


NAMES = (
    *("random-eagle3", "random-mtp", "random-peagle", "random-dflash"),
    *("taught-eagle3", "taught-mtp", "taught-peagle"),
)


@cache
def head_case(name: str) -> HeadCase:
    """The case of a name in NAMES."""
    weights, kind = name.split("-")
    if weights == "random":
        return HeadCase(name=name, pair=random_pair(), head=random_head(kind))
    taught = taught_head(kind)
    return HeadCase(name=name, pair=taught.pair, head=taught.head)


def case_requests(case: HeadCase) -> list[EngineRequest]:
    """A mixed batch: greedy and sampled, of many lengths; on the shipped pair with every option."""
    return taught_requests() if case.is_taught else mixed_requests()


def taught_requests() -> list[EngineRequest]:
    """Prompts that the heads were taught, with options, as choices and with a prediction."""
    prompts, names = taught_prompts(), [*OPTIONS][:: repeats(1, 3)]
    requests = [
        make_request(
            name,
            prompts[number % len(prompts)],
            max_tokens=12 + number % 9,
            **{"seed": number, **OPTIONS[name]},
        )
        for number, name in enumerate(names)
    ]
    requests += [
        make_request(
            f"choice-{number}", prompts[0], temperature=0.9, seed=7, choice_index=number,
            group_id="choices", max_tokens=NUM_TOKENS,
        )
        for number in range(3)
    ]  # fmt: skip
    predicted = make_request("predicted", prompts[1], max_tokens=NUM_TOKENS)
    return [*requests, replace(predicted, prediction_token_ids=prompts[1][-12:])]


Turn = tuple[list[EngineRequest], dict[str, list[int]]]


def conversations(case: HeadCase, num_turns: int) -> list[Turn]:
    """Turns of four conversations, each behind what was said before, and the right answers."""
    vocab_size = case.pair.large.config.vocab_size
    prompts = [random_prompt(21 + 9 * number, seed=number) for number in range(4)]
    said = dict(enumerate(taught_prompts()[:4] if case.is_taught else prompts))
    turns: list[Turn] = []
    for turn in range(num_turns):
        requests = [
            make_request(
                str(number), prompt, max_tokens=14, seed=turn, temperature=0.7 * (number % 2)
            )
            for number, prompt in said.items()
        ]
        answers = plainly(case.pair, requests)
        turns.append((requests, answers))
        said = {
            number: (
                *prompt,
                *answers[str(number)],
                *random_prompt(7, seed=turn, vocab_size=vocab_size),
            )
            for number, prompt in said.items()
        }
    return turns


def accepted(engine: Engine, source: Source = "head") -> int:
    """Tokens of a source that were accepted."""
    return sum(engine.stats().accepted_by_source.get(source, ()))
