"""Ways around limits, budgets and the books; none leads there. Over real sockets."""

import concurrent.futures
import json
import threading
from contextlib import suppress
from typing import Any, get_args

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.shared.mock_upstream import MockScript, Toxic
from outrider.gateway.cli import app as cli
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD, LimitName, LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from tests.gateway.hybrid import CHAT, LOCAL_TEXT, TestPolicy
from tests.gateway.scripted_client import Script, Step
from tests.gateway.tenancy.metering.tenants import Open

ADMIN = Scopes(is_admin=True)
HELLO = CHAT["messages"]


def charged(rows: list[dict[str, Any]]) -> int:
    return sum(row["num_charged_tokens"] for row in rows)


# ---- numbers ------------------------------------------------------------------------------------

NO_COUNTS = ("-1", "1.5", "NaN", "Infinity", "-Infinity", "1e999", '"10"', "true", "[]", "{}",
             "9007199254740993", "1e300", "-0.5", '""')  # fmt: skip
NO_MONEY = ("-1", "-1e-9", "NaN", "Infinity", "1e999", "1e10", '"1"', "true", "[]")
NO_WEIGHTS = ("0", "-1", "NaN", "1e9", '"2"', "null", "true")


@pytest.mark.slow
def test_no_limit_is_a_number_that_is_none(opened: Open) -> None:
    with opened(scopes=ADMIN) as made:
        http = made.world.http
        json_type = {"content-type": "application/json"}

        def create(fields: str) -> httpx.Response:
            body = f'{{"name": "x", {fields}}}'
            return http.post("/admin/keys", content=body.encode(), headers=json_type)

        counts = [name for name in get_args(LimitName) if "usd" not in name]
        bad = [f'"limits": {{"{name}": {value}}}' for name in counts for value in NO_COUNTS]
        bad += [f'"limits": {{"usd_per_day": {value}}}' for value in NO_MONEY]
        bad += [f'"limits": {{"models": {{"large": {{"{counts[0]}": {v}}}}}}}' for v in NO_COUNTS]
        bad += [f'"weight": {value}' for value in NO_WEIGHTS]
        bad += ['"limits": {"tokens_per_hour": 1}', '"limits": {"models": {"": {}}}']
        of_tier = '"limits": {"models": {"%s": {"tokens_per_day": 9}}}'
        bad += [of_tier % "lagre"]
        for fields in bad:
            response = create(fields)
            assert response.status_code == 400, (fields, response.text)
        assert len(http.get("/admin/keys").json()["data"]) == 1
        assert create(of_tier % "cloud").status_code == 200
        good = create('"limits": {"tokens_per_minute": 9007199254740992, "usd_per_day": 1e9}')
        assert good.status_code == 200
        key = {"authorization": f"Bearer {good.json()['key']}"}
        assert made.world.chat(headers=key).status_code == 200
        nothing = create('"limits": {"requests_per_minute": 0}').json()["key"]
        refused = made.world.chat(headers={"authorization": f"Bearer {nothing}"})
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")


@pytest.mark.slow_cases
@pytest.mark.parametrize("flag", ["--usd-per-day", "--tokens-per-minute", "--weight"])
def test_nor_from_the_command_line(flag: str, tmp_path: Any) -> None:
    for value in ("nan", "inf", "-1", "1e300"):
        create = ["keys", "create", "--name", "x", flag, value]
        told = CliRunner().invoke(cli, [*create, "--database-url", f"sqlite:///{tmp_path}/x.db"])
        assert told.exit_code != 0, (flag, value)
        assert "or-" not in told.stdout


# ---- tokens -------------------------------------------------------------------------------------

LIMIT = 100
GREEDY = (
    ("/v1/chat/completions", {"messages": HELLO, "n": 5, "max_tokens": 20}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "max_completion_tokens": 200}),
    ("/v1/chat/completions", {"messages": HELLO, "n": 5.0, "max_tokens": 20.0}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 200, "stream": True}),
    ("/v1/completions", {"prompt": ["Hello"] * 5, "max_tokens": 20}),
    ("/v1/completions", {"prompt": [[65] * 40, [66] * 40], "max_tokens": 20}),
    ("/v1/completions", {"prompt": [65] * 90, "max_tokens": 20}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 20, "n": 6}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 120}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 120}),
)
ELSEWHERE = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 20, "best_of": 20}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 20, "best_of": 20.0}),
    ("/v1/completions", {"prompt": ["a"] * 20, "max_tokens": 20}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "n": 20}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2**31 - 1}),
)


