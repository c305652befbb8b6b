"""Checks of a checkpoint before torch is imported: what is missing, what it is instead, what to do.

Everything here takes milliseconds for a folder, and one request for a hub id, so that a wrong name
is refused before processes start. The engine checks the rest when it reads the files.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import read_object

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

logger = logging.getLogger(__name__)

_HUB_TIMEOUT_S: Final = 10.0
_INDEX: Final = "model.safetensors.index.json"
_ADAPTER: Final = "adapter_config.json"
_TOKENIZERS: Final = frozenset(
    {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}
)
"""Files of which transformers makes a fast tokenizer."""
_OTHER_WEIGHTS: Final[Mapping[str, str]] = {
    ".bin": "PyTorch's pickles",
    ".pt": "PyTorch's pickles",
    ".pth": "PyTorch's pickles",
    ".h5": "TensorFlow's",
    ".msgpack": "Flax's",
    ".onnx": "ONNX",
    ".npz": "MLX's or NumPy's",
    ".ggml": "llama.cpp's old format",
}
_POINTER: Final = b"version https://git-lfs"
_GENERATIVE: Final = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "ForConditionalGeneration")


def check_checkpoint(path_or_id: str, revision: str | None = None) -> None:
    """Raise UnsupportedModelError for what cannot be a checkpoint; may ask the hub about an id.

    `revision`: of a hub id; None for main.
    """
    folder = Path(path_or_id).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise UnsupportedModelError(
                f"{path_or_id} is a file of another kind. Name a folder with a checkpoint, a "
                "*.gguf file, or a Hugging Face id."
            )
        _check_on_hub(path_or_id, revision)
        return
    names = {file.name for file in folder.iterdir()}
    _check_names(path_or_id, names, read_object(folder / _ADAPTER))
    _check_config(path_or_id, read_object(folder / "config.json"))
    _check_shards(path_or_id, names, read_object(folder / _INDEX))
    if pointers := sorted(name for name in names if _is_pointer(folder / name)):
        raise UnsupportedModelError(
            f"{path_or_id}: {pointers[0]} is a pointer of Git LFS, not the file itself. Run "
            "`git lfs pull` in that folder."
        )


def _check_shards(place: str, names: Collection[str], index: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedModelError where files that the index names are not there."""
    file_of = (index or {}).get("weight_map")
    named = file_of.values() if isinstance(file_of, dict) else ()
    if missing := sorted({str(name)[:200] for name in named} - set(names)):
        raise UnsupportedModelError(
            f"{place} lacks {len(missing)} of the files that {_INDEX} names, such as {missing[0]}. "
            "Download the checkpoint again."
        )


def _check_names(place: str, names: Collection[str], adapter: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedModelError where config, weights or tokenizer are not among the files."""
    if adapter is not None or (_ADAPTER in names and "config.json" not in names):
        base = str((adapter or {}).get("base_model_name_or_path") or "its base model")[:200]
        raise UnsupportedModelError(
            f"{place} is a LoRA adapter ({_ADAPTER}), not a whole model. Name {base}, and "
            "give the adapter a name: --lora NAME=FOLDER."
        )
    if "config.json" not in names:
        raise UnsupportedModelError(
            f"{place} is not a checkpoint: it has no config.json. Give a folder with "
            "config.json, *.safetensors and a tokenizer, or a Hugging Face id." + _ggufs(names)
        )
    has_weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    if not has_weights and "model.gguf" not in names:
        raise UnsupportedModelError(f"{place} has no *.safetensors.{_ways_out(names)}")
    if not _TOKENIZERS & set(names):
        raise UnsupportedModelError(
            f"{place} has no tokenizer (tokenizer.json). Copy tokenizer.json and "
            "tokenizer_config.json from the model that it was made of, or save them with "
            f"transformers: `AutoTokenizer.from_pretrained(MODEL).save_pretrained({place!r})`."
        )


def _ways_out(names: Collection[str]) -> str:
    """Say which weights there are instead, and how to get usable ones."""
    others = {suffix: name for name in sorted(names) if (suffix := Path(name).suffix)}
    for suffix, kind in _OTHER_WEIGHTS.items():
        if suffix in others:
            return (
                f" {others[suffix]} is in {kind}, which is not read. Convert it: transformers' "
                "`AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER)` writes "
                "safetensors."
            )
    return _ggufs(names) or " Download the checkpoint again."


def _ggufs(names: Collection[str]) -> str:
    files = sorted(name for name in names if name.endswith(".gguf"))
    return f" It has {files[0]}: download it, and name that file." if files else ""


def _check_config(place: str, config: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedModelError for a config.json that no text generator has."""
    if config is None:
        raise UnsupportedModelError(f"{place}: config.json is not a JSON object.")
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str):
        return  # the engine says what it makes of it
    if config.get("is_encoder_decoder") or not name.endswith(_GENERATIVE):
        kind = "an encoder-decoder" if config.get("is_encoder_decoder") else "it writes no text"
        raise UnsupportedModelError(
            f"{place} is {name}: {kind}. Outrider runs decoders (…ForCausalLM); docs/models.md "
            "lists them."
        )
    known = _transformers_table()
    if known and f'"{name}"' not in known:
        raise UnsupportedModelError(
            f"{place} is {name}, which the installed transformers does not know, and code from "
            "checkpoints is not run. Install a transformers that has it; docs/models.md lists the "
            "architectures that are served."
        )


