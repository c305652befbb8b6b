"""Token ids to text, as they arrive: no character is ever split and no token is decoded twice.

A token's bytes never depend on its neighbours in the two schemes that Llama-family checkpoints use:
byte-level BPE (each character of the vocabulary stands for one byte) and sentencepiece (`▁` for
space, `<0xE2>` for a byte). So the bytes are looked up in a table and run through one incremental
UTF-8 decoder: linear, and equal to `tokenizer.decode` of the whole sequence. Other schemes are
decoded in a sliding window.

One difference on purpose: where byte tokens of a sentencepiece vocabulary break UTF-8 midway,
`tokenizer.decode` also destroys the valid characters before them; here they were already sent.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from encodings.utf_8 import IncrementalDecoder
from typing import TYPE_CHECKING, Any, Final, Protocol

from outrider.draft.text.vocabulary import decoder_steps, vocabulary_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBE: Final = "Hello,  world!\n\tfn(x) = 'é' 漢字 🙂 don't"
_WINDOW_TOKENS: Final = 16


class Detokenizer(Protocol):
    """The text of one token sequence, piece by piece."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete together."""

    def flush(self) -> str:
        """Return the rest at the end: a replacement character for an incomplete one."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The bytes of each token id; special tokens and ids without a token have none."""

    token_bytes: tuple[bytes, ...]
    max_leading_spaces: int = 0
    """Spaces that the tokenizer (sentencepiece) put at the start of the first token; they are not
    text."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for unknown ids (padding of the embedding)."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def decode(self, token_ids: list[int]) -> str:
        """Decode a whole sequence."""
        detokenizer = TableDetokenizer(self)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


class TableDetokenizer:
    """Looks each token's bytes up and decodes them incrementally.

    `after`: the tokens of the text that goes on. Only where they have no text is the first token's
    leading space the tokenizer's own.
    """

    def __init__(self, table: TokenTable, after: Sequence[int] = ()) -> None:
        self._token_bytes = table.token_bytes
        self._num_tokens = len(table.token_bytes)
        self._decoder = IncrementalDecoder(errors="replace")
        goes_on = any(map(table.bytes_of, reversed(after)))
        self._spaces_to_drop = 0 if goes_on else table.max_leading_spaces

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        if token_id >= self._num_tokens:
            return ""
        token_bytes = self._token_bytes[token_id]
        if self._spaces_to_drop and token_bytes:
            num_spaces = len(token_bytes) - len(token_bytes.lstrip(b" "))
            token_bytes = token_bytes[min(num_spaces, self._spaces_to_drop) :]
            self._spaces_to_drop = 0
        return self._decoder.decode(token_bytes)

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete together."""
        if self._spaces_to_drop:
            return "".join(map(self.push, token_ids))
        found, most = self._token_bytes, self._num_tokens
        joined = b"".join([found[i] for i in token_ids if i < most])
        if joined.isascii() and not self._decoder.buffer:  # by far the most steps
            return joined.decode()
        return self._decoder.decode(joined)

    def flush(self) -> str:
        """Return the rest at the end: a replacement character for an incomplete one."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes the last few tokens with and without the new one; the difference is its text.

    For decoders that look at neighbours. Text that ends in U+FFFD is held back until it is whole,
    but never longer than the window. So the cost of a token is bounded. `after`: the tokens of the
    text that goes on.
    """

    def __init__(self, tokenizer: "Tokenizer", after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(after[-_WINDOW_TOKENS:])
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < _WINDOW_TOKENS:
            return ""
        return self._release(text)

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete together."""
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Return the rest at the end: a replacement character for an incomplete one."""
        return self._release(self._pending_text())

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _release(self, text: str) -> str:
        if self._pending and text:
            self._context = self._pending
            self._pending = []
        return text


def build_table(tokenizer: "Tokenizer") -> TokenTable | None:
    """Build the table of a byte-level or sentencepiece tokenizer; None for any other scheme.

    A table that disagrees with the tokenizer on a probe text is not used either.
    """
    token_bytes = vocabulary_bytes(tokenizer)
    if token_bytes is None:
        return None
    steps = decoder_steps(tokenizer)
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    max_leading_spaces = 0 if is_byte_level else _max_leading_spaces(steps)
    table = TokenTable(tuple(token_bytes), max_leading_spaces)
    probe = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    return table if table.decode(probe) == tokenizer.decode(probe) else None


def _max_leading_spaces(steps: list[dict[str, Any]]) -> int:
    """Count the spaces that decoding drops from the first token, as encoding had added them."""
    for step in steps:
        if step["type"] == "Strip" and step["content"] == " ":
            return int(step["start"])
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return sys.maxsize
    return 0
