"""An alias with a router: which of its models gets a request, and who answers where it cannot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockScript, Toxic
from outrider.gateway.http.server.veil import Veil
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.wiring.aliases import alias_policies
from tests.gateway.conftest import OpenWorld
from tests.gateway.hybrid import CHAT
from tests.router.tier_worlds import ladder_of, scorer_of

Make = Callable[..., Any]
NAMES = ("small", "cloud", "second")
DOWN = MockScript(toxic=Toxic(kind="status", status=503))
SECOND = MockScript(pieces=("Two ", "says ", "that."))
REASON = "router: cloud is worth its price (small 0.50, cloud 0.80, second 0.90)"
TOOL_LOOP = [
    {"role": "user", "content": "And now?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]


def router_in(folder: Path, *chances: float) -> str:
    """Write a router that says the same chances of every prompt; its bar is 0.9."""
    ladder = ladder_of(1.0, 2.0, 10.0, names=NAMES, accuracies=chances)
    scorer_of(chances, ladder).save(folder / "router")
    return str(folder / "router")


@pytest.fixture
def make(open_world: OpenWorld, tmp_path: Path) -> Make:
    """Makes a gateway whose alias `best` has three models and a router; a context manager."""

    def made(first: MockScript | None = None, second: MockScript = SECOND, **options: Any) -> Any:
        chances = options.pop("chances", (0.5, 0.8, 0.9))
        alias = {"models": NAMES, "router": router_in(tmp_path, *chances)}
        return open_world(
            clouds=(first or MockScript(),),
            others={"second": (second, options.pop("second_tier", {}))},
            aliases={"best": alias | options.pop("alias", {})},
            **options,
        )

    return made


def answered(world: Any, **fields: Any) -> tuple[str, str]:
    """Return who answered, and why."""
    response = world.chat(model="best", **fields)
    assert response.status_code == 200, response.text
    return response.headers["x-outrider-tier"], response.headers["x-outrider-reason"]


@pytest.mark.parametrize(
    ("chances", "tier"),
    [((0.9, 0.95, 0.97), "small"), ((0.5, 0.8, 0.9), "cloud"), ((0.05, 0.06, 0.99), "second")],
)
def test_the_model_that_is_worth_its_price_answers_and_says_so(
    make: Make, chances: tuple[float, ...], tier: str
) -> None:
    with make(chances=chances) as world:
        found, reason = answered(world)
        assert found == tier
        assert reason.startswith(f"router: {tier} is worth its price (small ")
        stream = world.stream(model="best")
        assert (stream.report["tier"], stream.report["reason"]) == (tier, reason)


def test_the_next_best_answers_for_a_model_that_is_down(make: Make) -> None:
    """Without cloud, the ten times dearer model is not worth its gain."""
    with make(DOWN) as world:
        tier, reason = answered(world)
        assert tier == "small"
        assert reason.startswith(f"{REASON}; cloud: ")


def test_a_budget_leaves_the_cheaper_models(make: Make) -> None:
    dear, cheap = ({"price": {"prompt": each, "completion": each}} for each in (1000.0, 0.001))
    with make(chances=(0.05, 0.06, 0.99), second_tier=dear, tier=cheap) as world:
        assert answered(world)[0] == "second"
        budget = {"max_cost_usd": 0.001}
        tier, reason = answered(world, outrider=budget)
        assert tier == "cloud"
        assert "; second: BadRequestError" in reason
        told = world.http.post("/v1/route", json={**CHAT, "model": "best", "outrider": budget})
        assert told.json()["tier"] == "cloud"


def test_wishes_of_a_request_and_its_key_are_kept(make: Make) -> None:
    with make() as world:
        tier, reason = answered(world, outrider={"prefer": "price"})
        assert (tier, reason.startswith("router: prefers price, small (")) == ("small", True)
        assert answered(world, outrider={"prefer": "quality"})[0] == "second"
        assert answered(world, outrider={"threshold": 0.5})[0] == "small"
        tier, reason = answered(world, outrider={"min_quality": 0.9})
        assert (tier, reason.startswith("router: cloud keeps the quality (")) == ("cloud", True)
        both = world.chat(model="best", outrider={"min_quality": 0.9, "threshold": 0.5})
        assert both.status_code == 400
        for wrong in ({"min_quality": 7}, {"prefer": "speed"}, [1]):
            assert world.chat(model="best", outrider=wrong).status_code == 400


def test_the_alias_itself_may_have_a_preference(make: Make) -> None:
    alias = {"defaults": {"outrider": {"prefer": "quality"}}}
    with make(alias=alias) as world:
        assert answered(world)[0] == "second"
        assert answered(world, outrider={"prefer": "price"})[0] == "small"


def test_a_quality_is_not_given_up_where_its_models_are_down(make: Make) -> None:
    with make(DOWN, DOWN) as world:
        assert answered(world)[0] == "small"
        refused = world.chat(model="best", outrider={"min_quality": 0.9})
        assert refused.status_code in (502, 503)


def test_a_tool_loop_goes_to_the_dearest_model(make: Make) -> None:
    with make() as world:
        tier, reason = answered(world, messages=TOOL_LOOP)
        assert tier == "second"
        assert reason == "router: tool loop: second, the model that made the calls is unknown"


def test_a_route_report_tells_what_each_model_is_worth(make: Make) -> None:
    with make() as world:
        told = world.http.post("/v1/route", json={**CHAT, "model": "best"}).json()
        assert (told["tier"], told["reason"]) == ("cloud", REASON)
        assert (told["quality"], told["threshold"]) == (pytest.approx(0.7), 0.9)
        assert [one["model"] for one in told["chances"]] == list(NAMES)
        assert [one["right"] for one in told["chances"]] == pytest.approx([0.5, 0.8, 0.9])
        plain = world.http.post("/v1/route", json={**CHAT, "model": "cloud"}).json()
        assert "chances" not in plain
        veil = Veil(model="best", hides_tiers=True)
        hidden = veil.route(told)
        assert (hidden["tier"], hidden["reason"], hidden["chances"]) == (None, None, None)


@pytest.mark.parametrize(
    ("alias", "said"),
    [
        ({"models": ("small", "cloud")}, "knows small, cloud, second, and the alias's models are"),
        ({"router": "/nowhere/router"}, "aliases.best.router: /nowhere/router"),
    ],
)
def test_a_router_that_does_not_fit_is_refused_at_the_start(
    tmp_path: Path, alias: dict[str, Any], said: str
) -> None:
    folder = router_in(tmp_path, 0.5, 0.8, 0.9)
    tiers = {"cloud": {"url": "http://x/v1"}, "second": {"url": "http://y/v1"}}
    aliases = {"best": {"models": NAMES, "router": folder, **alias}}
    settings = Settings.model_validate({"tiers": tiers, "aliases": aliases})
    with pytest.raises(SettingsError, match=said):
        alias_policies(settings)


def test_weights_beside_a_router_are_refused(tmp_path: Path) -> None:
    alias = {"models": ["small", "large"], "weights": [1, 1], "router": "r"}
    with pytest.raises(ValueError, match="remove the weights"):
        Settings.model_validate({"aliases": {"best": alias}})
