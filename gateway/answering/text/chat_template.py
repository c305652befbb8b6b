"""A tokenizer's chat template, rendered and encoded as transformers does it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import jinja2

from outrider.gateway.answering.text.control_tokens import ControlTokens
from outrider.gateway.answering.text.plain_tokenizer import PlainTokenizer
from outrider.gateway.answering.text.template_language import compile_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptEnd = Literal["new_answer", "messages", "final_message"]
"""new_answer: the template opens an answer. messages: nothing is written behind the messages.
final_message: the last message is an answer that is left open."""
TemplateMessages = Sequence[Mapping[str, Any]]
"""Messages as JSON."""

# The errors that templates and their filters raise on unexpected messages or variables.
TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
# Names of a message's reasoning; a template reads the first, gpt-oss's the second.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# Behind the text of an answer that is left open; a template that cuts spaces off leaves all but
# the last character.
_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """Renders one tokenizer's chat template. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | PlainTokenizer",
        harmless: Collection[str] = (),
    ) -> None:
        """`harmless`: tokens that a client's texts may hold as tokens, but for special ones."""
        self._tokenizer = tokenizer
        self._harmless = harmless
        self._control: dict[str, ControlTokens] = {}

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """The control tokens that templates are given by name, such as `bos_token`."""
        return dict(self._tokenizer.special_tokens_map)

    def control_tokens(self, variables: Mapping[str, Any]) -> ControlTokens:
        """Return the tokens that only the template may write. Raises TEMPLATE_ERRORS."""
        source = self._source(variables)
        if source not in self._control:
            self._control[source] = ControlTokens(
                self._tokenizer.backend_tokenizer,
                source,
                getattr(self._tokenizer, "chat_control_tokens", None),
                self._harmless,
            )
        return self._control[source]

    def text(
        self, conversation: TemplateMessages, variables: Mapping[str, Any], end: PromptEnd
    ) -> str:
        """Render the conversation. Raises TEMPLATE_ERRORS."""
        source = self._source(variables)
        messages = list(map(_completed, conversation))
        if not messages:
            raise ValueError("there is no message")
        final = ""
        if end == "final_message":
            if "content" not in source:
                raise ValueError("the template reads no content, so no answer can go on")
            messages[-1], final = _tagged(messages[-1])
        rendered = _rendered(
            source,
            {
                **self.special_tokens,
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": end == "new_answer",
                **variables,
            },
        )
        return _left_open(rendered, final) if end == "final_message" else rendered

    def fitted(
        self, conversation: TemplateMessages, variables: Mapping[str, Any], end: PromptEnd
    ) -> tuple[TemplateMessages, str]:
        """Return the conversation, in strict turns if the template wants them, and its text.

        Raises TEMPLATE_ERRORS, of the conversation as it came: its messages are the client's.
        """
        try:
            return conversation, self.text(conversation, variables, end)
        except TEMPLATE_ERRORS:
            for turns in _strict_turns(conversation):
                with suppress(*TEMPLATE_ERRORS):
                    return turns, self.text(turns, variables, end)
            raise

    def token_ids(
        self, conversation: TemplateMessages, variables: Mapping[str, Any], end: PromptEnd
    ) -> list[int]:
        """Render and encode it with all control tokens of its texts as plain text.

        Raises TEMPLATE_ERRORS.
        """
        control = self.control_tokens(variables)
        return control.encode(self.text(control.mark(conversation), control.mark(variables), end))

    def _source(self, variables: Mapping[str, Any]) -> str:
        """Return the template; of several with names, the one for tools where there are some."""
        found: object = self._tokenizer.chat_template
        if isinstance(found, Mapping):
            has_tools = variables.get("tools") is not None and "tool_use" in found
            found = found.get("tool_use" if has_tools else "default")
        if not isinstance(found, str):
            raise ValueError("the tokenizer has no chat template, or none that is the default")
        return found


def _rendered(source: str, variables: dict[str, Any]) -> str:
    """Render a template. Raises TEMPLATE_ERRORS.

    A macro holds its context and the context holds the macro. The garbage collector would have to
    find them, which holds the event loop for milliseconds; so they are parted here.
    """
    template = compile_template(source)
    context = template.new_context(variables)
    try:
        return "".join(template.root_render_func(context))
    finally:
        context.vars.clear()


def _strict_turns(conversation: TemplateMessages) -> Iterator[TemplateMessages]:
    """Yield the conversation as templates with strict turns take it, then without system messages.

    Many refuse two messages of a role in a row, which agents send; some refuse the system role,
    so its text goes in front of the next question.
    """
    yield _joined(conversation)
    users = [
        {**message, "role": "user"} if message["role"] == "system" else message
        for message in conversation
    ]
    yield _joined(users)


def _joined(conversation: TemplateMessages) -> TemplateMessages:
    """Join the texts of neighbours that have one role and nothing but a text."""
    turns: list[Mapping[str, Any]] = []
    for message in conversation:
        last = turns[-1] if turns else None
        if last and last["role"] == message["role"] and _is_plain(last) and _is_plain(message):
            turns[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            turns.append(message)
    return turns


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _completed(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave fields without a value out; give reasoning the names that templates read."""
    if None in message.values():
        message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tagged(message: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the message with the tag behind its last text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _TAG}, content
    parts = list(content or ())
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = parts[index]["text"]
            parts[index] = {**parts[index], "text": text + _TAG}
            return {**message, "content": parts}, text
    raise ValueError("the final message has no text that could go on")


def _left_open(rendered: str, final: str) -> str:
    """Cut what the template wrote behind the tag. `final`: the text in front of it."""
    end = rendered.rfind(_TAG.strip())
    if end < 0 or final.strip() not in rendered:
        raise ValueError(
            "the final message does not appear in the chat: the template leaves out parts of it, "
            "so that it cannot go on"
        )
    keeps_spaces = rendered.startswith(_TAG, end)
    return rendered[:end] if keeps_spaces else rendered[:end].rstrip()
