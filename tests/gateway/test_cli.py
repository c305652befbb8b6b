"""The commands, without models: help, settings, errors, and chats with a scripted gateway."""

import io
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

from benchmarks.shared.mock_upstream import MockScript
from benchmarks.shared.toxics import Toxic
from outrider.engine.events import EngineInfo
from outrider.gateway.cli import app, main
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tenancy.keys.keys import mint_key
from outrider.gateway.tools.commands.chat_options import ChatOptions
from outrider.gateway.tools.commands.terminal import (
    DRAFTED_STYLE,
    LoadingProgress,
    print_banner,
    print_whole,
    token_text,
)
from outrider.gateway.tools.commands.terminal_chat import ChatAnswer
from tests.gateway.conftest import OpenWorld, Server
from tests.gateway.hybrid import LOCAL_TEXT, World

runner = CliRunner()


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def invoke(*arguments: str, **options: Any) -> Result:
    return runner.invoke(app, list(arguments), **options)


def test_help_names_the_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("serve", "chat", "doctor", "config", "router"):
        assert command in result.output


def test_serve_help_has_examples_and_every_flag() -> None:
    result = invoke("serve", "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "outrider serve --large" in result.output
    for flag in ("--config", "--large", "--small", "--device", "--dtype", "--host", "--port"):
        assert flag in result.output
    assert "--tier cloud=https://host/v1" in result.output


def test_the_entry_point_is_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["outrider", "config", "show"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0


def test_config_show_prints_no_secret() -> None:
    secrets = {
        "OUTRIDER_DATABASE_URL": "postgresql://me:p@ss:w0rd1@db/x?sslpassword=w0rd2&sslmode=require",
        "OUTRIDER_REDIS_URL": "redis://:w0rd3@cache:6379/0",
        "OUTRIDER_KEYS__ADMIN_TOKEN": "w0rd4-" + "k3Jx9" * 8,
        "OUTRIDER_TIERS__CLOUD__URL": "https://host/v1",
        "OUTRIDER_TIERS__CLOUD__HEADERS": '{"x-team": "w0rd5", "x-other": "w0rd6"}',
    }
    shown = invoke("config", "show", env=secrets).output
    assert "w0rd" not in shown
    assert 'database_url = "postgresql://me:**********@db/x?sslpassword=**********&sslmode' in shown
    assert 'redis_url = "redis://:**********@cache:6379/0"' in shown
    assert '"x-team" = "**********"' in shown
    assert "postgresql://USER:PASSWORD@HOST/NAME" in shown  # the comment


def test_config_show_prints_what_is_in_effect() -> None:
    result = invoke("config", "show", env={"OUTRIDER_SERVER__PORT": "4711"})
    assert result.exit_code == 0
    assert "port = 4711" in result.output


def test_config_init_writes_a_file_once(empty_folder: Path) -> None:
    assert invoke("config", "init").exit_code == 0
    written = (empty_folder / "outrider.toml").read_text()
    assert "# Port to listen on; 0 for any free one.\nport = 8000" in written
    again = invoke("config", "init")
    assert again.exit_code == 2
    assert "outrider.toml exists already" in again.output
    assert invoke("config", "show").exit_code == 0, "the written file is a valid one"
    assert "#[tiers.cloud]" in written


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "--device", "gpu"), "engine.device (flag --device) = 'gpu'"),
        (("serve", "--set", "engine.devise=cpu"), "did you mean device?"),
        (("serve", "--set", "engine.device"), "write it as --set section.name=value"),
        (("serve", "--config", "no.toml"), "file no.toml cannot be read"),
        (("doctor", "--port", "-1"), "server.port (flag --port) = -1"),
        (("serve", "--tier", "cloud"), "write it as --tier cloud=https://host/v1"),
        (("serve", "--tier", "a.b=http://x"), "write it as --tier cloud=https://host/v1"),
        (("serve", "--tier", "=http://x"), "write it as --tier cloud=https://host/v1"),
        (("serve", "--tier", "cloud=x"), "'x' is not a URL; write it like https://host/v1"),
        (("serve", "--tier", "auto=http://x"), "tiers.auto: auto is a reserved name"),
        (("doctor", "--tier", "cloud=x"), "'x' is not a URL; write it like https://host/v1"),
        (("serve", "--large", "none", "--small", "none"), "(--tier cloud=https://host/v1)"),
    ],
)
def test_a_wrong_setting_ends_with_a_sentence_and_status_2(
    arguments: tuple[str, ...], expected: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert "Traceback" not in result.output


def test_the_version_names_what_answers() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.startswith("outrider 0.")
    assert "torch" in result.output


def test_the_version_of_a_base_installation_is_without_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version_of(name: str) -> str:
        if name in ("torch", "transformers"):
            raise PackageNotFoundError(name)
        return "0.1.0"

    monkeypatch.setattr("importlib.metadata.version", version_of)
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"outrider 0\.1\.0 \(Python [\d.]+\)\n", result.output)


