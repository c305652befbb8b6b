"""A model hub on this machine: repositories whose revisions are folders, over HTTP."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """The routes that huggingface_hub asks for a model, of the folders in `revisions`.

    `paths`: what was asked for, in order.
    """

    revisions: Mapping[str, Mapping[str, Path]]  # by repository, then by branch or tag
    paths: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, repository: str, revision: str) -> str:
        """Return the full hash of a revision."""
        place = str(self.revisions[repository][revision])
        return hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest()

    def find(self, repository: str, revision: str) -> tuple[str, Path]:
        """Return commit and folder of a branch, a tag or a commit. Raises KeyError."""
        for name, folder in self.revisions[repository].items():
            if revision in (name, commit := self.commit(repository, name)):
                return commit, folder
        raise KeyError(revision)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: FakeHub, *arguments: Any) -> None:
        self._hub = hub
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self._hub.paths.append(path)
        parts = [unquote(part) for part in path.removeprefix("/api/models").split("/")[1:]]
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository not in self._hub.revisions:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        kind, revision, *file = rest or ["revision", "main"]
        try:
            commit, folder = self._hub.find(repository, revision)
        except KeyError:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        names = {str(each.relative_to(folder)): each for each in files}
        if kind == "resolve":
            return self._file(names.get("/".join(file)), commit)
        if kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _etag(file)}
                for name, file in names.items()
            ]
            return self._send(200, json.dumps(tree).encode())
        info = {"id": repository, "sha": commit, "siblings": [{"rfilename": n} for n in names]}
        return self._send(200, json.dumps(info).encode())

    def _file(self, file: Path | None, commit: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if file is None:
            return self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        return self._send(200, file.read_bytes(), headers | {"ETag": f'"{_etag(file)}"'})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serve_hub(revisions: Mapping[str, Mapping[str, Path]]) -> Iterator[FakeHub]:
    """Serve these folders on a free port."""
    hub = FakeHub(revisions)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
