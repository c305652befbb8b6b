"""Options of a chat's requests, which are flags of `outrider chat`."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from outrider.gateway.contract.schema.kinds import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of every request. None leaves the choice to the gateway."""

    model: Annotated[
        str, typer.Option(help="auto, small, large, an upstream tier or one of its models.")
    ] = "auto"
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer.")] = (
        None
    )
    speculation: Annotated[
        bool,
        typer.Option("--speculation/--no-speculation", help="Turn speculative decoding on or off."),
    ] = True
    policy: Annotated[
        Policy | None, typer.Option(help="Which tiers may answer: local models, upstream tiers.")
    ] = None
    is_private: Annotated[
        bool, typer.Option("--private", help="Keep the request on the gateway's machine.")
    ] = False
    deadline_ms: Annotated[
        float | None, typer.Option(min=1.0, help="Time limit for the whole answer.")
    ] = None

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if outrider := self._outrider():
            body["outrider"] = outrider
        return body

    def _outrider(self) -> dict[str, Any]:
        """Return the request's `outrider` object; empty if no option is set."""
        wanted = {
            "speculation": None if self.speculation else "off",
            "policy": self.policy,
            "privacy": "private" if self.is_private else None,
            "deadline_ms": self.deadline_ms,
        }
        return {name: value for name, value in wanted.items() if value is not None}
