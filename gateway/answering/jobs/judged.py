"""An answer that is judged, not written: it stands behind the prompt, under its hypotheses."""

import msgspec

from outrider.engine.request import Verification
from outrider.gateway.answering.jobs.engine_requests import (
    Rendered,
    cascade_params,
    check_token_ids,
)
from outrider.gateway.answering.reading.parsed_request import ApiRequest
from outrider.gateway.answering.text.chat import Prompt
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.common import HypothesisOptions, JudgeOptions
from outrider.verifier.params import Hypothesis, SamplingParams

_PARAM = "outrider.judge"


def judge_options(request: ApiRequest) -> JudgeOptions | None:
    """Return the answer that a request has judged; None where it has one written."""
    return None if request.outrider is None else request.outrider.judge


def with_judged(request: ApiRequest, rendered: Rendered) -> Rendered:
    """Return the prompt with the answer that is to be judged, where there is one.

    Raises BadRequestError for a request that asks for more than a judgement.
    """
    asked = judge_options(request)
    if asked is None:
        return rendered
    if request.outrider is not None and cascade_params(request.outrider.quality) is not None:
        raise BadRequestError(
            f"outrider.quality: with {_PARAM} the hypotheses have a quality.",
            param="outrider.quality",
        )
    if request.token_limit != 0:
        raise BadRequestError(
            f"max_tokens: must be 0 with {_PARAM}: the answer is there.", param="max_tokens"
        )
    if len(rendered.prompts) * (request.n or 1) > 1 or request.prompt_logprobs is not None:
        raise BadRequestError(
            f"{_PARAM}: one answer to one prompt is judged, without prompt_logprobs.", param=_PARAM
        )
    check_token_ids(asked.token_ids, rendered.info, param=f"{_PARAM}.token_ids")
    (prompt,) = rendered.prompts
    if not prompt.token_ids:
        raise BadRequestError("The prompt is empty.")
    whole = Prompt(
        token_ids=(*prompt.token_ids, *asked.token_ids), opens_thinking=prompt.opens_thinking
    )
    verification = Verification(
        num_tokens=len(asked.token_ids),
        hypotheses=tuple(_hypothesis(each, rendered, asked) for each in asked.hypotheses),
    )
    return msgspec.structs.replace(rendered, prompts=(whole,), verification=verification)


def _hypothesis(own: HypothesisOptions, rendered: Rendered, asked: JudgeOptions) -> Hypothesis:
    biases = own.logit_bias or {}
    sampling = SamplingParams(
        max_tokens=max(len(asked.token_ids), own.min_tokens),
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        min_p=own.min_p,
        seed=own.seed,
        choice_index=own.choice,
        stop_token_ids=tuple(own.stop_token_ids or ()),
        presence_penalty=own.presence_penalty,
        frequency_penalty=own.frequency_penalty,
        repetition_penalty=own.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in biases.items()),
        min_tokens=own.min_tokens,
        thinking=rendered.thinking,
    )
    return Hypothesis(
        sampling=sampling,
        noise_tier=own.tier or rendered.info.tier,
        cascade=cascade_params(own.quality),
    )
