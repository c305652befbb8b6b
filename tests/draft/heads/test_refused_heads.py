"""Heads for another model, broken files and files that lie: each is refused in a sentence."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from outrider.draft.heads.protocol import HeadError
from outrider.draft.heads.read_head import read_head
from outrider.engine.model.decoder import DecoderModel
from tests.draft.heads.head_files import (
    HIDDEN,
    VOCAB,
    Weights,
    dflash_config,
    dflash_weights,
    eagle3_weights,
    make_target,
    peagle_weights,
    specforge_config,
    speculators_config,
    write_head,
)
from tests.mutated_checkpoints import damage
from tests.sizes import repeats

LIES: Final[tuple[Any, ...]] = (
    0, -1, 1, 3, 10**9, 2**63, 10**400, "x", "", None, True, [], [0], [-1], [1, 1], [[1]], {},
    {"x": 1}, [10**400], 1e308, float("nan"), 0.5, {"rope_type": "yarn", "factor": "x"},
    {"eagle_aux_hidden_state_layer_ids": 7}, {"target_layer_ids": ["x"]},
    {"proposal_methods": [1]}, {"sliding_attention": {}},
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return make_target(tmp_path_factory.mktemp("target"))


Change = Callable[[Weights], None]

WRONG_CONFIGS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "other width": ({"target_hidden_size": 128}, "reads hidden states of 128 numbers, but .* 64"),
    "other vocabulary": ({"vocab_size": 200}, "a vocabulary of 200 tokens, but .* has 131"),
    "other checkpoint": (
        {"target_fingerprint": "0" * 16},
        "for a checkpoint with the fingerprint 0{16}, but .* delete target_fingerprint",
    ),
    "a language model": ({"architectures": ["LlamaForCausalLM"]}, "not a drafter .* small model"),
    "no architecture": ({"architectures": None}, "not a drafter that reads hidden states"),
    "deeper taps": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        r"reads the hidden states \[1, 2, 4\], but .* from 0 to 3",
    ),
    "latent attention": ({"model_type": "deepseek_v3"}, "layers of type 'deepseek_v3'"),
    "huge heads": ({"head_dim": 10**9}, "at most 16384"),
    "no flag": ({"norm_output": "yes"}, "norm_output = yes is neither true nor false"),
    "many layers": ({"num_hidden_layers": 10**9}, "not a number from 1 to 64"),
    "huge layers": ({"intermediate_size": 2**31 - 1}, r"has the shape \[96, 64\], but"),
    "no mask": ({"ptd_token_id": VOCAB}, "mask_token_id = 131 is no token"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_configs_of_another_model(name: str, tmp_path: Path, target: DecoderModel) -> None:
    changes, message = WRONG_CONFIGS[name]
    weights = eagle3_weights()
    path = write_head(tmp_path, weights, specforge_config(weights, **changes))
    with pytest.raises(HeadError, match=message) as raised:
        read_head(path, target)
    assert str(tmp_path) in str(raised.value)


def test_hidden_states_that_a_config_leaves_out(tmp_path: Path, target: DecoderModel) -> None:
    """Those of EAGLE-3's authors: behind two layers, in the middle, three from the end."""
    weights = eagle3_weights()
    config = specforge_config(weights, eagle_config=None)
    assert read_head(write_head(tmp_path, weights, config), target).tap_layers == (2, 1, 0)


def test_the_stated_checkpoint_is_accepted(tmp_path: Path, target: DecoderModel) -> None:
    weights = eagle3_weights()
    config = specforge_config(weights, target_fingerprint=target.fingerprint)
    assert read_head(write_head(tmp_path, weights, config), target).kind == "eagle3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculators_model_type": "dspark", "speculators_version": "1.0"},
            "a 'dspark' drafter of speculators 1.0, .* supported are eagle3, peagle, dflash",
        ),
        (
            {"gated_features": True, "speculators_version": "2.0"},
            "has gated_features, of speculators 2.0; .* up to speculators 0.9",
        ),
        ({"transformer_layer_config": 7}, "no object transformer_layer_config"),
        (
            {"speculators_model_type": "peagle", "chained_blocks": 2, "speculators_version": "1.1"},
            "has chained_blocks, of speculators 1.1; .* up to speculators 0.9",
        ),
    ],
)
def test_newer_speculators(
    changes: dict[str, Any], message: str, tmp_path: Path, target: DecoderModel
) -> None:
    weights = eagle3_weights()
    path = write_head(tmp_path, weights, speculators_config(weights, **changes))
    with pytest.raises(HeadError, match=message):
        read_head(path, target)


