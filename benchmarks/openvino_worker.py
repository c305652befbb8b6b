"""OpenVINO GenAI in an environment of its own: converts checkpoints, and answers prompts.

Run by benchmarks/openvino_peer.py with that environment's interpreter, so it imports nothing of
this repository. Jobs come as JSON lines on standard input, results leave as JSON lines on standard
output; what libraries print goes to standard error.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def convert(source: str, folder: str) -> None:
    """Write `source` as OpenVINO's files, weights in bf16 as they are; and its tokenizer."""
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
    tokenizer, detokenizer = convert_tokenizer(
        AutoTokenizer.from_pretrained(source), with_detokenizer=True
    )
    openvino.save_model(tokenizer, Path(folder) / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, Path(folder) / "openvino_detokenizer.xml")


class Pipelines:
    """One ContinuousBatchingPipeline a way of decoding, made when it is first wanted."""

    def __init__(self, *, target: str, draft: str, num_threads: int, precision: str) -> None:
        self._target = target
        self._draft = draft
        self._properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        self._made: dict[str, Any] = {}

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Greedy answer to `token_ids`; way: plain, assisted or lookup."""
        import numpy
        import openvino
        import openvino_genai

        way = job["way"]
        options = {} if way == "plain" else {"num_assistant_tokens": job["num_assistant_tokens"]}
        if way == "lookup":
            options["max_ngram_size"] = job["max_ngram_size"]
        config = openvino_genai.GenerationConfig(
            max_new_tokens=job["max_tokens"],
            do_sample=False,
            stop_token_ids=set(job["stop"]),
            **options,
        )
        pipeline = self._pipeline(way)
        prompt = openvino.Tensor(numpy.array([job["token_ids"]], dtype=numpy.int64))
        started_s = time.perf_counter()
        (result,) = pipeline.generate([prompt], [config])
        wall_s = time.perf_counter() - started_s
        return {"token_ids": list(result.m_generation_ids[0]), "wall_s": wall_s}

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
    from importlib.metadata import version

    return {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")}


def main() -> None:
    """`convert SOURCE FOLDER`, or `serve` with the options as JSON."""
    # Results have standard output for themselves.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.argv[1] == "convert":
        convert(sys.argv[2], sys.argv[3])
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
