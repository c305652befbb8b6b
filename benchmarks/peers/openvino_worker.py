"""OpenVINO GenAI in an environment of its own: converts checkpoints, and answers prompts.

Run by benchmarks/peers/openvino_peer.py with that environment's interpreter, so it imports nothing
of this repository. Jobs come as JSON lines on standard input, results leave as JSON lines on
standard output; what libraries print goes to standard error.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def convert(source: str, folder: str, weights: str) -> None:
    """Write `source` as OpenVINO's files, and its tokenizer. `weights`: bf16, int8 or int4."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.exporters.openvino import main_export
    from optimum.intel.openvino import OVConfig
    from transformers import AutoTokenizer

    main_export(
        model_name_or_path=source,
        output=folder,
        task="text-generation-with-past",
        library_name="transformers",
        ov_config=OVConfig(dtype="bf16"),  # without it weights above 1 B are compressed to int8
        convert_tokenizer=False,
    )
    if weights != "bf16":
        compress(Path(folder) / "openvino_model.xml", weights)
    tokenizer, detokenizer = convert_tokenizer(
        AutoTokenizer.from_pretrained(source), with_detokenizer=True
    )
    openvino.save_model(tokenizer, Path(folder) / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, Path(folder) / "openvino_detokenizer.xml")


def compress(file: Path, weights: str) -> None:
    """Compress all matrices in place: a scale a row in int8, one for 128 numbers in int4."""
    import nncf
    import openvino
    from nncf.quantization.advanced_parameters import (
        AdvancedCompressionParameters,
        GroupSizeFallbackMode,
    )

    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    if weights == "int4":
        options = {
            "mode": nncf.CompressWeightsMode.INT4_SYM,
            "ratio": 1.0,
            "group_size": 128,  # less where that does not divide a row
            "advanced_parameters": AdvancedCompressionParameters(
                group_size_fallback_mode=GroupSizeFallbackMode.ADJUST
            ),
        }
    compressed = file.with_name("compressed.xml")
    model = openvino.Core().read_model(file)
    openvino.save_model(nncf.compress_weights(model, **options), compressed)
    del model
    for end in (".xml", ".bin"):
        compressed.with_suffix(end).replace(file.with_suffix(end))


class Pipelines:
    """One ContinuousBatchingPipeline a way of decoding, made when it is first wanted."""

    def __init__(
        self, *, target: str, properties: dict[str, Any], draft: str | None = None
    ) -> None:
        self._target = target
        self._draft = draft
        self._properties = properties
        self._made: dict[str, Any] = {}

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer `token_ids`; way: plain, assisted by the drafter, or lookup in the prompt."""
        import numpy
        import openvino
        import openvino_genai

        way = job["way"]
        options: dict[str, Any] = {"do_sample": bool(job["temperature"])}
        if way != "plain":
            options["num_assistant_tokens"] = job["num_assistant_tokens"]
        if way == "lookup":
            options["max_ngram_size"] = 3
        if job["temperature"]:
            options |= {"temperature": job["temperature"], "rng_seed": 7}
        config = openvino_genai.GenerationConfig(
            max_new_tokens=job["max_tokens"], stop_token_ids=set(job["stop"]), **options
        )
        pipeline = self._pipeline(way)
        prompt = openvino.Tensor(numpy.array([job["token_ids"]], dtype=numpy.int64))
        started_s = time.perf_counter()
        (result,) = pipeline.generate([prompt], [config])
        wall_s = time.perf_counter() - started_s
        first_s = result.perf_metrics.get_ttft().mean / 1e3
        metrics = result.extended_perf_metrics
        return {
            "token_ids": list(result.m_generation_ids[0]),
            "wall_s": wall_s,
            "decode_s": max(wall_s - first_s, 0.0),
            "num_accepted": metrics.get_num_accepted_tokens() if way == "assisted" else 0,
        }

    def _pipeline(self, way: str) -> Any:
        import openvino_genai

        if way not in self._made:
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.cache_size = 1  # GB
            scheduler.enable_prefix_caching = False  # each run pays for its prompts
            properties: dict[str, Any] = dict(self._properties)
            if way == "assisted":
                properties["draft_model"] = openvino_genai.draft_model(
                    self._draft, "CPU", **self._properties
                )
            if way == "lookup":
                properties["prompt_lookup"] = True
            self._made[way] = openvino_genai.ContinuousBatchingPipeline(
                self._target, scheduler, "CPU", properties
            )
        return self._made[way]


def _versions() -> dict[str, str]:
    """Return those of the packages that are there; a GGUF file needs only the first two."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("openvino", "openvino-genai", "optimum-intel", "nncf"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    """`convert SOURCE FOLDER WEIGHTS`, or `serve` with the options as JSON."""
    # Results have standard output for themselves.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[1] == "convert":
        convert(sys.argv[2], sys.argv[3], sys.argv[4])
        return
    pipelines = Pipelines(**json.loads(sys.argv[2]))
    print(json.dumps(_versions()), file=results, flush=True)
    for line in sys.stdin:
        try:
            answer = pipelines.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the other side raises it
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
