"""Messages to token ids: one tier's chat template and tokenizer."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from outrider.engine.errors import PromptTooLongError, UnsupportedModelError
from outrider.engine.model.checkpoint_files import end_token_ids, fim_token_ids, merged_ids
from outrider.gateway.answering.text.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplate,
    PromptEnd,
    TemplateMessages,
)
from outrider.gateway.answering.text.detokenizer import (
    Detokenizer,
    TableDetokenizer,
    TokenTable,
    WindowDetokenizer,
    build_table,
)
from outrider.gateway.answering.text.infilling import (
    find_infilling,
    no_infilling,
    room_for_prompt,
)
from outrider.gateway.answering.text.plain_tokenizer import (
    PlainTokenizer,
    load_tokenizer,
    special_ids,
)
from outrider.gateway.answering.text.prompt_work import (
    UNBOUNDED,
    PromptWork,
    check_call_arguments,
    template_chars,
)
from outrider.gateway.answering.text.reasoning_formats import (
    ReasoningDialect,
    Thinking,
    find_reasoning,
    thinking_variables,
)
from outrider.gateway.answering.text.thinking import (
    TextSplitter,
    check_thinking_ended,
    make_splitter,
)
from outrider.gateway.answering.text.thinking_marks import ThinkingMarks, spell_marks
from outrider.gateway.answering.text.tool_formats import ToolDialect, find_dialect
from outrider.gateway.answering.text.tool_prompt import (
    template_call_id,
    template_calls,
    template_tools,
    write_out,
)
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import (
    AssistantMessage,
    Message,
    ToolMessage,
    join_parts,
)
from outrider.gateway.contract.schema.completions import ExtraFile
from outrider.gateway.contract.schema.kinds import ToolFormatName
from outrider.gateway.contract.schema.parsing import JsonBounds
from outrider.gateway.contract.schema.template_variables import read_variables
from outrider.gateway.contract.schema.tools import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Ordinary text has two to six characters a token: the first eight for each tell if it is too long.
_PROBE_CHARS_PER_TOKEN: Final = 8
_MAX_CUT_TOKENS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in one tier's tokens. `opens_thinking`: it ends inside a thinking block."""

    token_ids: tuple[int, ...]
    opens_thinking: bool = False


