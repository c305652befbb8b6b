"""A look at the target before the run: is it there, what is its model, how does it count tokens."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from outrider.gateway.tools.measuring.bench.answer import RawAnswer, make_row
from outrider.gateway.tools.measuring.bench.client import BenchClient, TargetError
from outrider.gateway.tools.measuring.bench.fields import merge_fields
from outrider.gateway.tools.measuring.bench.filler import Filler, TokenRatio
from outrider.gateway.tools.measuring.bench.results import RequestRow
from outrider.gateway.tools.measuring.bench.summary import BenchPrices
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest, TargetFacts

_PROBE_WORDS: Final = (16, 96)
_PROBE_TOKENS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReport:
    """Result of probing the target.

    `facts`: for the workload. `notes`: caveats for readers of the result.
    """

    model: str
    facts: TargetFacts
    prices: BenchPrices | None
    context_tokens: int | None
    served_by: str | None
    device: str | None
    notes: tuple[str, ...] = field(default=())


async def inspect_target(
    client: BenchClient,
    request_fields: Mapping[str, Any],
    *,
    salt: str,
    needs_lengths: bool,
    needs_seeds: bool = False,
) -> TargetReport:
    """Ask for the models, then twice for a few tokens.

    `needs_lengths`: the workload tells lengths in tokens, so their ratio to words is measured.
    `needs_seeds`: requests are to have seeds of their own, where the target takes them.
    Raises TargetError where no answer comes: there would be nothing to measure.
    """
    card = await _card(client)
    notes: list[str] = []
    body = merge_fields(_common(client, card.model), request_fields)
    # `ignore_eos` fixes an answer's length.
    takes_ignore_eos = needs_lengths and await _takes(client, body, "ignore_eos", True, salt)
    wants_seeds = needs_seeds and "seed" not in body and body.get("temperature") != 0
    if wants_seeds and not await _takes(client, body, "seed", 1, salt):
        wants_seeds = False
        notes.append("the target does not take seeds: the sides' answers were sampled separately")
    first = await _probe(client, body, _PROBE_WORDS[0], salt)
    if first.token_source == "chunks":
        notes.append(
            "the target sends no usage: tokens are events with text, which may hold several"
            if client.target.is_stream
            else "the target sends no usage: tokens are not known"
        )
    ratio = TokenRatio()
    if needs_lengths:
        ratio = await _ratio(client, body, first, salt)
        if not ratio.is_measured:
            notes.append(
                f"the target does not count prompt tokens: taken for {ratio.per_word:g} a word"
            )
    return TargetReport(
        model=card.model,
        facts=TargetFacts(
            body=body,
            ratio=ratio,
            context_tokens=card.context_tokens,
            takes_ignore_eos=takes_ignore_eos,
            wants_seeds=wants_seeds,
        ),
        prices=card.prices,
        context_tokens=card.context_tokens,
        served_by=card.owned_by,
        device=card.device,
        notes=(*card.notes, *notes),
    )


def _common(client: BenchClient, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": client.target.is_stream}
    if client.target.is_stream:
        body["stream_options"] = {"include_usage": True}
    return body


# ---- the list of models -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    model: str
    context_tokens: int | None = None
    prices: BenchPrices | None = None
    owned_by: str | None = None
    device: str | None = None
    notes: tuple[str, ...] = ()


async def _card(client: BenchClient) -> _Card:
    """The model to ask. Raises TargetError where none is named and none can be found."""
    wanted = client.target.model
    status, data = await client.get("/models")
    if status in (401, 403):
        raise TargetError(
            f"{client.target.shown_url} does not accept the key ({status}); give one with --key or "
            "OUTRIDER_API_KEY"
        )
    cards = _cards(data) if status == 200 else []
    if not cards:
        if wanted is None:
            raise TargetError(
                f"{client.target.shown_url} lists no models (status {status}); name one with "
                "--model, and check that the URL is that of an OpenAI-compatible server"
            )
        return _Card(model=wanted, notes=("the target does not list its models",))
    names = [card["id"] for card in cards]
    model = wanted or ("auto" if "auto" in names else names[0])
    found = next((card for card in cards if card["id"] == model), None)
    if found is None:
        return _Card(model=model, notes=(f"the target does not list {model}",))
    return _Card(
        model=model,
        context_tokens=_context(found),
        prices=_prices(found.get("pricing")),
        owned_by=str(found["owned_by"]) if found.get("owned_by") else None,
        device=_device(found.get("outrider")),
    )


def _device(tiers: Any) -> str | None:
    """Return the devices of an Outrider's models; None for other servers."""
    if not isinstance(tiers, list):
        return None
    shown = [
        f"{tier['tier']}: {tier.get('device')}, {tier.get('dtype')}"
        for tier in tiers
        if isinstance(tier, dict) and tier.get("tier") and tier.get("device")
    ]
    return "; ".join(shown) or None


