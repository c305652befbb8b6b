"""docs/api.md has a line for every field of OpenAI's requests, and each line is true.

Fields are those of the installed openai client's parameter types. What a line says is tried on a
gateway: an honoured field changes what the engine is asked for or what comes back, an ignored one
changes nothing, and a refused one is named in a 400, but not where its value means "off".
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, get_args, get_type_hints

import httpx
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from transformers import AutoTokenizer
from typing_extensions import is_typeddict

from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.wiring.application import build_app
from tests.gateway.conftest import parts_over, running
from tests.gateway.field_trials import (
    CHAT,
    COMPLETION,
    INSIDE,
    TEMPLATE,
    TRIALS,
    TRIALS_OF_COMPLETIONS,
    Document,
    trial,
)
from tests.gateway.scripted_client import Script, ScriptedClient, Step

PAGE: Final = Path(__file__).parents[4] / "docs" / "api.md"
NO_FIELD: Final = "\N{EN DASH}"
WORDS: Final = frozenset({"honoured", "counted", "ignored", "refused", NO_FIELD})


# ------------------------------------------------------------------------------ what the page says


def lines_under(heading: str) -> list[list[str]]:
    """The cells of the tables under a heading, until the next one of its kind or above."""
    text = PAGE.read_text(encoding="utf-8")
    level = heading.split(" ")[0]
    body = text.split(f"\n{heading}\n", 1)[1]
    body = re.split(rf"\n#{{1,{len(level)}}} ", body, maxsplit=1)[0]
    body = body.split("\n### ")[0] if level == "##" else body
    rows = [line.strip("|").split(" | ") for line in body.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def stated() -> dict[str, tuple[str, str]]:
    """Return what the page says of each field, in chat and in completions."""
    said: dict[str, tuple[str, str]] = {}
    for names, chat, completions, *_ in lines_under("## Every field"):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in said, f"{name} has two lines"
            said[name] = (chat, completions)
    return said


def stated_inside() -> dict[str, str]:
    """Return what the page says of each path inside the fields of a chat."""
    said: dict[str, str] = {}
    for names, word, *_ in lines_under("### Inside them"):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in said, f"{name} has two lines"
            said[name] = word
    return said


SAID: Final = stated()
SAID_INSIDE: Final = stated_inside()


# ---------------------------------------------------------------------------- what the client sends


def client_fields(*kinds: type) -> set[str]:
    return {name for kind in kinds for name in get_type_hints(kind)}


CHAT_FIELDS: Final = client_fields(
    chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming
)
COMPLETION_FIELDS: Final = client_fields(
    completion_params.CompletionCreateParamsNonStreaming,
    completion_params.CompletionCreateParamsStreaming,
)


def objects_in(hint: object) -> Iterator[type]:
    """The typed dictionaries that a value of this type may be, or be made of."""
    if is_typeddict(hint):
        assert isinstance(hint, type)
        yield hint
    for argument in get_args(hint):
        yield from objects_in(argument)


def paths_in(kind: type, path: str = "") -> Iterator[str]:
    """All that may stand inside the fields; nothing below what the page calls refused or ignored,
    except where the page goes on itself.
    """
    for name, hint in get_type_hints(kind).items():
        here = f"{path}{name}"
        if path:
            yield here
        word = SAID_INSIDE.get(here) if path else SAID[here][0]
        goes_on = any(other.startswith(f"{here}.") for other in SAID_INSIDE)
        if word == "honoured" or goes_on:
            for inner in objects_in(hint):
                yield from paths_in(inner, f"{here}.")


def test_every_field_of_the_client_has_its_line() -> None:
    assert len(CHAT_FIELDS) > 30
    assert len(COMPLETION_FIELDS) > 15
    assert CHAT_FIELDS - SAID.keys() == set()
    assert COMPLETION_FIELDS - SAID.keys() == set()
    assert [name for name in CHAT_FIELDS if SAID[name][0] == NO_FIELD] == []
    assert [name for name in COMPLETION_FIELDS if SAID[name][1] == NO_FIELD] == []


def test_every_field_inside_the_fields_has_its_line() -> None:
    paths = set(paths_in(chat_params.CompletionCreateParamsNonStreaming))
    assert len(paths) > 40
    assert paths - SAID_INSIDE.keys() == set()
    assert SAID_INSIDE.keys() - paths == set(), "no field of the client"


@pytest.mark.parametrize(("model", "column"), [(ChatRequest, 0), (CompletionRequest, 1)])
def test_every_field_of_ours_has_its_line(
    model: type[ChatRequest | CompletionRequest], column: int
) -> None:
    known = {made.alias or name for name, made in model.model_fields.items()}
    assert known - SAID.keys() == set()
    assert {name for name, said in SAID.items() if said[column] != NO_FIELD} == known


def test_lines_use_the_words_that_the_page_explains() -> None:
    assert {word for said in SAID.values() for word in said} == WORDS
    assert set(SAID_INSIDE.values()) == WORDS - {NO_FIELD, "counted"}
    known = {name for name, said in SAID.items() if said != (NO_FIELD, NO_FIELD)}
    assert known == TRIALS.keys(), "each is tried below"
    assert SAID_INSIDE.keys() == INSIDE.keys()


# ------------------------------------------------------------------------------ whether it is true


class Gateway:
    """Asks a running gateway, and tells what is the same between two requests."""

    def __init__(self, engine: ScriptedClient, http: httpx.Client) -> None:
        self._engine = engine
        self._http = http
        self._known: dict[str, object] = {}

    def refusal(self, path: str, document: Document) -> str:
        """The field that a 400 names."""
        self._engine.submitted.clear()
        response = self._http.post(path, json=document)
        assert response.status_code == 400, (document, response.text)
        assert not self._engine.submitted
        return str(response.json()["error"]["param"])

    def effect(self, path: str, document: Document) -> object:
        """Return the engine requests and the response, without times and request ids."""
        name = f"{path} {json.dumps(document)}"
        if name not in self._known:
            self._engine.submitted.clear()
            response = self._http.post(path, json=document)
            assert response.status_code == 200, (document, response.text)
            asked = [_timeless(request) for request in self._engine.submitted]
            self._known[name] = (asked, response.headers["content-type"], _plain(response.text))
        return self._known[name]


@pytest.fixture(scope="module")
def gateway(tokenizer_folder: Path, encode: Callable[[str], list[int]]) -> Iterator[Gateway]:
    backend = AutoTokenizer.from_pretrained(tokenizer_folder)
    backend.chat_template = TEMPLATE
    backend.add_tokens([f"<|fim_{name}|>" for name in ("prefix", "suffix", "middle")])
    tokenizer = ChatTokenizer(backend)
    text, conforming = ([Step(token_ids=tuple(encode(says)))] for says in ("Hello there!", "{}"))

    def script(request: EngineRequest) -> Script:
        """A format's answer conforms; it is checked before it is done."""
        format_ = request.grammar
        has_format = format_ is not None and (
            "json" in format_.kind or "json_schema" in format_.text
        )
        return Script(steps=conforming if has_format else text, top_ids=(5, 6))

    engine = ScriptedClient(vocab_size=423, max_context=4096, script=script)
    app = build_app(parts_over(engine, tokenizer))
    with running(app) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield Gateway(engine, http)


