"""Databases for tests: an own PostgreSQL and an own Redis, started when a test first asks.

They listen on the loopback interface, keep their files in a folder of their own, and end with the
tests. Where one is not installed its tests are skipped; with TEST_SERVICES=required they fail.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

_START_TIMEOUT_S = 120.0
_DEBIAN_POSTGRES = Path("/usr/lib/postgresql")
_POSTGRES_OPTIONS = {
    # Nothing has to outlive the machine: writing to disk would only make the tests slow.
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "100",
    "autovacuum": "off",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
}


@dataclass
class PostgresServer:
    """A running server; `host` is without user and database, HOST:PORT."""

    host: str
    _names: Iterator[int] = field(default_factory=count)
    _unused: list[str] = field(default_factory=list)

    def new_database(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        name = f"test_{next(self._names)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    @contextmanager
    def lent_database(self) -> Iterator[str]:
        """The URL of an empty database, which is emptied again: a new one costs 300 files."""
        import psycopg

        url = self._unused.pop() if self._unused else self.new_database()
        try:
            yield url
        finally:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
                )
                connection.execute("DROP SCHEMA public CASCADE")
                connection.execute("CREATE SCHEMA public")
            self._unused.append(url)

    def drop_connections(self) -> None:
        """Break off every connection to every database, as a server that is started again does."""
        import psycopg

        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    def _url(self, database: str) -> str:
        return f"postgresql://outrider:secret@{self.host}/{database}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server of these tests alone."""
    binaries = _postgres_binaries()
    if binaries is None:
        _missing("PostgreSQL")
    with _service_folder("postgres") as (folder, user):
        port = _free_port()
        data = str(folder / "data")
        setting_up = [str(binaries / "initdb"), "-D", data, "--no-sync", "--no-locale"]
        setting_up += ["--auth=trust", "--encoding=UTF8", "--username=outrider"]
        _run_once(setting_up, folder, user)
        command = [str(binaries / "postgres"), "-D", data, "-p", str(port)]
        for name, value in _POSTGRES_OPTIONS.items():
            command += ["-c", f"{name}={value}"]
        server = PostgresServer(f"127.0.0.1:{port}")
        # SIGQUIT: without writing down what is thrown away anyway.
        with _running(command, folder, user, lambda: _takes_questions(server), signal.SIGQUIT):
            yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty database on PostgreSQL."""
    with postgres_server.lent_database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database: the test runs once on each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    with server.lent_database() as url:
        yield url


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """A Redis server of these tests alone: its URL."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        _missing("Redis")
    with _service_folder("redis") as (folder, user):
        port = _free_port()
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(folder)]
        with _running(command, folder, user, lambda: _pings(port)):
            yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty Redis."""
    port = int(redis_server.rpartition(":")[2].partition("/")[0])
    assert _ask_redis(port, b"FLUSHALL\r\n").startswith(b"+OK")
    return redis_server


def _missing(name: str) -> None:
    """Skip, or fail where tests are to run on everything."""
    if os.environ.get("TEST_SERVICES") == "required":
        pytest.fail(f"{name} is not installed, and TEST_SERVICES=required")
    pytest.skip(f"{name} is not installed on this machine")


def _postgres_binaries() -> Path | None:
    """The folder of initdb and postgres; Debian does not put it on the path."""
    candidates = sorted(_DEBIAN_POSTGRES.glob("*/bin"), key=lambda path: path.parent.name)
    if found := shutil.which("initdb"):
        candidates.append(Path(found).resolve().parent)
    return next((path for path in reversed(candidates) if (path / "initdb").exists()), None)


@contextmanager
def _service_folder(name: str) -> Iterator[tuple[Path, str | None]]:
    """A folder for a server, and the user to run it as; None: ourselves.

    PostgreSQL refuses to run as root, and pytest's own folders are closed to other users.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"outrider-{name}-"))
    user = _other_user() if os.geteuid() == 0 else None
    try:
        if user is not None:
            shutil.chown(folder, user)
        yield folder, user
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _other_user() -> str:
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)


def _run_once(command: Sequence[str], folder: Path, user: str | None) -> None:
    done = subprocess.run(
        command, cwd=folder, user=user, capture_output=True, text=True, timeout=_START_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def _running(
    command: Sequence[str],
    folder: Path,
    user: str | None,
    is_up: Callable[[], bool],
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[None]:
    """Run a server until the end of the block."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, user=user, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not is_up():
            is_alive = process.poll() is None and time.monotonic() < deadline_s
            assert is_alive, f"{command[0]} did not start:\n{log.read_text(errors='replace')}"
            time.sleep(0.02)
        yield
    finally:
        process.send_signal(stop)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _takes_questions(server: PostgresServer) -> bool:
    import psycopg

    try:
        psycopg.connect(server._url("postgres"), connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _pings(port: int) -> bool:
    try:
        return _ask_redis(port, b"PING\r\n").startswith(b"+PONG")
    except OSError:
        return False


def _ask_redis(port: int, command: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(command)
        return connection.recv(64)
