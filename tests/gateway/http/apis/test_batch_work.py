"""The work on batches: what stops it, what it waits for, and what is left when it is killed."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from outrider.engine.events import EngineStats, TierStats
from outrider.gateway.contract.errors.tree import NotFoundError
from outrider.gateway.http.apis.batches.leases import BatchLeases, LeaseLostError, LineResult
from outrider.gateway.http.apis.batches.records import BatchRecord
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.ledger.row import LedgerRow
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.http.apis.batch_desk import CHAT, SAYS, Desk, OwnDesk, line, open_desk

ROW = LedgerRow(
    row_id="r1", request_id="1", ended_at=1.0, kind="answer", outcome="answered", tier="large",
    charge_nanos=5,
)  # fmt: skip
FIRST = LineResult(line=1, is_error=False, result='{"custom_id": "q1"}', rows=(ROW,))


@pytest.fixture
def desk(opened: OpenWorld) -> Iterator[OwnDesk]:
    with open_desk(opened) as made:
        yield made


def store_of(desk: OwnDesk) -> BatchStore:
    store = desk.world.context.batches
    assert store is not None
    return store


def leases_of(desk: OwnDesk, owner: str) -> BatchLeases:
    """The leases of another process."""
    tenancy = desk.world.context.tenancy
    return BatchLeases(desk.books.database, tenancy.ledger, tenancy.prices, owner, time.time)


def begun(desk: OwnDesk, *lines: dict[str, Any] | str, **fields: Any) -> BatchRecord:
    """A batch that another process works on, which was killed: its lease ends now."""
    file = desk.upload(*lines)
    key_id = desk.tenant
    now_s = time.time()
    defaults = {
        "id": f"batch_{len(lines):032x}", "tenant": key_id, "key_id": key_id, "endpoint": CHAT,
        "status": "in_progress", "input_file_id": file.id, "created_at": now_s,
        "expires_at": now_s + 100, "output_ttl_s": 1000.0, "num_total": len(lines),
        "owner": "killed", "owned_until": now_s + 1,
    }  # fmt: skip
    record = BatchRecord(**{**defaults, **fields})
    store_of(desk).add_batch(record)
    return record


def rows_in(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(select(tables.ledger.c.row_id)).scalars())


# ---- killed and gone on --------------------------------------------------------------------------


def test_a_batch_goes_on_where_a_killed_process_left_it(desk: OwnDesk) -> None:
    record = begun(desk, line(1), line(2), line(3))
    leases_of(desk, "killed").commit(record.id, FIRST)
    batch = desk.over(record)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 0)
    first, *others = desk.read(batch.output_file_id)
    assert first == {"custom_id": "q1"}, "what was answered is not answered again"
    assert [each["custom_id"] for each in others] == ["q2", "q3"]
    assert len(desk.world.engine.submitted) == 2
    assert len(rows_in(desk.books.database)) == 3


def test_a_process_that_lost_its_lease_stores_and_charges_nothing(desk: OwnDesk) -> None:
    record = begun(desk, line(1), owned_until=time.time() + 100)
    with pytest.raises(LeaseLostError):
        leases_of(desk, "another").commit(record.id, FIRST)
    with pytest.raises(LeaseLostError):
        leases_of(desk, "another").finish(record.id, [], status="completed")
    assert not rows_in(desk.books.database)


def test_a_request_is_stored_and_charged_once(desk: OwnDesk) -> None:
    record = begun(desk, line(1), owned_until=time.time() + 100)
    leases = leases_of(desk, "killed")
    leases.commit(record.id, FIRST)
    again = LineResult(
        line=1, is_error=False, result="{}", rows=(msgspec.structs.replace(ROW, row_id="r2"),)
    )
    with pytest.raises(LeaseLostError):
        leases.commit(record.id, again)
    assert rows_in(desk.books.database) == ["r1"]
    assert list(leases.results(record.id, is_error=False)) == [[FIRST.result]]


# ---- what stops a batch --------------------------------------------------------------------------


def test_a_cancelled_batch_keeps_what_it_has(desk: OwnDesk) -> None:
    desk.world.says(SAYS, gap_s=0.02)
    record = desk.begin(*(line(n) for n in range(30)))
    wait_for(lambda: desk.client.batches.retrieve(record.id).request_counts.completed >= 2)
    assert desk.client.batches.cancel(record.id).status == "cancelling"
    batch = desk.over(record)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    answered, others = desk.read(batch.output_file_id), desk.read(batch.error_file_id)
    assert batch.request_counts.completed == len(answered)
    assert {each["error"]["code"] for each in others} == {"batch_cancelled"}
    names = [each["custom_id"] for each in (*answered, *others)]
    assert sorted(names) == sorted(f"q{n}" for n in range(30))
    assert len(desk.ledger()) == len(answered)
    with pytest.raises(Exception, match="Cannot cancel a batch with status 'cancelled'"):
        desk.client.batches.cancel(record.id)


def test_a_batch_that_is_cancelled_before_it_begins_names_all_its_lines(desk: OwnDesk) -> None:
    batch = desk.over(begun(desk, line(1), "no JSON", line(2), status="cancelling"))
    assert batch.status == "cancelled"
    errors = desk.read(batch.error_file_id)
    assert [each["custom_id"] for each in errors] == ["q1", None, "q2"]


def test_a_batch_ends_with_its_window(desk: OwnDesk) -> None:
    desk.world.engine.current = EngineStats(tiers={"large": TierStats(num_running=1)})
    record = begun(desk, line(1), line(2), expires_at=time.time() + 2)
    batch = desk.over(record)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    errors = desk.read(batch.error_file_id)
    assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 2


def test_a_batch_whose_file_was_taken_away_ends(desk: OwnDesk) -> None:
    record = begun(desk, line(1))
    store_of(desk).path(record.input_file_id).unlink()
    batch = desk.over(record)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "file_not_found")


def test_a_revoked_key_stops_its_batches(desk: OwnDesk) -> None:
    desk.world.says(SAYS, gap_s=0.02)
    other = desk.other()
    record = other.begin(*(line(n) for n in range(30)))
    wait_for(lambda: other.client.batches.retrieve(record.id).request_counts.completed >= 1)
    store = desk.world.context.tenancy.keys.store
    assert store is not None
    store.revoke(other.tenant)
    batches = store_of(desk)
    wait_for(lambda: batches.batch(other.tenant, record.id).status == "failed")
    batch = batches.batch(other.tenant, record.id)
    assert "api_key_revoked" in (batch.errors or "")
    assert batch.num_completed < 30
    assert sum(row["charge_nanos"] > 0 for row in desk.ledger()) == batch.num_completed


def test_a_batch_that_cannot_be_worked_on_lets_the_others_pass(desk: OwnDesk) -> None:
    record = begun(desk, line(1), owned_until=0.0, created_at=0.0)
    path = store_of(desk).path(record.input_file_id)
    path.unlink()
    path.mkdir()
    assert desk.over(desk.begin(line(2))).status == "completed"
    assert desk.client.batches.retrieve(record.id).status == "in_progress"


# ---- what a batch waits for ----------------------------------------------------------------------


def test_a_batch_waits_until_nobody_else_asks(desk: OwnDesk) -> None:
    engine = desk.world.engine
    engine.current = EngineStats(tiers={"small": TierStats(num_waiting=1)})
    record = desk.begin(line(1))
    wait_for(lambda: desk.world.count("outrider_batch_held") == 1)
    assert not engine.submitted
    engine.current = EngineStats()
    assert desk.over(record).status == "completed"


def test_a_batch_may_go_on_beside_others(opened: OpenWorld) -> None:
    with open_desk(opened, batches={"max_other_requests": 1}) as desk:
        desk.world.engine.current = EngineStats(tiers={"large": TierStats(num_running=1)})
        assert desk.over(desk.begin(line(1))).status == "completed"
        (asked,) = desk.world.engine.submitted
        assert asked.objective.is_batch
        assert not asked.objective.is_yielding


def test_requests_wait_for_room_in_their_keys_limits(opened: OpenWorld) -> None:
    limits = LimitSpec(concurrent_requests=1)
    with open_desk(opened, limits=limits) as desk:
        desk.world.says(SAYS, gap_s=0.01)
        batch = desk.over(desk.begin(line(1), line(2)))
        assert batch.request_counts.completed == 2
        assert desk.world.count('outrider_batch_requests_total{outcome="repeated"}') >= 1


def test_what_a_key_may_not_is_an_error_of_its_request(opened: OpenWorld) -> None:
    scopes = Scopes(models=frozenset({"small"}))
    limits = LimitSpec(tokens_per_minute=20)
    with open_desk(opened, scopes=scopes, limits=limits) as desk:
        batch = desk.over(desk.begin(line(1), line(2, model="small")))
        assert batch.status == "completed"
        errors = {each["custom_id"]: each["response"] for each in desk.read(batch.error_file_id)}
        assert errors["q1"]["status_code"] == 403
        assert errors["q2"]["status_code"] == 429
        assert errors["q2"]["body"]["error"]["code"] == "insufficient_quota"
        assert not desk.ledger()


def test_an_engine_that_is_away_is_waited_for(desk: OwnDesk) -> None:
    engine = desk.world.engine
    engine.is_ready = False
    record = desk.begin(line(1))
    wait_for(lambda: desk.world.count('outrider_batch_requests_total{outcome="repeated"}') >= 1)
    engine.is_ready = True
    assert desk.over(record).request_counts.completed == 1


# ---- keeping -------------------------------------------------------------------------------------


def test_what_has_expired_is_deleted(desk: OwnDesk) -> None:
    batch = desk.over(desk.begin(line(1)))
    waiting = desk.upload(line(1))
    store, tenant = store_of(desk), desk.tenant
    left_over = store.folder / f"file-{0:032x}"
    left_over.write_bytes(b"x")
    others = store.folder / "file-of-the-operator"
    others.write_bytes(b"x")
    later = BatchStore(
        store.database, store.folder, store.settings, lambda: time.time() + 32 * 86_400
    )
    assert later.sweep() == 4, "input, output, the file that waits, and nobody's"
    assert [path for path in store.folder.iterdir() if path.is_file()] == [others]
    with pytest.raises(NotFoundError):
        store.batch(tenant, batch.id)
    with pytest.raises(NotFoundError):
        store.file(tenant, waiting.id)


def test_a_tenant_is_erased_with_its_files_and_results(desk: OwnDesk) -> None:
    desk.over(desk.begin(line(1)))
    begun(desk, line(1), line(2), owned_until=time.time() + 100)
    leases_of(desk, "killed").commit(f"batch_{2:032x}", FIRST)
    other = desk.other()
    other.upload(line(1))
    store = store_of(desk)
    assert store.erase(desk.tenant) == 5, "two batches, two inputs and an output"
    assert store.erase(desk.tenant) == 0
    with desk.books.database.read() as connection:
        assert not connection.execute(select(tables.batch_results)).all()
    left = [path for path in store.folder.iterdir() if path.is_file()]
    assert [path.name for path in left] == [each.id for each in other.client.files.list()]


def test_without_keys_everybodys_batches_are_one_tenants(
    open_world: OpenWorld, tmp_path: Any
) -> None:
    url = f"sqlite:///{tmp_path}/open.db"
    with (
        open_world(clouds=(), batches={"enabled": True}, database_url=url) as world,
        Desk(world, "none") as desk,
    ):
        assert desk.over(desk.begin(line(1))).status == "completed"
