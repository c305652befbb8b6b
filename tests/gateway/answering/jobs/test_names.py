"""Meaning of a model's name among local models, upstream tiers and their servers' lists."""

import msgspec
import pytest

from outrider.engine.events import TierInfo
from outrider.gateway.answering.reading.model_catalog import (
    LocalFormats,
    ModelCatalog,
    ResolvedModel,
    TierModels,
)
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import BadRequestError, ModelNotFoundError
from outrider.gateway.contract.schema.model_cards import ModelCard, UpstreamCard
from outrider.gateway.http.apis.prices import card_of
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.verifier.params import Tier
from tests.gateway.answers import read_answer

FREE = PriceBook.free()


def info(tier: Tier, model_id: str) -> TierInfo:
    return TierInfo(
        tier=tier,
        model_id=model_id,
        path="test",
        num_parameters=10,
        max_context=64,
        vocab_size=420,
        dtype="float32",
        device="cpu",
    )


SMALL, LARGE = info("small", "test/small"), info("large", "test/large")
LOCAL = {
    "auto": (SMALL, LARGE),
    "small": (SMALL,),
    "large": (LARGE,),
    "test/small": (SMALL,),
    "test/large": (LARGE,),
}
CLOUD = TierModels(
    tier="cloud",
    server="vllm",
    model="meta/llama",
    listed=("meta/other", "meta/llama", "large", "test/small", "spare"),
    max_context=8192,
    supports=("tools", "images"),
)
SPARE = TierModels(tier="spare", server="outrider", listed=("meta/other", "auto", "mine"))
FORMATS = {
    "small": LocalFormats(tool_format="hermes"),
    "large": LocalFormats(tool_format="mistral", may_think=True),
}
BOTH = ModelCatalog(LOCAL, (CLOUD, SPARE), handoff="cloud", formats=FORMATS)


def cloud(meant: ResolvedModel) -> tuple[str | None, str | None]:
    assert meant.named == "upstream"
    assert meant.local == ()
    return meant.tier, meant.model


def test_all_names_local_ones_first() -> None:
    assert BOTH.all() == (
        "auto", "small", "large", "test/small", "test/large",
        "cloud", "spare",
        "meta/llama", "meta/other", "cloud/large", "cloud/test/small", "cloud/spare",
        "spare/meta/other", "spare/auto", "mine",
    )  # fmt: skip
    assert ModelCatalog(LOCAL, formats=FORMATS).all() == tuple(LOCAL)
    assert "mine" in BOTH
    assert "mine" not in ModelCatalog(LOCAL, formats=FORMATS)


@pytest.mark.parametrize("name", LOCAL)
def test_local_names_win(name: str) -> None:
    greedy = TierModels(tier="cloud", listed=tuple(LOCAL))
    meant = ModelCatalog(LOCAL, (greedy,), handoff="cloud", formats=FORMATS).resolve(name)
    assert meant.named == ("auto" if name == "auto" else "local")
    assert meant.local == LOCAL[name]
    assert meant.tier is None


@pytest.mark.parametrize(
    ("name", "tier", "model"),
    [
        ("cloud", "cloud", "meta/llama"),  # the configured one
        ("spare", "spare", "meta/other"),  # the first that is listed
        ("meta/llama", "cloud", "meta/llama"),
        ("meta/other", "cloud", "meta/other"),  # the earlier tier's
        ("mine", "spare", "mine"),
        ("spare/meta/other", "spare", "meta/other"),
        ("spare/auto", "spare", "auto"),
        ("cloud/large", "cloud", "large"),
        ("cloud/test/small", "cloud", "test/small"),
        ("cloud/not/listed", "cloud", "not/listed"),
    ],
)
def test_names_of_servers(name: str, tier: str, model: str) -> None:
    assert cloud(BOTH.resolve(name)) == (tier, model)
    assert BOTH.resolve(name).name == name


def test_words_of_ours_never_mean_a_server() -> None:
    """Another Outrider lists auto, small and large too."""
    other = TierModels(tier="cloud", server="outrider", listed=("auto", "small", "large", "none"))
    names = ModelCatalog(
        {"auto": (SMALL,), "small": (SMALL,)}, (other,), handoff="cloud", formats=FORMATS
    )
    assert names.resolve("auto").named == "auto"
    for name in ("large", "none"):
        with pytest.raises(ModelNotFoundError):
            names.resolve(name)
        assert cloud(names.resolve(f"cloud/{name}")) == ("cloud", name)


