"""A text that goes on keeps its spaces: prompt and answer together are what their tokens say."""

from collections.abc import Iterator

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import CORPUS, Server, scripted_server

SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}[INST] {{ message.content }} [/INST]
{%- else %} {{ message.content }} </s>{%- endif -%}
{%- endfor -%}
"""
BEGINNING = "The quick brown"
QUESTION = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": BEGINNING}


def llama_2() -> Tokenizer:
    """SentencePiece in the form of Llama 2: encoding prepends a space, decoding strips one."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([text.replace(" ", "▁") for text in CORPUS * 20], trainer)
    return backend


def word_piece() -> Tokenizer:
    """A scheme in which a token's text depends on the token before it."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=420, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend


@pytest.fixture(scope="module", params=[llama_2, word_piece])
def running_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    backend: Tokenizer = request.param()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    fast.chat_template = TEMPLATE

    def encode(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    with scripted_server(ChatTokenizer(fast), encode) as server:
        yield server


def completed(http: httpx.Client, prompt: object) -> str:
    answer = http.post("/v1/completions", json={"model": "large", "prompt": prompt})
    return str(answer.json()["choices"][0]["text"])


def chatted(http: httpx.Client, *messages: object, **fields: object) -> str:
    body = {"model": "large", "messages": messages, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.slow_cases
def test_a_completion_goes_on_behind_its_prompt(server: Server, http: httpx.Client) -> None:
    server.says("fox jumps")
    assert completed(http, BEGINNING) == " fox jumps"
    assert completed(http, server.encode(BEGINNING)) == " fox jumps"
    assert completed(http, [BEGINNING, BEGINNING]) == " fox jumps"


def test_an_answer_to_no_text_begins_one(server: Server, http: httpx.Client) -> None:
    """Special tokens have no text: the space that the tokenizer added is no text either."""
    server.says("fox jumps")
    assert completed(http, [1]) == "fox jumps"
    assert chatted(http, QUESTION) == "fox jumps"


def test_a_message_goes_on(server: Server, http: httpx.Client) -> None:
    server.says("fox jumps", group=2)
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert chatted(http, QUESTION, ANSWER, **go_on) == " fox jumps"
    body = {"model": "large", "max_tokens": 9, "messages": [QUESTION, ANSWER]}
    (block,) = http.post("/v1/messages", json=body).json()["content"]
    assert block["text"] == " fox jumps"
