"""The checks of the settings, and those of one request: they pass its texts, change or refuse them.

A request that is checked goes on as the JSON that was checked, written anew: what reads it next
cannot read something else in it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from outrider.gateway.checks.check_metrics import CheckMetrics, Outcome
from outrider.gateway.checks.hooks import PASS, Hook, HookError, Question, Verdict
from outrider.gateway.checks.texts import refuse_token_ids, texts_of
from outrider.gateway.contract.answers.responder import CheckedParts
from outrider.gateway.contract.errors.tree import BadRequestError, UnavailableError
from outrider.gateway.contract.schema.parsing import RequestJson
from outrider.gateway.settings.checks import CheckSettings
from outrider.gateway.tenancy.keys.keys import Principal

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS: Final = 500


Asked = Mapping[str, str]
"""A text that is to be checked: `path`, `text`, `before` (the end of what was sent before it)."""
NamesByTier = Mapping[str, Set[str]]
"""The names of each tier that may answer a request, and of its models."""
FindNames = Callable[[Mapping[str, Any], Set[str], str], Awaitable[NamesByTier | None]]
"""Finds them by a request's JSON, the models that it names, and its endpoint; None: unknown."""


class BlockedError(Exception):
    """A check blocks an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerers:
    """What may answer a request."""

    named: Set[str] = frozenset()
    """The models as the request names them."""
    behind: NamesByTier | None = None
    """None: anything may answer."""

    def are_among(self, models: Collection[str], tiers: Collection[str] | None = None) -> bool:
        """Return whether a check for `models` is made; `tiers`: those that answer. None: any."""
        if not models or self.behind is None or not self.named.isdisjoint(models):
            return True
        found = self.behind
        return any(
            tier not in found or not found[tier].isdisjoint(models)
            for tier in (found if tiers is None else tiers)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the settings."""

    name: str
    settings: CheckSettings
    hook: Hook
    metrics: CheckMetrics

    def applies(self, principal: Principal) -> bool:
        """Return whether requests of this key are checked."""
        names = {principal.key_id, principal.name, principal.team_id, principal.team_name}
        return not self.settings.keys or not names.isdisjoint(self.settings.keys)

    async def verdict(self, question: Question, num_texts: int) -> Verdict | None:
        """Return the verdict; None where there is none and the text goes on all the same.

        Raises UnavailableError where the request is to fail then. Whatever the hook raises ends
        nothing else.
        """
        begun_s = time.monotonic()
        outcome: Outcome = "failed"
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                found = await self.hook.ask(question)
            if found.verdict == "rewrite" and len(found.texts) != num_texts:
                raise HookError(f"{len(found.texts)} texts in the place of {num_texts}")
            outcome = found.verdict
            return found
        except Exception as error:
            failure = str(error) if isinstance(error, HookError) else type(error).__name__
            logger.warning("check failed check=%s reason=%s", self.name, failure)
            if self.settings.on_failure == "open":
                return None
            raise UnavailableError(
                f"The check {self.name!r} could not be made, without which this server does not "
                "answer. Try again in a moment."
            ) from error
        finally:
            seconds = time.monotonic() - begun_s
            self.metrics.count(self.name, self.settings.where, outcome, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """All checks of a gateway that ask hooks."""

    checks: Sequence[Check]
    find_names: FindNames | None = None

    async def of_request(
        self, body: bytes, principal: Principal, request_id: str, endpoint: str
    ) -> "RequestChecks | None":
        """Return the checks of a request; None where none is for it. Raises BadRequestError."""
        try:
            document = RequestJson(body).document
        except (ValueError, RecursionError):
            raise BadRequestError("The request body is not a JSON object.") from None
        checks = [each for each in self.checks if each.applies(principal)]
        answerers = Answerers()
        if self.find_names and any(each.settings.models for each in checks):
            named = _models(document)
            behind = await self.find_names(document, named, endpoint) if named else None
            answerers = Answerers(named=named, behind=behind)
            checks = [each for each in checks if answerers.are_among(each.settings.models)]
        if not checks:
            return None
        facts = {
            "request_id": request_id,
            "endpoint": endpoint,
            "model": document.get("model"),
            "key": principal.key_id,
            "team": principal.team_id,
        }
        return RequestChecks(document, checks, facts, answerers)

    async def close(self) -> None:
        """Close the hooks."""
        for check in self.checks:
            await check.hook.close()


class RequestChecks:
    """The checks of one request."""

    def __init__(
        self,
        document: dict[str, Any],
        checks: Sequence[Check],
        facts: Mapping[str, Any],
        answerers: Answerers,
    ) -> None:
        """`facts`: what hooks are told of the request beside its texts."""
        self.was_skipped = False
        """A text went on without a verdict: what comes of it is not kept."""
        self.of_answer = [check for check in checks if check.settings.where != "before"]
        self._document = document
        self._before = [check for check in checks if check.settings.where == "before"]
        self._facts = facts
        self._answerers = answerers
        self._tiers: set[str] = set()
        """Those that have answered."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those that may check the answer."""
        return tuple(check.name for check in self.of_answer)

    @property
    def due(self) -> Sequence[Check]:
        """Those that check the answer of the tiers that have written it so far."""
        among = self._answerers.are_among
        return [each for each in self.of_answer if among(each.settings.models, self._tiers)]

    async def request(self) -> bytes:
        """Return the request as it may go on. Raises BadRequestError where it may not."""
        if self._before:
            refuse_token_ids(self._document)
            texts = texts_of(self._document)
            try:
                asked = [{"path": text.path, "text": text.value, "before": ""} for text in texts]
                found = await self.judge(self._before, asked)
            except BlockedError as error:
                raise BadRequestError(str(error), code="content_filter") from None
            for text, new in zip(texts, found or (), strict=False):
                text.replace(new)
        return msgspec.json.encode(self._document)

    def answer(self, answer: CheckedParts, parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Return the parts of the answer as they may be sent."""
        if not self.of_answer:
            return parts
        from outrider.gateway.checks.answers import checked_stream, checked_whole

        check = checked_stream if answer.is_streamed else checked_whole
        return check(self, answer, self._noted(answer, parts))

    async def _noted(
        self, answer: CheckedParts, parts: AsyncGenerator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Yield the parts, and note first which tier each is from: another may go on."""
        async with aclosing(parts):
            async for part in parts:
                if answer.facts is not None:
                    self._tiers.add(answer.facts.tier)
                yield part

    async def judge(
        self, checks: Sequence[Check], asked: Sequence[Asked], *, is_last: bool = True
    ) -> Sequence[str] | None:
        """Have texts checked; return those to put in their places, None where they may stay.

        Raises BlockedError and UnavailableError.
        """
        found = None
        for check in checks if asked else ():
            question = {
                "check": check.name,
                "where": check.settings.where,
                **self._facts,
                "is_last": is_last,
                "texts": [{**each} for each in asked],  # a function may write to it
            }
            verdict = await check.verdict(question, len(asked))
            self.was_skipped |= verdict is None
            verdict = verdict or PASS
            if verdict.verdict == "block":
                reason = verdict.reason[:_MAX_REASON_CHARS]
                raise BlockedError(f"The check {check.name!r} blocks this. {reason}".strip())
            if verdict.verdict == "rewrite" and verdict.texts != [each["text"] for each in asked]:
                found = verdict.texts
                asked = [{**each, "text": text} for each, text in zip(asked, found, strict=True)]
        return found


def _models(document: Mapping[str, Any]) -> Set[str]:
    """Return the names of models that a request names, as Ollama's clients write them, too."""
    models = document.get("models")
    named = [document.get("model"), *(models if isinstance(models, list) else ())]
    names = {name for name in named if isinstance(name, str)}
    return names | {name.removesuffix(":latest") for name in names}
