"""Checks of `outrider doctor` on upstream tiers: reachable, key accepted, model listed."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.settings.server_traits import TRAITS
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tools.commands.doctor.findings import Finding, FindingStatus
from outrider.gateway.upstream.credentials.base import Credential, CredentialError, SignedRequest
from outrider.gateway.upstream.dialects import dialect_for
from outrider.gateway.upstream.model_list import model_ids
from outrider.gateway.upstream.transport import Transport
from outrider.gateway.wiring.credentials import build_credential
from outrider.gateway.wiring.upstream import build_transport, tier_complaints

_TIMEOUT_S = 10.0
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """About one replica. `advice` says what to do unless all is well."""

    is_usable: bool
    detail: str
    advice: str = ""


def check_tier(name: str, settings: Settings, environ: Mapping[str, str]) -> Finding:
    """Ask all replicas for their models. What keeps the gateway from starting is a failure.

    So is a tier that cannot be used where there is no model on this machine; else it is a warning.
    """
    title = f"{name} tier"
    options = settings.tiers[name]
    complaints = list(
        tier_complaints(name, options, environ, allow_private=settings.allow_private_upstreams)
    )
    if complaints:
        advice = "Correct the settings or the environment; the gateway does not start like this."
        return Finding(name=title, status="failed", detail="; ".join(complaints), advice=advice)
    if options.model_on_demand is not None:
        detail = f"{options.model_on_demand.checkpoint}, loaded when a request names {name}"
        return Finding(name=title, status="ok", detail=detail)
    transport = build_transport(name, options, allow_private=settings.allow_private_upstreams)
    found = asyncio.run(_examine(name, options, transport, environ))
    return Finding(
        name=title,
        status=_status(found, is_needed=not settings.models.is_any),
        detail="; ".join(finding.detail for finding in found),
        advice=" ".join(dict.fromkeys(finding.advice for finding in found if finding.advice)),
    )


def _status(found: list[_Finding], *, is_needed: bool) -> FindingStatus:
    if not any(finding.advice for finding in found):
        return "ok"
    is_lost = is_needed and not any(finding.is_usable for finding in found)
    return "failed" if is_lost else "warning"


async def _examine(
    name: str, options: UpstreamSettings, transport: Transport, environ: Mapping[str, str]
) -> list[_Finding]:
    """Examine all replicas at once."""
    dialect = dialect_for(TRAITS[options.server].dialect, name)
    headers = {**dialect.headers(None), **options.headers}
    credential = build_credential(name, options, dialect, environ)
    await transport.start()
    try:
        checks = (_ask(name, options, url, transport, headers, credential) for url in options.url)
        return list(await asyncio.gather(*checks))
    finally:
        await transport.close()


async def _ask(
    name: str,
    options: UpstreamSettings,
    url: str,
    transport: Transport,
    headers: Mapping[str, str],
    credential: Credential,
) -> _Finding:
    path = f"{url}/models"
    request = SignedRequest(method="GET", url=path, headers=headers, body=b"")
    try:
        signed = {**headers, **await credential.headers(request)}
        status, body = await transport.get(path, signed, timeout_s=_TIMEOUT_S)
    except CredentialError as error:
        advice = "Correct the way to sign in; see docs/upstream.md."
        return _Finding(is_usable=False, detail=f"{url}: {error}", advice=advice)
    except UpstreamError as error:
        what = str(error).removeprefix(f"The {name} tier ").rstrip(".")
        advice = f"Start the server, or correct tiers.{name}.url."
        return _Finding(is_usable=False, detail=f"{url}: {what}", advice=advice)
    if status in (401, 403):
        return _Finding(
            is_usable=False,
            detail=f"{url} does not accept the key (status {status})",
            advice=_key_advice(name, options),
        )
    if status != 200:
        return _Finding(
            is_usable=status < 500,
            detail=f"{url}/models answers with status {status}",
            advice=f"See whether tiers.{name}.url is the base URL of an API; most end in /v1.",
        )
    return _about_models(name, options, url, model_ids(body))


def _key_advice(name: str, options: UpstreamSettings) -> str:
    if options.sign_in not in (None, "key", "api_key_header"):
        return f"Give the identity of tiers.{name}.sign_in the right to use the model."
    if options.api_key_file is not None or options.api_key_command:
        return f"Have tiers.{name}.api_key_file or api_key_command yield a key that it takes."
    if options.api_key_env is None:
        return f"Name the environment variable with its key in tiers.{name}.api_key_env."
    return f"Put a key that it takes into {options.api_key_env}."


def _about_models(name: str, options: UpstreamSettings, url: str, ids: tuple[str, ...]) -> _Finding:
    listed = ", ".join(ids[:_MAX_NAMED]) + (", ..." if len(ids) > _MAX_NAMED else "")
    setting = f"tiers.{name}.model"
    if options.model is None and not ids:
        detail = f"{url} answers, but lists no models"
        return _Finding(is_usable=True, detail=detail, advice=f"Name one in {setting}.")
    if options.model is None or options.model in ids:
        return _Finding(is_usable=True, detail=f"{url} answers with {options.model or ids[0]}")
    if not ids:
        detail = f"{url} answers; whether it has {options.model} it does not tell"
        return _Finding(is_usable=True, detail=detail)
    return _Finding(
        is_usable=True,
        detail=f"{url} answers, but does not list {options.model}",
        advice=f"Listed are {listed}; name one of them in {setting}.",
    )
