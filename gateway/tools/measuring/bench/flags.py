"""Conversion of the flags of `outrider bench` into a plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from outrider.gateway.tools.commands.data_files import found_data
from outrider.gateway.tools.measuring.bench.arrivals import ArrivalKind, LengthDistribution
from outrider.gateway.tools.measuring.bench.client import TargetSettings
from outrider.gateway.tools.measuring.bench.fields import merge_fields, parse_fields
from outrider.gateway.tools.measuring.bench.options import BenchFlags
from outrider.gateway.tools.measuring.bench.plan import (
    DEFAULT_DURATION_S,
    BenchPlan,
    LoadSettings,
    PlanError,
)
from outrider.gateway.tools.measuring.bench.results import Objectives
from outrider.gateway.tools.measuring.bench.search import SearchSettings
from outrider.gateway.tools.measuring.bench.summary import BenchPrices
from outrider.gateway.tools.measuring.bench.workloads import WorkloadSettings

OWN_GATEWAY_URL: Final = "http://127.0.0.1:1"
"""Stands in a plan until its own gateway has a port."""

_OBJECTIVES: Final = ("ttft_ms", "inter_token_ms", "e2e_ms")
_DEFAULT_CONCURRENCY: Final = 4
_DEFAULT_MAX_TOKENS: Final = 128
_MOST_ARM_CHARS: Final = 40


def plan_of(flags: BenchFlags) -> BenchPlan:
    """Return the plan. Contacts no server. Raises PlanError, WorkloadError, FieldError."""
    objectives = Objectives() if flags.slo is None else parse_objectives(flags.slo)
    if flags.fail_below is not None and not objectives.are_any:
        raise PlanError("--fail-below needs objectives: give them with --slo")
    search = None
    if flags.search:
        search = SearchSettings(
            first_per_s=flags.rate or 1.0, target_attainment=flags.target_attainment
        )
    has_no_end = flags.duration is None and flags.num_requests is None
    plan = BenchPlan(
        target=TargetSettings(
            url=flags.url or OWN_GATEWAY_URL,
            key=flags.key,
            model=flags.model,
            is_stream=flags.stream,
            timeout_s=flags.timeout,
            stall_s=min(flags.stall, flags.timeout),
            headers=parse_headers(flags.header or ()),
        ),
        workload=_workload(flags),
        load=LoadSettings(
            rate_per_s=flags.rate,
            concurrency=flags.concurrency,
            duration_s=DEFAULT_DURATION_S if has_no_end else flags.duration,
            num_requests=flags.num_requests,
            warm_up_s=flags.warm_up,
            max_in_flight=flags.max_in_flight,
            drain_s=flags.timeout,
        ),
        objectives=objectives,
        request_fields=parse_fields(flags.assignments or ()),
        prices=None if flags.price is None else parse_prices(flags.price),
        search=search,
        seed=flags.seed,
        salt=flags.salt,
        commit=flags.commit,
    )
    return _with_loop(plan)


def _workload(flags: BenchFlags) -> WorkloadSettings:
    if sum(source is not None for source in (flags.prompts, flags.trace, flags.synthetic)) > 1:
        raise PlanError("--prompts, --trace and --synthetic are three workloads: choose one")
    settings = WorkloadSettings(
        categories=tuple(flags.category or ()),
        max_tokens=flags.max_tokens,
        context_tokens=flags.context,
        length_scale=flags.length_scale,
        keeps_lengths=flags.keep_lengths,
        max_gap_s=flags.max_gap,
        skips_bad=flags.skip_bad,
        num_users=flags.users,
        **_arrivals(flags.arrivals),
    )
    if flags.trace is not None:
        return replace(settings, kind="trace", path=found_data(flags.trace, "traces"))
    if flags.synthetic is not None:
        prompt, separator, answer = flags.synthetic.partition(",")
        if not separator:
            raise PlanError(f"--synthetic {flags.synthetic!r}: give PROMPT,ANSWER, as in 128,64")
        return replace(
            settings,
            kind="synthetic",
            prompt_lengths=LengthDistribution.parse(prompt),
            answer_lengths=LengthDistribution.parse(answer),
        )
    return replace(
        settings,
        path=None if flags.prompts is None else found_data(flags.prompts, "prompts"),
        max_tokens=settings.max_tokens or _DEFAULT_MAX_TOKENS,
    )


def _arrivals(text: str) -> dict[str, Any]:
    name, _, variation = text.partition(":")
    kinds: dict[str, ArrivalKind] = {
        "poisson": "poisson",
        "constant": "constant",
        "gamma": "gamma",
    }
    try:
        cv = float(variation or 2.0)
    except ValueError:
        cv = 0.0
    if name not in kinds or not 0.01 <= cv <= 100.0 or (variation and name != "gamma"):
        raise PlanError(f"--arrivals {text!r}: poisson, constant, or gamma:2")
    return {"arrivals": kinds[name], "burstiness_cv": cv}


def _with_loop(plan: BenchPlan) -> BenchPlan:
    """Default number of users, where neither flags nor a trace set the load."""
    load = plan.load
    is_told = load.rate_per_s is not None or load.concurrency is not None
    if is_told or plan.workload.kind == "trace" or plan.search is not None:
        return plan
    return replace(plan, load=replace(load, concurrency=_DEFAULT_CONCURRENCY))


def parse_sides(first: str, second: str, plan: BenchPlan) -> tuple[BenchPlan, BenchPlan]:
    """The two plans of `--ab`. A side is `FIELD=VALUE[,FIELD=VALUE]`, a URL, or `base` for the plan
    as it is. Raises PlanError and FieldError.
    """
    if plan.search is not None:
        raise PlanError("--ab compares at one load, and --search looks for many: choose one")
    if first == second:
        raise PlanError("--ab: both sides are the same")
    sides = _side(first, plan), _side(second, plan)
    if sides[0].arm == sides[1].arm:
        return replace(sides[0], arm="a"), replace(sides[1], arm="b")
    return sides


def _side(text: str, plan: BenchPlan) -> BenchPlan:
    """An arm is called as it was written, without what may be secret in a URL."""
    if text == "base":
        return replace(plan, arm=text)
    if "://" in text:
        target = replace(plan.target, url=text)
        return replace(plan, arm=target.shown_url[:_MOST_ARM_CHARS], target=target)
    fields = merge_fields(plan.request_fields, parse_fields(_split_fields(text)))
    return replace(plan, arm=text[:_MOST_ARM_CHARS], request_fields=fields)


def _split_fields(text: str) -> list[str]:
    """At commas, but not at those within JSON."""
    parts: list[str] = []
    for part in text.split(","):
        is_new = "=" in part and not part.lstrip().startswith(("{", "[", '"'))
        if parts and (not is_new or parts[-1].count("{") > parts[-1].count("}")):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


# ---- single flags -----------------------------------------------------------------------------


def parse_objectives(text: str) -> Objectives:
    """`ttft_ms=500,inter_token_ms=50`. Raises PlanError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "tpot_ms":
            name = "inter_token_ms"
        if name not in _OBJECTIVES or name in found:
            raise PlanError(f"--slo {part.strip()!r}: give {', '.join(_OBJECTIVES)} once each")
        try:
            found[name] = float(value)
        except ValueError:
            raise PlanError(f"--slo {name}: {value!r} is not a number of milliseconds") from None
        if not 0.0 < found[name] < float("inf"):
            raise PlanError(f"--slo {name}: {value} is not above 0 ms")
    return Objectives(**found)


def parse_prices(text: str) -> BenchPrices:
    """`0.15,0.60`: USD for a million tokens of prompts and of answers. Raises PlanError."""
    try:
        prompt, completion = (float(part) for part in text.split(","))
    except ValueError:
        prompt = completion = -1.0
    if not (0.0 <= prompt < float("inf") and 0.0 <= completion < float("inf")):
        raise PlanError(
            f"--price {text!r}: give two numbers, as in 0.15,0.60: USD for a million tokens of "
            "prompts and of answers"
        )
    return BenchPrices(prompt_usd=prompt, completion_usd=completion)


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """`NAME: VALUE`. Raises PlanError, which never shows the value."""
    headers = {}
    for text in texts:
        name, separator, value = text.partition(":")
        if not separator or not name.strip():
            raise PlanError("--header: write NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    return headers


def with_suffix(path: Path, suffix: str) -> Path:
    """`run.json` and `-a` to `run-a.json`."""
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")
