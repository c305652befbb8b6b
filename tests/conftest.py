"""Settings that all tests share."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test talks to a hub
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from hypothesis import settings

if not torch.cuda.is_available():  # before any kernel is imported
    os.environ["TRITON_INTERPRET"] = "1"

# Test machines are shared and slow at times: a time limit for each example only adds noise.
settings.register_profile("outrider", deadline=None, max_examples=50)
settings.load_profile("outrider")

# Tiny tensors: a second thread only waits at barriers.
torch.set_num_threads(1)
