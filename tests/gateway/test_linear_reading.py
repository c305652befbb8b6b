"""What reads a client's text takes time that grows with its length and not with its square.

Every regular expression of what serves requests is listed here: with its worst input where it reads
a client's headers, parts, fields or prompts, or with the reason why no client writes its text.
"""

import ast
import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

import pytest

from outrider import gateway
from outrider.engine.grammar import json_pattern
from outrider.gateway.answering.caching.answers import _WITHHELD
from outrider.gateway.answering.reading.misplaced_options import _OTHER_SIGNS
from outrider.gateway.answering.reading.required_capabilities import _PLAIN_PATH
from outrider.gateway.answering.text import channels, tool_parser
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.control_tokens import ControlTokens
from outrider.gateway.answering.text.tool_prompt import _SHORT_ID
from outrider.gateway.checks.texts import _BASE64, _PLAIN_FIELD, _UNREAD, _WORD
from outrider.gateway.contract.errors.http import INVALID_REQUEST, Problem
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema import forms
from outrider.gateway.contract.schema.tools import FUNCTION_NAME
from outrider.gateway.contract.schema.unknown_fields import _OTHER_SIGNS as UNKNOWN_SIGNS
from outrider.gateway.experiments.feedback import _ID as FEEDBACK_ID
from outrider.gateway.http.apis.responses.paths import in_own_words, own_path
from outrider.gateway.http.apis.responses.writer import _SANE_TAIL
from outrider.gateway.http.edge.bodies import _JSON_TYPE
from outrider.gateway.http.edge.cors import _HEADER_NAMES
from outrider.gateway.http.edge.foreign_pages import _LOCAL_HOST, _PORT
from outrider.gateway.http.edge.framing import complaint
from outrider.gateway.http.edge.idempotency import _KEY as IDEMPOTENCY_KEY
from outrider.gateway.http.server.auth_dispatcher import _SANE_ID
from outrider.gateway.http.server.endpoints import _HOP
from outrider.gateway.http.server.veil import _TIER_NAMED
from outrider.gateway.telemetry.redaction import redact_text
from outrider.gateway.tenancy.keys.keys import id_in
from outrider.gateway.tenancy.ledger.timestamps import parse_time
from outrider.gateway.upstream.dialects.anthropic_messages import _FOREIGN_CHARS
from outrider.router.answer_text import text_fault
from tests.engines import PAIR_FOLDER

_SMALL: Final = 1_000  # characters
_GROWTH: Final = 8
_MOST_GROWTH: Final = 24  # of processor time: 8 when it is linear, 64 when it is quadratic
_SLACK_S: Final = 0.0005
_RUNS: Final = 5

_USE: Final = re.compile(r"\bre\.[a-z]+\(")

Work = Callable[[str], object]
"""Reads a text; a GatewayError or ValueError is an answer too."""


CONTROL = ControlTokens(ChatTokenizer.load(PAIR_FOLDER / "large")._backend, "<|end|>")


def fullmatch(pattern: re.Pattern[str]) -> Work:
    return pattern.fullmatch


def search(pattern: re.Pattern[str]) -> Work:
    return pattern.search


def in_bytes(match: Callable[[bytes], object]) -> Work:
    return lambda text: match(text.encode())


def form(text: str) -> object:
    """A part with this head. Its server sees none of it unless it is read here."""
    body = b"--x\r\n" + text.encode() + b"\r\n\r\nvalue\r\n--x--\r\n"
    return asyncio.run(forms.read_form("multipart/form-data; boundary=x", body))


def contents(text: str) -> object:
    """A part with this content, whose boundary nearly stands in it again and again."""
    head = b'--aaaaaaaa\r\ncontent-disposition: form-data; name="f"\r\n\r\n'
    body = head + text.encode() + b"\r\n--aaaaaaaa--"
    return asyncio.run(forms.read_form("multipart/form-data; boundary=aaaaaaaa", body))


