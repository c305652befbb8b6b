"""An API product in one script: a team, its key and end users, an alias, a cache, and the bill.

    outrider keys create --name admin --admin                  # shows the administrator's key once
    outrider serve --config examples/api_product/outrider.toml
    ADMIN_KEY=or-... python examples/api_product/api_product.py

OUTRIDER_URL is where the gateway is, unless it is http://127.0.0.1:8000.
"""

import os
import time
from typing import Any

import httpx
import openai

URL = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")
ADMIN = {"authorization": f"Bearer {os.environ['ADMIN_KEY']}"}
CACHED = {"outrider": {"cache": "on"}}


def say(topic: str, *words: object) -> None:
    """One line of output."""
    print(f"{topic}:", *words)  # noqa: T201


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """Have an administrator's request answered."""
    answer = http.post(path, json=fields, headers=ADMIN)
    answer.raise_for_status()
    made: dict[str, Any] = answer.json()
    return made


def usage(http: httpx.Client, key: dict[str, str], by: str) -> list[dict[str, Any]]:
    """Return the usage of a key."""
    rows: list[dict[str, Any]]
    rows = http.get("/v1/usage", params={"by": by}, headers=key).json()["data"]
    return rows


def main() -> None:
    """Set a customer up, be the customer, write the bill."""
    name = f"customer-{time.time_ns():x}"
    with httpx.Client(base_url=URL, timeout=60) as http:
        post(http, "/admin/teams", name=name, limits={"usd_per_month": 50})
        key = post(
            http,
            "/admin/keys",
            name=f"{name}-app",
            team=name,
            models=["assistant"],  # the alias, and none of what is behind it
            limits={"requests_per_minute": 60, "end_user": {"requests_per_day": 2}},
        )["key"]
        mine = {"authorization": f"Bearer {key}"}
        while http.get("/v1/models", headers=mine).status_code == 401:
            time.sleep(0.05)  # a new key is known to every gateway within keys.refresh_s
        say("models", [card["id"] for card in http.get("/v1/models", headers=mine).json()["data"]])

        client = openai.OpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
        ask = client.chat.completions.with_raw_response.create
        question: Any = [{"role": "user", "content": "What is 6 + 3?"}]
        for _ in range(2):
            answer = ask(model="assistant", messages=question, extra_body=CACHED)
            text = answer.parse().choices[0].message.content
            say("answer", answer.headers["x-outrider-cache"], repr(text))
        try:
            ask(model="large", messages=question)
        except openai.PermissionDeniedError as refused:
            say("another model", refused.code)
        for person in ("ann", "ann", "ann", "bob"):
            try:
                ask(model="assistant", messages=question, safety_identifier=person)
                say(person, "answered")
            except openai.RateLimitError as full:
                say(person, full.message)
        client.close()

        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:  # the ledger is written in batches
            rows = [*usage(http, mine, "kind"), *usage(http, mine, "end_user")]
            if {"cached", "answer", "ann", "bob"} <= {row["group"] for row in rows}:
                break
            time.sleep(0.05)
        for row in rows:
            name = row["group"] or "nobody"
            say("bill", name, row["requests"], f"{row['charge_usd']:.9f} USD")


if __name__ == "__main__":
    main()
