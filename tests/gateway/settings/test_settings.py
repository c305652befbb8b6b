"""Sources of settings, their precedence, and the messages for wrong ones."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.gateway.settings.toml_text import toml_value
from outrider.gateway.settings.tree import (
    Settings,
    SettingsError,
    bundled_pair,
    load_settings,
    setting_paths,
    to_toml,
)
from outrider.router.policy import WatchOptions


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No test sees an outrider.toml that lies where pytest was started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(**sources: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**({"environ": {}} | sources))
    return str(caught.value)


def write(folder: Path, text: str, name: str = "outrider.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_environment_over_file_over_defaults(empty_folder: Path) -> None:
    write(
        empty_folder,
        """
        log_level = "DEBUG"
        [server]
        host = "file"
        port = 1
        [engine]
        num_threads = 1
        """,
    )
    settings = load_settings(
        environ={"OUTRIDER_SERVER__PORT": "2", "OUTRIDER_ENGINE__NUM_THREADS": "2"},
        flags={"engine.num_threads": 3, "engine.device": None},
    )
    assert settings.log_level == "DEBUG"
    assert settings.server.host == "file"
    assert settings.server.port == 2
    assert settings.engine.num_threads == 3
    assert settings.engine.device == "auto"


def test_the_file_is_the_flags_else_the_variables_else_the_folders(empty_folder: Path) -> None:
    here = write(empty_folder, "server.port = 1")
    named = write(empty_folder, "server.port = 2", "named.toml")
    flagged = write(empty_folder, "server.port = 3", "flagged.toml")
    assert load_settings(environ={}).server.port == 1
    environ = {"OUTRIDER_CONFIG": str(named)}
    assert load_settings(environ=environ).server.port == 2
    assert load_settings(environ=environ, config_file=flagged).server.port == 3
    here.unlink()
    assert load_settings(environ={}).server.port == 8000


def test_an_empty_variable_is_not_set() -> None:
    assert load_settings(environ={"OUTRIDER_ENGINE__NUM_THREADS": ""}).engine.num_threads is None


def test_variables_are_read_in_any_case_and_as_sections() -> None:
    environ = {"outrider_engine__device": "cpu", "OUTRIDER_SERVER": '{"port": 5}'}
    settings = load_settings(environ=environ)
    assert settings.engine.device == "cpu"
    assert settings.server.port == 5


# An experiment's fields mean nothing one by one.
SINGLE_PATHS = [path for path in setting_paths() if path[0] != "experiments"]


def _needed_beside(path: tuple[str, ...], variable: str) -> dict[str, str]:
    """Return the variables without which this one means nothing, or may not be set."""
    if path[-1] == "checkpoint":  # a process of this machine in the place of a server
        return {"OUTRIDER_TIERS__NAME__URL": ""}
    if path == ("handoff", "small"):  # a server in the place of the model that is loaded
        return {"OUTRIDER_MODELS__SMALL": "none", "OUTRIDER_MODELS__LARGE": "m"}
    if path[-1].endswith("_revision"):  # of a model on the hub
        return {variable.removesuffix("_REVISION"): "owner/name"}
    if path == ("alerts", "url"):
        return {variable: "https://a", "OUTRIDER_ALERTS__SECRET": f"whsec_{'A' * 32}"}
    if path[0] == "checks" and path[-1] == "url":  # plain text reaches only this machine
        return {variable: "https://a"}
    if path == ("routing", "max_cost_usd"):
        return {"OUTRIDER_ROUTING__PRICES__LARGE__PROMPT": "1"}
    return {}


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", SINGLE_PATHS, ids=".".join)
def test_every_setting_can_come_from_the_environment(path: tuple[str, ...]) -> None:
    base = {
        "OUTRIDER_TIERS__NAME__URL": "http://x/v1",
        "OUTRIDER_CHARGES__NAME__COMPLETION": "1",
        "OUTRIDER_ALIASES__ALIAS__MODELS": "auto",
        "OUTRIDER_SLO__CLASSES__NAME": "{}",
        "OUTRIDER_SIGN_IN__URL": "https://gateway",
        "OUTRIDER_SIGN_IN__ISSUERS__NAME__URL": "https://idp",
        "OUTRIDER_SIGN_IN__ISSUERS__NAME__JWKS_URL": "https://idp/keys",
        "OUTRIDER_SIGN_IN__ISSUERS__NAME__AUDIENCE": "a",
        "OUTRIDER_SIGN_IN__ISSUERS__NAME__GRANTS__NAME__CLAIM": "c",
        "OUTRIDER_SIGN_IN__ISSUERS__NAME__GRANTS__NAME__VALUE": "v",
        "OUTRIDER_SIGN_IN__ISSUERS__NAME__GRANTS__NAME__MODELS": "m",
        "OUTRIDER_SIGN_IN__ISSUERS__NAME__GRANTS__NAME__TIERS": "t",
        # A check has one of the two, and an empty variable counts as none.
        "OUTRIDER_CHECKS__NAME__FUNCTION": "module:function" if path[-1] == "function" else "",
        "OUTRIDER_CHECKS__NAME__URL": "" if path[-1] == "function" else "http://localhost",
    }
    if path[0] == "aliases":  # a tier has the usual name, and no alias may share it
        path = ("aliases", "ALIAS", *path[2:])
    variable = f"OUTRIDER_{'__'.join(path).upper()}"
    value = setting_of(load_settings(environ=base), path)
    match value:
        case None:
            words = {
                **{"tier": "name", "small": "name", "model": "m", "api_key_env": "KEY"},
                **{"unknown_fields": "pass", "continue_on_failure": "True", "continues": "True"},
                "content": "True",
                "secret": f"whsec_{'A' * 32}",
                **dict.fromkeys(("kv_events", "kv_events_replay"), "tcp://127.0.0.1:5557"),
                **{"preset": "groq", "sign_in": "key", "reveals": "tiers"},
                "prefer": "price",
            }
            text = words.get(path[-1], "1")
        case dict():
            text = '{"x-a": "b"}'
        case tuple():
            text = ",".join(map(str, value)) or ("1" if path[-1] == "weights" else "")
        case _:
            text = str(value)
    environ = base | {variable: text}
    environ |= _needed_beside(path, variable)
    text = environ[variable]
    found = setting_of(load_settings(environ=environ), path)
    if isinstance(found, SecretStr):
        found = found.get_secret_value()
    assert str(found) in (str(value), text, "1.0", "(1.0,)") or found == {"x-a": "b"}


def test_an_experiment_can_come_from_file_and_environment(empty_folder: Path) -> None:
    write(
        empty_folder,
        """
        [experiments.drafts]
        unit = "user"
        arms.control = {weight = 1}
        arms.wide = {weight = 1, set = {max_draft_nodes = 64}}
        """,
    )
    wanted = {"arms": {"a": {}, "b": {"set": {"speculation": "off"}}}, "control": "a"}
    environ = {"OUTRIDER_EXPERIMENTS__PLAIN": json.dumps(wanted)}
    experiments = load_settings(environ=environ).experiments
    assert set(experiments) == {"drafts", "plain"}
    assert experiments["drafts"].overlay("wide").document() == {"max_draft_nodes": 64}
    assert experiments["plain"].overlay("b").document() == {"speculation": "off"}


def setting_of(settings: object, path: tuple[str, ...]) -> object:
    for part in path:
        by_name = settings.get(part.lower()) if isinstance(settings, dict) else None
        settings = getattr(settings, part) if by_name is None else by_name
    return settings


def test_a_wrong_value_names_itself_its_source_and_what_it_may_be(empty_folder: Path) -> None:
    environ = {"OUTRIDER_ENGINE__DEVICE": "gpu"}
    assert complaint(environ=environ) == (
        "engine.device (environment variable OUTRIDER_ENGINE__DEVICE) = 'gpu': "
        "input should be 'auto', 'cpu' or 'cuda'"
    )
    assert complaint(flags={"speculation.enabled": "maybe"}).startswith(
        "speculation.enabled (flag --speculation) = 'maybe': "
    )
    assert complaint(flags={"engine.max_waiting": -1}).startswith(
        "engine.max_waiting (flag --set engine.max_waiting) = -1: "
    )
    assert complaint(flags={"server.port": 99999}) == (
        "server.port (flag --port) = 99999: input should be less than or equal to 65535"
    )
    path = write(empty_folder, "[engine]\nblock_size = 0")
    assert complaint(config_file=path) == (
        f"engine.block_size (file {path}) = 0: input should be greater than or equal to 1"
    )


def test_a_list_in_a_file_a_variable_and_a_flag(empty_folder: Path) -> None:
    write(empty_folder, "[speculation]\nsources = ['suffix', 'model']")
    assert load_settings(environ={}).speculation.sources == ("suffix", "model")
    environ = {"OUTRIDER_SPECULATION__SOURCES": "model, prediction"}
    assert load_settings(environ=environ).speculation.sources == ("model", "prediction")
    flags = {"speculation.sources": "grammar"}
    assert load_settings(environ=environ, flags=flags).speculation.sources == ("grammar",)
    message = complaint(environ={"OUTRIDER_SPECULATION__SOURCES": "model,ngram"})
    assert message == (
        "speculation.sources.1 (environment variable OUTRIDER_SPECULATION__SOURCES) = 'ngram': "
        "input should be 'model', 'suffix', 'prediction', 'grammar' or 'head'"
    )


def test_the_winning_source_is_blamed(empty_folder: Path) -> None:
    write(empty_folder, "[server]\nport = 1")
    message = complaint(environ={"OUTRIDER_SERVER__PORT": "x"})
    assert "OUTRIDER_SERVER__PORT" in message
    assert "outrider.toml" not in message


def test_all_mistakes_are_told_at_once(empty_folder: Path) -> None:
    write(empty_folder, "[server]\nport = -1\n[engine]\ndevice = 'tpu'")
    assert len(complaint().splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[engine]\nnum_threds = 2", "engine.num_threds (file {path}) is not a setting; did you "),
        ("[engine]\nnum_threds = 2", "did you mean num_threads?"),
        ("[engin]\ndevice = 'cpu'", "engin (file {path}) is not a setting; did you mean engine?"),
        ("large = 'x'", "large (file {path}) is not a setting; did you mean models.large?"),
        ("[server]\nzzz = 1", "available: host, port, drain_timeout_s, access_log"),
        (
            "engine = 5",
            "engine (file {path}) = 5: it is a section; write [engine] and the settings",
        ),
    ],
)
def test_an_unknown_key_in_the_file_is_refused(
    empty_folder: Path, text: str, expected: str
) -> None:
    path = write(empty_folder, text)
    assert expected.format(path=path) in complaint(config_file=path)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OUTRIDER_ENGINE__DEVCE", "OUTRIDER_ENGINE__DEVICE"),
        ("OUTRIDER_SERVER_PORT", "OUTRIDER_SERVER__PORT"),
    ],
)
def test_an_unknown_variable_is_refused(name: str, meant: str) -> None:
    message = complaint(environ={name: "1"})
    assert message == f"environment variable {name} is not a setting; did you mean {meant}?"


def test_other_peoples_variables_are_left_alone() -> None:
    load_settings(environ={"OUTRIDER_URL": "http://x", "OUTRIDER_DATA": "/data", "PORT": "x"})
    load_settings(environ={"OUTRIDER_KERNELS": "reference", "OUTRIDER_CPU": "avx2"})


def test_unreadable_settings_files_are_reported(empty_folder: Path) -> None:
    missing = empty_folder / "missing.toml"
    assert complaint(config_file=missing) == (
        f"file {missing} cannot be read: No such file or directory"
    )
    broken = write(empty_folder, "[engine")
    assert f"file {broken} is not valid TOML: " in complaint(config_file=broken)
    message = complaint(environ={"OUTRIDER_ENGINE": "{"})
    assert message.startswith("environment variable OUTRIDER_ENGINE is not valid JSON: ")


def test_settings_that_exclude_each_other() -> None:
    message = complaint(flags={"engine.kv_cache_gib": 1, "engine.num_blocks": 5})
    assert message == "engine: kv_cache_gib and num_blocks exclude each other; set one of them"
    message = complaint(flags={"models.large": "none", "models.small": "none"})
    assert message == (
        "models: both tiers are switched off; name a model for one of them, or an upstream server "
        "(--tier cloud=https://host/v1)"
    )


def test_targets_of_routing_exclude_each_other() -> None:
    message = complaint(flags={"routing.strong_share": 0.3, "routing.quality": 0.9})
    assert message == "routing: strong_share and quality exclude each other; set one of them"
    message = complaint(flags={"routing.max_cost_usd": 0.01})
    assert "routing.prices.small" in message
    for by_hand in ("threshold", "band_low", "band_high"):
        message = complaint(flags={f"routing.{by_hand}": 0.5, "routing.autopilot": True})
        assert "set strong_share instead" in message
    message = complaint(flags={"routing.band_low": 0.8, "routing.band_high": 0.25})
    assert message == "routing: band_low=0.8 is above band_high=0.25"
    for tokens in (0, 513):
        assert "hold_back_tokens" in complaint(flags={"routing.hold_back_tokens": tokens})


def test_prices_are_sections_in_a_section(empty_folder: Path) -> None:
    path = write(
        empty_folder,
        """
        [routing]
        max_cost_usd = 0.001
        [routing.prices.large]
        prompt = 1.5
        """,
    )
    environ = {"OUTRIDER_ROUTING__PRICES__LARGE__COMPLETION": "6"}
    flags = {"routing.prices.small.prompt": 0.25}
    settings = load_settings(environ=environ, flags=flags)
    prices = settings.routing.prices
    assert (prices.large.prompt, prices.large.completion) == (1.5, 6.0)
    assert (prices.small.prompt, prices.small.cached_prompt) == (0.25, None)
    assert load_settings(environ={}, config_file=write(empty_folder, to_toml(settings), "x"))
    environ = {"OUTRIDER_ROUTING__PRICES__SMALL": '{"prompt": 2}'}
    assert load_settings(environ=environ).routing.prices.small.prompt == 2.0
    message = complaint(flags={"routing.prices.small.prompt": -1})
    assert message == (
        "routing.prices.small.prompt (flag --set routing.prices.small.prompt) = -1: "
        "input should be greater than or equal to 0"
    )
    write(empty_folder, "[routing.prices.smal]\nprompt = 1")
    assert f"routing.prices.smal (file {path.name}) is not a setting; did you mean small?" in (
        complaint()
    )
    write(empty_folder, "[routing]\nprices = 5")
    assert "write [routing.prices] and the settings below it" in complaint()
    message = complaint(environ={"OUTRIDER_ROUTING__PRICES__SMALL": "{"})
    assert message.startswith("environment variable OUTRIDER_ROUTING__PRICES__SMALL is not valid")


# Tiers elsewhere.

TIER = {"tiers.cloud.url": "https://cloud.example/v1"}


LONG_PROMPTS = (
    '[{"above": 100, "prompt": 2, "completion": 3}, {"above": 9000, "prompt": 2, "completion": 4}]'
)


@pytest.mark.parametrize("section", ["tiers.cloud.price", "charges.large"])
def test_prices_of_long_prompts_in_a_file_a_variable_and_a_flag(
    empty_folder: Path, section: str
) -> None:
    name = f"{section}.long_prompts"
    variable = f"OUTRIDER_{name.upper().replace('.', '__')}"
    url = {"tiers.cloud.url": "http://127.0.0.1:1/v1"}
    by_flag = load_settings(flags={**url, name: LONG_PROMPTS}, environ={})
    by_variable = load_settings(flags=url, environ={variable: LONG_PROMPTS})
    tables = "".join(
        f"[[{name}]]\n" + "\n".join(f"{key} = {value}" for key, value in table.items()) + "\n"
        for table in json.loads(LONG_PROMPTS)
    )
    by_file = load_settings(config_file=write(empty_folder, tables), flags=url, environ={})
    again = load_settings(
        config_file=write(empty_folder, to_toml(by_flag), "again.toml"), environ={}
    )
    assert by_flag == by_variable == by_file == again
    price = by_flag.tiers["cloud"].price if "tiers" in section else by_flag.charges["large"]
    assert [price.at(length).completion for length in (100, 101, 9000, 9001)] == [0, 3, 3, 4]
    assert price.at(9001).cached == 2


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("dear", "it is no JSON; write .*above"),
        (
            [{"above": 9, "prompt": 3}],
            "completion=0.0 of the table with above=9 must be at least 4.0",
        ),
        ([{"above": 9, "prompt": 1, "completion": 4}], "prompt=1.0 .* must be at least 3.0"),
        (
            [{"above": 9, "prompt": 3, "cached_prompt": 1, "completion": 4}],
            "cached_prompt=1.0 .* must be at least 2.0: thresholds rise, and no price falls",
        ),
        ([{"above": n, "prompt": 3, "completion": 4} for n in (9, 9)], "above=9 .* least 10:"),
        ([{"prompt": 3, "completion": 4}], r"long_prompts\.0\.above is missing"),
        ([{"above": 0, "prompt": 3, "completion": 4}], "above .* greater than or equal to 1"),
        ([{"above": 9, "image": 3}], "image .* is not a setting"),
    ],
)
def test_wrong_prices_of_long_prompts_are_refused(tables: object, expected: str) -> None:
    price = {"prompt": 3, "cached_prompt": 2, "completion": 4, "long_prompts": tables}
    told = complaint(flags={f"charges.large.{name}": value for name, value in price.items()})
    assert re.search(rf"^charges\.large.*{expected}", told), told


def test_a_tier_in_a_file_variables_and_flags(empty_folder: Path) -> None:
    write(
        empty_folder,
        """
        [tiers.cloud]
        url = "https://file.example/v1/"
        server = "vllm"
        headers = { x-team = "blue" }
        supports = ["tools"]
        [tiers.cloud.timeouts]
        connect_s = 2
        [tiers.spare]
        url = ["http://a.example/v1", "http://b.example:81/v1"]
        """,
    )
    environ = {
        "OUTRIDER_TIERS__CLOUD__API_KEY_ENV": "CLOUD_KEY",
        "OUTRIDER_TIERS__CLOUD__PRICE__COMPLETION": "6",
        "OUTRIDER_TIERS__SPARE__URL": "http://c.example/v1, http://d.example/v1",
        "OUTRIDER_HANDOFF__MAX_QUEUE_MS": "250",
    }
    flags = {
        "tiers.cloud.model": "big-1",
        "tiers.cloud.headers.x-more": "1",
        "tiers.cloud.supports": "tools,images",
        "handoff.tier": "spare",
    }
    settings = load_settings(environ=environ, flags=flags)
    assert list(settings.tiers) == ["cloud", "spare"], "the order of the file"
    cloud = settings.tiers["cloud"]
    assert cloud.url == ("https://file.example/v1",)
    assert (cloud.server, cloud.model, cloud.api_key_env) == ("vllm", "big-1", "CLOUD_KEY")
    assert cloud.headers == {"x-team": "blue", "x-more": "1"}
    assert cloud.supports == ("tools", "images")
    assert (cloud.timeouts.connect_s, cloud.timeouts.total_s) == (2.0, 600.0)
    assert cloud.price.completion == 6.0
    assert settings.tiers["spare"].url == ("http://c.example/v1", "http://d.example/v1")
    assert settings.handoff.tier == "spare"
    assert settings.handoff.max_queue_ms == 250.0
    copy = write(empty_folder, to_toml(settings), "copy.toml")
    assert load_settings(environ={}, config_file=copy) == settings


def test_a_whole_tier_in_one_variable() -> None:
    environ = {"OUTRIDER_TIERS": '{"cloud": {"url": "http://a/v1"}}'}
    assert load_settings(environ=environ).tiers["cloud"].url == ("http://a/v1",)
    environ = {"OUTRIDER_TIERS__CLOUD": '{"url": ["http://a/v1", "http://b/v1"]}'}
    assert load_settings(environ=environ).tiers["cloud"].url == ("http://a/v1", "http://b/v1")
    environ = {"OUTRIDER_TIERS__CLOUD": "{", **environ}
    assert load_settings(environ=environ).tiers
    message = complaint(environ={"OUTRIDER_TIERS__CLOUD": "{"})
    assert "write [tiers.cloud] and the settings below it" in message
    message = complaint(
        environ={"OUTRIDER_TIERS__CLOUD__URL": "http://a", "OUTRIDER_TIERS__CLOUD__HEADERS": "{"}
    )
    assert message.startswith("environment variable OUTRIDER_TIERS__CLOUD__HEADERS is not valid J")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"tiers.cloud.urll": "http://x"},
            "tiers.cloud.urll (flag --set tiers.cloud.urll) is not a setting; did you mean url?",
        ),
        ({"tiers.cloud.model": "x"}, "tiers.cloud.url is missing; write it below [tiers.cloud]"),
        ({"tiers.url": "http://x"}, "it is a section; write [tiers.url] and the settings below it"),
        ({"tiers": 5}, "tiers (flag --set tiers) = 5: it is a section; write [tiers]"),
        ({"tiers": 5, **TIER}, "--set tiers contradicts it"),
        (
            {**TIER, "tiers.cloud.timeouts.conect_s": 1},
            "tiers.cloud.timeouts.conect_s (flag --set tiers.cloud.timeouts.conect_s) is not a "
            "setting; did you mean connect_s?",
        ),
        (
            {**TIER, "tiers.cloud.server": "vlm"},
            "tiers.cloud.server (flag --set tiers.cloud.server) = 'vlm': input should be 'openai'",
        ),
        ({**TIER, "tiers.cloud.timeouts.total_s": 0}, "= 0: input should be greater than 0"),
        ({**TIER, "tiers.cloud.supports": "video"}, "tiers.cloud.supports.0 (flag --set tiers.clo"),
        ({**TIER, "tiers.cloud.api_key_env": "sk-12 3"}, "tiers.cloud.api_key_env (flag"),
        ({"tiers.auto.url": "http://x"}, "tiers.auto: auto is a reserved name"),
        ({"tiers.Cloud.url": "http://x"}, "tiers.Cloud: a name is 1 to 32 lower-case letters"),
        (
            {**TIER, "handoff.tier": "clod"},
            "handoff.tier (flag --set handoff.tier) = 'clod': unknown upstream tier; did "
            "you mean cloud?",
        ),
        ({"mirror.tier": "cloud"}, "unknown upstream tier; available: none"),
        ({**TIER, "mirror.share": 0.1}, "mirror.share (flag --set mirror.share) = 0.1: name the t"),
        ({"handoff.policy": "cloud_only"}, "= 'cloud_only': there is no upstream tier"),
        ({"handoff.strong": "cloud"}, "= 'cloud': there is no upstream tier"),
    ],
)
def test_a_wrong_tier_is_told(flags: dict[str, object], expected: str) -> None:
    assert expected in complaint(flags=flags)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("cloud.example/v1", "'cloud.example/v1' is not a URL; write it like https://host/v1"),
        ("ftp://cloud.example", "is not a URL"),
        ("http://cloud.example/v 1", "is not a URL"),
        ("http://cloud.example:99999/v1", "has an invalid port; use 0 to 65535"),
        ("http://cloud.example/v1?key=secret", "set api_key_env for a key"),
        ("http://a/v1,http://a/v1/", "http://a/v1 is listed twice"),
        ("", "at least 1 item"),
    ],
)
def test_a_url_that_is_none(url: str, expected: str) -> None:
    message = complaint(flags={"tiers.cloud.url": url})
    assert message.startswith("tiers.cloud.url")
    assert "flag --set tiers.cloud.url" in message
    assert expected in message


def test_secrets_are_not_repeated() -> None:
    url = "http://me:hunter2@cloud.example/v1"
    assert "hunter2" not in complaint(flags={"tiers.cloud.url": url})
    message = complaint(flags={**TIER, "tiers.cloud.headers": {"x-key": "hunter2\r\nhost: x"}})
    assert "the value of x-key has characters that HTTP cannot carry" in message
    assert "hunter2" not in message
    message = complaint(flags={**TIER, "tiers.cloud.headers": {"x key": "hunter2"}})
    assert "'x key' is not an HTTP header name" in message
    for name in ("Content-Length", "host", "Transfer-Encoding"):
        message = complaint(flags={**TIER, f"tiers.cloud.headers.{name}": "1"})
        assert f"the gateway sets {name} itself" in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OUTRIDER_TIERS__CLOUD__APIKEY_ENV", "OUTRIDER_TIERS__CLOUD__API_KEY_ENV"),
        ("OUTRIDER_TIERS__CLOUD__PRICE__PROMT", "OUTRIDER_TIERS__CLOUD__PRICE__PROMPT"),
        ("OUTRIDER_HANDOFF__POLCY", "OUTRIDER_HANDOFF__POLICY"),
    ],
)
def test_an_unknown_variable_of_a_tier_is_refused(name: str, meant: str) -> None:
    message = complaint(environ={name: "1"})
    assert message == f"environment variable {name} is not a setting; did you mean {meant}?"


def test_no_local_model_is_needed_with_an_upstream_tier() -> None:
    none = {"models.large": "none", "models.small": "none"}
    settings = load_settings(environ={}, flags=none | TIER)
    assert settings.models.resolved() == {"large": None, "small": None}
    assert settings.models.resolved_router() is None
    assert not settings.models.is_any
    for policy in ("local_only", "prefer_local"):
        message = complaint(flags=none | TIER | {"handoff.policy": policy})
        assert message == (
            f"handoff.policy (flag --set handoff.policy) = '{policy}': no model is loaded on this "
            "machine"
        )


def test_contradicting_settings_are_refused_at_the_start() -> None:
    flags = {"handoff.tier": "a", "mirror.tier": "b", "tiers.none.url": "http://x"}
    assert len(complaint(flags=flags).splitlines()) == 3


def test_the_file_of_defaults_shows_a_tier(empty_folder: Path) -> None:
    text = to_toml(Settings())
    assert "#[tiers.cloud]" in text
    assert '#url = ["https://host/v1"]' in text
    assert "#api_key_env =" in text
    assert "#[tiers.cloud.timeouts]" in text
    assert "[handoff]" in text.splitlines()
    assert "[mirror]" in text.splitlines()
    assert load_settings(environ={}, config_file=write(empty_folder, text)) == Settings()
    example = [line for line in text.splitlines() if line.startswith("#") and line[1:2] != " "]
    wanted = [line[1:] for line in example if not line.endswith(" =")]
    shown = write(empty_folder, "\n".join(wanted), "shown.toml")
    tier = load_settings(environ={}, config_file=shown).tiers["cloud"]
    assert tier.url == ("https://host/v1",)


def test_the_bundled_pair_is_the_default() -> None:
    models = load_settings(environ={}).models
    assert models.resolved() == {
        "large": str(bundled_pair() / "large"),
        "small": str(bundled_pair() / "small"),
    }


@pytest.mark.parametrize(
    ("large", "small", "expected"),
    [
        ("L", "S", {"large": "L", "small": "S"}),
        ("L", None, {"large": "L", "small": None}),
        (None, "S", {"large": None, "small": "S"}),
        ("L", "none", {"large": "L", "small": None}),
    ],
)
def test_own_models_do_not_mix_with_the_bundled_ones(
    large: str | None, small: str | None, expected: dict[str, str | None]
) -> None:
    models = load_settings(environ={}, flags={"models.large": large, "models.small": small}).models
    assert models.resolved() == expected
    assert models.resolved_router() is None


def test_one_tier_of_the_bundled_pair() -> None:
    models = load_settings(environ={}, flags={"models.large": "none"}).models
    assert models.resolved() == {"large": None, "small": str(bundled_pair() / "small")}
    assert models.resolved_router() == bundled_pair() / "router", "for a large model elsewhere"


def test_no_toy_stands_in_for_a_tier_that_nobody_named() -> None:
    cloud = {"tiers.cloud.url": "https://host/v1"}
    for named in ({}, {"models.large": "none"}):
        assert not load_settings(environ={}, flags={**cloud, **named}).models.is_any
    models = load_settings(environ={}, flags={**cloud, "models.small": "demo"}).models
    assert models.resolved() == {"large": None, "small": str(bundled_pair() / "small")}
    assert models.resolved_router() == bundled_pair() / "router"
    models = load_settings(environ={}, flags={**cloud, "models.small": "own"}).models
    assert models.resolved() == {"large": None, "small": "own"}


def test_the_written_file_says_the_same(empty_folder: Path) -> None:
    settings = load_settings(
        environ={},
        flags={"server.port": 9, "models.large": 'C:\\a "b"', "speculation.enabled": "false"},
    )
    path = write(empty_folder, to_toml(settings), "copy.toml")
    assert load_settings(environ={}, config_file=path) == settings


def test_a_tier_without_prices_is_not_written_as_a_free_one(empty_folder: Path) -> None:
    tiers = {"tiers.gpu.url": "http://a/v1", "tiers.own.url": "http://b/v1"}
    settings = load_settings(environ={}, flags={**tiers, "tiers.own.price.prompt": 0})
    path = write(empty_folder, to_toml(settings), "copy.toml")
    again = load_settings(environ={}, config_file=path)
    assert again == settings
    assert [again.tiers[name].has_price for name in ("gpu", "own")] == [False, True]


def test_the_tree_is_frozen() -> None:
    settings = load_settings(environ={})
    with pytest.raises(ValidationError, match="frozen"):
        settings.log_level = "DEBUG"
    with pytest.raises(ValidationError, match="frozen"):
        settings.engine.device = "cpu"


def test_the_engine_process_gets_the_settings_whatever_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = load_settings(environ={}, flags={"server.port": 5}).model_dump_json()
    monkeypatch.setenv("OUTRIDER_SERVER__PORT", "6")
    assert Settings.model_validate_json(sent).server.port == 5


def test_defaults_are_those_of_the_parts() -> None:
    settings = load_settings(environ={})
    engine, speculation = settings.engine, settings.speculation
    assert engine.max_sequences == EngineConfig().max_sequences
    assert engine.max_waiting == EngineConfig().max_waiting
    assert engine.max_tokens_per_step == EngineConfig().max_tokens_per_step
    assert speculation.max_draft_nodes == DraftConfig().max_draft_nodes
    assert speculation.max_draft_depth == DraftConfig().max_draft_depth
    assert speculation.max_text_depth == DraftConfig().max_text_depth
    assert speculation.max_frontier == DraftConfig().max_frontier
    assert speculation.max_branching == DraftConfig().max_branching
    assert speculation.sources == DraftConfig().sources
    routing, cascade = settings.routing, WatchOptions()
    assert routing.cascade == cascade.mode
    assert routing.hold_back_tokens == cascade.hold_back_tokens
    assert routing.hold_back_ms / 1000 == cascade.hold_back_s
    assert routing.judge_whole == cascade.judge_whole
    assert routing.mid_stream == cascade.mid_stream


_TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


@given(st.dictionaries(_TEXTS, st.lists(_TEXTS | st.booleans() | st.integers(-99, 99), max_size=3)))
@example({"stop": ["\n\n", "\x00", "\x7f", '"\\', "\u2028"]})
def test_every_value_is_written_so_that_it_can_be_read(value: dict[str, list[object]]) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}") == {"value": value}
