"""The serving side of a trained router: plain arrays in, probabilities out, numpy only.

scikit-learn trains (router/estimator.py); what it learnt is one linear layer a tier and stage, into
which scaling and calibration are folded, so serving needs neither scikit-learn nor pickle. Stages:

- text: the prompt's features;
- prompt: the text's word mixed with that of labelled neighbours (the encoder), then its logits and
  the hidden state of the prompt's last token (the probe);
- answer: the logits of the stage before and the log-probabilities of the small model's tokens.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from outrider.router.answer_features import (
    ANSWER_FEATURE_VERSION,
    answer_features,
    answer_inputs,
    num_answer_inputs,
)
from outrider.router.assurance import Assurance
from outrider.router.calibration import ALWAYS_LARGE, Calibration
from outrider.router.encoder.stage import EncoderStage, stage_arrays, take_stage
from outrider.router.estimates import LinearStage, QualityEstimate, estimate_of
from outrider.router.familiarity import Familiarity, num_ngrams
from outrider.router.features import (
    FEATURE_VERSION,
    FeatureConfig,
    FloatRows,
    SparseVector,
    prompt_features,
)
from outrider.router.files import CONFIG_NAME, RouterFiles, read_files, record_from, write_files
from outrider.router.files import RouterFileError as RouterFileError
from outrider.router.ladder import Ladder
from outrider.router.worth import Worth

Hashes = NDArray[np.uint64]

MAX_PROMPT_HASHES: Final = 2**18
_PAIR_HEADS: Final = ("weak", "strong")
_MAX_PAIR_CHARS: Final = 100
_MAX_HIDDEN_SIZE: Final = 2**17


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterScorer:
    """A trained router.

    Heads are the small tier's and, if it was labelled, the large tier's; else those of `tiers`.
    """

    features: FeatureConfig
    weight: FloatRows
    """[num_heads, num_features]."""
    bias: FloatRows
    """[num_heads]."""
    threshold: float
    """From this quality on the small model answers."""
    pair: str | None = None
    """Fingerprints of the models that it was trained for, "<small>-<large>"; None if unknown."""
    encoder: EncoderStage | None = None
    probe: LinearStage | None = None
    """Takes [logits of the text or, where there is one, the encoder | hidden state]."""
    answer: LinearStage | None = None
    """Takes what `answer_inputs` makes."""
    calibration: Calibration | None = None
    prompt_hashes: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """Hashes of the training prompts, ascending; the smallest MAX_PROMPT_HASHES at most."""
    assurances: tuple[Assurance, ...] = ()
    """What is kept with a stated probability, for each width of the small model's weights. Empty
    for routers of earlier versions."""
    familiarity: Familiarity | None = None
    """Finds prompts that are unlike the training's. None for routers of earlier versions."""
    tiers: Ladder | None = None
    """By rising cost; None: a small and a large tier."""
    worth: Worth | None = None
    """Weighs gains by what they cost; the calibration is then for such gains. None: not weighed."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """For people; never read back."""

    def __post_init__(self) -> None:
        """Raise ValueError if shapes or values cannot be a router's."""
        num_heads = len(self.bias) if self.bias.ndim == 1 else 0
        self._check_tiers(num_heads)
        expected = (num_heads, self.features.num_features)
        if self.weight.shape != expected:
            raise ValueError(f"weight has shape {list(self.weight.shape)}, not {list(expected)}")
        if not (np.isfinite(self.weight).all() and np.isfinite(self.bias).all()):
            raise ValueError("weights hold values that are not finite")
        if not 0.0 <= self.threshold <= ALWAYS_LARGE:
            raise ValueError(f"threshold={self.threshold} must be in [0, {ALWAYS_LARGE}]")
        if self.calibration is not None and self.calibration.chosen.threshold != self.threshold:
            raise ValueError(
                f"threshold={self.threshold} is not the calibration's "
                f"{self.calibration.chosen.threshold}"
            )
        if self.pair is not None and not 0 < len(self.pair) <= _MAX_PAIR_CHARS:
            raise ValueError(f"pair={self.pair[:_MAX_PAIR_CHARS]!r} must be two fingerprints")
        self._check_stages(num_heads)
        known = self.familiarity
        if known is not None and known.known.shape != (num_ngrams(self.features),):
            raise ValueError(f"known_features have shape {list(known.known.shape)}")
        hashes = self.prompt_hashes
        if hashes.ndim != 1 or hashes.dtype != np.uint64 or len(hashes) > MAX_PROMPT_HASHES:
            raise ValueError(f"prompt_hashes are {hashes.dtype} {list(hashes.shape)}")
        if (hashes[1:] <= hashes[:-1]).any():
            raise ValueError("prompt_hashes must be in ascending order")

    def _check_tiers(self, num_heads: int) -> None:
        tiers = self.tiers
        if num_heads not in ((1, 2) if tiers is None else (len(tiers.names),)):
            wanted = "[1] or [2]" if tiers is None else f"[{len(tiers.names)}]"
            raise ValueError(f"bias has shape {list(self.bias.shape)}, not {wanted}")
        parts = (self.encoder, self.probe, self.answer, self.worth, self.pair)
        if tiers is not None and any(part is not None for part in parts):
            raise ValueError("among more than two tiers the text alone decides")

    def _check_stages(self, num_heads: int) -> None:
        if self.encoder is not None and self.encoder.num_heads != num_heads:
            raise ValueError(
                f"encoder has {self.encoder.num_heads} heads, the text has {num_heads}"
            )
        for name, stage in (("probe", self.probe), ("answer", self.answer)):
            if stage is not None and len(stage.bias) != num_heads:
                raise ValueError(f"{name} has {len(stage.bias)} heads, the text has {num_heads}")
        sizes = range(num_heads + 1, num_heads + _MAX_HIDDEN_SIZE + 1)
        if self.probe is not None and self.probe.num_inputs not in sizes:
            raise ValueError(f"probe has {self.probe.num_inputs} inputs: no hidden state")
        expected = num_answer_inputs(num_heads)
        if self.answer is not None and self.answer.num_inputs != expected:
            raise ValueError(f"answer has {self.answer.num_inputs} inputs, not {expected}")
        if self.worth is not None:
            self.worth.check(self.features.num_features)

    @property
    def head_names(self) -> list[str]:
        """The names of the heads in a router's file."""
        names = _PAIR_HEADS if self.tiers is None else self.tiers.names
        return list(names[: len(self.bias)])

    @property
    def hidden_size(self) -> int | None:
        """Length of the hidden state that the probe takes; None without a probe."""
        return None if self.probe is None else self.probe.num_inputs - len(self.bias)

    def estimate(self, text: str) -> QualityEstimate:
        """Probabilities for one prompt; a fraction of a millisecond, whatever its length."""
        return self._estimate(prompt_features(text, self.features), text)

    def estimate_familiar(self, text: str) -> QualityEstimate | None:
        """Estimate by the text; None for a prompt that is unlike those of the training."""
        vector = prompt_features(text, self.features)
        if self.familiarity is not None and self.familiarity.is_unlike(vector):
            return None
        return self._estimate(vector, text)

    def _estimate(self, vector: SparseVector, text: str) -> QualityEstimate:
        logits = np.take(self.weight, vector.indices, axis=1) @ vector.values + self.bias
        if self.worth is None:
            return estimate_of(logits)
        return replace(estimate_of(logits), tokens=self.worth.tokens(vector, len(text)))

    def estimate_prompt(
        self,
        text_estimate: QualityEstimate,
        hidden_state: Sequence[float] | FloatRows | None,
        shares: FloatRows | None = None,
    ) -> QualityEstimate:
        """Estimate with the word of the prompt's neighbours and its last token's hidden state.

        A part that is not known, does not fit or has no stage changes nothing.
        """
        estimate = text_estimate
        if self.encoder is not None and shares is not None and len(shares) == len(self.bias):
            estimate = self.encoder.estimate(estimate, shares)
        if self.probe is None or not _fits(hidden_state, self.hidden_size):
            return estimate
        return self.probe.estimate(np.concatenate((estimate.logits, np.asarray(hidden_state))))

    def estimate_answer(
        self,
        prompt_estimate: QualityEstimate,
        logprobs: Sequence[float] | FloatRows,
        *,
        is_whole: bool,
    ) -> QualityEstimate:
        """Estimate with the log-probabilities (temperature 1) of the small model's tokens so far.

        `prompt_estimate`: the last one before the answer. It is returned as it is where there is no
        answer stage or no token yet of an answer that goes on.
        """
        if self.answer is None or not (len(logprobs) or is_whole):
            return prompt_estimate
        features = answer_features(logprobs, is_whole=is_whole)
        return self.answer.estimate(answer_inputs(prompt_estimate.logits, features))

    def with_calibration(self, calibration: Calibration, worth: Worth | None = None) -> Self:
        """Return the same router, set to another operating point.

        `worth`: what the calibration weighed gains by.
        """
        threshold = calibration.chosen.threshold
        return replace(self, calibration=calibration, threshold=threshold, worth=worth)

    def with_assurance(self, assurance: Assurance) -> Self:
        """Return the same router with an assurance, in the place of that of the same width."""
        width = assurance.small_weights
        others = [each for each in self.assurances if each.small_weights != width]
        return replace(self, assurances=(*others, assurance))

    def was_trained_on(self, prompts: Iterable[str]) -> NDArray[np.bool_]:
        """Return which of the prompts are among those remembered from training, [num_prompts]."""
        return np.isin(prompt_hashes(prompts), self.prompt_hashes)

    def save(self, folder: Path) -> None:
        """Write the two files; the folder is made if it is missing."""
        arrays: dict[str, NDArray[Any]] = {
            "weight": np.ascontiguousarray(self.weight, dtype=np.float32),
            "bias": np.ascontiguousarray(self.bias, dtype=np.float64),
            "prompt_hashes": np.ascontiguousarray(self.prompt_hashes),
        }
        encoder = self.encoder
        if encoder is not None:
            arrays |= stage_arrays(encoder)
        for name, stage in (("probe", self.probe), ("answer", self.answer)):
            if stage is not None:
                arrays[f"{name}_weight"] = np.ascontiguousarray(stage.weight, dtype=np.float64)
                arrays[f"{name}_bias"] = np.ascontiguousarray(stage.bias, dtype=np.float64)
        known = self.familiarity
        if known is not None:
            arrays["known_features"] = known.packed
        if self.worth is not None:
            arrays |= self.worth.arrays
        config = {
            "feature_version": FEATURE_VERSION,
            "answer_feature_version": ANSWER_FEATURE_VERSION,
            "features": asdict(self.features),
            "heads": self.head_names,
            "threshold": self.threshold,
            "pair": self.pair,
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "training": dict(self.training),
            "assurances": [asdict(each) for each in self.assurances],
            "farthest": None if known is None else known.limit,
            "encoder": None if encoder is None else asdict(encoder.config),
            "costs": None if self.worth is None else asdict(self.worth.model),
            "tiers": None if self.tiers is None else asdict(self.tiers),
        }
        write_files(folder, RouterFiles(config=config, arrays=arrays))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a router; raises RouterFileError for anything that is not one."""
        files = read_files(folder)
        try:
            return cls(**_scorer_values(files))
        except (TypeError, ValueError) as error:
            raise RouterFileError(folder / CONFIG_NAME, str(error)) from error


def prompt_hashes(prompts: Iterable[str]) -> Hashes:
    """64 bits of each prompt without the spaces around it, [num_prompts]."""
    digests = [
        hashlib.blake2b(prompt.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for prompt in prompts
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def _fits(values: Sequence[float] | NDArray[Any] | None, size: int | None) -> bool:
    """Return whether there are as many numbers as a stage takes, all of them finite."""
    return values is not None and len(values) == size and bool(np.isfinite(values).all())


def _scorer_values(files: RouterFiles) -> dict[str, Any]:
    """The arguments of RouterScorer; raises ValueError for what cannot be."""
    config = dict(files.config)
    versions = {
        "feature_version": FEATURE_VERSION,
        "answer_feature_version": ANSWER_FEATURE_VERSION,
    }
    for name, known in versions.items():
        if (found := config.pop(name, None)) != known:
            raise ValueError(f"unknown {name} {found}; available: {known}. Train the router again")
    # Earlier versions lack these.
    farthest, encoder = config.pop("farthest", None), config.pop("encoder", None)
    costs, assurances = config.pop("costs", None), config.pop("assurances", [])
    tiers = config.pop("tiers", None)
    if not isinstance(assurances, list):
        raise ValueError("assurances must be a list")
    known_names = {"features", "heads", "threshold", "pair", "calibration", "training"}
    if set(config) != known_names:
        raise ValueError(f"must name {sorted(known_names)}, not {sorted(config)}")
    heads, training, pair, threshold = (
        config[name] for name in ("heads", "training", "pair", "threshold")
    )
    ladder = None if tiers is None else record_from(Ladder, tiers)
    _check_heads(heads, ladder)
    if not isinstance(training, dict):
        raise ValueError('"training" must be a JSON object')
    if pair is not None and not isinstance(pair, str):
        raise ValueError(f"pair={pair!r} must be null or a string")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise ValueError(f"threshold={threshold!r} is not a number")
    calibration = config["calibration"]
    arrays = dict(files.arrays)
    packed = arrays.pop("known_features", None)
    stage = None if encoder is None else take_stage(encoder, arrays)
    lengths = [arrays.pop(name, None) for name in ("length_weight", "length_bias")]
    values = _array_values(arrays)
    features = record_from(FeatureConfig, config["features"])
    if len(values["bias"]) != len(heads):
        raise ValueError(f"{len(values['bias'])} heads in the weights, named are {heads}")
    return {
        **values,
        "encoder": stage,
        "features": features,
        "assurances": tuple(record_from(Assurance, each) for each in assurances),
        "familiarity": _familiarity(packed, farthest, features),
        "tiers": ladder,
        "worth": Worth.read(costs, *lengths),
        "threshold": float(threshold),
        "pair": pair,
        "calibration": None if calibration is None else record_from(Calibration, calibration),
        "training": training,
    }


def _check_heads(heads: object, tiers: Ladder | None) -> None:
    """Raise ValueError for other names than those of the tiers."""
    pairs = [list(_PAIR_HEADS[:1]), list(_PAIR_HEADS)]
    known = pairs if tiers is None else [list(tiers.names)]
    if heads not in known:
        raise ValueError(f"heads {heads} must be one of {known}")


def _familiarity(
    packed: NDArray[Any] | None, farthest: object, features: FeatureConfig
) -> Familiarity | None:
    """Raises ValueError unless both parts are there, or none."""
    if packed is None and farthest is None:
        return None
    if isinstance(farthest, bool) or not isinstance(farthest, int | float):
        raise ValueError(f"farthest={farthest!r} is not a number")
    if packed is None:
        raise ValueError("known_features are missing")
    return Familiarity.unpacked(packed, num_ngrams(features), float(farthest))


def _array_values(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Raises ValueError unless the arrays are a router's; their shapes are checked later."""
    stages = [name for name in ("probe", "answer") if f"{name}_weight" in arrays]
    expected = {"weight", "bias", "prompt_hashes"}
    expected |= {f"{name}_{part}" for name in stages for part in ("weight", "bias")}
    if set(arrays) != expected:
        raise ValueError(f"the weights hold {sorted(arrays)}, not {sorted(expected)}")
    for name, array in arrays.items():
        if (name == "prompt_hashes") != (array.dtype == np.uint64):
            raise ValueError(f"{name} is {array.dtype}")
    values: dict[str, Any] = {"prompt_hashes": arrays["prompt_hashes"]}
    for name in ("weight", "bias"):
        values[name] = arrays[name].astype(np.float64)
    for name in stages:
        values[name] = LinearStage(
            weight=arrays[f"{name}_weight"].astype(np.float64),
            bias=arrays[f"{name}_bias"].astype(np.float64),
        )
    return values
