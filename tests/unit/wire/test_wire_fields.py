from __future__ import annotations

import json
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.wire import anthropic_request, openai_chat_request, openai_responses_request
from clawhpc.wire.base import FieldRefused, WireProtocol
from clawhpc.wire.fields import (
    MAX_NAME,
    MAX_UNLISTED,
    NOTHING_FOUND,
    FieldTable,
    FieldUse,
    honoured,
    ignored,
    merge_findings,
    overridden,
    refused,
    rendered,
)
from clawhpc.wire.openai_responses_tools import ResponsesTool
from clawhpc.wire.protocols import PROTOCOLS

TABLE = FieldTable(
    rendered("words", "messages", "messages[].content[].text"),
    honoured("length", "max_tokens"),
    overridden("drawn by us", "temperature"),
    overridden("drawn by us", "top_p", asks_nothing=(1,)),
    ignored("a mark", "messages[].content[].mark"),
    refused("one only", "n", asks_nothing=(1,)),
)


def test_what_is_listed_and_what_lies_below_it_is_no_finding() -> None:
    value = {"messages": [{"content": [{"text": {"a": 1}, "mark": [{"b": 2}]}]}], "max_tokens": 3}
    assert TABLE.inspect(value) is NOTHING_FOUND


def test_an_unlisted_field_is_named_by_its_path_once() -> None:
    value = {"x": 1, "messages": [{"role": "a", "content": [{"y": 1}, {"y": 2}]}, {"role": "b", "content": "text"}]}
    assert TABLE.inspect(value).unlisted == ("x", "messages[].role", "messages[].content[].y")


def test_a_piece_is_held_against_the_table_at_its_place() -> None:
    assert TABLE.inspect({"content": [{"y": 1}]}, "messages[]").unlisted == ("messages[].content[].y",)


@pytest.mark.parametrize(
    ("value", "overridden_paths", "refused_paths"),
    [
        ({"temperature": 0}, ("temperature",), ()),
        ({"temperature": None, "top_p": 1.0, "n": 1}, (), ()),
        ({"top_p": 0.9, "n": 2}, ("top_p",), ("n",)),
        ({"n": []}, (), ()),
    ],
)
def test_only_values_that_ask_for_something_are_counted_or_refused(
    value: dict[str, Any], overridden_paths: tuple[str, ...], refused_paths: tuple[str, ...]
) -> None:
    found = TABLE.inspect(value)
    assert found.overridden == overridden_paths
    assert tuple(row.path for row in found.refused) == refused_paths


def test_findings_are_merged_in_order_each_path_once() -> None:
    first, second = TABLE.inspect({"x": 1, "temperature": 0}), TABLE.inspect({"y": 1, "x": 2, "n": 5})
    merged = merge_findings([NOTHING_FOUND, first, second])
    assert merged.unlisted == ("x", "y")
    assert merged.overridden == ("temperature",)
    assert [row.path for row in merged.refused] == ["n"]
    assert merge_findings([NOTHING_FOUND]) is NOTHING_FOUND


def test_a_field_cannot_be_listed_twice() -> None:
    with pytest.raises(ValueError, match="a is listed twice"):
        FieldTable(rendered("one", "a"), ignored("two", "a"))


def test_no_record_grows_with_what_nobody_understands() -> None:
    found = TABLE.inspect({f"{index}" * 200: 1 for index in range(1000)})
    assert len(found.unlisted) <= MAX_UNLISTED
    assert max(map(len, found.unlisted)) <= MAX_NAME
    many = merge_findings(TABLE.inspect({f"{index}": 1}) for index in range(1000))
    assert len(many.unlisted) == MAX_UNLISTED


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["messages", "content", "n", "z"]), inner)
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_json_can_be_held_against_a_table(value: Any) -> None:
    found = TABLE.inspect(value)
    assert len(set(found.unlisted)) == len(found.unlisted)
    assert all(not TABLE.lists(path) for path in found.unlisted)


# What a protocol reads, its table lists; and a table says of nothing that it is rendered which nobody reads.


def paths_of(kind: Any, at: str) -> set[str]:
    """The paths of every field that is read into `kind`, with those of the types below it."""
    if at.count("[]") > 3:
        return set()  # a namespace of tools holds tools
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        names = {at_name(kind, at)} if kind.__struct_config__.tag is not None else set()
        for name, inner in get_type_hints(kind).items():
            path = f"{at}.{name}" if at else name
            names |= {path} | paths_of(inner, path)
        return names
    if get_origin(kind) is list:
        return paths_of(get_args(kind)[0], f"{at}[]")
    return {path for inner in get_args(kind) if get_origin(kind) is not dict for path in paths_of(inner, at)}


def at_name(kind: type[msgspec.Struct], at: str) -> str:
    return f"{at}.{kind.__struct_config__.tag_field}"


READ = {
    "anthropic": (
        (anthropic_request._Request, ""),
        (str | list[anthropic_request._Text] | None, "system"),
        (anthropic_request._System | anthropic_request._User | anthropic_request._Assistant, "messages[]"),
        (list[anthropic_request._Tool] | None, "tools"),
    ),
    "openai_chat": (
        (openai_chat_request._Request, ""),
        (openai_chat_request._Message, "messages[]"),
        (list[openai_chat_request._Tool] | None, "tools"),
    ),
    "openai_responses": (
        (openai_responses_request._Request, ""),
        (openai_responses_request._Item, "input[]"),
        (list[ResponsesTool] | None, "tools"),
    ),
}


NESTED = "tools[].tools[].tools"
"""A namespace in a namespace: refused as a whole."""
IN_READ = pytest.mark.parametrize(
    "protocol", [p for p in PROTOCOLS if p.name in READ], ids=lambda protocol: protocol.name
)


@IN_READ
def test_every_field_that_is_read_is_listed(protocol: WireProtocol) -> None:
    read = {path for kind, at in READ[protocol.name] for path in paths_of(kind, at)}
    unlisted = {path for path in read if not protocol.fields.lists(path)}
    assert {path for path in unlisted if not path.startswith(NESTED)} == set()


@IN_READ
def test_every_field_that_is_said_to_be_rendered_or_honoured_is_read(protocol: WireProtocol) -> None:
    read = {path for kind, at in READ[protocol.name] for path in paths_of(kind, at)}
    used = {row.path for row in protocol.fields.fields if row.use in (FieldUse.RENDERED, FieldUse.HONOURED)}
    assert used - read == set()


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_every_refused_field_is_refused_by_its_name(protocol: WireProtocol) -> None:
    for row in protocol.fields.fields:
        if row.use is FieldUse.REFUSED:
            value = example(row.path)
            assert [found.path for found in protocol.fields.inspect(value).refused] == [row.path]
            status, body = protocol.error_body(FieldRefused(row.path, row.why))
            assert status == 400
            assert row.path in json.dumps(body)


def example(path: str) -> Any:
    """JSON that has something nobody has heard of at `path`."""
    head, _, rest = path.partition(".")
    inner: Any = example(rest) if rest else "something unheard of"
    while head.endswith("[]"):
        head, inner = head[:-2], [inner]
    return {head: inner}
