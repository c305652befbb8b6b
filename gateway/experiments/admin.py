"""The endpoints of /admin/experiments."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.contract.errors.tree import BadRequestError, StorageError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.experiments.admin_routes import MAX_VERSION
from outrider.gateway.experiments.admin_schema import (
    ExperimentCreate,
    ExperimentUpdate,
    experiment_detail,
    experiment_report,
)
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.experiments.records import ExperimentRecord
from outrider.gateway.experiments.rows import spec_document
from outrider.gateway.settings.experiments import ExperimentSpec
from outrider.gateway.settings.extras import MissingExtraError, need_extra
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.workers.siblings import Siblings

logger = logging.getLogger(__name__)

Parsed = TypeVar("Parsed", bound=BaseModel)

_NOT_SPEC: Final = frozenset({"share", "state"})


async def _anything(spec: ExperimentSpec) -> None:
    """Accept every arm."""
    del spec


class ExperimentApi:
    """Handlers of authenticated requests. Each refuses principals without the admin scope.

    They raise GatewayErrors: AuthenticationError, PermissionDeniedError, NotFoundError,
    ConflictError, BadRequestError, StorageError.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        experiments: Experiments,
        read_body: Callable[[Request], Awaitable[bytes]],
        check: Callable[[ExperimentSpec], Awaitable[None]] = _anything,
        siblings: Siblings | None = None,
    ) -> None:
        """Store the arguments. `read_body` reads a JSON body, within the limits of all bodies.

        `check` raises ConflictError for arms that this gateway cannot serve, before they run.
        `siblings`: its other processes, which read changed experiments at once, too.
        """
        self._siblings = siblings
        self._check = check
        self._authenticator = authenticator
        self._experiments = experiments
        self._store = experiments.store
        self._read_body = read_body

    async def list_experiments(self, _: Request, principal: Principal) -> Response:
        """Return all experiments."""
        self._authenticator.require_admin(principal)
        table = await asyncio.to_thread(self._store.load)
        data = [experiment_report(record) for record in table.experiments.values()]
        return _json({"object": "list", "data": data})

    async def create_experiment(self, request: Request, principal: Principal) -> Response:
        """Make an experiment, and let it run where that is wanted."""
        self._authenticator.require_admin(principal)
        try:
            need_extra("experiments", "Evaluating an experiment")
        except MissingExtraError as error:
            raise BadRequestError(str(error)) from None
        body = await self._read_body(request)
        wanted = _parsed(ExperimentCreate, body)
        _refuse_twins(body)
        if wanted.start:
            await self._check(wanted.spec())

        def create() -> ExperimentRecord:
            record = self._store.create(wanted.name, wanted.spec(), share=wanted.share)
            if not wanted.start:
                return record
            try:
                return self._store.start(wanted.name)
            except Exception:
                self._store.delete(wanted.name)  # or the request could not be sent again
                raise

        record = await self._change(create)
        logger.info("experiment created name=%s by=%s", record.name, principal.key_id)
        return _json(experiment_report(record))

    async def get_experiment(self, request: Request, principal: Principal) -> Response:
        """Return one experiment, its versions, and its changes."""
        self._authenticator.require_admin(principal)
        name = request.path_params["experiment"]

        def detail() -> dict[str, Any]:
            record = self._store.get(name)
            return experiment_detail(record, self._store.versions(name), self._store.events(name))

        return _json(await asyncio.to_thread(detail))

    async def update_experiment(self, request: Request, principal: Principal) -> Response:
        """Edit, ramp, start or stop: all requested changes together or none."""
        self._authenticator.require_admin(principal)
        name = request.path_params["experiment"]
        body = await self._read_body(request)
        wanted = _parsed(ExperimentUpdate, body)
        _refuse_twins(body)
        given = wanted.model_fields_set
        before = await asyncio.to_thread(self._store.get, name)
        spec = _edited(before, wanted, given - _NOT_SPEC)
        will_run = before.is_running if wanted.state is None else wanted.state == "running"
        if will_run and (spec is not None or not before.is_running):
            await self._check(spec or before.spec)

        def update() -> ExperimentRecord:
            return self._store.update(
                name,
                spec=_edited(self._store.get(name), wanted, given - _NOT_SPEC),
                share=wanted.share if "share" in given else None,
                state=wanted.state if "state" in given else None,
            )

        record = await self._change(update)
        logger.info(
            "experiment changed name=%s version=%d by=%s", name, record.version, principal.key_id
        )
        return _json(experiment_report(record))

    async def delete_experiment(self, request: Request, principal: Principal) -> Response:
        """Forget an experiment that does not run, with its data."""
        self._authenticator.require_admin(principal)
        name = request.path_params["experiment"]
        await self._experiments.delete(name)
        await self._look_again()
        logger.info("experiment deleted name=%s by=%s", name, principal.key_id)
        return _json({"object": "experiment", "name": name, "deleted": True})

    async def start_experiment(self, request: Request, principal: Principal) -> Response:
        """Let it run."""
        self._authenticator.require_admin(principal)
        name = request.path_params["experiment"]
        before = await asyncio.to_thread(self._store.get, name)
        if not before.is_running:
            await self._check(before.spec)
        record = await self._change(lambda: self._store.start(name))
        logger.info("experiment started name=%s by=%s", name, principal.key_id)
        return _json(experiment_report(record))

    async def stop_experiment(self, request: Request, principal: Principal) -> Response:
        """Let it run no more."""
        self._authenticator.require_admin(principal)
        name = request.path_params["experiment"]
        record = await self._change(lambda: self._store.stop(name))
        logger.info("experiment stopped name=%s by=%s", name, principal.key_id)
        return _json(experiment_report(record))

    async def report_experiment(self, request: Request, principal: Principal) -> Response:
        """Return the experiment's present report."""
        self._authenticator.require_admin(principal)
        name = request.path_params["experiment"]
        version = _version(request.query_params.get("version"))
        analysis = await self._experiments.report(name, version)
        return _json(analysis.document())

    async def _change(self, change: Callable[[], ExperimentRecord]) -> ExperimentRecord:
        """Change it and refresh the registry at once, so that the answer shows the new state."""
        record = await asyncio.to_thread(change)
        await self._look_again()
        return record

    async def _look_again(self) -> None:
        await self.read_again()
        if self._siblings is not None:
            await self._siblings.others("read_experiments")

    async def read_again(self, _: object = None) -> None:
        """Read the experiments again now, if the database lets us."""
        try:
            await self._experiments.registry.refresh()
        except StorageError:  # it is changed; the registry reads it later
            logger.warning("experiments were changed and could not be read again")


def _parsed(model: type[Parsed], body: bytes) -> Parsed:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error, body) from None


def _edited(
    record: ExperimentRecord, wanted: BaseModel, given: frozenset[str] | set[str]
) -> ExperimentSpec | None:
    """Return the experiment with the given fields; None for none. Raises BadRequestError."""
    if not given:
        return None
    changes = wanted.model_dump(mode="json", include=set(given), by_alias=True)
    body = json.dumps(spec_document(record.spec) | changes).encode()
    return _parsed(ExperimentSpec, body)


def _refuse_twins(body: bytes) -> None:
    """Raise BadRequestError where a name is there twice, as two arms: the last would win."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twin = next((name for name in names if names.count(name) > 1), None)
        if twin is not None:
            raise BadRequestError(f"{twin[:64]}: this field occurs twice.", param=twin[:64])
        return dict(pairs)

    json.loads(body, object_pairs_hook=check)


def _version(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:11]) <= MAX_VERSION:
        raise BadRequestError("version must be a whole number of at least 1.", param="version")
    return int(text)


def _json(content: dict[str, Any]) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")
