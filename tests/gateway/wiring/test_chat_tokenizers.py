"""A chat template that the settings name: used for its tier, refused early where it is broken."""

import asyncio
from pathlib import Path

import pytest

from outrider.gateway.contract.schema.chat import InputMessage
from outrider.gateway.settings.tree import Settings, SettingsError, bundled_pair, load_settings
from outrider.gateway.wiring.chat_tokenizers import load_chat_tokenizer
from outrider.gateway.wiring.start import check_models
from outrider.verifier.params import TIERS

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}"
    "{% generation %}{% endgeneration %}assistant>"
)


def settings_with(value: str) -> Settings:
    return load_settings(environ={}, flags={"models.chat_template": value})


def prompts(settings: Settings) -> dict[str, str]:
    """Return what "Hi" becomes for each tier."""
    found = {}
    for tier in TIERS:
        tokenizer = load_chat_tokenizer(settings, tier, str(bundled_pair() / tier))
        messages = [InputMessage(role="user", content="Hi")]
        prompt = asyncio.run(tokenizer.render_chat(messages))
        found[tier] = tokenizer.decode(prompt.token_ids, with_special=True)
    return found


def test_a_template_is_used_by_the_tiers_that_it_is_for(tmp_path: Path) -> None:
    file = tmp_path / "mine, too.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    mine = "user> Hi\nassistant>"
    own = prompts(settings_with(""))
    assert mine not in own.values()
    for value, tiers in (
        (str(file), TIERS),
        (f"large={file}", ("large",)),
        (f"small={file},large={file}", TIERS),
    ):
        settings = settings_with(value)
        check_models(settings)
        expected = {tier: mine if tier in tiers else own[tier] for tier in TIERS}
        assert prompts(settings) == expected, value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"\xff\xfe", "cannot be read"),
        (b"fine\n{% for m in messages %}", "line 2 is no Jinja"),
    ],
)
def test_a_broken_template_is_told_before_anything_is_loaded(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=words) as told:
        check_models(settings_with(f"small={file}"))
    assert f"models.chat_template = {str(file)!r}" in str(told.value)


def test_a_template_for_a_tier_without_a_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    for value, said in ((f"small={file}", "names a template for the small tier"), (str(file), "")):
        flags = {"models.chat_template": value, "models.small": "none"}
        settings = load_settings(environ={}, flags=flags)
        if said:
            with pytest.raises(SettingsError, match=said):
                check_models(settings)
        else:
            check_models(settings)
