"""The parts of uvicorn and httptools that the gateway rests on beyond what they document.

A release of theirs may rename any of these, so they are named here, all of them:
`tests/gateway/http/edge/test_uvicorn_parts.py` compares the list with the code that uses it, with
the uvicorn that is installed and, in test-long, with the newest one.
"""

import dis
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from types import FunctionType
from typing import Final

KnownParts = Mapping[str, tuple[str, ...]]
"""Names of attributes, methods and parameters by what has them: `module:Class`, or `module`."""

SERVER: Final[KnownParts] = {
    "uvicorn.server:Server": (
        *("capture_signals", "config", "force_exit", "lifespan", "server_state", "serve"),
        *("should_exit", "started", "startup"),
    ),
    "uvicorn.server:ServerState": ("connections", "default_headers", "total_requests"),
    "uvicorn.config:Config": ("http_protocol_class",),
    "uvicorn.lifespan.on:LifespanOn": ("shutdown", "state"),
}
"""What `gateway/wiring/serving.py` needs with any kind of connection."""

CONNECTION: Final[KnownParts] = {
    "httptools": ("HttpParserError", "HttpParserUpgrade", "HttpRequestParser", "parse_url"),
    "httptools:HttpRequestParser": (
        *("feed_data", "get_http_version", "get_method", "should_keep_alive", "should_upgrade"),
    ),
    "uvicorn._types": ("ASGI3Application", "ASGISendEvent", "HTTPResponseStartEvent"),
    "uvicorn.protocols.http.flow_control:FlowControl": (
        *("drain", "pause_reading", "read_paused", "resume_reading", "write_paused"),
    ),
    "uvicorn.protocols.http.httptools_impl": (
        *("HttpToolsProtocol", "RequestResponseCycle", "STATUS_LINE"),
    ),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol": (
        *("_loop", "_start_asgi_task", "_unset_keepalive_if_required", "access_log"),
        *("access_logger", "app", "app_state", "client", "config", "connection_lost"),
        *("connection_made", "connections", "cycle", "data_received", "expect_100_continue"),
        *("flow", "headers", "logger", "loop", "on_body", "on_header", "on_headers_complete"),
        *("on_message_begin", "on_message_complete", "on_response_complete", "parser"),
        *("pause_writing", "pipeline", "resume_writing", "scope", "server_state", "shutdown"),
        *("timeout_keep_alive", "timeout_keep_alive_handler", "timeout_keep_alive_task"),
        *("transport", "url"),
    ),
    "uvicorn.protocols.http.httptools_impl:RequestResponseCycle": (
        *("access_log", "access_logger", "chunked_encoding", "default_headers", "disconnected"),
        *("expect_100_continue", "expected_content_length", "flow", "keep_alive", "logger"),
        *("message_event", "on_response", "response_complete", "response_started"),
        *("scope", "send", "transport", "waiting_for_100_continue"),
    ),
}
"""What the bounded connections need besides."""


def lacking(parts: KnownParts) -> tuple[str, ...]:
    """Return those of the parts that the installed packages lack, as `module:Class.name`."""
    return tuple(f"{place}.{name}" for place in parts for name in _lacking_of(place, parts[place]))


def installed() -> str:
    """Return the installed packages with their versions."""
    return f"uvicorn {version('uvicorn')} with httptools {version('httptools')}"


def _lacking_of(place: str, names: Iterable[str]) -> list[str]:
    """Return the names that are neither in a module or class, nor set or taken by its methods."""
    owner = _found(place)
    missing = set(names).difference(dir(owner) if owner else ())
    for method in _methods_of(owner):
        if method.__name__ == "__init__":
            missing.difference_update(inspect.signature(method).parameters)
        if missing.intersection(method.__code__.co_names):
            missing.difference_update(_set_by(method))
    return sorted(missing)


def _found(place: str) -> object:
    module_name, _, class_name = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    return getattr(module, class_name, None) if class_name else module


def _methods_of(owner: object) -> Iterator[FunctionType]:
    """Yield the methods of a class that are written in Python, inherited ones too."""
    for kind in inspect.getmro(owner) if isinstance(owner, type) else ():
        yield from (one for one in vars(kind).values() if isinstance(one, FunctionType))


def _set_by(method: FunctionType) -> Iterator[str]:
    """Yield the attributes that a method sets."""
    steps = dis.get_instructions(method)
    return (step.argval for step in steps if step.opname == "STORE_ATTR")
