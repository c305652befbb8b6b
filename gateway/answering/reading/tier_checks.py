"""Checks what an upstream tier may be sent, and the most that it may cost."""

from dataclasses import dataclass

from outrider.gateway.answering.reading.documents import num_answers, speaks_in_ids
from outrider.gateway.answering.reading.parsed_request import ParsedRequest, UpstreamQuery
from outrider.gateway.answering.reading.required_capabilities import uses_of
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.errors.tree import BadRequestError, GatewayError
from outrider.gateway.upstream.bounds import most_predicted_tokens, most_prompt_tokens
from outrider.gateway.upstream.tier import UpstreamTier
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import cost_usd as usage_cost_usd
from outrider.router.costs import TypicalRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TierChecks:
    """Checks requests against their upstream tiers."""

    upstream: UpstreamParts
    default_max_tokens: int | None
    """Tokens of an answer whose request sets no bound."""
    typical: TypicalRequest
    """The usual lengths."""

    def tier(self, query: UpstreamQuery) -> UpstreamTier:
        """Return the upstream tier that is asked."""
        return self.upstream.tiers[query.tier]

    def complaint(self, parsed: ParsedRequest, query: UpstreamQuery) -> GatewayError | None:
        """Return why the upstream tier cannot be sent this request; None where it can."""
        if query.resolved.tier is None and speaks_in_ids(parsed.document, parsed.endpoint):
            return BadRequestError(
                "Token ids mean something for the models of this machine only; name a model."
            )
        tier = self.tier(query)
        missing = uses_of(parsed.document, parsed.endpoint) - set(tier.settings.supports)
        if missing:
            return BadRequestError(
                f"The {tier.name} tier does not take {min(missing)} (tiers.{tier.name}.supports)."
            )
        try:
            tier.fields.outgoing(parsed.document)
        except BadRequestError as refused:
            return refused
        most = parsed.options.max_cost_usd
        return None if most is None else self._too_dear(parsed, query, most)

    def _too_dear(
        self, parsed: ParsedRequest, query: UpstreamQuery, most: float
    ) -> BadRequestError | None:
        tier, param = self.tier(query), "outrider.max_cost_usd"
        cost_usd = self.cost_usd(parsed, query)
        if cost_usd is None and (tier.settings.local or tier.settings.has_price):
            return None  # this device's own work has no price; prices of 0 were set
        if cost_usd is None:
            return BadRequestError(
                f"{param}: the price of the {tier.name} tier is unknown; the operator can set "
                f"tiers.{tier.name}.price.",
                param=param,
            )
        if cost_usd <= most:
            return None
        bound = f"more than {most:.3g} USD"
        if parsed.context.principal.scopes.shown() == "costs":
            bound = f"{cost_usd:.3g} USD on the {tier.name} tier, not {most:.3g}"
        return BadRequestError(
            f"{param}: the request may cost {bound}; a smaller max_tokens costs less.", param=param
        )

    def cost_usd(self, parsed: ParsedRequest, query: UpstreamQuery) -> float | None:
        """The most that the request may cost at an upstream tier; None where no price is set.

        The prompt is bounded by its size. Without `max_tokens` an answer of usual length counts.
        """
        return self._cost_of(
            parsed,
            query,
            parsed.most_tokens(
                self.default_max_tokens or round(self.typical.num_completion_tokens.value)
            ),
        )

    def _cost_of(
        self, parsed: ParsedRequest, query: UpstreamQuery, per_answer: int
    ) -> float | None:
        """The most that the request costs if each answer has this many tokens."""
        most = UpstreamUsage(
            num_prompt_tokens=self.num_prompt_tokens(parsed, query),
            num_completion_tokens=num_answers(parsed)
            * (per_answer + most_predicted_tokens(parsed.document)),
        )
        return usage_cost_usd(most, self.tier(query).settings.price)

    def num_prompt_tokens(self, parsed: ParsedRequest, query: UpstreamQuery) -> int:
        """The most tokens that the prompt can have, by the size of all that is sent."""
        return most_prompt_tokens(parsed.document, self.tier(query).settings.media_tokens)

    def affordable(self, parsed: ParsedRequest, query: UpstreamQuery) -> int | None:
        """The tokens that `max_cost_usd` leaves each answer; None where it sets no bound."""
        most = parsed.options.max_cost_usd
        if most is None or parsed.token_limit is not None:
            return None
        price = self.tier(query).settings.price.at(self.num_prompt_tokens(parsed, query))
        if not price.completion:
            return None
        left_usd = most - (self._cost_of(parsed, query, 0) or 0.0)
        return max(int(left_usd * 1e6 / (price.completion * num_answers(parsed))), 1)