@pytest.mark.parametrize("name", ["", "none", "elsewhere/x", "cloud/", "/x", "CLOUD", "meta"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        BOTH.resolve(name)
    problem = problem_of(caught.value)
    assert (problem.status, problem.param, problem.code) == (404, "model", "model_not_found")
    assert all(known in problem.message for known in BOTH.all())


def test_a_tier_with_unknown_models_takes_any_name() -> None:
    names = ModelCatalog(LOCAL, (TierModels(tier="cloud"),), handoff="cloud", formats=FORMATS)
    assert cloud(names.resolve("cloud")) == ("cloud", None)
    assert cloud(names.resolve("cloud/x")) == ("cloud", "x")
    assert names.usual_model("cloud") is None
    assert BOTH.usual_model("cloud") == "meta/llama"
    assert BOTH.usual_model("spare") == "meta/other"


def test_a_model_called_like_its_tier_is_listed_once() -> None:
    names = ModelCatalog(LOCAL, (TierModels(tier="cloud", model="cloud"),), formats=FORMATS)
    assert names.all() == (*LOCAL, "cloud")


# ---- outrider.tier -----------------------------------------------------------------------------


def test_a_tier_in_the_options() -> None:
    assert BOTH.tiers() == ("small", "large", "cloud", "spare")
    assert BOTH.resolve("auto", "small").local == (SMALL,)
    assert BOTH.resolve("auto", "small").named == "local"
    assert BOTH.resolve("test/large", "large").local == (LARGE,)
    assert cloud(BOTH.resolve("auto", "spare")) == ("spare", "meta/other")
    assert cloud(BOTH.resolve("cloud", "cloud")) == ("cloud", "meta/llama")
    assert cloud(BOTH.resolve("mine", "spare")) == ("spare", "mine")


@pytest.mark.parametrize(
    ("model", "tier", "words"),
    [
        ("auto", "medium", "unknown tier 'medium'; available: small, large, cloud, spare"),
        ("auto", "meta/llama", "unknown tier"),
        ("auto", "auto", "unknown tier"),
        ("small", "large", "contradicts the model, which means the small tier"),
        ("test/small", "cloud", "contradicts the model, which means the small tier"),
        ("cloud", "small", "contradicts the model, which means the cloud tier"),
        ("cloud", "spare", "contradicts the model, which means the cloud tier"),
        ("mine", "cloud", "contradicts the model, which means the spare tier"),
        ("spare/x", "large", "contradicts the model, which means the spare tier"),
    ],
)
def test_tiers_that_do_not_fit(model: str, tier: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as caught:
        BOTH.resolve(model, tier)
    assert caught.value.param == "outrider.tier"


def test_a_tier_that_is_not_loaded() -> None:
    names = ModelCatalog({"auto": (SMALL,), "small": (SMALL,)}, (CLOUD,), formats=FORMATS)
    with pytest.raises(BadRequestError, match="available: small, cloud"):
        names.resolve("auto", "large")
    with pytest.raises(BadRequestError, match="available: none"):
        ModelCatalog({}, formats=FORMATS).resolve("auto", "large")


def test_while_the_engine_does_not_tell_its_checkpoints() -> None:
    names = ModelCatalog(
        {"auto": (), "small": (), "large": ()}, (CLOUD,), handoff="cloud", formats=FORMATS
    )
    assert names.resolve("auto").named == "auto"
    assert names.resolve("small").named == "local"
    assert names.resolve("auto", "large").named == "local"
    assert cloud(names.resolve("auto", "cloud")) == ("cloud", "meta/llama")
    for tier in ("large", "cloud"):
        with pytest.raises(BadRequestError, match="means the small tier"):
            names.resolve("small", tier)


def test_without_a_local_model() -> None:
    names = ModelCatalog({"auto": ()}, (SPARE,), handoff="spare", formats=FORMATS)
    assert names.all()[:2] == ("auto", "spare")
    assert names.resolve("auto").named == "auto"
    with pytest.raises(ModelNotFoundError):
        names.resolve("small")


# ---- cards -------------------------------------------------------------------------------------


def test_cards() -> None:
    cards = {
        model.id: read_answer(ModelCard, msgspec.json.encode(card_of(model, FREE)))
        for model in BOTH.all_listed()
    }
    assert tuple(cards) == BOTH.all()
    assert [card.tier for card in cards["auto"].outrider] == ["small", "large", "cloud"]
    (large,) = cards["large"].outrider
    assert large.tier == "large"
    assert large.capabilities == ["structured_outputs", "tools", "reasoning"]
    assert large.tool_format == "mistral"
    assert cards["large"].owned_by == "outrider"
    assert cards["mine"].owned_by == "spare"
    assert BOTH.listed("cloud").behind == [
        UpstreamCard(
            tier="cloud",
            model_id="meta/llama",
            max_context=8192,
            server="vllm",
            capabilities=["tools", "images"],
        )
    ]
    assert BOTH.listed("mine").behind == [
        UpstreamCard(
            tier="spare", model_id="mine", max_context=None, server="outrider", capabilities=[]
        )
    ]
    assert BOTH.listed("cloud/unlisted").behind[0].model_id == "unlisted"
    with pytest.raises(ModelNotFoundError):
        BOTH.listed("x")


def test_auto_without_hand_offs_means_local_models() -> None:
    auto = ModelCatalog(LOCAL, (CLOUD,), formats=FORMATS).listed("auto")
    assert [behind.tier for behind in auto.behind] == ["small", "large"]
