"""OpenAI's chat requests as requests for Anthropic's Messages API.

https://platform.claude.com/docs/en/api/messages. Fields without an equivalent are refused by
name; mere hints (seed, prediction, user metadata of OpenAI's own) are left out.
"""

from collections.abc import Mapping
from typing import Any, Final

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.dialects.anthropic_messages import (
    translate_messages,
    translate_tools,
)
from outrider.gateway.upstream.dialects.openai_request import encode_request

DEFAULT_MAX_TOKENS: Final = 4096
"""The Messages API wants a limit; for requests that name none."""

BILLING_FIELD: Final = "anthropic_billing"
"""Holds the line that /v1/messages takes out of the system's text."""
_HINTS: Final = frozenset(
    {
        "model",
        "messages",
        "outrider",
        "seed",
        "prediction",
        "stream_options",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "add_generation_prompt",
        "continue_final_message",  # the API's behaviour for an assistant's message at the end
        "parallel_tool_calls",
    }
)
# The values that change nothing: with any other one, the answer would differ from the request.
_HARMLESS: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
_PASSED_ON: Final = ("top_p", "thinking", "output_config", "cache_control")
_THINKING_VARIABLES: Final = frozenset({"enable_thinking", "thinking_budget"})
_EFFORTS: Final = {
    "minimal": "low",
    **{effort: effort for effort in ("low", "medium", "high", "xhigh", "max")},
}
_TRANSLATED: Final = frozenset(
    {
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stop",
        "temperature",
        "top_k",
        "user",
        "tools",
        "tool_choice",
        "response_format",
        "reasoning_effort",
        "chat_template_kwargs",
        BILLING_FIELD,
        *_PASSED_ON,
    }
)


def request_body(call: UpstreamCall) -> bytes:
    """Return the request as JSON. Raises BadRequestError."""
    document = {name: value for name, value in call.document.items() if value is not None}
    _refuse_what_is_missing(document)
    messages = translate_messages(document.get("messages"))
    body: dict[str, Any] = {
        "model": call.model,
        "max_tokens": DEFAULT_MAX_TOKENS if call.token_limit is None else call.token_limit,
        "messages": messages.turns,
    }
    billing = [{"type": "text", "text": line}] if (line := document.get(BILLING_FIELD)) else []
    if messages.system or billing:
        body["system"] = [*billing, *messages.system]
    if document.get("stream"):
        body["stream"] = True
    body |= {name: document[name] for name in _PASSED_ON if name in document}
    _add_sampling(body, document)
    _add_effort(body, document)
    _add_thinking(body, document.get("chat_template_kwargs"))
    if document.get("tools"):
        body |= translate_tools(document)
    if "user" in document:
        body["metadata"] = {"user_id": document["user"]}
    return encode_request(body)


def shows_thinking(call: UpstreamCall) -> bool:
    """Return whether the client asks for thinking with Anthropic's own fields.

    It gets the signed blocks then, and gives them back with the results of tools.
    """
    document = call.document
    return bool(
        document.get("thinking")
        or document.get("reasoning_effort")
        or thinking_of(document.get("chat_template_kwargs"))
    )


def template_variables(*, budget_tokens: int | None = None, is_on: bool = True) -> dict[str, Any]:
    """Return `thinking` as variables of chat templates; local models keep to the budget too."""
    variables: dict[str, Any] = {"enable_thinking": is_on}
    if budget_tokens is not None:
        variables["thinking_budget"] = budget_tokens
    return variables


def thinking_of(variables: object) -> dict[str, Any] | None:
    """Return `thinking` as a chat template's variables request it; None where they do not.

    Raises BadRequestError for other variables: there is no template here.
    """
    if not variables:
        return None
    if not isinstance(variables, dict) or variables.keys() - _THINKING_VARIABLES:
        raise _unsupported("chat_template_kwargs")
    match variables:
        case {"enable_thinking": False}:
            return {"type": "disabled"}
        case {"enable_thinking": True, "thinking_budget": int(budget)}:
            return {"type": "enabled", "budget_tokens": budget}
        case {"enable_thinking": True}:
            return {"type": "adaptive"}
    raise _unsupported("chat_template_kwargs")


def _refuse_what_is_missing(document: Mapping[str, Any]) -> None:
    """Refuse fields that the Messages API does not have, unless they change nothing."""
    for name, value in document.items():
        if name in _HINTS or name in _TRANSLATED:
            continue
        if value not in _HARMLESS.get(name, ()):
            raise _unsupported(name)


def _add_sampling(body: dict[str, Any], document: Mapping[str, Any]) -> None:
    temperature = document.get("temperature")
    if temperature is not None:
        if not isinstance(temperature, int | float) or not 0 <= temperature <= 1:
            raise BadRequestError(
                "temperature: the model that answers takes 0 to 1.", param="temperature"
            )
        body["temperature"] = temperature
    top_k = document.get("top_k")
    if isinstance(top_k, int) and top_k > 0:  # 0 and -1 are off
        body["top_k"] = top_k
    stop = document.get("stop")
    if stop:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(
            isinstance(text, str) and text.strip() for text in stops
        ):
            raise BadRequestError(
                "stop: the model that answers takes texts that are more than white space.",
                param="stop",
            )
        body["stop_sequences"] = stops


def _add_thinking(body: dict[str, Any], variables: object) -> None:
    """Add thinking from the variables, unless Anthropic's own field is set."""
    thinking = thinking_of(variables)
    if thinking is not None:
        body.setdefault("thinking", thinking)


def _add_effort(body: dict[str, Any], document: Mapping[str, Any]) -> None:
    """Translate `response_format` and `reasoning_effort`, both to `output_config`."""
    given = document.get("output_config")
    config: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    shape = document.get("response_format")
    if shape is not None and shape != {"type": "text"}:
        config["format"] = _output_format(shape)
    effort = document.get("reasoning_effort")
    if effort == "none":
        body["thinking"] = {"type": "disabled"}
    elif effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise _unsupported("reasoning_effort")
        config["effort"] = _EFFORTS[effort]
    if config:
        body["output_config"] = config


def _output_format(shape: object) -> dict[str, Any]:
    """Translate the format; only a schema has a counterpart."""
    definition = shape.get("json_schema") if isinstance(shape, dict) else None
    schema = definition.get("schema") if isinstance(definition, dict) else None
    if not isinstance(shape, dict) or shape.get("type") != "json_schema" or schema is None:
        raise BadRequestError(
            "response_format: the model that answers takes text or json_schema only.",
            param="response_format",
        )
    return {"type": "json_schema", "schema": schema}


def _unsupported(name: str) -> BadRequestError:
    return BadRequestError(
        f"{name}: the model that answers does not support this value.", param=name
    )
