"""The engine's exceptions, one tree: the gateway maps each to an HTTP status."""


def as_utf8(text: str) -> str:
    """Put `?` in place of half surrogates: a client can name them, but UTF-8 cannot say them."""
    return text.encode(errors="replace").decode()


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""

    code = "engine_error"


class PromptTooLongError(EngineError):
    """Prompt and answer do not fit into the model's context or into its KV cache."""

    code = "context_length_exceeded"

    def __init__(self, *, num_tokens: int, max_tokens: int, max_context: int) -> None:
        # A client that named no max_tokens asked for one at least, and cannot lower it.
        answer = "an answer needs one" if max_tokens == 1 else f"max_tokens is {max_tokens}"
        cure = " or lower max_tokens" if max_tokens > 1 else ""
        super().__init__(
            # Clients know by these words that a shorter conversation would be answered.
            f"This model's maximum context length is {max_context} tokens, but the prompt has "
            f"{num_tokens} and {answer} ({num_tokens + max_tokens} together). Shorten the prompt"
            f"{cure}."
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.max_context = max_context


class PinTooLargeError(EngineError):
    """A prompt that is to be kept does not fit beside those that are kept already."""

    code = "pin_too_large"
    param = "messages"

    def __init__(self, *, tier: str, num_tokens: int, most_tokens: int, num_left: int) -> None:
        cure = (
            "Shorten it, or delete another named prompt."
            if num_tokens <= most_tokens
            else "Shorten it, or give the cache more room (engine.kv_cache_gib) or requests less "
            "(engine.max_context)."
        )
        super().__init__(
            f"The {tier} model's cache keeps at most {most_tokens} tokens of named prompts: a "
            f"quarter of it, and never what its longest request needs. {num_left} of them are "
            f"left, and this prompt has {num_tokens}. {cure}"
        )


class QueueFullError(EngineError):
    """Too many requests wait already."""

    code = "queue_full"

    def __init__(self, *, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_waiting} requests are waiting already; try again in {retry_after_s:.0f} s."
        )
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s


class InfeasibleObjectiveError(EngineError):
    """The first token cannot come in the time that the request asks for.

    `predicted_wait_s`: until it would come. `retry_after_s`: when a request like this one would be
    taken in, if no other request came meanwhile; None where no waiting helps, because even an
    engine without other work takes longer.
    """

    code = "infeasible_objective"

    def __init__(
        self, *, ttft_s: float, predicted_wait_s: float, retry_after_s: float | None
    ) -> None:
        advice = (
            "That is the prompt's own time: shorten it, or allow more."
            if retry_after_s is None
            else f"Try again in {retry_after_s:.1f} s, or allow more."
        )
        super().__init__(
            f"The first token is wanted within {ttft_s * 1000:.0f} ms of arrival, but would come "
            f"in about {predicted_wait_s * 1000:.0f} ms. {advice}"
        )
        self.ttft_s = ttft_s
        self.predicted_wait_s = predicted_wait_s
        self.retry_after_s = retry_after_s


class TierUnavailableError(EngineError):
    """The request names a tier that this engine has not loaded."""

    code = "tier_unavailable"


class InvalidRequestError(EngineError):
    """The request contradicts itself: empty prompt, token ids outside the vocabulary, id in use."""

    code = "invalid_request"


class UnsupportedModelError(EngineError):
    """The checkpoint's architecture or format is not one that the engine can run."""

    code = "unsupported_model"


class InvalidAdapterError(EngineError):
    """An adapter's files cannot be used: missing, broken, of another base, or of another kind."""

    code = "invalid_adapter"


class NotFiniteError(EngineError):
    """A model computed NaN or infinity where a token's score should be."""

    code = "not_finite"


class EngineDiedError(EngineError):
    """The engine's process ended while requests were in flight."""

    code = "engine_died"


class EngineNotStartedError(EngineError):
    """No engine runs, and none has started in the time that a request may wait for one."""

    code = "engine_not_started"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RankLostError(EngineError):
    """One of the processes that share a model ended, or an exchange between them failed."""

    code = "engine_died"


class CrashSuspectError(EngineError):
    """The engine ended twice while this request was in flight, so it is not tried again for now.

    `retry_after_s`: until it would be taken again.
    """

    code = "engine_died_twice"
    should_retry = False

    def __init__(self, *, retry_after_s: float) -> None:
        super().__init__(
            "The engine stopped twice while a request with this prompt was in flight. This "
            "request may be the cause, or was only there both times; it is refused for "
            f"{retry_after_s:.0f} s. Change the request, or send it later."
        )
        self.retry_after_s = retry_after_s


class InvalidGrammarError(ValueError):
    """The grammar cannot be enforced; the message is for the client."""

    code = "invalid_grammar"
