"""A public model beside llama.cpp: what is asked, what is read of a stream, what figures say."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.peers.bench_gguf import (
    Options,
    case_of,
    chosen_prompts,
    first_of,
    kinds_of,
    long_prompts,
)
from benchmarks.peers.gguf_servers import DRAFTING, LLAMA, PLAIN, ask_llama, ask_outrider
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.turns import Turn, Turns
from benchmarks.shared.upstream_servers import Server


class _Words:
    """A tokenizer whose tokens are characters."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [ord(char) for message in messages for char in message["content"]]


def a_prompt(text: str, kind: str = "") -> Prompt:
    return Prompt(messages=(), token_ids=tuple(map(ord, text)), kind=kind)


def a_turn(token_ids: list[int], decode_s: float, wall_s: float = 9.0) -> Turn:
    return Turn(
        token_ids=token_ids,
        wall_s=wall_s,
        decode_s=decode_s,
        num_decoded_tokens=len(token_ids) - 1,
    )


def test_kinds_take_turns_and_no_prompt_is_asked_twice(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [("a", "one"), ("a", "two"), ("a", "two"), ("a", "three"), ("b", "four")]
    lines = (json.dumps({"category": kind, "turns": [text]}) for kind, text in rows)
    file.write_text("\n".join(lines))
    prompts = chosen_prompts(_Words(), Options(prompts=file, repeats=9))
    texts = ["".join(map(chr, prompt.token_ids)) for prompt in prompts]
    assert texts == ["one", "four", "two", "three"]
    assert len(chosen_prompts(_Words(), Options(prompts=file, repeats=2))) == 2


def test_without_a_file_the_demo_s_prompts_are_asked() -> None:
    kinds = [prompt.kind for prompt in chosen_prompts(_Words(), Options())]
    assert len(kinds) == 10
    assert {"code", "JSON", "copy"} <= set(kinds)


def test_long_prompts_have_their_length_and_no_common_beginning() -> None:
    prompts = long_prompts([a_prompt("abcdefgh"), a_prompt("ABCDEFGH")], 50, 4)
    assert [len(prompt) for prompt in prompts] == [50] * 4
    assert len({prompt[0] for prompt in prompts}) == 4


@contextmanager
def a_server(*events: dict[str, Any]) -> Iterator[tuple[Server, list[dict[str, Any]]]]:
    """A server that streams these events, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            asked.append(json.loads(self.rfile.read(length)) | {"path": self.path})
            self.send_response(200 if events else 500)
            self.end_headers()
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n" if events else b"out of order")

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Server(name="it", port=http.server_port, pid=os.getpid()), asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_a_stream_of_outrider_is_read() -> None:
    def chunk(*token_ids: int) -> dict[str, Any]:
        return {"choices": [{"token_ids": token_ids}]}

    usage = {"choices": [], "outrider": {"mean_emitted_tokens": 1.6667}}
    with a_server(chunk(), chunk(5), chunk(6, 7, 8), chunk(9), usage) as (server, asked):
        turn = ask_outrider(server, [1, 2], 5)
    assert (asked[0]["prompt"], asked[0]["max_tokens"]) == ([1, 2], 5)
    assert turn.token_ids == [5, 6, 7, 8, 9]
    assert (turn.num_decoded_tokens, turn.num_passes) == (4, 3)
    assert 0 < turn.decode_s < turn.wall_s


def test_a_stream_of_llama_cpp_is_read() -> None:
    events = ({"tokens": [5]}, {"tokens": [6]}, {"tokens": [], "stop": True})
    with a_server(*events) as (server, asked):
        turn = ask_llama(server, [1, 2], 5)
    assert (asked[0]["path"], asked[0]["n_predict"]) == ("/completion", 5)
    assert (turn.token_ids, turn.num_decoded_tokens, turn.num_passes) == ([5, 6], 1, 0)


@pytest.mark.parametrize("ask", [ask_outrider, ask_llama])
def test_an_error_is_told_in_the_server_s_words(ask: Callable[..., Turn]) -> None:
    with a_server() as (server, _), pytest.raises(RuntimeError, match="it: out of order"):
        ask(server, [1], 1)


def test_ratios_are_within_rounds_and_leave_short_answers_out() -> None:
    long, short = [1] * 21, [1, 2, 3]
    turns = Turns(
        by_case={
            PLAIN: [[a_turn(long, 1.0)], [a_turn([*long[:-1], 7], 1.0)], [a_turn(short, 1.0)]],
            DRAFTING: [[a_turn(long, 0.5)], [a_turn(long, 0.5)], [a_turn(short, 0.1)]],
            LLAMA: [[a_turn(long, 2.0)], [a_turn(long, 4.0)], [a_turn(short, 0.1)]],
        }
    )
    prompts = [a_prompt("a", "x"), a_prompt("b", "y"), a_prompt("c", "y")]
    plain = case_of(PLAIN, turns, prompts)
    ratio = plain["over_llama"]
    assert (ratio.median, ratio.minimum, ratio.maximum, ratio.num_samples) == (3.0, 2.0, 4.0, 2)
    assert plain["whole_equal_to_llama"] == 2
    assert plain["first_equal_to_llama"].maximum == 21
    assert plain["first_equal_to_llama"].median == 20  # the second differs in its last token
    assert case_of(DRAFTING, turns, prompts)["over_plain"].median == 2.0
    kinds = kinds_of(turns, prompts)
    assert (kinds["x"]["num_prompts"], kinds["x"]["over_llama"][PLAIN].median) == (1, 2.0)
    assert kinds["y"]["over_llama"][PLAIN].num_samples == 1
    first = first_of(PLAIN, turns, 1000)
    assert first["first_token_over_llama"].median == 1.0
    assert first["prompt_tokens_per_s"] == pytest.approx(1000 / 9)


def test_without_llama_cpp_there_are_no_ratios_to_it() -> None:
    turns = Turns(by_case={PLAIN: [[a_turn([1] * 21, 1.0)]]})
    found = case_of(PLAIN, turns, [a_prompt("a")]) | first_of(PLAIN, turns, 1000)
    assert found["over_llama"] is found["first_token_over_llama"] is None
    assert found["over_plain"].median == 1.0
