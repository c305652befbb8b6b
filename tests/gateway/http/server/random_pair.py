"""Two tiny random models for processes of the gateway, and waiting for these."""

import shutil
from pathlib import Path

import pytest

from tests.models import save_hf_model

SHAPE = {"vocab_size": 420, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> dict[str, Path]:
    """Two random models that share a tokenizer and, being random, seldom stop by themselves."""
    folders = {}
    for seed, tier in enumerate(("large", "small")):
        folders[tier] = tmp_path_factory.mktemp(tier)
        save_hf_model("llama2", folders[tier], seed=seed, **SHAPE)
        shutil.copytree(tokenizer_folder, folders[tier], dirs_exist_ok=True)
    return folders
