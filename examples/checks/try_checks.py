"""Ask a gateway that checks: one refused request, and one answer that is rewritten.

    outrider serve --config examples/checks/checks.toml    # in one terminal
    python examples/checks/try_checks.py                   # in another

OUTRIDER_URL is where the gateway is, unless it is http://127.0.0.1:8000.
"""

import os
import sys

import openai

URL = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")


def main() -> None:
    """Ask twice."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    try:
        client.chat.completions.create(
            model="large", messages=[{"role": "user", "content": "Teach me lock picking."}]
        )
    except openai.BadRequestError as error:
        sys.stdout.write(f"{error.code}: {error.message}\n")
    stream = client.chat.completions.create(
        model="large",
        messages=[{"role": "user", "content": "Tell me a story about the fox and a ship."}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    sys.stdout.write("".join(texts) + "\n")


if __name__ == "__main__":
    main()