def test_settings_that_newer_versions_leave_off_are_no_reason(
    tmp_path: Path, target: DecoderModel
) -> None:
    weights = eagle3_weights()
    config = speculators_config(weights, gated_features=False, speculators_version="2.0")
    assert read_head(write_head(tmp_path, weights, config), target).kind == "eagle3"


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(weights: Weights) -> None:
        weights[name] = change(weights[name].clone())

    return apply


def _first(value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


WRONG_TENSORS: Final[dict[str, tuple[Change, str]]] = {
    "no d2t": (
        lambda weights: weights.pop("d2t"),
        "guesses 50 of 131 tokens, but has no table d2t",
    ),
    "d2t beyond": (_set("d2t", _first(500)), "leads to the tokens .* 500, but .* from 0 to 130"),
    "d2t below": (_set("d2t", _first(-1)), "leads to the tokens -1 to"),
    "d2t huge": (_set("d2t", _first(2**63 - 1)), "leads to the tokens"),
    "d2t twice": (_set("d2t", lambda table: -torch.arange(50)), "to one token from several"),
    "d2t in floats": (_set("d2t", torch.Tensor.float), "the table d2t is torch.float32"),
    "d2t short": (_set("d2t", lambda table: table[:9]), r"of the shape \[9\], but .* 50 whole"),
    "t2d of others": (_set("t2d", torch.Tensor.logical_not), "d2t and t2d disagree"),
    "never trained": (_set("lm_head.weight", _first(torch.nan)), "lm_head.weight has numbers that"),
    "infinite": (_set("fc.weight", _first(-torch.inf)), "fc.weight has numbers that are not"),
    "other shape": (
        _set("fc.weight", lambda weight: weight.T),
        r"fc.weight has the shape \[192, 64",
    ),
    "missing": (lambda weights: weights.pop("norm.weight"), "norm.weight is missing"),
    "more": (lambda weights: weights.update(x=torch.zeros(1)), "1 unexpected .* these weights: x"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors(name: str, tmp_path: Path, target: DecoderModel) -> None:
    change, message = WRONG_TENSORS[name]
    weights = eagle3_weights()
    config = speculators_config(weights)
    change(weights)
    weights = {each: tensor.contiguous() for each, tensor in weights.items()}
    with pytest.raises(HeadError, match=message) as raised:
        read_head(write_head(tmp_path, weights, config), target)
    assert str(tmp_path) in str(raised.value)


def test_a_head_of_its_own_width_needs_its_own_table(tmp_path: Path, target: DecoderModel) -> None:
    weights = eagle3_weights(width=96)
    config = speculators_config(weights, target_hidden_size=HIDDEN)
    with pytest.raises(HeadError, match=r"no table of tokens .* 96 numbers a row, .* which has 64"):
        read_head(write_head(tmp_path, weights, config), target)


def test_a_block_drafter_without_its_mask(tmp_path: Path, target: DecoderModel) -> None:
    weights = peagle_weights()
    config = speculators_config(weights, "peagle", mask_token_id=3)
    del weights["mask_hidden"]
    with pytest.raises(HeadError, match="mask_hidden is missing"):
        read_head(write_head(tmp_path, weights, config), target)


def test_dflash_of_other_models(tmp_path: Path, target: DecoderModel) -> None:
    weights = dflash_weights()
    for number, (changes, message) in enumerate(
        [
            ({"num_target_layers": 36}, "a model of 36 layers, but .* has 3"),
            ({"block_size": 10**6}, "a block of 1000000 rows cannot be run"),
            ({"block_size": 1}, "a block of 1 rows .* from 2 to 64. .* the block_size of training"),
            ({"block_size": 0}, "a block of 0 rows cannot be run"),
            ({"mask_token_id": VOCAB}, "mask_token_id = 131 is no token of .* ids go to 130"),
            ({"mask_token_id": -1}, "mask_token_id = -1 is no token"),
            ({"hidden_size": 128}, "reads hidden states of 128 numbers, but .* 64"),
            ({"dflash_config": {"projector_type": "domino"}}, "by a 'domino' head"),
            ({"dflash_config": {"mask_token_id": 130}}, "names no target_layer_ids"),
        ]
    ):
        path = write_head(tmp_path / str(number), weights, dflash_config(weights, **changes))
        with pytest.raises(HeadError, match=message):
            read_head(path, target)


def test_folders_that_are_none(tmp_path: Path, target: DecoderModel) -> None:
    with pytest.raises(HeadError, match=r"is not a drafter: it has no config\.json"):
        read_head(str(tmp_path), target)
    weights = eagle3_weights()
    write_head(tmp_path, weights, specforge_config(weights))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HeadError, match=r"model\.safetensors"):
        read_head(str(tmp_path), target)
    path.unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match=r"pytorch_model.bin, a format that is not supported"):
        read_head(str(tmp_path), target)


def test_configs_that_lie(tmp_path: Path, target: DecoderModel) -> None:
    """Whatever stands in config.json: a head or a sentence, and no memory for what is not there."""
    rng = random.Random(1)
    layouts: list[tuple[Weights, dict[str, Any]]] = []
    weights = eagle3_weights()
    layouts.append((weights, specforge_config(weights)))
    weights = peagle_weights()
    layouts.append((weights, speculators_config(weights, "peagle", mask_token_id=3)))
    weights = dflash_weights()
    layouts.append((weights, dflash_config(weights)))
    num_refused = 0
    for weights, right in layouts:
        save_file(weights, tmp_path / "model.safetensors")
        inner = right.get("transformer_layer_config", {})
        names = [(name,) for name in right] + [("transformer_layer_config", n) for n in inner]
        lies = [(place, lie) for place in names for lie in LIES]
        for place, lie in rng.sample(lies, min(repeats(1000, 60), len(lies))):
            config = json.loads(json.dumps(right))
            holder = config
            for name in place[:-1]:
                holder = holder[name]
            holder[place[-1]] = lie
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                read_head(str(tmp_path), target)
            except HeadError:
                num_refused += 1
            except Exception as error:
                raise AssertionError(f"{place}: {lie} broke the reader") from error
    assert num_refused > 60


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_files_that_lie(kind: str, tmp_path: Path, target: DecoderModel) -> None:
    """A head or a sentence, and its tokens are the large model's, whatever d2t holds."""
    weights = {"eagle3": eagle3_weights, "peagle": peagle_weights, "dflash": dflash_weights}[kind]()
    right = (
        dflash_config(weights)
        if kind == "dflash"
        else speculators_config(weights, kind, mask_token_id=3)
    )
    write_head(tmp_path, weights, right)
    file = tmp_path / "model.safetensors"
    whole, rng, count = file.read_bytes(), random.Random(kind), repeats(150, 25)
    refusals: list[str] = []
    for _ in range(count):
        file.write_bytes(whole)
        told = damage(file, rng)
        try:
            head = read_head(str(tmp_path), target)
        except HeadError as error:
            refusals.append(str(error))
        except Exception as error:
            raise AssertionError(f"{told} broke the reader") from error
        else:
            if (ids := head.target_token_ids) is not None:
                assert 0 <= int(ids.min()) <= int(ids.max()) < VOCAB
    assert all(str(tmp_path) in refusal and "\n" not in refusal for refusal in refusals)
    assert count / 4 < len(refusals) < count
