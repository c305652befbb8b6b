"""Incremental detokenising against the tokenizers library's own decoding of the whole sequence."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.gateway.answering.text.detokenizer import (
    TableDetokenizer,
    TokenTable,
    WindowDetokenizer,
    build_table,
)
from tests.gateway.conftest import CORPUS

VOCABULARY = 420


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """A Llama-2-like vocabulary: `▁` for space, a token for each byte, few characters."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "▁▁▁", "▁Hello", "Hello", "▁fox", "fox", "é", "漢", "!", "▁world"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", *byte_tokens, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoder
    return tokenizer


LLAMA_2 = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1),
    ]
)
METASPACE = decoders.Metaspace(prepend_scheme="first")


def table_of(tokenizer: Tokenizer) -> TokenTable:
    table = build_table(tokenizer)
    assert table is not None
    return table


@pytest.fixture(scope="module")
def byte_level(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_table(byte_level: Tokenizer) -> TokenTable:
    return table_of(byte_level)


def pieces(push: Callable[[str], str], ids: list[int]) -> list[str]:
    return [push(i) for i in ids]


@given(ids=st.lists(st.integers(0, VOCABULARY + 5), max_size=60))
def test_any_byte_level_sequence(
    byte_level: Tokenizer, byte_table: TokenTable, ids: list[int]
) -> None:
    """Also invalid UTF-8, special tokens, and ids beyond the vocabulary."""
    detokenizer = TableDetokenizer(byte_table)
    parts = [detokenizer.push(i) for i in ids]
    assert "".join(parts) + detokenizer.flush() == byte_level.decode(ids)


@given(text=st.text(max_size=40))
def test_no_character_is_split(byte_level: Tokenizer, byte_table: TokenTable, text: str) -> None:
    """Of valid text, every prefix that is released is a prefix of the text."""
    detokenizer = TableDetokenizer(byte_table)
    sent = ""
    for token_id in byte_level.encode(text).ids:
        sent += detokenizer.push(token_id)
        assert text.startswith(sent)
    assert sent + detokenizer.flush() == text


def test_an_emoji_arrives_whole(byte_level: Tokenizer, byte_table: TokenTable) -> None:
    ids = byte_level.encode("a😀b").ids
    assert len(ids) > 3
    detokenizer = TableDetokenizer(byte_table)
    assert [text for text in map(detokenizer.push, ids) if text] == ["a", "😀", "b"]


def test_half_a_character_at_the_end_becomes_a_replacement(
    byte_level: Tokenizer, byte_table: TokenTable
) -> None:
    ids = byte_level.encode("a😀").ids[:-1]
    detokenizer = TableDetokenizer(byte_table)
    assert "".join(map(detokenizer.push, ids)) == "a"
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("decoder", [LLAMA_2, METASPACE], ids=["llama_2", "metaspace"])
@given(data=st.data())
def test_any_sentencepiece_sequence(decoder: decoders.Decoder, data: st.DataObject) -> None:
    """Byte tokens come as whole characters here; broken ones are a documented difference."""
    tokenizer = sentencepiece(decoder)
    table = table_of(tokenizer)
    words = range(258, tokenizer.get_vocab_size())
    word = st.sampled_from(words).map(lambda i: [i])
    char = st.characters(exclude_categories=["Cs"]).map(lambda c: [2 + b for b in c.encode()])
    units = st.one_of(word, char, st.just([1])) if decoder is LLAMA_2 else word
    ids = list(chain(*data.draw(st.lists(units, max_size=15))))
    detokenizer = TableDetokenizer(table)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


def test_sentencepiece_keeps_inner_spaces() -> None:
    tokenizer = sentencepiece(LLAMA_2)
    ids = [tokenizer.token_to_id(token) for token in ("▁Hello", "▁world", "▁▁▁", "fox")]
    detokenizer = TableDetokenizer(table_of(tokenizer))
    assert list(map(detokenizer.push, ids)) == ["Hello", " world", "   ", "fox"]


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return tokenizer


def test_other_schemes_are_decoded_in_a_window() -> None:
    tokenizer = word_piece()
    assert build_table(tokenizer) is None
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog").ids * 5
    detokenizer = WindowDetokenizer(tokenizer)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=30))
def test_the_window_never_loses_a_token_for_good(byte_level: Tokenizer, ids: list[int]) -> None:
    """On a byte-level tokenizer, which it is not made for, valid text still comes through."""
    text = "".join(c for c in byte_level.decode(ids) if c != "\ufffd")
    clean = byte_level.encode(text).ids
    detokenizer = WindowDetokenizer(byte_level)
    assert "".join(map(detokenizer.push, clean)) + detokenizer.flush() == text


def test_the_cost_is_linear(byte_table: TokenTable) -> None:
    """Pushing looks at one token: the work for a token does not grow with what came before."""
    lookups = 0

    class Counting(tuple[bytes, ...]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            nonlocal lookups
            lookups += 1
            return super().__getitem__(index)

    table = TokenTable(Counting(byte_table.token_bytes))
    detokenizer = TableDetokenizer(table)
    for _ in range(1000):
        detokenizer.push(70)
    assert lookups == 1000
