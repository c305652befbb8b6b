"""A gateway with keys, limits and a ledger over a mock engine, for bench_tenants.

python -m benchmarks.shared.tenant_server --port 8123 --set database_url=sqlite:////tmp/o.db
"""

import argparse
from collections.abc import Sequence
from unittest.mock import patch

from benchmarks.shared.mock_engine import MockEngine
from outrider.gateway.http.server.listening import listen
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.telemetry.logs import configure_logging
from outrider.gateway.wiring.serving import GatewayRun
from outrider.gateway.wiring.until_signalled import serve_until_signalled


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal says otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--context", type=int, default=8192, help="tokens that a model takes")
    arguments = parser.parse_args(argv)
    flags = dict(assignment.split("=", 1) for assignment in arguments.set)
    settings = load_settings(flags=flags, environ={})
    configure_logging("WARNING", "text")
    engine = MockEngine(max_context=arguments.context)
    with patch("outrider.gateway.wiring.serving.build_client", lambda *_: engine):
        serve_until_signalled(GatewayRun(settings, listen("127.0.0.1", arguments.port)))


if __name__ == "__main__":
    main()