@pytest.mark.slow
def test_a_port_in_use_is_said_before_anything_is_loaded(taken_port: int) -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules));"
        "from outrider.gateway.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", "--port", str(taken_port)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not {"fastapi", "sqlalchemy", "transformers"} & set(done.stdout.split())
    result = invoke("serve", "--port", str(taken_port), "--set", "engine.process=false")
    assert result.exit_code == done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {taken_port}: address already in use" in result.output
    assert "--port" in result.output


def test_a_tier_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("outrider.gateway.tools.commands.serve_command._serve", served.append)
    result = invoke(
        *("serve", "--large", "none", "--small", "none"),
        *(
            "--tier",
            "gpu=http://a/v1",
            "--tier",
            "cloud=https://c/v1/",
            "--tier",
            "gpu=http://b/v1",
        ),
        *("--set", "tiers.cloud.api_key_env=KEY", "--set", "tiers.gpu.server=vllm"),
        env={"OUTRIDER_TIERS__GPU__URL": "http://other/v1"},
    )
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert settings.tiers["gpu"].url == ("http://a/v1", "http://b/v1")
    assert settings.tiers["gpu"].server == "vllm"
    assert settings.tiers["cloud"].url == ("https://c/v1",)
    assert settings.tiers["cloud"].api_key_env == "KEY"
    assert settings.models.resolved() == {"large": None, "small": None}