@functools.cache
def _transformers_table() -> str:
    """Return the text that names transformers' architectures; empty where it is not found.

    Its import would take seconds. All architectures with a decoder of the engine's own are there.
    """
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return ""
    table = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        return table.read_text(encoding="utf-8")
    except OSError:
        return ""


def _is_pointer(file: Path) -> bool:
    if file.suffix not in (".safetensors", ".json", ".gguf") or not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def _check_on_hub(model_id: str, revision: str | None) -> None:
    """Raise UnsupportedModelError where the files on the hub are no checkpoint."""
    info = ask_hub(model_id, revision)
    if info is None:
        return
    _check_names(model_id, [file.rfilename for file in info.siblings or ()], None)
    if isinstance(info.config, dict):
        _check_config(model_id, info.config)


@functools.cache
def ask_hub(model_id: str, revision: str | None) -> "ModelInfo | None":
    """Ask the hub once for a model's files; None where it cannot be asked, and a copy is cached.

    The hub's own client tries each of some ten requests six times, which takes a minute. Raises
    UnsupportedModelError for a model or a revision that is not there.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(model_id)
    except errors.HFValidationError as error:
        raise UnsupportedModelError(
            f"{model_id} is neither a folder here nor a Hugging Face id: {error}"
        ) from None
    cached = huggingface_hub.try_to_load_from_cache(model_id, "config.json", None, revision)
    is_cached = isinstance(cached, str)
    which = model_id if revision is None else f"{model_id} at revision {revision}"
    if constants.HF_HUB_OFFLINE:
        if is_cached:
            return None
        raise UnsupportedModelError(
            f"{which} is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to fetch it: "
            "unset it for one start, or name a folder."
        )
    try:
        return huggingface_hub.HfApi().model_info(
            model_id, revision=revision, timeout=_HUB_TIMEOUT_S
        )
    except errors.GatedRepoError:
        raise UnsupportedModelError(
            f"{model_id} is gated: accept its terms on https://huggingface.co/{model_id}, and set "
            "HF_TOKEN to a token of that account."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UnsupportedModelError(
            f"{model_id} is neither a folder here nor a model on the Hugging Face hub that you may "
            "see. Check the spelling; for a private one set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise UnsupportedModelError(
            f"{model_id} has no revision {revision} on the Hugging Face hub. Name a branch, a tag "
            f"or a full commit hash (https://huggingface.co/{model_id}/commits/main lists them), "
            "or leave the revision out."
        ) from None
    except Exception as error:  # noqa: BLE001 - the client's transport has its own, by version
        reason = first_line(error)
        if not is_cached:
            raise UnsupportedModelError(
                f"{which} is neither a folder here nor in the cache, and the Hugging Face hub "
                f"cannot be asked ({reason}). Check the spelling and the connection, or name a "
                "folder."
            ) from None
        logger.warning("hub cannot be asked, the copy in the cache is used reason=%s", reason)
        # For the engine's process, and for this one, where the client has read it already.
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        return None


def first_line(error: Exception) -> str:
    """Return what an error of the hub's client says, without its advice on its own settings."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
