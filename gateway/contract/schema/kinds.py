"""Kinds of servers, endpoints and policies: words that requests, settings and answers share."""

from typing import Final, Literal, NamedTuple

from outrider.router.words import Prefer as Prefer

AUTO: Final = "auto"
"""The name under which the router chooses; a request without a model means it."""

Endpoint = Literal["chat", "completion"]

UsageSource = Literal["reported", "counted", "estimated"]
"""Source of token counts: the server, the gateway's tokenizer, or the text's length."""

Policy = Literal["local_only", "prefer_local", "prefer_cloud", "cloud_only"]
"""Tiers that may answer requests for `auto`: models of this machine, and an upstream tier."""

FallbackKind = Literal["failure", "context_length", "content_filter", "deadline"]
"""Why the next model of a chain is tried."""

ReasoningField = Literal["reasoning_content", "reasoning", "both"]
"""The field of a chat's answer that has the model's thinking."""
UnknownFields = Literal["refuse", "ignore", "pass"]
"""What is done with a request field that a tier does not know."""

PassedEndpoint = Literal["embeddings", "rerank", "images", "audio"]
"""Endpoints whose requests are passed on to upstream tiers as they came."""

Reveals = Literal["nothing", "tiers", "costs"]
"""What a client sees of how it is answered: no more than the answer; the tier, its model and the
reason too; the operator's costs too."""

PassedUnit = Literal["image", "audio_second", "speech_byte"]
"""What images and sounds are priced by: an image made, a second of sound transcribed or translated,
a byte of text spoken."""


class Units(NamedTuple):
    """A number of units of one kind."""

    unit: PassedUnit
    num: int


Capability = Literal["tools", "images", "audio", "files"]
ModelCapability = Capability | Literal["structured_outputs", "reasoning"]


ServerKind = Literal[
    "openai", "outrider", "vllm", "sglang", "tgi", "tensorrt_llm", "llama_cpp", "anthropic"
]

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
"""The state of a model on demand."""

ToolFormatName = Literal[
    "hermes",
    "llama3",
    "mistral",
    "mistral11",
    "granite",
    "phi4",
    "cohere",
    "deepseek",
    "qwen3_coder",
    "glm45",
    "harmony",
]
"""Formats in which models write tool calls."""
