"""The second turn of an agent's conversation finds the first in the prefix cache."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cch={};"
INSTRUCTIONS = " ".join(f"Rule {number}: answer with the sum." for number in range(150))


@pytest.fixture
def client(pair_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair_url}/v1", api_key="none") as client:
        yield client


@pytest.fixture
def claude(pair_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=pair_url, api_key="none") as client:
        yield client


def test_with_chat_completions(client: openai.OpenAI) -> None:
    turns: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": "What is 17 + 25?"},
    ]
    first = client.chat.completions.create(model="large", messages=turns, max_tokens=16)
    assert first.usage is not None
    assert first.usage.prompt_tokens > 1500
    turns += [first.choices[0].message, {"role": "user", "content": "And 3 + 4?"}]
    second = client.chat.completions.create(model="large", messages=turns, max_tokens=16)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= 0.95 * first.usage.prompt_tokens


def test_with_messages_and_a_billing_line_that_differs(claude: anthropic.Anthropic) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is 18 + 26?"}]
    usages = []
    for number in (1, 2):
        billing = {"type": "text", "text": BILLING.format(number, number * 7919)}
        system: list[Any] = [billing, {"type": "text", "text": f"{INSTRUCTIONS} Be brief."}]
        answer = claude.messages.create(model="large", max_tokens=16, system=system, messages=turns)
        usages.append(answer.usage)
        turns += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "And 3 + 4?"},
        ]
    first, second = usages
    read = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert read > 1500
    assert (second.cache_read_input_tokens or 0) >= 0.95 * read
