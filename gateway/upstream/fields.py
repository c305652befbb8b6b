"""The request fields sent to an upstream server: an allow-list for each kind of server.

Fields of other people's APIs may change a price (`service_tier`), store the conversation (`store`),
reach another tenant's cache (`cache_salt`) or steer the server (`kv_transfer_params`, `lora_path`).
So a field that is not known to be harmless is refused, unless the operator allows it. Labels and
hints, which change neither price nor answer, are left out, as the local models ignore them.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NoReturn

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.kinds import ServerKind, UnknownFields
from outrider.gateway.settings.tiers import UpstreamSettings

SALT_FIELD: Final = "cache_salt"

_COMMON: Final = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "n", "best_of", "stop", "seed"),
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("logprobs", "top_logprobs", "echo", "suffix", "response_format", "reasoning_effort"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
    }
)
_SAMPLING: Final = frozenset(
    {"top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"}
)
_CONTINUING: Final = frozenset({"continue_final_message", "add_generation_prompt"})
_TEMPLATE: Final = _CONTINUING | {"chat_template_kwargs"}
_GUIDED: Final = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"}
)
_ALLOWED: Final[Mapping[ServerKind, frozenset[str]]] = {
    "openai": _COMMON | _SAMPLING | {"prediction", "verbosity", "modalities", "audio"},
    "outrider": _COMMON
    | _SAMPLING
    | _TEMPLATE
    | _GUIDED
    | {"regex", "ebnf", "json_schema", "grammar", "input_extra"}
    | {"prediction", "service_tier", "modalities", "thinking_token_budget"},
    "vllm": _COMMON
    | _SAMPLING
    | _TEMPLATE
    | _GUIDED
    | {"include_reasoning", "thinking_token_budget"},
    "sglang": _COMMON
    | _SAMPLING
    | _TEMPLATE
    | {"regex", "ebnf", "json_schema", "separate_reasoning", "stream_reasoning"},
    "tgi": _COMMON | {"top_k", "repetition_penalty"},
    "tensorrt_llm": _COMMON | _SAMPLING | {"chat_template_kwargs"},
    "llama_cpp": _COMMON
    | {"top_k", "min_p", "repeat_penalty", "grammar", "json_schema", "chat_template_kwargs"},
    # The dialect refuses fields that the Messages API lacks.
    "anthropic": _COMMON
    | _SAMPLING
    | _TEMPLATE
    | {"prediction", "modalities", "verbosity", "thinking", "output_config", "cache_control"}
    | {"anthropic_billing"},  # from /v1/messages, for no other kind of server
}
_LEFT_OUT: Final = frozenset(
    {
        *("user", "metadata", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        "anthropic_billing",
    }
)
"""Labels and hints. Names of end users are for this gateway; cache keys would be shared by all."""
_USUAL: Final[Mapping[str, tuple[object, ...]]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "web_search_options": (),
}
"""Values that equal the default. Any other one changes price or privacy."""
_NEVER_PASSED: Final = frozenset({SALT_FIELD, "kv_transfer_params", "lora_path"})
"""Fields that reach other tenants' caches or files of the server."""
_NEVER_IGNORED: Final = frozenset({"store", "web_search_options"}).union(
    OutriderOptions.model_fields, *_ALLOWED.values()
) - {
    *("cache_control", "prediction", "verbosity", "thinking", "chat_template_kwargs"),
    "thinking_token_budget",
}
"""Fields that ask for another price, privacy or answer, at whatever kind of server: an answer
without them would be wrong. So would one without an option of ours that stands in a wrong place.
The others are hints."""
_SALTED: Final[frozenset[ServerKind]] = frozenset({"vllm", "sglang", "outrider"})
"""Those that keep prefix caches apart by `cache_salt`."""
_MAX_VARIABLES: Final = 16
_MAX_VARIABLE_CHARS: Final = 64
_RESERVED_VARIABLES: Final = frozenset(
    {
        *("chat_template", "conversation", "messages", "tools", "documents", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "load_audio_from_video", "processor_kwargs"),
    }
)


