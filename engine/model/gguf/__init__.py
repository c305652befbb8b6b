"""Checkpoints in llama.cpp's format: one file that holds a model's description and its weights.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
