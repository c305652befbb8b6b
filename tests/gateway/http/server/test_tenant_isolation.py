"""Caches reveal nothing of one tenant's texts to another, on the shipped pair.

Where tenants are isolated: nothing. Teams share, and so do all tenants where isolation is off.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder
from tests.laws.accounts import Accounts, accounts, bearer, until

SECRET = "The merger of Alpha and Beta is planned for the ninth of May. " * 3
Tell = dict[str, Any]


@dataclass(frozen=True)
class Tenants(Accounts):
    """A gateway whose tenants are isolated, or not."""

    is_isolated: bool = True


@pytest.fixture(scope="module", params=[True, False], ids=["isolated", "shared"])
def books(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenants]:
    """A gateway whose tenants are isolated, and one whose tenants are not."""
    folder = tmp_path_factory.mktemp("books")
    with accounts(folder, {"isolate_tenants": request.param}) as made:
        yield Tenants(made.gateway, is_isolated=request.param)


def tenants(books: Tenants, name: str) -> dict[str, str]:
    """Two keys of a team, and one without a team."""
    store = books.gateway.context.tenancy.keys.store
    assert store is not None
    team = store.create_team(TeamOrder(name=f"team {name}")).team_id
    keys = {
        who: store.create(KeyOrder(name=who, team_id=team if who != "stranger" else None)).text
        for who in ("owner", "mate", "stranger")
    }
    for key in keys.values():
        until(
            lambda key=key: (  # type: ignore[misc]
                books.gateway.http.get("/v1/models", headers=bearer(key)).status_code == 200
            )
        )
    return keys


def ask(books: Tenants, key: str, path: str = "chat/completions", **fields: Any) -> Tell:
    body = {"model": "large", "temperature": 0, **fields}
    response = books.gateway.http.post(f"/v1/{path}", json=body, headers=bearer(key))
    assert response.status_code == 200, response.text
    told: Tell = response.json()
    return told


def seen(books: Tenants, is_shared: bool) -> bool:
    """Return whether this tenant is to find what the owner left."""
    return is_shared or not books.is_isolated


@pytest.mark.slow_cases
def test_a_prompt_is_in_the_cache_of_its_tenant_only(books: Tenants) -> None:
    keys = tenants(books, "cache")
    messages = [{"role": "user", "content": SECRET + "When is it?"}]

    def cached(who: str) -> int:
        told = ask(books, keys[who], messages=messages, max_tokens=2)
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    first, again = cached("owner"), cached("owner")
    found = {who: cached(who) for who in ("mate", "stranger")}
    assert (first, again > 0) == (0, True)
    assert found["mate"] == again
    assert (found["stranger"] > 0) is seen(books, is_shared=False)
    rows = [row for row in books.rows() if row["key_id"] in {key[3:11] for key in keys.values()}]
    booked = [row["num_cached_tokens"] for row in rows if row["kind"] == "answer"]
    assert booked == [first, again, found["mate"], found["stranger"]]


@pytest.mark.slow_cases
def test_an_answer_is_a_guess_for_its_tenant_only(books: Tenants) -> None:
    """What the large model wrote for one is drafted for the same one again."""
    keys = tenants(books, "drafts")
    messages = [{"role": "user", "content": "Write a poem about a spool of thread."}]

    def accepted(who: str) -> int:
        options = {"sources": ["suffix"]}
        told = ask(books, keys[who], messages=messages, max_tokens=40, outrider=options)
        return int(told["outrider"]["accepted_tokens"])

    first, again = accepted("owner"), accepted("owner")
    assert again > first
    assert accepted("mate") == again
    stranger = accepted("stranger")
    assert (stranger > first) is seen(books, is_shared=False)
    if books.is_isolated:
        assert stranger == first


@pytest.mark.slow_cases
def test_the_tier_of_a_conversation_is_known_to_its_tenant_only(books: Tenants) -> None:
    keys = tenants(books, "turns")
    messages = [{"role": "user", "content": "What is the plan for the ninth of May?"}]
    told = ask(books, keys["owner"], model="auto", messages=messages, max_tokens=8)
    answer = {"role": "assistant", "content": told["choices"][0]["message"]["content"]}
    history = [*messages, answer, {"role": "user", "content": "And then?"}]

    def sticky(who: str) -> str | None:
        found: str | None = ask(books, keys[who], "route", model="auto", messages=history)["sticky"]
        return found

    assert sticky("owner") == told["outrider"]["tier"]
    assert sticky("mate") == sticky("owner")
    assert (sticky("stranger") is not None) is seen(books, is_shared=False)


@pytest.mark.slow_cases
def test_a_cache_has_no_name_that_another_could_give_it(books: Tenants) -> None:
    """Neither `user` nor any cache key of a request opens another's."""
    keys = tenants(books, "names")
    messages = [{"role": "user", "content": SECRET + "Who knows of it?"}]
    names = {"user": "same", "prompt_cache_key": "same", "cache_salt": "same"}
    ask(books, keys["owner"], messages=messages, max_tokens=2, **names)
    told = ask(books, keys["stranger"], messages=messages, max_tokens=2, **names)
    found = told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert found is seen(books, is_shared=False)


@pytest.mark.slow_cases
def test_a_salt_of_its_own_separates_a_tenants_requests(books: Tenants) -> None:
    owner = tenants(books, "salts")["owner"]
    messages = [{"role": "user", "content": "Who salts it? " + SECRET}]

    def cached(salt: str) -> bool:
        told = ask(books, owner, messages=messages, max_tokens=2, cache_salt=salt)
        return bool(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a"), cached("b"), cached(""), cached("a")] == [False, False, False, True]
