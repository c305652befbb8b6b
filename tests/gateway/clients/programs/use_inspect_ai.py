"""inspect-ai: a task of one sample, generated and scored."""

import json
import os

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

os.environ |= {
    "OUTRIDER_API_KEY": "none",
    "OUTRIDER_BASE_URL": f"{os.environ['OUTRIDER_URL']}/v1",
}
task = Task(
    dataset=[Sample(input="Hello", target="Hello there!")], solver=generate(), scorer=match()
)
(log,) = eval(task, model="openai-api/outrider/auto", display="none")
(score,) = log.results.scores
print(json.dumps({"status": log.status, "accuracy": score.metrics["accuracy"].value}))