class FieldFilter:
    """Selects the fields of a request for the server of one tier."""

    def __init__(self, tier: str, settings: UpstreamSettings) -> None:
        self._tier = tier
        self._server = settings.server
        self._more = frozenset(settings.allow_fields)
        self._allowed = _ALLOWED[settings.server] | self._more
        if settings.continues:
            self._allowed |= _CONTINUING
        if settings.server in _SALTED:
            self._allowed |= {SALT_FIELD}
        self._forced = settings.force_fields
        self._ignored = frozenset(settings.ignore_fields)
        self._unknown: UnknownFields = settings.unknown_fields or "refuse"

    def outgoing(self, document: Mapping[str, Any], *, cache_salt: str = "") -> dict[str, Any]:
        """Return the fields to send, with those that the operator adds.

        `cache_salt` is the tenant's secret; the server gets a value derived from it, and from the
        request's own salt, for this tier. Raises BadRequestError for a field that is refused.
        """
        sent = {name: value for name, value in document.items() if self._is_sent(name, value)}
        own = sent.pop(SALT_FIELD, None) or ""
        if (cache_salt or own) and self._server in _SALTED:
            sent[SALT_FIELD] = _derived(cache_salt, self._tier, own)
        return sent | self._forced

    def ignored(self, document: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the fields that are left out and that the client is told of."""
        if not self._ignored and self._unknown != "ignore":
            return ()
        return tuple(name for name, value in document.items() if self._is_ignored(name, value))

    def _is_ignored(self, name: str, value: object) -> bool:
        if value is None or name in self._forced:
            return False
        if name in self._ignored:
            return True
        is_known = name in self._allowed or name in _LEFT_OUT or _is_usual(name, value)
        return self._unknown == "ignore" and not is_known and name not in _NEVER_IGNORED

    def _is_sent(self, name: str, value: object) -> bool:
        if name in self._ignored:
            return False
        if name in self._allowed:
            if name == "chat_template_kwargs" and name not in self._more:
                _check_variables(value)
            return True
        if value is None or name in _LEFT_OUT or name in self._forced:
            return False
        if _is_usual(name, value) or self._is_ignored(name, value):
            return False
        if self._unknown == "pass" and name not in _NEVER_PASSED:
            return True
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        told = name[:80]
        raise BadRequestError(
            f"{told}: this field is not sent to the {self._tier} tier; leave it out, or let the "
            f"operator add it to tiers.{self._tier}.allow_fields.",
            param=told,
        )


def _is_usual(name: str, value: object) -> bool:
    return any(value == usual and type(value) is type(usual) for usual in _USUAL.get(name, ()))


def _check_variables(variables: object) -> None:
    """Raise BadRequestError for more than a few switches: they reach a program, the template."""
    path = "chat_template_kwargs"
    if variables is None:
        return
    if not isinstance(variables, dict) or len(variables) > _MAX_VARIABLES:
        raise BadRequestError(
            f"{path}: an object with at most {_MAX_VARIABLES} variables is required.", param=path
        )
    for name, value in variables.items():
        where = f"{path}.{name[:80]}"
        if name in _RESERVED_VARIABLES:
            raise BadRequestError(
                f"{where}: this name is reserved; rename the variable.", param=where
            )
        is_switch = value is None or isinstance(value, bool | int | float)
        is_word = isinstance(value, str) and len(value) <= _MAX_VARIABLE_CHARS
        if not is_switch and not is_word:
            raise BadRequestError(
                f"{where}: a number, true, false or a text of at most {_MAX_VARIABLE_CHARS} "
                "characters is required.",
                param=where,
            )


def _derived(salt: str, tier: str, own: str) -> str:
    """Derive 256 bits that reveal nothing of the salt and differ by tier and the request's own."""
    told = f"{tier}/{own}" if own else tier
    message = told.encode("utf-8", "surrogatepass")
    return blake2b(message, key=salt.encode()[:64], digest_size=32).hexdigest()
