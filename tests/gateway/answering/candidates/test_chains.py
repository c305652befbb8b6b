"""Aliases and chains: which model is tried when, and what the client sees of it."""

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript, Toxic
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.contract.schema import parsing
from outrider.gateway.contract.schema.parsing import RequestJson
from outrider.gateway.settings.aliases import AliasSettings
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.wiring.aliases import checked_aliases
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import CHAT, LOCAL_TEXT
from tests.gateway.scripted_client import Script, Step

Make = Callable[..., Any]

ONE = MockScript(pieces=("One ", "says ", "this."))
TWO = MockScript(pieces=("Two ", "says ", "that."))
ONE_TEXT, TWO_TEXT = "".join(ONE.pieces), "".join(TWO.pieces)
JSON = {"content-type": "application/json"}
DOWN = MockScript(toxic=Toxic(kind="status", status=503))
FILTERED = MockScript(toxic=Toxic(kind="status", status=400, code="content_filter"))
TOO_LONG = MockScript(toxic=Toxic(kind="status", status=400, code="context_length_exceeded"))
BAD = MockScript(toxic=Toxic(kind="status", status=400))
WITHHELD = MockScript(pieces=("",), finish_reason="content_filter")


@pytest.fixture
def make(open_world: OpenWorld) -> Make:
    """Makes a gateway with two upstream tiers, `cloud` and `second`; a context manager."""

    def made(first: MockScript = ONE, second: MockScript = TWO, **options: Any) -> Any:
        tier = {"server": "vllm", **options.pop("second_tier", {})}
        return open_world(clouds=(first,), others={"second": (second, tier)}, **options)

    return made


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def chain(*models: str, **options: Any) -> dict[str, Any]:
    return {"gpt-4o-mini": {"models": models, **options}}


def steps_of(text: str, encode: Callable[[str], list[int]]) -> list[Step]:
    return [Step(token_ids=(token,)) for token in encode(text)]


# ---- names ---------------------------------------------------------------------------------------


def test_an_alias_is_its_model_and_is_listed(make: Make) -> None:
    with make(aliases=chain("auto")) as world:
        answer = world.chat(model="gpt-4o-mini")
        assert content(answer) == LOCAL_TEXT
        listed = {card["id"]: card for card in world.http.get("/v1/models").json()["data"]}
        assert listed["gpt-4o-mini"]["outrider"] == listed["auto"]["outrider"]
        assert world.http.get("/v1/models/gpt-4o-mini").status_code == 200
        route = world.http.post("/v1/route", json={**CHAT, "model": "gpt-4o-mini"})
        assert route.json()["tier"] == "small"


def test_an_alias_works_without_upstream_tiers(open_world: OpenWorld) -> None:
    with open_world(clouds=(), tiers={}, aliases=chain("large")) as world:
        answer = world.chat(model="gpt-4o-mini")
        assert answer.headers["x-outrider-tier"] == "large"


