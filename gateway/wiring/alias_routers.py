"""Joins the routers of aliases with what is measured of their models."""

from functools import partial

from outrider.gateway.answering.candidates.alias_router import AliasRouter
from outrider.gateway.answering.reading.local_load import LocalLoad
from outrider.gateway.wiring.gateway_parts import GatewayParts


def alias_routers(parts: GatewayParts, load: LocalLoad) -> dict[str, AliasRouter]:
    """Return each alias's router. `load`: the engine's."""
    return {
        name: AliasRouter(
            policy=policy,
            prefer=parts.routing.prefer,
            first_token_s=partial(_first_tokens, parts, load, policy.ladder.names),
        )
        for name, policy in parts.alias_policies.items()
    }


def _first_tokens(
    parts: GatewayParts, load: LocalLoad, models: tuple[str, ...]
) -> dict[str, float]:
    """Return when each model is expected to begin, in seconds, where that was measured."""
    expected = {model: _first_token_s(parts, load, model) for model in models}
    return {model: seconds for model, seconds in expected.items() if seconds}


def _first_token_s(parts: GatewayParts, load: LocalLoad, model: str) -> float | None:
    tier = parts.upstream.tiers.get(model.partition("/")[0])
    if tier is None:
        return load.expected(1).first_token_s
    return tier.first_token.quantile(0.5) or tier.first_token.ewma_s
