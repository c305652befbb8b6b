import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.conversations import ConversationDigest, ConversationMemory, Turn, is_tool_loop

TURN = Turn(tier="small", num_tokens=5, at_s=1.0)
MESSAGE = st.tuples(
    st.sampled_from(["user", "assistant", "tool", "system"]),
    st.text(max_size=8),
    st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=2),
)


def digest_of(memory: ConversationMemory, messages: list[tuple[str, str]]) -> ConversationDigest:
    digest = memory.digest()
    for role, text in messages:
        digest.add(role, text)
    return digest


@given(st.lists(MESSAGE, max_size=4), st.lists(MESSAGE, max_size=4))
def test_equal_digests_mean_equal_messages(
    one: list[tuple[str, str, list[tuple[str, str]]]],
    other: list[tuple[str, str, list[tuple[str, str]]]],
) -> None:
    memory = ConversationMemory(key=b"k")

    def value(messages: list[tuple[str, str, list[tuple[str, str]]]]) -> bytes:
        digest = memory.digest()
        for role, text, calls in messages:
            digest.add(role, text, calls)
        return digest.value()

    def plain(messages: list[tuple[str, str, list[tuple[str, str]]]]) -> object:
        return [
            (role, text.strip(), [(name, arguments.strip()) for name, arguments in calls])
            for role, text, calls in messages
        ]

    assert (value(one) == value(other)) == (plain(one) == plain(other))


def test_parts_do_not_run_together() -> None:
    memory = ConversationMemory()
    assert digest_of(memory, [("user", "ab"), ("user", "c")]).value() != (
        digest_of(memory, [("user", "a"), ("user", "bc")]).value()
    )
    calls = memory.digest()
    calls.add("assistant", "", [("f", "{}")])
    bare = memory.digest()
    bare.add("assistant", "f{}")
    assert calls.value() != bare.value()


def test_a_copy_goes_on_alone() -> None:
    memory = ConversationMemory()
    first = digest_of(memory, [("user", "x")])
    twin = first.copy()
    assert twin.value() == first.value()
    twin.add("assistant", "y")
    assert twin.value() != first.value()
    assert twin.value() == digest_of(memory, [("user", "x"), ("assistant", "y")]).value()


def test_the_key_keeps_digests_apart() -> None:
    digests = {digest_of(ConversationMemory(), [("user", "x")]).value() for _ in range(3)}
    assert len(digests) == 3


def test_the_least_recently_used_turn_is_forgotten() -> None:
    memory = ConversationMemory(2)
    first, second, third = (digest_of(memory, [("user", text)]) for text in "abc")
    memory.remember(first, TURN)
    memory.remember(second, TURN)
    assert memory.recall(first) == TURN  # and so it is the latest now
    memory.remember(third, TURN)
    assert memory.recall(second) is None
    assert memory.recall(first) == TURN
    assert len(memory) == 2
    with pytest.raises(ValueError, match="capacity=0"):
        ConversationMemory(0)


def test_lone_surrogates_are_text_too() -> None:
    memory = ConversationMemory()
    memory.remember(digest_of(memory, [("user", "\ud800")]), TURN)
    assert memory.recall(digest_of(memory, [("user", "\ud800")])) == TURN


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([], False),
        (["user"], False),
        (["user", "call"], False),
        (["user", "call", "tool"], True),
        (["user", "call", "tool", "tool", "user"], True),
        (["user", "call", "tool", "assistant"], False),
        (["user", "call", "tool", "assistant", "user"], False),
        (["user", "call", "tool", "call"], False),
        (["user", "call", "tool", "call", "tool"], True),
        (["user", "tool"], False),
        (["user", "assistant", "tool"], False),
    ],
)
def test_tool_loops(roles: list[str], expected: bool) -> None:
    messages = [("assistant" if role == "call" else role, role == "call") for role in roles]
    assert is_tool_loop(messages) is expected
