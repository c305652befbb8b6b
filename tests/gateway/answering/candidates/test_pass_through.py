"""Embeddings, reranking, images and audio, passed on to tiers that have them."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import ollama
import openai
import pytest

from outrider.gateway.answering.candidates.passed_work import json_size
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import World
from tests.gateway.tenancy.metering.tenants import Books

EMBEDDED = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}],
    "model": "embedder",
    "usage": {"prompt_tokens": 5, "total_tokens": 5},
}
Answer = tuple[int, str, bytes]


@dataclass
class Far:
    """A server of other endpoints: what it was asked, and what it answers."""

    url: str = ""
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[str], Answer] = field(
        default=lambda path: (200, "application/json", json.dumps(EMBEDDED).encode())
    )


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, "application/json", b'{"object": "list", "data": []}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.asked.append((self.path, dict(self.headers), body))
            self._send(*made.answer(self.path))

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def make(open_world: OpenWorld, far: Far) -> Any:
    """Makes a gateway whose tier `media` has all endpoints; a context manager."""

    def made(**options: Any) -> Any:
        media = {
            "url": far.url,
            "model": "embedder",
            "endpoints": ["embeddings", "rerank", "images", "audio"],
            "max_retries": 0,
        }
        tiers = {"media": {**media, **options.pop("media", {})}, **options.pop("tiers", {})}
        return open_world(tiers=tiers, **options)

    return made


def embed(world: World, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "media", "input": "Hello there", **fields}
    return world.http.post("/v1/embeddings", json=body, headers=headers)


# ---- what is passed on ---------------------------------------------------------------------------


def test_embeddings_are_passed_on_under_the_servers_name(make: Any, far: Far) -> None:
    with make() as world:
        answer = embed(world, user="someone", dimensions=2)
        assert answer.json() == EMBEDDED
        assert answer.headers["x-outrider-tier"] == "media"
        path, headers, body = far.asked[-1]
        assert path == "/v1/embeddings"
        assert headers["content-type"] == "application/json"
        assert json.loads(body) == {"model": "embedder", "input": "Hello there", "dimensions": 2}
        assert "x-outrider-hops" in {name.lower() for name in headers}
        client = openai.OpenAI(base_url=f"{world.url}/v1", api_key="x", max_retries=0)
        made = client.embeddings.create(model="media", input="x", encoding_format="float")
        assert made.data[0].embedding == [0.5, 0.25]
        client.close()


def test_embeddings_come_in_ollamas_words_too(make: Any, far: Far) -> None:
    with make() as world, ollama.Client(host=world.url) as client:
        made = client.embed("media:latest", ["Hello there"], dimensions=2, keep_alive="5m")
        assert made.embeddings == [[0.5, 0.25]]
        assert made.prompt_eval_count == 5
        path, _, body = far.asked[-1]
        assert path == "/v1/embeddings"
        assert json.loads(body) == {"model": "embedder", "input": ["Hello there"], "dimensions": 2}
        assert client.embeddings("media", "Hello").embedding == [0.5, 0.25]
        assert json.loads(far.asked[-1][2])["input"] == "Hello"
        paths = world.http.get("/openapi.json").json()["paths"]
        assert {"/api/embed", "/api/embeddings"} <= paths.keys()
        far.answer = lambda _: (200, "application/json", b'{"data": [{"embedding": "AAAA"}]}')
        with pytest.raises(ollama.ResponseError, match="cannot be read"):
            client.embed("media", "Hello")


def test_without_a_tier_that_embeds_ollamas_clients_are_told(open_world: OpenWorld) -> None:
    with open_world() as world, ollama.Client(host=world.url) as client:
        with pytest.raises(ollama.ResponseError, match="no tier of this server has it"):
            client.embed("small", "Hello")
        assert "/api/embed" not in world.http.get("/openapi.json").json()["paths"]


@pytest.mark.slow_cases
@pytest.mark.parametrize("model", ["auto", "media/other", "embed-small"])
def test_every_kind_of_name_works(make: Any, far: Far, model: str) -> None:
    aliases = {"embed-small": {"models": ["media/other"]}}
    with make(aliases=aliases) as world:
        assert embed(world, model=model).status_code == 200
        sent = json.loads(far.asked[-1][2])["model"]
        assert sent == ("embedder" if model == "auto" else "other")


def test_rerank_and_images_are_passed_on(make: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", json.dumps({"at": path}).encode())
    with make() as world:
        for path in ("rerank", "images/generations"):
            body = {"model": "media", "query": "a", "documents": ["b"], "prompt": "c"}
            assert world.http.post(f"/v1/{path}", json=body).json() == {"at": f"/v1/{path}"}


def test_speech_has_the_type_that_was_asked_for(make: Any, far: Far) -> None:
    far.answer = lambda path: (200, "text/html", b"\x00\x01sound")
    with make() as world:
        body = {"model": "media", "input": "Hi", "voice": "x"}
        for kind, told in (({}, "audio/mpeg"), ({"response_format": "wav"}, "audio/wav")):
            answer = world.http.post("/v1/audio/speech", json={**body, **kind})
            assert (answer.headers["content-type"], answer.content) == (told, b"\x00\x01sound")


def test_files_are_passed_on_byte_for_byte(make: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", b'{"text": "hello"}')
    sound = bytes(range(256)) * 40 + b"\r\n--not-the-boundary\r\n"
    with make() as world:
        files = {"file": ("a.wav", sound, "audio/wav")}
        data = {"model": "auto", "language": "en"}
        answer = world.http.post("/v1/audio/transcriptions", data=data, files=files)
        assert answer.json() == {"text": "hello"}
        path, headers, body = far.asked[-1]
        assert path == "/v1/audio/transcriptions"
        assert headers["content-type"].startswith("multipart/form-data; boundary=")
        assert sound in body
        assert b"\r\n\r\nembedder\r\n" in body
        assert b"auto" not in body
        text = {**data, "response_format": "text"}
        far.answer = lambda path: (200, "application/json", b"hello")
        answer = world.http.post("/v1/audio/transcriptions", data=text, files=files)
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"


# ---- failures ------------------------------------------------------------------------------------


def test_the_next_model_of_a_chain_answers(make: Any, far: Far) -> None:
    down = {"down": {"url": "http://127.0.0.1:9/v1", "model": "m", "endpoints": ["embeddings"]}}
    with make(tiers=down, media={}) as world:
        answer = embed(world, model="down", models=["media"])
        assert answer.json() == EMBEDDED
        assert "models" not in json.loads(far.asked[-1][2])
        assert embed(world, model="down").status_code in (502, 503)


@pytest.mark.slow
def test_a_server_that_failed_is_tried_again(make: Any, far: Far) -> None:
    good = far.answer
    far.answer = lambda path: (
        (503, "application/json", b"{}") if len(far.asked) == 1 else good(path)
    )
    with make(media={"max_retries": 1}) as world:
        assert embed(world).json() == EMBEDDED
        assert len(far.asked) == 2


def test_rubbish_is_no_answer_and_a_refusal_is_passed_on(make: Any, far: Far) -> None:
    with make() as world:
        far.answer = lambda path: (200, "text/html", b"<html>")
        assert embed(world).status_code == 502
        told = b'{"error": {"message": "too many inputs", "type": "invalid_request_error"}}'
        far.answer = lambda path: (400, "application/json", told)
        answer = embed(world)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "too many inputs"


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "cloud"}, 400, "model"),
        ({"model": "small"}, 400, "model"),
        ({"model": "gone"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"stream": True}, 400, "stream"),
        ({"outrider": {"privacy": "private"}}, 400, "outrider"),
        ({"outrider": {"policy": "local_only"}}, 400, "outrider"),
        ({"privacy": "private"}, 400, "privacy"),
        ({"Model": "other"}, 400, "Model"),  # a server in Go would take it for the model
        ({"MODELS": ["other"]}, 400, "MODELS"),
        ({"\u017ftream": True}, 400, "\u017ftream"),
        ({"N": 64}, 400, "N"),
        ({"Input": "long"}, 400, "Input"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(
    make: Any, far: Far, fields: dict[str, Any], status: int, param: str
) -> None:
    with make() as world:
        answer = embed(world, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not far.asked


def test_without_a_tier_that_has_it_the_operator_is_told_what_to_set(make: Any) -> None:
    with make(media={"endpoints": ["audio"]}) as world:
        answer = embed(world)
        assert answer.status_code == 400
        assert "tiers.NAME.endpoints" in answer.json()["error"]["message"]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\nabc\r\n--x--",
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\na\r\n' * 2 + b"--x--",
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + b"a" * 999 + b"\r\n--x--",
        b"--x\r\n\r\n" * 200,
    ],
)
def test_forms_that_are_none_are_refused(make: Any, far: Far, body: bytes) -> None:
    with make() as world:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = world.http.post("/v1/audio/transcriptions", content=body, headers=headers)
        assert answer.status_code in (400, 404), answer.text
        wrong = world.http.post("/v1/audio/transcriptions", json={"model": "media"})
        assert wrong.status_code == 400
        assert not far.asked


FORM = "multipart/form-data; boundary=x"
MODEL = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nmedia\r\n'


def post_form(world: World, body: bytes) -> httpx.Response:
    return world.http.post("/v1/audio/transcriptions", content=body, headers={"content-type": FORM})


@pytest.mark.slow_cases
@pytest.mark.parametrize("comes_first", [True, False])
def test_no_server_sees_another_model_than_the_gateway(
    make: Any, far: Far, comes_first: bool
) -> None:
    """A second model, in forms that one reader takes for a model and another does not."""
    hidden = (
        'content-disposition: form-data; name = "model"',
        "content-disposition: form-data;\tname=model",
        "content-disposition:form-data;name='model'",
        'content-disposition: form-data; name="model[]"',
        'content-disposition: form-data; name="Model"',
        'content-disposition: form-data; name="a"; name="model"',
        'content-disposition: form-data; filename="a\\"; name=\\"b"; name="model"',
        'content-disposition: x; name="a"\r\ncontent-disposition: form-data; name="model"',
        'content-disposition: form-data; name="a"\ncontent-disposition: form-data; name="model"',
        'content-disposition : form-data; name="model"',
        'content-disposition: form-data;\r\n name="model"',
        "content-disposition: form-data; name*=utf-8''model",
        'content-disposition: form-data; name="_charset_"',
        'x: y\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\r\n--x \r\n'
        'content-disposition: form-data; name="model"',
        'x: y\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\n--x\n'
        'content-disposition: form-data; name="model"',
    )
    with make() as world:
        for head in hidden:
            far.asked.clear()
            second = f"--x\r\n{head}\r\n\r\nother\r\n".encode()
            body = second + MODEL if comes_first else MODEL + second
            answer = post_form(world, body + b"--x--")
            assert answer.status_code in (200, 400), (head, answer.text)
            for _, headers, sent in far.asked:
                boundary = headers["content-type"].partition("boundary=")[2].encode()
                pieces = sent.split(b"--" + boundary)
                named = [
                    piece for piece in pieces if b'name="model"' in piece.partition(b"\r\n\r\n")[0]
                ]
                assert [piece.partition(b"\r\n\r\n")[2] for piece in named] == [b"embedder\r\n"]


def test_azures_clients_name_the_model_in_the_path(make: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", b'{"text": "hello"}')
    with make() as world:
        path = "/openai/deployments/media%2Fother/audio/transcriptions?api-version=1"
        for data in ({}, {"model": "none"}):
            files = {"file": ("a.wav", b"sound")}
            answer = world.http.post(path, data=data, files=files)
            assert answer.json() == {"text": "hello"}
            sent = far.asked[-1]
            assert sent[0] == "/v1/audio/transcriptions"
            assert sent[2].count(b'name="model"\r\n\r\nother\r\n') == 1
            assert b"none" not in sent[2]


@pytest.mark.slow
def test_a_head_without_end_does_not_hold_the_gateway(make: Any, far: Far) -> None:
    """160 kB held every other request for 7 s, whoever sent them."""
    with make() as world:
        for head in (
            b"content-disposition:" * 50_000,
            b"content-disposition: form-data; name=\r\n" * 20_000,
        ):
            start_s = time.process_time()
            assert post_form(world, b"--x\r\n" + head + b"\r\n\r\n" + MODEL).status_code == 400
            assert time.process_time() - start_s < 2.0
        start_s = time.process_time()
        answer = world.http.post(
            "/v1/audio/transcriptions",
            content=MODEL + b"--x--",
            headers={"content-type": "multipart/form-data; a" + '="' * 15_000},
        )
        assert answer.status_code == 400
        assert time.process_time() - start_s < 1.0
        assert not far.asked


def test_a_body_is_bounded(make: Any, far: Far) -> None:
    with make() as world:
        limit = world.context.limits.max_body_bytes
        files = {"file": ("a.wav", b"x" * (limit + 1), "audio/wav")}
        answer = world.http.post("/v1/audio/transcriptions", data={"model": "media"}, files=files)
        assert answer.status_code == 413
        assert not far.asked


# ---- keys, limits, ledger ------------------------------------------------------------------------


def test_keys_limits_and_ledger_hold(make: Any, far: Far, tmp_path: Any) -> None:
    options = {
        "database_url": f"sqlite:///{tmp_path}/keys.db",
        "keys": {"refresh_s": 0.02},
        "ledger": {"flush_ms": 1},
        "charges": {"media": {"prompt": 1_000_000.0, "completion": 0.0}},
    }
    with make(**options) as world:
        store = world.context.tenancy.keys.store

        def key(name: str, **fields: Any) -> dict[str, str]:
            mine = {"authorization": f"Bearer {store.create(KeyOrder(name=name, **fields)).text}"}
            wait_for(lambda: world.http.get("/v1/models").status_code == 401)
            wait_for(lambda: world.http.get("/v1/models", headers=mine).status_code == 200)
            return mine

        mine = key("a", limits=LimitSpec(tokens_per_day=1_000, requests_per_minute=2))
        assert embed(world).status_code == 401
        answer = embed(world, headers=mine)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"

        def tokens() -> Any:
            return world.http.get("/v1/usage", headers=mine).json()["totals"]

        wait_for(lambda: tokens()["attempts"] == 1)
        assert tokens()["charged_tokens"] == 5
        assert tokens()["charge_usd"] == 5.0
        assert embed(world, headers=mine).status_code == 200
        assert embed(world, headers=mine).status_code == 429
        elsewhere = key("b", scopes=Scopes(tiers=frozenset({"cloud"})))
        assert embed(world, headers=elsewhere).status_code == 403
        other = key("c", scopes=Scopes(models=frozenset({"auto"})))
        assert embed(world, headers=other).status_code == 403
        assert embed(world, headers=other, model="auto").status_code == 200
        big = key("d", limits=LimitSpec(tokens_per_day=10))
        assert embed(world, headers=big).status_code in (403, 429)


# ---- budgets: images and sounds ------------------------------------------------------------------

IMAGE = b'{"data": [{"b64_json": "eA=="}], "usage": {"input_tokens": 12, "output_tokens": 4160}}'
SOUND = b'{"text": "hello", "usage": {"type": "duration", "seconds": 6.2}}'


@pytest.fixture
def keyed(opened: OpenWorld, far: Far) -> Any:
    """Opens a gateway with a limited key and a tier that makes images and hears and speaks."""

    @contextmanager
    def opened_with(limits: LimitSpec, **media: Any) -> Iterator[Books]:
        options = {"url": far.url, "model": "m", "endpoints": ["images", "audio"], **media}
        with opened(clouds=(), tiers={"media": options}, limits=limits) as made:
            yield made

    return opened_with


def draw(made: Books, **fields: Any) -> int:
    body = {"model": "media", "prompt": "a cat", **fields}
    return made.world.http.post("/v1/images/generations", json=body).status_code


def hear(made: Books, **fields: Any) -> int:
    files = {"file": ("a.wav", b"x" * 40_000, "audio/wav")}
    path = "/v1/audio/transcriptions"
    return made.world.http.post(path, data={"model": "media", **fields}, files=files).status_code


def say(made: Books, text: object) -> int:
    body = {"model": "media", "input": text, "voice": "x"}
    return made.world.http.post("/v1/audio/speech", json=body).status_code


def test_images_take_their_price_from_a_budget(keyed: Any, far: Far) -> None:
    """Thirty of thirty passed a budget of 0.10 USD: one token was reserved for each."""
    far.answer = lambda path: (200, "application/json", IMAGE)
    with keyed(LimitSpec(usd_per_day=0.10), price={"image": 0.04}) as made:
        assert draw(made, n=3) == 429
        assert [draw(made, n=2), draw(made), draw(made)] == [200, 200, 429]
        rows = made.rows(2)
        assert made.used("usd_per_day") == 80_000_000 == sum(row["charge_nanos"] for row in rows)
        assert [row["cost_nanos"] for row in rows] == [40_000_000] * 2


def test_an_end_users_budget_holds_for_images_and_sounds(keyed: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", SOUND if "audio" in path else IMAGE)
    prices = {"price": {"image": 0.04, "audio_minute": 0.07}, "bounds": {"audio_seconds": 60}}
    with keyed(LimitSpec(end_user=LimitSpec(usd_per_day=0.10)), **prices) as made:
        asked = [draw(made, n=2, user=name) for name in ("ann", "ann", "bob")]
        assert asked == [200, 429, 200]
        assert [hear(made, user=name) for name in ("ann", "cora")] == [429, 200]
        assert [row["end_user"] for row in made.rows(3)] == ["ann", "bob", "cora"]
    with keyed(LimitSpec(end_user=LimitSpec(usd_per_day=0.10))) as made:
        assert draw(made, user="ann") == 403  # nobody has said what an image costs


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "fields", [{"num_images": 3}, {"n": 2, "samples": 2}, {"n": "1", "batch_size": 1, "n_iter": 3}]
)
def test_other_names_of_n_take_as_much(keyed: Any, far: Far, fields: dict[str, Any]) -> None:
    """A server that knows `num_images` made eight for the price of one."""
    with keyed(LimitSpec(usd_per_day=0.10), price={"image": 0.04}) as made:
        assert draw(made, **fields) == 429
        sent = {name: str(value) for name, value in fields.items()}
        files = {"image": ("a.png", b"x", "image/png")}
        form = made.world.http.post(
            "/v1/images/edits", data={"model": "media", **sent}, files=files
        )
        assert form.status_code == 429
        assert draw(made, **dict.fromkeys(fields, 10**9)) == 400
        assert draw(made, **{name.upper(): 1 for name in fields}) == 400
        assert not [path for path, *_ in far.asked if "images" in path]


def test_images_that_a_server_fetches_count(keyed: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", IMAGE)
    limits = LimitSpec(tokens_per_day=9000)
    with keyed(limits, bounds={"image_tokens": 4200}) as made:
        addresses = ["https://example.com/a.png"] * 3
        for given in ({"image_url": addresses[0], "mask": {"file_id": "a"}}, {"images": addresses}):
            assert draw(made, **given) == 429
        assert draw(made, image_url=addresses[0]) == 200


@pytest.mark.slow
def test_a_sound_that_a_server_fetches_is_bounded_by_seconds_only(keyed: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", SOUND)
    bounds = {"audio_bytes_per_second": 300, "audio_tokens": 0}
    limits, price = LimitSpec(usd_per_day=0.03), {"audio_minute": 0.012}
    with keyed(limits, price=price, bounds=bounds) as made:
        assert hear(made) == 200
        assert hear(made, url="https://example.com/hour.wav") == 403
    with keyed(limits, price=price, bounds={**bounds, "audio_seconds": 1000}) as made:
        assert hear(made, url="https://example.com/hour.wav") == 429


def test_images_take_their_tokens_from_a_limit(keyed: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", IMAGE)
    price = {"prompt": 10.0, "completion": 40.0}
    limits = LimitSpec(tokens_per_day=9000, usd_per_day=0.5)
    with keyed(limits, price=price, bounds={"image_tokens": 4200}) as made:
        assert [draw(made) for _ in range(3)] == [200, 200, 429]
        assert made.used("tokens_per_day") == 2 * 4172
        assert made.used("usd_per_day") == 2 * (12 * 10_000 + 4160 * 40_000)


def test_sound_is_reserved_by_its_bound_and_charged_by_its_seconds(keyed: Any, far: Far) -> None:
    far.answer = lambda path: (200, "application/json", SOUND)
    limits = LimitSpec(usd_per_day=0.03, tokens_per_day=2000)
    bounds = {"audio_seconds": 120, "audio_bytes_per_second": 300, "audio_tokens": 2}
    with keyed(limits, price={"audio_minute": 0.012}, bounds=bounds) as made:
        assert hear(made) == 200
        assert made.used("usd_per_day") == 7 * 200_000
        assert made.used("tokens_per_day") > 7 * 2
        # A server that tells nothing may have worked on all of it.
        assert hear(made, response_format="text") == 200
        assert made.used("usd_per_day") == (7 + 120) * 200_000
        assert hear(made) == 429


def test_speech_is_charged_by_the_bytes_of_its_text(keyed: Any, far: Far) -> None:
    far.answer = lambda path: (200, "audio/mpeg", b"sound")
    with keyed(LimitSpec(usd_per_day=0.02), price={"speech": 15.0}) as made:
        assert say(made, "é" * 500) == 200
        assert made.used("usd_per_day") == 1000 * 15_000
        assert say(made, "é" * 500) == 429
        for listed in (["é" * 500], {"text": "é" * 500}):  # cost nothing
            assert say(made, listed) == 429


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("limits", "missing"),
    [
        (LimitSpec(tokens_per_minute=10**6), ("bounds.image_tokens", "bounds.audio_tokens", "")),
        (
            LimitSpec(models={"media": LimitSpec(usd_per_month=5)}),
            ("price.image", "price.audio_minute", "price.speech"),
        ),
        (LimitSpec(requests_per_day=100), ("", "", "")),
    ],
)
def test_what_no_limit_can_count_is_refused(
    keyed: Any, far: Far, limits: LimitSpec, missing: tuple[str, ...]
) -> None:
    with keyed(limits) as made:
        statuses = [draw(made), hear(made), say(made, "hello")]
        assert statuses == [403 if name else 200 for name in missing]
        told = made.world.http.post("/v1/images/generations", json={"model": "media"}).text
        assert missing[0] in told
        assert draw(made, n="many") == 400


def test_a_client_that_leaves_pays_for_the_image(keyed: Any, far: Far) -> None:
    came = threading.Event()

    def slow(path: str) -> Answer:
        came.wait(20)
        return 200, "application/json", IMAGE

    far.answer = slow
    with keyed(LimitSpec(usd_per_day=1), price={"image": 0.04}) as made:
        with pytest.raises(httpx.ReadTimeout):
            made.world.http.post(
                "/v1/images/generations", json={"model": "media", "n": 2}, timeout=0.3
            )
        (row,) = made.rows(1)
        came.set()
        assert (row["outcome"], row["charge_nanos"]) == ("cancelled", 80_000_000)


def test_a_reranker_that_reads_the_query_with_each_document_is_bounded() -> None:
    size = json_size("rerank", {"query": "word " * 100, "documents": ["a"] * 50})
    assert size.num_text_tokens >= 50 * 500
