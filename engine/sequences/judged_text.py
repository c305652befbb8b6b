"""The part of a verification that knows requests: which text is judged, behind which prompt."""

from outrider.engine.request import EngineRequest
from outrider.verifier.text_judge import TextJudge


def judge_of(request: EngineRequest, *, vocab_size: int) -> TextJudge | None:
    """Return what judges the prompt's end; None where nothing is to be judged."""
    if (asked := request.verification) is None:
        return None
    return TextJudge(
        asked.hypotheses,
        request.prompt_token_ids[: -asked.num_tokens],
        request_id=request.request_id,
        vocab_size=vocab_size,
    )
