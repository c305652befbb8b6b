"""What a chat front end does with a gateway: names, tools, stop and retry, and the page itself.

    pip install openai playwright
    outrider serve --config examples/chat/gateway.toml
    python examples/chat/front_end.py

OUTRIDER_URL is where the gateway is, unless it is http://127.0.0.1:8000. OUTRIDER_CHROMIUM names
the browser for the last part, unless it is `chromium`; without one that part is left out.
"""

import json
import os
import shutil
import subprocess
from typing import Any

import openai

URL = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")
QUESTION = "What is 48 + 37?"
GET_TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCKS = {"Vienna": "8:15", "Cairo": "9:15"}


def say(topic: str, *words: object) -> None:
    """One line of output."""
    print(f"{topic}:", *words)  # noqa: T201


def names(client: openai.OpenAI) -> None:
    """A front end lists models for its menu, and sends the name of one."""
    listed = [model.id for model in client.models.list()]
    assert "gpt-4o-mini" in listed, listed
    answer: Any = client.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    say("gpt-4o-mini is", answer.outrider["tier"], "which says", answer.choices[0].message.content)


def tools(client: openai.OpenAI) -> None:
    """Read the call from the stream as it is written, make it, give the result back."""
    messages: list[Any] = [{"role": "user", "content": "What time is it in Vienna?"}]
    options: Any = {"model": "gpt-4o", "tools": [GET_TIME], "temperature": 0}
    name, call_id, arguments = "", "", ""
    with client.chat.completions.create(messages=messages, stream=True, **options) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                for part in choice.delta.tool_calls or ():
                    call_id = part.id or call_id
                    if part.function:
                        name = part.function.name or name
                        arguments += part.function.arguments or ""
    city = json.loads(arguments)["city"]
    result = json.dumps({"time": CLOCKS[city]})
    say("tool", f"{name}({city}) = {result}")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
    last = client.chat.completions.create(messages=messages, **options)
    say("after the tool", last.choices[0].message.content)


def stop_and_retry(client: openai.OpenAI) -> None:
    """Close a stream after its first pieces: the answer ends. The same seed begins it alike."""
    body: Any = {
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": "What is 4786 + 3957?"}],
        "seed": 7,
        "temperature": 0.8,
    }
    pieces: list[str] = []
    with client.chat.completions.create(**body, stream=True) as stream:
        for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            if sum(map(len, pieces)) > 8:
                break
    begun = "".join(pieces)
    again = client.chat.completions.create(**body).choices[0].message.content or ""
    assert again.startswith(begun), (begun, again)
    say("stopped after", repr(begun), "and retried:", again.splitlines()[-1])


def page(browser: str) -> None:
    """The playground: stop an answer, retry it, edit the question, run the copied command."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
        shown = context.new_page()
        shown.goto(f"{URL}/playground")
        shown.locator("#state.ready").wait_for()
        shown.fill("#prompt", "Put 297, 322, 985, 204, 553, 898 in order, largest first.")
        shown.press("#prompt", "Enter")
        shown.locator(".text .t").first.wait_for()
        if shown.inner_text("#send") == "Stop":  # else it was quicker than we are
            shown.click("#send")
        shown.locator("article:not(.running)").wait_for()
        shown.click(".retry")
        shown.locator("article:not(.running) .route em").wait_for()
        say("retried", shown.inner_text(".route"))
        shown.click(".edit")
        shown.fill("#prompt", QUESTION)
        shown.press("#prompt", "Enter")
        shown.get_by_text("85.").first.wait_for()
        shown.locator("article:not(.running)").wait_for()
        assert shown.locator("article").count() == 1, "editing replaces what followed"
        shown.click("[data-copy=curl]")
        command = shown.evaluate("navigator.clipboard.readText()")
        chromium.close()
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    say("the copied command", json.loads(done.stdout)["choices"][0]["message"]["content"])


def main() -> None:
    """Run it all."""
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        for part in (names, tools, stop_and_retry):
            part(client)
    browser = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
    if browser:
        page(browser)
    say("done")


if __name__ == "__main__":
    main()