def own_words(text: str) -> object:
    """A refusal that names a field: 64 characters of a client's name at most."""
    return in_own_words(
        Problem(status=HTTPStatus.BAD_REQUEST, message=text, type=INVALID_REQUEST, param="-" * 64)
    )


def headers(text: str) -> object:
    return complaint(b"/" + text.encode(), [(b"host", text.encode())], "1.1", max_bytes=10**9)


# By the place of each expression: what reads it, and its worst inputs, which are repeated.
READ: Final[dict[str, tuple[tuple[Work, str], ...]]] = {
    "engine/grammar/json_pattern.py:_CONTROLS": (
        (lambda text: json_pattern.javascript(text, is_quoted=True), "[^a"),
        (lambda text: json_pattern.javascript(f"[^{text}", is_quoted=True), r"\x"),
    ),
    "engine/grammar/json_pattern.py:_HAS_BOTH": (
        (lambda text: json_pattern.javascript(text, is_quoted=True), "[^a"),
        (lambda text: json_pattern.javascript(f"[^{text}", is_quoted=True), r"\x"),
    ),
    "engine/grammar/json_pattern.py:_IRREGULAR": (
        (json_pattern.is_regular, "(?"),
        (json_pattern.is_regular, "(?<"),
    ),
    "engine/grammar/json_pattern.py:_PLAIN_ESCAPE": ((json_pattern.is_regular, "\\"),),
    "engine/grammar/json_pattern.py:_TOKEN": (
        (lambda text: json_pattern.javascript(text, is_quoted=True), "[^a"),
        (lambda text: json_pattern.javascript(f"[^{text}", is_quoted=True), r"\x"),
    ),
    "gateway/http/apis/responses/paths.py:_RENAMED": (
        (own_path, "tools.1"),
        (own_path, "messages"),
    ),
    "gateway/http/apis/responses/paths.py:in_own_words": ((own_words, "-"), (own_words, " -")),
    "gateway/http/apis/responses/writer.py:_SANE_TAIL": ((fullmatch(_SANE_TAIL), "a"),),
    "gateway/answering/caching/answers.py:_WITHHELD": (
        (in_bytes(_WITHHELD.search), '"finish_reason": '),
        (in_bytes(_WITHHELD.search), '"finish_reason":' + " " * 99),
    ),
    "gateway/contract/schema/unknown_fields.py:_OTHER_SIGNS": (
        (lambda text: UNKNOWN_SIGNS.sub("", text), "A"),
        (lambda text: UNKNOWN_SIGNS.sub("", text), "_a"),
    ),
    "gateway/http/server/veil.py:_TIER_NAMED": (
        (lambda text: _TIER_NAMED.sub("", text), "the "),
        (lambda text: _TIER_NAMED.sub("", f"The {text}"), "the"),
        (lambda text: _TIER_NAMED.sub("", text), "the or "),
        (lambda text: _TIER_NAMED.sub("", text), "unknown tier ''; available: "),
        (lambda text: _TIER_NAMED.sub("", text), "tiers."),
        (lambda text: _TIER_NAMED.sub("", text), "tiers.a "),
    ),
    "gateway/http/edge/bodies.py:_JSON_TYPE": (
        (lambda text: _JSON_TYPE.fullmatch(f"application/{text}"), "+"),
        (lambda text: _JSON_TYPE.fullmatch(f"application/{text}"), "+json"),
    ),
    "gateway/http/edge/cors.py:_HEADER_NAMES": (
        (in_bytes(_HEADER_NAMES.fullmatch), "a"),
        (in_bytes(_HEADER_NAMES.fullmatch), "a, "),
    ),
    "gateway/http/edge/foreign_pages.py:_PORT": (
        (lambda text: _PORT.sub("", text), ":"),
        (lambda text: _PORT.sub("", text), ":1"),
    ),
    "gateway/contract/schema/forms.py:_PARAMETER": (
        (forms.header_parameters, 'a; name="'),
        (forms.header_parameters, ";"),
        (forms.header_parameters, " ; "),
        (forms.header_parameters, ";a=b"),
        (lambda text: forms.header_parameters(f'a; b="{text}'), "\\a"),
        (lambda text: forms.header_parameters(f"a{text}b"), " "),
    ),
    "gateway/contract/schema/forms.py:_ESCAPED": (
        (lambda text: forms.header_parameters(f'a; b="{text}"'), "\\a"),
    ),
    "gateway/contract/schema/forms.py:_HEADER_NAME": (
        (form, "content-disposition:"),
        (form, "content-disposition: form-data; name=\r\n"),
        (form, "a"),
    ),
    "gateway/contract/schema/forms.py:_CONTROL": (
        (form, "a: b\t"),
        (form, "a:\r\n"),
        (contents, "\r\n--a"),
    ),
    "gateway/contract/schema/forms.py:_FIELD_NAME": (
        (lambda text: form(f"content-disposition: form-data; name={text}"), "a"),
        (contents, "\r\n--aaaaaaa"),
    ),
    "gateway/http/edge/framing.py:_HOST": ((headers, "a"), (headers, "a:"), (headers, "[")),
    "gateway/http/edge/framing.py:_CONTROL": ((headers, "%41"), (headers, "%")),
    "gateway/http/edge/foreign_pages.py:_LOCAL_HOST": (
        (fullmatch(_LOCAL_HOST), "a"),
        (fullmatch(_LOCAL_HOST), "a."),
        (fullmatch(_LOCAL_HOST), "localhost."),
        (fullmatch(_LOCAL_HOST), "internal."),
    ),
    "gateway/http/edge/idempotency.py:_KEY": ((fullmatch(IDEMPOTENCY_KEY), "a"),),
    "gateway/experiments/feedback.py:_ID": ((fullmatch(FEEDBACK_ID), "a"),),
    "gateway/answering/reading/misplaced_options.py:_OTHER_SIGNS": (
        (lambda text: _OTHER_SIGNS.sub("", text), "-"),
    ),
    "gateway/answering/reading/required_capabilities.py:_PLAIN_PATH": (
        (fullmatch(_PLAIN_PATH), "a"),
    ),
    "gateway/tenancy/ledger/timestamps.py:parse_time": (
        (lambda text: parse_time(text, 0.0), "1"),
        (lambda text: parse_time(text, 0.0), "2026-01-01T00:00:00"),
    ),
    "gateway/contract/schema/tools.py:FUNCTION_NAME": ((fullmatch(FUNCTION_NAME), "a"),),
    "gateway/http/server/auth_dispatcher.py:_SANE_ID": ((fullmatch(_SANE_ID), "a"),),
    "gateway/http/server/endpoints.py:_HOP": ((fullmatch(_HOP), "a"),),
    "gateway/telemetry/redaction.py:_FORMS": tuple(
        (redact_text, worst)
        for worst in (
            "-----BEGIN PRIVATE KEY-----",
            "-----BEGIN " + "A " * 20,
            "eyJ",
            " eyJaaaaa",
            "eyJaaaaa.",
            "sk-",
            "AKIA",
            "bearer ",
            'token"=',
            "a://",
            "a.",
            "a:a",
            "a@",
            "@a.",
            "ab12",
            "aa11 ",
            "1 ",
            "1",
            "123-45-",
            "+1 (",
            "00",
            "(12) ",
            "12 34 567 ",
            "4111 ",
            "4-",
        )
    ),
    "gateway/checks/texts.py:_WORD": ((fullmatch(_WORD), "a"),),
    "gateway/checks/texts.py:_PLAIN_FIELD": ((fullmatch(_PLAIN_FIELD), "a"),),
    "gateway/checks/texts.py:_UNREAD": ((lambda text: _UNREAD.fullmatch(f"choices.{text}"), "1"),),
    "gateway/checks/texts.py:_BASE64": (
        (fullmatch(_BASE64), "a"),
        (lambda text: _BASE64.fullmatch(f"data:{text}"), "a,"),
        (lambda text: _BASE64.fullmatch(f"data:a,{text}"), "="),
    ),
    "gateway/telemetry/redaction.py:_account": ((redact_text, "gb82 west 1234 5698 7654 32 "),),
    "gateway/tenancy/keys/keys.py:KEY_ID": ((id_in, "or-"),),
    "gateway/tenancy/keys/keys.py:_KEY": ((id_in, "a"),),
    "gateway/answering/text/channels.py:_BODY_END": ((search(channels._BODY_END), "<|"),),
    "gateway/answering/text/channels.py:_NAME": (
        (search(channels._NAME), "<|channel|>"),
        (search(channels._NAME), "<|channel|>" + " " * 99),
    ),
    "gateway/answering/text/channels.py:_RECIPIENT": (
        (search(channels._RECIPIENT), "to="),
        (search(channels._RECIPIENT), " to=<"),
    ),
    "gateway/answering/text/control_tokens.py:ControlTokens": (
        (lambda text: CONTROL.are_in([text]), "<|en"),
        (CONTROL.mark, "<|end|"),
        (CONTROL.mark, "<|end|>"),
        (CONTROL._marked.split, "\U000f0000<|end|>"),
        (CONTROL._marked.split, "\U000f0000<|end|>\U000f0001"),
    ),
    "gateway/answering/text/tool_parser.py:_NAME": ((tool_parser._NAME.match, "a"),),
    "gateway/answering/text/tool_prompt.py:_SHORT_ID": ((fullmatch(_SHORT_ID), "a"),),
    "gateway/upstream/dialects/anthropic_messages.py:_FOREIGN_CHARS": (
        (lambda text: _FOREIGN_CHARS.sub("_", text), "/"),
    ),
    "router/answer_text.py:_GIVES_UP": (
        (lambda text: text_fault(text, is_whole=True), "i am "),
        (lambda text: text_fault(text, is_whole=True), "i"),
    ),
}