def test_a_request_is_decoded_once_along_its_chain(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = parsing._decode_object, list[bytes]()

    def noting(raw: bytes) -> dict[str, Any]:
        decoded.append(raw)
        return decode(raw)

    with make(DOWN, aliases=chain("cloud", "second"), cache={"store": "memory"}) as world:
        monkeypatch.setattr(parsing, "_decode_object", noting)
        answer = world.chat(model="gpt-4o-mini", temperature=0, outrider={"cache": "on"})
        assert content(answer) == TWO_TEXT
        assert answer.headers["x-outrider-cache"] == "miss"
    assert len(decoded) == 1


@pytest.mark.slow_cases
@pytest.mark.parametrize("has_clouds", [True, False])
def test_a_local_model_continues_anothers_answer(
    open_world: OpenWorld, encode: Callable[[str], list[int]], has_clouds: bool
) -> None:
    options: dict[str, Any] = {} if has_clouds else {"clouds": (), "tiers": {}}
    with open_world(aliases=chain("large", "small"), **options) as world:
        broken = Script(steps=steps_of("Well ", encode), failure=("engine_died", "gone"))
        whole = Script(steps=steps_of("then.", encode))
        world.engine.script = lambda request: broken if request.tier == "large" else whole
        stream = world.stream(model="gpt-4o-mini", max_tokens=20)
        assert (stream.text, stream.is_done) == ("Well then.", True), stream.error
        assert stream.report["tier"] == "small"
        again = world.engine.submitted[-1]
        assert again.sampling.max_tokens == 20 - len(encode("Well "))


@pytest.mark.parametrize("has_clouds", [True, False])
def test_a_chain_goes_on_at_a_server_while_the_engine_restarts(
    open_world: OpenWorld, has_clouds: bool
) -> None:
    """A chain of local models waits for its first."""
    options: dict[str, Any] = {"clouds": (ONE,)} if has_clouds else {"clouds": (), "tiers": {}}
    aliases = chain("large", "cloud" if has_clouds else "small")
    with open_world(aliases=aliases, **options) as world:
        world.engine.is_ready, world.engine.is_paused = False, True
        response = world.chat(model="gpt-4o-mini")
        assert response.status_code == 200
        assert response.headers["x-outrider-tier"] == ("cloud" if has_clouds else "large")


def test_defaults_are_for_clients_that_say_nothing(make: Make) -> None:
    inner = {"models": ("cloud",), "defaults": {"temperature": 0.5, "top_p": 0.5}}
    outer = {
        "models": ("inner",),
        "defaults": {"temperature": 0.25, "max_tokens": 2, "outrider": {"deadline_ms": 60_000}},
    }
    with make(aliases={"inner": inner, "outer": outer}) as world:
        assert content(world.chat(model="outer")) == "One says "
        sent = world.cloud.requests[-1].document
        assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.25, 0.5, 2)
        assert "outrider" not in sent
        world.chat(model="outer", temperature=1, max_completion_tokens=1)
        sent = world.cloud.requests[-1].document
        assert (sent["temperature"], sent.get("max_tokens")) == (1, None)
        completion = {"model": "outer", "prompt": "x"}
        assert world.http.post("/v1/completions", json=completion).status_code == 200
        assert world.cloud.requests[-1].document["top_p"] == 0.5


def test_a_key_that_may_use_an_alias_needs_no_right_to_its_models(
    make: Make, tmp_path: Any
) -> None:
    database = f"sqlite:///{tmp_path}/keys.db"
    options = {"database_url": database, "keys": {"refresh_s": 0.02}}
    with make(aliases=chain("cloud", "second"), **options) as world:
        store = world.context.tenancy.keys.store
        scopes = Scopes(models=frozenset({"gpt-4o-mini"}))
        mine = {"authorization": f"Bearer {store.create(KeyOrder(name='k', scopes=scopes)).text}"}
        wait_for(lambda: world.http.get("/v1/models").status_code == 401)
        assert content(world.chat(model="gpt-4o-mini", headers=mine)) == ONE_TEXT
        assert world.chat(model="cloud", headers=mine).status_code == 403
        refused = world.chat(model="gpt-4o-mini", models=["second"], headers=mine)
        assert refused.status_code == 403
        ids = [card["id"] for card in world.http.get("/v1/models", headers=mine).json()["data"]]
        assert ids == ["gpt-4o-mini"]


