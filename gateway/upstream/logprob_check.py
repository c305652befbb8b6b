"""Do a server's log-probabilities belong to the text that it sends?"""

from collections.abc import Iterable
from typing import Final

from outrider.gateway.upstream.call import Chunk, TokenLogprob

# Marks of spaces and line ends in the vocabularies of servers that send pieces as they are stored.
_MARKS: Final = (("\u2581", " "), ("\u0120", " "), ("\u010a", "\n"))
_UNKNOWN: Final = "\ufffd".encode()


class LogprobCheck:
    """Compares the tokens of one answer with its text; both arrive in pieces.

    Either may be ahead. Text that cannot be compared (reasoning, calls of tools) ends the
    comparison, as the tokens then have marks that the text lacks.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens: list[bytes] = []
        self._is_comparable = True

    def add(self, chunk: Chunk) -> None:
        """Add one more part of the answer."""
        if chunk.reasoning or chunk.has_calls or chunk.num_other_bytes:
            self._is_comparable = False
        self.add_text(chunk.content, chunk.token_logprobs)

    def add_text(self, text: str, tokens: Iterable[TokenLogprob]) -> None:
        """Add text, and the tokens that came with it."""
        self._text.append(text)
        self._tokens.extend(entry.token for entry in tokens)

    @property
    def text(self) -> str:
        """Return the answer's text so far."""
        return "".join(self._text)

    def complaint(self) -> str | None:
        """Return why the log-probabilities cannot be trusted, in a few words; None if they can."""
        text = self.text.encode("utf-8", "surrogatepass").strip()
        if not self._tokens:
            return "there are none" if text or not self._is_comparable else None
        if not self._is_comparable:
            return None
        raw = b"".join(self._tokens)
        if any(_agrees(text, tokens) for tokens in (raw, _without_marks(raw))):
            return None
        return "they are for other tokens than the text"


def _agrees(text: bytes, tokens: bytes) -> bool:
    """Return whether the text is the beginning of the tokens; spaces around it are ignored.

    Behind an unknown character, a token cut within UTF-8, nothing is compared.
    """
    known, cut, _ = tokens.lstrip().partition(_UNKNOWN)
    return text.startswith(known) if cut else known.startswith(text)


def _without_marks(tokens: bytes) -> bytes:
    words = tokens.decode("utf-8", "replace")
    for mark, space in _MARKS:
        words = words.replace(mark, space)
    return words.encode()
