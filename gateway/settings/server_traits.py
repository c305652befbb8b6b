"""Capabilities of each kind of server: one table, so that no other code tests a server name."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal
from urllib.parse import urlsplit

from outrider.gateway.contract.schema.kinds import ServerKind

DialectName = Literal["openai", "anthropic"]
ContinuationStrategy = Literal["replay", "final_message", "none"]
"""How a broken-off answer continues at another replica of the same model.

replay: send the whole request again, with its seed and with the delivered text as `prediction`,
and skip what was delivered. final_message: send the delivered text as the beginning of the
answer (`continue_final_message`; for completions it is appended to the prompt). none: it cannot
continue.
"""

TokenLimitName = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTraits:
    """Capabilities that the gateway relies on."""

    dialect: DialectName = "openai"
    continuation: ContinuationStrategy = "none"
    has_prefix_cache: bool = False
    """Replicas are worth choosing by a request's beginning."""
    takes_prediction: bool = False
    """It uses `prediction`."""
    streams_usage: bool = True
    """It knows `stream_options.include_usage`."""
    probe_path: str = "/models"
    """Path of the health check, after the base URL. Any status below 500 counts as alive."""
    takes_request_id: bool = True
    """It takes any text as `x-request-id`; llama-cpp-python's server refuses one that is not a
    UUID."""
    token_limit: TokenLimitName | None = "max_tokens"
    """A chat's field for the most tokens of an answer. None: either name may be the only valid one,
    so the request's own name is kept."""
    has_logprobs: bool = True
    """It may report tokens' log-probabilities."""


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
    "anthropic": ServerTraits(dialect="anthropic", has_logprobs=False),
}

_OPENAI_HOSTS: Final = (".openai.com", ".openai.azure.com")


def traits_of(
    server: ServerKind, urls: Iterable[str], *, continues: bool | None = None
) -> ServerTraits:
    """Return the traits of a tier's server; OpenAI's own hosts need the newer token limit.

    `continues`: whether it can continue an answer; None: as servers of its kind do.
    """
    traits = TRAITS[server]
    if continues is not None and continues != (traits.continuation != "none"):
        traits = replace(traits, continuation="final_message" if continues else "none")
    if server != "openai" or not all(_is_openai(url) for url in urls):
        return traits
    return replace(traits, token_limit="max_completion_tokens")


def _is_openai(url: str) -> bool:
    return f".{urlsplit(url).hostname}".endswith(_OPENAI_HOSTS)
