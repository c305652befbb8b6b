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

from benchmarks.peers.bench_gguf import Options, goals, tables
from benchmarks.peers.gguf.figures import case_of, domains_of, first_of
from benchmarks.peers.gguf.prompts import dealt, long_prompts, prompts_by_domain
from benchmarks.peers.gguf.requests import DraftedTurn, ask_drafting, ask_llama, ask_outrider
from benchmarks.peers.gguf.servers import DRAFTING, NATIVE, PLAIN, llama_build
from benchmarks.peers.gguf.text import gaps, perplexity, read_perplexity
from benchmarks.shared.compare import Divergence
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


def a_file(folder: Path, name: str, *rows: tuple[str, str]) -> Path:
    file = folder / name
    lines = (json.dumps({"category": kind, "turns": [text]}) for kind, text in rows)
    file.write_text("\n".join(lines))
    return file


def texts(prompts: list[Prompt]) -> list[str]:
    return ["".join(map(chr, prompt.token_ids)) for prompt in prompts]


def test_domains_of_several_files_take_turns_and_no_prompt_is_asked_twice(tmp_path: Path) -> None:
    one = a_file(tmp_path, "one.jsonl", ("a", "a1"), ("a", "a2"), ("a", "a2"), ("b", "b1"))
    two = a_file(tmp_path, "two.jsonl", ("a", "a1"), ("a", "a3"), ("a", "a4"), ("c", "c1"))
    domains = prompts_by_domain(_Words(), [one, two])
    (all_of_them,) = dealt(domains, 1, per_domain=None, most=99)
    assert texts(all_of_them) == ["a1", "b1", "c1", "a2", "a3", "a4"]
    hands = dealt(domains, 2, per_domain=None, most=99)
    assert [texts(hand) for hand in hands] == [["a1", "b1", "c1", "a3"], ["a2", "a4"]]
    hands = dealt(domains, 2, per_domain=1, most=2)
    assert [texts(hand) for hand in hands] == [["a1", "b1"], ["a2"]]


def test_without_a_file_the_demo_s_prompts_are_asked() -> None:
    domains = prompts_by_domain(_Words(), [])
    assert sum(map(len, domains.values())) == 10
    assert {"code", "JSON", "copy"} <= set(domains)


def test_long_prompts_have_their_length_and_no_common_beginning() -> None:
    prompts = long_prompts([a_prompt("abcdefgh"), a_prompt("ABCDEFGH")], 50, 4)
    assert [len(prompt) for prompt in prompts] == [50] * 4
    assert len({prompt[0] for prompt in prompts}) == 4


@contextmanager
def a_server(
    *events: dict[str, Any], whole: list[dict[str, Any]] | None = None, metrics: str = ""
) -> Iterator[tuple[Server, list[dict[str, Any]]]]:
    """A server that streams these events, or gives these answers in turn; what it was asked."""
    asked: list[dict[str, Any]] = []
    pages = iter(metrics.split("---"))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            asked.append(json.loads(self.rfile.read(length)) | {"path": self.path})
            self.send_response(200 if events or whole else 500)
            self.end_headers()
            if whole:
                self.wfile.write(json.dumps(whole[len(asked) - 1]).encode())
                return
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n" if events else b"out of order")

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(pages).encode())

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


def chunk(*token_ids: int) -> dict[str, Any]:
    return {"choices": [{"token_ids": token_ids}]}


USAGE = {
    "choices": [],
    "outrider": {"mean_emitted_tokens": 1.6667, "drafted_tokens": 4, "accepted_tokens": 2},
}


def test_a_stream_of_outrider_is_read() -> None:
    with a_server(chunk(), chunk(5), chunk(6, 7, 8), chunk(9), USAGE) as (server, asked):
        turn = ask_outrider(server, [1, 2], 5, 0.7)
    assert (asked[0]["prompt"], asked[0]["max_tokens"]) == ([1, 2], 5)
    assert asked[0]["temperature"] == 0.7
    assert turn.token_ids == [5, 6, 7, 8, 9]
    assert (turn.num_decoded_tokens, turn.num_passes) == (4, 3)
    assert (turn.num_drafted_tokens, turn.num_accepted_tokens) == (4, 2)
    assert 0 < turn.decode_s < turn.wall_s


