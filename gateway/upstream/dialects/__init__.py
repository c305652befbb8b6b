"""Wire formats of requests and answers, for each kind of server."""

from outrider.gateway.settings.server_traits import DialectName
from outrider.gateway.upstream.dialects.anthropic import AnthropicDialect
from outrider.gateway.upstream.dialects.base import Dialect
from outrider.gateway.upstream.dialects.openai import OpenAIDialect


def dialect_for(name: DialectName, tier: str) -> Dialect:
    """Return the dialect of that name, for the tier that errors name."""
    return AnthropicDialect(tier) if name == "anthropic" else OpenAIDialect(tier)
