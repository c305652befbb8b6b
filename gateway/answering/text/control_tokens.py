"""Control tokens that a client spells in a text stay plain text, so that no client forges a role.

A template gets each one between two marks of Unicode's private use. In what it renders, a marked
token is text, and an unmarked one the template's own.
"""

import re
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from outrider.gateway.answering.text.template_language import written_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_START: Final = "\U000f0000"
_END: Final = "\U000f0001"


class ControlTokens:
    """Marks the control tokens in a conversation, and encodes what a template renders of it.

    They are the tokenizer's special tokens and those other added tokens that the template writes;
    whitespace is no control token.
    """

    def __init__(
        self,
        backend: "Tokenizer",
        template: str,
        named: Collection[str] | None = None,
        harmless: Collection[str] = (),
    ) -> None:
        """Find them. `named`: those that count beside special ones, in place of the template's.

        `harmless`: those that alone are no forgery. Raises jinja2.TemplateSyntaxError.
        """
        self._backend = backend
        self._plain: dict[str, list[int]] = {}
        added = [each for each in backend.get_added_tokens_decoder().values() if each.content]
        written = "" if named is not None else written_texts(template)
        found = [
            each
            for each in added
            if each.special
            or each.content in (named or ())
            or (each.content in written and not each.content.isspace())
        ]
        forging = [each for each in found if each.special or each.content not in harmless]
        self._forging = re.compile(_any_of(each.content for each in forging))
        self._control = re.compile(_any_of(each.content for each in found))
        every = _any_of(each.content for each in added)
        self._marked = re.compile(f"{_START}({every}){_END}|[{_START}{_END}]")
        self._normalized = [each.content for each in forging if each.normalized]

    def are_in(self, texts: Iterable[str]) -> bool:
        """Return whether some text spells a control token, apart from harmless ones."""
        return self._forging.search(_START.join(texts)) is not None

    def is_disguised_in(self, text: str) -> bool:
        """Return whether a text that spells no control token becomes one in the tokenizer.

        Some tokenizers normalize a text before they look for tokens in it: wide letters become
        plain ones. No mark can be put around such a token.
        """
        if not self._normalized or (normalizer := self._backend.normalizer) is None:
            return False
        tokens = re.compile(_any_of(map(normalizer.normalize_str, self._normalized)))
        pieces = map(normalizer.normalize_str, self._control.split(text))
        return any(map(tokens.search, pieces))

    def mark(self, value: Any) -> Any:
        """Return a JSON value with marks around the control tokens of its texts, but not of names.

        Marks that are in it already are left out, or a client could mark half a token.
        """
        if isinstance(value, str):
            text = value.replace(_START, "").replace(_END, "")
            return self._control.sub(f"{_START}\\g<0>{_END}", text)
        if isinstance(value, dict):
            return {name: self.mark(part) for name, part in value.items()}
        return [self.mark(part) for part in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, *, is_continued: bool = False) -> list[int]:
        """Encode a text that was rendered of marked values; `is_continued`: not at the beginning.

        Raises ValueError where the tokenizer makes a control token of plain text.
        """
        # Text, marked token, text, and so on. A template that cuts texts may leave a single mark,
        # which is left out and keeps what is on both sides from becoming one token.
        first, *others = self._marked.split(text)
        ids = self._continued(first, self._ids) if is_continued else self._ids(first)
        for index, piece in enumerate(others):
            if piece:
                is_marked = index % 2 == 0
                ids += self._plain_ids(piece) if is_marked else self._continued(piece, self._ids)
        return ids

    def _ids(self, text: str) -> list[int]:
        # A batch, unlike a single text, has no offsets and leaves the interpreter free.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    @cached_property
    def _newline(self) -> list[int]:
        return self._ids("\n")

    def _plain_ids(self, token: str) -> list[int]:
        """Encode the text of an added token as if there were no added tokens."""
        if token not in self._plain:
            ids = self._continued(token, self._split)
            if self._backend.token_to_id(token) in ids:
                raise ValueError(
                    f"{token!r} cannot be kept as text: the tokenizer makes it of text"
                )
            self._plain[token] = ids
        return self._plain[token]

    def _continued(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encode text that does not begin the prompt.

        Some tokenizers put a space in front of what they encode; behind a newline they do not.
        """
        ids, size = encode("\n" + piece), len(self._newline)
        return ids[size:] if ids[:size] == self._newline else encode(piece)

    def _split(self, text: str) -> list[int]:
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [text]
        if backend.pre_tokenizer is not None:
            pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in backend.model.tokenize(piece)]


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern of any of the texts, the longest first; of none for no text."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
