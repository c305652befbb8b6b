"""Writes a checkpoint of the bundled pair as a GGUF file: `python write_gguf.py FOLDER FILE`.

Runs where llama-cpp-python is installed, with the `gguf` package and without torch.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Tensors of a layer, by their names in both worlds.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_weights(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a bfloat16 safetensors file, in float32."""
    raw = file.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    weights = {}
    for name, entry in json.loads(raw[8:begin]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", entry
        first, last = entry["data_offsets"]
        halves = np.frombuffer(raw[begin + first : begin + last], np.uint16)
        floats = (halves.astype(np.uint32) << 16).view(np.float32)
        weights[name] = floats.reshape(entry["shape"])
    return weights


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order that llama.cpp rotates them in."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def add_model(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the fields that say how the weights are read."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Vocabulary, merges and chat template."""
    document = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in document["added_tokens"]}
    ids = document["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(config["vocab_size"]))
    kinds = [
        gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")  # each digit by itself, then GPT-2's expression
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)  # the template writes it
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def add_weights(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """All tensors, in float32. The output layer is the embedding."""
    assert config["tie_word_embeddings"]
    weights = read_weights(folder / "model.safetensors")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in heads:
                weight = interleaved(weight, heads[ours])
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(weight))


def main(folder: Path, file: Path) -> None:
    """Write it."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    add_model(writer, config)
    add_tokenizer(writer, folder, config)
    add_weights(writer, folder, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
