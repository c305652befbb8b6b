"""Names that stand twice in a request, as a reader decodes them."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.parsing import refuse_doubled_names

_Members = list[tuple[str, object]]
_NAMES = st.sampled_from(["a", "outrider", "é", "\x00", '"', "ab"])
_MEMBERS = st.lists(st.tuples(_NAMES, st.none() | st.lists(st.just({"a": 1}))), max_size=4)


def refused(body: bytes) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        refuse_doubled_names(body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"n":1,"n":1}', "n"),
        (b'{"n":1,"\\u006e":2}', "n"),
        (b'{"\\u006Fut\\u0072ider":{},"x":[],"outrider":{}}', "outrider"),
        (b'{"outrider":{"privacy":"private","priv\\u0061cy":null}}', "outrider.privacy"),
        (b'{"outrider":{"slo":{"class":"a","class":"b"}}}', "outrider.slo.class"),
        (b'{ "metadata" : {"privacy":"private", "privacy":"no"}}', "metadata.privacy"),
        ("{" + '"é":1, "\\u00e9":1}', "é"),
    ],
)
def test_a_name_that_is_given_twice_is_refused_however_it_is_spelt(
    body: bytes | str, param: str
) -> None:
    error = refused(body if isinstance(body, bytes) else body.encode())
    assert error.param == param
    assert str(error).startswith(f"{param}: this name is given twice")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"messages":[{"role":"user","content":"\\"n\\":1,\\"n\\":1"}],"n":1}',
        b'{"tools":[{"n":1},{"n":1}],"N":1,"n":1}',
        b'{"response_format":{"json_schema":{"n":1}},"n":{"n":{"n":1}}}',
    ],
)
def test_other_names_pass(body: bytes) -> None:
    refuse_doubled_names(body)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"a":NaN}', b"\xff", b'{"\xff":1}', b'{"a":[' * 9999]
)
def test_no_json_is_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_json"


def test_a_long_name_is_not_repeated_whole() -> None:
    name = b'"' + b"x" * 100_000 + b'":1'
    assert len(str(refused(b"{" + name + b"," + name + b"}"))) < 200


def _spelt(members: _Members, *, escapes: bool) -> str:
    """The object's JSON, doubled names included."""
    pairs = (
        f"{_escaped(name) if escapes else json.dumps(name)}:{json.dumps(value)}"
        for name, value in members
    )
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return '"' + "".join(f"\\u{ord(char):04x}" for char in text) + '"'


@given(outer=_MEMBERS, inner=_MEMBERS, escapes=st.booleans())
def test_accepted_bodies_read_the_same_by_first_and_last_value(
    outer: _Members, inner: _Members, escapes: bool
) -> None:
    spelt = _spelt(inner, escapes=escapes)
    body = _spelt([*outer, ("options", "?")], escapes=escapes).replace('"?"', spelt).encode()
    names = [name for name, _ in outer], [name for name, _ in inner]
    if all(len(set(here)) == len(here) for here in names):
        refuse_doubled_names(body)
        assert len(msgspec.json.decode(body)) == len(outer) + 1
    else:
        refused(body)