def test_weights_share_out_the_first_model_and_the_others_follow() -> None:
    book = ChainBook(
        aliases={"a": AliasSettings(models=("x", "y", "z"), weights=(3, 1, 0))},
        rng=random.Random(7),
    )
    body = RequestJson(json.dumps({**CHAT, "model": "a"}).encode())
    chains = [book.chain_of("chat", body, ANONYMOUS) for _ in range(400)]
    orders = Counter(tuple(link.model for link in made.links) for made in chains if made)
    assert set(orders) == {("x", "y", "z"), ("y", "x", "z")}
    assert 250 < orders["x", "y", "z"] < 350


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ({"a": {"models": ["b"]}, "b": {"models": ["a"]}}, "circle: a -> b -> a"),
        ({"a": {"models": ["cluod"]}}, "unknown model; did you mean cloud?"),
        ({"a": {"models": ["nowhere/model"]}}, "unknown model"),
        ({"a": {"models": []}}, "at least 1 item"),
        ({"auto": {"models": ["cloud"]}}, "reserved name"),
        ({"cloud": {"models": ["auto"]}}, "the name of a tier"),
        ({"a": {"models": ["cloud", "auto"], "weights": [1]}}, "1 weights for 2 models"),
        ({"a": {"models": ["cloud"], "weights": [0]}}, "all weights are 0"),
        ({"a": {"models": ["cloud"], "defaults": {"messages": []}}}, "the client's own"),
    ],
)
def test_aliases_that_lead_nowhere_are_refused_at_the_start(
    aliases: dict[str, Any], said: str
) -> None:
    tiers = {"cloud": {"url": "http://x/v1"}}
    with pytest.raises(ValueError, match=said):
        Settings.model_validate({"tiers": tiers, "aliases": aliases})


def test_defaults_that_would_be_refused_are_refused_at_the_start() -> None:
    aliases = {"a": {"models": ["auto"], "defaults": {"temperature": 9}}}
    settings = Settings.model_validate({"aliases": aliases})
    with pytest.raises(SettingsError, match=r"aliases.a.defaults: temperature"):
        checked_aliases(settings)


# ---- the request's own chain ---------------------------------------------------------------------


def test_models_of_a_request_are_tried_in_their_order(make: Make) -> None:
    with make(DOWN) as world:
        answer = world.chat(model="cloud", models=["second", "auto"])
        assert content(answer) == TWO_TEXT
        assert answer.headers["x-outrider-tier"] == "second"
        assert "cloud: upstream_status" in answer.headers["x-outrider-reason"]
        nameless = {"models": ["cloud", "auto"], "messages": CHAT["messages"]}
        assert content(world.http.post("/v1/chat/completions", json=nameless)) == LOCAL_TEXT


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("models", "status", "param"),
    [
        ([], 400, "models"),
        ("second", 400, "models"),
        ([1], 400, "models"),
        (["auto"] * 9, 400, "models"),
        (["gone"], 404, "model"),
    ],
)
def test_a_chain_that_is_none_is_refused(
    make: Make, models: object, status: int, param: str
) -> None:
    with make() as world:
        answer = world.chat(model="cloud", models=models)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not world.cloud.requests


def test_a_name_given_twice_is_refused_in_a_chain_too(make: Make) -> None:
    with make() as world:
        body = json.dumps({**CHAT, "models": ["cloud"]})[:-1] + ', "models": ["second"]}'
        answer = world.http.post("/v1/chat/completions", content=body, headers=JSON)
        assert answer.status_code == 400
        assert "twice" in answer.json()["error"]["message"]


def test_a_private_request_skips_the_servers_of_its_chain(make: Make) -> None:
    with make() as world:
        answer = world.chat(model="cloud", models=["auto"], outrider={"privacy": "private"})
        assert content(answer) == LOCAL_TEXT
        assert not world.cloud.requests
        nowhere = world.chat(model="cloud", models=["second"], outrider={"privacy": "private"})
        assert nowhere.status_code == 400
        assert not world.cloud.requests


