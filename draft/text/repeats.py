"""Looks up repeated text: in the compiled library where it was built, else in Python."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

from outrider.draft.text import compiled_repeats
from outrider.draft.text.compiled_repeats import CompiledIndex, CompiledRepeats
from outrider.draft.text.suffix_index import Repeats, SuffixIndex
from outrider.draft.trees.guess import Guess
from outrider.kernels.cpu.text_library import text_library

AnyIndex: TypeAlias = SuffixIndex | CompiledIndex
AnyRepeats: TypeAlias = Repeats | CompiledRepeats
Memories: TypeAlias = tuple[Any, ...]
"""Texts of the kind that `new_index` returns."""


def new_index() -> AnyIndex:
    """Return a text without a token, in which others may look."""
    library = text_library()
    return SuffixIndex() if library is None else CompiledIndex(library)


def new_repeats() -> AnyRepeats:
    """Return a text without a token, for which there are looks."""
    library = text_library()
    return Repeats() if library is None else CompiledRepeats.begin(library)


def look_all(
    texts: Sequence[AnyRepeats],
    new_token_ids: Sequence[Sequence[int]],
    memories: Sequence[Memories],
    depths: Sequence[int],
    max_branches: int,
) -> list[list[Guess]]:
    """Return what follows each text's end where it stood before, once its new tokens are there.

    At most `max_branches` chains of each, as deep as `depths` says, likeliest first. `memories`:
    other texts to look through, the latest first.
    """
    if _are_compiled(texts):
        return compiled_repeats.look_all(texts, new_token_ids, memories, depths, max_branches)
    found: list[list[Guess]] = []
    for text, new, others, depth in zip(texts, new_token_ids, memories, depths, strict=True):
        assert isinstance(text, Repeats)
        text.index.extend(new)
        found.append(text.chains(others, max_depth=depth, max_branches=max_branches))
    return found


def is_any_sure(
    texts: Sequence[AnyRepeats],
    new_token_ids: Sequence[Sequence[int]],
    memories: Sequence[Memories],
) -> bool:
    """True if it is hardly chance how one of the texts goes on, once its new tokens are there."""
    if _are_compiled(texts):
        return compiled_repeats.is_any_sure(texts, new_token_ids, memories)
    is_sure = False
    for text, new, others in zip(texts, new_token_ids, memories, strict=True):
        assert isinstance(text, Repeats)
        text.index.extend(new)
        is_sure = is_sure or text.is_sure(others)
    return is_sure


def _are_compiled(texts: Sequence[AnyRepeats]) -> TypeGuard[Sequence[CompiledRepeats]]:
    return bool(texts) and isinstance(texts[0], CompiledRepeats)
