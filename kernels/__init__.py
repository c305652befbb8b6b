"""The operations of a model: each has a torch reference, a Triton kernel and a launcher.

Open `sampling/sample.py` first as an example, then `triton_support.py`, which picks and launches
kernels; `cpu/` has the products in C++. Terms: a row is one token's place in a pass. A slot is a
place in the KV cache. A plan says for a whole pass which keys each row sees.
Files without a launcher hold plans, or parts that several kernels share.
"""
