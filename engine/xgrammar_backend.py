"""xgrammar as the engine's grammar compiler: the one module that imports it, and only when used."""

import codecs
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import InvalidGrammarError, TokenGrammar
from engine.json_pattern import exact, json_string_rules
from engine.json_schema import marker, prepare_schema
from engine.request import GrammarSpec

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

MAX_WHITESPACE_CHARS: Final = 8
"""Between two tokens of a JSON answer. Without a bound a weak model writes spaces to the end."""

_MAX_CACHED: Final = 128
_MAX_CACHED_BYTES: Final = 256 * 2**20
_NUM_THREADS: Final = 2
_NO_TEXT: Final = b"\xff"
_CONTINUATION_BYTES: Final = bytes(range(0x80, 0xC0))
# xgrammar's messages begin with a time stamp and the place in its source.
_ORIGIN: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: (Check failed: \(.*?\) is false: )?")


class XGrammarCompiler:
    """Compiles for one vocabulary, in threads of its own; xgrammar lets go of the GIL meanwhile.

    What was compiled is kept, least recently used last, up to a number and a size. A request that
    asks for what is being compiled gets the same future.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], *, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        """`token_bytes`: each token's text, b"" for special ones; `vocab_size`: the model's.

        No grammar allows a token without text, except the stop tokens at the end of an answer.
        Raises ValueError without stop tokens: an answer could not end.
        """
        import xgrammar

        stops = [token_id for token_id in stop_token_ids if token_id < vocab_size]
        if not stops:
            raise ValueError("a grammar needs a stop token to end an answer")
        padded = [b""] * vocab_size
        padded[: min(vocab_size, len(token_bytes))] = token_bytes[:vocab_size]
        for token_id in stops:
            padded[token_id] = b""
        # In no text, but not empty: structural tags name special tokens by their ids.
        padded = [
            text if i in stops or (text and _may_be_utf8(text)) else _NO_TEXT
            for i, text in enumerate(padded)
        ]
        self._utf8 = _Utf8(padded)
        info = xgrammar.TokenizerInfo(
            padded, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stops
        )
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(stops)
        # Its own cache would keep everything; ours below knows what was used last.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._cache: OrderedDict[GrammarSpec, Future[TokenGrammar]] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> "Future[TokenGrammar]":
        """Start compiling or find it in the cache. To be called from one thread.

        The future raises InvalidGrammarError with xgrammar's reason.
        """
        future = self._cache.get(spec)
        if future is None:
            future = self._pool.submit(self._compile, spec)
            self._cache[spec] = future
            self._shrink()
        self._cache.move_to_end(spec)
        return future

    def _shrink(self) -> None:
        """Forget what was used longest ago, but nothing that is being compiled."""
        sizes = {spec: _size_bytes(future) for spec, future in self._cache.items()}
        total_bytes = sum(sizes.values())
        for spec, size_bytes in sizes.items():
            if len(self._cache) <= _MAX_CACHED and total_bytes <= _MAX_CACHED_BYTES:
                return
            if self._cache[spec].done():
                del self._cache[spec]
                total_bytes -= size_bytes

    def _compile(self, spec: GrammarSpec) -> TokenGrammar:
        try:
            compiled = self._compile_kind(spec)
        except InvalidGrammarError:
            raise
        except RuntimeError as error:  # what xgrammar has to say
            raise InvalidGrammarError(_reason(error)) from error
        except Exception as error:  # a text from a client must never end more than its request
            log.warning(
                "grammar could not be read kind=%s error=%s", spec.kind, type(error).__name__
            )
            raise InvalidGrammarError(_reason(error)) from error
        grammar = XGrammar(
            compiled,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            utf8=self._utf8,
        )
        mask = np.full(-(-self.vocab_size // 32), -1, dtype=np.int32)
        grammar.matcher().fill_mask(mask)
        if not _has_bits(mask, self.vocab_size).any():
            raise InvalidGrammarError("no text conforms to it")
        return grammar

    def _compile_kind(self, spec: GrammarSpec) -> "xgrammar.CompiledGrammar":
        from xgrammar import Grammar

        patterns: list[str] = []
        match spec.kind:
            case "json":
                grammar = _schema_grammar({"type": "object"})
            case "json_schema":
                grammar = _schema_grammar(prepare_schema(_load(spec.text), patterns))
            case "regex":
                grammar = Grammar.from_regex(spec.text)
            case "choice":
                grammar = Grammar.from_ebnf(_choice_grammar(_load(spec.text)))
            case "ebnf":
                grammar = Grammar.from_ebnf(spec.text)
            case "structural_tag":
                tag = _prepare_tag(_load(spec.text), patterns)
                # Names of special tokens are looked up in the vocabulary, so not without it.
                if not patterns:
                    return self._compiler.compile_structural_tag(json.dumps(tag))
                grammar = Grammar.from_structural_tag(tag)
        return self._compiler.compile_grammar(_with_patterns(grammar, patterns))


def _schema_grammar(schema: Any) -> "xgrammar.Grammar":
    from xgrammar import Grammar

    return Grammar.from_json_schema(
        json.dumps(schema), any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE_CHARS
    )


def _with_patterns(grammar: "xgrammar.Grammar", patterns: Sequence[str]) -> "xgrammar.Grammar":
    """The grammar of a prepared schema, with rules of its own for each pattern."""
    from xgrammar import Grammar

    if not patterns:
        return grammar
    rules = exact(str(grammar))
    for number, pattern in enumerate(patterns):
        name = f"outrider_pattern_{number}"
        rules = rules.replace(f'Regex("{marker(number)}", json_string=true)', name)
        rules += json_string_rules(str(Grammar.from_regex(pattern)), name)
    return Grammar.from_ebnf(rules)


class XGrammar:
    """A compiled grammar; see `TokenGrammar`."""

    def __init__(
        self,
        compiled: "xgrammar.CompiledGrammar",
        *,
        vocab_size: int,
        stop_token_ids: tuple[int, ...],
        utf8: "_Utf8",
    ) -> None:
        self._utf8 = utf8
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.size_bytes: int = compiled.memory_size_bytes
        self._compiled = compiled

    def matcher(self) -> "XGrammarMatcher":
        """A matcher at the beginning of an answer; it can roll back any number of tokens."""
        import xgrammar

        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._utf8)

    def mask_logits(self, logits: Tensor, masks: NDArray[np.int32]) -> None:
        """Set logits of tokens whose bit is 0 to -inf; see `TokenGrammar`."""
        width = min(logits.shape[1], self.vocab_size)
        if logits.device.type == "cpu" and logits.is_contiguous():
            import xgrammar

            xgrammar.apply_token_bitmask_inplace(
                logits, torch.from_numpy(masks), vocab_size=width, backend="cpu"
            )
            return
        words = torch.from_numpy(masks).to(logits.device)  # [num_rows, num_words]
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (words[:, :, None] >> bits & 1).view(len(masks), -1)[:, :width]
        logits[:, :width].masked_fill_(allowed == 0, -torch.inf)


class XGrammarMatcher:
    """A place in a grammar; see `TokenMatcher`."""

    def __init__(self, matcher: "xgrammar.GrammarMatcher", utf8: "_Utf8") -> None:
        self._matcher = matcher
        self._utf8 = utf8
        self._token_ids: list[int] = []

    def accept(self, token_id: int) -> bool:
        """Go one token on, if the grammar allows it."""
        accepted: bool = self._matcher.accept_token(token_id)
        if accepted:
            self._token_ids.append(token_id)
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        self._matcher.rollback(num_tokens)
        del self._token_ids[len(self._token_ids) - num_tokens :]

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may follow; bits beyond the vocabulary are undefined."""
        self._matcher.fill_next_token_bitmask(mask)
        if self._token_ids:
            self._utf8.restrict(mask, self._token_ids[-1])


