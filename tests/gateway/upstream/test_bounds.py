"""Issue 15, hole 5: what is reserved at an upstream tier bounds all of the body that is sent."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.upstream.bounds import most_predicted_tokens, most_prompt_tokens
from tests.engines import shipped_tokenizer
from tests.gateway.conftest import OpenWorld

LONG = "word " * 6_000
USER = {"role": "user", "content": "Hi"}
PLAIN: dict[str, Any] = {"messages": [USER]}
SCHEMA = {"type": "object", "description": LONG}
FIELDS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "prediction": {"type": "content", "content": LONG},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000}}


@given(st.text(max_size=80), st.text(max_size=40))
def test_no_text_has_more_tokens_than_it_is_bounded_by(text: str, name: str) -> None:
    """Neither as the message nor as a name in a schema."""
    bound = most_prompt_tokens(
        {"messages": [{"role": "user", "content": text}], "response_format": {name: 1}}, 10
    )
    counted = [shipped_tokenizer().encode(part, add_special_tokens=False) for part in (text, name)]
    assert bound >= sum(map(len, counted))


def test_every_field_that_a_model_may_read_counts() -> None:
    plain = most_prompt_tokens(PLAIN, 10)
    for name in ("tools", "response_format", "a_field_of_tomorrow"):
        value = FIELDS.get(name, LONG)
        assert most_prompt_tokens({**PLAIN, name: value}, 10) >= plain + len(LONG)
    assert most_prompt_tokens({**PLAIN, "prediction": FIELDS["prediction"]}, 10) == plain
    assert most_predicted_tokens(FIELDS) >= len(LONG)
    assert most_prompt_tokens({"prompt": [[1, 2], [3]]}, 10) >= 3


@pytest.mark.parametrize(
    ("part", "least", "most"),
    [
        (IMAGE, 1_000, 1_200),
        ({"type": "image_url", "image_url": {"url": "https://a/b.png"}}, 1_000, 1_200),
        ({**IMAGE, "text": LONG}, 1_000 + len(LONG), 1_400 + len(LONG)),
        ({"type": "file", "file": {"file_data": "A" * 50_000}}, 25_000, 26_000),
        ({"type": "file", "file": {"file_id": "file-1"}}, 1_000, 1_200),
        ({"type": "image_url"}, 1_000, 1_200),
    ],
)
def test_media_count_by_the_operators_word(part: Any, least: int, most: int) -> None:
    document = {"messages": [{"role": "user", "content": [part]}]}
    assert least <= most_prompt_tokens(document, 1_000) <= most


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "limits", [LimitSpec(tokens_per_minute=20_000), LimitSpec(usd_per_day=0.02)]
)
def test_the_bodys_maximum_is_reserved_before_it_is_sent(
    opened: OpenWorld, limits: LimitSpec
) -> None:
    tier = {"price": {"prompt": 1.0, "completion": 1.0}}
    costs = {"max_tokens": 10, "outrider": {"max_cost_usd": 0.02}}
    with opened(tier=tier, limits=limits) as made:
        rich = {"authorization": f"Bearer {made.new_key('rich')}"}
        for name, value in FIELDS.items():
            refused = made.world.chat(model="cloud", max_tokens=10, **{name: value})
            dear = made.world.chat(model="cloud", headers=rich, **{name: value}, **costs)
            assert (refused.status_code, dear.status_code) == (429, 400), name
            assert "max_cost_usd" in dear.text
        assert not made.world.cloud.requests
        fine = made.world.chat(model="cloud", outrider={"max_cost_usd": 0.0003})
        sent = made.world.cloud.requests[0].document
    assert fine.status_code == 200
    affordable = sent["max_completion_tokens"]
    assert 0 < affordable <= 300 - len(json.dumps(sent["messages"], separators=(",", ":")))


def test_max_cost_usd_pays_for_the_dearer_tokens_behind_a_long_prompt(
    opened: OpenWorld,
) -> None:
    long = {"above": 100, "prompt": 10.0, "completion": 100.0}
    tier = {"price": {"prompt": 1.0, "completion": 1.0, "long_prompts": [long]}}
    short, longer = ([{"role": "user", "content": "x" * length}] for length in (5, 200))
    with opened(tier=tier) as made:
        options = {"model": "cloud", "outrider": {"max_cost_usd": 0.01}}
        for messages in (short, longer):
            assert made.world.chat(messages=messages, **options).status_code == 200
        too_long = made.world.chat(messages=longer, max_tokens=100, **options)
        sent = [request.document for request in made.world.cloud.requests]
    cheap, dear = (document["max_completion_tokens"] for document in sent)
    assert (0.01 - 200 * 10e-6) / 100e-6 > dear > (0.01 - 300 * 10e-6) / 100e-6
    assert cheap > 9000
    assert too_long.status_code == 400
