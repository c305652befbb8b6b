"""Texts that repeat, in the compiled library: `outrider.draft.text.suffix_index` is the reference.

A text takes some 50 bytes a token there. One call looks for what follows many.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from outrider.draft.trees.guess import Guess
from outrider.kernels.cpu.text_library import TextLibrary, TextLook


class CompiledIndex:
    """A growing text; see `SuffixIndex`. Its memory is the library's, and given back with it."""

    def __init__(self, library: TextLibrary) -> None:
        """Begin without a token. Raises MemoryError."""
        self._library = library
        self.address = library.begin()
        if not self.address:
            raise MemoryError("a text found no memory")

    def __del__(self) -> None:
        """Give the library's memory back."""
        if getattr(self, "address", None):
            self._library.end(self.address)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the current document."""
        tokens = array("i", token_ids)
        self._library.extend(self.address, len(tokens), tokens.buffer_info()[0])

    def end_document(self) -> None:
        """Note that the next token belongs to another text."""
        self._library.end_document(self.address)


class CompiledRepeats(TextLook):
    """A text that grows, and what followed its end where it stood before; see `Repeats`."""

    library: TextLibrary
    index: CompiledIndex
    memories: tuple[CompiledIndex, ...]

    @classmethod
    def begin(cls, library: TextLibrary) -> "CompiledRepeats":
        """Begin without a token. Raises MemoryError."""
        own = cls(num_indexes=1)
        own.library, own.index, own.memories = library, CompiledIndex(library), ()
        own.text = own.indexes[0] = own.index.address
        return own

    def look_in(self, memories: tuple[CompiledIndex, ...]) -> None:
        """Look in these texts as well from now on, the latest first."""
        self.memories = memories
        for number, memory in enumerate(memories, 1):
            self.indexes[number] = memory.address
        self.num_indexes = 1 + len(memories)


def look_all(
    texts: Sequence[CompiledRepeats],
    new_token_ids: Sequence[Sequence[int]],
    memories: Sequence[tuple[CompiledIndex, ...]],
    depths: Sequence[int],
    max_branches: int,
) -> list[list[Guess]]:
    """Return the chains of each text, once it has taken its new tokens in; see `Repeats.chains`."""
    for text, depth in zip(texts, depths, strict=True):
        text.max_depth = depth
    addresses, tokens = _asked(texts, new_token_ids, memories)
    most = max_branches * sum(depths)
    counts, lengths = _numbers("q", len(texts)), _numbers("q", max_branches * len(texts))
    chain_tokens, chances = _numbers("q", most), _numbers("d", most)
    texts[0].library.look(
        *(addresses.buffer_info()[0], len(texts), tokens.buffer_info()[0], max_branches),
        *(counts.buffer_info()[0], lengths.buffer_info()[0]),
        *(chain_tokens.buffer_info()[0], chances.buffer_info()[0]),
    )
    found: list[list[Guess]] = []
    number = start = 0
    for count in counts:
        chains: list[Guess] = []
        for length in lengths[number : number + count]:
            end = start + length
            chains.append(
                Guess(
                    token_ids=chain_tokens[start:end].tolist(),
                    edge_probs=chances[start:end].tolist(),
                )
            )
            start = end
        number += count
        found.append(chains)
    return found


def is_any_sure(
    texts: Sequence[CompiledRepeats],
    new_token_ids: Sequence[Sequence[int]],
    memories: Sequence[tuple[CompiledIndex, ...]],
) -> bool:
    """True if it is hardly chance how one of the texts goes on, once its new tokens are there."""
    addresses, tokens = _asked(texts, new_token_ids, memories)
    asked = addresses.buffer_info()[0], len(texts), tokens.buffer_info()[0]
    return bool(texts[0].library.is_sure(*asked))


def _asked(
    texts: Sequence[CompiledRepeats],
    new_token_ids: Sequence[Sequence[int]],
    memories: Sequence[tuple[CompiledIndex, ...]],
) -> tuple["array[int]", "array[int]"]:
    """Return the addresses of looks, and their texts' new tokens, one behind the other."""
    tokens = array("i")
    for text, new, others in zip(texts, new_token_ids, memories, strict=True):
        text.num_new = len(new)
        tokens.extend(new)
        if others is not text.memories:
            text.look_in(others)
    return array("Q", map(ctypes.addressof, texts)), tokens


def _numbers(code: str, count: int) -> Any:
    return array(code, bytes(8 * count))
