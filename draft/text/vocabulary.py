"""Compares two tokenizers: the bytes of each token, and where vocabularies differ.

Free of torch, because the gateway's own process compares vocabularies too.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token that is one byte, as sentencepiece vocabularies write it."""


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table from printable characters to bytes (`Ġ` is 0x20)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def decoder_steps(tokenizer: "Tokenizer") -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder, as tokenizer.json describes them."""
    decoder: dict[str, Any] = json.loads(tokenizer.to_str())["decoder"] or {}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def vocabulary_bytes(tokenizer: "Tokenizer") -> list[bytes] | None:
    """The bytes of each token id; special tokens and ids without a token have none (b"").

    Only for the two schemes in which a token's bytes do not depend on its neighbours: byte-level
    BPE (each character of the vocabulary stands for one byte) and sentencepiece (`▁` for space,
    `<0xE2>` for a byte). None for any other.
    """
    kinds = {step.get("type") for step in decoder_steps(tokenizer)}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def encode(token: str) -> bytes:
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode()

    elif kinds & {"ByteFallback", "Metaspace"}:

        def encode(token: str) -> bytes:
            found = BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
            if found:
                return bytes([int(found[1], 16)])
            return token.replace("▁", " ").encode()

    else:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    token_bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id not in special:
            token_bytes[token_id] = encode(token)
    return token_bytes


def describe_difference(large: Mapping[str, int], small: Mapping[str, int]) -> str | None:
    """Describe in a sentence how two vocabularies (token to id) differ; None when they do not."""
    if large == small:
        return None
    num_equal = sum(small.get(token) == token_id for token, token_id in large.items())
    sizes = f"the large model's has {len(large):,} tokens, the small one's {len(small):,}"
    shared = f"{num_equal:,} of them have the same id in both"
    return f"{sizes}, and {shared}; {_first_difference(large, small)}"


def _first_difference(large: Mapping[str, int], small: Mapping[str, int]) -> str:
    """The difference at the lowest id, named."""
    for token, token_id in sorted(large.items(), key=lambda item: item[1]):
        if token not in small:
            return f"{token!r} (id {token_id}) is missing in the small one's"
        if small[token] != token_id:
            return f"{token!r} has the id {token_id} in one and {small[token]} in the other"
    token = min(small.keys() - large.keys(), key=small.__getitem__)
    return f"{token!r} (id {small[token]}) is missing in the large one's"
