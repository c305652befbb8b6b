"""A sampling parameter that one file forgets would be lost on one API, or at one kind of server."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Final

import pytest

from outrider.gateway.contract.schema.common import GenerationFields
from outrider.verifier.params import SamplingParams
from tests.docs.markdown import ROOT

PARAMETERS: Final = frozenset(
    field.name for field in fields(SamplingParams) if field.name in GenerationFields.model_fields
)
UNKNOWN_TO_LLAMA: Final = frozenset({"min_tokens", "logit_bias", "stop_token_ids"})
"""Ollama's API and llama.cpp's /infill have no such options."""
OF_ONE_ANSWER: Final = UNKNOWN_TO_LLAMA | {"max_tokens", "seed"}
"""No operator sets them for many requests."""
LEFT_OUT: Final[dict[str, frozenset[str]]] = {
    "gateway/answering/jobs/engine_requests.py": frozenset(),
    "gateway/http/apis/responses/request.py": frozenset({"max_tokens"}),
    "gateway/http/apis/responses/translate.py": frozenset({"max_tokens"}),
    "gateway/http/apis/ollama/request.py": UNKNOWN_TO_LLAMA,
    "gateway/http/apis/infill/api.py": UNKNOWN_TO_LLAMA,
    "gateway/upstream/bounds.py": frozenset(),
    "gateway/upstream/fields.py": frozenset(),
    "gateway/upstream/dialects/anthropic_request.py": frozenset(),
    "gateway/settings/arm_overlay.py": OF_ONE_ANSWER,
    "docs/api.md": frozenset(),
    "docs/responses.md": frozenset({"max_tokens"}),
    "docs/ollama.md": UNKNOWN_TO_LLAMA | {"max_tokens"},
}
"""The files that list sampling parameters, and those that each of them has no use for."""


def names_in(path: str) -> Iterator[str]:
    """Yield the names in a page's backticks; of a module its texts, fields and arguments."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        yield from re.findall(r"`(?:options\.)?(\w+)`", text)
        return
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(name)) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


@pytest.mark.parametrize("path", LEFT_OUT)
def test_each_list_names_all_sampling_parameters(path: str) -> None:
    missing = PARAMETERS - set(names_in(path))
    assert missing == LEFT_OUT[path], f"{path}: name these, or say here why not"