def test_revisions_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("outrider.gateway.tools.commands.serve_command._serve", served.append)
    names = ("large", "small", "drafter")
    flags = [(f"--{name}", "a/b", f"--{name}-revision", name) for name in names]
    result = invoke("serve", *(word for words in flags for word in words))
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert [getattr(settings.models, f"{name}_revision") for name in names] == list(names)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of the gateways that were started."""
    started: list[Settings] = []
    monkeypatch.setattr("outrider.gateway.tools.commands.serve_command._serve", started.append)
    return started


@pytest.mark.parametrize(
    "flags",
    [
        ("a/b",),
        ("--model", "a/b"),
        ("-m", "a/b"),
        ("--model-path=a/b",),
        ("a/b", "--model", "a/b"),
        ("--large", "a/b", "--small", "none"),
    ],
)
def test_one_model_is_named_as_other_servers_do(
    served: list[Settings], flags: tuple[str, ...]
) -> None:
    assert invoke("serve", *flags).exit_code == 0
    (settings,) = served
    assert (settings.models.large, settings.models.small) == ("a/b", "none")


def test_a_small_model_stays_beside_the_one_that_is_named(served: list[Settings]) -> None:
    assert invoke("serve", "a/b", "--small", "c/d", "--revision", "v1").exit_code == 0
    assert (served[0].models.small, served[0].models.large_revision) == ("c/d", "v1")
    assert invoke("serve", "--large", "a/b").exit_code == 0
    assert served[1].models.small is None
    assert invoke("serve", "http://127.0.0.1:1/v1").exit_code == 0
    assert served[2].tiers["cloud"].url == ("http://127.0.0.1:1/v1",)
    for flags in (("a/b", "--large", "c/d"), ("a/b", "--revision", "1", "--large-revision", "2")):
        assert invoke("serve", *flags).exit_code == 2
    assert len(served) == 3


def test_flags_of_other_servers_that_mean_the_same(served: list[Settings]) -> None:
    result = invoke(
        *("serve", "a/b", "--max-model-len", "4096", "--max-num-seqs", "8", "-tp", "2"),
        *("--threads", "3", "--served-model-name", "gpt-3.5-turbo", "--alias", "mine"),
        *("--set", "aliases.other.models=large"),
    )
    assert result.exit_code == 0, result.output
    (settings,) = served
    engine = settings.engine
    assert (engine.max_context, engine.max_sequences) == (4096, 8)
    assert (engine.tensor_parallel, engine.num_threads) == (2, 3)
    assert settings.aliases["gpt-3.5-turbo"].models == settings.aliases["mine"].models == ("auto",)
    assert settings.aliases["other"].models == ("large",)
    for name in ("--context-length", "--ctx-size", "-c"):
        assert invoke("serve", name, "77").exit_code == 0
        assert served.pop().engine.max_context == 77


def test_flags_of_other_servers_that_change_nothing_are_told_of(served: list[Settings]) -> None:
    result = invoke(
        *("serve", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "a/b"),
        *("--gpu-memory-utilization=0.9", "--trust-remote-code", "--port", "9"),
    )
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert (settings.models.large, settings.server.port) == ("a/b", 9)
    told = result.stderr.splitlines()
    assert len(told) == 4
    assert told[0].startswith("outrider: --enable-auto-tool-choice is left out: ")
    assert "engine.kv_cache_gib" in result.stderr


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("-ngl", "99"), "--device cuda"),
        (("--quantization", "awq"), "--quantize int8"),
        (("--model-draft", "x"), "--small MODEL"),
        (("--ssl-keyfile=x",), "TLS in front"),
    ],
)
def test_flags_of_other_servers_that_would_mean_more_end_the_start(
    served: list[Settings], flags: tuple[str, ...], advice: str
) -> None:
    result = invoke("serve", "a/b", *flags, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert advice in result.output
    assert not served


def test_a_key_on_the_command_line_or_in_the_environment(served: list[Settings]) -> None:
    key = "a-secret-of-this-test"
    assert invoke("serve", "--api-key", key).exit_code == 0
    assert invoke("serve", env={"OUTRIDER_API_KEY": key}).exit_code == 0
    for settings in served:
        assert settings.keys.api_key is not None
        assert settings.keys.api_key.get_secret_value() == key
        assert key not in repr(settings)
    client = mint_key(random.Random(1)).text
    result = invoke("serve", env={"OUTRIDER_API_KEY": client})
    assert result.exit_code == 0
    assert "client's key" in result.stderr
    assert client not in result.output
    assert served[-1].keys.api_key is None
    assert invoke("serve", env={"OUTRIDER_API_KEY": "none"}).exit_code == 0
    assert served[-1].keys.api_key is None


def test_a_missing_key_ends_the_start() -> None:
    result = invoke(
        *("serve", "--port", "0", "--large", "none", "--small", "none"),
        *("--tier", "cloud=http://127.0.0.1:9/v1", "--set", "tiers.cloud.api_key_env=NO_SUCH_KEY"),
        *("--set", "engine.process=false"),
    )
    assert result.exit_code == 2, result.output
    assert "tiers.cloud.api_key_env = 'NO_SUCH_KEY'" in result.output
    assert "Traceback" not in result.output


def test_the_banner_names_upstream_tiers() -> None:
    settings = load_settings(
        environ={},
        flags={
            "models.large": "none",
            "models.small": "none",
            "tiers.gpu.url": "http://a/v1,http://b/v1",
            "tiers.gpu.server": "vllm",
            "tiers.gpu.model": "big-1",
        },
    )
    console = Console(record=True, file=io.StringIO(), width=200, highlight=False)
    info = EngineInfo(tiers={}, speculation=False)
    print_banner(console, "http://127.0.0.1:1", info, settings.tiers, names=("chat", "legal"))
    text = console.export_text()
    assert "gpu    big-1 at http://a/v1, http://b/v1 (vllm)" in text
    assert "Models: auto, gpu, chat, legal." in text
    assert "speculation" not in text


def test_chat_streams_an_answer_and_sums_it_up(server: Server) -> None:
    server.says("The quick brown fox jumps.", group=3)
    result = invoke("chat", "--url", server.url, "--model", "large", "Tell me.")
    assert result.exit_code == 0, result.output
    answer, summary = result.output.strip().split("\n")
    assert answer == "The quick brown fox jumps."
    assert re.match(r"large \(requested\) · ttft \d+ ms · .*\d+ drafted, \d+ accepted$", summary)


def test_chat_passes_its_options_on(server: Server) -> None:
    result = invoke(
        *("chat", "--url", server.url, "--temperature", "0.5", "--seed", "7"),
        *("--max-tokens", "9", "--no-speculation", "Tell me."),
    )
    assert result.exit_code == 0, result.output
    (request,) = server.engine.submitted
    assert request.sampling.temperature == 0.5
    assert request.sampling.seed == 7
    assert request.sampling.max_tokens == 9
    assert not request.speculation.enabled


def test_chat_finds_the_gateway_through_the_environment(server: Server) -> None:
    result = invoke("chat", "Hi", env={"OUTRIDER_URL": server.url})
    assert result.exit_code == 0, result.output
    assert "Hello there!" in result.output


def test_chat_tells_the_gateways_refusal(server: Server) -> None:
    result = invoke("chat", "--url", server.url, "--model", "gpt-9", "Hi")
    assert result.exit_code == 1
    assert "gpt-9" in result.output
    assert "404" in result.output
    assert "Traceback" not in result.output


def test_chat_reports_a_url_that_does_not_answer(taken_port: int) -> None:
    result = invoke("chat", "--url", "http://127.0.0.1:9", "Hi")
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:9" in result.output


def test_a_conversation_remembers_until_told_otherwise(server: Server) -> None:
    lines = "Hello\nAgain\n/new\nFresh\n/quit\n"
    result = invoke("chat", "--url", server.url, input=lines)
    assert result.exit_code == 0, result.output
    first, second, third = (len(request.prompt_token_ids) for request in server.engine.submitted)
    assert second > 2 * first, "the second turn carries the first"
    assert third <= first + 2


def test_a_conversation_ends_with_the_input_and_survives_errors(server: Server) -> None:
    result = invoke("chat", "--url", server.url, "--model", "gpt-9", input="Hi\n")
    assert result.exit_code == 0
    assert "gpt-9" in result.output


def test_chat_takes_the_address_as_openais_clients_do(server: Server) -> None:
    result = invoke("chat", "--url", f"{server.url}/v1/", "Hi")
    assert result.exit_code == 0, result.output
    assert "Hello there!" in result.output


# Tiers elsewhere.

Hybrid = Callable[[MockScript], AbstractContextManager[World]]


@pytest.fixture
def with_cloud(open_world: OpenWorld) -> Hybrid:
    """Makes a gateway with local models and an upstream tier that answers by a script."""
    price = {"prompt": 1.0, "completion": 2.0}
    return lambda script: open_world(clouds=(script,), tier={"price": price})


def test_chat_names_the_upstream_tier_and_its_cost(with_cloud: Hybrid) -> None:
    with with_cloud(MockScript(pieces=("From", " afar"), reasoning=("Hm,", " well."))) as world:
        named = invoke("chat", "--url", world.url, "--model", "cloud", "Hi")
        wanted = invoke("chat", "--url", world.url, "--policy", "prefer_cloud", "Hi")
    assert named.exit_code == 0, named.output
    thinking, answer, summary = named.output.strip().split("\n")
    assert (thinking, answer) == ("Hm, well.", "From afar")
    assert re.match(r"cloud \(requested\) · ttft \d+ ms · .*4 tokens · 0\.0000\d+ USD$", summary)
    assert "hand-off: policy" in wanted.output


def test_chat_says_when_an_answer_is_degraded(with_cloud: Hybrid) -> None:
    with with_cloud(MockScript(toxic=Toxic(kind="status"))) as world:
        result = invoke("chat", "--url", world.url, "--policy", "prefer_cloud", "Hi")
    assert result.exit_code == 0, result.output
    answer, summary, warning = result.output.strip().split("\n")
    assert answer == LOCAL_TEXT
    assert "hand-off: failure" in summary
    assert warning.startswith("degraded: ")


def test_chat_keeps_to_the_wishes(with_cloud: Hybrid) -> None:
    with with_cloud(MockScript(first_token_delay_s=5.0)) as world:
        private = invoke("chat", "--url", world.url, "--private", "--model", "cloud", "Hi")
        late = invoke("chat", "--url", world.url, "--deadline-ms", "50", "--model", "cloud", "Hi")
    assert private.exit_code == late.exit_code == 1
    assert "outrider.privacy" in private.output
    assert "deadline" in late.output
    assert invoke("chat", "--policy", "sometimes", "Hi").exit_code == 2


def test_an_answer_that_breaks_off_is_an_error_behind_its_beginning(with_cloud: Hybrid) -> None:
    script = MockScript(pieces=("One ", "two ", "three"), toxic=Toxic(kind="reset", after_events=2))
    with with_cloud(script) as world:
        result = invoke("chat", "--url", world.url, "--model", "cloud", "Hi")
    assert result.exit_code == 1
    answer, error = result.output.strip().split("\n")
    assert answer == "One two "
    assert error == "outrider: The cloud tier broke the connection off."


def test_drafted_tokens_have_their_colour() -> None:
    assert str(token_text("a", was_drafted=True).style) == DRAFTED_STYLE
    assert str(token_text("a", was_drafted=False).style) == ""


def test_the_rate_counts_from_the_first_token() -> None:
    answer = ChatAnswer(num_tokens=11, ttft_s=1.0, duration_s=3.0, report={"tier": "small"})
    assert answer.tokens_per_s == 5.0
    assert "small" in answer.summary()
    assert ChatAnswer(num_tokens=1, ttft_s=1.0, duration_s=1.0).tokens_per_s is None


def test_a_plain_request_has_no_extras() -> None:
    body = ChatOptions().body([{"role": "user", "content": "x"}])
    assert "outrider" not in body
    assert "seed" not in body
    assert body["stream_options"] == {"include_usage": True}


def test_progress_in_a_log_is_a_line_for_each_stage() -> None:
    console = Console(force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file, LoadingProgress(console) as progress:
        for fraction in (0.1, 0.5, 1.0):
            progress.report("loading the small model", fraction)
        progress.report("loading the large model", 1.0)
    lines = console.export_text().splitlines()
    assert lines == ["loading the small model ...", "loading the large model ..."]


def test_a_narrow_terminal_cuts_no_figure() -> None:
    table = Table(box=None)
    for title in ("key", "charged"):
        table.add_column(title)
    table.add_row("a key with a long name", "$1234.567891")
    console = Console(file=io.StringIO(), width=12, record=True)
    print_whole(console, table)
    told = console.export_text()
    assert "a key with a long name" in told
    assert "$1234.567891" in told


def test_the_address_of_serve_is_in_its_help() -> None:
    told = " ".join(invoke("serve", "--help", env={"COLUMNS": "200"}).output.split())
    assert "127.0.0.1 by default" in told
    assert "8000 by default" in told