def test_guesses_by_depth_are_what_the_metrics_gained() -> None:
    name = "outrider_spec_decode_num_{}_tokens_per_source_total"
    line = name + '{{position="{}",source="suffix"}} {}\n'
    before = line.format("draft", 0, 3) + line.format("accepted", 0, 1)
    after = line.format("draft", 0, 7) + line.format("draft", 1, 2) + line.format("accepted", 0, 4)
    with a_server(chunk(5), USAGE, metrics=f"{before}---{after}") as (server, _):
        turn = ask_drafting(server, [1, 2], 5)
    assert (turn.verified_by_depth, turn.accepted_by_depth) == ((4, 2), (3, 0))
    assert turn.token_ids == [5]


def test_a_stream_of_llama_cpp_is_read() -> None:
    timings = {"predicted_n": 2, "draft_n": 3, "draft_n_accepted": 1}
    events = ({"tokens": [5]}, {"tokens": [6]}, {"tokens": [], "stop": True, "timings": timings})
    with a_server(*events) as (server, asked):
        turn = ask_llama(server, [1, 2], 5)
        ask_llama(server, [1, 2], 5, 0.7)
    assert (asked[0]["path"], asked[0]["n_predict"]) == ("/completion", 5)
    assert (asked[0]["top_k"], asked[1]["temperature"]) == (1, 0.7)
    assert asked[1]["samplers"] == ["temperature"]
    assert (turn.token_ids, turn.num_decoded_tokens, turn.num_passes) == ([5, 6], 1, 1)
    assert (turn.num_drafted_tokens, turn.num_accepted_tokens) == (3, 1)


@pytest.mark.parametrize("ask", [ask_outrider, ask_llama])
def test_an_error_is_told_in_the_server_s_words(ask: Callable[..., Turn]) -> None:
    with a_server() as (server, _), pytest.raises(RuntimeError, match="it: out of order"):
        ask(server, [1], 1)


def some_turns() -> Turns:
    long, short = [1] * 21, [1, 2, 3]
    return Turns(
        by_case={
            PLAIN: [[a_turn(long, 1.0)], [a_turn([*long[:-1], 7], 1.0)], [a_turn(short, 1.0)]],
            DRAFTING: [[a_turn(long, 0.5)], [a_turn(long, 0.5)], [a_turn(short, 0.1)]],
            NATIVE: [[a_turn(long, 2.0)], [a_turn(long, 4.0)], [a_turn(short, 0.1)]],
        }
    )


PROMPTS = [a_prompt("a", "x"), a_prompt("b", "y"), a_prompt("c", "y")]


def test_ratios_are_within_rounds_and_leave_short_answers_out() -> None:
    turns = some_turns()
    plain = case_of(PLAIN, turns, PROMPTS, [NATIVE])
    ratio = plain["over"][NATIVE]
    assert (ratio.median, ratio.minimum, ratio.maximum, ratio.num_samples) == (3.0, 2.0, 4.0, 2)
    equal = plain["equal_to"][NATIVE]
    assert equal["whole_answers"] == 2
    assert equal["first_tokens"].maximum == 21
    assert equal["first_tokens"].median == 20  # the second differs in its last token
    assert case_of(DRAFTING, turns, PROMPTS, [NATIVE])["over"][PLAIN].median == 2.0
    domains = domains_of(turns, PROMPTS, [NATIVE])
    assert domains["x"]["num_prompts"] == 1
    assert domains["x"]["cases"][PLAIN]["over"][NATIVE].median == 2.0
    assert domains["y"]["cases"][PLAIN]["over"][NATIVE].num_samples == 1
    first = first_of(PLAIN, turns, 1000, [NATIVE])
    assert first["first_token_over"][NATIVE].median == 1.0
    assert first["prompt_tokens_per_s"] == pytest.approx(1000 / 9)


def test_without_a_peer_there_are_no_ratios_to_one() -> None:
    turns = Turns(by_case={PLAIN: [[a_turn([1] * 21, 1.0)]]})
    found = case_of(PLAIN, turns, [a_prompt("a")], []) | first_of(PLAIN, turns, 1000, [])
    assert set(found["over"]) == {PLAIN}
    assert found["first_token_over"] == found["equal_to"] == {}


def test_acceptance_by_depth_is_of_all_answers_of_a_domain() -> None:
    def drafted(verified: tuple[int, ...], accepted: tuple[int, ...]) -> list[Turn]:
        turn = DraftedTurn(
            token_ids=[1], wall_s=1.0, verified_by_depth=verified, accepted_by_depth=accepted
        )
        return [turn]

    turns = Turns(by_case={DRAFTING: [drafted((4, 2, 0), (3, 0, 0)), drafted((4,), (1,))]})
    found = domains_of(turns, [a_prompt("a", "x"), a_prompt("b", "x")], [])["x"]
    assert found["verified_by_depth"] == [8, 2]
    assert found["accepted_share_by_depth"] == [0.5, 0.0]


