"""Two vocabularies and what they share, on small tokenizers made here."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.draft.text.token_map import SpecialTokens, TokenMap, VocabMismatchError
from outrider.draft.text.vocabulary import describe_difference, vocabulary_bytes

ENGLISH = (
    "the quick brown fox jumps over the lazy dog, and the other dog sleeps in the sun",
    "there is a house in the hills where the old fox lives with three brown dogs",
)
GERMAN = (
    "der schnelle braune Fuchs springt über den faulen Hund, und der andere Hund schläft",
    "es gibt ein Haus in den Bergen, in dem der alte Fuchs mit drei braunen Hunden wohnt",
)


def byte_level(texts: Iterable[str], special: str = "<|end|>", vocab_size: int = 330) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special, "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentencepiece(texts: Iterable[str]) -> Tokenizer:
    """As Llama 2 has it: `▁` for space, a token for each byte at the front."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer made the bytes special as well; in a real checkpoint they are plain vocabulary.
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(document))


def make_map(target: Tokenizer, draft: Tokenizer, padding: int = 0, **roles: Any) -> TokenMap:
    return TokenMap(
        target=target,
        draft=draft,
        target_vocab_size=target.get_vocab_size() + padding,
        draft_vocab_size=draft.get_vocab_size() + padding,
        **roles,
    )


@pytest.fixture(scope="module")
def english() -> Tokenizer:
    return byte_level(ENGLISH * 20)


@pytest.fixture(scope="module")
def german() -> Tokenizer:
    return byte_level(GERMAN * 20, special="</s>")


def test_one_vocabulary_maps_onto_itself(english: Tokenizer) -> None:
    mapped = make_map(english, english, padding=3)
    size = english.get_vocab_size()
    assert mapped.to_draft == [*range(size), 0, 0, 0]
    assert mapped.covered_share == 1.0
    logits = torch.randn(4, size + 3)
    found = mapped.logits_to_target(logits)
    assert torch.equal(found[:, :size], logits[:, :size])
    assert (found[:, size:] == -math.inf).all()


def test_tokens_of_the_same_bytes_are_paired_and_others_cannot_be_guessed(
    english: Tokenizer, german: Tokenizer
) -> None:
    mapped = make_map(english, german)
    english_bytes, german_bytes = vocabulary_bytes(english), vocabulary_bytes(german)
    assert english_bytes is not None
    assert german_bytes is not None
    logits = torch.randn(2, german.get_vocab_size())
    found = mapped.logits_to_target(logits)
    assert found.shape == (2, english.get_vocab_size())
    shared = set(german_bytes) - {b""}
    for target_id, token in enumerate(english_bytes):
        if token in shared:
            draft_id = mapped.to_draft[target_id]
            assert german_bytes[draft_id] == token
            assert torch.equal(found[:, target_id], logits[:, draft_id])
        elif token:
            assert (found[:, target_id] == -math.inf).all()
    # 256 single bytes and some merges, but not all of either
    assert 0.7 < mapped.covered_share < 1.0
    assert mapped.num_shared < english.get_vocab_size()


def test_a_token_that_the_drafter_lacks_becomes_its_last_piece(
    english: Tokenizer, german: Tokenizer
) -> None:
    mapped = make_map(english, german)
    target_id = english.token_to_id("Ġthe")
    assert german.token_to_id("Ġthe") is None
    pieces = german.encode(" the", add_special_tokens=False).ids
    assert len(pieces) > 1
    assert mapped.to_draft[target_id] == pieces[-1]
    assert mapped.ids_to_draft([target_id, english.token_to_id("a")]) == [
        pieces[-1],
        german.token_to_id("a"),
    ]


def test_names_pair_special_tokens_and_roles_pair_what_is_called_otherwise(
    english: Tokenizer, german: Tokenizer
) -> None:
    plain = make_map(english, german)
    assert plain.to_draft[english.token_to_id("<|user|>")] == german.token_to_id("<|user|>")
    ends = english.token_to_id("<|end|>"), german.token_to_id("</s>")
    logits = torch.zeros(1, german.get_vocab_size())
    logits[0, ends[1]] = 5.0
    assert plain.logits_to_target(logits)[0, ends[0]] == -math.inf
    mapped = make_map(
        english,
        german,
        target_special=SpecialTokens(eos=ends[0]),
        draft_special=SpecialTokens(eos=ends[1]),
    )
    assert mapped.to_draft[ends[0]] == ends[1]
    assert mapped.logits_to_target(logits)[0, ends[0]] == 5.0


def test_byte_level_and_sentencepiece_meet_in_their_bytes(english: Tokenizer) -> None:
    other = sentencepiece(ENGLISH * 20)
    mapped = make_map(english, other)
    assert mapped.to_draft[english.token_to_id("Ġthe")] == other.token_to_id("▁the")
    assert mapped.to_draft[english.token_to_id("Ġ")] == other.token_to_id("▁")
    # A letter is the letter's token, not the byte that stands in where there is none.
    assert mapped.to_draft[english.token_to_id("q")] == other.token_to_id("q")
    assert mapped.to_draft[english.token_to_id("Q")] == other.token_to_id("<0x51>")
    back = make_map(other, english)
    logits = torch.randn(1, english.get_vocab_size())
    found = back.logits_to_target(logits)
    letter = english.token_to_id("q")
    assert found[0, other.token_to_id("q")] == logits[0, letter]
    assert found[0, other.token_to_id("<0x71>")] == -math.inf  # the same guess only once
    assert back.to_draft[other.token_to_id("<0x71>")] == letter


def test_vocabularies_with_little_in_common_are_refused() -> None:
    def words(texts: list[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return tokenizer

    numbers = words([f"▁{number}" for number in range(100)])
    letters = words([f"▁x{number}" for number in range(95)] + [f"▁{n}" for n in range(5)])
    with pytest.raises(VocabMismatchError, match=r"5 tokens in common, 5\.0%.*at least 10%"):
        make_map(numbers, letters)


def test_a_scheme_whose_tokens_have_no_bytes_is_refused(english: Tokenizer) -> None:
    pieces = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    pieces.decoder = decoders.WordPiece()
    with pytest.raises(VocabMismatchError, match="the small model's is neither"):
        make_map(english, pieces)


def test_a_difference_is_described_by_its_first_token() -> None:
    large = {"a": 0, "b": 1, "c": 2}
    assert describe_difference(large, dict(large)) is None
    swapped = describe_difference(large, {"a": 0, "c": 1, "b": 2})
    assert swapped is not None
    assert "'b' has the id 1 in one and 2 in the other" in swapped
    assert "1 of them have the same id" in swapped
    shorter = describe_difference(large, {"a": 0, "b": 1})
    assert shorter is not None
    assert "'c' (id 2) is missing in the small one's" in shorter
    longer = describe_difference(large, large | {"d": 3})
    assert longer is not None
    assert "'d' (id 3) is missing in the large one's" in longer
