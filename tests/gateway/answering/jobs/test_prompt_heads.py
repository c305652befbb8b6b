"""Clients whose prompts change at the head are found, in bounded memory and without their text."""

import pytest

from outrider.gateway.answering.jobs.prompt_heads import PART_TOKENS, HeadFigures, PromptHeads

SYSTEM = list(range(1000, 1000 + 10 * PART_TOKENS))


def prompt(head: int, *rest: int) -> list[int]:
    """A prompt with something at its head, which goes on with the same text and then its own."""
    return [head] * PART_TOKENS + SYSTEM + list(rest)


def noted(prompts: list[list[int]], *, every_s: float = 1.0) -> list[HeadFigures]:
    heads = PromptHeads()
    for index, tokens in enumerate(prompts):
        heads.note("key-a", "team", "agent/2.1 (linux)", tokens, index * every_s)
    return heads.figures(None, len(prompts) * every_s)


def test_a_clock_at_the_head_is_told_with_what_it_costs() -> None:
    (found,) = noted([prompt(minute, 7, minute) for minute in range(5)])
    assert (found.key_id, found.agent) == ("key-a", "agent/2.1")
    assert (found.num_requests, found.num_changed) == (5, 4)
    assert found.num_repeated_tokens == 4 * len(SYSTEM)
    assert found.num_prompt_tokens == 4 * len(prompt(0, 7, 0))


def test_a_head_may_become_longer() -> None:
    (found,) = noted([prompt(each)[each % 3 :] for each in range(5)])
    assert found.num_changed == 4
    assert found.num_repeated_tokens >= 4 * (len(SYSTEM) - PART_TOKENS)


@pytest.mark.parametrize(
    "prompts",
    [
        [prompt(1, *range(each * 9)) for each in range(9)],  # one conversation that grows
        [[each * 5000 + i for i in range(300)] for each in range(9)],  # of different things
        [prompt(each) for each in range(3)],  # too few
        [prompt(each % 2) for each in range(9)],  # two beginnings that come again
    ],
)
def test_other_prompts_are_not_told(prompts: list[list[int]]) -> None:
    assert noted(prompts) == []


def test_what_is_long_ago_is_forgotten() -> None:
    assert noted([prompt(each) for each in range(5)], every_s=150.0) == []


def test_a_tenant_sees_its_own_clients_and_many_clients_are_bounded() -> None:
    heads = PromptHeads()
    for each in range(5):
        for client in range(300):
            heads.note(f"key-{client}", f"team-{client}", "", prompt(each), 1.0)
    assert heads.figures(None, 2.0) == [], "each client is forgotten before it comes again"
    for each in range(5):
        for client in range(250):
            heads.note(f"key-{client}", f"team-{client}", "", prompt(each), 1.0)
    assert len(heads.figures(None, 2.0)) == 250
    assert [each.key_id for each in heads.figures("team-7", 2.0)] == ["key-7"]
    assert heads.figures("team-999", 2.0) == []