def test_requests_above_the_limit_do_not_begin(opened: Open) -> None:
    with opened(limits=LimitSpec(tokens_per_minute=LIMIT)) as made:
        for model, asks in (("small", GREEDY), ("auto", GREEDY), ("cloud", ELSEWHERE)):
            for path, body in asks:
                response = made.world.http.post(path, json={"model": model, **body})
                assert response.status_code == 429, (model, path, body, response.text)
                assert response.headers["x-should-retry"] == "false"
        for odd in ('"20"', "true", "-1", "1e3.5", "[20]", '{"a": 1}', "20.5"):
            body = f'{{"model": "cloud", "prompt": "a", "max_tokens": 2, "best_of": {odd}}}'
            headers = {"content-type": "application/json"}
            response = made.world.http.post("/v1/completions", content=body, headers=headers)
            assert response.status_code == 400, (odd, response.text)
        for limit in (-2, 2**31, 1e300, "9", 1.5):
            assert made.world.chat(model="small", max_tokens=limit).status_code == 400, limit
        assert not made.world.engine.submitted
        assert not made.world.cloud.requests
        assert made.remaining_tokens() == LIMIT
        made.rows(1)


def test_a_prompt_that_is_only_scored_pays_for_itself(opened: Open) -> None:
    body = {"model": "small", "prompt": [65] * 40, "max_tokens": 0, "echo": True, "logprobs": 1}
    with opened(limits=LimitSpec(tokens_per_minute=LIMIT)) as made:
        made.world.engine.script = lambda _: Script(finish_reason="length")
        for used, status in ((40, 200), (80, 200), (80, 429)):
            response = made.world.http.post("/v1/completions", json=body)
            assert (response.status_code, made.used("tokens_per_minute")) == (status, used)


@pytest.mark.slow
def test_however_one_asks_no_more_than_the_limit_is_taken(opened: Open) -> None:
    """All ways at once, whole and streamed, until nothing is left."""
    limit = 600
    asks = [
        (path, {**body, name: 5, "stream": streams} | ({"n": 2} if "n" in body else {}))
        for path, body, name in (
            ("/v1/chat/completions", {"messages": HELLO, "n": 1}, "max_tokens"),
            ("/v1/completions", {"prompt": ["Hi", "Hello"]}, "max_tokens"),
            ("/v1/responses", {"input": "Hello"}, "max_output_tokens"),
            ("/v1/messages", {"messages": HELLO}, "max_tokens"),
        )
        for streams in (False, True)
    ]
    with opened(limits=LimitSpec(tokens_per_minute=limit)) as made:

        def ask(number: int) -> int:
            path, body = asks[number % len(asks)]
            model = ("small", "large", "auto", "cloud")[number % 4]
            response = made.world.http.post(path, json={"model": model, **body})
            assert response.status_code in (200, 429), response.text
            return response.status_code

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(ask, range(96)))
        made.settle()
        rows = made.rows(statuses.count(200))
    assert statuses.count(429) > 0
    assert 0.7 * limit < charged(rows) <= limit


@pytest.mark.slow
def test_a_client_that_leaves_repeatedly_pays_each_time(opened: Open) -> None:
    """The prompt is read and tokens are written before its client is missed: those are charged."""
    limits = LimitSpec(tokens_per_minute=10_000, concurrent_requests=2, requests_per_minute=100)
    with opened(limits=limits) as made:
        url = made.world.url
        made.world.says(LOCAL_TEXT, hangs=True)
        asks = [
            ("/v1/chat/completions", {"messages": HELLO, "n": 2}),
            ("/v1/completions", {"prompt": ["Hello there", "Hello"]}),
            ("/v1/responses", {"input": "Hello there"}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 30}),
        ]
        num_left = 0
        for path, body in asks:
            for num_lines in (0, 1, 3):
                asked = {"model": "small", "stream": True, **body}
                headers = made.world.http.headers
                with httpx.stream("POST", url + path, json=asked, headers=headers) as stream:
                    assert stream.status_code == 200
                    lines = stream.iter_lines()
                    for _ in range(num_lines):
                        next(lines)
                num_left += 1
                made.settle()
            with suppress(httpx.ReadTimeout):
                asked = {"model": "small", **body}
                httpx.post(url + path, json=asked, headers=headers, timeout=0.1)
            num_left += 1
            made.settle()
        rows = made.rows(num_left)
        made.world.says(LOCAL_TEXT)
        left = made.remaining_tokens()
        requests_left = int(made.world.chat().headers["x-ratelimit-remaining-requests"])
    assert {row["outcome"] for row in rows} == {"cancelled"}
    for row in rows:
        assert row["num_charged_tokens"] == row["num_prompt_tokens"] + row["num_completion_tokens"]
        assert row["num_prompt_tokens"] > 0
    assert left == 10_000 - charged(rows)
    assert requests_left == 100 - num_left - 2