# ---- when the next model is tried ----------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [DOWN, FILTERED, TOO_LONG, WITHHELD])
def test_the_next_model_answers(make: Make, script: MockScript, stream: bool) -> None:
    with make(script, aliases=chain("cloud", "second")) as world:
        if stream:
            answer = world.stream(model="gpt-4o-mini")
            assert answer.text == TWO_TEXT
            assert answer.is_done
            assert len(answer.roles) == 1
            assert len(answer.ids) == 1
        else:
            assert content(world.chat(model="gpt-4o-mini")) == TWO_TEXT


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("script", "kinds", "status"),
    [
        (DOWN, ["content_filter"], 502),
        (FILTERED, ["failure"], 400),
        (TOO_LONG, ["failure", "content_filter"], 400),
        (WITHHELD, ["failure"], 200),
        (BAD, ["failure", "content_filter", "context_length", "deadline"], 400),
    ],
)
def test_only_what_the_alias_names_goes_on(
    make: Make, script: MockScript, kinds: list[str], status: int
) -> None:
    with make(script, aliases=chain("cloud", "second", fallback_on=kinds)) as world:
        assert world.chat(model="gpt-4o-mini").status_code == status
        assert not world.clouds[1].requests


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_no_other_model_gives_is_ended_as_its_server_did(
    make: Make, stream: bool
) -> None:
    with make(WITHHELD, DOWN, aliases=chain("cloud", "second")) as world:
        if stream:
            answer = world.stream(model="gpt-4o-mini")
            reasons = [c["choices"][0]["finish_reason"] for c in answer.chunks if c["choices"]]
            assert answer.is_done
            assert reasons[-1] == "content_filter"
            assert answer.report["tier"] == "cloud"
        else:
            answer = world.chat(model="gpt-4o-mini")
            assert answer.json()["choices"][0]["finish_reason"] == "content_filter"
            assert answer.headers["x-outrider-tier"] == "cloud"


def mid_filter(pieces: int) -> MockScript:
    return MockScript(pieces=ONE.pieces[:pieces], finish_reason="content_filter")


def test_a_filter_in_mid_stream_is_gone_on_behind(make: Make) -> None:
    two = MockScript(pieces=("One ", "says ", "that ", "in ", "full."))
    with make(mid_filter(2), two, aliases=chain("cloud", "second")) as world:
        answer = world.stream(model="gpt-4o-mini", stream_options={"include_usage": True})
        assert answer.text == "One says that in full."
        assert answer.is_done
        assert (len(answer.roles), len(answer.ids)) == (1, 1)
        sent = world.clouds[1].requests[-1].document
        assert sent["messages"][-1] == {"role": "assistant", "content": "One says "}


def test_a_filter_in_mid_stream_stands_where_no_model_can_go_on(make: Make) -> None:
    with make(
        mid_filter(2), second_tier={"server": "openai"}, aliases=chain("cloud", "second")
    ) as world:
        answer = world.stream(model="gpt-4o-mini")
        assert answer.text == "One says "
        assert answer.is_done
        assert answer.error is None


def test_a_stream_that_breaks_off_is_gone_on_behind_by_the_next_model(make: Make) -> None:
    broken = MockScript(pieces=ONE.pieces, toxic=Toxic(kind="reset", after_events=2))
    two = MockScript(pieces=("One ", "says ", "that."))
    with make(broken, two, aliases=chain("cloud", "second")) as world:
        answer = world.stream(model="gpt-4o-mini")
        assert answer.text == "One says that."
        assert answer.is_done


def test_a_context_that_is_full_is_gone_on_behind_by_the_next_model(make: Make) -> None:
    full = MockScript(pieces=ONE.pieces[:2], finish_reason="length", reported_usage=(98, 2))
    two = MockScript(pieces=("One ", "says ", "that."))
    tier = {"max_context": 100}
    with make(full, two, tier=tier, aliases=chain("cloud", "second")) as world:
        assert world.stream(model="gpt-4o-mini").text == "One says that."
        assert content(world.chat(model="gpt-4o-mini")) == "One says that."
        # The request's own limit is no reason.
        bounded = world.stream(model="gpt-4o-mini", max_tokens=2)
        assert bounded.text == "One says "


def test_a_model_that_leaves_too_little_time_is_left(make: Make) -> None:
    late = MockScript(pieces=ONE.pieces, first_token_delay_s=60)
    with make(late, aliases=chain("cloud", "second")) as world:
        answer = world.chat(model="gpt-4o-mini", outrider={"deadline_ms": 3000})
        assert content(answer) == TWO_TEXT