NOT_CLIENTS: Final[dict[str, tuple[str, ...]]] = {
    "the operator writes it: settings, flags, templates, checkpoints": (
        "engine/adapters/peft_config.py:_PATTERN",
        "engine/adapters/read_adapter.py:_NAME",
        "engine/model/gguf/tensors.py:_LAYER",
        "engine/model/shard_reader.py:_LAYER",
        "engine/model/shard_reader.py:Cuts",
        "gateway/settings/concealing.py:_PASSWORD",
        "gateway/settings/adapters.py:ADAPTER_NAME",  # pydantic's engine reads it, which is linear
        "gateway/settings/http_bounds.py:_HOST",
        "gateway/settings/http_bounds.py:_ORIGIN",
        "gateway/settings/listed_prices.py:_DATE",
        "gateway/settings/presets.py:_url",
        "gateway/settings/sections.py:template_files",
        "gateway/settings/sign_in.py:SIGN_IN_NAME",
        "gateway/settings/slo.py:_CLASS_NAME",
        "gateway/settings/tiers.py:TIER_NAME",
        "gateway/settings/tiers.py:_HEADER_NAME",
        "gateway/settings/tiers.py:_HEADER_VALUE",
        "gateway/settings/tiers.py:_base_url",
        "gateway/settings/toml_text.py:_BARE_KEY",
        "gateway/tenancy/keys/admin_token.py:_ALPHABETS",
        "gateway/tenancy/keys/admin_token.py:_VISIBLE",
        "gateway/tenancy/keys/timestamps.py:_DURATION",
        "gateway/answering/text/tool_formats.py:_deepseek",
        "gateway/answering/text/tool_formats.py:_phi4",
        "gateway/answering/text/tool_formats.py:_shows_tools",
        "gateway/wiring/start.py:_check_templates",
        "router/mistakes.py:_DIGIT",
        "router/mistakes.py:_WORD",
        "router/paraphrase.py:_OPTION",
    ),
    "this program wrote it": (
        "engine/grammar/vocabulary.py:_CONTEXT",  # the grammar library's messages
        "engine/grammar/vocabulary.py:_PLACE",
        "engine/grammar/vocabulary.py:_WORDS",
        "gateway/experiments/recent.py:_ARM",
        "gateway/http/server/pages.py:_INCLUDE",
        "gateway/http/server/pages.py:_SCRIPT",
        "gateway/telemetry/logs.py:_PART",
        "gateway/answering/text/grammar_parts.py:Literals",
    ),
    "an upstream server or an engine wrote it, within bounds of size": (
        "gateway/engines/fleet/addresses.py:_ADDRESS",
        "gateway/wiring/ray/engine_child.py:_ENDPOINT",
        "gateway/upstream/dialects/openai.py:_ERROR_NAME",
        "gateway/upstream/dialects/rewriting.py:_PLAIN_EVENT",
        "gateway/upstream/event_stream.py:_BLANK_LINE",
    ),
}


