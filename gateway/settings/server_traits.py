"""Abilities of each kind of server: one table, so that no other code tests a server's name."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal
from urllib.parse import urlsplit

from gateway.schema.kinds import ServerKind

DialectName = Literal["openai", "anthropic"]
ContinuationStrategy = Literal["replay", "final_message", "none"]
"""How an answer that broke off goes on at another replica of the same model.

replay: the whole request again, with its seed and with what was delivered as `prediction`; what is
known already is skipped. final_message: the delivered text is the beginning of the answer
(`continue_final_message`; for completions it is appended to the prompt). none: it cannot.
"""

TokenLimitName = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTraits:
    """What may be relied on.

    has_prefix_cache: replicas are worth choosing by a request's beginning. takes_prediction: it
    makes use of `prediction`. streams_usage: it knows `stream_options.include_usage`. probe_path:
    what is asked to see whether it lives, behind the base URL; any answer below 500 will do.
    takes_request_id: it takes any text as `x-request-id`; llama-cpp-python's server refuses one
    that is no UUID. token_limit: what a chat calls the most tokens of an answer; None where either
    name may be the only right one, so that the request's own stays.
    """

    dialect: DialectName = "openai"
    continuation: ContinuationStrategy = "none"
    has_prefix_cache: bool = False
    takes_prediction: bool = False
    streams_usage: bool = True
    probe_path: str = "/models"
    takes_request_id: bool = True
    token_limit: TokenLimitName | None = "max_tokens"


# Every version of these knows `max_tokens`. Of two names SGLang takes the older, OpenAI neither.
TRAITS: Final[dict[ServerKind, ServerTraits]] = {
    "openai": ServerTraits(token_limit=None),
    "outrider": ServerTraits(
        continuation="replay", has_prefix_cache=True, takes_prediction=True, token_limit=None
    ),
    "vllm": ServerTraits(continuation="final_message", has_prefix_cache=True),
    "sglang": ServerTraits(continuation="final_message", has_prefix_cache=True),
    "tgi": ServerTraits(has_prefix_cache=True),
    "tensorrt_llm": ServerTraits(has_prefix_cache=True),
    "llama_cpp": ServerTraits(streams_usage=False, takes_request_id=False),
    "anthropic": ServerTraits(dialect="anthropic"),
}

_OPENAI_HOSTS: Final = (".openai.com", ".openai.azure.com")


def traits_of(server: ServerKind, urls: Iterable[str]) -> ServerTraits:
    """The traits of a tier's server; OpenAI's own refuses what it calls by a newer name."""
    traits = TRAITS[server]
    if server != "openai" or not all(_is_openai(url) for url in urls):
        return traits
    return replace(traits, token_limit="max_completion_tokens")


def _is_openai(url: str) -> bool:
    return f".{urlsplit(url).hostname}".endswith(_OPENAI_HOSTS)
