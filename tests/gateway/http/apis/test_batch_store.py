"""The rows of files and batches, in every kind of database."""

import contextlib
from pathlib import Path

from outrider.gateway.http.apis.batches.leases import LEASE_S, BatchLeases, LineResult
from outrider.gateway.http.apis.batches.records import BatchRecord, FileRecord
from outrider.gateway.http.apis.batches.store import BatchStore
from outrider.gateway.settings.batches import BatchSettings
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.ledger.book import NullLedger
from outrider.gateway.tenancy.ledger.prices import PriceBook

FILE = FileRecord(
    id="file-1", tenant="t", key_id="k", purpose="batch", filename="f", num_bytes=2,
    created_at=1.0, expires_at=1e9,
)  # fmt: skip
BATCH = BatchRecord(
    id="batch_1", tenant="t", key_id="k", endpoint="/v1/completions", status="validating",
    input_file_id="file-1", created_at=1.0, expires_at=1e9, output_ttl_s=10.0,
)  # fmt: skip


def test_a_batch_goes_through_its_states(database_url: str, tmp_path: Path) -> None:
    now_s = 100.0
    with contextlib.closing(Database(database_url)) as database:
        database.migrate()
        folder = tmp_path / "files"
        store = BatchStore(database, folder, BatchSettings(), lambda: now_s)
        store.make_folder()
        with store.writing() as file:
            file.write(b"{}")
            store.add_file(FILE, file)
        store.add_batch(BATCH)
        prices = PriceBook.free()
        one, other = (
            BatchLeases(database, NullLedger(), prices, owner, lambda: now_s) for owner in "ab"
        )
        one.store_prices()
        other.store_prices()

        assert one.claim(("t",)) is None, "the tenant has another one"
        claimed = one.claim(())
        assert claimed is not None
        assert claimed.owner == "a"
        assert other.claim(()) is None
        one.release("batch_1", 5.0)
        assert other.claim(()) is None, "nobody's turn before that"
        now_s += 6.0
        assert one.claim(()) is not None
        assert set(one.renew()) == {"batch_1"}
        changed = one.update("batch_1", "validating", status="in_progress", num_total=2)
        assert (changed.status, changed.num_total) == ("in_progress", 2)
        assert one.update("batch_1", "validating", num_total=3) == changed
        one.commit("batch_1", LineResult(line=2, is_error=True, result="b"))

        now_s += LEASE_S + 1
        assert store.cancel("t", "batch_1").status == "cancelling"
        assert other.claim(()) is not None
        assert one.renew() == {}
        assert other.done_lines("batch_1") == {2}
        other.commit("batch_1", LineResult(line=1, is_error=False, result="a"))
        assert list(other.results("batch_1", is_error=True)) == [["b"]]
        ended = other.finish("batch_1", [], status="cancelled", cancelled_at=now_s)
        assert (ended.num_completed, ended.num_failed, ended.owner) == (1, 1, None)
        assert other.done_lines("batch_1") == set()
        assert store.batches("t", 1, None) == ([ended], False)
        assert store.batches("t", 1, "batch_1") == ([], False)
        assert store.files("t", "batch", 5, None, is_rising=True)[0] == [FILE]
        now_s += 1e9
        assert store.sweep() == 1
        assert not list(folder.glob("file-*"))