def test_a_difference_is_told_with_the_gap_that_each_side_sees() -> None:
    def ours(token: int, logprob: float) -> dict[str, Any]:
        rows = [
            None,
            {"2": {"logprob": -9}},
            {"3": {"logprob": -9}},
            {str(token): {"logprob": logprob}},
        ]
        return {"choices": [{"prompt_logprobs": rows}]}

    likely = [{"id": 5, "logprob": -0.5}, {"id": 6, "logprob": -2.0}]
    theirs = {"completion_probabilities": [{"top_logprobs": likely}]}
    one = Divergence(index=0, position=1, reference_token=5, other_token=6)
    ended = Divergence(index=0, position=1, reference_token=None, other_token=6)
    with (
        a_server(whole=[ours(6, -1.0), ours(5, -1.25)]) as (own, asked),
        a_server(whole=[theirs]) as (llama, _),
    ):
        found = gaps([one, ended], [[1, 2]], [[3, 5]], ours=own, llama=llama)
    assert found[0] == {"prompt": 0, "position": 1, "our_gap": 0.25, "its_gap": 1.5}
    assert found[1]["our_gap"] is None
    assert asked[0]["prompt"] == [1, 2, 3, 6]


def test_perplexity_is_of_the_later_half_of_each_piece() -> None:
    piece = list(range(512))
    rows = [None] + [{str(at): {"logprob": -9.0 if at <= 256 else -1.0}} for at in piece[1:]]
    with a_server(whole=[{"choices": [{"prompt_logprobs": rows}]}]) as (server, _):
        assert perplexity(server, [piece]) == pytest.approx(2.718281828)


def test_llama_cpp_s_perplexity_is_read_from_its_last_line() -> None:
    said = "[1]3.2,[2]4.5,\nFinal estimate: PPL = 4.4984 +/- 0.31234\n"
    assert read_perplexity(said) == (4.4984, 0.31234)
    with pytest.raises(RuntimeError, match="no such file"):
        read_perplexity("no such file")


def test_plain_decoding_is_held_against_the_fastest_plain_peer() -> None:
    turns = some_turns()
    results: dict[str, Any] = {
        "cases": {
            name: case_of(name, turns, PROMPTS, [NATIVE]) | first_of(name, turns, 9, [NATIVE])
            for name in turns.by_case
        },
        "peers": [NATIVE],
        "perplexity": {"over_llama": {PLAIN: 0.994}},
    }
    found = {goal.words: goal for goal in goals(results)}
    assert found[f"plain decoding over {NATIVE}'s"].measured == 3.0
    assert found["drafting over plain"].is_met
    assert not found["perplexity apart from llama.cpp's"].is_met


def test_tables_name_each_server_and_domain() -> None:
    turns = some_turns()
    results: dict[str, Any] = {
        "file": {"name": "it.gguf"},
        "threads": 1,
        "instructions": "AVX2",
        "num_prompts": [3],
        "peers": [NATIVE],
        "builds": {NATIVE: {"instructions": "AVX512 = 1"}},
        "cases": {
            name: case_of(name, turns, PROMPTS, [NATIVE]) | first_of(name, turns, 9, [NATIVE])
            for name in turns.by_case
        },
        "domains": {"0.0": domains_of(turns, PROMPTS, [NATIVE])},
        "differences": {NATIVE: [{"prompt": 0, "position": 3, "our_gap": 0.1, "its_gap": None}]},
        "perplexity": None,
    }
    servers, first, domains, differences = tables(Options(), results)
    columns = dict(servers.columns)
    assert columns["x native"](servers.entries[PLAIN]) == "3.00"
    assert columns["equal to native"](servers.entries[PLAIN]) == "20 (2 of 3 whole)"
    assert "AVX512" in servers.caption
    assert dict(first.columns)["x native"](first.entries[PLAIN]) == "1.00"
    assert set(domains.entries) == {"x", "y"}
    assert dict(domains.columns)["x plain"](domains.entries["x"]) == "2.00 (2.00-2.00)"
    assert list(differences.entries) == [f"{NATIVE}, prompt 0"]


def test_an_interpreter_without_llama_cpp_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="it has no xllamacpp"):
        llama_build(tmp_path / "python")
