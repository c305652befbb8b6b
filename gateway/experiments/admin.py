"""The endpoints of /admin/experiments."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pydantic import BaseModel
from starlette.requests import Request

from outrider.gateway.contract.errors.tree import BadRequestError, StorageError
from outrider.gateway.experiments.admin_schema import (
    DeletedExperiment,
    ExperimentAnalysis,
    ExperimentCreate,
    ExperimentDetail,
    ExperimentList,
    ExperimentReport,
    ExperimentUpdate,
    experiment_detail,
    experiment_report,
)
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.experiments.records import ExperimentRecord
from outrider.gateway.experiments.rows import spec_document
from outrider.gateway.settings.experiments import ExperimentSpec
from outrider.gateway.settings.extras import MissingExtraError, need_extra
from outrider.gateway.tenancy.keys.admin_handlers import (
    AdminCall,
    AdminHandlers,
    AdminQuery,
    admin,
    parsed,
)
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.workers.siblings import Siblings

logger = logging.getLogger(__name__)

_EVERY: Final = "/admin/experiments"
_ONE: Final = "/admin/experiments/{experiment}"
_VERSION: Final = AdminQuery(
    name="version", description="Which version; the newest where it is absent.", most=2**31 - 1
)
_NOT_SPEC: Final = frozenset({"share", "state"})


async def _anything(spec: ExperimentSpec) -> None:
    """Accept every arm."""
    del spec


class ExperimentApi(AdminHandlers):
    """Handlers of experiments."""

    def __init__(
        self,
        authenticator: Authenticator,
        experiments: Experiments,
        read_body: Callable[[Request], Awaitable[bytes]],
        check: Callable[[ExperimentSpec], Awaitable[None]] = _anything,
        siblings: Siblings | None = None,
    ) -> None:
        """`check` raises ConflictError for arms that this gateway cannot serve, before they run.

        `siblings`: its other processes, which read changed experiments at once, too.
        """
        super().__init__(authenticator, read_body)
        self._siblings = siblings
        self._check = check
        self._experiments = experiments
        self._store = experiments.store

    @admin("GET", _EVERY, "All experiments.")
    async def list_experiments(self, _: AdminCall) -> ExperimentList:
        """Return all experiments."""
        table = await asyncio.to_thread(self._store.load)
        return ExperimentList(data=[*map(experiment_report, table.experiments.values())])

    @admin("POST", _EVERY, "The experiment.", conflicts=True)
    async def create_experiment(
        self, call: AdminCall, wanted: ExperimentCreate
    ) -> ExperimentReport:
        """Make an experiment, and let it run where that is wanted."""
        try:
            need_extra("experiments", "Evaluating an experiment")
        except MissingExtraError as error:
            raise BadRequestError(str(error)) from None
        _refuse_twins(call.body)
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
        logger.info("experiment created name=%s by=%s", record.name, call.by)
        return experiment_report(record)

    @admin("GET", _ONE, "The experiment, its versions and its history.")
    async def get_experiment(self, call: AdminCall) -> ExperimentDetail:
        """Return one experiment, its versions, and its changes."""
        name = call.name("experiment")

        def detail() -> ExperimentDetail:
            record = self._store.get(name)
            return experiment_detail(record, self._store.versions(name), self._store.events(name))

        return await asyncio.to_thread(detail)

    @admin("PATCH", _ONE, "The experiment as it is now.", conflicts=True)
    async def update_experiment(
        self, call: AdminCall, wanted: ExperimentUpdate
    ) -> ExperimentReport:
        """Edit, ramp, start or stop: all requested changes together or none."""
        name, given = call.name("experiment"), wanted.model_fields_set
        _refuse_twins(call.body)
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
        logger.info("experiment changed name=%s version=%d by=%s", name, record.version, call.by)
        return experiment_report(record)

    @admin("DELETE", _ONE, "It is forgotten.", conflicts=True)
    async def delete_experiment(self, call: AdminCall) -> DeletedExperiment:
        """Forget an experiment that does not run, with its data."""
        name = call.name("experiment")
        await self._experiments.delete(name)
        await self._look_again()
        logger.info("experiment deleted name=%s by=%s", name, call.by)
        return DeletedExperiment(name=name)

    @admin("POST", f"{_ONE}/start", "The experiment as it is now.", conflicts=True)
    async def start_experiment(self, call: AdminCall) -> ExperimentReport:
        """Let it run."""
        name = call.name("experiment")
        before = await asyncio.to_thread(self._store.get, name)
        if not before.is_running:
            await self._check(before.spec)
        record = await self._change(lambda: self._store.start(name))
        logger.info("experiment started name=%s by=%s", name, call.by)
        return experiment_report(record)

    @admin("POST", f"{_ONE}/stop", "The experiment as it is now.", conflicts=True)
    async def stop_experiment(self, call: AdminCall) -> ExperimentReport:
        """Let it run no more."""
        name = call.name("experiment")
        record = await self._change(lambda: self._store.stop(name))
        logger.info("experiment stopped name=%s by=%s", name, call.by)
        return experiment_report(record)

    @admin(
        "GET",
        f"{_ONE}/report",
        "The conclusions so far.",
        queries=(_VERSION,),
        answer=ExperimentAnalysis,
    )
    async def report_experiment(self, call: AdminCall) -> dict[str, Any]:
        """Return the experiment's present report."""
        name, version = call.name("experiment"), call.number(_VERSION)
        return (await self._experiments.report(name, version)).document()

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


def _edited(
    record: ExperimentRecord, wanted: BaseModel, given: frozenset[str] | set[str]
) -> ExperimentSpec | None:
    """Return the experiment with the given fields; None for none. Raises BadRequestError."""
    if not given:
        return None
    changes = wanted.model_dump(mode="json", include=set(given), by_alias=True)
    body = json.dumps(spec_document(record.spec) | changes).encode()
    return parsed(ExperimentSpec, body)


def _refuse_twins(body: bytes) -> None:
    """Raise BadRequestError where a name is there twice, as two arms: the last would win."""

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twin = next((name for name in names if names.count(name) > 1), None)
        if twin is not None:
            raise BadRequestError(f"{twin[:64]}: this field occurs twice.", param=twin[:64])
        return dict(pairs)

    json.loads(body, object_pairs_hook=check)