class _Utf8:
    """Which tokens go on with a character that the token before has begun.

    xgrammar takes any continuation byte after any first byte of a character, so also overlong
    forms, surrogates and what lies beyond U+10FFFF. A reader would see replacement characters,
    of another number than the grammar counted. After four first bytes the second is restricted
    (RFC 3629, section 4); everywhere else a byte's class is enough.
    """

    _SECOND_BYTES: Final = {
        0xE0: range(0xA0, 0xC0),
        0xED: range(0x80, 0xA0),
        0xF0: range(0x90, 0xC0),
        0xF4: range(0x80, 0x90),
    }

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._last_bytes = [text[-1] if text else 0 for text in token_bytes]
        self._masks: dict[int, NDArray[np.int32]] = {}
        num_words = -(-len(token_bytes) // 32)
        for first, seconds in self._SECOND_BYTES.items():
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[[i for i, text in enumerate(token_bytes) if text and text[0] in seconds]] = 1
            self._masks[first] = np.packbits(bits, bitorder="little").view(np.int32)

    def restrict(self, mask: NDArray[np.int32], last_token_id: int) -> None:
        """Take out of the mask what would break a character."""
        allowed = self._masks.get(self._last_bytes[last_token_id])
        if allowed is not None:
            mask &= allowed


def _may_be_utf8(text: bytes) -> bool:
    """Whether bytes may stand in well-formed UTF-8; characters may be cut at both ends."""
    num_continuing = len(text) - len(text.lstrip(_CONTINUATION_BYTES))
    if num_continuing > 3:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text[num_continuing:])
    except UnicodeDecodeError:
        return False
    return True


def _has_bits(mask: NDArray[np.int32], vocab_size: int) -> NDArray[np.uint8]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size)


def _size_bytes(future: "Future[TokenGrammar]") -> int:
    if not future.done() or future.exception() is not None:
        return 0
    return int(getattr(future.result(), "size_bytes", 0))


def _reason(error: BaseException) -> str:
    """xgrammar's own words without the place in its source."""
    return _ORIGIN.sub("", str(error)).strip() or "it cannot be compiled"


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidGrammarError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise InvalidGrammarError(f"it is not valid JSON: {error}") from error


def _choice_grammar(choices: Any) -> str:
    """A grammar in xgrammar's notation that allows exactly these texts."""
    if not isinstance(choices, list) or not choices:
        raise InvalidGrammarError("choice must be a list with at least one text")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidGrammarError("each choice must be a text with at least one character")
    return "root ::= " + " | ".join(_literal(choice) for choice in dict.fromkeys(choices))


def _literal(text: str) -> str:
    """A string literal of xgrammar's notation, every character escaped."""
    return '"' + "".join(f"\\U{ord(char):08x}" for char in text) + '"'


def _prepare_tag(tag: Any, patterns: list[str]) -> Any:
    """Check and complete the JSON schemas inside a structural tag, and bound their white space."""
    if isinstance(tag, list):
        return [_prepare_tag(item, patterns) for item in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        schema = prepare_schema(tag["json_schema"], patterns)
        return {"max_whitespace_cnt": MAX_WHITESPACE_CHARS, **tag, "json_schema": schema}
    return {name: _prepare_tag(value, patterns) for name, value in tag.items()}
