"""lm-evaluation-harness: log-likelihoods of the answers to choose from, by /v1/completions."""

import json
import os
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

SUMS = [(17, 25), (31, 46), (8, 57), (22, 19)]
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""

folder = Path(tempfile.mkdtemp())
data = folder / "sums.jsonl"
with data.open("w") as rows:
    for a, b in SUMS:
        question = f"What is {a} + {b}? Answer: "
        choices = [f"{a + b + step}." for step in (0, 1, 10, -3)]
        rows.write(json.dumps({"question": question, "choices": choices, "label": 0}) + "\n")
(folder / "sums.yaml").write_text(TASK.format(data=data))
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": "large",
        "base_url": f"{os.environ['OUTRIDER_URL']}/v1/completions",
        "tokenizer_backend": "remote",
        "tokenized_requests": True,
    },
    tasks=["sums"],
    task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    bootstrap_iters=0,
)
scores = [
    {"context": context, "choice": choice, "loglikelihood": value, "is_greedy": is_greedy}
    for sample in found["samples"]["sums"]
    for (context, choice), ((value, is_greedy),) in zip(
        sample["arguments"], sample["resps"], strict=True
    )
]
print(json.dumps({"scores": scores}))
