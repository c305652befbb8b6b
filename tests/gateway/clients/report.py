"""The table of clients in docs/clients.md."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEAD: Final = "| client | version | what it did | result |\n|---|---|---|---|\n"
_BEGIN: Final = "<!-- clients: begin -->\n"
_END: Final = "<!-- clients: end -->"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One client's line."""

    version: str
    did: str
    result: str = "as expected"


@dataclass(frozen=True)
class Report:
    """Collects rows by the client's name."""

    rows: MutableMapping[str, Row]

    def add(self, client: str, version: str, did: str) -> None:
        """Note a client that did all this as expected; one that fails fails its test."""
        self.rows[client] = Row(version=version, did=did)

    def write(self, page: Path) -> None:
        """Write the rows of this run over those of these clients on the page."""
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(_BEGIN)
        table, _, after = rest.partition(_END)
        lines = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()[2:]}
        for client, row in self.rows.items():
            lines[client] = f"| {client} | {row.version} | {row.did} | {row.result} |"
        body = "".join(f"{line}\n" for _, line in sorted(lines.items()))
        page.write_text(f"{before}{_BEGIN}{_HEAD}{body}{_END}{after}", encoding="utf-8")
