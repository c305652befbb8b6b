"""Checkpoints whose files lie: each is refused in a sentence, and none runs code of its own."""

import ast
import builtins
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file, save_file

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.load import load_model
from outrider.engine.model.read_config import read_model_config
from outrider.gateway.answering.text.plain_tokenizer import load_tokenizer
from tests.engines import PAIR_FOLDER
from tests.sizes import repeats
from tests.transformers_models import make_transformers_model

ROOT: Final = Path(__file__).parents[3]
NATIVE: Final = PAIR_FOLDER / "small"
LIES: Final[tuple[Any, ...]] = (
    0, -1, 1, 10**9, 2**63, 10**400, "x", "", None, True, [], [0], {}, {"rope_type": "default"},
    {"rope_type": "yarn", "factor": "x"}, 1e308, float("nan"), -0.5,
    {"quant_method": "gptq", "bits": [4]}, {"quant_method": "awq", "bits": 4, "version": {}},
    {"quant_method": "fp8", "weight_block_size": [True, 10**400]},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": []}}}},
)  # fmt: skip
MORE_NAMES: Final = (
    *("head_dim", "sliding_window", "layer_types", "quantization_config", "compression_config"),
    *("rope_scaling", "auto_map", "model_type", "architectures", "dtype", "eos_token_id"),
    "text_config",
)
OWN_CODE: Final = """
raise SystemExit("the checkpoint's own code ran")
"""


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A copy of a checkpoint that the engine's own decoder runs."""
    shutil.copytree(NATIVE, tmp_path / "native")
    return tmp_path / "native"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A checkpoint that runs through transformers."""
    make_transformers_model("gpt_neox").save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def check_lies(folder: Path, count: int) -> None:
    """A config with lies in up to two fields is described, or refused in a sentence."""
    rng = random.Random(1)
    right = config_of(folder)
    names = sorted({*right, *MORE_NAMES})
    lies = [{name: lie} for name in names for lie in LIES]
    lies += [{**rng.choice(lies), **rng.choice(lies)} for _ in range(len(lies))]
    num_refused = 0
    for lie in rng.sample(lies, min(count, len(lies))):
        (folder / "config.json").write_text(json.dumps({**right, **lie}))
        try:
            read_model_config(folder)
        except UnsupportedModelError:
            num_refused += 1
        except Exception as error:
            raise AssertionError(f"{lie} was not refused, but broke its reader") from error
    assert num_refused > count / 4


def test_no_lie_in_a_config_breaks_its_reader(native: Path) -> None:
    check_lies(native, repeats(1000, 150))


@pytest.mark.slow
def test_no_lie_in_a_config_of_transformers_breaks_its_reader(foreign: Path) -> None:
    check_lies(foreign, repeats(1000, 60))


@pytest.mark.parametrize("count", [10**9, 2**63, 10**400], ids=["billion", "64 bits", "400 digits"])
def test_a_billion_layers_are_refused_before_one_is_made(
    count: int, native: Path, foreign: Path
) -> None:
    """A reader that makes something of each layer took all memory, and did not end."""
    for folder in (native, foreign):
        write_config(folder, num_hidden_layers=count)
        with pytest.raises(UnsupportedModelError, match="num_hidden_layers"):
            read_model_config(folder)


def test_nor_those_of_a_part_that_takes_images(native: Path) -> None:
    parts = {"text_config": config_of(native), "vision_config": {"model_type": "siglip"}}
    for name in parts:
        part = parts[name] | {"num_hidden_layers": 10**9}
        whole = {**parts, name: part}
        write_config(native, architectures=["LlavaForConditionalGeneration"], **whole)
        with pytest.raises(UnsupportedModelError, match="num_hidden_layers"):
            read_model_config(native)


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("which", ["native", "foreign"])
@pytest.mark.parametrize(
    "content",
    [
        (10**12).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1000000000]',
        b"",
        b"PK\x03\x04",
    ],
    ids=["a header of 1 TB", "a header of 2**64", "no object", "half a header", "empty", "a zip"],
)
def test_broken_files_of_weights_are_refused(
    content: bytes, which: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(which)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"cannot be read|not a safetensors"):
        load_model(str(folder))


def test_an_index_names_files_beside_it_only(native: Path, tmp_path: Path) -> None:
    """A downloaded checkpoint must not read other files of the machine."""
    weights = native / "model.safetensors"
    tensors = load_file(weights)
    outside = tmp_path / "outside.safetensors"
    save_file(tensors, outside)
    weights.unlink()
    for name in (f"../{outside.name}", str(outside), "", ".", "..", 3, None, ["x"]):
        index = {"weight_map": dict.fromkeys(tensors, name)}
        (native / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UnsupportedModelError, match="beside it"):
            load_model(str(native))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}'])
def test_a_broken_index_is_refused(text: str, native: Path) -> None:
    (native / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match="weight_map"):
        load_model(str(native))


# ---- code ---------------------------------------------------------------------------------------


def test_a_checkpoints_own_code_is_never_run_nor_asked_about(
    native: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal for leave, unless it is told no at once."""

    def asked(*_: object) -> str:
        raise AssertionError("it asked for leave to run the checkpoint's code")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for folder in (native, foreign):
        (folder / "own.py").write_text(OWN_CODE)
        own = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "own.Own")
        write_config(folder, model_type="own", auto_map=own)
        with pytest.raises(UnsupportedModelError):
            load_model(str(folder))
        tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        with pytest.raises((OSError, ValueError)):
            load_tokenizer(folder)


def test_every_reader_of_checkpoints_refuses_their_code() -> None:
    """No call of an Auto class leaves the choice to a default."""
    packages = ("engine", "gateway", "draft", "router", "verifier")
    calls = [
        (path.name, call)
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if "from_pretrained" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and _is_auto(call.func)
    ]
    assert len(calls) > 5
    for name, call in calls:
        given = {word.arg: word.value for word in call.keywords}
        value = given.get("trust_remote_code")
        assert isinstance(value, ast.Constant), (name, call.lineno)
        assert value.value is False, (name, call.lineno)


def _is_auto(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "from_pretrained"
        and isinstance(function.value, ast.Name)
        and function.value.id.startswith("Auto")
    )
