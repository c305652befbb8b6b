"""Kinds of servers, endpoints and policies: words that requests, settings and answers share."""

from typing import Literal

Endpoint = Literal["chat", "completion"]

UsageSource = Literal["reported", "counted", "estimated"]
"""Who says how many tokens there were: the server, our own tokenizer, or the text's length."""

Policy = Literal["local_only", "prefer_local", "prefer_cloud", "cloud_only"]
"""Who may answer what `auto` is asked: models of this machine, and a tier elsewhere."""

Capability = Literal["tools", "images", "audio", "files"]


ServerKind = Literal[
    "openai", "outrider", "vllm", "sglang", "tgi", "tensorrt_llm", "llama_cpp", "anthropic"
]