class ChatTokenizer:
    """Renders, encodes and decodes for one tier. Safe to use from several threads.

    `stop_token_ids` end an answer: the tokenizer's end-of-sequence token and those that
    config.json and generation_config.json name. `dialect`: the model's format of tools.
    `infilling`: what writes prompts for text in the middle; None where the model has no tokens.
    `may_think`: the template knows thinking blocks. `rendering` is equal for two tiers that write
    every request with the same tokens and end answers at the same ones.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | PlainTokenizer",
        stop_token_ids: Sequence[int] = (),
        tool_format: ToolFormatName | None = None,
        fim_ids: Mapping[str, int] | None = None,
    ) -> None:
        """Take over a loaded fast tokenizer. `tool_format` None: as its template says.

        `fim_ids`: of `fim_token_ids`. Raises UnsupportedModelError for a slow one.
        """
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
        self.stop_token_ids = merged_ids(tokenizer.eos_token_id, stop_token_ids)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(
            json.dumps(sorted(vocabulary.items())).encode()
        ).hexdigest()
        self.max_token_bytes = max(len(token.encode()) for token in vocabulary)
        special = special_ids(backend)
        self.dialect: ToolDialect = find_dialect(tokenizer.chat_template, special, tool_format)
        self.reasoning: ReasoningDialect = find_reasoning(tokenizer.chat_template, special)
        self.may_think = self.reasoning.is_known
        form = self.reasoning.format
        # Templates look for these in earlier answers.
        self._template = ChatTemplate(tokenizer, harmless=(*form.opens, *form.closes))
        ends = [special[text] for text in form.stops if text in special]
        self.stop_token_ids = merged_ids(self.stop_token_ids, ends)
        self.infilling = find_infilling(tokenizer, fim_ids or {})
        writes = (
            *(self.fingerprint, tokenizer.chat_template, self.stop_token_ids, self.dialect),
            self.infilling and self.infilling.tokens,
        )
        self.rendering = hashlib.sha256(repr(writes).encode("utf-8", "replace")).hexdigest()

    def compile_template(self) -> None:
        """Compile the template, which the first chat would wait for some 50 ms."""
        with contextlib.suppress(*TEMPLATE_ERRORS):  # a chat reports what is wrong with it
            self._template.control_tokens({})
            self._template.text([{"role": "user", "content": "Hi"}], {}, "new_answer")

    @classmethod
    def load(
        cls,
        path: str | Path,
        tool_format: ToolFormatName | None = None,
        *,
        template: str | None = None,
    ) -> Self:
        """Read tokenizer, chat template and end tokens of a folder or hub id.

        `template` is used in place of its own. Raises UnsupportedModelError when there is no fast
        tokenizer, OSError when there is nothing.
        """
        tokenizer = load_tokenizer(path)
        if template is not None:
            tokenizer.chat_template = template
        return cls(tokenizer, end_token_ids(path), tool_format, fim_token_ids(path))

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The control tokens by what they are for, such as `bos_token`."""
        return self._template.special_tokens

    @property
    def has_template(self) -> bool:
        """True if conversations can be rendered."""
        return bool(self._tokenizer.chat_template)

    async def render_chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        end: PromptEnd = "new_answer",
        work: PromptWork = UNBOUNDED,
    ) -> Prompt:
        """Render the conversation up to the answer's start, through the chat template.

        With `end` "final_message" the answer's start is the text of the last message, as
        transformers' `continue_final_message` leaves it open.

        Tools, calls and results go through the template as well, or where it knows none, as text.
        Raises BadRequestError with the template's own words when it refuses the messages, and
        PromptTooLongError for a prompt far beyond the context of `work`.
        """
        reserved = self._template.special_tokens.keys()
        variables = read_variables(template_kwargs, reserved) if template_kwargs else {}
        variables = thinking_variables(variables, self._tokenizer.chat_template, self.reasoning)

        def rendered() -> Prompt:
            conversation = self._conversation(messages, work.json_bounds)
            if tools or any(map(_is_of_tools, messages)):
                described = template_tools(tools)
                if not self.dialect.is_native:
                    conversation, described = (
                        write_out(conversation, described, self.dialect.format),
                        [],
                    )
                if described:
                    variables["tools"] = described
            return self._render(conversation, variables, end, work)

        return await work.run(template_chars(messages, tools), rendered)

    async def encode(self, text: str, work: PromptWork = UNBOUNDED) -> Prompt:
        """Encode plain text, with the tokens that the tokenizer puts around it (BOS)."""

        def encoded() -> Prompt:
            self._refuse_overlong(text, work)
            return Prompt(token_ids=self._encode(text, with_special=True))

        return await work.run(len(text), encoded)

    async def encode_infill(
        self,
        prefix: str | Sequence[int],
        suffix: str,
        files: Sequence[ExtraFile] = (),
        work: PromptWork = UNBOUNDED,
    ) -> Prompt:
        """Return the prompt for the text between two texts, with files as context.

        Raises BadRequestError where the model has no tokens for it.
        """
        if (infilling := self.infilling) is None:
            raise no_infilling()
        cut = prefix + suffix if isinstance(prefix, str) else suffix

        def encoded() -> Prompt:
            self._refuse_overlong(cut, work)
            room = room_for_prompt(work.max_context, work.max_tokens)
            return Prompt(token_ids=infilling.token_ids(prefix, suffix, files, room))

        return await work.run(len(cut) + sum(len(file.text) for file in files), encoded)

    async def encode_answer(
        self, text: str, max_tokens: int, work: PromptWork = UNBOUNDED
    ) -> tuple[int, ...]:
        """Return at most `max_tokens` tokens of a text, as in an answer: without BOS."""
        text = text[: max_tokens * self.max_token_bytes]  # no token is longer
        return await work.run(len(text), lambda: self._encode(text)[:max_tokens])

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """Decode a whole sequence; `with_special` tokens by their names, or without them."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=not with_special))

    def thinking(self, prompt: Prompt) -> Thinking:
        """Return if a chat answer's thinking block is open already, possible, or ruled out."""
        if prompt.opens_thinking:
            return "open"
        return "possible" if self.may_think else "none"

    @cached_property
    def thinking_marks(self) -> ThinkingMarks | None:
        """The marks around thinking; None where the template knows none, or channels instead."""
        form = self.reasoning.format
        is_marked = self.may_think and not form.has_channels
        marks = spell_marks(self._backend, form) if is_marked else None
        return marks if marks and marks.closes else None

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template names a variable."""
        return name in str(self._tokenizer.chat_template)

    def splitter(self, *, opens_thinking: bool = False) -> TextSplitter:
        """Return a new reader that tells one answer's thinking from its content."""
        return make_splitter(self.reasoning, opens_thinking=opens_thinking)

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Return a new detokenizer for one answer, which may go on with the text of `after`."""
        if self._table is None:
            return WindowDetokenizer(self._backend, after)
        return TableDetokenizer(self._table, after)

    @property
    def token_texts(self) -> tuple[bytes, ...] | None:
        """Each token's bytes, empty for special ones; None where they depend on the neighbours."""
        return self._table.token_bytes if self._table else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, for log-probabilities; a special token's are its name."""
        found = self._table.bytes_of(token_id) if self._table else b""
        return found or self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _conversation(
        self, messages: Sequence[Message], bounds: JsonBounds
    ) -> list[dict[str, Any]]:
        """Build messages for templates; a result names the function that gave it.

        Raises BadRequestError, and BodyTooComplexError for arguments beyond `bounds`.
        """
        check_call_arguments(messages, bounds)
        conversation = []
        names: dict[str, str] = {}
        for index, message in enumerate(messages):
            fields = self._message(message)
            if isinstance(message, AssistantMessage):
                if message.tool_calls:
                    calls = template_calls(message, f"messages.{index}", self.dialect.format)
                    fields["tool_calls"] = calls
                    names |= {call["id"]: call["function"]["name"] for call in calls}
            elif isinstance(message, ToolMessage):
                call_id = template_call_id(message.tool_call_id, self.dialect.format)
                fields["tool_call_id"] = call_id
                if call_id in names:
                    fields.setdefault("name", names[call_id])
            conversation.append(fields)
        return conversation

    def _message(self, message: Message) -> dict[str, Any]:
        """Build the fields that every message has; most templates know no developer role."""
        template = self._tokenizer.chat_template
        role: str = message.role
        if role == "developer" and "developer" not in str(template):
            role = "system"
        fields = {"role": role, "content": join_parts(message.content)}
        if message.name is not None:
            fields["name"] = message.name
        if isinstance(message, AssistantMessage) and message.thoughts is not None:
            fields |= self._reasoning_fields(message)
        return fields

    def _reasoning_fields(self, message: AssistantMessage) -> dict[str, Any]:
        """Build the fields of an earlier thought, under the names that templates read."""
        if not self.reasoning.format.has_channels:
            return {"reasoning_content": message.thoughts}
        if message.tool_calls and message.content:
            return {}  # gpt-oss's template refuses a thought beside content and calls
        return dict.fromkeys(("reasoning_content", "thinking"), message.thoughts)

    def _encode(self, text: str, *, with_special: bool = False) -> tuple[int, ...]:
        """Encode a text. A batch, unlike a single text, has no offsets and leaves the interpreter
        free."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=with_special)
        return tuple(encoding.ids)

    def _refuse_overlong(self, text: str, work: PromptWork) -> None:
        """Refuse a text whose beginning alone has more tokens than fit: the rest costs nothing.

        Where the beginning is cut, a few tokens may differ from those of the whole text.
        """
        most = work.max_context
        if most is None or len(text) <= _PROBE_CHARS_PER_TOKEN * most:
            return
        num_tokens = len(self._encode(text[: _PROBE_CHARS_PER_TOKEN * most]))
        if num_tokens > most + _MAX_CUT_TOKENS:
            raise PromptTooLongError(
                num_tokens=num_tokens, max_tokens=work.max_tokens, max_context=most
            )

    def _render(
        self,
        conversation: TemplateMessages,
        variables: dict[str, Any],
        end: PromptEnd,
        work: PromptWork,
    ) -> Prompt:
        if not self.has_template:
            raise BadRequestError(
                "This model has no chat template: use /v1/completions, or name a template with "
                "--chat-template FILE."
            )
        if end == "final_message" and self.may_think:
            param = f"messages.{len(conversation) - 1}.content"
            check_thinking_ended(conversation[-1]["content"], param, self.reasoning.format)
        try:
            conversation, text = self._template.fitted(conversation, variables, end)
            self._refuse_overlong(text, work)
            token_ids = (
                tuple(self._template.token_ids(conversation, variables, end))
                if self._forges(conversation, variables)
                else self._encode(text)
            )
        except TEMPLATE_ERRORS as error:
            raise BadRequestError(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error
        opening = self.reasoning.format.open
        opens_thinking = text.rstrip().endswith(opening.rstrip())
        if opens_thinking and end == "final_message":
            # An answer that merely mentions the tag is left alone.
            opens_thinking = conversation[-1]["content"].strip() in ("", opening)
        return Prompt(token_ids=token_ids, opens_thinking=opens_thinking)

    def _forges(self, conversation: TemplateMessages, variables: dict[str, Any]) -> bool:
        """Return whether a client's text spells a control token, which must stay plain text.

        Raises BadRequestError where a field's name does, or a text in disguise: these cannot be
        kept plain.
        """
        control = self._template.control_tokens(variables)
        keys, texts = _strings([conversation, variables])
        if control.are_in(keys):
            raise BadRequestError(
                "A field's name contains a control token of the model. Rename it."
            )
        if any(map(control.is_disguised_in, [*keys, *texts])):
            raise BadRequestError(
                "A text contains what the model's tokenizer turns into a control token, such as "
                "one in wide letters. Leave it out.",
                param="messages",
            )
        return control.are_in(texts)


def _is_of_tools(message: Message) -> bool:
    """Return whether a message calls tools, or holds a tool's result."""
    if isinstance(message, AssistantMessage):
        return bool(message.tool_calls)
    return isinstance(message, ToolMessage)


def _strings(value: Any) -> tuple[list[str], list[str]]:
    """Return all strings in a JSON value: the names of fields, and the others."""
    keys: list[str] = []
    texts: list[str] = []
    waiting = [value]
    for part in waiting:  # which grows meanwhile
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict):
            keys += part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return keys, texts
