"""A request's reservation, its charge, and its rows in the ledger."""

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript, Toxic
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.router.dial import Setting
from outrider.router.guard import RouteGuard
from tests.gateway.hybrid import LOCAL_TEXT, TestPolicy
from tests.gateway.scripted_client import Script, Step
from tests.gateway.tenancy.metering.tenants import Open
from tests.gateway.watches import PlannedWatch

MANY = LimitSpec(tokens_per_minute=10_000)


def nanos(tier_prices: tuple[float, float], num_prompt: int, num_completion: int) -> int:
    """USD per million tokens are thousands of nano-dollars a token."""
    prompt, completion = tier_prices
    return int(1000 * (prompt * num_prompt + completion * num_completion))


SMALL, LARGE = (1.0, 2.0), (10.0, 30.0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_is_one_row_and_costs_what_its_usage_says(opened: Open, streams: bool) -> None:
    with opened(limits=MANY) as made:
        if streams:
            found = made.world.stream(stream_options={"include_usage": True})
            usage, headers = found.chunks[-1]["usage"], found.headers
        else:
            response = made.world.chat()
            usage, headers = response.json()["usage"], response.headers
        (row,) = made.rows(1)
        left = made.remaining_tokens()
    assert (row["kind"], row["outcome"], row["tier"]) == ("answer", "answered", "small")
    assert row["num_prompt_tokens"] == usage["prompt_tokens"]
    assert row["num_completion_tokens"] == usage["completion_tokens"]
    assert row["num_charged_tokens"] == usage["total_tokens"]
    assert row["num_discarded_tokens"] == 0
    charge = nanos(SMALL, usage["prompt_tokens"], usage["completion_tokens"])
    assert row["charge_nanos"] == row["cost_nanos"] == charge
    assert row["client_request_id"] == headers["x-request-id"]
    assert row["is_streamed"] is streams
    assert left == MANY.tokens_per_minute - usage["total_tokens"]


def test_choices_share_their_prompt(opened: Open) -> None:
    with opened(limits=MANY) as made:
        usage = made.world.chat(n=3, temperature=1).json()["usage"]
        (row,) = made.rows(1)
        left = made.remaining_tokens()
    assert row["num_prompt_tokens"] == usage["prompt_tokens"]
    assert row["num_completion_tokens"] == usage["completion_tokens"]
    assert left == MANY.tokens_per_minute - usage["total_tokens"]


def test_the_client_does_not_pay_for_retracted_tokens(opened: Open) -> None:
    """The small model's answer was ours to waste."""
    policy = TestPolicy(tier="small", watch=lambda: PlannedWatch("escalate", at=2))
    with opened(limits=MANY, policy=policy) as made:
        made.world.engine.script = lambda request: Script(
            steps=[Step(token_ids=(token,)) for token in made.world.encode("Weak words.")],
            escalated=Script(
                steps=[
                    Step(token_ids=(token,), num_drafted=4)
                    for token in made.world.encode("Strong.")
                ]
            ),
        )
        answer = made.world.stream(stream_options={"include_usage": True})
        small, large, draft = made.rows(3)
        left = made.remaining_tokens()
    usage = answer.chunks[-1]["usage"]
    assert answer.text == "Strong."
    assert (small["kind"], small["outcome"], small["charge_nanos"]) == ("answer", "escalated", 0)
    assert small["num_discarded_tokens"] == small["num_completion_tokens"] > 0
    assert small["cost_nanos"] > 0
    assert (large["kind"], large["outcome"]) == ("escalation", "answered")
    assert large["num_charged_tokens"] == usage["total_tokens"]
    assert large["charge_nanos"] == nanos(LARGE, usage["prompt_tokens"], usage["completion_tokens"])
    assert (draft["kind"], draft["charge_nanos"]) == ("draft", 0)
    assert draft["num_drafted_tokens"] == 4 * len(made.world.encode("Strong."))
    assert {row["request_id"] for row in (small, large, draft)} == {small["request_id"]}
    assert left == MANY.tokens_per_minute - usage["total_tokens"]


def test_a_failed_upstream_attempt_is_a_free_row(opened: Open) -> None:
    toxic = MockScript(toxic=Toxic(kind="status", status=500))
    with opened(limits=MANY, clouds=[toxic], tier={"price": {"completion": 50.0}}) as made:
        response = made.world.chat(outrider={"policy": "prefer_cloud"})
        assert response.json()["choices"][0]["message"]["content"] == LOCAL_TEXT
        local, cloud = sorted(made.rows(2), key=lambda row: row["tier"] == "cloud")
        left = made.remaining_tokens()
    assert (cloud["outcome"], cloud["charge_nanos"], cloud["num_charged_tokens"]) == (
        "failed",
        0,
        0,
    )
    assert (local["outcome"], local["is_degraded"]) == ("answered", True)
    assert local["num_charged_tokens"] == response.json()["usage"]["total_tokens"]
    assert left == MANY.tokens_per_minute - local["num_charged_tokens"]


def test_an_upstream_answer_costs_what_its_server_reports(opened: Open) -> None:
    price = {"prompt": 3.0, "completion": 15.0}
    with opened(limits=MANY, tier={"price": price}) as made:
        usage = made.world.chat(model="cloud").json()["usage"]
        (row,) = made.rows(1)
        left = made.remaining_tokens()
    assert (row["tier"], row["kind"], row["usage_source"]) == ("cloud", "answer", "reported")
    assert row["charge_nanos"] == nanos(
        (3.0, 15.0), usage["prompt_tokens"], usage["completion_tokens"]
    )
    assert left == MANY.tokens_per_minute - usage["total_tokens"]


def test_a_failure_of_ours_gives_all_back(opened: Open) -> None:
    limits = LimitSpec(tokens_per_minute=10_000, concurrent_requests=1, requests_per_minute=3)
    with opened(limits=limits) as made:
        made.world.says("Hello", failure=("step_failed", "The engine broke."))
        broken = made.world.stream()
        assert broken.error is not None
        (row,) = made.rows(1)
        made.world.says(LOCAL_TEXT)
        left = made.remaining_tokens()
        response = made.world.chat()
    assert (row["outcome"], row["failure"]) == ("failed", "step_failed")
    assert (row["num_completion_tokens"], row["charge_nanos"]) == (
        len(made.world.encode("Hello")),
        0,
    )
    assert left == 10_000
    assert response.headers["x-ratelimit-remaining-requests"] == "1"


def test_a_cancelled_answer_is_charged_for_its_tokens(opened: Open) -> None:
    limits = LimitSpec(tokens_per_minute=10_000, concurrent_requests=1)
    with opened(limits=limits) as made:
        made.world.says(LOCAL_TEXT, hangs=True)
        url, body = (
            f"{made.world.url}/v1/chat/completions",
            {
                "model": "small",
                "stream": True,
                "messages": [{"role": "user", "content": "Hi"}],
            },
        )
        with httpx.stream("POST", url, json=body, headers=made.world.http.headers) as stream:
            lines = stream.iter_lines()
            for _ in range(8):
                next(lines)
        (row,) = made.rows(1)
        made.world.says(LOCAL_TEXT)
        left = made.remaining_tokens()
    assert row["outcome"] == "cancelled"
    assert row["num_completion_tokens"] > 0
    assert row["num_charged_tokens"] == row["num_prompt_tokens"] + row["num_completion_tokens"]
    assert left == 10_000 - row["num_charged_tokens"]


@pytest.mark.slow_cases
@pytest.mark.parametrize("model", ["small", "cloud"])
@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_ends_where_the_limit_ends(opened: Open, model: str, streams: bool) -> None:
    """Nobody said how long it may be: it grows while it is written, never beyond the limit."""
    with opened(limits=LimitSpec(tokens_per_minute=120)) as made:
        made.world.engine.script = lambda _: Script(
            steps=[Step(token_ids=(65, 66, 67)) for _ in range(100)]
        )
        context = made.world.context.limits
        object.__setattr__(context, "default_max_tokens", None)
        made.world.cloud.script = MockScript(num_pieces=300)
        fields = {"stream_options": {"include_usage": True}} if streams else {}
        response = made.world.chat(model=model, stream=streams, **fields)
        assert response.status_code == 200, response.text
        (row,) = made.rows(1)
        refused = made.world.chat(max_tokens=1)
    assert row["num_charged_tokens"] <= 120
    if model == "cloud" and not streams:  # the server itself is told where to end
        told = made.world.cloud.requests[0].document["max_completion_tokens"]
        assert 16 <= told <= 120
        return
    if model == "small":
        assert refused.status_code == 429
        assert '"finish_reason":"length"' in response.text
        assert row["outcome"] == "limited"
        assert row["num_charged_tokens"] == 120  # to the token
    else:
        assert '"finish_reason":"length"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
def test_many_at_once_never_take_more_than_the_limit(opened: Open) -> None:
    import concurrent.futures

    with opened(limits=LimitSpec(tokens_per_minute=2_000)) as made:

        def ask(_: int) -> int:
            response = made.world.chat(max_tokens=20)
            assert response.status_code in (200, 429), response.text
            return response.json()["usage"]["total_tokens"] if response.status_code == 200 else 0

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            used = list(pool.map(ask, range(400)))
        made.until(lambda: not made.world.context.tenancy.settlements.is_busy)
        rows = made.rows(sum(1 for tokens in used if tokens))
    assert 0 < sum(used) <= 2_000
    assert sum(row["num_charged_tokens"] for row in rows) == sum(used)
    assert sum(used) > 1_900  # what was not used was given back, and used by others


def test_scopes_bound_the_models_and_the_tiers_of_a_key(opened: Open) -> None:
    scopes = Scopes(
        models=frozenset({"auto", "small"}), tiers=frozenset({"small"}), reveals="tiers"
    )
    policy = TestPolicy(tier="large")
    with opened(scopes=scopes, policy=policy) as made:
        denied = made.world.chat(model="large")
        answered = made.world.chat(model="auto")
        elsewhere = made.world.chat(outrider={"policy": "cloud_only"})
        by_tier = made.world.chat(outrider={"tier": "large"})
        listed = [card["id"] for card in made.world.http.get("/v1/models").json()["data"]]
        hidden = made.world.http.get("/v1/models/large")
        assert not made.world.cloud.requests
    assert denied.status_code == 403
    assert denied.json()["error"]["code"] == "model_not_allowed"
    assert answered.headers["x-outrider-tier"] == "small"
    assert (elsewhere.status_code, by_tier.status_code) == (403, 403)
    assert listed == ["auto", "small"]
    assert hidden.status_code == 403


@pytest.mark.slow
def test_every_endpoint_wants_a_key(opened: Open) -> None:
    with opened() as made:
        document = made.world.http.get("/openapi.json").json()
        paths = [*document["paths"], "/", "/metrics", "/openapi.json", "/v1/nothing"]
        with httpx.Client(base_url=made.world.url) as stranger:
            for path in paths:
                for method in ("GET", "POST"):
                    asked = path.replace("{model_id}", "small")
                    response = stranger.request(method, asked)
                    is_free = path in ("/health", "/ready", "/ping", "/.well-known/outrider-keys")
                    assert (response.status_code == 401) is not is_free, (method, path)
                    if not is_free and path != "/":
                        assert response.json()["error"], path
            wrong = stranger.get("/v1/models", headers={"authorization": f"Bearer {made.key}x"})
    assert wrong.status_code == 401
    assert wrong.json()["error"]["code"] == "invalid_api_key"


def test_endpoints_without_answers_count_as_requests(opened: Open) -> None:
    with opened(limits=LimitSpec(requests_per_minute=2)) as made:
        ask = {"model": "small", "prompt": "Hello there"}
        one = made.world.http.post("/v1/tokenize", json=ask)
        two = made.world.http.post(
            "/v1/route", json={"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
        )
        three = made.world.chat()
    assert (one.status_code, two.status_code, three.status_code) == (200, 200, 429)
    assert one.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(three.headers["retry-after"]) <= 61
    assert three.headers["x-should-retry"] == "true"


def test_a_request_above_a_limit_is_not_to_be_retried(opened: Open) -> None:
    with opened(limits=LimitSpec(tokens_per_minute=50)) as made:
        response = made.world.chat(max_tokens=100)
        left = made.remaining_tokens()
    assert response.status_code == 429
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "insufficient_quota"
    assert left == 50


@pytest.mark.slow_cases
@pytest.mark.parametrize("tier", ["small", "large"])
def test_auto_is_answered_by_a_tier_that_is_left(opened: Open, tier: str) -> None:
    """A limit of one tier is no limit of all."""
    limits = LimitSpec(models={"large": LimitSpec(requests_per_minute=1)})
    watch = lambda: PlannedWatch("commit")  # noqa: E731
    policy = TestPolicy(tier="large", watch=None)
    with opened(limits=limits, policy=policy) as made:
        first = made.world.chat()
        policy.tier, policy.watch = tier, watch  # it might be escalated to the large one
        second = made.world.chat()
        named = made.world.chat(model="large")
    assert first.headers["x-outrider-tier"] == "large"
    assert (second.status_code, second.headers["x-outrider-tier"]) == (200, "small")
    assert named.status_code == 429


def test_an_answer_counts_once_however_many_tiers_were_used_up(opened: Open) -> None:
    limits = LimitSpec(models={"large": LimitSpec(requests_per_minute=0)})
    guard = RouteGuard(current_setting=lambda: Setting(threshold=0.5))
    policy = TestPolicy(tier="large")
    with opened(limits=limits, policy=policy, guard=guard) as made:
        answered, refused = made.world.chat(), made.world.chat(model="large")
        decisions = made.world.decisions()
    assert (answered.status_code, refused.status_code) == (200, 429)
    assert answered.headers["x-outrider-tier"] == "small"
    assert list(decisions.values()) == [1.0], decisions
    assert guard.numbers().num_outcomes == 0, "the router's own tier did not answer"


def test_a_used_up_upstream_tier_leaves_the_local_models(opened: Open) -> None:
    limits = LimitSpec(models={"cloud": LimitSpec(requests_per_minute=1)})
    with opened(limits=limits) as made:
        answers = [made.world.chat(outrider={"policy": "prefer_cloud"}) for _ in range(2)]
        plain = made.world.chat()
        only = made.world.chat(outrider={"policy": "cloud_only"})
    tiers = [answer.headers["x-outrider-tier"] for answer in (*answers, plain)]
    assert tiers == ["cloud", "small", "small"]
    assert answers[1].headers["x-outrider-degraded"] == "true"
    assert only.status_code == 429
