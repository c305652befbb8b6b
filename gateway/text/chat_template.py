"""A tokenizer's chat template, rendered as transformers renders it."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import jinja2

from outrider.gateway.schema.template_variables import reserved_variables
from outrider.gateway.text.plain_tokenizer import PlainTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptEnd = Literal["new_answer", "messages", "final_message"]
"""new_answer: the template opens an answer. messages: nothing is written behind the messages.
final_message: the last message is an answer that is left open."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages as JSON."""

# The errors that templates and their filters raise on unexpected messages or variables.
TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# Fields that transformers copies to each other.
_REASONING: Final = frozenset({"reasoning_content", "thinking", "reasoning"})


class ChatTemplate:
    """Renders one tokenizer's chat template. Safe to use from several threads.

    Most conversations are given to the compiled template itself. transformers rebuilds all values
    before, as it may get images and tensors; here they are JSON, and that takes half of the time.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | PlainTokenizer") -> None:
        """`tokenizer`: with a template, or `render` raises transformers' ValueError."""
        self._tokenizer = tokenizer

    @cached_property
    def _renderer(self) -> "PreTrainedTokenizerBase":
        """transformers' tokenizer."""
        tokenizer = self._tokenizer
        return tokenizer.complete() if isinstance(tokenizer, PlainTokenizer) else tokenizer

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Names of variables that this tokenizer gives a meaning."""
        return reserved_variables(self._renderer)

    @cached_property
    def can_sanitize(self) -> bool:
        """True if this version of transformers keeps control tokens in messages plain text."""
        options = inspect.signature(self._renderer.apply_chat_template).parameters
        return "sanitize_control_tokens" in options

    @property
    def is_prepared(self) -> bool:
        """True once rendering need not wait for imports."""
        return "can_sanitize" in self.__dict__

    def prepare(self) -> None:
        """Import what the first chat needs, compile the template; blocks for seconds at first."""
        _ = self.reserved, self.can_sanitize
        with contextlib.suppress(*TEMPLATE_ERRORS):  # some want more than a message
            self.text([{"role": "user", "content": "Hi"}], {}, "new_answer")

    def text(
        self,
        conversation: Conversation,
        variables: Mapping[str, Any],
        end: PromptEnd,
    ) -> str:
        """Render the conversation. Raises TEMPLATE_ERRORS."""
        compiled = self._compiled
        is_plain = end != "final_message" and all(map(_REASONING.isdisjoint, conversation))
        if compiled is None or not (is_plain and conversation):
            return str(self._by_transformers(conversation, variables, end))
        return compiled.render(
            {
                **self._special_tokens,
                "messages": conversation,
                "tools": None,
                "documents": None,
                "add_generation_prompt": end == "new_answer",
                **variables,
            }
        )

    def token_ids(
        self,
        conversation: Conversation,
        variables: Mapping[str, Any],
        end: PromptEnd,
    ) -> list[int]:
        """Render and encode it with all control tokens of its texts as plain text.

        Raises TEMPLATE_ERRORS.
        """
        found: list[int] = self._by_transformers(
            conversation, variables, end, tokenize=True, sanitize_control_tokens=True
        )
        return found

    def _by_transformers(
        self,
        conversation: Conversation,
        variables: Mapping[str, Any],
        end: PromptEnd,
        **options: Any,
    ) -> Any:
        settings = {
            "tokenize": False,
            "return_dict": False,
            "add_generation_prompt": end == "new_answer",
            "continue_final_message": end == "final_message",
        }
        return self._renderer.apply_chat_template(
            list(conversation),  # type: ignore[arg-type] # it says dict[str, str] and takes any
            **{**settings, **options, **variables},
        )

    @cached_property
    def _special_tokens(self) -> dict[str, Any]:
        return dict(self._renderer.special_tokens_map)

    @cached_property
    def _compiled(self) -> jinja2.Template | None:
        """The template as transformers compiles it; None where this cannot be had of it."""
        from transformers.utils import chat_template_utils

        source = self._renderer.chat_template
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        if compile_template is None or not isinstance(source, str):
            return None
        compiled: jinja2.Template = compile_template(source)
        compiled.globals = dict(compiled.globals)  # a chain of dicts is slow, and all are read
        return compiled