def test_one_error_tells_of_all_models(make: Make) -> None:
    with make(DOWN, DOWN, aliases=chain("cloud", "second")) as world:
        answer = world.chat(model="gpt-4o-mini")
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert "[1]" in message
        assert "[2]" in message


def test_a_withheld_answer_is_not_charged(make: Make, tmp_path: Any) -> None:
    with make(WITHHELD, aliases=chain("cloud", "second")) as world:
        attempts = 'outrider_upstream_attempts_total{kind="answer",outcome="%s",tier="%s"}'
        assert content(world.chat(model="gpt-4o-mini")) == TWO_TEXT
        assert world.count(attempts % ("lost", "cloud")) == 1
        assert world.count(attempts % ("answered", "second")) == 1


# ---- without a setting ---------------------------------------------------------------------------


def test_prefer_local_goes_on_elsewhere_without_a_setting(make: Make) -> None:
    broken = MockScript(pieces=ONE.pieces, toxic=Toxic(kind="reset", after_events=2))
    with make(broken, handoff={"policy": "prefer_cloud"}) as world:
        assert world.stream().error is not None  # another policy: only where it is set
        local = world.stream(outrider={"policy": "prefer_local"})
        assert local.text == LOCAL_TEXT


# ---- unknown fields ------------------------------------------------------------------------------

IGNORED = "x-outrider-ignored-fields"


@pytest.mark.slow
def test_a_hint_breaks_no_client_of_the_local_models(make: Make) -> None:
    with make() as world:
        answer = world.chat(verbosity="low")
        assert content(answer) == LOCAL_TEXT
        assert answer.headers[IGNORED] == "verbosity"
        assert IGNORED not in world.chat().headers
    with make(unknown_fields="refuse") as world:
        assert world.chat(outrider={"policy": "local_only"}, odd=1).status_code == 400
        assert world.chat(model="cloud", odd=1).status_code == 400


def test_unknown_fields_are_ignored_unless_the_settings_refuse_them(
    open_world: OpenWorld, make: Make
) -> None:
    with make() as world:
        for model in ("auto", "cloud"):
            answer = world.chat(model=model, odd={"a": 1})
            assert answer.status_code == 200, answer.text
            assert answer.headers[IGNORED] == "odd"
        assert "odd" not in world.cloud.requests[-1].document
        for name, value in {"store": True, "service_tier": "flex"}.items():
            refused = world.chat(model="cloud", **{name: value})
            assert refused.status_code == 400, name
        # What is known and not supported is refused still: the answer would be another one.
        assert world.chat(model="small", audio={"voice": "x"}).status_code == 400
    with open_world(clouds=(), tiers={}) as world:
        answer = world.chat(odd=1, messages=[{"role": "user", "content": "Hi", "new": 2}])
        assert answer.headers[IGNORED] == "odd, messages.0.new"
        asked = {"model": "large", "input": "Hi", "max_tokens": 5, "messages": CHAT["messages"]}
        for path in ("/v1/responses", "/v1/messages"):
            answer = world.http.post(path, json={**asked, "odd": 1})
            assert answer.status_code == 200, answer.text
            assert "odd" in answer.headers[IGNORED]


def test_a_tier_may_pass_unknown_fields_on_or_leave_fields_out(make: Make) -> None:
    tier = {"unknown_fields": "pass", "ignore_fields": ["reasoning_effort"]}
    with make(tier=tier) as world:
        answer = world.chat(model="cloud", odd={"a": 1}, reasoning_effort="low")
        assert content(answer) == ONE_TEXT
        assert answer.headers[IGNORED] == "reasoning_effort"
        sent = world.cloud.requests[-1].document
        assert sent["odd"] == {"a": 1}
        assert "reasoning_effort" not in sent
        for name in ("cache_salt", "kv_transfer_params", "lora_path"):
            assert world.chat(model="cloud", **{name: "x"}).status_code == 400
