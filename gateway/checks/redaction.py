"""Takes personal data and credentials out of what is sent to tiers elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from outrider.gateway.checks.texts import refuse_token_ids, texts_of
from outrider.gateway.telemetry.redaction import redact_text

Replace = Callable[[str], str]
"""Returns a text without what is private in it."""

_MODELS: Final = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm")
_LARGE_BYTES: Final = 1 << 16
"""A larger request is read in a thread."""
_MAX_THREADS: Final = 4
"""At once: the database needs some of the event loop's, too, and Presidio takes seconds."""


def forms(kinds: Collection[str]) -> Replace:
    """Return what replaces these kinds by their forms."""
    return partial(redact_text, kinds=frozenset(kinds))


def presidio() -> Replace:
    """Return what replaces what Presidio finds with an installed model of spaCy's.

    Raises LookupError where no model is: by itself Presidio would download one.
    """
    from presidio_analyzer import AnalyzerEngine
    from presidio_analyzer.nlp_engine import NlpEngineProvider

    model = next(filter(find_spec, _MODELS), None)
    if model is None:
        raise LookupError(f"python -m spacy download {_MODELS[0]}")
    models = [{"lang_code": "en", "model_name": model}]
    provider = NlpEngineProvider(nlp_configuration={"nlp_engine_name": "spacy", "models": models})
    engine = AnalyzerEngine(nlp_engine=provider.create_engine(), supported_languages=["en"])

    def replace(text: str) -> str:
        parts, at = [], 0
        found = engine.analyze(text=text, language="en")
        for each in sorted(found, key=lambda each: (each.start, -each.end)):
            if each.start >= at:
                parts += [text[at : each.start], f"[{each.entity_type.lower()}]"]
            at = max(at, each.end)
        return "".join((*parts, text[at:]))

    return replace


def redaction(*replaces: Replace, is_slow: bool = False) -> Callable[[bytes], Awaitable[bytes]]:
    """Return what redacts a request's JSON. `is_slow`: in a thread, whatever the size.

    Where nothing is found it returns the same bytes, as for other bodies. It raises BadRequestError
    for a prompt in token ids.
    """

    places = asyncio.Semaphore(_MAX_THREADS)

    async def redact(body: bytes) -> bytes:
        if not is_slow and len(body) <= _LARGE_BYTES:
            return _redacted(body, replaces)
        async with places:
            return await asyncio.to_thread(_redacted, body, replaces)

    return redact


def _redacted(body: bytes, replaces: Sequence[Replace]) -> bytes:
    try:
        document: Any = msgspec.json.decode(body)
    except (ValueError, RecursionError):  # a form
        return body
    if not isinstance(document, dict):
        return body
    refuse_token_ids(document)
    is_changed = False
    for text in texts_of(document):
        new = text.value
        for replace in replaces:
            new = replace(new)
        if new != text.value:
            text.replace(new)
            is_changed = True
    return msgspec.json.encode(document) if is_changed else body