def _timeless(request: EngineRequest) -> EngineRequest:
    names = {known.name for known in fields(request)}
    assert {"request_id", "group_id", "arrival_s"} <= names
    return replace(request, request_id="r", group_id=None, arrival_s=0.0)


def _plain(text: str) -> str:
    """The answer, less what differs between two of the same."""
    text = re.sub(r'"(id|created|ttft_s|queue_s)":("[^"]*"|[0-9.e+-]+|null)', r'"\1":0', text)
    chunks = re.sub(r"\s+", " ", text)
    return _merged(chunks)


def _merged(chunks: str) -> str:
    """Chunks of a stream may come together or apart: their texts in a row, and all other fields."""
    said = "".join(re.findall(r'"content":"([^"]*)"', chunks))
    kinds = sorted(set(re.findall(r'"(\w+)":', chunks)))
    rest = re.findall(r'"(?:finish_reason|service_tier)":"\w+"', chunks)
    whole = "" if "data:" in chunks else chunks
    return f"{said} {kinds} {sorted(set(rest))} {whole}"


ENDPOINTS: Final = (
    ("/v1/chat/completions", CHAT, TRIALS),
    ("/v1/completions", COMPLETION, TRIALS_OF_COMPLETIONS),
)


@pytest.mark.slow_cases
@pytest.mark.parametrize("column", [0, 1], ids=["chat", "completions"])
@pytest.mark.parametrize("name", sorted(SAID))
def test_the_line_is_true(gateway: Gateway, name: str, column: int) -> None:
    path, start, trials = ENDPOINTS[column]
    word = SAID[name][column]
    tried = trials.get(name, trial(1))
    base = {**start, **(tried.beside if word != NO_FIELD else {})}
    used = {**base, name: tried.value}
    if word == NO_FIELD:
        assert gateway.refusal(path, used).startswith(name)
    elif word == "refused":
        assert gateway.refusal(path, used).startswith(name)
        for off in tried.off:
            assert gateway.effect(path, {**base, name: off}) == gateway.effect(path, base)
    elif word in {"counted", "ignored"}:
        assert gateway.effect(path, used) == gateway.effect(path, base)
    else:
        assert gateway.effect(path, used) != gateway.effect(path, base)


@pytest.mark.parametrize("name", sorted(SAID_INSIDE))
def test_the_line_of_a_path_is_true(gateway: Gateway, name: str) -> None:
    path, start, _ = ENDPOINTS[0]
    used, other = ({**start, **more} for more in INSIDE[name])
    word = SAID_INSIDE[name]
    if word == "refused":
        assert gateway.refusal(path, used).startswith(name.split(".")[0])
        gateway.effect(path, other)
    elif word == "ignored":
        assert gateway.effect(path, used) == gateway.effect(path, other)
    else:
        assert gateway.effect(path, used) != gateway.effect(path, other)


@pytest.mark.parametrize("column", [0, 1], ids=["chat", "completions"])
def test_the_same_request_has_the_same_effect(gateway: Gateway, column: int) -> None:
    """Else all that is honoured above would be so by chance."""
    path, start, _ = ENDPOINTS[column]
    for base in (start, {**start, "stream": True}):
        assert gateway.effect(path, base) == gateway.effect(path, {"n": 1, **base})


def test_the_service_tiers_of_the_line(gateway: Gateway) -> None:
    """What OpenAI's field may say is taken, or named in the line as refused."""
    hint = get_type_hints(chat_params.CompletionCreateParamsNonStreaming)["service_tier"]
    values = {value for literal in get_args(hint) for value in get_args(literal)}
    (note,) = (row[3] for row in lines_under("## Every field") if row[0] == "`service_tier`")
    taken, refused = (set(re.findall(r"`(\w+)`", text)) for text in note.split(".")[0].split(";"))
    assert taken | refused == values
    for value in taken:
        gateway.effect("/v1/chat/completions", {**CHAT, "service_tier": value})
    for value in refused:
        document = {**CHAT, "service_tier": value}
        assert gateway.refusal("/v1/chat/completions", document) == "service_tier"
