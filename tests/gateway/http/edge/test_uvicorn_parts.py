"""The parts of uvicorn that the gateway rests on: all are named, and there; of the newest, too.

To try another release: `pip install --target FOLDER uvicorn httptools`, then
`PYTHONPATH=FOLDER python -m pytest tests/gateway/http/edge`.
"""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.gateway.http.edge.uvicorn_parts import CONNECTION, SERVER, installed, lacking

ROOT = Path(__file__).parents[4]
CONNECTION_FILES = ("gateway/http/edge/protocol.py", "gateway/http/edge/cycle.py")
SERVER_FILE = "gateway/wiring/serving.py"
PARTS = {**SERVER, **CONNECTION}
CYCLE = "uvicorn.protocols.http.httptools_impl:RequestResponseCycle"
OWN = {
    "EdgeProtocol": "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol",
    "EdgeCycle": CYCLE,
}
# The objects of uvicorn by the names under which ours hold them.
HOLDERS = {
    "httptools": "httptools",
    "parser": "httptools:HttpRequestParser",
    "flow": "uvicorn.protocols.http.flow_control:FlowControl",
    "server_state": "uvicorn.server:ServerState",
    "cycle": CYCLE,
    "_running": CYCLE,
}
CHECK = """
from outrider.gateway.http.edge.connection_class import (
    SettingsError, check_uvicorn, connection_class
)
from outrider.gateway.settings.http_bounds import HttpSettings
stock = HttpSettings(edge=False)
check_uvicorn(stock)
print(connection_class(stock, None))
try:
    check_uvicorn(HttpSettings())
except SettingsError as error:
    print(error)
"""


def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def used_names(*files: str) -> set[str]:
    """Return the names of all attributes, functions, arguments and imports in files."""
    return {name for file in files for node in ast.walk(parsed(file)) for name in name_of(node)}


def name_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
            yield name
        case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name


def uses() -> Iterator[tuple[str, str]]:
    """Yield the place and name of each import, and of what connections ask of uvicorn's objects."""
    for file in CONNECTION_FILES:
        for node in ast.walk(parsed(file)):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module in CONNECTION:
                    yield from ((module, one.name) for one in names)
                case ast.Attribute(value=ast.Name(id=holder) | ast.Attribute(attr=holder)):
                    if holder in HOLDERS:
                        yield HOLDERS[holder], node.attr
                case ast.ClassDef(name=own) if own in OWN:
                    yield from ((OWN[own], name) for name in of_self(node))


def of_self(own: ast.ClassDef) -> Iterator[str]:
    """Yield the methods of a class of ours, and what it asks of `self` and `super()`."""
    for node in ast.walk(own):
        match node:
            case ast.Attribute(value=ast.Name(id="self") | ast.Call(func=ast.Name(id="super"))):
                yield node.attr
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name


@pytest.mark.parametrize("place", PARTS)
def test_the_installed_uvicorn_has_them(place: str) -> None:
    missing = lacking({place: PARTS[place]})
    assert not missing, (
        f"{installed()} has not: {', '.join(missing)}. Adapt gateway/http/edge and its list, or "
        "keep this release out by pyproject.toml."
    )


def test_all_that_connections_use_is_named() -> None:
    found = {(place, name) for place, name in uses() if not name.startswith("__")}
    theirs = {(place, name) for place, name in found if not lacking({place: (name,)})}
    assert len(theirs) > 50
    named = {(place, name) for place in PARTS for name in PARTS[place]}
    assert not theirs - named


def test_all_that_is_named_is_used() -> None:
    named = {name for names in PARTS.values() for name in names}
    assert not named - used_names(SERVER_FILE, *CONNECTION_FILES)


def test_no_other_file_imports_them() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gateway").rglob("*.py")
        if "from uvicorn" in path.read_text() or "httptools" in path.read_text()
    }
    assert found - set(CONNECTION_FILES) <= {
        "gateway/http/edge/uvicorn_parts.py",
        "gateway/http/edge/connection_class.py",
    }


def ask_with(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of a folder before the installed ones."""
    path = os.pathsep.join([str(folder), str(ROOT / ".ci/src")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("_start_asgi_task", "_begin_asgi_task", "HttpToolsProtocol._start_asgi_task"),
        ("waiting_for_100_continue", "waits", "RequestResponseCycle.waiting_for_100_continue"),
        ("class RequestResponseCycle", "class Cycle", "httptools_impl.RequestResponseCycle"),
    ],
)
def test_another_uvicorn_is_refused_and_may_serve_by_itself(
    tmp_path: Path, old: str, new: str, missing: str
) -> None:
    spec = importlib.util.find_spec("uvicorn")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "uvicorn")
    changed = tmp_path / "uvicorn/protocols/http/httptools_impl.py"
    changed.write_text(changed.read_text().replace(old, new))
    done = ask_with(tmp_path, "-c", CHECK)
    assert done.returncode == 0, done.stderr
    stock, refusal = done.stdout.splitlines()
    assert stock == "httptools"
    assert missing in refusal
    assert 'pip install "uvicorn<0.55", or set http.edge = false' in refusal


@pytest.mark.long
def test_the_newest_uvicorn_has_them(tmp_path: Path) -> None:
    """Install it beside, and run the tests of connections with it."""
    wanted = ["--target", str(tmp_path), "uvicorn", "httptools"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"pip could not install the newest uvicorn: {done.stderr.strip()[-300:]}")
    files = ("uvicorn_parts", "protocol", "cycle", "attacks")
    tests = [f"tests/gateway/http/edge/test_{name}.py" for name in files]
    done = ask_with(tmp_path, "-m", "pytest", "-q", "-m", "not long", *tests)
    assert done.returncode == 0, done.stdout
