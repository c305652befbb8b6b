"""Messages to token ids: one tier's chat template and tokenizer."""

import asyncio
import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import jinja2

from engine.errors import UnsupportedModelError
from gateway.detokenizer import (
    Detokenizer,
    TableDetokenizer,
    TokenTable,
    WindowDetokenizer,
    build_table,
)
from gateway.errors import BadRequestError
from gateway.schema.chat import AssistantMessage, InputMessage, join_parts
from gateway.thinking import OPEN_TAG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Below this a tokeniser answers within about a millisecond: less than a hop to a thread may cost.
_INLINE_CHARS: Final = 4096
# What templates and their filters raise on messages or variables that they did not expect.
_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in one tier's tokens. `opens_thinking`: it ends inside a thinking block."""

    token_ids: tuple[int, ...]
    opens_thinking: bool = False


class ChatTokenizer:
    """Renders, encodes and decodes for one tier. Safe to use from several threads.

    `stop_token_ids` end an answer: the tokenizer's end-of-sequence token and those that
    generation_config.json names.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop_token_ids: Sequence[int] = ()
    ) -> None:
        """Take over a loaded fast tokenizer. Raises UnsupportedModelError for a slow one."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json)."
            )
        # Truncation saved in tokenizer.json would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._table: TokenTable | None = build_table(backend)
        eos: int | None = tokenizer.eos_token_id
        self.stop_token_ids = tuple(
            dict.fromkeys([*([] if eos is None else [eos]), *stop_token_ids])
        )
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(
            json.dumps(sorted(vocabulary.items())).encode()
        ).hexdigest()
        self.max_token_bytes = max(len(token.encode()) for token in vocabulary)
        self._special = _special_pattern(backend)
        signature = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(signature) - {"kwargs"}

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read tokenizer, chat template and generation config of a folder or hub id.

        Raises UnsupportedModelError when there is no fast tokenizer, OSError when there is nothing.
        """
        from transformers import AutoTokenizer, GenerationConfig

        tokenizer = AutoTokenizer.from_pretrained(str(path))
        try:
            ends = GenerationConfig.from_pretrained(str(path)).eos_token_id
        except OSError:
            ends = None
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        return cls(tokenizer, ends)

    async def render_chat(
        self,
        messages: Sequence[InputMessage | AssistantMessage],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The conversation up to the answer's start, through the chat template.

        Raises BadRequestError with the template's own words when it refuses the messages.
        """
        conversation = [self._message(message) for message in messages]
        num_chars = sum(len(message["content"]) for message in conversation)
        variables = dict(template_kwargs or {})
        if reserved := self._reserved & variables.keys():
            name = min(reserved)
            raise BadRequestError(
                f"chat_template_kwargs.{name}: this name is reserved.",
                param=f"chat_template_kwargs.{name}",
            )
        if num_chars + len(str(variables)) < _INLINE_CHARS:
            return self._render(conversation, variables)
        return await asyncio.to_thread(self._render, conversation, variables)

    async def encode(self, text: str) -> Prompt:
        """Plain text, with the tokens that the tokenizer puts around it (BOS)."""
        if len(text) < _INLINE_CHARS:
            encoding = self._backend.encode(text)
        else:
            encoding = await asyncio.to_thread(self._backend.encode, text)
        return Prompt(token_ids=tuple(encoding.ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        return str(self._backend.decode(list(token_ids)))

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one answer."""
        if self._table is None:
            return WindowDetokenizer(self._backend)
        return TableDetokenizer(self._table)

    def token_bytes(self, token_id: int) -> bytes:
        """A single token's bytes, for log-probabilities; a special token's are its name."""
        found = self._table.bytes_of(token_id) if self._table else b""
        return found or self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _message(self, message: InputMessage | AssistantMessage) -> dict[str, str]:
        """As templates expect it; most know no developer role."""
        template = self._tokenizer.chat_template
        role: str = message.role
        if role == "developer" and "developer" not in str(template):
            role = "system"
        fields = {"role": role, "content": join_parts(message.content)}
        if message.name is not None:
            fields["name"] = message.name
        if isinstance(message, AssistantMessage) and message.reasoning_content is not None:
            fields["reasoning_content"] = message.reasoning_content
        return fields

    def _render(self, conversation: list[dict[str, str]], variables: dict[str, Any]) -> Prompt:
        if not self._tokenizer.chat_template:
            raise BadRequestError("This model has no chat template; use /v1/completions.")
        try:
            text = self._apply_template(conversation, variables)
        except _TEMPLATE_ERRORS as error:
            raise BadRequestError(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error
        opens_thinking = text.rstrip().endswith(OPEN_TAG)
        if "sanitize_control_tokens" in self._reserved and self._forges(conversation, variables):
            token_ids = self._apply_template(
                conversation, variables, tokenize=True, sanitize_control_tokens=True
            )
            return Prompt(token_ids=tuple(token_ids), opens_thinking=opens_thinking)
        encoding = self._backend.encode(text, add_special_tokens=False)
        return Prompt(token_ids=tuple(encoding.ids), opens_thinking=opens_thinking)

    def _apply_template(
        self, conversation: list[dict[str, str]], variables: dict[str, Any], **options: Any
    ) -> Any:
        """Text, or token ids with `tokenize=True`."""
        settings = {"tokenize": False, "return_dict": False, "add_generation_prompt": True}
        return self._tokenizer.apply_chat_template(
            conversation, **{**settings, **options, **variables}
        )

    def _forges(self, conversation: list[dict[str, str]], variables: dict[str, Any]) -> bool:
        """Whether a client's text spells a control token, which must stay plain text."""
        if self._special is None:
            return False
        texts = [text for message in conversation for text in message.values()]
        return any(map(self._special.search, [*texts, json.dumps(variables, ensure_ascii=False)]))


def _special_pattern(backend: Any) -> re.Pattern[str] | None:
    """Matches any special token's text."""
    tokens = backend.get_added_tokens_decoder().values()
    names = [re.escape(token.content) for token in tokens if token.special and token.content]
    return re.compile("|".join(names)) if names else None
