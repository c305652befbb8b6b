"""One owner's extents and named prompts are erased, and nobody else's."""

from dataclasses import replace
from pathlib import Path

from outrider.engine.cache.block_pool import owner_tag
from outrider.engine.cache.extent_erasing import erase_named_prompts, erase_owners
from outrider.engine.cache.extent_space import stored_extents
from outrider.engine.cache.extents import Extent
from outrider.engine.cache.pin_files import read_pins, write_pin
from outrider.engine.cache.sealing import Seal
from outrider.engine.request import Pin
from tests.engine.cache.test_extent_folder import ABOUT, chain, extent_of, folder_of
from tests.engines import make_request
from tests.stores import KEY


def owned(text: int, owner: str) -> Extent:
    extent = extent_of(chain(text), 0, 4)
    return Extent(header=replace(extent.header, owner=owner), payload=extent.payload)


def test_the_extents_of_an_owner_are_erased(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "kv")
    space = folder.space(ABOUT)
    mine, others = owner_tag("mine"), owner_tag("others")
    assert owner_tag("mine:17:digest") == mine != others  # a head's text
    for text, owner in enumerate((mine, others, mine, "", others)):
        assert folder.write(space, owned(text, owner))
    (space.folder / "b-0-aaaaaaaa.kv").write_bytes(b"sealed with another key")
    assert erase_owners(folder, Seal(KEY), {mine}) == 3  # and the one of nobody known
    left = [each for each in stored_extents(space.folder) if each.num_bytes > 100]
    assert {space.read(each).header.owner for each in left} == {others}
    assert len(left) == 2


def test_the_named_prompts_of_a_tenant_are_erased(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "kv")
    space = folder.space(ABOUT)
    for number, tenant in enumerate(("mine", "others")):
        request = make_request(str(number), [1, 2, 3])
        pinned = replace(request, tenant=tenant, pin=Pin(name="rules", ttl_s=1e9))
        write_pin(space, pinned, chain(number), 4e9)
    assert erase_named_prompts(folder, "mine") == 1
    assert [request.tenant for request in read_pins(space, 2e9)] == ["others"]
