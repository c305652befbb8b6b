"""The architectures that the engine runs itself, by the name that config.json gives them."""

from collections.abc import Callable, Mapping
from typing import Final

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.families.cohere import describe_cohere2
from outrider.engine.model.families.gemma import describe_gemma, describe_gemma2, describe_gemma3
from outrider.engine.model.families.glm import describe_glm, describe_glm4
from outrider.engine.model.families.gpt_oss import describe_gpt_oss
from outrider.engine.model.families.llama import (
    describe_granite,
    describe_llama,
    describe_mistral,
    describe_qwen2,
    describe_qwen3,
    describe_smollm3,
)
from outrider.engine.model.families.mixtures import (
    describe_glm4_moe,
    describe_mixtral,
    describe_olmoe,
    describe_qwen2_moe,
    describe_qwen3_moe,
)
from outrider.engine.model.families.olmo import describe_olmo2
from outrider.engine.model.families.phi import describe_phi3
from outrider.engine.model.families.qwen_delta import (
    describe_qwen3_5,
    describe_qwen3_5_moe,
    describe_qwen3_next,
)
from outrider.engine.model.families.source import ConfigSource

FAMILIES: Final[Mapping[str, Callable[[ConfigSource], ModelConfig]]] = {
    "Cohere2ForCausalLM": describe_cohere2,
    "Gemma2ForCausalLM": describe_gemma2,
    "Gemma3ForCausalLM": describe_gemma3,
    "GemmaForCausalLM": describe_gemma,
    "Glm4ForCausalLM": describe_glm4,
    "Glm4MoeForCausalLM": describe_glm4_moe,
    "GlmForCausalLM": describe_glm,
    "GptOssForCausalLM": describe_gpt_oss,
    "GraniteForCausalLM": describe_granite,
    "LlamaForCausalLM": describe_llama,
    "MistralForCausalLM": describe_mistral,
    "MixtralForCausalLM": describe_mixtral,
    "Olmo2ForCausalLM": describe_olmo2,
    "OlmoeForCausalLM": describe_olmoe,
    "Phi3ForCausalLM": describe_phi3,
    "Qwen2ForCausalLM": describe_qwen2,
    "Qwen2MoeForCausalLM": describe_qwen2_moe,
    "Qwen3ForCausalLM": describe_qwen3,
    "Qwen3MoeForCausalLM": describe_qwen3_moe,
    "Qwen3NextForCausalLM": describe_qwen3_next,
    "Qwen3_5ForCausalLM": describe_qwen3_5,
    "Qwen3_5MoeForCausalLM": describe_qwen3_5_moe,
    "SmolLM3ForCausalLM": describe_smollm3,
}
