"""Token counts by an upstream server's own tokenizer, to check the server's reports."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from outrider.gateway.answering.text.chat_template import ChatTemplate, PromptEnd
from outrider.gateway.answering.text.plain_tokenizer import PlainTokenizer, load_tokenizer
from outrider.gateway.contract.schema.template_variables import FIELD, read_variables
from outrider.gateway.upstream.call import UpstreamCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Counting takes the event loop's time, about a millisecond for 4,096 characters.
_MAX_PROMPT_CHARS: Final = 32_768
# A template takes some 20 microseconds for a message, also for an empty one.
_MAX_MESSAGES: Final = 1024
_TEXT_FIELDS: Final = frozenset({"role", "content", "name", "reasoning_content", "tool_call_id"})


class TokenCounter:
    """Counts with one tokenizer; None where it cannot count as the server does."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | PlainTokenizer") -> None:
        """Take over a loaded tokenizer. Raises ValueError for a slow one."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("it has no fast tokenizer (tokenizer.json)")
        backend.no_truncation()
        backend.no_padding()
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self._backend = backend

    @classmethod
    def load(cls, path: str) -> Self:
        """Load the tokenizer of a folder or hub id. Raises OSError or ValueError."""
        return cls(load_tokenizer(path))

    def count_text(self, text: str) -> int:
        """Count the tokens of a piece of an answer, without special tokens."""
        return len(self._backend.encode(text, add_special_tokens=False))

    def count_prompt(self, call: UpstreamCall) -> int | None:
        """Count a call's prompt as the model is given it.

        None where it is long, where it holds more than text (tools, images), and where the
        tokenizer has no chat template or its template refuses the messages.
        """
        if call.endpoint == "completion":
            return self._count_completion(call.document.get("prompt"))
        if call.document.get("tools") or call.document.get("functions"):
            return None  # servers write them into prompts in their own ways
        messages = _plain_messages(call.document.get("messages"))
        if messages is None or self._template is None:
            return None
        return self._count_chat(self._template, messages, call.document)

    def _count_completion(self, prompt: object) -> int | None:
        """Count the tokens of one prompt or several, as text or as token ids."""
        prompts = prompt if isinstance(prompt, list) else [prompt]
        if prompts and all(type(token_id) is int for token_id in prompts):
            return len(prompts)
        num_chars = sum(len(one) for one in prompts if isinstance(one, str))
        if num_chars > _MAX_PROMPT_CHARS or len(prompts) > _MAX_MESSAGES:
            return None
        counts = [self._count_one(one) for one in prompts]
        return None if None in counts else sum(count or 0 for count in counts)

    def _count_one(self, prompt: object) -> int | None:
        if isinstance(prompt, str):
            return len(self._backend.encode(prompt))
        is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
        return len(prompt) if isinstance(prompt, list) and is_ids else None

    def _count_chat(
        self, template: ChatTemplate, messages: list[dict[str, Any]], document: Mapping[str, Any]
    ) -> int | None:
        def count(variables: Mapping[str, Any]) -> int:
            # Templates write BOS and the like themselves.
            text = template.text(messages, variables, _prompt_end(document))
            return len(self._backend.encode(text, add_special_tokens=False))

        try:
            variables = read_variables(document.get(FIELD), template.special_tokens.keys())
            plain = count({})
            counted = count(variables) if variables else plain
        except Exception:  # noqa: BLE001 - templates raise what they like; the report stands then
            return None
        # A client's variables never lower a count: a template may leave out the parts they name.
        return counted if counted >= plain else None


def _prompt_end(document: Mapping[str, Any]) -> PromptEnd:
    """Return how a chat's prompt ends. Raises ValueError where its fields contradict each other."""
    is_continued = document.get("continue_final_message") is True
    opens_answer = bool(document.get("add_generation_prompt", not is_continued))
    if is_continued and opens_answer:
        raise ValueError("a message that goes on has no new answer behind it")
    if is_continued:
        return "final_message"
    return "new_answer" if opens_answer else "messages"


def _plain_messages(messages: object) -> list[dict[str, Any]] | None:
    """Return messages whose contents are texts; None for any other content, or too much."""
    if not isinstance(messages, list) or len(messages) > _MAX_MESSAGES:
        return None
    plain: list[dict[str, Any]] = []
    num_chars = 0
    for message in messages:
        content = _plain_text(message.get("content")) if isinstance(message, dict) else None
        if content is None:
            return None
        fields = {name: value for name, value in message.items() if value is not None}
        texts = {**fields, "content": content}
        if not (texts.keys() <= _TEXT_FIELDS and all(map(_is_text, texts.values()))):
            return None
        num_chars += sum(map(len, texts.values()))
        plain.append(texts)
    return plain if num_chars <= _MAX_PROMPT_CHARS else None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _plain_text(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)