@pytest.mark.slow
def test_many_cancelled_requests_leave_nothing_behind(opened: Open) -> None:
    limits = LimitSpec(tokens_per_minute=10_000, concurrent_requests=3)
    with opened(limits=limits) as made:
        made.world.says(LOCAL_TEXT, gap_s=0.002)
        most, lock = 0, threading.Lock()

        def leave(number: int) -> int:
            nonlocal most
            body = {"model": "small", "messages": HELLO, "stream": True, "max_tokens": 30}
            headers = made.world.http.headers
            url = f"{made.world.url}/v1/chat/completions"
            with httpx.stream("POST", url, json=body, headers=headers) as stream:
                if stream.status_code == 200:
                    with lock:
                        most = max(most, len(made.world.engine.running))
                    lines = stream.iter_lines()
                    for _ in range(number % 4):
                        next(lines)
                return stream.status_code

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            statuses = list(pool.map(leave, range(40)))
        made.settle()
        made.world.says(LOCAL_TEXT)
        left = made.remaining_tokens()
        rows = made.rows(statuses.count(200) + 1)
    assert set(statuses) <= {200, 429}
    assert most <= 3
    assert left == 10_000 - charged(rows[:-1])


def test_tries_again_are_one_request(opened: Open) -> None:
    """Of ours, and of a client that repeats itself: charged is the answer."""
    flaky = [
        MockScript(toxic=Toxic(kind="status", status=500)),
        MockScript(),
    ]
    limits = LimitSpec(tokens_per_minute=1_000, requests_per_minute=3)
    with opened(limits=limits, clouds=flaky, tier={"max_retries": 3}) as made:
        once = {"idempotency-key": "a"}
        first, again = (made.world.chat(model="cloud", headers=once) for _ in range(2))
        made.settle()
        made.until(lambda: bool(made._rows()))
        tries = made._rows()
        other = made.world.chat(model="cloud")
        last = made.world.chat(model="cloud")
        refused = [made.world.chat(model="cloud") for _ in range(5)]
    assert again.headers["idempotent-replayed"] == "true"
    assert [r.status_code for r in (first, again, other, last)] == [200] * 4
    assert {response.status_code for response in refused} == {429}
    assert charged(tries) == first.json()["usage"]["total_tokens"]
    assert last.headers["x-ratelimit-remaining-requests"] == "0"


# ---- money --------------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("missing_nanos", [0, 1])
def test_a_budget_is_exact_to_the_nano_dollar(opened: Open, missing_nanos: int) -> None:
    with opened() as made:
        made.world.engine.script = lambda _: Script(steps=[Step(token_ids=(65,))] * 7)
        asked = {"model": "large", "max_tokens": 7}
        usage = made.world.chat(**asked).json()["usage"]
        price = 10_000 * usage["prompt_tokens"] + 30_000 * usage["completion_tokens"]
        budget = 3 * price - missing_nanos
        key = made.new_key("poor", LimitSpec(usd_per_day=budget / NANOS_PER_USD))
        headers = {"authorization": f"Bearer {key}"}
        told = [made.world.chat(headers=headers, **asked) for _ in range(5)]
        rows = made.rows(4 - missing_nanos)
        spent = [row["charge_nanos"] for row in rows if row["key_id"] == key[3:11]]
        report = made.world.http.get("/v1/usage", headers=headers).json()
    num_paid = 3 - missing_nanos
    assert [response.status_code for response in told] == [200] * num_paid + [429] * (5 - num_paid)
    assert spent == [price] * num_paid
    assert report["totals"]["charge_nanos"] == sum(spent) <= budget
    error = told[-1].json()["error"]
    assert (error["code"], told[-1].headers["x-should-retry"]) == ("insufficient_quota", "false")


@pytest.mark.slow
def test_a_limit_of_one_model_is_that_models_under_every_name(opened: Open) -> None:
    limits = LimitSpec(models={"large": LimitSpec(requests_per_minute=2)})
    policy = TestPolicy(tier="small")
    with opened(limits=limits, policy=policy) as made:
        post = made.world.http.post
        assert made.world.chat(model="large").status_code == 200
        assert made.world.chat(model="test/large-model").status_code == 200
        for path, body in (
            ("/v1/chat/completions", {"model": "large", "messages": HELLO}),
            ("/v1/chat/completions", {"model": "test/large-model", "messages": HELLO}),
            ("/v1/chat/completions", {**CHAT, "outrider": {"tier": "large"}}),
            ("/v1/completions", {"model": "large", "prompt": "Hello"}),
            ("/v1/responses", {"model": "large", "input": "Hello"}),
            ("/v1/messages", {"model": "large", "messages": HELLO, "max_tokens": 5}),
        ):
            response = post(path, json=body)
            assert response.status_code == 429, (path, body)
            assert "large" in json.dumps(response.json())
        for _ in range(4):
            assert made.world.chat(model="small").status_code == 200
        assert made.world.chat(model="auto").status_code == 200
        assert len([r for r in made.world.engine.submitted if r.tier == "large"]) == 2
