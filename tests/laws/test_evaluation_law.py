"""What lm-evaluation-harness asks of a gateway is what transformers computes.

Its `local-completions` model sends a context with a continuation, as text or as token ids, and adds
up the echoed log-probabilities of the continuation: `loglikelihood`, and whether it is greedy. The
bundled pair in float32, both tiers, and `auto`.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engines import Pair, shipped_pair, shipped_tokenizer
from tests.laws.gateways import Gateway, gateway
from tests.laws.references import forced_logits

NEAR = 1e-3
ITEMS = [
    ("What is 48 + 37? Answer: ", ["85", "eighty", "48 + 37", "-"]),
    ("The capital of France is", [" Paris", " a town", " 7"]),
    ("1 2 3 4 5 6 7", [" 8", " 9 10 11", "\n"]),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Gateway]:
    with gateway() as running:
        yield running


def encoded(text: str) -> list[int]:
    ids: list[int] = shipped_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def likelihoods(tier: str, context: str, continuation: str) -> tuple[float, bool]:
    """As lm-evaluation-harness computes them with a model of transformers."""
    pair: Pair = shipped_pair()
    reference = pair.large_reference if tier == "large" else pair.small_reference
    ids, num_context = encoded(context + continuation), len(encoded(context))
    rows = forced_logits(reference, [ids])[0][num_context - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(ids[num_context:])
    found = rows.gather(1, wanted[:, None]).sum()
    return float(found), bool((rows.argmax(-1) == wanted).all())


def parsed(choice: dict[str, Any], num_context: int, max_tokens: int) -> tuple[float, bool]:
    """As `parse_logprobs` of its `local-completions` reads an answer."""
    logprobs = choice["logprobs"]
    end = len(logprobs["tokens"]) - max_tokens
    own = logprobs["token_logprobs"][num_context:end]
    tops = logprobs["top_logprobs"][num_context:end]
    return sum(own), all(value == max(top.values()) for value, top in zip(own, tops, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("model", ["small", "large", "auto"])
@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
def test_loglikelihoods_are_transformers(
    served: Gateway, model: str, max_tokens: int, as_ids: bool
) -> None:
    num_greedy = 0
    for context, continuations in ITEMS:
        texts = [context + continuation for continuation in continuations]
        body = {
            "model": model,
            "prompt": [encoded(text) for text in texts] if as_ids else texts,
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        response = served.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["usage"]["prompt_tokens"] == sum(len(encoded(text)) for text in texts)
        tier = answer["outrider"]["tier"]
        assert model in (tier, "auto")
        for text, continuation, choice in zip(texts, continuations, answer["choices"], strict=True):
            assert len(choice["logprobs"]["tokens"]) == len(encoded(text)) + max_tokens
            assert choice["text"].startswith(text)
            likelihood, is_greedy = likelihoods(tier, context, continuation)
            found = parsed(choice, len(encoded(context)), max_tokens)
            assert found[0] == pytest.approx(likelihood, abs=NEAR)
            assert found[1] == is_greedy
            num_greedy += is_greedy
    assert num_greedy, "a case in which the continuation is greedy"


@pytest.mark.slow
def test_the_shape_is_that_of_openais_legacy_completions(served: Gateway) -> None:
    text = "What is 48 + 37? Answer: 85"
    body = {"model": "large", "prompt": text, "max_tokens": 4, "temperature": 0, "echo": True}
    answer = served.http.post("/v1/completions", json={**body, "logprobs": 3}).json()
    (choice,) = answer["choices"]
    lists = choice["logprobs"]
    assert len({len(lists[name]) for name in lists}) == 1
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in lists["token_logprobs"][1:])
    assert all(3 <= len(top) <= 4 for top in lists["top_logprobs"][1:])
    for token, own, top in list(zip(*(lists[n] for n in list(lists)[:3]), strict=True))[1:]:
        assert top[token] == own, "the token itself is among them"
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token) or token.startswith("<|")
    plain = served.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (choice["text"], None)
    unechoed = served.http.post("/v1/completions", json={**body, "echo": False}).json()
    assert text + unechoed["choices"][0]["text"] == choice["text"]


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_streams_chunks_join_to_the_whole_answer(served: Gateway, max_tokens: int) -> None:
    body = {
        "model": "large", "prompt": "One, two, three", "max_tokens": max_tokens, "temperature": 0,
        "echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True,
    }  # fmt: skip
    whole = served.http.post("/v1/completions", json=body).json()["choices"][0]
    streamed = served.http.post("/v1/completions", json={**body, "stream": True}).text
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.splitlines()
        if line.startswith("data: {")
    ]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [i for part in parts for i in part.get("token_ids", ())] == whole["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert _near(parts[0]["prompt_logprobs"]) == _near(whole["prompt_logprobs"])
    for name in ("tokens", "text_offset"):
        found = [value for part in parts for value in (part["logprobs"] or {}).get(name, ())]
        assert found == whole["logprobs"][name]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]


def _near(found: list[Any]) -> list[Any]:
    return [
        entry and {token: (round(of["logprob"], 3), of["rank"]) for token, of in entry.items()}
        for entry in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_prompt_logprobs_and_ids_stand_where_vllm_has_them(served: Gateway, path: str) -> None:
    text = "How many legs has a cat?"
    asked: dict[str, Any] = (
        {"prompt": text}
        if path == "completions"
        else {"messages": [{"role": "user", "content": text}]}
    )
    body = {
        "model": "small", "max_tokens": 6, "temperature": 0, "prompt_logprobs": 2,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
        "logprobs": 1 if path == "completions" else True, **asked,
    }  # fmt: skip
    answer = served.http.post(f"/v1/{path}", json=body).json()
    (choice,) = answer["choices"]
    of_prompt = choice if path == "completions" else answer
    ids = of_prompt["prompt_token_ids"]
    assert len(ids) == answer["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    rows = forced_logits(shipped_pair().small_reference, [ids])[0][:-1].log_softmax(-1)
    first, *rest = of_prompt["prompt_logprobs"]
    assert first is None
    for token_id, entry, row in zip(ids[1:], rest, rows, strict=True):
        own = entry[str(token_id)]
        assert own["logprob"] == pytest.approx(float(row[token_id]), abs=NEAR)
        assert own["decoded_token"] == shipped_tokenizer().decode([token_id]) or token_id < 16
        best = row.topk(2).values.tolist()
        ranked = {told["rank"]: told["logprob"] for told in entry.values()}
        assert [ranked[1], ranked[2]] == pytest.approx(best, abs=NEAR)
    logprobs = choice["logprobs"]
    names = (
        logprobs["tokens"] if path == "completions" else [e["token"] for e in logprobs["content"]]
    )
    named = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert names == (named if path == "completions" else named[: len(names)])


@pytest.mark.slow
def test_an_escalated_answer_has_the_scores_of_the_model_that_answers() -> None:
    text = "Tell me a long story about my uncle and his boat."
    messages = [{"role": "user", "content": text}]
    with gateway({"routing.strong_share": 0.5}) as running:
        escalated = 0
        for threshold in (0.2, 0.5, 0.7, 0.9, 0.99):
            answer = running.http.post(
                "/v1/chat/completions",
                json={
                    "model": "auto", "messages": messages, "max_tokens": 12, "temperature": 0,
                    "prompt_logprobs": 0, "return_token_ids": True,
                    "outrider": {"threshold": threshold},
                },
            ).json()  # fmt: skip
            report, ids = answer["outrider"], answer["prompt_token_ids"]
            escalated += report["escalated"]
            pair = shipped_pair()
            large = report["tier"] == "large"
            reference = pair.large_reference if large else pair.small_reference
            rows = forced_logits(reference, [ids])[0][:-1].log_softmax(-1)
            for token_id, entry, row in zip(
                ids[1:], answer["prompt_logprobs"][1:], rows, strict=True
            ):
                own = entry[str(token_id)]["logprob"]
                assert own == pytest.approx(float(row[token_id]), abs=NEAR)
        assert 0 < escalated < 5, "some are, and some are not"
        nothing = {"model": "auto", "messages": messages, "max_tokens": 0}
        report = running.http.post("/v1/chat/completions", json=nothing).json()["outrider"]
        assert report["confidence"] is None, "nothing was written that could be judged"


@pytest.mark.slow
def test_equal_fingerprints_go_with_the_model(served: Gateway) -> None:
    def print_of(model: str, **more: Any) -> str:
        body = {"model": model, "prompt": "Hello", "max_tokens": 2, **more}
        found: str = served.http.post("/v1/completions", json=body).json()["system_fingerprint"]
        return found

    assert print_of("large") == print_of("large", temperature=0)
    assert print_of("large") != print_of("small")
