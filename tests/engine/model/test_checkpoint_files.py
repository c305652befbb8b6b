"""What a checkpoint is called, by where it lies."""

import pytest

from outrider.engine.model.checkpoint_files import hub_commit, model_name


@pytest.mark.parametrize(
    ("path", "name", "commit"),
    [
        ("/cache/models--acme--tiny-2/snapshots/c0ffee", "tiny-2", "c0ffee"),
        ("/cache/models--gpt2/snapshots/c0ffee/", "gpt2", "c0ffee"),
        ("acme/tiny", "tiny", None),
        ("/mine/snapshots/3/", "3", None),
        (".", ".", None),
    ],
)
def test_a_folder_of_the_cache_is_named_by_its_repository(
    path: str, name: str, commit: str | None
) -> None:
    assert model_name(path) == name
    assert hub_commit(path) == commit
