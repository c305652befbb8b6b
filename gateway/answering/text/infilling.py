"""Fill in the middle: the tokens that a model has for it, and the prompts made of them.

A model learns it from documents that are cut into prefix, suffix and middle, each behind a token of
its own. Which tokens these are is read from their texts, or from a GGUF file's metadata, as
llama.cpp does. In a client's texts such tokens stay plain text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from outrider.gateway.answering.text.control_tokens import ControlTokens
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.completions import ExtraFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    (
        "<\uff5cfim▁begin\uff5c>",
        "<\uff5cfim▁hole\uff5c>",
        "<\uff5cfim▁end\uff5c>",
    ),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1-Coder
)
_SUFFIX_FIRST: Final = ("[PREFIX]", "[SUFFIX]")  # Codestral, whose middle has no mark
_REPOSITORIES: Final = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>")
_FILES: Final = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_ENDS: Final = (
    *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "▁<EOT>"),
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
)
"""Tokens that end an infill beside those above: it would go on with another document."""
_UNNAMED: Final = "tmp"
_REPOSITORY_TEXT, _FILE_TEXT, _SNIPPET_TEXT = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"
"""What llama.cpp writes for names that its clients do not give, and where there is no token."""
_ROOM_FOR_ANSWER: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillTokens:
    """The ids of one model. Without a token for the middle the suffix comes first."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None = None
    file: int | None = None
    ends: tuple[int, ...] = ()
    """They end an infill, beside those that end any answer."""


def find_infill_tokens(backend: "Tokenizer", named: Mapping[str, int]) -> InfillTokens | None:
    """Return a tokenizer's tokens; None where it has none.

    `named`: ids that the checkpoint names itself, by the names of llama.cpp: `pre`, `suf`, `mid`,
    `pad`, `rep`, `sep`.
    """
    found = ((text, backend.token_to_id(text)) for text in _known_texts())
    ids = {text: each for text, each in found if each is not None}
    marks = _marks(ids, named)
    if marks is None:
        return None
    repository, file = (
        named.get(name, next((ids[text] for text in texts if text in ids), None))
        for name, texts in (("rep", _REPOSITORIES), ("sep", _FILES))
    )
    others = [ids[text] for text in _ENDS if text in ids]
    ends = (*marks, repository, file, named.get("pad"), *others)
    return InfillTokens(
        prefix=marks[0],
        suffix=marks[1],
        middle=marks[2],
        repository=repository,
        file=file,
        ends=tuple(dict.fromkeys(each for each in ends if each is not None)),
    )


def _known_texts() -> Iterable[str]:
    marks = [text for marks in _MARKS for text in marks]
    return (*marks, *_SUFFIX_FIRST, *_REPOSITORIES, *_FILES, *_ENDS)


def _marks(ids: Mapping[str, int], named: Mapping[str, int]) -> tuple[int, int, int | None] | None:
    if named.keys() >= {"pre", "suf", "mid"}:
        return named["pre"], named["suf"], named["mid"]
    for prefix, suffix, middle in _MARKS:
        if prefix in ids and suffix in ids and middle in ids:
            return ids[prefix], ids[suffix], ids[middle]
    if all(text in ids for text in _SUFFIX_FIRST):
        prefix, suffix = _SUFFIX_FIRST
        return ids[prefix], ids[suffix], None
    return None


class Infilling:
    """Writes a tokenizer's prompts for text in the middle."""

    def __init__(self, backend: "Tokenizer", tokens: InfillTokens, bos: int | None) -> None:
        """`bos`: the token that the tokenizer puts in front of a text, if it does."""
        self.tokens = tokens
        self._bos = () if bos is None else (bos,)
        known = (backend.id_to_token(each) for each in tokens.ends)
        self._control = ControlTokens(backend, "", [text for text in known if text])

    def token_ids(
        self,
        prefix: str | Sequence[int],
        suffix: str,
        files: Sequence[ExtraFile],
        most_tokens: int | None,
    ) -> tuple[int, ...]:
        """Return the prompt for the text between prefix and suffix.

        `files`: context; of what has no room in `most_tokens` the first is left out.
        """
        tokens = self.tokens
        before = self._plain(prefix) if isinstance(prefix, str) else list(prefix)
        after = self._plain(suffix, is_continued=True)
        if tokens.middle is None:
            cut = [tokens.suffix, *after, tokens.prefix, *before]
        else:
            cut = [tokens.prefix, *before, tokens.suffix, *after, tokens.middle]
        room = None if most_tokens is None else most_tokens - len(cut) - len(self._bos)
        return (*self._bos, *self._context(files, room), *cut)

    def _context(self, files: Sequence[ExtraFile], room: int | None) -> list[int]:
        """Write files in front of the one that is edited, as llama.cpp does."""
        if not files:
            return []
        end = self._named(self.tokens.file, _FILE_TEXT)
        begin = self._named(self.tokens.repository, _REPOSITORY_TEXT)
        written: list[int] = []
        left = None if room is None else room - len(end) - len(begin)
        for file in reversed(files):
            if left is not None and len(written) >= left:
                break  # what is left out costs nothing
            written = [*self._file(file), *written]
        if left is not None:
            written = written[len(written) - max(0, min(left, len(written))) :]
        return [*begin, *written, *end] if written else []

    def _file(self, file: ExtraFile) -> list[int]:
        text = self._plain(file.text, is_continued=True)
        if self.tokens.file is None:
            return [*self._plain(_SNIPPET_TEXT, is_continued=True), *text]
        return [*self._named(self.tokens.file, f"{file.filename or _UNNAMED}\n"), *text]

    def _named(self, token: int | None, text: str) -> list[int]:
        return [] if token is None else [token, *self._plain(text, is_continued=True)]

    def _plain(self, text: str, *, is_continued: bool = False) -> list[int]:
        """Encode a text whose control tokens are plain text."""
        return self._control.encode(self._control.mark(text), is_continued=is_continued)


def find_infilling(tokenizer: Any, named: Mapping[str, int]) -> Infilling | None:
    """Return what writes a tokenizer's prompts; None where it has no tokens for them."""
    backend = tokenizer.backend_tokenizer
    tokens = find_infill_tokens(backend, named)
    if tokens is None:
        return None
    (around,) = backend.encode_batch_fast(["a"], add_special_tokens=True)
    bos = tokenizer.bos_token_id
    return Infilling(backend, tokens, bos if bos in around.ids[:1] else None)


def no_infilling() -> BadRequestError:
    """Return the error of a model without tokens for it."""
    return BadRequestError(
        "suffix: the model has no tokens for filling in the middle, as code models do.",
        param="suffix",
    )


def room_for_prompt(max_context: int | None, max_tokens: int) -> int | None:
    """Return the most tokens that a prompt with files may have."""
    if max_context is None:
        return None
    return max(0, max_context - max(max_tokens, min(_ROOM_FOR_ANSWER, max_context // 4)))
