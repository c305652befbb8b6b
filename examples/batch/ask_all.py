"""A list of questions as one batch, which waits for what other requests leave idle.

    outrider serve --set batches.enabled=true   # in one terminal
    python examples/batch/ask_all.py            # in another

OUTRIDER_URL and OUTRIDER_KEY are the gateway and its key, unless it is http://127.0.0.1:8000
without one. BATCH is the id of a batch that was begun before.
"""

import io
import json
import os
import sys
import time
from typing import Final

import openai
from openai.types import Batch

URL: Final = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")
ENDPOINT: Final = "/v1/chat/completions"
QUESTIONS: Final = ("What is 48 + 37?", "Name three rivers.", "Who was Ines of Athens?")
OVER: Final = {"completed", "failed", "expired", "cancelled"}


def requests() -> io.BytesIO:
    """Write the file: a request a line, each with an id of its own."""
    file = io.BytesIO()
    for number, question in enumerate(QUESTIONS, 1):
        body = {
            "model": "large",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 24,
        }
        line = {"custom_id": f"question-{number}", "method": "POST", "url": ENDPOINT, "body": body}
        file.write(json.dumps(line).encode() + b"\n")
    file.seek(0)
    return file


def begin(client: openai.OpenAI) -> Batch:
    """Upload the file, and begin the batch."""
    file = client.files.create(file=("questions.jsonl", requests()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", metadata={"for": "me"}
    )


def show(client: openai.OpenAI, batch: Batch) -> None:
    """Print what came of each request."""
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is None:
            continue
        for text in client.files.content(file_id).text.splitlines():
            result = json.loads(text)
            body = (result["response"] or {}).get("body", {})
            said = body.get("error") or result["error"]
            if said is None:
                said = body["choices"][0]["message"]["content"]
            print(f"{result['custom_id']}: {said}")  # noqa: T201


def main() -> None:
    """Ask, wait, show."""
    key = os.environ.get("OUTRIDER_KEY", "none")
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=key) as client:
        known = os.environ.get("BATCH")
        batch = begin(client) if known is None else client.batches.retrieve(known)
        print(f"batch: {batch.id}")  # noqa: T201
        while batch.status not in OVER:
            time.sleep(0.5)
            batch = client.batches.retrieve(batch.id)
        show(client, batch)
        counts, usage = batch.request_counts, batch.usage
        assert counts is not None
        assert usage is not None
        print(f"{batch.status}: {counts.completed} of {counts.total}")  # noqa: T201
        print(f"tokens: {usage.input_tokens} in, {usage.output_tokens} out")  # noqa: T201
        if batch.status != "completed" or counts.failed:
            sys.exit(f"{counts.failed} failed: {batch.errors}")


if __name__ == "__main__":
    main()