def _cards(data: bytes) -> list[dict[str, Any]]:
    try:
        document = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return []
    listed = document.get("data") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        return []
    return [c for c in listed if isinstance(c, dict) and isinstance(c.get("id"), str)]


def _context(card: Mapping[str, Any]) -> int | None:
    """Ours and OpenRouter's, vLLM's, llama.cpp's."""
    meta = card.get("meta")
    values = [card.get("max_context"), card.get("context_length"), card.get("max_model_len")]
    values += [meta.get("n_ctx_train")] if isinstance(meta, dict) else []
    return next((v for v in values if isinstance(v, int) and v > 0), None)


def _prices(pricing: Any) -> BenchPrices | None:
    """USD for a token, as texts."""
    if not isinstance(pricing, dict):
        return None
    try:
        cached = pricing.get("input_cache_read")
        return BenchPrices(
            prompt_usd=1e6 * float(pricing["prompt"]),
            completion_usd=1e6 * float(pricing["completion"]),
            cached_prompt_usd=None if cached is None else 1e6 * float(cached),
            source="server",
        )
    except (KeyError, TypeError, ValueError):
        return None


# ---- probes -----------------------------------------------------------------------------------


async def _takes(
    client: BenchClient, body: Mapping[str, Any], name: str, value: int, salt: str
) -> bool:
    """Return whether the target accepts a field that not every server knows."""
    raw = await _ask(client, {**body, name: value}, _PROBE_WORDS[0], f"{salt}/{name}")
    return raw.error is None


async def _probe(
    client: BenchClient, body: Mapping[str, Any], num_words: int, salt: str
) -> RequestRow:
    """A small answer. Raises TargetError where none comes, with the target's own words."""
    for attempt in range(2):
        raw = await _ask(client, body, num_words, f"{salt}/{attempt}")
        row = make_row(
            raw,
            index=0,
            scheduled_s=raw.sent_s or 0.0,
            planned=PlannedRequest(at_s=0.0, body=b""),
            is_stream=client.target.is_stream,
        )
        if row.error in (None, "empty"):
            return row
        if row.error == "rate_limited" and attempt == 0:
            await asyncio.sleep(1.0)
            continue
        break
    raise TargetError(f"{client.target.shown_url} gave no answer: {row.error}, {row.message}")


async def _ask(
    client: BenchClient, body: Mapping[str, Any], num_words: int, salt: str
) -> RawAnswer:
    text = " ".join(Filler(0).words(f"{salt}/probe", num_words))
    fields = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": _PROBE_TOKENS,
    }
    return await client.ask(msgspec.json.encode({**fields, **body, "max_tokens": _PROBE_TOKENS}))


async def _ratio(
    client: BenchClient, body: Mapping[str, Any], first: RequestRow, salt: str
) -> TokenRatio:
    """A line through two prompts: tokens of the frame, and of a word."""
    default = TokenRatio()
    if first.num_prompt_tokens is None:
        return default
    second = await _probe(client, body, _PROBE_WORDS[1], f"{salt}/long")
    if second.num_prompt_tokens is None:
        return default
    per_word = (second.num_prompt_tokens - first.num_prompt_tokens) / (
        _PROBE_WORDS[1] - _PROBE_WORDS[0]
    )
    if not 0.2 <= per_word <= 20.0:
        return default
    num_fixed = max(0.0, first.num_prompt_tokens - per_word * _PROBE_WORDS[0])
    return TokenRatio(per_word=per_word, num_fixed=num_fixed, is_measured=True)
