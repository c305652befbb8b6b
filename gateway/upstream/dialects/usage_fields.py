"""The `usage` object of OpenAI's API, as servers report it."""

import msgspec

from outrider.gateway.upstream.dialects.base import whole_number

JsonNumber = int | float | None


class _PromptDetails(msgspec.Struct):
    cached_tokens: JsonNumber = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: JsonNumber = None


class UsageFields(msgspec.Struct):
    """The fields as they were sent. The properties are counts: 0 for missing or invalid ones."""

    prompt_tokens: JsonNumber = None
    completion_tokens: JsonNumber = None
    reasoning_tokens: JsonNumber = None
    """Where SGLang has them."""
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return whole_number(self.prompt_tokens)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of the answer."""
        return whole_number(self.completion_tokens)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were in the server's cache."""
        details = self.prompt_tokens_details
        return whole_number(details.cached_tokens if details else None)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the answer that were thinking."""
        details = self.completion_tokens_details
        nested = details.reasoning_tokens if details else None
        return whole_number(self.reasoning_tokens if nested is None else nested)