def processor_s(read: Work, text: str) -> float:
    """Processor time of this thread, the least of several runs: other programs take none of it."""
    times = []
    for _ in range(_RUNS):
        start_s = time.thread_time()
        with suppress(BadRequestError, ValueError):
            read(text)
        times.append(time.thread_time() - start_s)
        if times[-1] > 1.0:
            break
    return min(times)


def grows(read: Work, worst: str) -> float:
    """How much longer it takes for eight times the text; below 24 is linear, with all noise."""
    small = worst * (_SMALL // len(worst) + 1)
    return processor_s(read, small * _GROWTH) / (processor_s(read, small) + _SLACK_S / _MOST_GROWTH)


def expressions(folder: Path) -> Iterator[str]:
    """Places of a package's regular expressions, as FILE:NAME of what stands at the top."""
    for file in sorted(folder.rglob("*.py")):
        where = file.relative_to(folder.parent).as_posix()
        text = file.read_text()
        assert "from re import" not in text, f"{where}: write re.compile, so that it is found here"
        if where.startswith("gateway/tools/") or not _USE.search(text):
            continue
        for top in ast.parse(text).body:
            if any(_is_expression(node) for node in ast.walk(top)):
                target = top.targets[0] if isinstance(top, ast.Assign) else top
                target = target.target if isinstance(target, ast.AnnAssign) else target
                yield f"{where}:{getattr(target, 'id', None) or getattr(target, 'name', '?')}"


def _is_expression(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    module = node.func.value
    return isinstance(module, ast.Name) and module.id == "re" and node.func.attr != "escape"


@pytest.mark.parametrize(
    ("read", "worst"),
    [
        pytest.param(read, worst, id=f"{place.rpartition('/')[2]}-{worst[:20]!r}")
        for place, works in READ.items()
        for read, worst in works
    ],
)
def test_the_work_grows_with_the_text(read: Work, worst: str) -> None:
    assert grows(read, worst) < _MOST_GROWTH


def test_the_measure_finds_what_is_quadratic() -> None:
    """The expression by which forms were read once."""
    name = re.compile(rb'(?i)content-disposition:[^\r\n]*;\s*name="?([^";\r\n]+)"?')
    assert grows(in_bytes(name.search), "content-disposition:") > _MOST_GROWTH


def test_every_expression_is_listed() -> None:
    root = Path(gateway.__file__).parent.parent
    found = {
        place for name in ("engine", "gateway", "router") for place in expressions(root / name)
    }
    listed = [*READ, *(place for places in NOT_CLIENTS.values() for place in places)]
    assert len(listed) == len(set(listed))
    assert found - set(listed) == set(), "list them above, with their worst input"
    assert set(listed) - found == set(), "these are gone"
